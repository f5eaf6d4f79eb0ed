"""Values of the .json of WebDataset files by their keys: as columns, and as a label of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.ingest_inputs import ingest_and_read, ingest_error, write_tar


def write_rows(path: Path, *contents: Any) -> Path:
    """Writes a row of a .txt and a .json for each content; bytes are written as they are."""
    members: dict[str, bytes] = {}
    for number, content in enumerate(contents):
        encoded = content if isinstance(content, bytes) else json.dumps(content).encode()
        members |= {f"{number}.txt": b"text %d" % number, f"{number}.json": encoded}
    path.parent.mkdir(exist_ok=True)
    write_tar(path, members)
    return path


def test_values_of_the_json_become_columns_by_their_keys(tmp_path: Path) -> None:
    """Integers and fractions of several files are one column of fractions, and a value may be missing."""
    write_rows(
        tmp_path / "in" / "0.tar",
        {"caption": "ein Möwe", "width": 3, "x": 1, "is_new": True, "tags": ["a"], "box": [1, 2]},
        {"caption": None, "x": 2, "width": 4, "box": [3, 4]},
    )
    write_rows(tmp_path / "in" / "1.tar", {"caption": "b", "width": 5, "x": 0.5, "is_new": False, "box": [5, 6]})
    columns = ["text", "json.caption", "json.width", "json.x", "json.is_new", "json.box"]
    rows = ingest_and_read(tmp_path, "webdataset", tmp_path / "in", columns=columns, split_bytes=1)
    assert rows.pop("row_id") == ["0.tar:0", "0.tar:1", "1.tar:0"]
    assert rows.pop("box").tolist() == [[1, 2], [3, 4], [5, 6]]
    assert rows == {
        "text": ["text 0", "text 1", "text 0"],
        "caption": ["ein Möwe", None, "b"],
        "width": [3, 4, 5],
        "x": [1.0, 2.0, 0.5],
        "is_new": [True, None, False],
    }


def test_the_json_stays_a_column_if_it_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.tar", {"a": 1})
    rows = ingest_and_read(tmp_path, "webdataset", path, columns=["json", "json.a"])
    assert (rows["json"], rows["a"], rows.keys()) == (['{"a": 1}'], [1], {"row_id", "json", "a"})


def test_a_label_of_integers_may_be_a_column_too(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.tar", {"kind": 4}, {"kind": 2})
    rows = ingest_and_read(tmp_path, "webdataset", path, label="kind", columns=["json.kind"])
    assert (rows["label"], rows["kind"]) == ([4, 2], [4, 2])


def test_the_first_row_need_not_have_a_label(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.tar", {"kind": None}, {"kind": "wren"})
    rows = ingest_and_read(tmp_path, "webdataset", path, label="kind", columns=["text"], on_bad_row="skip")
    assert (rows["text"], rows["label"]) == (["text 1"], [0])


@pytest.mark.parametrize(
    ("contents", "options", "expected"),
    [
        ([{"a": 1}, {"a": "x"}], {"columns": ["json.a"]}, "a number 1 times, first 1 in in.tar:0; text 1 times"),
        ([{"a": 1}, {"a": True}], {"columns": ["json.a"]}, "the values of 'a' have several types"),
        ([{"a": {"b": 1}}], {"columns": ["json.a"]}, "key 'a' holds objects"),
        ([{"a": 1}], {"columns": ["json.b"]}, "no key 'b'"),
        ([{"a": 2**53 + 1}, {"a": 0.5}], {"columns": ["json.a"]}, "holds 9007199254740993, which float64 would round"),
        ([{"a": 1}, b'{"a": NaN}'], {"columns": ["json.a"]}, "row in.tar:1: not JSON: 'a' holds NaN"),
        ([{"a": 0.5}, b'{"a": 1' + b"0" * 400 + b"}"], {"columns": ["json.a"]}, "which float64 would round"),
        ([{"a": "b"}, b'{"a": "\\ud83d"}'], {"columns": ["json.a"]}, "row in.tar:1: JSON parse error"),
        ([{"y": "a"}, b'{"y": "\\ud83d"}'], {"label": "y"}, "row in.tar:1: JSON parse error"),
        ([{"y": "a"}, {"y": ["a"]}], {"label": "y"}, "the values of 'y' have several types"),
        ([{"a": 1}, b"[1]"], {"columns": ["json.a"]}, ".json is no object"),
        ([{"a": 1}, b"{"], {"columns": ["json.a"]}, "row in.tar:1"),
        ([{"text": 1}], {"columns": ["text", "json.text"]}, "become one column 'text'"),
        ([{"label": 1, "y": 1}], {"columns": ["json.label"], "label": "y"}, "become one column 'label'"),
        ([{"json": 1}], {"columns": ["json.json"]}, "become one column 'json'"),
        ([{"y": "a"}, {"y": 1}], {"label": "y"}, "the values of 'y' have several types"),
    ],
)
def test_values_of_the_json_that_are_no_column_are_refused(
    tmp_path: Path, contents: list[Any], options: dict[str, Any], expected: str
) -> None:
    path = write_rows(tmp_path / "in.tar", *contents)
    assert expected in ingest_error(tmp_path, "webdataset", path, **options)


def test_keys_of_the_json_need_a_json(tmp_path: Path) -> None:
    write_tar(tmp_path / "in.tar", {"0.txt": b"x"})
    assert "no .json" in ingest_error(tmp_path, "webdataset", tmp_path / "in.tar", columns=["text", "json.a"])
