"""Damaged images and rare classes on a real Ray cluster: bad rows are skipped, listed and counted, and the result is
the same for any number of workers.
"""

from __future__ import annotations

import io
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ray_app import run_training
from ray_app.config.config import Config
from ray_app.errors import BadRowError
from tests.support.cluster import record_of
from tests.support.encoded_images import png

pytestmark = pytest.mark.usefixtures("ray_cluster")
DAMAGED_ROWS = [0, 21]
"""A file with truncated image data, which ends the process in some decoders, and a file that is not an image."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 PNG images in two files, ten of them of class 1, and two damaged."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    files = []
    for _ in range(40):
        file = io.BytesIO()
        Image.fromarray(random.integers(0, 255, (10, 12, 3), dtype=np.uint8)).save(file, "png")
        files.append(file.getvalue())
    short = png((12, 10, 8, 2, 0, 0, 0), zlib.compress(bytes(range(37)) * 4))
    files[DAMAGED_ROWS[0]], files[DAMAGED_ROWS[1]] = short, b"no image"
    table = pa.table({"image": pa.array(files, pa.binary()), "label": [int(i % 4 == 0) for i in range(40)]})
    for part in range(2):
        pq.write_table(table.slice(20 * part, 20), folder / f"part-{part}.parquet", row_group_size=10)
    return folder


def config_of(tmp_path: Path, images: Path, name: str, workers: int, **fields: Any) -> Config:
    return Config().replace(
        task={
            "class_path": "ray_app.task.image.ImageClassification",
            "init_args": {"size": 8, "model_args": {"channels": 4}},
        },
        run__storage_path=str(tmp_path / "runs"),
        run__name=name,
        scaling__logical_workers=2,
        scaling__min_workers=workers,
        scaling__max_workers=workers,
        data__path=str(images),
        data__global_batch_size=12,
        data__balance_by="label",
        tracking__enabled=False,
        **fields,
    )


def test_damaged_images_are_skipped_listed_and_counted(
    tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BadRowError, match=r"part-0.parquet, row group 0, row 0: "):
        run_training(config_of(tmp_path, images, "refused", 1))
    results = {}
    for workers, cache in ((1, "memory"), (2, "none")):
        name = f"run-{workers}"
        summary = run_training(
            config_of(tmp_path, images, name, workers, data__cache=cache, data__on_bad_row="skip")
        ).summary
        assert summary["status"] == "finished"
        assert summary["bad_rows"]["distinct"] == 2
        assert summary["rows"] + summary["bad_rows"]["skipped"] == 2 * 30, (
            "each class must be used as often as the larger one has rows"
        )
        listed = [json.loads(file.read_bytes()) for file in sorted((tmp_path / "runs" / name / "bad_rows").iterdir())]
        assert [(entry["position"], entry["path"], entry["row_group"], entry["row"]) for entry in listed] == [
            (0, "part-0.parquet", 0, 0),
            (21, "part-1.parquet", 0, 1),
        ]
        assert all(entry["reason"] for entry in listed)
        results[name] = summary["params_digest"], record_of(tmp_path / "runs" / name)
    assert results["run-1"] == results["run-2"]
    assert capsys.readouterr().out.count("each of 2 classes is used 30 times") == 2
