"""Parquet files of other programs: missing values, damage, encryption, Hive partitions and many small files."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import decimal
import errno
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest

from ray_app.cli.ingest import main
from ray_app.data.arrays import ArraySpec, fixed_array, spec_of_values
from ray_app.data.bad_rows import find_missing_values
from ray_app.data.dataset import open_dataset, read_labels
from ray_app.data.disk_cache import cached_fetch
from ray_app.data.parquet_files import DataFile
from ray_app.data.probes import decode_first_row, infer_specs, probe
from ray_app.data.reader import (
    Reader,
    RowSource,
    Span,
    fetch_in_process,
    fetch_in_threads,
    load_all,
    plan_all_reads,
    read_span,
)
from ray_app.errors import BadRowError, DataError, StorageError
from ray_app.plan.manifest import ColumnFacts
from ray_app.storage.data_files import to_read_error
from ray_app.task.ragged import Ragged
from ray_app.task.tabular import TabularClassification

VALUES = {
    "integer": (pa.int64(), [1, 2, None, 4]),
    "integer of 8 bits": (pa.uint8(), [1, 2, None, 4]),
    "float": (pa.float64(), [1.0, 2.0, None, 4.0]),
    "half": (pa.float16(), [np.float16(1), np.float16(2), None, np.float16(4)]),
    "boolean": (pa.bool_(), [True, False, None, True]),
    "text": (pa.string(), ["a", "b", None, "d"]),
    "bytes": (pa.binary(), [b"a", b"b", None, b"d"]),
    "timestamp": (pa.timestamp("us", "UTC"), [1, 2, None, 4]),
    "date": (pa.date32(), [datetime.date(2020, 1, 1)] * 2 + [None, datetime.date(2020, 1, 2)]),
    "duration": (pa.duration("s"), [1, 2, None, 4]),
    "decimal": (pa.decimal128(5, 2), [decimal.Decimal("1.5")] * 2 + [None, decimal.Decimal("2.5")]),
    "list": (pa.list_(pa.int64()), [[1], [], None, [4]]),
    "inside a list": (pa.list_(pa.int64()), [[1], [], [3, None], [4]]),
    "inside a list of lists": (pa.list_(pa.list_(pa.float32())), [[[1.0]], [], [[3.0], [None]], [[4.0]]]),
    "inside a list of one size": (pa.list_(pa.float32(), 2), [[1, 2], [1, 2], [1, None], [1, 2]]),
    "object": (pa.struct({"a": pa.int64()}), [{"a": 1}, {"a": 2}, None, {"a": 4}]),
    "inside an object": (pa.struct({"a": pa.int64()}), [{"a": 1}, {"a": 2}, {"a": None}, {"a": 4}]),
    "inside a map": (pa.map_(pa.string(), pa.int64()), [[("k", 1)], [], [("k", None)], [("k", 4)]]),
    "category": (pa.dictionary(pa.int32(), pa.string()), ["a", "b", None, "a"]),
    "nothing": (pa.null(), [None] * 4),
}
FETCHES = {"process": fetch_in_process, "threads": lambda reader, specs: fetch_in_threads(reader, specs, 2)}


def decode_row_numbers(rows: dict[str, Any]) -> dict[str, Any]:
    return {"row": rows["row"]}


def write_parquet(file: Path, table: pa.Table, **options: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file, **options)
    return file


def reader_of(path: Path, columns: list[str], skips: bool = False) -> tuple[Reader, RowSource]:
    dataset = open_dataset(str(path))
    fields = probe(dataset, columns, decode_row_numbers)
    reader = Reader(dataset.root, columns, decode_row_numbers, fields, skips, rules=dataset.manifest.rules)
    return reader, RowSource(reader, dataset.manifest, 100)


@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("kind", VALUES)
def test_a_missing_value_is_a_bad_row_with_its_column(tmp_path: Path, kind: str, statistics: bool) -> None:
    type_, values = VALUES[kind]
    table = pa.table({"row": [0, 1, 2, 3], "x": pa.array(values, type_)})
    write_parquet(tmp_path / "t.parquet", table, row_group_size=4, write_statistics=statistics)
    dataset, first = open_dataset(str(tmp_path)), 0 if kind == "nothing" else 2
    reader = Reader(dataset.root, ["row", "x"], decode_row_numbers, probe(dataset, ["row"], decode_row_numbers))
    with pytest.raises(
        BadRowError, match=rf"^t.parquet, row group 0, row {first}: column 'x' has .*; fill it or drop the row"
    ):
        list(reader.read(plan_all_reads(dataset.manifest, 100)[0]))


@pytest.mark.parametrize("fetch", FETCHES)
@pytest.mark.parametrize("rows_per_group", [8, 3])
def test_skipped_rows_with_missing_values_leave_the_others(tmp_path: Path, fetch: str, rows_per_group: int) -> None:
    x = [None if i in (1, 4, 5, 7) else i for i in range(8)]
    write_parquet(tmp_path / "t.parquet", pa.table({"row": range(8), "x": x}), row_group_size=rows_per_group)
    _, source = reader_of(tmp_path, ["row", "x"], skips=True)
    decoded = load_all(FETCHES[fetch], source)
    assert decoded.arrays["row"].tolist() == [0, 0, 2, 3, 0, 0, 6, 0]
    assert sorted(decoded.reasons) == [1, 4, 5, 7]
    assert decoded.reasons[4] == "column 'x' has no value; fill it or drop the row before training"


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_list(pa.list_(pa.int64())),
        pa.list_(pa.list_(pa.int64(), 2)),
        pa.list_(pa.struct({"a": pa.int64(), "b": pa.list_(pa.int64())})),
        pa.struct({"a": pa.list_(pa.int64(), 2), "b": pa.dictionary(pa.int8(), pa.int64())}),
    ],
    ids=str,
)
def test_nested_missing_values_are_attributed_to_their_rows(kind: pa.DataType) -> None:
    random = np.random.default_rng(0)

    def draw(data_type: pa.DataType) -> Any:
        if random.random() < 0.1:
            return None
        if pa.types.is_struct(data_type):
            return {field.name: draw(field.type) for field in data_type}
        if pa.types.is_nested(data_type):
            return [
                draw(data_type.value_type)
                for _ in range(data_type.list_size if pa.types.is_fixed_size_list(data_type) else random.integers(3))
            ]
        return 7

    def has_null(value: Any) -> bool:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
        return value is None or any(map(has_null, inner))

    values = [draw(kind) for _ in range(300)]
    chunks = [pa.array(values, kind).slice(3, 100), pa.array(values, kind)]
    reasons = find_missing_values(pa.table({"x": pa.chunked_array(chunks)}))
    expected = {row: value for row, value in enumerate(values[3:103] + values) if has_null(value)}
    assert reasons.keys() == expected.keys()
    assert all(("no value" in reasons[row]) == (value is None) for row, value in expected.items())


EXTENSIONS = {
    "uuid": lambda: pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"a" * 16, None, b"b" * 16], pa.binary(16))),
    "json": lambda: pa.ExtensionArray.from_storage(pa.json_(pa.utf8()), pa.array(['{"a": 1}', None, "[]"])),
    "tensor": lambda: pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.float32(), (2,)), pa.array([[1, 2], [1, None], [3, 4]], pa.list_(pa.float32(), 2))
    ),
    "opaque": lambda: pa.ExtensionArray.from_storage(pa.opaque(pa.int64(), "t", "v"), pa.array([1, None, 3])),
}


@pytest.mark.parametrize("kind", EXTENSIONS)
def test_a_missing_value_of_an_extension_type_is_a_bad_row(tmp_path: Path, kind: str) -> None:
    write_parquet(tmp_path / "a.parquet", pa.table({"x": EXTENSIONS[kind](), "row": [0, 1, 2]}))
    reader, source = reader_of(tmp_path, ["x", "row"], skips=True)
    assert list(load_all(fetch_in_process, source).reasons) == [1]
    with pytest.raises(BadRowError, match=r"a.parquet, row group 0, row 1: column 'x' has (no value|a missing value)"):
        list(dataclasses.replace(reader, skips=False).read(plan_all_reads(source.manifest, 9)[0]))


@pytest.mark.parametrize("kind", EXTENSIONS)
def test_ingest_lists_columns_of_extension_types(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_parquet(tmp_path / "a.parquet", pa.table({"x": EXTENSIONS[kind](), "row": [0, 1, 2]}))
    assert main(["--source", "parquet", "--input", str(tmp_path)]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  x "))
    assert "not usable: convert it" in line or re.search(r"  1(  |$)", line)


def test_a_disk_cache_keeps_the_reasons_of_missing_values(tmp_path: Path) -> None:
    write_parquet(
        tmp_path / "data" / "t.parquet", pa.table({"row": range(6), "x": [0, None, 2, 3, None, 5]}), row_group_size=4
    )
    _, source = reader_of(tmp_path / "data", ["row", "x"], skips=True)
    cached = cached_fetch(fetch_in_process, source, "", str(tmp_path / "cache"), 1.0)
    first = load_all(cached, source)
    (tmp_path / "data" / "t.parquet").write_bytes(b"")
    second = load_all(cached, source)
    assert first.arrays["row"].tolist() == second.arrays["row"].tolist() == [0, 0, 2, 3, 0, 5]
    assert (
        first.reasons
        == second.reasons
        == dict.fromkeys((1, 4), "column 'x' has no value; fill it or drop the row before training")
    )


def test_a_row_group_of_missing_values_alone_is_skipped(tmp_path: Path) -> None:
    write_parquet(
        tmp_path / "t.parquet", pa.table({"row": range(4), "x": pa.array([1, 2, None, None])}), row_group_size=2
    )
    _, source = reader_of(tmp_path, ["row", "x"], skips=True)
    assert sorted(load_all(fetch_in_process, source).reasons) == [2, 3]


def test_skipped_rows_with_lists_do_not_change_the_lengths_of_others(tmp_path: Path) -> None:
    lists = pa.array([[1], None, [2, 3], [None], [4, 5, 6]], pa.list_(pa.int64()))
    write_parquet(tmp_path / "t.parquet", pa.table({"l": lists}))
    dataset = open_dataset(str(tmp_path))
    fields = infer_specs(decode_first_row(dataset, ["l"], dict), dataset, ["l"], dict, skips=True)
    decoded = load_all(
        fetch_in_process, RowSource(Reader(dataset.root, ["l"], dict, fields, skips=True), dataset.manifest, 100)
    )
    values = decoded.arrays["l"]
    assert isinstance(values, Ragged)
    assert [values.row(i).tolist() for i in range(5)] == [[1], [], [2, 3], [], [4, 5, 6]]


def test_decode_first_row_takes_a_row_without_missing_values(tmp_path: Path) -> None:
    write_parquet(tmp_path / "t.parquet", pa.table({"row": range(3), "x": [None, 1, 2]}))
    dataset = open_dataset(str(tmp_path))
    with pytest.raises(BadRowError, match=r"row 0: column 'x' has no value"):
        decode_first_row(dataset, ["row", "x"], decode_row_numbers)
    assert decode_first_row(dataset, ["row", "x"], decode_row_numbers, max_bad=1)["row"].tolist() == [1]


def test_a_column_to_read_may_be_a_field_of_images_and_has_to_exist(tmp_path: Path) -> None:
    write_parquet(tmp_path / "t.parquet", pa.table({"i": [{"bytes": b"a", "path": "b"}]}))
    dataset = open_dataset(str(tmp_path))
    assert decode_first_row(dataset, ["i.path"], dict) == {"i.path": ["b"]}
    with pytest.raises(DataError, match=r"'p\.path'"):
        decode_first_row(dataset, ["p.path"], dict)


# Tests of pages and footers.


def flip_bit(file: Path, text: bytes, offset: int = 0) -> None:
    """Flips a bit at the first occurrence of `text`, `offset` bytes after its start."""
    data = bytearray(file.read_bytes())
    data[data.index(text) + offset] ^= 0x40
    file.write_bytes(data)


def write_with_a_flipped_bit(file: Path, **options: Any) -> Path:
    table = pa.table({"row": [float(i) for i in range(8)], "x": [100.0 + i for i in range(8)]})
    write_parquet(file, table, row_group_size=4, use_dictionary=False, compression=None, **options)
    flip_bit(file, np.float64(106).tobytes(), 6)
    return file


def read_slices(reader: Reader, source: RowSource) -> None:
    specs = [tuple(Span("t.parquet", 1, first, 1, 4 + first, group_rows=4) for first in range(4))]
    list(fetch_in_process(reader, specs))


READS = {name: lambda reader, source, fetch=fetch: load_all(fetch, source) for name, fetch in FETCHES.items()}


@pytest.mark.parametrize("read", [*READS.values(), read_slices], ids=[*READS, "slices of a row group"])
def test_a_page_with_a_wrong_checksum_is_named_with_its_column(tmp_path: Path, read: Any) -> None:
    write_with_a_flipped_bit(tmp_path / "t.parquet", write_page_checksum=True)
    with pytest.raises(DataError, match=r"t.parquet, row group 1, column 'x': .*CRC checksum verification failed"):
        read(*reader_of(tmp_path, ["row", "x"]))


def test_labels_are_checked_against_checksums(tmp_path: Path) -> None:
    table = pa.table({"label": pa.array([1, 123456789, 999999999], pa.int64())})
    flip_bit(
        write_parquet(tmp_path / "t.parquet", table, use_dictionary=False, compression=None, write_page_checksum=True),
        np.int64(123456789).tobytes(),
    )
    with pytest.raises(DataError, match=r"row group 0, column 'label': .*CRC"):
        read_labels(str(tmp_path), open_dataset(str(tmp_path)).manifest, "label")


def test_a_damaged_page_without_checksum_is_named_with_its_column(tmp_path: Path) -> None:
    file = write_parquet(
        tmp_path / "t.parquet", pa.table({"row": range(4), "x": [f"text {i}" for i in range(4)]}), compression="zstd"
    )
    chunk = pq.read_metadata(file).row_group(0).column(1)
    data = bytearray(file.read_bytes())
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    data[start : start + chunk.total_compressed_size] = bytes(chunk.total_compressed_size)
    file.write_bytes(data)
    reader = Reader(str(tmp_path), ["row", "x"], decode_row_numbers, {"row": spec_of_values(np.arange(1))})
    with pytest.raises(DataError, match=r"t.parquet, row group 0, column 'x': "):
        list(reader.read(plan_all_reads(open_dataset(str(tmp_path)).manifest, 100)[0]))


class Kms(pe.KmsClient):
    """A key management service that keeps no secrets."""

    def __init__(self, config: Any) -> None:
        super().__init__()

    def wrap_key(self, key: bytes, name: str) -> bytes:
        return base64.b64encode(key)

    def unwrap_key(self, key: bytes, name: str) -> bytes:
        return base64.b64decode(key)


def write_encrypted(file: Path, table: pa.Table) -> None:
    config = pe.EncryptionConfiguration(footer_key="f", plaintext_footer=True, column_keys={"c": ["x"]})
    properties = pe.CryptoFactory(Kms).file_encryption_properties(pe.KmsConnectionConfig(), config)
    with pq.ParquetWriter(file, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)


def test_encrypted_columns_are_refused_with_their_file(tmp_path: Path) -> None:
    table = pa.table({"x": [1.0, 2.0], "y": [0.0, 1.0]})
    for i in range(3):
        write_parquet(tmp_path / f"a{i}.parquet", table)
    write_encrypted(tmp_path / "b.parquet", table)
    with pytest.raises(
        DataError, match=r"b.parquet has encrypted columns, so it cannot be read .*Write it without encryption"
    ):
        open_dataset(str(tmp_path))
    (tmp_path / "b.parquet").unlink()
    assert open_dataset(str(tmp_path)).manifest.num_rows == 6, (
        "the footer checker was not started again after it crashed"
    )


def test_a_footer_with_contradictory_types_is_refused(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "t.parquet", pa.table({"x": [1, 2, 3]}), store_schema=False)
    data = file.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    # INT64, the type of the column chunk, is field 1 (zigzag of 2) before the list of encodings; 0x0a is DOUBLE.
    metadata = data.rindex(b"\x15\x04\x19", footer)
    file.write_bytes(data[: metadata + 1] + b"\x0a" + data[metadata + 2 :])
    with pytest.raises(DataError, match=r"t.parquet has a footer that contradicts itself, so it cannot be read .*type"):
        open_dataset(str(tmp_path))


def test_statistics_out_of_pythons_range_do_not_hide_encrypted_columns(tmp_path: Path) -> None:
    late = pa.array([2**62], pa.int64()).cast(pa.timestamp("us"))
    write_encrypted(tmp_path / "a.parquet", pa.table({"late": late, "x": [1.0]}))
    with pytest.raises(DataError, match=r"a.parquet has encrypted columns"):
        open_dataset(str(tmp_path))


def test_a_killed_footer_checker_does_not_blame_a_file(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", pa.table({"x": [1.0]}))
    open_dataset(str(tmp_path))
    children = psutil.Process().children()
    [checker] = [child for child in children if "footer_trial.py" in " ".join(child.cmdline())]
    checker.kill()
    assert open_dataset(str(tmp_path)).manifest.num_rows == 1


@pytest.mark.rest
def test_footers_are_checked_where_pyarrow_is_known_by_pythonpath_alone(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", pa.table({"x": [1.0]}))
    code = f"from ray_app.data.dataset import open_dataset; print(open_dataset({str(tmp_path)!r}).manifest.num_rows)"
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": os.environ["PATH"]}
    # The base interpreter does not know the packages of the virtual environment but by PYTHONPATH.
    process = subprocess.run(
        [vars(sys)["_base_executable"], "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert process.stdout == "1\n", process.stderr


def test_a_data_set_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "t.parquet", pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"]))
    with pytest.raises(DataError, match=r"t.parquet has several columns of the name 'x'"):
        open_dataset(str(tmp_path))


# Tests of Hive partitions, which are columns in the names of folders.


def write_hive(root: Path, folders: list[str], **columns: list[Any]) -> Path:
    for i, folder in enumerate(folders):
        write_parquet(root / folder / f"part-{i}.parquet", pa.table({"row": [2 * i, 2 * i + 1], **columns}))
    return root


def read_column(root: Path, name: str) -> list[Any]:
    """Returns all values of a column in the order of the manifest."""
    dataset, values = open_dataset(str(root)), []
    for span in (span for spec in plan_all_reads(dataset.manifest, 100) for span in spec):
        with DataFile(dataset.root, span.path, dataset.manifest.rules) as file:
            values += read_span(file, span, [name])[name].to_pylist()
    return values


@pytest.mark.parametrize(
    ("folders", "kind", "values"),
    [
        (["k=0", "k=1"], "integer", [0, 0, 1, 1]),
        (["k=-3", "k=0012"], "integer", [-3, -3, 12, 12]),
        (["k=0.5", "k=1"], "number", [0.5, 0.5, 1.0, 1.0]),
        (["k=9223372036854775808", "k=1"], "text", ["1", "1", "9223372036854775808", "9223372036854775808"]),
        (["k=a%20b%2Fc", "k=1"], "text", ["1", "1", "a b/c", "a b/c"]),
        (["k=nan", "k=1"], "text", ["1", "1", "nan", "nan"]),
        (["other/k=5", "k=4"], "integer", [4, 4, 5, 5]),
    ],
)
def test_hive_partition_folders_become_a_column(
    tmp_path: Path, folders: list[str], kind: str, values: list[Any]
) -> None:
    write_hive(tmp_path, folders)
    dataset = open_dataset(str(tmp_path))
    assert dataset.facts.columns["k"].kind == kind
    assert sorted(read_column(tmp_path, "k")) == values


def test_a_task_reads_a_partition_column(tmp_path: Path) -> None:
    write_hive(tmp_path, ["k=0", "k=1"], x=[0.5, 0.25])
    dataset = open_dataset(str(tmp_path))
    task = TabularClassification(label="k", features=["x"]).prepare(dataset.facts)
    fields = probe(dataset, task.columns(), task.decode)
    reader = Reader(dataset.root, task.columns(), task.decode, fields, rules=dataset.manifest.rules)
    for fetch in FETCHES.values():
        decoded = load_all(fetch, RowSource(reader, dataset.manifest, 1))
        assert decoded.arrays["label"].tolist() == [0, 0, 1, 1]
    assert read_labels(dataset.root, dataset.manifest, "k")[1].tolist() == [0, 0, 1, 1]
    specs = [
        (Span(path, 0, 1, 1, position, group_rows=2),)
        for path, position in zip(dataset.manifest.paths, (1, 3), strict=True)
    ]
    slices = pa.concat_tables(list(fetch_in_process(reader, specs)))
    assert fixed_array(slices.column("label"), ArraySpec("<i8", ())).tolist() == [0, 1]


def test_the_hive_default_partition_is_a_missing_value(tmp_path: Path) -> None:
    write_hive(tmp_path, ["k=1", "k=__HIVE_DEFAULT_PARTITION__"])
    dataset = open_dataset(str(tmp_path))
    assert dataset.facts.columns["k"] == ColumnFacts("integer", "int64", (), 1.0, 1.0, 2, 1.0)
    with pytest.raises(DataError, match=r"Column 'k' of .* has 2 missing values"):
        TabularClassification(label="k", features=["row"]).prepare(dataset.facts)
    reader = Reader(
        dataset.root,
        ["row", "k"],
        decode_row_numbers,
        probe(dataset, ["row"], decode_row_numbers),
        rules=dataset.manifest.rules,
    )
    with pytest.raises(BadRowError, match=r"row group 0, row 0: column 'k' has no value"):
        list(fetch_in_process(reader, plan_all_reads(dataset.manifest, 100)))


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["a=1/b=x", "a=2"], "a=1/b=x/part-0.parquet has the partition columns a, b"),
        (["a=1/a=2"], "two folders of the column 'a'"),
    ],
)
def test_unequal_or_repeated_partition_columns_are_refused(tmp_path: Path, folders: list[str], message: str) -> None:
    write_hive(tmp_path, folders)
    with pytest.raises(DataError, match=message):
        open_dataset(str(tmp_path))


def test_a_stored_partition_column_must_equal_its_folder(tmp_path: Path) -> None:
    write_hive(tmp_path / "equal", ["k=01"], k=pa.array([1, 1], pa.int32()))
    assert read_column(tmp_path / "equal", "k") == [1, 1]
    write_hive(tmp_path / "half", ["k=1.5"], k=pa.array(np.array([1.5, 1.5], np.float16)))
    assert read_column(tmp_path / "half", "k") == [1.5, 1.5], "half precision is not compared"
    write_hive(tmp_path / "other", ["k=01"], k=pa.array([1, 2], pa.int32()))
    with pytest.raises(BadRowError, match=r"row group 0, row 1: column 'k' is 2, but the folder's name has '01'"):
        read_column(tmp_path / "other", "k")


def test_folders_above_the_data_set_are_not_partition_columns(tmp_path: Path) -> None:
    write_hive(tmp_path, ["k=0"])
    assert "k" not in open_dataset(str(tmp_path / "k=0")).facts.columns
    assert "k" not in open_dataset(str(tmp_path / "k=0" / "part-0.parquet")).facts.columns


# Tests of many files.


def test_few_of_many_files_are_open_at_a_time(tmp_path: Path) -> None:
    for i in range(40):
        write_parquet(tmp_path / f"{i:03}.parquet", pa.table({"row": [i]}))
    before = len(os.listdir("/proc/self/fd"))
    max_open = 0

    def decode_and_count(rows: dict[str, Any]) -> dict[str, Any]:
        nonlocal max_open
        max_open = max(max_open, len(os.listdir("/proc/self/fd")) - before)
        return decode_row_numbers(rows)

    dataset = open_dataset(str(tmp_path))
    reader = Reader(dataset.root, ["row"], decode_and_count, probe(dataset, ["row"], decode_row_numbers))
    decoded = load_all(fetch_in_process, RowSource(reader, dataset.manifest, 1000))
    assert decoded.arrays["row"].tolist() == list(range(40))
    assert 1 <= max_open <= 10


def test_too_many_open_files_names_the_limit() -> None:
    error = to_read_error("a.parquet", OSError(errno.EMFILE, "Too many open files"), "Restore it.")
    assert isinstance(error, StorageError)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert f"A process may have {limit} open files here (ulimit -n)" in str(error)


def test_a_task_names_the_type_of_a_column_that_it_cannot_use(tmp_path: Path) -> None:
    times = pa.array([1, 2], pa.timestamp("us", "Europe/Berlin"))
    maps = pa.array([[("k", 1)]] * 2, pa.map_(pa.string(), pa.int32()))
    write_parquet(tmp_path / "t.parquet", pa.table({"t": times, "m": maps, "label": [0, 1]}))
    facts = open_dataset(str(tmp_path)).facts
    fitted = TabularClassification(features=["t"]).prepare(facts).fitted
    assert fitted is not None
    assert [column["kind"] for column in fitted["columns"]] == ["date"]
    with pytest.raises(DataError, match=r"Column 'm' of .* holds other map<str"):
        TabularClassification(features=["m"]).prepare(facts)


def test_ingest_lists_parquet_columns_and_marks_unusable_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pa.table(
        {
            "x": [1, None, 3],
            "price": pa.array([decimal.Decimal("1.5")] * 3, pa.decimal128(30, 2)),
            "tags": pa.array([[("k", 1)]] * 3, pa.map_(pa.string(), pa.int32())),
            "none": pa.array([None] * 3, pa.int32()),
        }
    )
    write_parquet(tmp_path / "t.parquet", table, write_statistics=False)
    assert main(["--source", "parquet", "--input", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    words = [line.split() for line in lines]
    assert ["x", "int64", "feature", "1", "1", "to", "3"] in words
    assert any(words_of[:4] == ["price", "float64", "feature", "0"] for words_of in words)
    assert any(line.startswith("  tags ") and "not usable: convert it" in line for line in lines)
    assert any(line[:1] == ["none"] and "the column has no value in any row" in " ".join(line) for line in words)
    assert lines[-1] == "A run can train on the data as it is, but not by tags, none: no files were written."


def test_ingest_refuses_parquet_with_a_damaged_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_with_a_flipped_bit(tmp_path / "t.parquet", write_page_checksum=True)
    assert main(["--source", "parquet", "--input", str(tmp_path)]) == 2
    assert "t.parquet, row group 1, column 'x': " in capsys.readouterr().err
