"""Data that changes in place between two starts of a run is detected by size, time or ETag."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_app.config.config import Config
from ray_app.data.arrays import ArraySpec
from ray_app.data.dataset import open_dataset
from ray_app.data.reader import Reader, RowSource
from ray_app.errors import RunExistsError
from ray_app.preflight.changes import describe_data_changes, read_data_versions, store_data_versions
from ray_app.runlog.paths import RunPaths

CONFIG = Config().replace(data__path="data", run__name="digits")


def make_source(folder: Path, files: int = 2) -> RowSource:
    folder.mkdir(exist_ok=True, parents=True)
    for i in range(files):
        if not (folder / f"{i}.parquet").exists():
            pq.write_table(pa.table({"x": np.arange(3)}), folder / f"{i}.parquet")
    dataset = open_dataset(str(folder))
    return RowSource(Reader(dataset.root, ["x"], dict, {"x": ArraySpec("<i8", ())}), dataset.manifest, 10)


def touch(file: Path) -> None:
    stat = file.stat()
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def test_changed_files_of_both_data_sets_are_named_or_refused(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    train, evaluation = make_source(tmp_path / "train"), make_source(tmp_path / "eval")
    versions = read_data_versions(train, evaluation)
    assert describe_data_changes(paths, CONFIG, versions) == [], "a run of an earlier version has no record of its data"
    store_data_versions(paths, versions)
    assert describe_data_changes(paths, CONFIG, read_data_versions(train, evaluation)) == []
    before = paths.data.stat()
    store_data_versions(paths, versions)
    assert paths.data.stat() == before, "the same versions are not written again"
    touch(tmp_path / "eval" / "1.parquet")
    versions = read_data_versions(train, evaluation)
    change = "1 of 2 files of data.eval_path differ in size, time or ETag: 1.parquet"
    assert describe_data_changes(paths, CONFIG, versions) == [change]
    with pytest.raises(RunExistsError, match=r"(?s)changed since its last start.*- 1 of 2 files.*run.changed to warn"):
        describe_data_changes(paths, CONFIG.replace(run__changed="refuse"), versions)


def test_a_copy_of_the_data_is_compared_by_size(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    store_data_versions(paths, read_data_versions(make_source(tmp_path / "a"), None))
    assert describe_data_changes(paths, CONFIG, read_data_versions(make_source(tmp_path / "b"), None)) == []
    pq.write_table(pa.table({"x": np.arange(3), "y": np.arange(3)}), tmp_path / "b" / "0.parquet")
    pq.write_table(pa.table({"x": np.arange(3), "y": np.arange(3)}), tmp_path / "b" / "1.parquet")
    assert describe_data_changes(paths, CONFIG, read_data_versions(make_source(tmp_path / "b"), None)) == [
        "2 of 2 files of data.path differ in size: 0.parquet, 1.parquet"
    ]


def test_many_changed_files_are_counted(tmp_path: Path) -> None:
    paths, train = RunPaths(tmp_path / "run"), make_source(tmp_path / "a", 8)
    store_data_versions(paths, read_data_versions(train, None))
    for file in (tmp_path / "a").iterdir():
        touch(file)
    [change] = describe_data_changes(paths, CONFIG, read_data_versions(train, None))
    assert change.endswith("0.parquet, 1.parquet, 2.parquet, 3.parquet, 4.parquet and 3 more")


@pytest.mark.parametrize("text", ["{", "[]", '{"data.path": 7}'])
def test_a_damaged_record_of_the_data_reports_no_changes(tmp_path: Path, text: str) -> None:
    paths, train = RunPaths(tmp_path / "run"), make_source(tmp_path / "a")
    paths.data.parent.mkdir(parents=True)
    paths.data.write_text(text)
    assert describe_data_changes(paths, CONFIG, read_data_versions(train, None)) == []
