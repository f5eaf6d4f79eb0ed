"""CSV files of all delimiters, header lines, quotes and encodings are read, and notes name the values that make a
column text.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_app.errors import ConfigError
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.ingest.readers import base as raw
from tests.support.ingest_inputs import ingest_and_read, ingest_error, read_columns


def write_file(tmp_path: Path, content: str | bytes, name: str = "f.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def ingest_notes(tmp_path: Path, source: Any, path: Path, **options: Any) -> list[str]:
    summary = ingest(IngestOptions(source, str(tmp_path / "out"), str(path), **options))
    return [note for part in summary.parts.values() for note in part.notes]


@pytest.mark.parametrize(("delimiter", "word"), [(";", "semicolon"), ("\t", "tab"), ("|", "vertical bar")])
def test_another_delimiter_is_recognized_and_noted(tmp_path: Path, delimiter: str, word: str) -> None:
    rows = [["a, in cm", "b", "c"], ["1", "x,y", "2"], ["3", "z", "4"]]
    path = write_file(tmp_path, "\n".join(delimiter.join(row) for row in rows))
    [note] = ingest_notes(tmp_path, "csv", path)
    assert f"a {word} was recognized as the delimiter of {path}" in note
    columns = read_columns(tmp_path / "out")
    assert (list(columns)[1:], columns["a, in cm"], columns["b"], columns["c"]) == (
        rows[0],
        [1, 3],
        ["x,y", "z"],
        [2, 4],
    )


@pytest.mark.parametrize("content", ["a\n1\n2\n", "a;b\n", "a|b,c\n1,2\n3,4\n", '"a;b",c\n1,2\n3,4\n'])
def test_a_comma_stays_the_delimiter_where_rows_have_one(tmp_path: Path, content: str) -> None:
    header = content.splitlines()[0].replace('"', "")
    if header == "a;b":
        assert "no rows, only a header line with the names ['a', 'b']" in ingest_error(
            tmp_path, "csv", write_file(tmp_path, content)
        )
    else:
        assert list(ingest_and_read(tmp_path, "csv", write_file(tmp_path, content)))[1:] == header.split(",")


@pytest.mark.parametrize("delimiter", ["#", "\\t", "\t"])
def test_the_delimiter_option_sets_the_delimiter(tmp_path: Path, delimiter: str) -> None:
    mark = "\t" if delimiter == "\\t" else delimiter
    path = write_file(tmp_path, f"a{mark}b,c\n1{mark}2;0\n")
    assert ingest_notes(tmp_path, "csv", path, delimiter=delimiter) == []
    assert read_columns(tmp_path / "out") == {"row_id": ["f.csv:2"], "a": [1], "b,c": ["2;0"]}


def test_ingesting_with_other_csv_options_into_one_folder_is_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path, "a;b\n1;2\n")
    ingest_and_read(tmp_path, "csv", path, delimiter=";")
    assert ingest(IngestOptions("csv", str(tmp_path / "out"), str(path), delimiter=";")).reused
    with pytest.raises(ConfigError, match="delimiter ';', now ','"):
        ingest_and_read(tmp_path, "csv", path, delimiter=",")
    with pytest.raises(ConfigError, match=r"column_names None, now \['u', 'v'\]"):
        ingest_and_read(tmp_path, "csv", path, delimiter=";", column_names=["u", "v"])


@pytest.mark.parametrize("first", ["0.5,0.25,no", "39,State,13", "1,2,0", "-1;+2;x", "0,0,0", ".5\tx\ty", "1e3|u|v"])
def test_a_header_line_of_numbers_is_refused(tmp_path: Path, first: str) -> None:
    message = ingest_error(tmp_path, "csv", write_file(tmp_path, f"{first}\n{first}\n"))
    assert f"{tmp_path / 'f.csv'}: the first line holds numbers" in message
    assert "give its 3 names: --column_names" in message


@pytest.mark.parametrize("header", ["country,2019,2020,2021", "0,1,2,3", ",1990,2000,2010"])
def test_column_names_that_are_consecutive_numbers_are_noted(tmp_path: Path, header: str) -> None:
    [note] = ingest_notes(tmp_path, "csv", write_file(tmp_path, f"{header}\n5,6,7,8\n"))
    assert "the names of columns in" in note
    assert "give --column_names" in note
    assert list(read_columns(tmp_path / "out"))[1:] == header.split(",")


@pytest.mark.parametrize("mark", [",", ";"])
@pytest.mark.parametrize("block", [64, 16 << 20])
def test_column_names_name_the_columns_of_a_csv_without_a_header(
    tmp_path: Path, mark: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw, "BLOCK_BYTES", block)
    path = write_file(tmp_path, "".join(f"{i}.5{mark}{i}{mark}{'yes' if i % 2 else 'no'}\n" for i in range(50)))
    columns = ingest_and_read(tmp_path, "csv", path, column_names=["a", "b", "y"], label="y")
    assert (columns["row_id"][0], len(columns["row_id"])) == ("f.csv:1", 50)
    assert (columns["a"][:2], columns["b"][:2], columns["label"][:3]) == ([0.5, 1.5], [0, 1], [0, 1, 0])


def test_a_first_line_equal_to_column_names_is_a_header(tmp_path: Path) -> None:
    columns = ingest_and_read(tmp_path, "csv", write_file(tmp_path, "7,8\n1,2\n"), column_names=["7", "8"])
    assert columns == {"row_id": ["f.csv:2"], "7": [1], "8": [2]}


def test_too_few_column_names_are_refused(tmp_path: Path) -> None:
    message = ingest_error(tmp_path, "csv", write_file(tmp_path, "1,2\n3,4\n"), column_names=["a"])
    assert "f.csv: CSV parse error: Row #1: Expected 1 columns, got 2: 1,2" in message


def test_bad_rows_of_a_csv_without_a_header_do_not_shift_row_ids(tmp_path: Path) -> None:
    columns = ingest_and_read(
        tmp_path, "csv", write_file(tmp_path, "1,2\n3\n5,6\n"), column_names=["a", "b"], on_bad_row="skip"
    )
    assert columns == {"row_id": ["f.csv:1", "f.csv:3"], "a": [1, 5], "b": [2, 6]}


def test_a_column_without_a_name_keeps_the_empty_name(tmp_path: Path) -> None:
    assert ingest_and_read(tmp_path, "csv", write_file(tmp_path, ",a\n0,5\n1,6\n"))[""] == [0, 1]


@pytest.mark.rest
def test_errors_about_many_columns_name_only_the_wrong_ones(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(300)]
    message = ingest_error(
        tmp_path, "csv", write_file(tmp_path, ",".join([*names[:299], "c7"]) + "\n" + ",".join("1" * 300))
    )
    assert "two columns of one name: 'c7' (columns [8, 300])" in message
    assert len(message) < 400
    (tmp_path / "in").mkdir()
    for i, header in enumerate((names, [*names[:-1], "other"])):
        (tmp_path / "in" / f"{i}.csv").write_text(",".join(header) + "\n" + ",".join("1" * 300))
    message = ingest_error(tmp_path, "csv", tmp_path / "in")
    assert "it lacks ['c299'] and has also ['other']" in message
    assert len(message) < 700
    assert len(ingest_error(tmp_path, "csv", tmp_path / "in" / "0.csv", label="missing")) < 1000


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('a,b\n1,"x\n2,y\n3,z\n', 2),
        ('a,b\n1,"x\n2,"y"\n3,z\n', 2),
        ('a,b\n0,w\n"1,x\n2,y\n3,z\n', 3),
        ('a,b\n0,"two\nlines"\n1,"x\n2,y\n', 4),
        ('a,b\n1,"' + "x\n2,y\n" * 500, 2),
    ],
)
@pytest.mark.parametrize("on_bad_row", ["fail", "skip"])
def test_a_quote_that_is_not_closed_is_refused(
    tmp_path: Path, content: str, line: int, on_bad_row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw, "BLOCK_BYTES", 2000)
    message = ingest_error(tmp_path, "csv", write_file(tmp_path, content), on_bad_row=on_bad_row)
    assert f"f.csv: in line {line} a quote opens a value and is not closed" in message
    assert len(message) < 400


def test_quotes_and_line_breaks_within_values_are_kept(tmp_path: Path) -> None:
    columns = ingest_and_read(
        tmp_path, "csv", write_file(tmp_path, 'a,b\n1,5" pipe\n2,"he said ""no""\nand left"\n3,"x"')
    )
    assert columns["b"] == ['5" pipe', 'he said "no"\nand left', "x"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a,b\n1,2\n".encode("utf-16"), "it is UTF-16, and not UTF-8"),
        ("a,b\n1,2\n".encode("utf-16-le"), "it is UTF-16, and not UTF-8"),
        ("a,b\n1,2\n".encode("utf-16-be"), "it is UTF-16, and not UTF-8"),
        ("a,b\n1,2\n".encode("utf-32"), "it is UTF-32, and not UTF-8"),
        (b"a,caf\xe9\n1,2\n", "f.csv: 'utf-8' codec can't decode byte 0xe9"),
        (b"a,b\n1,2\n3,caf\xe9\n", "Row #3: CSV conversion error to string: invalid UTF8 data"),
        (b"a,b\n1,2\n3,x\0y\n", "f.csv: row 3 has a zero byte in the column 'b'"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_csv_that_is_not_utf8_is_refused(tmp_path: Path, content: bytes, expected: str, packed: bool) -> None:
    path = write_file(tmp_path, gzip.compress(content), "f.csv.gz") if packed else write_file(tmp_path, content)
    assert expected.replace("f.csv", path.name) in ingest_error(tmp_path, "csv", path)


def test_a_byte_order_mark_is_not_part_of_a_column_name(tmp_path: Path) -> None:
    assert list(ingest_and_read(tmp_path, "csv", write_file(tmp_path, b'\xef\xbb\xbf"a";b\n1;2\n'))) == [
        "row_id",
        "a",
        "b",
    ]


ROWS = 20


@pytest.mark.parametrize(
    ("text_value", "position", "expected"),
    [
        ("?", 7, "column 'v' is text: 1 of its 20 values are not numbers, the first is '?' in f.csv:9"),
        ("n.a.", 0, "1 of its 20 values are not numbers, the first is 'n.a.' in f.csv:2"),
        ('"7,5"', 3, "1 of its 20 values are numbers written in another way, the first is '7,5' in f.csv:5"),
        ('"1,234.5"', 3, "the first is '1,234.5' in f.csv:5. Write them with digits and a decimal point alone"),
        ("12 %", 3, "the first is '12 %' in f.csv:5"),
        ("12345678901234567891", 3, "all of its 20 values are numbers"),
    ],
)
@pytest.mark.parametrize("block", [32, 16 << 20])
def test_a_note_names_the_value_that_makes_a_column_text(
    tmp_path: Path, text_value: str, position: int, expected: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw, "BLOCK_BYTES", block)
    values = [text_value if i == position else f"{i}.5" if i else "-1" for i in range(ROWS)]
    path = write_file(tmp_path, "v,note\n" + "\n".join(f"{value},text" for value in values))
    [note] = ingest_notes(tmp_path, "csv", path, eval_fraction=0.5)[:1]
    assert expected in note
    assert read_columns(tmp_path / "out" / "train")["v"]


def test_a_note_names_the_value_that_makes_a_bool_column_text(tmp_path: Path) -> None:
    [note] = ingest_notes(tmp_path, "csv", write_file(tmp_path, "v\ntrue\nFalse\nmaybe\n"))
    assert "column 'v' is text: 1 of its 3 values are not true or false, the first is 'maybe' in f.csv:4" in note


@pytest.mark.parametrize(
    "values", [["x", "y", "1"], ["2020-01-01", "2020-01-02", "2020-01-03"], ["1", "2", ""], ["12:30", "1:00", "2:15"]]
)
def test_columns_that_are_text_or_numbers_are_not_noted(tmp_path: Path, values: list[str]) -> None:
    assert (
        ingest_notes(tmp_path, "csv", write_file(tmp_path, "a,v\n" + "\n".join(f"0,{value}" for value in values))) == []
    )


def test_the_note_on_a_text_column_is_logged_and_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_file(tmp_path, "v\n1\n2\n?\n")
    first = ingest_notes(tmp_path, "csv", path)
    assert [note in caplog.text for note in first] == [True]
    caplog.clear()
    assert ingest_notes(tmp_path, "csv", path) == first
    assert first[0] in caplog.text


def test_a_note_on_a_text_column_names_the_file_of_the_value(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for i, values in enumerate((["1", "2"], ["3", "?"], ["4", "-"])):
        (tmp_path / "in" / f"{i}.csv").write_text("v\n" + "\n".join(values))
    [note] = ingest_notes(tmp_path, "csv", tmp_path / "in", split_bytes=1)
    assert "2 of its 6 values are not numbers, the first is '?' in 1.csv:3" in note


def test_numbers_as_text_in_json_lines_are_noted(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text('{"v": "1"}\n{"v": null}\n{"v": "2.5"}\n{"v": "?"}\n')
    [note] = ingest_notes(tmp_path, "jsonl", tmp_path / "f.jsonl")
    assert "column 'v' is text: 1 of its 3 values are not numbers, the first is '?' in f.jsonl:4" in note


def test_tab_separated_files_are_read_under_their_own_suffix(tmp_path: Path) -> None:
    columns = ingest_and_read(tmp_path, "csv", write_file(tmp_path, "a\tb\n1\t2\n", "f.tsv"))
    np.testing.assert_array_equal([columns["a"], columns["b"]], [[1], [2]])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12\n", "a Git LFS pointer"),
        (b"<!DOCTYPE html>\n<html><body>Not found</body></html>\n", "a web page (HTML)"),
    ],
)
@pytest.mark.parametrize("source", ["csv", "jsonl"])
def test_a_git_lfs_pointer_or_web_page_in_place_of_a_text_file_is_named(
    tmp_path: Path, content: bytes, expected: str, source: str
) -> None:
    assert f"f.{source}: it is {expected}" in ingest_error(
        tmp_path, source, write_file(tmp_path, content, f"f.{source}")
    )


def test_a_long_value_in_the_first_rows_does_not_hide_the_header(tmp_path: Path) -> None:
    long_value = "x" * 200_000
    path = write_file(tmp_path, f"text,label\n{long_value},1\nshort,2\n")
    columns = ingest_and_read(tmp_path, "csv", path, column_names=["text", "label"])
    assert (columns["text"], columns["label"]) == ([long_value, "short"], [1, 2])
