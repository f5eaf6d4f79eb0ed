"""Rows are divided between `train` and `eval` by their ids, a group, a time, or the classes of the label."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_app.errors import DataError
from ray_app.ingest.ingest import DatasetSummary, IngestOptions, ingest, ingest_files
from ray_app.ingest.options import python_spelling
from tests.support.ingest_inputs import ingest_error, read_columns

ROWS = 1200


def write_visits(folder: Path, files: int = 3) -> Path:
    """Writes visits of patients: each patient has several in successive rows, in all files; a class has few rows."""
    folder.mkdir(exist_ok=True)
    for file in range(files):
        lines = []
        for row in range(file * ROWS // files, (file + 1) * ROWS // files):
            date = f"2026-{1 + (row * 7) % 12:02}-{1 + row % 28:02}"
            lines.append(f"p{(row // 4) % 60},{date},{row / 10},{'b' if row % 10 == 0 else 'a'}\n")
        (folder / f"{file}.csv").write_text("patient,date,x,kind\n" + "".join(lines))
    return folder


def divide(tmp_path: Path, **options: Any) -> tuple[dict[str, Any], dict[str, Any], DatasetSummary]:
    """Ingests the visits and returns the columns of `train` and `eval`, and the summary."""
    source = write_visits(tmp_path / "in")
    fraction = options.pop("eval_fraction", 0.2)
    summary = ingest(
        IngestOptions("csv", str(tmp_path / "out"), str(source), label="kind", eval_fraction=fraction, **options)
    )
    return read_columns(tmp_path / "out" / "train"), read_columns(tmp_path / "out" / "eval"), summary


@pytest.mark.parametrize("options", [{}, {"rename": {"patient": "person"}}])
def test_all_rows_of_a_group_are_in_one_data_set(tmp_path: Path, options: dict[str, Any]) -> None:
    train, held_out, summary = divide(tmp_path, group="patient", split_bytes=1, **options)
    name = "person" if options else "patient"
    assert not set(train[name]) & set(held_out[name])
    assert len(train[name]) + len(held_out[name]) == ROWS
    assert 0.05 < len(held_out[name]) / ROWS < 0.4
    assert all(part.index_columns == [name] for part in summary.parts.values())


def test_another_seed_chooses_other_groups(tmp_path: Path) -> None:
    chosen = []
    for seed in (0, 1):
        (folder := tmp_path / str(seed)).mkdir()
        chosen.append(set(divide(folder, group="patient", seed=seed)[1]["patient"]))
    assert chosen[0] != chosen[1]


@pytest.mark.parametrize("split_bytes", [1, 1 << 20])
@pytest.mark.parametrize("column", ["date", "x"])
def test_the_latest_rows_are_those_to_evaluate_on(tmp_path: Path, column: str, split_bytes: int) -> None:
    train, held_out, _ = divide(tmp_path, split_by=column, split_bytes=split_bytes)
    assert max(train[column]) < min(held_out[column])
    largest_group = max(Counter(train[column] + held_out[column]).values())
    assert abs(len(held_out[column]) - 0.2 * ROWS) <= largest_group / 2


@pytest.mark.parametrize("split_bytes", [1, 1 << 20])
def test_each_class_has_its_fraction(tmp_path: Path, split_bytes: int) -> None:
    train, held_out, summary = divide(tmp_path, stratify=True, split_bytes=split_bytes)
    splits = 3 if split_bytes == 1 else 1
    for label in (0, 1):
        rows = train["label"].count(label) + held_out["label"].count(label)
        assert abs(held_out["label"].count(label) - 0.2 * rows) <= splits
    assert summary.rows == ROWS
    # The rows are not every fifth one.
    assert len({round(x * 10) % 5 for x in held_out["x"]}) == 5


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.fractions(Fraction(1, 50), Fraction(49, 50), max_denominator=50))
@example(20, Fraction(1, 3))
def test_a_class_of_few_rows_has_its_fraction(
    tmp_path_factory: pytest.TempPathFactory, rows: int, fraction: Fraction
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "a.csv").write_text("x,kind\n" + "1,a\n2,a\n" * 50 + "3,b\n" * rows)
    options = {"label": "kind", "eval_fraction": float(fraction), "stratify": True}
    ingest(IngestOptions("csv", str(folder / "out"), str(folder / "a.csv"), **options))
    counts = Counter(read_columns(folder / "out" / "eval")["label"])
    assert abs(counts[0] - 100 * fraction) <= 1
    assert abs(counts[1] - rows * fraction) <= 1


@pytest.mark.parametrize("options", [{"group": "patient"}, {"split_by": "date"}, {"stratify": True}])
def test_a_division_does_not_depend_on_where_it_is_done(tmp_path: Path, options: dict[str, Any]) -> None:
    source, row_ids = write_visits(tmp_path / "in"), []
    for name in ("first", "second"):
        settings = IngestOptions(
            "csv", str(tmp_path / name), str(source), label="kind", eval_fraction=0.3, split_bytes=1, **options
        )
        run = (lambda function, items: (function(item) for item in items)) if name == "second" else None
        ingest(settings, *([run] if run else []))
        row_ids.append(read_columns(tmp_path / name / "eval", as_stored=True)["row_id"])
    assert row_ids[0] == row_ids[1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"group": "patient"}, "group is 'patient', but source 'csv' is not divided; set --eval_fraction"),
        ({"group": "person", "eval_fraction": 0.1}, "group needs the column 'person'; the columns are ['patient'"),
        ({"group": "x", "eval_fraction": 0.1}, "group 'x' is a column of double; allowed are text and integers"),
        ({"split_by": "patient", "eval_fraction": 0.1}, "patient is 'p0', but rows are divided by it; allowed"),
        ({"stratify": True, "eval_fraction": 0.1, "label": None}, "stratify needs the column 'label'"),
    ],
)
def test_a_division_that_is_not_possible_is_refused(tmp_path: Path, options: dict[str, Any], expected: str) -> None:
    source = write_visits(tmp_path / "in")
    assert expected in ingest_error(tmp_path, "csv", source, **({"label": "kind"} | options))


def test_the_label_that_stratifies_is_that_after_rename(tmp_path: Path) -> None:
    lines = [f"{row},{int(row % 10 == 0)}\n" for row in range(200)]
    (tmp_path / "a.csv").write_text("label,y\n" + "".join(lines))
    names = {"label": "old", "y": "label"}
    options = {"rename": names, "stratify": True, "eval_fraction": 0.2}
    ingest(IngestOptions("csv", str(tmp_path / "out"), str(tmp_path / "a.csv"), **options))
    assert Counter(read_columns(tmp_path / "out" / "eval")["label"]) == {0: 36, 1: 4}


@pytest.mark.parametrize(
    "times",
    [
        [f"2026-01-{1 + row:02}T00:00:00{('Z', '+02:00', '')[row % 3]}" for row in range(20)],
        pa.array([1_700_000_000_000_000_001 + row for row in range(20)], pa.timestamp("ns")),
        pa.array([2**60 + row for row in range(20)], pa.uint64()),
        pa.array(range(20), pa.date32()),
    ],
    ids=["offsets", "nanoseconds", "uint64", "days"],
)
def test_times_of_each_kind_are_ordered(tmp_path: Path, times: Any) -> None:
    order = [7, 3, 19, 0, 12, 5, 16, 1, 10, 18, 2, 14, 6, 9, 17, 4, 11, 8, 15, 13]
    table = pa.table({"t": times, "number": range(20)}).take(order)
    with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=6)
    source = str(tmp_path / "a.arrow")
    ingest(IngestOptions("hf", str(tmp_path / "out"), source, split_by="t", eval_fraction=0.25))
    assert sorted(read_columns(tmp_path / "out" / "eval")["number"]) == [15, 16, 17, 18, 19]


def test_rows_of_one_time_cannot_be_divided(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,day\n" + "1,2026-01-01\n" * 9)
    assert "has the same value in all rows" in ingest_error(
        tmp_path, "csv", tmp_path / "a.csv", split_by="day", eval_fraction=0.5
    )


@pytest.mark.parametrize(("option", "reason"), [("group", "no who"), ("split_by", "no when")])
def test_a_row_without_the_deciding_value_is_a_bad_row(tmp_path: Path, option: str, reason: str) -> None:
    lines = [f"{i},p{i},2026-01-{1 + i:02}\n" for i in range(20)]
    (tmp_path / "a.csv").write_text("x,who,when\n" + "".join(lines) + "7,,\n")
    options = {option: "who" if option == "group" else "when", "eval_fraction": 0.5}
    assert f"{reason}, which divides the rows" in ingest_error(tmp_path, "csv", tmp_path / "a.csv", **options)
    skipped = ingest(IngestOptions("csv", str(tmp_path / "out"), str(tmp_path / "a.csv"), on_bad_row="skip", **options))
    assert (skipped.rows, sum(part.refused for part in skipped.parts.values())) == (20, 1)


@pytest.mark.parametrize("value", ["soon", "31.12.2020", "2026-02-30"])
def test_a_row_with_a_value_that_is_no_time_is_a_bad_row(tmp_path: Path, value: str) -> None:
    (tmp_path / "a.csv").write_text(f"d,x\n2026-01-01,1\n2026-01-02,2\n{value},3\n2026-01-04,4\n")
    options: dict[str, Any] = {"split_by": "d", "eval_fraction": 0.3}
    message = ingest_error(tmp_path, "csv", tmp_path / "a.csv", **options)
    assert f"row a.csv:4: d is {value!r}, but rows are divided by it; allowed are dates, times (as text" in message
    assert "or skip such rows with --on_bad_row skip" in message
    ingest(IngestOptions("csv", str(tmp_path / "out"), str(tmp_path / "a.csv"), on_bad_row="skip", **options))
    assert read_columns(tmp_path / "out" / "train")["x"] == [1, 2]
    assert read_columns(tmp_path / "out" / "eval")["x"] == [4]
    refused = "".join(path.read_text() for path in (tmp_path / "out").glob("*/_refused.jsonl"))
    assert "a.csv:4" in refused


def test_errors_have_the_spelling_of_the_interface(tmp_path: Path) -> None:
    text = "give --check false, --on_bad_row skip, --columns '[a, b]', --max_bad_rows 3, --label, or --sort x"
    with (
        pytest.raises(DataError, match=r"give check=False, on_bad_row='skip', .*--sort x") as caught,
        python_spelling(),
    ):
        raise DataError(text)
    assert "columns=['a', 'b'], max_bad_rows=3, label, or" in str(caught.value)
    (tmp_path / "in" / "cat").mkdir(parents=True)
    (tmp_path / "in" / "cat" / "1.jpg").write_bytes(b"no image")
    for make in (ingest_files, lambda out, source, path: ingest(IngestOptions(source, out, path))):
        with pytest.raises(DataError) as caught:
            make(str(tmp_path / "out"), "images", str(tmp_path / "in"))
        assert ("on_bad_row='skip'" in str(caught.value)) == (make is ingest_files)
        assert ("--on_bad_row skip" in str(caught.value)) != (make is ingest_files)
