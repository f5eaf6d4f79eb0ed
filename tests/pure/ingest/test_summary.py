"""The summary of a data set: statistics of columns, the table that users see, previews and descriptions."""

from __future__ import annotations

import datetime
import json
import threading
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_app.cli.main import main
from ray_app.data.plain_columns import to_plain
from ray_app.errors import DataError
from ray_app.ingest.ingest import IngestOptions, describe, ingest, preview, run_in_threads
from ray_app.ingest.readers.sources import make_table
from ray_app.ingest.summary import HEADER, MAX_VALUES, ColumnStatistics, count_missing, merge_statistics

CSV = "age,sex,id,survived\n" + "".join(
    f"{'' if i % 10 == 0 else i % 7},{('male', 'female')[i % 3 == 0]},n{i},{('no', 'yes')[i % 2]}\n" for i in range(300)
)


def statistics_of(table: pa.Table) -> dict[str, Any]:
    """Returns the statistics of a table as it is read from a file."""
    statistics = ColumnStatistics()
    statistics.add(to_plain(table))
    return statistics.columns


def write_csv(folder: Path) -> Path:
    """Writes a file with a column that has gaps, categories, names and classes."""
    folder.mkdir(exist_ok=True)
    (folder / "people.csv").write_text(CSV)
    return folder / "people.csv"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3, 1, None, 3], {"minimum": 1, "maximum": 3, "values": {"3": 2, "1": 1}, "examples": ["3", "1"]}),
        ([0.5, float("nan"), float("inf")], {"minimum": 0.5, "maximum": 0.5, "not_finite": 2}),
        ([float("nan")], {"not_finite": 1}),
        ([True, False, True], {"values": {"True": 2, "False": 1}, "examples": ["True", "False"]}),
        (["b", None, "a", "b"], {"values": {"b": 2, "a": 1}, "examples": ["b", "a"]}),
        ([b"12", b"", None], {"lengths": [0, 2]}),
        ([[1, 2], [], [7]], {"lengths": [0, 2], "minimum": 1, "maximum": 7}),
        ([[[1.5], [2.5]], [[3.0]]], {"lengths": [1, 2], "minimum": 1.5, "maximum": 3.0, "not_finite": 0}),
        ([Decimal("1.25"), Decimal("3.00")], {"minimum": 1.25, "maximum": 3.0, "not_finite": 0}),
        (
            [datetime.date(2024, 2, 1), None, datetime.date(2023, 5, 1)],
            {"minimum": "2023-05-01", "maximum": "2024-02-01"},
        ),
        ([datetime.timedelta(1)], {}),
        (["x" * 201, "y"], {"values": None, "examples": ["x" * 200, "y"]}),
        ([None, None], {}),
        ([[{"a": 1}]], {"lengths": [1, 1]}),
    ],
)
def test_the_statistics_of_a_column(values: list[Any], expected: dict[str, Any]) -> None:
    assert statistics_of(pa.table({"x": pa.array(values)})) == {"x": expected}


def test_the_statistics_of_arrays_and_dictionaries() -> None:
    table = make_table(["a", "b"], {"image": np.array([[[1, 9]], [[4, 2]]], np.uint8)})
    assert statistics_of(table)["image"] == {"minimum": 1, "maximum": 9}
    words = pa.table({"x": pa.array(["u", "v", "u"]).dictionary_encode()})
    assert statistics_of(words)["x"]["values"] == {"u": 2, "v": 1}


def test_dates_that_python_does_not_have_leave_the_range_out(tmp_path: Path) -> None:
    columns = {
        "late": pa.array([300_000_000_000], pa.timestamp("s")),
        "early": pa.array([-1_000_000], pa.date32()),
        "zone": pa.array([1], pa.timestamp("s", "Mars/X")),
        "view": pa.array([b"abc"], pa.binary_view()),
    }
    statistics = statistics_of(pa.table(columns))
    assert [statistics[name] for name in ("late", "early", "view")] == [{}, {}, {"lengths": [3, 3]}]
    pq.write_table(pa.table({name: columns[name] for name in ("late", "early")}), tmp_path / "a.parquet")
    assert describe(str(tmp_path / "a.parquet")).rows == 1


