"""`ingest_table` stores tables of a program as data sets."""

import json
import sqlite3
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import adbc_driver_sqlite.dbapi as adbc
import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import load_catalog

from ray_app import ingest_files, ingest_table
from ray_app.errors import ConfigError, DataError
from tests.support.ingest_inputs import read_columns

COLUMNS = {"a": [1, 2, 3], "text": ["x", "y", "x"], "v": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]}
TABLE = pa.table(COLUMNS)


class RayData:
    """The part of the interface of `ray.data.Dataset` that is used: blocks in order, only if they are asked for so."""

    def __init__(self, *blocks: pa.Table) -> None:
        self._blocks = blocks
        self.context = SimpleNamespace(execution_options=SimpleNamespace(preserve_order=False))

    def iter_batches(self, *, batch_format: str, batch_size: int | None) -> Any:
        assert (batch_format, batch_size) == ("pyarrow", None)
        return iter(self._blocks if self.context.execution_options.preserve_order else self._blocks[::-1])


@pytest.mark.parametrize(
    "table",
    [
        TABLE,
        pa.concat_tables([TABLE.slice(0, 1), TABLE.slice(1)]),
        pd.DataFrame(COLUMNS),
        pa.RecordBatchReader.from_batches(TABLE.schema, TABLE.to_batches()),
        TABLE.cast(pa.schema({"a": pa.int64(), "text": pa.large_string(), "v": pa.large_list(pa.float64())})),
        RayData(TABLE.slice(0, 2), TABLE.slice(2)),
        pl.DataFrame(COLUMNS),
        duckdb.from_arrow(TABLE),
        duckdb.connect().execute("select unnest([1, 2, 3]) a, unnest(['x', 'y', 'x']) text, [2 * a - 1, 2 * a] v"),
    ],
    ids=["arrow", "chunks", "pandas", "reader", "large", "ray", "polars", "duckdb", "cursor of duckdb"],
)
def test_tables_of_each_library_become_the_same_columns(tmp_path: Path, table: Any) -> None:
    summary = ingest_table(str(tmp_path / "out"), table, label="text")
    assert summary.parts[""].classes == ["x", "y"]
    rows = read_columns(tmp_path / "out")
    assert (rows["a"], rows["label"], rows["v"].tolist()) == (COLUMNS["a"], [0, 1, 0], COLUMNS["v"])
    assert rows["row_id"] == ["table.arrow:0", "table.arrow:1", "table.arrow:2"]


def test_categories_and_texts_of_polars_are_read(tmp_path: Path) -> None:
    table = pl.DataFrame({"text": ["x", "y", "x"], "kind": pl.Series(["p", "q", None], dtype=pl.Categorical)})
    ingest_table(str(tmp_path / "out"), table, label="text")
    rows = read_columns(tmp_path / "out")
    assert (rows["label"], rows["kind"]) == ([0, 1, 0], ["p", "q", None])


def test_words_of_truth_stay_text_with_a_note(tmp_path: Path) -> None:
    table = pa.table({"alive": ["yes", "true", "False"], "sings": ["true", "False", "False"]})
    summary = ingest_table(str(tmp_path / "out"), table)
    assert read_columns(tmp_path / "out")["sings"] == ["true", "False", "False"]
    assert (
        summary.parts[""]
        .notes[-1]
        .startswith("column 'sings' is text, although all of its 3 values are true or false, such a")
    )


def test_an_equal_table_reuses_the_data_set_and_another_one_is_refused(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert not ingest_table(out, TABLE).reused
    assert ingest_table(out, pa.table(COLUMNS)).reused
    with pytest.raises(ConfigError, match="its source has changed"):
        ingest_table(out, TABLE.slice(1))


def test_the_index_of_pandas_is_no_feature(tmp_path: Path) -> None:
    table = pd.DataFrame(COLUMNS).set_index("a")
    ingest_table(str(tmp_path / "out"), table, columns=["a", "v"])
    assert json.loads((tmp_path / "out" / "_dataset.json").read_text())["index_columns"] == ["a"]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ([1, 2], "table is of type list"),
        (pd.Series([1, 2], name="a"), "cannot be converted to Arrow"),
        (pd.DataFrame({"a": [1, "x"]}, dtype=object), "cannot be converted to Arrow"),
        (RayData(), "has no rows"),
        (RayData(TABLE, TABLE.drop_columns(["v"])), "need the same columns"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, table: Any, expected: str) -> None:
    with pytest.raises(DataError) as caught:
        ingest_table(str(tmp_path / "out"), table)
    assert expected in str(caught.value)


def open_cursor(query: str) -> sqlite3.Cursor:
    """Returns a cursor of a database in memory with 12,000 rows of `sales`, after the query."""
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE sales (id INTEGER, price REAL, note TEXT)")
    rows = [(number, number / 4, None if number < 11_000 else "late") for number in range(12_000)]
    database.executemany("INSERT INTO sales VALUES (?, ?, ?)", rows)
    return database.execute(query)


def test_the_result_of_a_cursor_is_read_to_its_end(tmp_path: Path) -> None:
    ingest_table(str(tmp_path / "out"), open_cursor("SELECT id, price AS cost FROM sales ORDER BY id"))
    rows = read_columns(tmp_path / "out")
    assert rows["id"] == list(range(12_000))
    assert rows["cost"] == [number / 4 for number in range(12_000)]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT CASE WHEN id < 11000 THEN 1 ELSE 1.5 END AS n FROM sales", "'n' of the result is int64 in its first"),
        ("SELECT CASE WHEN id < 11000 THEN 1 ELSE 'x' END AS n FROM sales", "Could not convert 'x' with type str"),
        ("SELECT id, id FROM sales", "several columns 'id'"),
        ("SELECT id FROM sales WHERE id < 0", "has no rows"),
        ("DELETE FROM sales", "execute a SELECT"),
    ],
)
def test_a_result_that_is_no_table_is_refused(tmp_path: Path, query: str, expected: str) -> None:
    with pytest.raises(DataError) as caught:
        ingest_table(str(tmp_path / "out"), open_cursor(query))
    assert expected in str(caught.value)


