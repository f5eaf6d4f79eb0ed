"""Columns as other tools write them are read alike as they are and after an ingest."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_app import ingest_table
from ray_app.data.dataset import open_dataset
from ray_app.data.reader import table_to_rows
from ray_app.errors import DataError
from ray_app.ingest.ingest import describe
from ray_app.task.ragged import Ragged

TENSORS = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
SERIES = [[1, 2, 3], [4], [], [5, 6]]
DAY = datetime.timedelta(days=1)


class Column(NamedTuple):
    """A column as a tool writes it: its values as they are read, and their kind."""

    values: pa.Array
    expected: Any
    kind: str
    field: pa.Field | None = None


def as_written_by_ray(name: str, storage: pa.Array, metadata: Any) -> Column:
    """Returns tensors of Ray Data as a process reads them that has not imported `ray.data`."""
    extension = {"ARROW:extension:name": name, "ARROW:extension:metadata": json.dumps(metadata)}
    field = pa.field("c", storage.type, metadata=extension)
    return Column(storage, TENSORS, "array", field)


def list_values(values: Any, kind: pa.DataType) -> pa.Array:
    return pa.array([tensor.ravel().tolist() for tensor in values], kind)


PERMUTED = pa.ExtensionArray.from_storage(
    pa.fixed_shape_tensor(pa.float32(), [3, 2], permutation=[1, 0]),
    pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(TENSORS.transpose(0, 2, 1)).ravel()), 6),
)
SHAPES = pa.array([[len(row)] for row in SERIES])
COLUMNS: dict[str, Column] = {
    "arrow tensor": Column(pa.FixedShapeTensorArray.from_numpy_ndarray(TENSORS), TENSORS, "array"),
    "permuted tensor": Column(PERMUTED, TENSORS, "array"),
    "ray tensor": as_written_by_ray("ray.data.arrow_tensor", list_values(TENSORS, pa.list_(pa.float32())), [2, 3]),
    "ray tensor v2": as_written_by_ray(
        "ray.data.arrow_tensor_v2", list_values(TENSORS, pa.large_list(pa.float32())), [2, 3]
    ),
    "ray series": as_written_by_ray(
        "ray.data.arrow_variable_shaped_tensor",
        pa.StructArray.from_arrays([pa.array(SERIES, pa.large_list(pa.int64())), SHAPES], ["data", "shape"]),
        1,
    )._replace(expected=SERIES, kind="list"),
    "list of one size": Column(pa.array([[1, 2]] * 4, pa.list_(pa.int8(), 2)), [[1, 2]] * 4, "array"),
    "large list": Column(pa.array(SERIES, pa.large_list(pa.int32())), SERIES, "list"),
    "list view": Column(pa.array(SERIES, pa.list_view(pa.int32())), SERIES, "list"),
    "list of spark": Column(pa.array(SERIES, pa.list_(pa.field("element", pa.int32()))), SERIES, "list"),
    "categories": Column(pa.array(["a", "b", "a", "b"]).dictionary_encode(), ["a", "b", "a", "b"], "text"),
    "large text": Column(pa.array(["a"] * 4, pa.large_string()), ["a"] * 4, "text"),
    "text view": Column(pa.array(["a"] * 4, pa.string_view()), ["a"] * 4, "text"),
    "bytes view": Column(pa.array([b"a"] * 4, pa.binary_view()), [b"a"] * 4, "bytes"),
    "bytes of one size": Column(pa.array([b"ab"] * 4, pa.binary(2)), [b"ab"] * 4, "bytes"),
    "uuid": Column(pa.array([b"u" * 16] * 4, pa.uuid()), [b"u" * 16] * 4, "bytes"),
    "json": Column(pa.array(["{}"] * 4, pa.json_()), ["{}"] * 4, "text"),
    "bool8": Column(
        pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0, 1, 0], pa.int8())), [True, False] * 2, "integer"
    ),
    "decimal": Column(pa.array([Decimal("1.25")] * 4, pa.decimal128(38, 10)), [1.25] * 4, "number"),
    "small decimal": Column(pa.array([Decimal("1.25")] * 4, pa.decimal32(5, 2)), [1.25] * 4, "number"),
    "duration": Column(pa.array([DAY] * 4, pa.duration("ns")), [86400.0] * 4, "number"),
    "time": Column(pa.array([datetime.time(0, 1)] * 4, pa.time32("ms")), [60.0] * 4, "number"),
    "half": Column(pa.array([1.5] * 4, pa.float16()), [1.5] * 4, "number"),
    "unsigned": Column(pa.array([2**64 - 1] * 4, pa.uint64()), [2**64 - 1] * 4, "integer"),
    "small": Column(pa.array([7] * 4, pa.int8()), [7] * 4, "integer"),
    "image": Column(
        pa.array([{"bytes": b"x", "path": None}] * 4, pa.struct({"bytes": pa.binary(), "path": pa.string()})),
        [b"x"] * 4,
        "bytes",
    ),
}


def as_lists(values: Any) -> Any:
    if isinstance(values, Ragged):
        return [values.row(i).tolist() for i in range(len(values))]
    return values.tolist() if isinstance(values, np.ndarray) else values


def rows_as_trained_on(folder: Path, column: str = "c") -> Any:
    facts = open_dataset(str(folder)).facts
    assert facts.read is not None
    blocks = [rows[column] for rows in facts.read([column])]
    return [row for block in blocks for row in as_lists(block)]


def write(folder: Path, column: Column) -> pa.Table:
    folder.mkdir()
    table = pa.table([column.values], pa.schema([column.field or pa.field("c", column.values.type)]))
    pq.write_table(table, folder / "t.parquet", row_group_size=3)
    return table


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_of_other_tools_are_trained_on_as_they_are_and_ingested(tmp_path: Path, kind: str) -> None:
    column = COLUMNS[kind]
    expected = as_lists(column.expected)
    table = write(tmp_path / "in", column)
    assert open_dataset(str(tmp_path / "in")).facts.columns["c"].kind == column.kind
    assert rows_as_trained_on(tmp_path / "in") == expected
    assert describe(str(tmp_path / "in")).parts[""].columns["c"]["unusable"] is None
    ragged = ["c"] if column.kind == "list" else None
    ingest_table(str(tmp_path / "out"), table, ragged=ragged, check=False)
    facts = open_dataset(str(tmp_path / "out")).facts.columns["c"]
    assert (facts.kind, sorted(map(str, rows_as_trained_on(tmp_path / "out")))) == (
        column.kind,
        sorted(map(str, expected)),
    )


def test_fields_of_objects_are_columns(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": {"t": "x"}}, None, {"a": None, "b": {"t": "y"}}]
    table = pa.table({"o": rows, "n": [1, 2, 3]})
    (tmp_path / "in").mkdir()
    pq.write_table(table, tmp_path / "in" / "t.parquet")
    ingest_table(str(tmp_path / "out"), table, rename={"o.b.t": "text"})
    facts = open_dataset(str(tmp_path / "in")).facts.columns
    assert {name: (column.kind, column.nulls, column.maximum) for name, column in facts.items()} == {
        "o.a": ("integer", 2, 1),
        "o.b.t": ("text", None, None),
        "n": ("integer", 0, 3),
    }
    assert rows_as_trained_on(tmp_path / "in", "o.b.t") == ["x", None, "y"]
    # A task of the user's own may still read the objects.
    assert rows_as_trained_on(tmp_path / "in", "o") == rows
    assert sorted(rows_as_trained_on(tmp_path / "out", "text"), key=str) == [None, "x", "y"]
    ingest_table(str(tmp_path / "less"), table, drop=["o"])
    assert open_dataset(str(tmp_path / "less")).facts.columns.keys() == {"row_id", "n"}


def test_tensors_of_several_axes_and_shapes_are_nested_lists(tmp_path: Path) -> None:
    boxes = [np.ones((2, 4)), np.zeros((0, 4)), np.full((1, 4), 2.0)]
    storage = pa.StructArray.from_arrays(
        [list_values(boxes, pa.large_list(pa.float64())), pa.array([list(box.shape) for box in boxes])],
        ["data", "shape"],
    )
    column = as_written_by_ray("ray.data.arrow_variable_shaped_tensor", storage, 2)
    write(tmp_path / "in", column)
    assert rows_as_trained_on(tmp_path / "in") == [box.tolist() for box in boxes]


def test_tensors_without_a_shape_as_json_are_refused(tmp_path: Path) -> None:
    column = as_written_by_ray("ray.data.arrow_tensor", list_values(TENSORS, pa.list_(pa.float32())), [2, 3])
    assert column.field is not None
    pickled = column.field.with_metadata({"ARROW:extension:name": "ray.data.arrow_tensor"})
    table = write(tmp_path / "in", column._replace(field=pickled))
    # Where Ray Data is imported, its type refuses such a file before we see the column.
    reasons = ("'c' holds tensors without their shape.*as lists of numbers", "cannot be read as Parquet")
    reason = "|".join((*reasons, "Unable to deserialize shape"))
    for read in (lambda: open_dataset(str(tmp_path / "in")), lambda: ingest_table(str(tmp_path / "out"), table)):
        with pytest.raises(DataError, match=reason):
            read()


def test_a_decimal_of_many_digits_is_not_rounded_by_an_ingest(tmp_path: Path) -> None:
    table = pa.table({"c": pa.array([Decimal("1.5"), Decimal("12345678901234567.25")], pa.decimal128(38, 2))})
    with pytest.raises(DataError, match=r"row table.arrow:1: 'c' holds 12345678901234567.25; float64 represents"):
        ingest_table(str(tmp_path / "out"), table)


TABLE: dict[str, list[Any]] = {"n": [1, 2, None, 4], "t": ["a", None, "b", "a"], "x": [0.5, 1.5, 2.5, None]}
WRITERS: dict[str, Callable[[Path], object]] = {
    "pandas": lambda file: pd.DataFrame(TABLE).to_parquet(file),
    "pandas nullable": lambda file: pd.DataFrame(TABLE).convert_dtypes().to_parquet(file),
    "pandas arrow": lambda file: pd.DataFrame(TABLE).convert_dtypes(dtype_backend="pyarrow").to_parquet(file),
    "pandas categories": lambda file: pd.DataFrame(TABLE).astype({"t": "category"}).to_parquet(file),
    "polars": lambda file: pl.DataFrame(TABLE).write_parquet(file),
    "duckdb": lambda file: duckdb.from_arrow(pa.table(TABLE)).to_parquet(str(file)),
    # Spark stores no schema of Arrow.
    "spark": lambda file: pq.write_table(
        pa.table(TABLE).cast(pa.schema({"n": pa.int32(), "t": pa.string(), "x": pa.decimal128(18, 3)})),
        file,
        store_schema=False,
    ),
}


@pytest.mark.parametrize("tool", WRITERS)
def test_tables_of_each_tool_have_the_same_values(tmp_path: Path, tool: str) -> None:
    (tmp_path / "in").mkdir()
    WRITERS[tool](tmp_path / "in" / "t.parquet")
    for name, expected in TABLE.items():
        read = [None if pd.isna(value) else value for value in rows_as_trained_on(tmp_path / "in", name)]
        assert read == expected


def test_tensors_that_ray_data_writes_are_arrays(tmp_path: Path) -> None:
    tensor = pytest.importorskip("ray.data.extensions")
    values = pa.table({"c": tensor.ArrowTensorArray.from_numpy(TENSORS)})
    (tmp_path / "in").mkdir()
    pq.write_table(values, tmp_path / "in" / "t.parquet")
    assert rows_as_trained_on(tmp_path / "in") == TENSORS.tolist()
    ingest_table(str(tmp_path / "out"), values)
    assert open_dataset(str(tmp_path / "out")).facts.columns["c"].shape == (2, 3)


def test_rows_of_a_block_are_read_as_those_of_a_file() -> None:
    assert table_to_rows(pa.table({"d": pa.array([DAY, None], pa.duration("s"))}))["d"][0] == 86400
