"""CSV files as people have them are read; values that would be lost are refused, or make a column text with a note."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.ingest.readers import sources
from ray_app.ingest.readers.csv_columns import may_have_leading_zeros
from tests.support.ingest_inputs import ingest_and_read, ingest_error, read_columns

SKIP = {"on_bad_row": "skip"}
LABEL = {"label": "k"}
GERMAN = "größe,wort\n1,ä\n2,ß\n"
NO_ZEROS = "since a number does not keep leading zeros; the first such value is "
NAMED = {"column_names": ["a", "b"]}


def write_file(tmp_path: Path, content: str | bytes, name: str = "f.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def notes_of(tmp_path: Path, source: Any, path: Path, **options: Any) -> list[str]:
    summary = ingest(IngestOptions(source, str(tmp_path / "out"), str(path), **options))
    return [note for part in summary.parts.values() for note in part.notes]


def with_zeros(value: str) -> tuple[Any, ...]:
    """Returns a file with a value that a number does not keep, and how it is read."""
    stored = value.strip('"')
    columns = {"zip": ["12345", stored, "", "7"], "n": [1, 2, 3, 4]}
    note = f"'zip' is text, {NO_ZEROS}{stored.strip()!r} in f.csv:3"
    return f"zip,n\n12345,1\n{value},2\n,3\n7,4\n", {}, columns, note


def numbers(*values: str) -> tuple[Any, ...]:
    """Returns a file of a column of numbers."""
    return "v\n" + "\n".join(values), {}, {"v": [float(value) for value in values]}, ""


def text(*values: str, **options: Any) -> tuple[Any, ...]:
    """Returns a file with values that stay text, and with a semicolon; the note is not compared."""
    return "v;n\n" + "".join(f"{value};1\n" for value in values), options, {"v": list(values)}, None


READ: dict[str, tuple[str | bytes, dict[str, Any], dict[str, Any], str | None]] = {
    **{f"zeros {value}": with_zeros(value) for value in ("01234", '"01234"', "00", " 007", "-01", "+05", "0x1F")},
    "zeros alone": numbers("0", "10", "5"),
    "zeros before points": numbers("0.5", "-0.5", "1e05"),
    "signed zeros": numbers("-0", "+0", " 0"),
    "zeros after points": numbers("0.0", "0.", "0e0"),
    "exact": numbers("9007199254740992", "0.5"),
    "fractions": numbers("0.123456789012345678", "0.5"),
    "long integers": ("v\n123456789012345678\n5\n", {}, {"v": [123456789012345678, 5]}, ""),
    "a dropped column": ("v,w\n123456789012345678,1\n0.5,2\n", {"drop": ["v"]}, {"w": [1, 2]}, ""),
    "unsigned": ("v\n12345678901234567890\n7\n", {}, {"v": [12345678901234567890, 7]}, ""),
    "too long for 64 bits": ("v\n12345678901234567890\n-7\n", {}, {"v": ["12345678901234567890", "-7"]}, "too long"),
    "too long and fractions": (
        "v\n12345678901234567891\n0.5\nNA\n",
        {},
        {"v": ["12345678901234567891", "0.5", "NA"]},
        "too",
    ),
    "exact above 64 bits": numbers("100000000000000000000", "0.5", "1e300"),
    "blanks": (
        "a, b, c\n1, true, 2\nNA , False , NA\n",
        {},
        {"a": [1, None], " b": [True, False], " c": [2, None]},
        "",
    ),
    "labels with zeros": ("a,k\n1,007\n2,07\n3,7\n", LABEL, {"label": [0, 1, 2]}, "column 'k' is text"),
    "zeros before a comma": ("a;c\n0,5;0\n1,5;00,5\n", {"decimal": ","}, {"a": [0.5, 1.5], "c": ["0", "00,5"]}, None),
    "infinite": (
        "a;b\n-inf;1\n0,5;2\nInfinity;3\n",
        {"decimal": ","},
        {"a": [-math.inf, 0.5, math.inf]},
        "a semicolon was",
    ),
    "decimal commas": (
        "price;word\n1,5;1,5x\n-2000,25;y\n;\n",
        {"decimal": ","},
        {"price": [1.5, -2000.25, None], "word": ["1,5x", "y", ""]},
        "a semicolon was recognized",
    ),
    "recognized decimal commas": ("p;w\n1,5;x\n-2000,25;y\n", {}, {"p": [1.5, -2000.25]}, "a semicolon was recognized"),
    "pairs in quotes": ('n,p\n1,"1,2"\n2,"3,4"\n', {}, {"p": ["1,2", "3,4"]}, "column 'p' is text"),
    **{f"{value} with a comma": text(value, "2,5", decimal=",") for value in ("1.5", "1.234", "1,5,0")},
    "truth values": ('w\nTrue\nfalse\n""\nTRUE\n', {}, {"w": [True, False, None, True]}, ""),
    "truth values and numbers": (
        "v\ntrue\n0\nfalse\n1\n",
        {},
        {"v": ["true", "0", "false", "1"]},
        "2 of its 4 values are true or false, and the others are numbers, the first is '0' in f.csv:3",
    ),
    "too large": ("v,w\n1.5,1\n1e400,2\ninf,3\n", SKIP, {"v": [1.5, math.inf], "w": [1, 3]}, ""),
    "a gap in a label": ("a,k\n1,x\n2,\n3,\n", {**LABEL, **SKIP}, {"a": [1], "label": [0]}, ""),
    **{
        name: (GERMAN.encode(name), {"encoding": name}, {"größe": [1, 2], "wort": ["ä", "ß"]}, "")
        for name in ("utf-8", "latin-1", "cp1252", "utf-16")
    },
    "other spellings of missing values": (
        "n,t,k\n1,?,x\n?,-,y\n3, ? ,x\n",
        {"null": ["?", "-"], **LABEL},
        {"n": [1, None, 3], "t": [None] * 3, "label": [0, 1, 0]},
        "",
    ),
    "columns": ("a,b,k\n1,2,x\n", {"columns": ["a"], **LABEL}, {"a": [1], "label": [0]}, ""),
    "renamed": ("a,b,k\n1,2,x\n", {"drop": ["b"], "rename": {"a": "c"}}, {"c": [1], "k": ["x"]}, ""),
    "named classes": ("a,k\n1,1\n2,-1\n", {**LABEL, "classes": ["-1", "1"]}, {"label": [1, 0]}, ""),
    "some classes": (
        "a,k\n1,small\n2,large\n3,huge\n",
        {**LABEL, **SKIP, "classes": ["small", "large"]},
        {"label": [0, 1]},
        "",
    ),
    "single quotes": ("x\tt\n'1'\t'a b'\n'2'\t'c\td'\n", {}, {"x": [1, 2], "t": ["a b", "c\td"]}, "as the quote"),
    "a header in single quotes": ("'a','b \"c\"'\n1,2\n", {}, {"a": [1], 'b "c"': [2]}, "as the quote"),
    "comments above": ("# by a tool, 2024, v3\n# x\na,b\n1,2\n", {}, {"a": [1], "b": [2]}, "the first 2 lines of"),
    "a title of a spreadsheet": ("Sales 2024,,\n\na,b,c\n1,2,3\n", {}, {"a": [1], "c": [3]}, "the first 2 lines of"),
    "a title": ('Sales\n"u,v",b\n"two\nlines",2\n', {}, {"u,v": ["two\nlines"], "b": [2]}, "the first line of"),
    "one column": ('t\n"a, b"\n"c, d"\n', {}, {"t": ["a, b", "c, d"]}, ""),
    "a name with #": ("#id,b\n1,2\n3,4\n", {}, {"#id": [1, 3], "b": [2, 4]}, ""),
    "apostrophes": ("a,b\n'tis,1\nit's,2\n", {}, {"a": ["'tis", "it's"], "b": [1, 2]}, ""),
    "units in names": ("Price ($),Weight [kg]\n1.5,2\n", {}, {"Price ($)": [1.5], "Weight [kg]": [2]}, ""),
    "a comment above ^": ("# by a tool\na^b\n1,5^2\n", {"delimiter": "^", "decimal": ","}, {"a": [1.5]}, None),
    "a title above ^": ("A title\n\na^b\n1,5^2\n", {"delimiter": "^", "decimal": ","}, {"a": [1.5]}, None),
    "a total": (
        "name,x,y\na,1,2\nTotal,3,\nb,2,5\nTotal,,7\n",
        SKIP,
        {"name": ["a", "Total", "b"], "y": [2, None, 5]},
        "",
    ),
    **{
        word: (f'"a, in cm"{mark}b\n1{mark}"x,y"\n', {}, {"a, in cm": [1], "b": ["x,y"]}, f"a {word} was recognized")
        for mark, word in ((";", "semicolon"), ("\t", "tab"), ("|", "vertical bar"))
    },
    "a comma and a bar": ("a|b,c\n1,2\n3,4\n", {}, {"a|b": [1, 3], "c": [2, 4]}, ""),
    "a quoted semicolon": ('"a;b",c\n1,2\n3,4\n', {}, {"a;b": [1, 3], "c": [2, 4]}, ""),
    "the option delimiter": ("a#b,c\n1#2;0\n", {"delimiter": "#"}, {"a": [1], "b,c": ["2;0"]}, ""),
    "a tab by name": ("a\tb,c\n1\t2;0\n", {"delimiter": "\\t"}, {"a": [1], "b,c": ["2;0"]}, ""),
    "years as names": ("country,2019,2020,2021\n5,6,7,8\n", {}, {"country": [5], "2020": [7]}, "set --column_names"),
    "an index as names": (",1990,2000,2010\n5,6,7,8\n", {}, {"": [5], "2010": [8]}, "the names of columns in"),
    "no header": (
        "0.5,no\n1.5,yes\n",
        NAMED,
        {"row_id": ["f.csv:1", "f.csv:2"], "a": [0.5, 1.5], "b": ["no", "yes"]},
        "",
    ),
    "no header, semicolons": ("0.5;no\n1.5;yes\n", NAMED, {"a": [0.5, 1.5], "b": ["no", "yes"]}, None),
    "a header of the names": ("7,8\n1,2\n", {"column_names": ["7", "8"]}, {"row_id": ["f.csv:2"], "7": [1]}, ""),
    "ids of rows": ("1,2\n3\n5,6\n", {**NAMED, **SKIP}, {"row_id": ["f.csv:1", "f.csv:3"], "a": [1, 5]}, ""),
    "line breaks": (
        'a,b\n1,5" pipe\n2,"he said ""no""\nand left"\n3,"x"',
        {},
        {"b": ['5" pipe', 'he said "no"\nand left', "x"]},
        "",
    ),
    "a byte order mark": (b'\xef\xbb\xbf"a";b\n1;2\n', {}, {"a": [1], "b": [2]}, "a semicolon"),
}


@pytest.mark.parametrize("block", [64, 16 << 20])
@pytest.mark.parametrize("case", READ)
def test_values_are_read_as_they_are_written(
    tmp_path: Path, case: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", block)
    content, options, columns, note = READ[case]
    notes = notes_of(tmp_path, "csv", write_file(tmp_path, content), **options)
    stored = read_columns(tmp_path / "out")
    assert {name: stored[name] for name in columns} == columns
    assert note is None or (any(note in line for line in notes) if note else not notes)


OPEN_QUOTES = ('a,b\n1,"x\n2,y\n3,z\n', 'a,b\n1,"x\n2,"y"\n3,z\n', 'a,b\n1,"' + "x\n2,y\n" * 500)
REFUSED: dict[str, tuple[str | bytes, dict[str, Any], str]] = {
    **{
        f"rounded {value}": (
            f"v\n1\n{value}\n0.5\n",
            SKIP,
            f"row f.csv:3: column 'v' holds {value}, which float64 would",
        )
        for value in ("123456789012345678", "-9007199254740993")
    },
    **{
        f"too large {value}": (f"v,w\n1.5,1\n{value},2\n", {}, f"row f.csv:3: 'v' holds {value.strip()}, which is too")
        for value in ("1e400", "-1e999", " 1e400 ")
    },
    "too few values": ("a,b\n1,2\n3\n", {}, "f.csv: CSV parse error: Row #3: Expected 2 columns, got 1"),
    "an empty file": ("", {}, "f.csv: Empty CSV file"),
    "repeated names": ("a,a\n1,2\n", {}, "'a' (columns [1, 2])"),
    "a column row_id": ("row_id\n1\n", {}, "`row_id` is reserved"),
    "a label of 65 bits": ("a,k\n1,0\n2,9223372036854775808\n", LABEL, "label 9223372036854775808"),
    "a label of text": ("a,label\n1,u\n", {}, "`label` is of type string"),
    "rename an absent column": ("a,y\n1,2\n", {"rename": {"b": "c"}}, "['b']"),
    "a gap in a label": (
        "a,k\n1,x\n2,\n",
        LABEL,
        "has rows without a value (the first is f.csv:3). Correct these rows",
    ),
    "a missing value as label": ("n,k\n1,?\n2,x\n", {"null": "?", **LABEL}, "rows without a value"),
    "another encoding": (b"a,b\n1,\x81\n", {"encoding": "cp1252"}, "is not cp1252: "),
    "latin-1": ("a,b\n1,ä\n".encode("latin-1"), {}, "such as --encoding cp1252"),
    "utf-16": ("a,b\n1,2\n".encode("utf-16"), {}, "--encoding utf-16"),
    "drop an absent column": ("a,b\n1,2\n", {"drop": ["z"]}, "drop names 'z'; the columns are ['a', 'b']"),
    "drop all": ("a,b\n1,2\n", {"drop": ["a", "b"]}, "drop names all columns"),
    "another class": (
        "a,k\n3,huge\n",
        {**LABEL, "classes": ["small"]},
        "has the values ['huge'], but classes has only",
    ),
    "a header of numbers": ("1,2.5\n3,4\n", {}, "--column_names '[column_1, column_2]'"),
    "numbers as names": ("1,2.5\n3,4\n", {}, '--column_names \'["1", "2.5"]\''),
    **{
        f"header {first}": (f"{first}\n{first}\n", {}, "f.csv: the first line holds numbers")
        for first in ("0.5,0.25,no", "39,State,13", "1,2,0", "-1;+2;x", "0,0,0", ".5\tx\ty", "1e3|u|v")
    },
    "a total": ("name,x,y\na,1,2\nTotal,,7\n", {}, "row 3, the last row of the file, seems to be a total"),
    "a header alone": ("a;b\n", {}, "no rows, only a header line with the names ['a', 'b']"),
    "too few names": (
        "1,2\n3,4\n",
        {"column_names": ["a"]},
        "f.csv: CSV parse error: Row #1: Expected 1 columns, got 2",
    ),
    **{
        f"an open quote {number} {option}": (
            content,
            {"on_bad_row": option},
            "in line 2, a quote opens a value but is not",
        )
        for number, content in enumerate(OPEN_QUOTES)
        for option in ("fail", "skip")
    },
    "an open quote first": ('a,b\n0,w\n"1,x\n2,y\n3,z\n', {}, "in line 3, a quote opens a value"),
    "an open quote behind two lines": ('a,b\n0,"two\nlines"\n1,"x\n2,y\n3,z\n', {}, "in line 4, a quote opens a value"),
    "zeros that divide rows": ("m,x\n01,1\n02,2\n", {"split_by": "m", "eval_fraction": 0.2}, "a number with leading"),
    "no times": (
        "m,x\nbad,1\n",
        {"split_by": "m", "eval_fraction": 0.2, **SKIP},
        "has no value in any row that is a date",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_would_be_lost_are_refused(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 2000)
    content, options, message = REFUSED[case]
    error = ingest_error(tmp_path, "csv", write_file(tmp_path, content), **options)
    assert message in error
    assert len(error) < 600


PLAIN = "Write them with digits and a decimal point only, as in 1234.5"
NOTES: list[tuple[list[str], dict[str, Any], str]] = [
    (["1", "2", "?"], {}, "column 'v' is text: 1 of its 3 values are not numbers, the first is '?' in f.csv:4"),
    (["n.a.", "1.5", "2"], {}, "1 of its 3 values are not numbers, the first is 'n.a.' in f.csv:2"),
    (["1", "12345678901234567891", "0.5"], {}, "all of its 3 values are numbers"),
    (["true", "False", "maybe"], {}, "1 of its 3 values are not true or false, the first is 'maybe' in f.csv:4"),
    (["1,5", "2,5"], {}, "a decimal comma was recognized"),
    (["0,125", "-1,250"], {}, "a decimal comma was recognized"),
    (["1,5", "2,5"], {"decimal": "."}, f"'1,5' in f.csv:2. {PLAIN}."),
    (["1,5", "2.5"], {}, f"'1,5' in f.csv:2. {PLAIN}."),
    (["1,250", "10,125"], {}, f"'1,250' in f.csv:2. {PLAIN}."),
    (["1.234,5", "5"], {}, f"'1.234,5' in f.csv:2. {PLAIN}."),
    (["12 %", "5"], {}, f"'12 %' in f.csv:2. {PLAIN}."),
    (["1,5", "1.234"], {"decimal": ","}, "the first is '1.234' in f.csv:3. Correct them; numbers have"),
    (["x", "y", "1"], {}, ""),
    (["2020-01-01", "2020-01-02"], {}, ""),
    (["1", "2", ""], {}, ""),
    (["12:30", "1:00", "2:15"], {}, ""),
]


@pytest.mark.parametrize("block", [32, 16 << 20])
@pytest.mark.parametrize(("values", "options", "note"), NOTES, ids=str)
def test_a_note_names_the_value_that_makes_a_column_text(
    tmp_path: Path, values: list[str], options: dict[str, Any], note: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", block)
    path = write_file(tmp_path, "v|w\n" + "".join(f"{value}|x\n" for value in values))
    notes = notes_of(tmp_path, "csv", path, delimiter="|", **options)
    assert note in notes[0] if note else not notes


def test_a_note_is_of_all_files_and_is_logged_and_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "in").mkdir()
    for i, values in enumerate((["1", "2"], ["3", "?"], ["4", "-"])):
        write_file(tmp_path / "in", "v\n" + "\n".join(values), f"{i}.csv")
    for _ in range(2):
        [note] = notes_of(tmp_path, "csv", tmp_path / "in", split_bytes=1)
        assert "2 of its 6 values are not numbers, the first is '?' in 1.csv:3" in note
        assert note in caplog.text
        caplog.clear()


def test_leading_zeros_in_another_file_count(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_file(tmp_path / "in", "v\n1\n", "a.csv")
    write_file(tmp_path / "in", "v\n01\n", "b.csv")
    [note] = notes_of(tmp_path, "csv", tmp_path / "in", split_bytes=1)
    assert "'01' in b.csv:2" in note
    assert read_columns(tmp_path / "out")["v"] == ["1", "01"]


def test_candidates_of_leading_zeros_are_those_of_a_slice() -> None:
    values = pa.array(["x", "0.5", "01", None, "", "5", "-1", "-01", "+0.1", "0"])
    for first in range(len(values)):
        expected = [False, False, True, False, False, False, False, True, False, False][first:]
        # "x" may be preceded by anything that is no digit, but has one character alone.
        assert may_have_leading_zeros(values[first:], ".").tolist() == expected
    assert not np.any(may_have_leading_zeros(pa.array([None], pa.string()), "."))
    assert not len(may_have_leading_zeros(pa.array([], pa.string()), "."))


@pytest.mark.parametrize(
    ("value", "note"),
    [("1,5", f"{PLAIN}."), ("?", "is text: 1 of its 3 values are not numbers, the first is '?' in f.jsonl")],
)
def test_a_note_on_numbers_in_json_lines_names_no_option_of_csv(tmp_path: Path, value: str, note: str) -> None:
    path = write_file(tmp_path, f'{{"v": "1"}}\n{{"v": null}}\n{{"v": "2.5"}}\n{{"v": "{value}"}}\n', "f.jsonl")
    assert note in notes_of(tmp_path, "jsonl", path)[0]


@pytest.mark.rest
def test_errors_about_many_columns_name_only_the_wrong_ones(tmp_path: Path) -> None:
    names = [f"c{i}" for i in range(300)]
    path = write_file(tmp_path, ",".join([*names[:299], "c7"]) + "\n" + ",".join("1" * 300))
    message = ingest_error(tmp_path, "csv", path)
    assert "two columns with the same name: 'c7' (columns [8, 300])" in message
    assert len(message) < 400
    (tmp_path / "in").mkdir()
    for i, header in enumerate((names, [*names[:-1], "other"])):
        write_file(tmp_path / "in", ",".join(header) + "\n" + ",".join("1" * 300), f"{i}.csv")
    message = ingest_error(tmp_path, "csv", tmp_path / "in")
    assert "lacks ['c299'] and also has ['other']" in message
    assert len(message) < 700
    assert len(ingest_error(tmp_path, "csv", tmp_path / "in" / "0.csv", label="missing")) < 1000


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a,b\n1,2\n".encode("utf-16-le"), "is UTF-16 instead of UTF-8"),
        ("a,b\n1,2\n".encode("utf-16-be"), "is UTF-16 instead of UTF-8"),
        ("a,b\n1,2\n".encode("utf-32"), "is UTF-32 instead of UTF-8"),
        (b"a,caf\xe9\n1,2\n", "f.csv: 'utf-8' codec can't decode byte 0xe9"),
        (b"a,b\n1,2\n3,caf\xe9\n", "Row #3: CSV conversion error to string: invalid UTF8 data"),
        (b"a,b\n1,2\n3,x\0y\n", "f.csv: row 3 has a zero byte in the column 'b'"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_csv_that_is_not_utf8_is_refused(tmp_path: Path, content: bytes, expected: str, packed: bool) -> None:
    path = write_file(tmp_path, gzip.compress(content), "f.csv.gz") if packed else write_file(tmp_path, content)
    assert expected.replace("f.csv", path.name) in ingest_error(tmp_path, "csv", path)


def test_a_folder_without_csv_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    assert "no CSV file" in ingest_error(tmp_path, "csv", tmp_path / "in")


def test_tab_separated_files_are_read_under_their_own_suffix(tmp_path: Path) -> None:
    assert ingest_and_read(tmp_path, "csv", write_file(tmp_path, "a\tb\n1\t2\n", "f.tsv"))["b"] == [2]


def test_a_long_value_in_the_first_rows_does_not_hide_the_header(tmp_path: Path) -> None:
    long_value = "x" * 200_000
    path = write_file(tmp_path, f"text,label\n{long_value},1\nshort,2\n")
    columns = ingest_and_read(tmp_path, "csv", path, column_names=["text", "label"])
    assert (columns["text"], columns["label"]) == ([long_value, "short"], [1, 2])