def test_times_of_a_zone_are_compared_in_utc() -> None:
    moments = [datetime.datetime(2026, 10, 25, hour, 30, tzinfo=datetime.UTC) for hour in (0, 1)]
    parts = [
        statistics_of(pa.table({"t": pa.array([moment], pa.timestamp("us", "Europe/Berlin"))})) for moment in moments
    ]
    merged = merge_statistics(parts)["t"]
    assert (merged["minimum"], merged["maximum"]) == ("2026-10-25T00:30:00+00:00", "2026-10-25T01:30:00+00:00")


def test_values_that_begin_alike_are_counted_apart() -> None:
    paths = [f"s3://bucket/some/very/long/prefix/of/pictures/{i}.png" for i in range(90)]
    assert statistics_of(pa.table({"path": paths}))["path"]["values"] == dict.fromkeys(paths, 1)


def test_different_values_are_counted_up_to_a_limit() -> None:
    table = pa.table({"few": [f"v{i % MAX_VALUES}" for i in range(500)], "many": [f"v{i}" for i in range(500)]})
    few, many = statistics_of(table).values()
    assert few["values"] == {f"v{i}": 5 for i in range(MAX_VALUES)}
    assert many == {"values": None, "examples": ["v0", "v1", "v2"]}


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.none() | st.integers(-5, 200),
            st.none() | st.floats(width=32),
            st.none() | st.text(max_size=2),
            st.lists(st.integers(0, 9), max_size=3),
        ),
        max_size=150,
    ),
    st.lists(st.integers(0, 150), max_size=4),
)
def test_statistics_do_not_depend_on_how_rows_are_divided(rows: list[tuple[Any, ...]], cuts: list[int]) -> None:
    kinds = {"i": pa.int64(), "f": pa.float32(), "t": pa.string(), "l": pa.list_(pa.int64())}
    table = pa.table({name: pa.array([row[k] for row in rows], kind) for k, (name, kind) in enumerate(kinds.items())})
    bounds = sorted({0, *(min(cut, len(rows)) for cut in cuts), len(rows)})
    parts = [table.slice(low, high - low) for low, high in pairwise(bounds)] or [table]
    merged, streamed = merge_statistics([statistics_of(part) for part in parts]), ColumnStatistics()
    for part in parts:
        streamed.add(part)
    whole = without_examples(statistics_of(table))
    assert without_examples(merged) == whole
    assert without_examples(streamed.columns) == whole


def without_examples(statistics: dict[str, Any]) -> dict[str, Any]:
    """Returns the statistics that do not depend on the order in which values are seen."""
    return {name: {key: v for key, v in facts.items() if key != "examples"} for name, facts in statistics.items()}


def test_an_ingest_records_what_is_in_its_columns(tmp_path: Path) -> None:
    options = IngestOptions("csv", str(tmp_path / "out"), str(write_csv(tmp_path / "in")), label="survived")
    rows = {row[0]: row[1:] for row in ingest(options).parts[""].table()}
    assert rows == {
        "row_id": ("string", "id of the row", "0", ""),
        "age": ("int64", "feature", "30", "0 to 6"),
        "sex": ("string", "text or category", "0", "male 200, female 100"),
        "id": ("string", "text or category", "0", rows["id"][3]),
        "label": ("int64", "label", "0", "no 150, yes 150"),
    }
    assert rows["id"][3].endswith("... (more than 100 different, or long)")
    stored = json.loads((tmp_path / "out" / "_dataset.json").read_text())
    assert stored["statistics"]["sex"]["values"] == {"male": 200, "female": 100}