def test_tables_of_delta_lake_have_the_rows_that_count(tmp_path: Path) -> None:
    folder = str(tmp_path / "delta")
    write_deltalake(folder, pa.table({"a": [1, 2, 3]}))
    DeltaTable(folder).delete("a = 1")
    ingest_table(str(tmp_path / "out"), DeltaTable(folder))
    assert sorted(read_columns(tmp_path / "out")["a"]) == [2, 3]
    # Its Parquet files alone still have the row that was deleted.
    with pytest.raises(DataError, match=r"is a table of Delta Lake .*ray_app\.ingest_table"):
        ingest_files(str(tmp_path / "second"), "hf", folder)


def test_tables_and_scans_of_iceberg_are_read(tmp_path: Path) -> None:
    catalog = load_catalog("shop", type="sql", uri="sqlite:///:memory:", warehouse=f"file://{tmp_path / 'iceberg'}")
    catalog.create_namespace("shop")
    table = catalog.create_table("shop.sales", schema=pa.schema({"a": pa.int64()}))
    table.append(pa.table({"a": [1, 2, 3]}))
    for number, source in enumerate((table, table.scan(row_filter="a > 1"))):
        ingest_table(str(tmp_path / str(number)), source)
        assert read_columns(tmp_path / str(number))["a"] == [1, 2, 3][number:]


def test_a_cursor_of_adbc_is_read_as_arrow(tmp_path: Path) -> None:
    with adbc.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SELECT 1 AS a, 'x' AS b UNION ALL SELECT 2, 'y'")
        ingest_table(str(tmp_path / "out"), cursor, label="b")
    assert read_columns(tmp_path / "out")["label"] == [0, 1]


def test_every_option_of_an_ingest_can_be_given(tmp_path: Path) -> None:
    table = pa.table({"a": list(range(40)), "who": [number // 4 for number in range(40)], "y": ["u", "v"] * 20})
    options = {"label": "y", "classes": ["v", "u"], "group": "who", "eval_fraction": 0.5, "drop": ["a"]}
    summary = ingest_table(str(tmp_path / "out"), table, **options)
    assert {name: part.classes for name, part in summary.parts.items()} == {"train": ["v", "u"], "eval": ["v", "u"]}
    sides = [set(read_columns(tmp_path / "out" / side)["who"]) for side in ("train", "eval")]
    assert not sides[0] & sides[1]
    with pytest.raises(TypeError, match="unexpected keyword argument 'lable'"):
        ingest_table(str(tmp_path / "second"), table, lable="y")


class ListCursor:
    """A cursor that gives these blocks of rows, and at the end another empty sequence than its rows are in."""

    description = (("a",), ("b",))

    def __init__(self, *blocks: list[Any]) -> None:
        self._blocks = [*blocks, ()]

    def fetchmany(self, _size: int) -> Any:
        return self._blocks.pop(0)


def test_a_column_without_values_at_first_has_the_type_of_later_ones(tmp_path: Path) -> None:
    ingest_table(str(tmp_path / "out"), open_cursor("SELECT id, note FROM sales ORDER BY id"))
    assert read_columns(tmp_path / "out")["note"] == [None] * 11_000 + ["late"] * 1_000


def test_rows_as_dictionaries_and_decimals_are_read_by_value(tmp_path: Path) -> None:
    blocks = [[{"b": "x", "a": Decimal("1.50")}], [{"a": Decimal("12345.678"), "b": None}]]
    ingest_table(str(tmp_path / "out"), ListCursor(*blocks))
    rows = read_columns(tmp_path / "out")
    assert (rows["a"], rows["b"]) == ([1.5, 12345.678], ["x", None])


def test_integers_among_the_fractions_of_a_result_are_fractions(tmp_path: Path) -> None:
    ingest_table(str(tmp_path / "out"), ListCursor([(1.5, 1)], [(2, 2)]))
    assert read_columns(tmp_path / "out")["a"] == [1.5, 2.0]
    with pytest.raises(DataError, match="column 'a' of the result"):
        ingest_table(str(tmp_path / "second"), ListCursor([(1.5, 1)], [(2**53 + 1, 2)]))


def test_an_option_of_none_is_the_default(tmp_path: Path) -> None:
    ingest_table(str(tmp_path / "out"), TABLE, label=None, rename=None, seed=None)
    assert sorted(read_columns(tmp_path / "out")) == ["a", "row_id", "text", "v"]


def test_targets_of_a_table_in_memory_may_be_booleans(tmp_path: Path) -> None:
    table = pa.table({"x": [1, 2], "a": [True, False], "b": [0.5, 1.5]})
    ingest_table(str(tmp_path / "out"), table, targets=["a", "b"], rename={"target": "both"})
    assert read_columns(tmp_path / "out")["both"].tolist() == [[1, 0.5], [0, 1.5]]
