"""How well training mixes sorted data, and what it reads for that, by the plan: no timing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from ray_app.data.dataset.dataset import open_dataset
from ray_app.ingest import mixing
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.plan.order import Plan

CLASSES, BATCH, WINDOW = 100, 256, 10_000


@pytest.fixture(scope="module")
def sorted_by_class(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 classes of 300 rows, one after the other, as ingest writes them."""
    folder = tmp_path_factory.mktemp("sorted")
    np.savez(folder / "d.npz", x=np.arange(30_000) % 251, y=np.repeat(np.arange(CLASSES), 300))
    ingest(IngestOptions("numpy", str(folder / "out"), str(folder / "d.npz"), rename={"features": "n"}))
    return folder / "out"


def test_batches_of_sorted_data_have_nearly_all_classes(sorted_by_class: Path) -> None:
    labels = pq.read_table(sorted_by_class / "part-00000.parquet")["label"].to_numpy()
    order = Plan(open_dataset(str(sorted_by_class)).manifest, 0, 1, BATCH, WINDOW).epoch(0)
    classes = [len(np.unique(labels[order.rows_at(0, step)])) for step in range(len(labels) // BATCH)]
    assert np.mean(classes) >= 90, "of 92 at best"
    assert min(classes) >= 80


def test_the_mixed_order_depends_on_the_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the pieces of the source, nor on how many rows are held at once."""
    (tmp_path / "in").mkdir()
    for i in range(3):
        (tmp_path / "in" / f"{i}.csv").write_text("a\n" + "".join(f"{i}{j:03d}\n" for j in range(200)))
    found = []
    for number, (piece, run, batch, merged) in enumerate([(1 << 20, 1 << 20, 1 << 20, 1 << 20), (1, 1000, 300, 500)]):
        for name, value in (("RUN_BYTES", run), ("_BATCH_BYTES", batch), ("_MERGED_BYTES", merged)):
            monkeypatch.setattr(mixing, name, value)
        ingest(IngestOptions("csv", str(tmp_path / str(number)), str(tmp_path / "in"), piece_bytes=piece))
        found.append((tmp_path / str(number) / "part-00000.parquet").read_bytes())
    assert found[0] == found[1]
