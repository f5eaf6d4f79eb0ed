"""Several columns of numbers become one array column `target`, in every source that has columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ray_app import ingest_table
from tests.support.ingest_inputs import ingest_and_read, ingest_error, read_columns
from tests.support.ingest_rows import write_rows

ROWS = [{"x": 1.5, "sings": 1, "flies": 0}, {"x": 2.5, "sings": 0, "flies": 1}, {"x": 3.5, "sings": 1, "flies": 1}]


@pytest.mark.parametrize("source", ["csv", "jsonl", "hf", "tfrecord"])
@pytest.mark.parametrize("columns", [None, ["x"]])
def test_targets_become_one_array_column_in_their_order(tmp_path: Path, source: str, columns: list[str] | None) -> None:
    path = write_rows(tmp_path, source, ROWS)
    rows = ingest_and_read(tmp_path, source, path, targets=["flies", "sings"], columns=columns)
    assert sorted(rows) == ["row_id", "target", "x"]
    assert rows["target"].dtype == np.float32
    assert rows["target"].tolist() == [[0, 1], [1, 0], [1, 1]]
    assert rows["x"] == [1.5, 2.5, 3.5]


def test_targets_of_a_table_in_memory_may_be_booleans(tmp_path: Path) -> None:
    table = pa.table({"x": [1, 2], "a": [True, False], "b": [0.5, 1.5]})
    ingest_table(str(tmp_path / "out"), table, targets=["a", "b"], rename={"target": "both"})
    assert read_columns(tmp_path / "out")["both"].tolist() == [[1, 0.5], [0, 1.5]]


@pytest.mark.parametrize("source", ["csv", "jsonl", "hf"])
def test_a_row_that_lacks_a_target_is_refused_or_left_out(tmp_path: Path, source: str) -> None:
    path = write_rows(tmp_path, source, [ROWS[0], {**ROWS[1], "flies": None}, ROWS[2]])
    assert "no number in flies, which is one of the targets" in ingest_error(
        tmp_path, source, path, targets=["sings", "flies"]
    )
    rows = ingest_and_read(tmp_path, source, path, targets=["sings", "flies"], on_bad_row="skip")
    assert rows["target"].tolist() == [[1, 0], [1, 1]]


def test_a_target_that_float32_cannot_hold_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "csv", [{"a": "1e39", "b": 1}, {"a": "2", "b": 1}])
    assert "no number in a" in ingest_error(tmp_path, "csv", path, targets=["a", "b"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"targets": ["sings", "kind"]}, "targets names 'kind', a column of string"),
        ({"targets": ["sings", "swims"]}, "no column 'swims'"),
        ({"targets": ["sings"], "rename": {"flies": "target"}}, "two columns of one name"),
    ],
)
def test_targets_that_cannot_be_are_refused(tmp_path: Path, options: dict[str, Any], expected: str) -> None:
    path = write_rows(tmp_path, "csv", [{**row, "kind": "bird"} for row in ROWS])
    assert expected in ingest_error(tmp_path, "csv", path, **options)
