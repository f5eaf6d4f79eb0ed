"""How well training mixes sorted data, and what it reads for that, by the plan: no timing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_app.config.config import Config
from ray_app.data.dataset import Dataset, open_dataset
from ray_app.data.parquet_files import DataFile
from ray_app.data.reader import SliceReader, Span, plan_reads
from ray_app.errors import DataError
from ray_app.ingest import shuffle
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.plan.order import Plan
from ray_app.preflight.data_summary import shuffle_warnings

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
            monkeypatch.setattr(shuffle, name, value)
        ingest(IngestOptions("csv", str(tmp_path / str(number)), str(tmp_path / "in"), split_bytes=piece))
        found.append((tmp_path / str(number) / "part-00000.parquet").read_bytes())
    assert found[0] == found[1]


def read_and_needed(dataset: Dataset, monkeypatch: pytest.MonkeyPatch, task_rows: int) -> tuple[int, int]:
    """Rows of row groups that are read for an epoch of the default windows, and those that are used."""
    plan = Plan(dataset.manifest, 0, 1, BATCH, WINDOW)
    order, read, needed = plan.epoch(0), 0, 0

    iter_batches = DataFile.iter_batches

    def counted(*arguments: Any) -> Iterator[pa.Table]:
        nonlocal read
        for table in iter_batches(*arguments):
            read += table.num_rows
            yield table

    monkeypatch.setattr(DataFile, "iter_batches", counted)
    sliced = SliceReader(dataset.root, ["label"], {})
    for window in range(plan.windows_per_epoch):
        for spec in plan_reads(dataset.manifest, order.window_segments(0, window), task_rows, plan.window_rows):
            for span in spec:
                group = int(np.searchsorted(dataset.manifest.first_row, span.position, side="right")) - 1
                if span.group_rows:
                    assert sliced.take(span).num_rows == span.rows
                else:
                    read += int(dataset.manifest.rows[group])
                needed += span.rows
    return read, needed


@pytest.mark.parametrize("task_rows", [425, 80_000])
def test_little_more_is_read_than_needed(
    sorted_by_class: Path, monkeypatch: pytest.MonkeyPatch, task_rows: int
) -> None:
    read, needed = read_and_needed(open_dataset(str(sorted_by_class)), monkeypatch, task_rows)
    assert needed == 30_000
    assert read <= 1.1 * needed


@pytest.mark.parametrize("task_rows", [425, 80_000])
def test_a_large_row_group_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task_rows: int) -> None:
    """101 times before, once for each window."""
    labels = pa.table({"label": np.repeat(np.arange(CLASSES), 10_000)})
    for i in range(2):
        pq.write_table(labels, tmp_path / f"{i}.parquet", row_group_size=1_000_000)
    read, needed = read_and_needed(open_dataset(str(tmp_path)), monkeypatch, task_rows)
    assert needed == 2_000_000
    assert read <= 1.1 * needed


@pytest.mark.parametrize(
    ("group_rows", "is_sorted", "expected"),
    [
        (
            5_000,
            True,
            [
                "looks sorted by 'label': a row group spans 17.3 of 100 values on an average, and a shuffle window of"
                " 1,024 rows"
            ],
        ),
        (500, True, ["mixes about 3.0 row groups, so at most about 7 values. Ingest it again"]),
        (5_000, False, ["has row groups of up to 5,000 rows, more than a shuffle window of 1,024 rows"]),
        (500, False, []),
    ],
)
def test_the_start_says_what_speaks_against_the_mixing(
    tmp_path: Path, group_rows: int, is_sorted: bool, expected: list[str]
) -> None:
    labels = np.repeat(np.arange(CLASSES), 300)
    if not is_sorted:
        labels = np.random.default_rng(0).permutation(labels)
    pq.write_table(pa.table({"label": labels}), tmp_path / "a.parquet", row_group_size=group_rows)
    dataset = open_dataset(str(tmp_path))
    config = Config().replace(data__path=str(tmp_path))
    for window, most in ((1024, 2), (30_000, 0)):
        doubts = shuffle_warnings(config, dataset, Plan(dataset.manifest, 0, 1, BATCH, window))
        assert len(doubts) <= most
        assert [text for text in expected if most and not any(text in doubt for doubt in doubts)] == [], doubts
        assert bool(doubts) == bool(expected and most)


def test_slices_are_the_rows_whoever_takes_them_in_which_order(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": np.arange(5000)}), tmp_path / "a.parquet", row_group_size=5000)
    taken = SliceReader(str(tmp_path), ["a"], {})
    for first, rows in [(0, 700), (2000, 1), (700, 1300), (2000, 1), (2001, 2999), (2001, 10), (4990, 10), (2011, 5)]:
        span = Span("a.parquet", 0, first, rows, first, group_rows=5000)
        assert taken.take(span)["a"].to_pylist() == list(range(first, first + rows))
    taken.close()
    with pytest.raises(DataError, match="ended 1 rows too early"):
        taken.take(Span("a.parquet", 0, 4990, 11, 4990, group_rows=5001))
