"""What a data set is before a row is read: which files count, what their footers say, which columns there are."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_app.data import parquet_files
from ray_app.data.dataset import Dataset, open_dataset
from ray_app.data.probes import decode_first_row
from ray_app.errors import BadRowError, DataError
from ray_app.plan.manifest import ColumnFacts
from ray_app.storage.data_files import files_below


def write(file: Path, **columns: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns or {"a": [1, 2, 3]}), file)


def test_what_spark_has_not_finished_is_no_data(tmp_path: Path) -> None:
    for name in ("_day=2/part-0.parquet", "_day=1/part-0.parquet"):
        write(tmp_path / name)
    for name in (
        "_temporary/0/part-1.parquet",
        "_started.parquet",
        ".hidden/part-2.parquet",
        "a/_temporary/part-3.parquet",
    ):
        write(tmp_path / name)
    (tmp_path / "_SUCCESS").touch()
    assert open_dataset(str(tmp_path)).manifest.paths == ("_day=1/part-0.parquet", "_day=2/part-0.parquet")


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ("_delta_log/00000000000000000000.json", "Delta Lake"),
        (".hoodie/hoodie.properties", "Apache Hudi"),
        ("metadata/00001-abc.metadata.json", "Apache Iceberg"),
        ("inner/_delta_log/00000000000000000000.json", "Delta Lake"),
    ],
)
def test_a_table_whose_log_drops_rows_is_refused(tmp_path: Path, log: str, kind: str) -> None:
    write(tmp_path / "inner" / "part-0.parquet")
    assert open_dataset(str(tmp_path)).manifest.num_rows == 3
    (tmp_path / log).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / log).touch()
    with pytest.raises(DataError, match=f"is a table of {kind} .*Write the rows that do as plain Parquet"):
        open_dataset(str(tmp_path))


def test_columns_of_half_precision_have_no_known_range(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", half=pa.array(np.array([1, 2], np.float16)), whole=[1, 2])
    columns = open_dataset(str(tmp_path)).facts.columns
    assert (columns["half"].dtype, columns["half"].minimum, columns["half"].maximum) == ("float16", None, None)
    assert (columns["whole"].minimum, columns["whole"].maximum) == (1.0, 2.0)


def test_row_groups_without_a_number_leave_the_range_as_it_is(tmp_path: Path) -> None:
    tokens = [[1, 7]] * 10 + [[]] * 10 + [[250]] * 10
    columns = {"tokens": pa.array(tokens, pa.list_(pa.int32())), "none": pa.array([[]] * 30, pa.list_(pa.int32()))}
    missing = pa.array([3] * 10 + [None] * 10 + [5] * 10)
    pq.write_table(pa.table(columns | {"missing": missing}), tmp_path / "part.parquet", row_group_size=10)
    pq.write_table(pa.table(columns | {"missing": missing}).slice(10, 10), tmp_path / "without.parquet")
    facts = open_dataset(str(tmp_path)).facts.columns
    assert (facts["tokens"].minimum, facts["tokens"].maximum) == (1, 250)
    assert (facts["missing"].minimum, facts["missing"].maximum, facts["missing"].nulls) == (3, 5, 20)
    assert facts["none"].maximum is None


def test_a_column_that_is_not_there_is_no_bad_row(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", width=[1.0], label=[1])
    dataset = open_dataset(str(tmp_path))
    with pytest.raises(
        DataError,
        match=r"no column 'widht', which the task reads .*; its columns are label, width; did you mean 'width'\?",
    ) as found:
        decode_first_row(dataset, ["label", "widht"], dict)
    assert not isinstance(found.value, BadRowError)


def write_shards(folder: Path, files: int = 4) -> None:
    for i in range(files):
        numbers = {
            "n": [i, i + 1, i + 5, i],
            "x": [0.5 * i, None, 1.0, 2.0],
            "l": [[i], [i + 2], [], [1]],
            "t": ["a", "b", "c", "d"],
        }
        table = pa.table({**numbers, "b": [True, False, None, True], "h": pa.array(np.arange(4, dtype=np.float16))})
        folder.mkdir(exist_ok=True)
        pq.write_table(table, folder / f"part-{i}.parquet", row_group_size=2)


def keep(folder: Path) -> None:
    parquet_files.read_footers(folder, files_below(folder, ".parquet")).put(folder)


def opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Dataset]:
    """The files whose footers are read, and the data set."""
    read, tail = list[str](), parquet_files._tail
    with monkeypatch.context() as patched:
        patched.setattr(parquet_files, "_tail", lambda file: (read.append(file.name), tail(file))[1])
        dataset = open_dataset(str(folder))
    return sorted(set(read)), replace(dataset, facts=replace(dataset.facts, count=None))


def test_a_data_set_opens_without_its_footers_and_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path)
    names = [f"part-{i}.parquet" for i in range(4)]
    cold = opened(tmp_path, monkeypatch)
    columns = cold[1].facts.columns
    assert columns["n"] == ColumnFacts("integer", "int64", (), 0.0, 8.0, 0, 4.0)
    assert columns["x"] == ColumnFacts("number", "float64", (), 0.0, 2.0, 4, 1.5)
    assert columns["l"] == ColumnFacts("list", "list<element: int64>", (), 0.0, 5.0)
    assert columns["b"] == ColumnFacts("integer", columns["b"].dtype, (), 0.0, 1.0, 4, 1.5)
    assert (columns["h"].minimum, columns["h"].group_span, columns["h"].nulls) == (None, None, 0)
    keep(tmp_path)
    warm = opened(tmp_path, monkeypatch)
    assert (cold[0], warm[0]) == (names, [])
    assert (warm[1].manifest.digest, warm[1].facts) == (cold[1].manifest.digest, cold[1].facts)


def test_a_file_that_was_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path)
    keep(tmp_path)
    file = tmp_path / "part-2.parquet"
    table, before = pq.read_table(file), file.stat()
    pq.write_table(table.set_column(0, "n", pa.array([2, 3, 2, 99])), file, row_group_size=2)
    assert file.stat().st_size == before.st_size, "the time alone tells"
    (tmp_path / "part-1.parquet").unlink()
    pq.write_table(table, tmp_path / "part-9.parquet", row_group_size=1)
    read, dataset = opened(tmp_path, monkeypatch)
    assert read == ["part-2.parquet", "part-9.parquet"]
    assert dataset.manifest.rows.tolist() == [2, 2, 2, 2, 2, 2, 1, 1, 1, 1]
    assert dataset.facts.columns["n"].maximum == 99.0
    (tmp_path / parquet_files.FOOTERS_FILE).unlink()
    assert opened(tmp_path, monkeypatch)[1].facts == dataset.facts
    keep(tmp_path)
    pq.write_table(pa.table({"other": [1]}), file)
    with pytest.raises(DataError, match=r"part-2\.parquet has other columns than .*part-0\.parquet"):
        open_dataset(str(tmp_path))


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: data[:-400] + bytes(400)]
)
def test_what_is_kept_of_footers_may_be_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    write_shards(tmp_path)
    cold = opened(tmp_path, monkeypatch)
    keep(tmp_path)
    (tmp_path / parquet_files.FOOTERS_FILE).write_bytes(damage((tmp_path / parquet_files.FOOTERS_FILE).read_bytes()))
    read, dataset = opened(tmp_path, monkeypatch)
    assert (read, dataset.manifest.digest, dataset.facts) == (cold[0], cold[1].manifest.digest, cold[1].facts)


def test_footers_are_let_go_while_others_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path, 100)
    seen, most = list[weakref.ref[object]](), 0
    keep_of, one_at_a_time = parquet_files._file_facts, threading.Lock()

    def counted(footer: pq.FileMetaData, places: list[int | None]) -> object:
        nonlocal most
        with one_at_a_time:
            seen.append(weakref.ref(footer))
            most = max(most, sum(there() is not None for there in seen))
        return keep_of(footer, places)

    monkeypatch.setattr(parquet_files, "_file_facts", counted)
    assert open_dataset(str(tmp_path)).manifest.num_rows == 400
    assert 1 <= most <= 2 * parquet_files._DISK_THREADS + 2
