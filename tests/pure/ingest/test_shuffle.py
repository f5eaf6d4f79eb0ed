"""The plan mixes sorted data, and reads few rows more than it uses; nothing is timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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
from ray_app.errors import ConfigError, DataError
from ray_app.ingest import shuffle
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.plan.manifest import ReadRules
from ray_app.plan.order import Plan
from ray_app.preflight.data_summary import shuffle_warnings

CLASSES = 100
BATCH = 256
WINDOW = 10_000


@pytest.fixture(scope="module")
def sorted_by_class(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a data set of 100 classes of 300 rows, sorted by class before ingest."""
    folder = tmp_path_factory.mktemp("sorted")
    np.savez(folder / "d.npz", x=np.arange(30_000) % 251, y=np.repeat(np.arange(CLASSES), 300))
    ingest(IngestOptions("numpy", str(folder / "out"), str(folder / "d.npz"), rename={"features": "n"}))
    return folder / "out"


def test_batches_of_sorted_data_have_nearly_all_classes(sorted_by_class: Path) -> None:
    labels = pq.read_table(sorted_by_class / "part-00000.parquet")["label"].to_numpy()
    order = Plan(open_dataset(str(sorted_by_class)).manifest, 0, 1, BATCH, WINDOW).epoch(0)
    classes = [len(np.unique(labels[order.rows_at(0, step)])) for step in range(len(labels) // BATCH)]
    assert np.mean(classes) >= 90, "a batch has too few classes; a random order would give 92"
    assert min(classes) >= 80


def test_the_mixed_order_depends_on_the_rows_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It depends neither on the input splits nor on the number of rows in memory."""
    (tmp_path / "in").mkdir()
    for i in range(3):
        (tmp_path / "in" / f"{i}.csv").write_text("a\n" + "".join(f"{i}{j:03d}\n" for j in range(200)))
    outputs = []
    names = ("RUN_BYTES", "_BATCH_BYTES", "_MERGED_BYTES", "_MAPPED_PARTS", "_HASHED_ROWS")
    for number, (split_bytes, *sizes) in enumerate(
        [(1 << 20, 1 << 20, 1 << 20, 1 << 20, 1, 1000), (1, 1000, 300, 500, 3, 7)]
    ):
        for name, value in zip(names, sizes, strict=True):
            monkeypatch.setattr(shuffle, name, value)
        ingest(IngestOptions("csv", str(tmp_path / str(number)), str(tmp_path / "in"), split_bytes=split_bytes))
        outputs.append((tmp_path / str(number) / "part-00000.parquet").read_bytes())
    assert outputs[0] == outputs[1]


def test_rows_that_are_not_mixed_keep_the_order_of_the_source(tmp_path: Path) -> None:
    """Also over several input splits, files and row groups."""
    (tmp_path / "in").mkdir()
    for i in range(3):
        (tmp_path / "in" / f"{i}.csv").write_text("a\n" + "".join(f"{i * 900 + j}\n" for j in range(900)))
    options = IngestOptions("csv", str(tmp_path / "out"), str(tmp_path / "in"), split_bytes=1, shard_rows=700)
    ingest(replace(options, shuffle=False))
    dataset = open_dataset(str(tmp_path / "out"))
    assert dataset.manifest.num_row_groups > len(dataset.manifest.paths) > 3
    tables = [pq.read_table(tmp_path / "out" / path) for path in dataset.manifest.paths]
    assert pa.concat_tables(tables)["a"].to_pylist() == list(range(2700))
    with pytest.raises(ConfigError, match="other options: shuffle False, now True"):
        ingest(options)
    ingest(replace(options, out=str(tmp_path / "mixed")))
    config = Config().replace(data__shuffle=False)
    warnings = []
    for name in ("out", "mixed"):
        dataset = open_dataset(str(tmp_path / name))
        warnings.append(shuffle_warnings(config, dataset, Plan(dataset.manifest, 0, 1, 8, 8)))
    assert not warnings[0]
    assert "ray-app ingest has mixed" in warnings[1][0]


def count_rows_read_and_needed(dataset: Dataset, monkeypatch: pytest.MonkeyPatch, task_rows: int) -> tuple[int, int]:
    """Returns the rows of row groups that an epoch of the default windows reads, and the rows that it uses."""
    plan = Plan(dataset.manifest, 0, 1, BATCH, WINDOW)
    order = plan.epoch(0)
    rows_read = 0
    rows_needed = 0

    iter_batches = DataFile.iter_batches

    def count_rows(*arguments: Any) -> Iterator[pa.Table]:
        nonlocal rows_read
        for table in iter_batches(*arguments):
            rows_read += table.num_rows
            yield table

    monkeypatch.setattr(DataFile, "iter_batches", count_rows)
    slice_reader = SliceReader(dataset.root, ["label"], ReadRules())
    for window in range(plan.windows_per_epoch):
        for spec in plan_reads(dataset.manifest, order.window_segments(0, window), task_rows, plan.window_rows):
            for span in spec:
                group = int(np.searchsorted(dataset.manifest.first_row, span.position, side="right")) - 1
                if span.group_rows:
                    assert slice_reader.take(span).num_rows == span.rows
                else:
                    rows_read += int(dataset.manifest.rows[group])
                rows_needed += span.rows
    return rows_read, rows_needed


@pytest.mark.parametrize("task_rows", [425, 80_000])
def test_an_epoch_reads_few_rows_more_than_needed(
    sorted_by_class: Path, monkeypatch: pytest.MonkeyPatch, task_rows: int
) -> None:
    rows_read, rows_needed = count_rows_read_and_needed(open_dataset(str(sorted_by_class)), monkeypatch, task_rows)
    assert rows_needed == 30_000
    assert rows_read <= 1.1 * rows_needed


@pytest.mark.parametrize("task_rows", [425, 80_000])
def test_a_large_row_group_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task_rows: int) -> None:
    """An earlier version read it 101 times, once for each window."""
    labels = pa.table({"label": np.repeat(np.arange(CLASSES), 10_000)})
    for i in range(2):
        pq.write_table(labels, tmp_path / f"{i}.parquet", row_group_size=1_000_000)
    rows_read, rows_needed = count_rows_read_and_needed(open_dataset(str(tmp_path)), monkeypatch, task_rows)
    assert rows_needed == 2_000_000
    assert rows_read <= 1.1 * rows_needed


@pytest.mark.parametrize(
    ("group_rows", "is_sorted", "expected"),
    [
        (
            5_000,
            True,
            [
                "looks sorted by 'label': a row group spans 17.3 of 100 values on average, and a shuffle window of"
                " 1,024 rows"
            ],
        ),
        (500, True, ["mixes about 3.0 row groups, so at most about 7 values. Ingest the data again"]),
        (5_000, False, []),
        (500, False, []),
    ],
)
def test_shuffle_warnings_name_sorted_data(
    tmp_path: Path, group_rows: int, is_sorted: bool, expected: list[str]
) -> None:
    labels = np.repeat(np.arange(CLASSES), 300)
    if not is_sorted:
        labels = np.random.default_rng(0).permutation(labels)
    pq.write_table(pa.table({"label": labels}), tmp_path / "a.parquet", row_group_size=group_rows)
    dataset = open_dataset(str(tmp_path))
    config = Config().replace(data__path=str(tmp_path))
    for window, max_warnings in ((1024, 1), (30_000, 0)):
        warnings = shuffle_warnings(config, dataset, Plan(dataset.manifest, 0, 1, BATCH, window))
        assert len(warnings) <= max_warnings
        assert [text for text in expected if max_warnings and not any(text in warning for warning in warnings)] == [], (
            warnings
        )
        assert bool(warnings) == bool(expected and max_warnings)


def test_slices_have_the_same_rows_in_any_order_of_access(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": np.arange(5000)}), tmp_path / "a.parquet", row_group_size=5000)
    slice_reader = SliceReader(str(tmp_path), ["a"], ReadRules())
    for first, rows in [(0, 700), (2000, 1), (700, 1300), (2000, 1), (2001, 2999), (2001, 10), (4990, 10), (2011, 5)]:
        span = Span("a.parquet", 0, first, rows, first, group_rows=5000)
        assert slice_reader.take(span)["a"].to_pylist() == list(range(first, first + rows))
    slice_reader.close()
    with pytest.raises(DataError, match="ended 1 rows too early"):
        slice_reader.take(Span("a.parquet", 0, 4990, 11, 4990, group_rows=5001))
