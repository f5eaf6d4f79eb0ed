"""Rows that two data sets of an ingest share: equal ones, and windows that overlap."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from ray_app import ingest_arrays, ingest_table
from ray_app.data.arrays import to_column
from ray_app.ingest import leakage
from ray_app.ingest.leakage import RowHashes, add_hashes, find_equal_rows, hash_rows


def leaks_of(folder: Path, side: str = "eval") -> dict[str, Any]:
    counts: dict[str, Any] = json.loads((folder / side / "_dataset.json").read_text())["leaks"]
    return counts


def make_windows(shift: int, axis: int) -> np.ndarray:
    series = np.random.default_rng(0).normal(size=(3, 400)).astype(np.float32)
    windows = np.stack([series[:, begin : begin + 20] for begin in range(0, 300, shift)])
    return windows if axis == 1 else windows.transpose(0, 2, 1)


@pytest.mark.parametrize(("shift", "axis"), [(1, 0), (1, 1), (7, 1)])
def test_overlapping_windows_are_counted_and_named(tmp_path: Path, shift: int, axis: int) -> None:
    x = make_windows(shift, axis)
    part = ingest_arrays(str(tmp_path / "out"), windows=x, y=np.arange(len(x)) % 2, eval_fraction=0.1).parts["eval"]
    [note] = part.notes
    assert f"{part.rows} of {part.rows} rows of 'eval' overlap" in note
    assert f"in the column 'windows' a row repeats the row before it, shifted by {shift} along axis {axis}" in note
    assert "--group COLUMN" in note
    assert "--split_by COLUMN" in note
    assert leaks_of(tmp_path / "out")["windows"]["windows"] == [part.rows, axis, shift]


def test_a_division_by_time_leaves_one_overlap(tmp_path: Path) -> None:
    x = make_windows(1, 0)
    options: dict[str, Any] = {"eval_fraction": 0.1, "split_by": "begin"}
    ingest_arrays(str(tmp_path / "out"), windows=x, begin=np.arange(len(x)), **options)
    assert leaks_of(tmp_path / "out")["windows"] == {"windows": [1, 0, 1]}


@pytest.mark.parametrize(
    "x",
    [np.zeros((200, 8, 8), np.uint8), np.random.default_rng(0).integers(0, 2, (200, 8, 8)).astype(np.uint8)],
    ids=["constant", "random"],
)
def test_arrays_that_are_no_windows_are_not_named(tmp_path: Path, x: np.ndarray) -> None:
    summary = ingest_arrays(str(tmp_path / "out"), x=x, id=np.arange(200), eval_fraction=0.2)
    assert [part.notes for part in summary.parts.values()] == [[], []]


def test_the_rows_of_a_delivery_are_compared_with_all_rows_that_are_there(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"x": rng.normal(size=100), "y": np.arange(100) % 2})
    ingest_table(str(tmp_path / "out"), table, append=True, eval_fraction=0.3)
    assert leaks_of(tmp_path / "out")["equal"] == 0
    again = pd.concat([table.iloc[:60], pd.DataFrame({"x": rng.normal(size=40), "y": 1})])
    part = ingest_table(str(tmp_path / "out"), again, append=True, eval_fraction=0.3).parts["eval"]
    read = {side: pd.read_parquet(tmp_path / "out" / side)["x"] for side in ("train", "eval")}
    equal = read["eval"].isin(set(read["train"])).sum()
    assert 0 < equal == leaks_of(tmp_path / "out")["equal"]
    assert any(f"{equal} of {part.rows} rows of 'eval' are equal to rows of 'train'" in note for note in part.notes)


def test_equal_rows_are_counted_without_id_and_label(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": np.arange(500), "word": [f"w{i}" for i in range(500)], "label": 0})
    again = frame.assign(label=np.arange(500) // 250)
    part = ingest_table(str(tmp_path / "out"), pd.concat([frame, again]), eval_fraction=0.2).parts["eval"]
    counts = leaks_of(tmp_path / "out")
    assert counts["compared"] == part.rows
    assert 0.6 < counts["equal"] / part.rows < 0.95
    assert 0.3 < counts["other_label"] / counts["equal"] < 0.7
    assert f"{counts['equal']} of {part.rows} rows of 'eval' are equal to rows of 'train'" in part.notes[0]
    assert f"{counts['other_label']} of them with another label" in part.notes[0]
    # The remedy.
    grouped = ingest_table(str(tmp_path / "by"), pd.concat([frame, again]), eval_fraction=0.2, group="word")
    assert not any(part.notes for part in grouped.parts.values())
    assert leaks_of(tmp_path / "by")["equal"] == 0


def test_equal_rows_of_separate_sources_are_counted(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(50, 4))
    named = {"x_train": x, "y_train": np.zeros(50, int), "x_test": x[:10], "y_test": np.zeros(10, int)}
    part = ingest_arrays(str(tmp_path / "out"), **named, eval_fraction=0).parts["test"]
    assert "10 of 10 rows of 'test' are equal to rows of 'train'" in part.notes[0]
    assert "Leave these rows out of one of the two sources" in part.notes[0]


def make_table(rows: int) -> pa.Table:
    generator = np.random.default_rng(0)
    field, array = to_column("array", generator.integers(0, 255, (rows, 3, 5)).astype(np.uint8))
    values = {
        "number": pa.array([None, 0.0, -1.5, 1e300] * (rows // 4)),
        "flag": pa.array([True, False] * (rows // 2)),
        "text": pa.array([None, "", "a" * 300, "b"] * (rows // 4)).dictionary_encode(),
        "lists": pa.array([[], [1], [1, 2], [2, 1]] * (rows // 4)),
        "nested": pa.array([[["x"]], [], None, [["y", "z"]]] * (rows // 4)),
        "time": pa.array(np.arange(rows) % 4, pa.timestamp("s")),
    }
    return pa.table(values).append_column(field, array)


def test_the_hash_of_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    table = make_table(40)
    whole, _ = hash_rows(table, ())
    assert hash_rows(table.slice(0, 0), ())[0].tolist() == []
    for low in (0, 1, 7, 39):
        assert hash_rows(table.slice(low, 3), ())[0].tolist() == whole[low : low + 3].tolist()
    assert len(set(whole.tolist())) == 40
    for name in table.column_names:
        column, _ = hash_rows(table.select([name]), ())
        values = list(map(str, table[name].to_pylist()))
        assert len(set(column.tolist())) == len(set(values)), name


def test_many_rows_are_compared_by_a_common_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leakage, "MAX_COMPARED", 1000)
    content, labels = hash_rows(pa.table({"x": np.arange(30_000)}), ())
    train = RowHashes.merge(RowHashes.of(content[i::3][:5000], labels[i::3][:5000]) for i in (0, 1))
    other = RowHashes.of(content[:6000], labels[:6000])
    counts = find_equal_rows(train, other.with_limit(train.limit))
    assert len(train.hashes) <= 1000
    assert 300 < counts["compared"] < 1000
    assert abs(counts["equal"] / counts["compared"] - 2 / 3) < 0.06


def test_hashes_that_are_added_table_by_table_are_those_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leakage, "MAX_COMPARED", 500)
    monkeypatch.setattr(leakage, "_MAX_UNMERGED", 700)
    table, parts = pa.table({"x": np.arange(5000)}), list[RowHashes]()
    for low in range(0, 5000, 37):
        add_hashes(parts, table.slice(low, 37), ())
        assert sum(len(part.hashes) for part in parts) <= 700
    added, whole = RowHashes.merge(parts), RowHashes.merge([RowHashes.of(*hash_rows(table, ()))])
    assert (added.rows, added.content, added.limit) == (whole.rows, whole.content, whole.limit)
    assert added.hashes.tolist() == whole.hashes.tolist()
