"""CSV files as people have them: encodings, marks of numbers, spellings of missing values, chosen columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ray_app.cli.ingest import main
from ray_app.errors import ConfigError, DataError
from ray_app.ingest.ingest import IngestOptions, PartSummary, ingest


def ingest_csv(folder: Path, content: bytes | str, **options: Any) -> tuple[dict[str, list[Any]], PartSummary]:
    """Ingests a file; returns its columns, sorted by row, without the ids, and the summary."""
    file, out = folder / "a.csv", folder / "out"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    summary = ingest(IngestOptions("csv", str(out), str(file), **options)).parts[""]
    table = pq.read_table(out / "part-00000.parquet").sort_by("row_id").drop_columns("row_id")
    return table.to_pydict(), summary


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "cp1252", "utf-16"])
def test_each_encoding_is_read_as_it_was_written(tmp_path: Path, encoding: str) -> None:
    columns, _ = ingest_csv(tmp_path, "größe,wort\n1,ä\n2,ß\n".encode(encoding), encoding=encoding)
    assert columns == {"größe": [1, 2], "wort": ["ä", "ß"]}


def test_another_encoding_than_the_named_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"it is not cp1252: .*Name another encoding"):
        ingest_csv(tmp_path, b"a,b\n1,\x81\n", encoding="cp1252")
    with pytest.raises(DataError, match="name another delimiter or encoding"):
        ingest_csv(tmp_path, "a,b\n1,ä\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"it is UTF-16.*--encoding utf-16"):
        ingest_csv(tmp_path, "a,b\n1,2\n".encode("utf-16"))


def test_decimal_commas_are_numbers(tmp_path: Path) -> None:
    columns, summary = ingest_csv(tmp_path, "price;word\n1,5;1,5x\n-2000,25;y\n;\n", decimal=",")
    assert columns == {"price": [1.5, -2000.25, None], "word": ["1,5x", "y", ""]}
    assert "a semicolon was recognized" in summary.notes[0]


@pytest.mark.parametrize("value", ["1.5", "1.234", "1,5,0"])
def test_a_number_in_another_notation_than_the_named_one_stays_text(tmp_path: Path, value: str) -> None:
    columns, _ = ingest_csv(tmp_path, f"a;b\n{value};1\n2,5;2\n", decimal=",")
    assert columns["a"] == [value, "2,5"]


def test_further_spellings_are_missing_values_in_numbers_and_text(tmp_path: Path) -> None:
    text = "n,t,k\n1,?,x\n?,-,y\n3, ? ,x\n"
    columns, summary = ingest_csv(tmp_path, text, null=["?", "-"], label="k")
    assert columns == {"n": [1, None, 3], "t": [None] * 3, "label": [0, 1, 0]}
    assert summary.columns["n"]["nulls"] == 1
    (tmp_path / "two").mkdir()
    with pytest.raises(DataError, match="rows without a value"):
        ingest_csv(tmp_path / "two", "n,k\n1,?\n2,x\n", null="?", label="k")


def test_columns_are_chosen_and_dropped(tmp_path: Path) -> None:
    text = "a,b,k\n1,2,x\n"
    assert ingest_csv(tmp_path, text, columns=["a"], label="k")[0] == {"a": [1], "label": [0]}
    (tmp_path / "two").mkdir()
    assert ingest_csv(tmp_path / "two", text, drop=["b"], rename={"a": "c"})[0] == {"c": [1], "k": ["x"]}
    (tmp_path / "three").mkdir()
    with pytest.raises(ConfigError, match=r"drop names 'z'; the columns are \['a', 'b', 'k'\]"):
        ingest_csv(tmp_path / "three", text, drop=["z"])
    with pytest.raises(ConfigError, match="drop names all columns"):
        ingest_csv(tmp_path / "three", text, drop=["a", "b", "k"])


def test_classes_have_the_order_that_is_named_and_numbers_are_names(tmp_path: Path) -> None:
    columns, summary = ingest_csv(tmp_path, "a,k\n1,1\n2,-1\n", label="k", classes=["-1", "1"])
    assert columns["label"] == [1, 0]
    assert (summary.classes, summary.class_counts) == (["-1", "1"], {"-1": 1, "1": 1})
    (tmp_path / "two").mkdir()
    text = "a,k\n1,small\n2,large\n3,huge\n"
    with pytest.raises(DataError, match=r"has the values \['huge'\], which classes lacks"):
        ingest_csv(tmp_path / "two", text, label="k", classes=["small", "large"])
    options = {"label": "k", "classes": ["small", "large"], "on_bad_row": "skip"}
    columns, summary = ingest_csv(tmp_path / "two", text, **options)
    assert (columns["label"], summary.refused) == ([0, 1], 1)


def test_a_header_of_numbers_is_refused_with_both_commands(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        ingest_csv(tmp_path, "1,2.5\n3,4\n")
    for names in ("[column_1, column_2]", '["1", "2.5"]'):
        assert f"--column_names '{names}'" in str(error.value)


def test_the_command_takes_the_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_bytes("größe;k\n1,5;?\n2;x\n".encode("cp1252"))
    command = ["--source", "csv", "--input", str(tmp_path / "a.csv"), "--out", str(tmp_path / "out")]
    options = ["--encoding", "cp1252", "--decimal", ",", "--null", "?"]
    assert main([*command, *options]) == 0, capsys.readouterr().err
    assert pq.read_table(tmp_path / "out" / "part-00000.parquet")["größe"].to_pylist() in ([1.5, 2.0], [2.0, 1.5])


@pytest.mark.parametrize(
    ("text", "columns", "note"),
    [
        (
            "x\tt\n'1'\t'a b'\n'2'\t'c\td'\n",
            {"x": [1, 2], "t": ["a b", "c\td"]},
            "' was recognized as the quote",
        ),
        ("'a','b \"c\"'\n1,2\n", {"a": [1], 'b "c"': [2]}, "' was recognized as the quote"),
        ("# by a tool, 2024, v3\n# x\na,b\n1,2\n", {"a": [1], "b": [2]}, "the first 2 lines of"),
        ("Sales 2024,,\n\na,b,c\n1,2,3\n4,5,6\n", {"a": [1, 4], "b": [2, 5], "c": [3, 6]}, "the first 2 lines of"),
        ('Sales\n"u,v",b\n"two\nlines",2\nx,3\n', {"u,v": ["two\nlines", "x"], "b": [2, 3]}, "the first line of"),
        ('t\n"a, b"\n"c, d"\n', {"t": ["a, b", "c, d"]}, None),
        ("#id,b\n1,2\n3,4\n", {"#id": [1, 3], "b": [2, 4]}, None),
        ("a\n1\n2\n", {"a": [1, 2]}, None),
        ("a,b\n'tis,1\nit's,2\n", {"a": ["'tis", "it's"], "b": [1, 2]}, None),
        ("Price ($),Weight [kg]\n1.5,2\n", {"Price ($)": [1.5], "Weight [kg]": [2]}, None),
    ],
)
def test_files_as_other_tools_write_them(
    tmp_path: Path, text: str, columns: dict[str, list[Any]], note: str | None
) -> None:
    actual, summary = ingest_csv(tmp_path, text)
    assert actual == columns
    assert any(note in line for line in summary.notes) if note else not summary.notes


@pytest.mark.parametrize("text", ["# by a tool\na^b\n1,5^2\n", "a^b\n1,5^2\n2,5^2\n", "A title\n\na^b\n1,5^2\n"])
def test_lines_above_the_header_are_told_by_the_delimiter_that_is_named(tmp_path: Path, text: str) -> None:
    columns, _ = ingest_csv(tmp_path, text, delimiter="^", decimal=",")
    assert (columns["a"][0], columns["b"][0]) == (1.5, 2)


def test_a_total_in_the_last_row_is_refused_or_left_out(tmp_path: Path) -> None:
    text = "name,x,y\na,1,2\nTotal,3,\nb,2,5\nTotal,,7\n"
    with pytest.raises(DataError, match=r"row 5, the last of its file, seems to be the total.*--on_bad_row skip"):
        ingest_csv(tmp_path, text)
    columns, _ = ingest_csv(tmp_path, text, on_bad_row="skip")
    assert columns == {"name": ["a", "Total", "b"], "x": [1, 3, 2], "y": [2, None, 5]}
