"""Values of CSV columns that numbers do not represent as they are written become text with a note, or are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.ingest.readers import base
from ray_app.ingest.readers.csv_columns import _may_have_leading_zeros
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


def test_a_zero_before_a_decimal_comma(tmp_path: Path) -> None:
    columns, _ = ingest_csv(tmp_path, "a;c\n0,5;0\n1,5;00,5\n", decimal=",")
    assert columns == {"row_id": ["f.csv:2", "f.csv:3"], "a": [0.5, 1.5], "c": ["0", "00,5"]}


def test_infinite_numbers_are_read_beside_decimal_commas(tmp_path: Path) -> None:
    columns, _ = ingest_csv(tmp_path, "a;b\n-inf;1\n0,5;2\nInfinity;3\n", decimal=",")
    assert columns["a"] == [-math.inf, 0.5, math.inf]


def test_candidates_of_leading_zeros_are_those_of_a_slice() -> None:
    values = pa.array(["x", "0.5", "01", None, "", "5", "-1", "0"])
    for first in range(len(values)):
        expected = [False, False, True, False, False, False, True, False][first:]
        # "x" may be preceded by anything that is no digit, but has one character alone.
        assert _may_have_leading_zeros(values[first:], ".").tolist() == expected
    assert not np.any(_may_have_leading_zeros(pa.array([None], pa.string()), "."))
    assert not len(_may_have_leading_zeros(pa.array([], pa.string()), "."))


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
        (["1.234,5", "5"], {}, "'1.234,5' in f.csv:2. {write}."),
        (["12 %", "5"], {}, "'12 %' in f.csv:2. {write}."),
        (
            ["1,5", "1.234"],
            {"decimal": ","},
            "1 of its 2 values {other}, the first is '1.234' in f.csv:3. Correct them; the options say that numbers"
            " have the decimal mark ','.",
        ),
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


def test_numbers_with_leading_zeros_divide_no_rows_and_say_why(tmp_path: Path) -> None:
    content = "m,x\n" + "".join(f"{number:02},{number}\n" for number in range(1, 13))
    options: dict[str, Any] = {"split_by": "m", "eval_fraction": 0.2}
    path = write_csv(tmp_path, content)
    assert "with zeros before it, a number is text" in ingest_error(tmp_path, "csv", path, **options)
    message = ingest_error(tmp_path, "csv", write_csv(tmp_path, "m,x\nbad,1\n"), **options, on_bad_row="skip")
    assert "has no value in any row that is a date, a time or a number" in message
