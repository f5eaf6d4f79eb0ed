"""Values of CSV columns that numbers do not represent as they are written become text with a note, or are refused."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.ingest.readers import base
from ray_app.ingest.readers.csv_columns import ValueNotation, _may_have_leading_zeros
from tests.support.ingest_inputs import ingest_error, read_columns


def write_csv(tmp_path: Path, content: str, name: str = "f.csv") -> Path:
    (tmp_path / name).write_text(content, encoding="utf-8")
    return tmp_path / name


def ingest_csv(tmp_path: Path, content: str, **options: Any) -> tuple[dict[str, Any], list[str]]:
    """Ingests a file; returns its columns and the notes."""
    path = write_csv(tmp_path, content)
    part = ingest(IngestOptions("csv", str(tmp_path / "out"), str(path), **options)).parts[""]
    return read_columns(tmp_path / "out"), part.notes


@pytest.mark.parametrize("block", [16, 16 << 20])
@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ("01234", "01234"),
        ('"01234"', "01234"),
        ("00", "00"),
        (" 007", " 007"),
        ("-01", "-01"),
        ("+05", "+05"),
        ("0x1F", "0x1F"),
    ],
)
def test_a_column_with_leading_zeros_is_text_with_a_note(
    tmp_path: Path, value: str, stored: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "BLOCK_BYTES", block)
    columns, notes = ingest_csv(tmp_path, f"zip,n\n12345,1\n{value},2\n,3\n7,4\n")
    assert columns["zip"] == ["12345", stored, "", "7"]
    assert columns["n"] == [1, 2, 3, 4]
    assert notes == [
        f"column 'zip' is text, since a number does not keep leading zeros; the first such value is {stored.strip()!r}"
        " in f.csv:3. Write the values without these zeros if the column is to hold numbers."
    ]


@pytest.mark.parametrize(
    "values", [["0", "10", "5"], ["0.5", "-0.5", "1e05"], ["-0", "+0", " 0"], ["0.0", "0.", "0e0"]]
)
def test_a_zero_alone_or_before_a_point_is_a_number(tmp_path: Path, values: list[str]) -> None:
    columns, notes = ingest_csv(tmp_path, "v\n" + "\n".join(values))
    assert (columns["v"], notes) == ([float(value) for value in values], [])


def test_labels_that_differ_in_leading_zeros_stay_apart(tmp_path: Path) -> None:
    path = write_csv(tmp_path, "a,y\n1,007\n2,07\n3,7\n")
    part = ingest(IngestOptions("csv", str(tmp_path / "out"), str(path), label="y")).parts[""]
    assert part.classes == ["007", "07", "7"]
    assert "column 'y' is text, since a number does not keep leading zeros" in part.notes[0]


def test_leading_zeros_in_another_file_count(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_csv(tmp_path / "in", "v\n1\n", "a.csv")
    write_csv(tmp_path / "in", "v\n01\n", "b.csv")
    options = IngestOptions("csv", str(tmp_path / "out"), str(tmp_path / "in"), split_bytes=1)
    [note] = ingest(options).parts[""].notes
    assert "'01' in b.csv:2" in note
    assert read_columns(tmp_path / "out")["v"] == ["1", "01"]


def test_a_zero_before_groups_of_digits_or_a_decimal_comma(tmp_path: Path) -> None:
    columns, _ = ingest_csv(tmp_path, "a;b;c\n0,5;0.123;0\n1,5;1.234;00,5\n", decimal=",", thousands=".")
    assert columns == {"row_id": ["f.csv:2", "f.csv:3"], "a": [0.5, 1.5], "b": ["0.123", "1.234"], "c": ["0", "00,5"]}


def test_infinite_numbers_are_read_beside_decimal_commas(tmp_path: Path) -> None:
    columns, _ = ingest_csv(tmp_path, "a;b\n-inf;1\n0,5;2\nInfinity;3\n", decimal=",")
    assert columns["a"] == [-math.inf, 0.5, math.inf]


def test_candidates_of_leading_zeros_are_those_of_a_slice() -> None:
    values = pa.array(["x", "0.5", "01", None, "", "5", "-1", "0"])
    for first in range(len(values)):
        expected = [False, False, True, False, False, False, True, False][first:]
        # "x" may be preceded by anything that is no digit, but has one character alone.
        assert _may_have_leading_zeros(values[first:], ValueNotation()).tolist() == expected
    assert not np.any(_may_have_leading_zeros(pa.array([None], pa.string()), ValueNotation()))
    assert not len(_may_have_leading_zeros(pa.array([], pa.string()), ValueNotation()))


@pytest.mark.parametrize("integer", ["123456789012345678", "-9007199254740993"])
@pytest.mark.parametrize("block", [32, 16 << 20])
def test_an_integer_that_float64_would_round_is_refused_among_fractions(
    tmp_path: Path, integer: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "BLOCK_BYTES", block)
    path = write_csv(tmp_path, f"v\n1\n{integer}\n0.5\n")
    message = ingest_error(tmp_path, "csv", path, on_bad_row="skip")
    assert f"f.csv: row f.csv:3: column 'v' holds {integer}, which float64 would round" in message


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["123456789012345678", "5"], [123456789012345678, 5]),
        (["9007199254740992", "0.5"], [2.0**53, 0.5]),
        (["0.123456789012345678", "0.5"], [0.123456789012345678, 0.5]),
    ],
)
def test_long_numbers_that_are_exact_or_fractions_are_kept(
    tmp_path: Path, values: list[str], expected: list[float]
) -> None:
    assert ingest_csv(tmp_path, "v\n" + "\n".join(values))[0]["v"] == expected


def test_an_integer_that_would_be_rounded_in_a_column_that_is_left_out_is_no_error(tmp_path: Path) -> None:
    columns, _ = ingest_csv(tmp_path, "v,w\n123456789012345678,1\n0.5,2\n", drop=["v"])
    assert columns["w"] == [1, 2]


def note_on(tmp_path: Path, values: list[str], **options: Any) -> str:
    """Returns the only note on a column `v` of a file with the delimiter `|`."""
    [note] = ingest_csv(tmp_path, "v|w\n" + "\n".join(f"{value}|x" for value in values), delimiter="|", **options)[1]
    return str(note)


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        (["1,5", "2,5"], {}, "'1,5' in f.csv:2. {write}, or give --decimal , where"),
        (["1,234", "5"], {}, "or give --thousands , or --decimal , where"),
        (["1.234,5", "5"], {}, "or give --decimal , --thousands . where"),
        (
            ["1,5", "1.234"],
            {"decimal": ","},
            "1 of its 2 values {other}, the first is '1.234' in f.csv:3. {write}, or give --thousands . where",
        ),
        (
            ["1,234", "5", "1,23"],
            {"thousands": ","},
            "1 of its 3 values {other}, the first is '1,23' in f.csv:4. Correct them; the options say that numbers have"
            " the decimal mark '.', and ',' between groups",
        ),
        (["12 %", "5"], {}, "'12 %' in f.csv:2. {write}."),
        (["1 234", "5"], {}, "or give --thousands ' ' where"),
    ],
)
def test_a_note_on_numbers_in_another_notation_names_the_options(
    tmp_path: Path, values: list[str], options: dict[str, Any], expected: str
) -> None:
    write = "Write them with digits and a decimal point alone, as in 1234.5"
    other = "are numbers written in another way"
    assert expected.format(write=write, other=other) in note_on(tmp_path, values, **options)


def test_a_note_on_numbers_in_json_lines_names_no_option_of_csv(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text('{"v": "1,5"}\n{"v": "2,5"}\n')
    [note] = ingest(IngestOptions("jsonl", str(tmp_path / "out"), str(tmp_path / "f.jsonl"))).parts[""].notes
    assert note.endswith("Write them with digits and a decimal point alone, as in 1234.5.")


@pytest.mark.parametrize("blank", [" ", "\u00a0", "\u202f"])
def test_blanks_between_groups_of_digits_may_be_those_without_a_line_break(tmp_path: Path, blank: str) -> None:
    content = f"v;w\n1{blank}234,5;2{blank}000\n-3,5;0\n"
    columns, notes = ingest_csv(tmp_path, content, thousands=" ", decimal=",", delimiter=";")
    assert (columns["v"], columns["w"], notes) == ([1234.5, -3.5], [2000, 0], [])


def test_a_gap_in_a_label_of_text_names_the_row_and_the_remedy(tmp_path: Path) -> None:
    path = write_csv(tmp_path, "a,y\n1,x\n2,\n3,\n")
    message = ingest_error(tmp_path, "csv", path, label="y")
    assert "label column 'y' has rows without a value (the first is f.csv:3). Correct these rows, leave them out" in (
        message
    )
    assert ingest_csv(tmp_path, path.read_text(), label="y", on_bad_row="skip")[0]["a"] == [1]


@pytest.mark.parametrize("value", ["1e400", "-1e999", " 1e400 "])
def test_a_number_that_is_too_large_for_float64_is_a_bad_row(tmp_path: Path, value: str) -> None:
    path = write_csv(tmp_path, f"v,w\n1.5,1\n{value},2\ninf,3\n-Infinity,4\n")
    assert f"row f.csv:3: 'v' holds {value.strip()}, which is too large for float64" in ingest_error(
        tmp_path, "csv", path
    )
    columns, _ = ingest_csv(tmp_path, path.read_text(), on_bad_row="skip")
    assert columns["v"] == [1.5, float("inf"), float("-inf")]
    assert columns["w"] == [1, 3, 4]


def test_truth_values_and_numbers_in_one_column_are_text_with_a_note(tmp_path: Path) -> None:
    columns, notes = ingest_csv(tmp_path, "v,w\ntrue,True\n0,false\nfalse,\n1,TRUE\n")
    assert (columns["v"], columns["w"]) == (["true", "0", "false", "1"], [True, False, None, True])
    assert notes == [
        "column 'v' is text: 2 of its 4 values are true or false, and the others are numbers, the first is '0' in"
        " f.csv:3. Write all of them as true and false, or all as numbers."
    ]


@pytest.mark.parametrize("block", [32, 16 << 20])
def test_columns_of_dates_in_the_named_format_become_timestamps(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "BLOCK_BYTES", block)
    content = "d,iso,t,void\n31.12.2020,2020-12-31,x,\n,2021-01-01,y,\n 1.2.2021 ,2021-01-02,z,\n"
    columns, notes = ingest_csv(tmp_path, content, date_format="%d.%m.%Y")
    assert columns["d"] == [datetime(2020, 12, 31), None, datetime(2021, 2, 1)]
    assert (columns["iso"], columns["t"]) == (["2020-12-31", "2021-01-01", "2021-01-02"], ["x", "y", "z"])
    assert (columns["void"], notes) == ([None] * 3, [])


def test_dates_in_the_named_format_divide_rows_by_time(tmp_path: Path) -> None:
    path = write_csv(tmp_path, "d,x\n31.12.2020,1\n01.01.2021,2\n30.11.2020,3\n01.12.2020,4\n")
    options: dict[str, Any] = {"split_by": "d", "eval_fraction": 0.25}
    assert "of csv in another form by --date_format" in ingest_error(tmp_path, "csv", path, **options)
    ingest(IngestOptions("csv", str(tmp_path / "out"), str(path), date_format="%d.%m.%Y", **options))
    assert read_columns(tmp_path / "out" / "eval")["x"] == [2]


@pytest.mark.parametrize("block", [24, 16 << 20])
def test_a_value_that_is_not_in_the_named_format_is_noted(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "BLOCK_BYTES", block)
    columns, notes = ingest_csv(tmp_path, "d,t\n31.12.2020,x\n31.02.2020,y\n01.01.2020,z\n", date_format="%d.%m.%Y")
    assert columns["d"] == ["31.12.2020", "31.02.2020", "01.01.2020"]
    assert len(notes) == 1
    assert "column 'd' is text: '31.02.2020' in f.csv:3 is not of the form that --date_format states" in notes[0]


def test_dates_with_an_offset_are_stored_in_utc(tmp_path: Path) -> None:
    columns, _ = ingest_csv(tmp_path, "d\n31.12.2020 23:00 -0200\n", date_format="%d.%m.%Y %H:%M %z")
    assert columns["d"] == [datetime(2021, 1, 1, 1, tzinfo=UTC)]


@pytest.mark.parametrize(
    ("value", "options"),
    [
        ("31.12.2020", "--date_format '%d.%m.%Y'"),
        ("12/31/2020", "--date_format '%m/%d/%Y'"),
        ("01/02/2020", "--date_format '%d/%m/%Y' or --date_format '%m/%d/%Y'"),
        ("31.12.2020 13:45", "--date_format '%d.%m.%Y %H:%M'"),
    ],
)
def test_a_note_names_the_format_of_a_column_that_looks_like_dates(tmp_path: Path, value: str, options: str) -> None:
    assert note_on(tmp_path, [value, value]) == (
        f"column 'v' is text, and its first value, {value!r} in f.csv:2, looks like a date. Give {options} if all of"
        " its values are such dates."
    )


@pytest.mark.parametrize("date_format", ["", "d.m.Y", "%Q", "%"])
def test_a_format_of_dates_that_cannot_be_read_is_refused(tmp_path: Path, date_format: str) -> None:
    path = write_csv(tmp_path, "a\n1\n")
    assert f"date_format is {date_format!r}; allowed is a format of Python's strptime" in ingest_error(
        tmp_path, "csv", path, date_format=date_format
    )


def test_leading_zeros_count_although_the_values_before_are_dates(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_text("c\n01022020\n11022020\n")
    (tmp_path / "in" / "b.csv").write_text("c\n7\n")
    options = IngestOptions("csv", str(tmp_path / "out"), str(tmp_path / "in"), date_format="%d%m%Y")
    notes = ingest(options).parts[""].notes
    assert read_columns(tmp_path / "out")["c"] == ["01022020", "11022020", "7"]
    assert "'01022020' in a.csv:2" in notes[0]


def test_numbers_with_leading_zeros_divide_no_rows_and_say_why(tmp_path: Path) -> None:
    content = "m,x\n" + "".join(f"{number:02},{number}\n" for number in range(1, 13))
    options: dict[str, Any] = {"split_by": "m", "eval_fraction": 0.2}
    path = write_csv(tmp_path, content)
    assert "with zeros before it, a number is text" in ingest_error(tmp_path, "csv", path, **options)
    message = ingest_error(tmp_path, "csv", write_csv(tmp_path, "m,x\nbad,1\n"), **options, on_bad_row="skip")
    assert "has no value in any row that is a date, a time or a number" in message
