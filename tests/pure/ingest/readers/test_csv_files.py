"""Layouts of CSV files: delimiters, header lines, quotes, encodings; and which value in which row makes a
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
from tests.support.ingest_inputs import done, read, refusal


def written(tmp_path: Path, content: str | bytes, name: str = "f.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def notes(tmp_path: Path, source: Any, given: Path, **options: Any) -> list[str]:
    summary = ingest(IngestOptions(source, str(tmp_path / "out"), str(given), **options))
    return [note for part in summary.parts.values() for note in part.notes]


@pytest.mark.parametrize(("delimiter", "word"), [(";", "semicolon"), ("\t", "tab"), ("|", "vertical bar")])
def test_another_delimiter_is_recognised_and_named(tmp_path: Path, delimiter: str, word: str) -> None:
    rows = [["a, in cm", "b", "c"], ["1", "x,y", "2"], ["3", "z", "4"]]
    given = written(tmp_path, "\n".join(delimiter.join(row) for row in rows))
    [note] = notes(tmp_path, "csv", given)
    assert f"a {word} was recognized as the delimiter of {given}" in note
    got = read(tmp_path / "out")
    assert (list(got)[1:], got["a, in cm"], got["b"], got["c"]) == (rows[0], [1, 3], ["x,y", "z"], [2, 4])


@pytest.mark.parametrize("content", ["a\n1\n2\n", "a;b\n", "a|b,c\n1,2\n3,4\n", '"a;b",c\n1,2\n3,4\n'])
def test_a_comma_stays_the_delimiter_where_rows_have_one(tmp_path: Path, content: str) -> None:
    header = content.splitlines()[0].replace('"', "")
    if header == "a;b":
        assert "no rows, only a header line with the names ['a', 'b']" in refusal(
            tmp_path, "csv", written(tmp_path, content)
        )
    else:
        assert list(done(tmp_path, "csv", written(tmp_path, content)))[1:] == header.split(",")


@pytest.mark.parametrize("delimiter", ["#", "\\t", "\t"])
def test_a_delimiter_can_be_named(tmp_path: Path, delimiter: str) -> None:
    mark = "\t" if delimiter == "\\t" else delimiter
    given = written(tmp_path, f"a{mark}b,c\n1{mark}2;0\n")
    assert notes(tmp_path, "csv", given, delimiter=delimiter) == []
    assert read(tmp_path / "out") == {"row_id": ["f.csv:2"], "a": [1], "b,c": ["2;0"]}


def test_another_delimiter_is_another_ingest(tmp_path: Path) -> None:
    given = written(tmp_path, "a;b\n1;2\n")
    done(tmp_path, "csv", given, delimiter=";")
    assert ingest(IngestOptions("csv", str(tmp_path / "out"), str(given), delimiter=";")).reused
    with pytest.raises(ConfigError, match="delimiter ';', now ','"):
        done(tmp_path, "csv", given, delimiter=",")
    with pytest.raises(ConfigError, match=r"column_names None, now \['u', 'v'\]"):
        done(tmp_path, "csv", given, delimiter=";", column_names=["u", "v"])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"delimiter": ""}, "delimiter is ''; allowed is one ASCII character"),
        ({"delimiter": ";;"}, "allowed is one ASCII character"),
        ({"delimiter": '"'}, "but no quote and no line end"),
        ({"delimiter": "\n"}, "but no quote and no line end"),
        ({"column_names": []}, "allowed are one or more names, each once"),
        ({"column_names": ["a", "a"]}, "allowed are one or more names, each once"),
        ({"source": "jsonl", "delimiter": ";"}, "only csv has it"),
        ({"source": "numpy", "column_names": ["a"]}, "only csv has it"),
    ],
)
def test_options_of_csv_that_cannot_be_meant_are_refused(
    tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    assert expected in refusal(tmp_path, **{"source": "csv", "given": written(tmp_path, "a\n1\n"), **options})


@pytest.mark.parametrize("first", ["0.5,0.25,no", "39,State,13", "1,2,0", "-1;+2;x", "0,0,0", ".5\tx\ty", "1e3|u|v"])
def test_a_header_line_of_numbers_is_refused(tmp_path: Path, first: str) -> None:
    said = refusal(tmp_path, "csv", written(tmp_path, f"{first}\n{first}\n"))
    assert f"{tmp_path / 'f.csv'}: the first line holds numbers" in said
    assert "give its 3 names by column_names" in said


@pytest.mark.parametrize("header", ["country,2019,2020,2021", "0,1,2,3", ",1990,2000,2010"])
def test_columns_that_are_called_by_counting_numbers_are_noted(tmp_path: Path, header: str) -> None:
    [note] = notes(tmp_path, "csv", written(tmp_path, f"{header}\n5,6,7,8\n"))
    assert "the names of columns in" in note
    assert "give column_names" in note
    assert list(read(tmp_path / "out"))[1:] == header.split(",")


@pytest.mark.parametrize("mark", [",", ";"])
@pytest.mark.parametrize("block", [64, 16 << 20])
def test_names_are_given_to_a_csv_without_a_header(
    tmp_path: Path, mark: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw, "BLOCK_BYTES", block)
    given = written(tmp_path, "".join(f"{i}.5{mark}{i}{mark}{'yes' if i % 2 else 'no'}\n" for i in range(50)))
    got = done(tmp_path, "csv", given, column_names=["a", "b", "y"], label="y")
    assert (got["row_id"][0], len(got["row_id"])) == ("f.csv:1", 50)
    assert (got["a"][:2], got["b"][:2], got["label"][:3]) == ([0.5, 1.5], [0, 1], [0, 1, 0])


def test_a_first_line_of_the_given_names_is_a_header(tmp_path: Path) -> None:
    got = done(tmp_path, "csv", written(tmp_path, "7,8\n1,2\n"), column_names=["7", "8"])
    assert got == {"row_id": ["f.csv:2"], "7": [1], "8": [2]}


def test_names_that_are_too_few_are_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path, "csv", written(tmp_path, "1,2\n3,4\n"), column_names=["a"])
    assert "f.csv: CSV parse error: Row #1: Expected 1 columns, got 2: 1,2" in said


def test_bad_rows_of_a_csv_without_a_header_keep_their_numbers(tmp_path: Path) -> None:
    got = done(tmp_path, "csv", written(tmp_path, "1,2\n3\n5,6\n"), column_names=["a", "b"], on_bad_row="skip")
    assert got == {"row_id": ["f.csv:1", "f.csv:3"], "a": [1, 5], "b": [2, 6]}


def test_a_column_without_a_name_keeps_none(tmp_path: Path) -> None:
    assert done(tmp_path, "csv", written(tmp_path, ",a\n0,5\n1,6\n"))[""] == [0, 1]


def test_of_many_names_those_at_fault_are_said(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(900)]
    said = refusal(tmp_path, "csv", written(tmp_path, ",".join([*names[:899], "c7"]) + "\n" + ",".join("1" * 900)))
    assert "two columns of one name: 'c7' (columns [8, 900])" in said
    assert len(said) < 400
    (tmp_path / "in").mkdir()
    for i, header in enumerate((names, [*names[:-1], "other"])):
        (tmp_path / "in" / f"{i}.csv").write_text(",".join(header) + "\n" + ",".join("1" * 900))
    said = refusal(tmp_path, "csv", tmp_path / "in")
    assert "it lacks ['c899'] and has also ['other']" in said
    assert len(said) < 700
    assert len(refusal(tmp_path, "csv", tmp_path / "in" / "0.csv", label="missing")) < 1000


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
    said = refusal(tmp_path, "csv", written(tmp_path, content), on_bad_row=on_bad_row)
    assert f"f.csv: in line {line} a quote opens a value and is not closed" in said
    assert len(said) < 400


def test_quotes_within_and_lines_in_values_are_kept(tmp_path: Path) -> None:
    got = done(tmp_path, "csv", written(tmp_path, 'a,b\n1,5" pipe\n2,"he said ""no""\nand left"\n3,"x"'))
    assert got["b"] == ['5" pipe', 'he said "no"\nand left', "x"]


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
    given = written(tmp_path, gzip.compress(content), "f.csv.gz") if packed else written(tmp_path, content)
    assert expected.replace("f.csv", given.name) in refusal(tmp_path, "csv", given)


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    assert list(done(tmp_path, "csv", written(tmp_path, b'\xef\xbb\xbf"a";b\n1;2\n'))) == ["row_id", "a", "b"]


def test_a_missing_whole_number_stays_missing(tmp_path: Path) -> None:
    summary = ingest(IngestOptions("csv", str(tmp_path / "out"), str(written(tmp_path, "a,b\n1,2\n,3\n"))))
    assert read(tmp_path / "out")["a"] == [1, None]
    assert summary.parts[""].columns["a"] == {"type": "int64", "shape": [], "dtype": "int64", "nulls": 1}


@pytest.mark.parametrize("values", [["1.0", "0.0", "2"], ["1e0", "0", "2.00"]])
def test_a_label_of_whole_numbers_with_points_is_an_integer(tmp_path: Path, values: list[str]) -> None:
    assert done(tmp_path, "csv", written(tmp_path, "y\n" + "\n".join(values)), label="y")["label"] == [1, 0, 2]


def test_a_missing_label_among_whole_numbers_with_points_is_a_bad_row(tmp_path: Path) -> None:
    given = written(tmp_path, "a,y\n1,1.0\n2,\n3,0.0\n")
    assert "row f.csv:3: no label" in refusal(tmp_path, "csv", given, label="y")
    assert done(tmp_path, "csv", given, label="y", on_bad_row="skip")["label"] == [1, 0]


ROWS = 20


@pytest.mark.parametrize(
    ("odd", "at", "expected"),
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
def test_the_value_that_makes_a_column_text_is_said(
    tmp_path: Path, odd: str, at: int, expected: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw, "BLOCK_BYTES", block)
    values = [odd if i == at else f"{i}.5" if i else "-1" for i in range(ROWS)]
    given = written(tmp_path, "v,note\n" + "\n".join(f"{value},text" for value in values))
    [note] = notes(tmp_path, "csv", given, eval_fraction=0.5)[:1]
    assert expected in note
    assert read(tmp_path / "out" / "train")["v"]


def test_a_column_of_truth_values_that_is_text_is_said(tmp_path: Path) -> None:
    [note] = notes(tmp_path, "csv", written(tmp_path, "v\ntrue\nFalse\nmaybe\n"))
    assert "column 'v' is text: 1 of its 3 values are not true or false, the first is 'maybe' in f.csv:4" in note


@pytest.mark.parametrize(
    "values", [["x", "y", "1"], ["2020-01-01", "2020-01-02", "2020-01-03"], ["1", "2", ""], ["12:30", "1:00", "2:15"]]
)
def test_columns_that_are_text_or_numbers_are_not_noted(tmp_path: Path, values: list[str]) -> None:
    assert notes(tmp_path, "csv", written(tmp_path, "a,v\n" + "\n".join(f"0,{value}" for value in values))) == []


def test_what_made_a_column_text_is_in_the_log_and_stays_in_the_data_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = written(tmp_path, "v\n1\n2\n?\n")
    first = notes(tmp_path, "csv", given)
    assert [note in caplog.text for note in first] == [True]
    caplog.clear()
    assert notes(tmp_path, "csv", given) == first
    assert first[0] in caplog.text


def test_text_in_one_of_several_files_is_said_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for i, values in enumerate((["1", "2"], ["3", "?"], ["4", "-"])):
        (tmp_path / "in" / f"{i}.csv").write_text("v\n" + "\n".join(values))
    [note] = notes(tmp_path, "csv", tmp_path / "in", split_bytes=1)
    assert "2 of its 6 values are not numbers, the first is '?' in 1.csv:3" in note


def test_numbers_as_text_in_json_lines_are_noted(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text('{"v": "1"}\n{"v": null}\n{"v": "2.5"}\n{"v": "?"}\n')
    [note] = notes(tmp_path, "jsonl", tmp_path / "f.jsonl")
    assert "column 'v' is text: 1 of its 3 values are not numbers, the first is '?' in f.jsonl:4" in note


def test_tab_separated_files_are_read_under_their_own_suffix(tmp_path: Path) -> None:
    got = done(tmp_path, "csv", written(tmp_path, "a\tb\n1\t2\n", "f.tsv"))
    np.testing.assert_array_equal([got["a"], got["b"]], [[1], [2]])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12\n", "a Git LFS pointer"),
        (b"<!DOCTYPE html>\n<html><body>Not found</body></html>\n", "a web page (HTML)"),
    ],
)
@pytest.mark.parametrize("source", ["csv", "jsonl"])
def test_what_stands_in_the_place_of_a_text_file_is_named(
    tmp_path: Path, content: bytes, expected: str, source: str
) -> None:
    assert f"f.{source}: it is {expected}" in refusal(tmp_path, source, written(tmp_path, content, f"f.{source}"))


def test_a_long_value_in_the_first_rows_hides_no_header_line(tmp_path: Path) -> None:
    long_value = "x" * 200_000
    written_file = written(tmp_path, f"text,label\n{long_value},1\nshort,2\n")
    got = done(tmp_path, "csv", written_file, column_names=["text", "label"])
    assert (got["text"], got["label"]) == ([long_value, "short"], [1, 2])