@pytest.mark.parametrize("eval_fraction", [0.0, 0.25])
def test_a_preview_of_all_rows_shows_what_an_ingest_writes(tmp_path: Path, eval_fraction: float) -> None:
    source, out = write_csv(tmp_path / "in"), tmp_path / "out"
    options = IngestOptions("csv", str(out), str(source), label="survived", eval_fraction=eval_fraction)
    previewed = preview(options)
    assert not out.exists()
    summary = ingest(options)
    assert previewed.parts.keys() == summary.parts.keys()
    for name, part in summary.parts.items():
        first_rows = previewed.parts[name]
        assert (first_rows.rows, first_rows.columns, first_rows.class_counts) == (
            part.rows,
            part.columns,
            part.class_counts,
        )
        assert without_examples(first_rows.statistics) == without_examples(part.statistics)


def test_a_preview_reads_the_first_rows_only(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "in")
    (part,) = preview(IngestOptions("csv", input=str(file)), rows=40).parts.values()
    assert (part.path, part.rows, str(part)) == ("data set", 40, "data set: first 40 rows")
    assert list((tmp_path / "in").iterdir()) == [file]


def test_a_preview_refuses_a_bad_row_like_an_ingest(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "in")
    path.write_text(CSV + "1,male,n,\n")
    with pytest.raises(DataError, match="rows without a value"):
        preview(IngestOptions("csv", input=str(path), label="survived"))


def test_a_preview_of_no_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(DataError, match="no rows"):
        preview(IngestOptions("jsonl", input=str(tmp_path / "a.jsonl")))


def test_values_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"x": ["1:100:2", "\x1b[31m", "a\nb", ":heart:"] * 2}), tmp_path / "a.parquet")
    assert main(["describe", str(tmp_path)]) == 0
    assert "1:100:2 2, \\x1b[31m 2, a\\nb 2, :heart: 2" in capsys.readouterr().out


def test_describe_of_an_ingested_data_set_is_the_summary_of_the_ingest(tmp_path: Path) -> None:
    out, source = tmp_path / "out", write_csv(tmp_path / "in")
    summary = ingest(IngestOptions("csv", str(out), str(source), label="survived", eval_fraction=0.3))
    described = describe(str(out))
    assert list(described.parts) == ["train", "eval"]
    assert [part.table() for part in described.parts.values()] == [part.table() for part in summary.parts.values()]
    assert describe(str(out / "eval")).parts[""].rows == summary.parts["eval"].rows


def test_describe_of_a_folder_of_parquet_names_what_cannot_be_used(tmp_path: Path) -> None:
    columns = {
        "when": pa.array([datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)] * 3),
        "nested": pa.array([[("a", 1)]] * 3, pa.map_(pa.string(), pa.int64())),
        "__index_level_0__": pa.array([0, 1, 2]),
        "x": pa.array([1.0, float("nan"), None]),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    rows = {row[0]: row[1:] for row in describe(str(tmp_path)).parts[""].table()}
    assert rows["when"][1] == "date or time"
    assert rows["nested"][1] == "not usable: convert it to numbers, text, bytes or lists of numbers"
    assert rows["__index_level_0__"][1] == "none, unless named"
    assert rows["x"] == ("float64", "feature", "1, 1 NaN or infinite", "1")


