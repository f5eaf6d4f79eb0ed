"""`ingest_table` stores tables of a program as data sets."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from ray_app import ingest_table
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
    ],
    ids=["arrow", "chunks", "pandas", "reader", "large", "ray"],
)
def test_tables_of_each_library_become_the_same_columns(tmp_path: Path, table: Any) -> None:
    summary = ingest_table(str(tmp_path / "out"), table, label="text")
    assert summary.parts[""].classes == ["x", "y"]
    rows = read_columns(tmp_path / "out")
    assert (rows["a"], rows["label"], rows["v"].tolist()) == (COLUMNS["a"], [0, 1, 0], COLUMNS["v"])
    assert rows["row_id"] == ["table.arrow:0", "table.arrow:1", "table.arrow:2"]


def test_categories_and_texts_of_polars_are_read(tmp_path: Path) -> None:
    """Both have Arrow's type of string views."""
    texts = pa.array(["x", "y", "x"], pa.string_view())
    categories = pa.DictionaryArray.from_arrays(
        pa.array([0, 1, None], pa.uint32()), pa.array(["p", "q"], pa.string_view())
    )
    ingest_table(str(tmp_path / "out"), pa.table({"text": texts, "kind": categories, "a": [1, 2, 3]}), label="text")
    rows = read_columns(tmp_path / "out")
    assert (rows["label"], rows["kind"]) == ([0, 1, 0], ["p", "q", None])


def test_an_equal_table_reuses_the_data_set_and_another_one_is_refused(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert not ingest_table(out, TABLE).reused
    assert ingest_table(out, pa.table(COLUMNS)).reused
    with pytest.raises(ConfigError, match="its source has changed"):
        ingest_table(out, TABLE.slice(1))


def test_the_index_of_pandas_is_no_feature(tmp_path: Path) -> None:
    table = pd.DataFrame(COLUMNS).set_index("a")
    ingest_table(str(tmp_path / "out"), table, columns=["a", "v"])
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["index_columns"] == ["a"]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ([1, 2], "table is of type list"),
        (pd.DataFrame({"a": [1, "x"]}, dtype=object), "cannot be converted to Arrow"),
        (RayData(), "has no rows"),
        (RayData(TABLE, TABLE.drop_columns(["v"])), "need the same columns"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, table: Any, expected: str) -> None:
    with pytest.raises(DataError) as caught:
        ingest_table(str(tmp_path / "out"), table)
    assert expected in str(caught.value)
