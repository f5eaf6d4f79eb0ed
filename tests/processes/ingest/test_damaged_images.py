"""Hundreds of damaged images are decoded in another process, since image libraries have crashed processes."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ray_app import run_training
from ray_app.config.config import Config
from ray_app.errors import BadRowError, DataError
from tests.support.encoded_images import damaged_files, encode, png, smooth_pixels
from tests.support.paths import ROOT

MEMORY_BYTES = 8 << 30


def decode_all() -> str:
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.encoded_images"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES)),
    )
    assert done.returncode == 0, f"{done.stdout.splitlines()[-1:]} {done.stderr}"
    return done.stdout


@pytest.mark.rest
def test_damaged_images_are_refused_reproducibly_without_a_crash() -> None:
    printed = decode_all()
    *lines, last = printed.splitlines()
    assert last == "done"
    assert len(lines) == 2 * sum(1 for _ in damaged_files(per_kind=8)) > 1000
    refused = [line for line in lines if re.search(r": refused: \S", line)]
    assert all(re.search(r": \(\d+, \d+(, \d+)*\)$", line) for line in lines if line not in refused)
    assert len(refused) > len(lines) / 2
    assert printed == decode_all(), "the reasons differ between two runs: they hold addresses, or the files differ"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A short run with `single`, which decodes in its process; the image data of the PNG file in row 3 is truncated."""
    images = [encode(Image.fromarray(smooth_pixels(8, 8, seed=row)), "png") for row in range(8)]
    images[3] = png((8, 8, 8, 0, 0, 0, 0), zlib.compress(bytes(9) * 3))
    (tmp_path / "data").mkdir()
    pq.write_table(
        pa.table({"image": pa.array(images, pa.binary()), "label": [0, 1] * 4}), tmp_path / "data" / "part-0.parquet"
    )
    return Config().replace(
        task={
            "class_path": "ray_app.task.image.ImageClassification",
            "init_args": {"size": 8, "model_args": {"channels": 2}},
        },
        run__storage_path=str(tmp_path / "runs"),
        run__name="short",
        scaling__max_workers=1,
        scaling__logical_workers=1,
        data__path=str(tmp_path / "data"),
        data__global_batch_size=4,
        train__strategy="single",
        train__epochs=1,
        tracking__enabled=False,
    )


def test_a_truncated_png_is_a_bad_row_of_training(config: Config, tmp_path: Path) -> None:
    with pytest.raises((BadRowError, DataError), match=r"part-0.parquet, row group 0, row 3: the image data ends"):
        run_training(config)
    summary = run_training(config.replace(run__name="skipped", data__on_bad_row="skip")).summary
    assert (summary["status"], summary["rows"], summary["bad_rows"]) == ("finished", 7, {"skipped": 1, "distinct": 1})
