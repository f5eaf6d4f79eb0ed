"""Ids of users and products are numbered by an ingest, in the same way in all of its data sets, from any source."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ray_app import ingest_files, ingest_table
from ray_app.data.dataset import open_dataset
from ray_app.errors import ConfigError, DataError
from ray_app.ingest.ingest import describe
from ray_app.task.schema import refuse_other_schema, schema_of
from tests.support.ingest_inputs import ingest_and_read, ingest_error, read_columns
from tests.support.ingest_rows import write_rows

ROWS = [{"user": f"u{number % 7}", "item": 10_000_000 + 3 * (number % 5), "stars": 0.5} for number in range(40)]
USERS, ITEMS = [f"u{number}" for number in range(7)], [10_000_000 + 3 * number for number in range(5)]


@pytest.mark.parametrize("source", ["csv", "jsonl", "hf"])
def test_ids_are_numbers_from_0_in_sorted_order(tmp_path: Path, source: str) -> None:
    rows = ingest_and_read(tmp_path, source, write_rows(tmp_path, source, ROWS), ids=["user", "item"], split_bytes=1)
    assert rows["user"] == [USERS.index(row["user"]) for row in ROWS]
    assert rows["item"] == [ITEMS.index(row["item"]) for row in ROWS]
    assert json.loads((tmp_path / "out" / "_dataset.json").read_text())["ids"] == {"user": USERS, "item": ITEMS}


def test_all_data_sets_have_the_same_numbers_and_name_their_count(tmp_path: Path) -> None:
    options: dict[str, Any] = {"ids": ["user"], "rename": {"user": "who"}, "eval_fraction": 0.2}
    summary = ingest_table(str(tmp_path / "out"), pa.Table.from_pylist(ROWS), **options)
    digests = set()
    for side, part in describe(str(tmp_path / "out")).parts.items():
        assert part.notes == summary.parts[side].notes
        assert "the 7 ids in 'who' are numbered from 0 to 6: an embedding of them has num_embeddings=7" in part.notes[0]
        digests.add(open_dataset(part.path).facts.columns["who"].ids)
    assert len(digests) == 1
    assert "" not in digests


def test_later_data_is_numbered_as_an_earlier_data_set(tmp_path: Path) -> None:
    ingest_table(str(tmp_path / "first"), pa.Table.from_pylist(ROWS), ids=["user"], rename={"user": "who"})
    later = pa.table({"user": ["u6", "new", None, "u1"]})
    options: dict[str, Any] = {"ids": ["user"], "ids_of": str(tmp_path / "first"), "rename": {"user": "who"}}
    with pytest.raises(DataError, match=r"row table.arrow:1: user is 'new'; expected one of the 7 ids of .*/first"):
        ingest_table(str(tmp_path / "out"), later, **options)
    with pytest.raises(DataError, match="'user', a column of int64, but the ids are string"):
        ingest_table(str(tmp_path / "out"), pa.table({"user": [1]}), **options)
    assert ingest_table(str(tmp_path / "out"), later, on_bad_row="skip", **options).parts[""].refused == 2
    assert read_columns(tmp_path / "out")["who"] == [6, 1]
    first, out = (open_dataset(str(tmp_path / name)).facts for name in ("first", "out"))
    refuse_other_schema(schema_of(first, ["who"]), out, "out", "first")


def test_numbers_of_other_ids_are_refused(tmp_path: Path) -> None:
    for name, user in (("a", "u0"), ("b", "x0")):
        ingest_table(str(tmp_path / name), pa.Table.from_pylist([*ROWS, {**ROWS[0], "user": user}]), ids=["user"])
    a, b = (open_dataset(str(tmp_path / name)).facts for name in ("a", "b"))
    with pytest.raises(DataError, match=r"column 'user' of b stand for other ids than the numbers in a\. .*--ids_of"):
        refuse_other_schema(schema_of(a, ["user"]), b, "b", "a")
    shutil.copy(tmp_path / "b" / "part-00000.parquet", tmp_path / "a" / "second.parquet")
    with pytest.raises(DataError, match=r"second\.parquet has other columns than .*'user' has the numbers of other"):
        open_dataset(str(tmp_path / "a"))


def test_a_delivery_is_numbered_as_the_data_set_to_which_it_is_added(tmp_path: Path) -> None:
    options: dict[str, Any] = {"ids": ["user"], "rename": {"user": "who"}, "append": True, "on_bad_row": "skip"}
    ingest_table(str(tmp_path), pa.Table.from_pylist(ROWS), **options)
    rows = [{**ROWS[0], "user": user} for user in ("u6", "new")]
    added = ingest_table(str(tmp_path), pa.Table.from_pylist(rows), **options).parts[""]
    assert (added.rows, added.refused) == (41, 1)
    assert sorted(read_columns(tmp_path)["who"]) == sorted([*(USERS.index(row["user"]) for row in ROWS), 6])


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        (["u", None], {"ids": ["user"]}, "row in.parquet:1: user is None; expected an id"),
        (["u", ""], {"ids": ["user"]}, "row in.parquet:1: user is ''; expected an id"),
        ([0.5, 1.5], {"ids": ["user"]}, "ids names 'user', a column of double; allowed are text and integers"),
        (["u", "v"], {"ids": ["name"]}, "ids names 'name'; the columns are ['user']"),
        (["u", "v"], {"ids": ["user"], "drop": ["user"]}, "one of them is the label, a target, or left out"),
        (["u", "v"], {"ids_of": "first"}, "ids_of is first, which needs --ids"),
    ],
)
def test_what_is_no_id_is_refused(tmp_path: Path, values: list[Any], options: dict[str, Any], expected: str) -> None:
    path = write_rows(tmp_path, "hf", [{"user": value} for value in values])
    assert expected in ingest_error(tmp_path, "hf", path, **options)


def test_a_data_set_without_ids_numbers_none(tmp_path: Path) -> None:
    path = str(write_rows(tmp_path, "csv", ROWS))
    ingest_files(str(tmp_path / "first"), "csv", path)
    with pytest.raises((ConfigError, DataError), match="has no numbers for 'user', only for"):
        ingest_files(str(tmp_path / "out"), "csv", path, ids=["user"], ids_of=str(tmp_path / "first"))