def test_the_commands_show_the_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write_csv(tmp_path / "in"), tmp_path / "out"
    ingest_command = ["ingest", "--source", "csv", "--input", str(source), "--label", "survived", "--drop", "[id]"]
    assert main([*ingest_command, "--dry_run", "true"]) == 0
    dry = capsys.readouterr().out
    assert "no files are written" in dry
    assert not out.exists()
    assert main([*ingest_command, "--out", str(out)]) == 0
    written = capsys.readouterr().out
    assert main(["describe", str(out)]) == 0
    described = capsys.readouterr().out
    assert described.splitlines()[1].split() == list(HEADER)
    for output in (dry, written, described):
        assert "  sex     string  text or category  0        male 200, female 100" in output
    for output in (dry, written):
        assert "Columns left out: id" in output
    assert main(["describe", str(tmp_path / "absent")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_notebooks_show_the_columns_as_a_table(tmp_path: Path) -> None:
    pq.write_table(pa.table({"<b>": ["x & y"] * 2}), tmp_path / "a.parquet")
    html = describe(str(tmp_path))._repr_html_()
    assert "<th>column</th>" in html
    assert "<td>&lt;b&gt;</td>" in html
    assert "<td>x &amp; y 2</td>" in html


def test_a_refusal_leaves_no_thread_that_reads(tmp_path: Path) -> None:
    """A pool of threads that the garbage collector ends can block the thread in which it does so."""
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.csv").write_text("a,label\n" + "1,0\n" * 50 + ",\n" * 3)
    before = set(threading.enumerate())
    options = IngestOptions(
        "csv", str(tmp_path / "out"), str(folder), label="label", on_bad_row="skip", max_bad_rows=4, split_bytes=1
    )
    with pytest.raises(DataError, match="max_bad_rows") as caught:
        ingest(options, lambda function, items: run_in_threads(function, items, threads=2))
    assert caught.value.__traceback__ is not None
    assert set(threading.enumerate()) == before


def test_empty_texts_are_stored_as_they_are_and_counted_as_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "a.csv", tmp_path / "out"
    source.write_text("n,t,void\n1,x,\n,,\n3,NA,\n4,x,\n")
    (written,) = ingest(IngestOptions("csv", str(out), str(source))).parts.values()
    (sample,) = preview(IngestOptions("csv", input=str(source))).parts.values()
    (described,) = describe(str(out)).parts.values()
    (out / "_dataset.json").unlink()
    (measured,) = describe(str(out)).parts.values()
    for part in (written, sample, described, measured):
        rows = {row[0]: row[1:] for row in part.table()}
        assert rows["n"][2] == "1"
        assert rows["t"] == ("text" if part is measured else "string", "text or category", "1", "x 2, NA 1")
        assert part.columns["t"]["nulls"] == 1
        assert "" not in part.statistics["t"]["examples"]
    assert sorted(pq.read_table(out / "part-00000.parquet")["t"].to_pylist()) == ["", "NA", "x", "x"]


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["", "b", None, ""]),
        pa.array(["", "b", None, ""], pa.large_string()),
    ],
)
def test_empty_texts_of_all_types_are_missing(column: pa.Array) -> None:
    assert count_missing(pa.chunked_array([column])) == 3
    assert statistics_of(pa.table({"x": column}))["x"] == {"values": {"b": 1}, "examples": ["b"]}


def test_names_of_classes_and_values_are_shown_without_control_characters(tmp_path: Path) -> None:
    source = tmp_path / "a.csv"
    source.write_text('"a\x1b[31m",y,t\n1,"no\x1b[31m","one, two"\n2,"two\nlines"," x"\n3,"two\nlines",three\n')
    summary = ingest(IngestOptions("csv", str(tmp_path / "out"), str(source), label="y"))
    rows = {row[0]: row[-1] for row in summary.parts[""].table()}
    assert rows["label"] == "no\\x1b[31m 1, two\\nlines 2"
    assert sorted(rows["t"]) == sorted("'one, two', ' x', three")
    assert "a\\x1b[31m" in rows
    html = summary._repr_html_()
    assert "\x1b" not in html
    assert "two\\nlines 2" in html


def test_a_preview_says_that_refused_rows_are_listed_by_an_ingest(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,y\n1,x\n2\n3,x\n")
    options = IngestOptions("csv", input=str(tmp_path / "a.csv"), label="y", on_bad_row="skip")
    (part,) = preview(options).parts.values()
    assert str(part) == (
        "data set: first 2 rows, 1 class, 1 row refused (an ingest lists them in _refused.jsonl, with reasons)"
    )


@pytest.mark.parametrize(("name", "source"), [("t.csv", "csv"), ("t.tsv.gz", "csv"), ("t.jsonl", "jsonl")])
def test_describe_of_a_text_file_names_the_command_that_shows_it(tmp_path: Path, name: str, source: str) -> None:
    path = tmp_path / name
    path.write_text("a\n1\n")
    with pytest.raises(DataError) as error:
        describe(str(path))
    assert f"ray-app ingest --source {source} --input {path} --dry_run true" in str(error.value)
    assert "remove" not in str(error.value)
