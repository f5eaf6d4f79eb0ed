"""Shards of several deliveries in one data set: classes by name, additions, and what they are refused for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from ray_app import describe, ingest_arrays, ingest_files, ingest_table
from ray_app.data.arrays import ArraySpec, fixed_array, to_column
from ray_app.data.classes import map_classes, renumber
from ray_app.data.dataset import open_dataset
from ray_app.errors import ConfigError, DataError
from ray_app.ingest import additions, ingest
from ray_app.ingest.ingest import run_in_threads
from ray_app.ingest.options import IngestOptions
from ray_app.storage.files import put_json


def make_frame(names: tuple[str, str], rows: int = 100, seed: int = 0) -> pd.DataFrame:
    values = np.random.default_rng(seed).uniform(0, 1, (rows, 2)).round(3)
    frame = pd.DataFrame(values, columns=["u", "v"])
    return frame.assign(quality=np.where(values[:, 0] > values[:, 1], *names))


def write_set(folder: Path, names: tuple[str, str], seed: int = 0, **options: Any) -> Path:
    ingest_table(str(folder), make_frame(names, seed=seed), label="quality", **options)
    return folder


def read_names(folder: Path, **options: Any) -> list[tuple[str, bool]]:
    """Returns the name of the class of each row, and whether u is greater than v."""
    dataset = open_dataset(str(folder), **options)
    assert dataset.facts.read is not None
    assert dataset.facts.classes is not None
    blocks = list(dataset.facts.read(["u", "v", "label"]))
    return [
        (dataset.facts.classes[label], bool(u > v))
        for block in blocks
        for u, v, label in zip(block["u"], block["v"], block["label"], strict=True)
    ]


def is_right(rows: list[tuple[str, bool]], names: Mapping[bool, str]) -> bool:
    return all(name == names[is_greater] for name, is_greater in rows)


@pytest.mark.parametrize("described", [True, False], ids=["a description", "shards alone"])
def test_a_copied_shard_with_the_classes_in_another_order_is_read_by_name(
    tmp_path: Path, described: bool, caplog: pytest.LogCaptureFixture
) -> None:
    one = write_set(tmp_path / "one", ("bad", "good"))
    two = write_set(tmp_path / "two", ("bad", "good"), seed=1, classes=["good", "bad"])
    shutil.copy(two / "part-00000.parquet", one / "night.parquet")
    if not described:
        (one / "_dataset.json").unlink()
    rows = read_names(one)
    assert len(rows) == 200
    assert is_right(rows, {True: "bad", False: "good"})
    assert is_right(read_names(one, classes=["ugly", "good", "bad"]), {True: "bad", False: "good"})
    [part] = describe(str(one)).parts.values()
    assert part.rows == sum(part.class_counts.values()) == 200
    assert part.class_counts["bad"] == sum(name == "bad" for name, _ in rows)
    assert ("does not list the file night.parquet" in caplog.text) == described


def test_a_copied_shard_with_other_classes_is_refused(tmp_path: Path) -> None:
    one = write_set(tmp_path / "one", ("good", "bad"))
    shutil.copy(write_set(tmp_path / "two", ("good", "xbad")) / "part-00000.parquet", one / "night.parquet")
    for read in (open_dataset, describe):
        with pytest.raises(DataError, match=r"night\.parquet has the classes good, xbad; the data set has bad, good"):
            read(str(one))


def test_a_copied_shard_with_classes_for_labels_without_names_is_refused(tmp_path: Path) -> None:
    one = tmp_path / "one"
    ingest_table(str(one), make_frame(("a", "b")).assign(quality=1), label="quality")
    shutil.copy(write_set(tmp_path / "two", ("a", "b")) / "part-00000.parquet", one / "night.parquet")
    with pytest.raises(DataError, match=r"night\.parquet has the classes a, b; the data set has none"):
        open_dataset(str(one))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.drop_columns(["u"]), "'u' is missing"),
        (lambda table: table.append_column("w", table["u"]), "'w' is missing in the others"),
        (lambda table: table.set_column(1, "u", table["u"].cast(pa.string())), "'u' is string, not double"),
        (lambda table: table.select(["row_id", "v", "u", "label"]), "their order is"),
    ],
    ids=["a column fewer", "one more", "another type", "another order"],
)
def test_a_copied_shard_with_other_columns_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    one = write_set(tmp_path / "one", ("good", "bad"))
    pq.write_table(change(pq.read_table(one / "part-00000.parquet")), one / "night.parquet")
    with pytest.raises(DataError, match=f"has other columns than .*{message}"):
        open_dataset(str(one))


def test_a_copied_shard_with_arrays_of_another_shape_is_refused(tmp_path: Path) -> None:
    for name, shape in (("one", (10, 4, 4)), ("two", (10, 16))):
        ingest_arrays(str(tmp_path / name), x_image=np.zeros(shape, np.uint8))
    shutil.copy(tmp_path / "two" / "part-00000.parquet", tmp_path / "one" / "night.parquet")
    with pytest.raises(DataError, match=r"'x_image' is uint8 \(16,\).*, not uint8 \(4, 4\)"):
        open_dataset(str(tmp_path / "one"))


def test_a_listed_shard_that_is_missing_is_refused(tmp_path: Path) -> None:
    one = write_set(tmp_path / "one", ("good", "bad"), shard_rows=60)
    next(one.glob("*.parquet")).unlink()
    for read in (open_dataset, describe):
        with pytest.raises(DataError, match=r"part-00000.parquet is missing: _dataset.json lists 2 shards, but 1 of"):
            read(str(one))
    (one / "_dataset.json").unlink()
    assert open_dataset(str(one)).facts.classes == ("bad", "good")


def test_labels_lists_of_labels_and_targets_by_class_are_numbered_anew() -> None:
    numbers, boxes = (2, 0, 1), pa.array([[1.0, 2.0]] * 3)
    labels = pa.table({"label": pa.array([0, -1, 2, 255], pa.int32())})
    assert map_classes(labels, numbers, ["label"])["label"].to_pylist() == [2, -1, 1, 255]
    lists = pa.table({"labels": [[0, 1], [], [2]], "boxes": boxes}).slice(1)
    assert map_classes(lists, numbers, lists.column_names)["labels"].to_pylist() == [[], [1]]
    field, array = to_column("target", np.eye(3, dtype=np.float32))
    targets = map_classes(pa.table([array], pa.schema([field])), numbers, ["target"])
    assert fixed_array(targets["target"], ArraySpec("<f4", (3,))).argmax(axis=1).tolist() == [2, 0, 1]
    assert renumber(["a", "b"], ["b", "a"], ["mask"]) is None
    assert renumber(["a", "b"], ["a", "b", "c"], ["mask"]) == (0, 1)


def test_a_description_of_an_earlier_version_is_named(tmp_path: Path) -> None:
    one = write_set(tmp_path / "one", ("good", "bad"))
    (one / "_dataset.json").rename(one / "dataset.json")
    with pytest.raises(DataError, match=r"dataset.json was written by an earlier version of ray_app\. Rename it to"):
        open_dataset(str(one))


OPTIONS: dict[str, Any] = {"label": "quality", "eval_fraction": 0.3, "append": True}


def test_deliveries_are_added_by_name_and_divided_by_the_same_rule(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    orders = (("bad", "good"), ("good", "bad"), ("good", "good"))
    for seed, names in enumerate(orders):
        summary = ingest_table(out, make_frame(names, seed=seed), **OPTIONS)
        assert summary.rows == 100 * (seed + 1)
        assert not summary.reused
    rows = {side: read_names(tmp_path / "out" / side) for side in ("train", "eval")}
    assert 60 < len(rows["eval"]) < 120
    assert sum(map(len, rows.values())) == 300
    described = describe(out)
    for side, part in described.parts.items():
        names = [name for name, _ in rows[side]]
        assert part.class_counts == {name: names.count(name) for name in ("bad", "good")}
        assert [shard["path"] for shard in part.shards] == [
            "part-00000.parquet",
            "part-added-00002-00000.parquet",
            "part-added-00003-00000.parquet",
        ]
    first, second = (
        [(name, big) for name, big in rows["train"]][:50],
        read_names_of(tmp_path / "out" / "train" / "part-added-00002-00000.parquet"),
    )
    assert is_right(first, {True: "bad", False: "good"})
    assert is_right(second, {True: "good", False: "bad"})
    third = read_names_of(tmp_path / "out" / "train" / "part-added-00003-00000.parquet")
    assert is_right(third, {True: "good", False: "good"})
    ids = pa.concat_tables(pq.read_table(path, columns=["row_id"]) for path in (tmp_path / "out").rglob("*.parquet"))
    assert len(set(ids["row_id"].to_pylist())) == 300
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name.startswith(("_ingest", "_p", "_r", "_h"))]


def read_names_of(file: Path) -> list[tuple[str, bool]]:
    table = pq.read_table(file)
    names = json.loads(table.schema.metadata[b"ray_app.classes"])
    return [(names[row["label"]], row["u"] > row["v"]) for row in table.to_pylist()]


def test_a_delivery_is_added_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out, file = str(tmp_path / "out"), tmp_path / "two.csv"
    ingest_table(out, make_frame(("good", "bad")), **OPTIONS)
    assert ingest_table(out, make_frame(("good", "bad")), **OPTIONS).reused
    make_frame(("good", "bad"), seed=1).to_csv(file, index=False)
    out = str(tmp_path / "csv")
    for name in ("one.csv", "two.csv"):
        make_frame(("good", "bad"), seed=ord(name[0])).to_csv(tmp_path / name, index=False)
    for name in ("one.csv", "two.csv", "one.csv", "two.csv"):
        ingest_files(out, "csv", str(tmp_path / name), **OPTIONS)
    assert describe(out).rows == 200
    # The same rows under another name.
    shutil.copy(tmp_path / "one.csv", tmp_path / "three.csv")
    assert ingest_files(out, "csv", str(tmp_path / "three.csv"), **OPTIONS).reused
    assert "has the same rows as an earlier delivery" in caplog.text
    assert describe(out).rows == 200


def test_new_classes_are_refused_or_get_the_next_numbers(tmp_path: Path) -> None:
    out, frame = str(tmp_path / "out"), make_frame(("a", "good"), seed=1)
    ingest_table(out, make_frame(("good", "bad")), **OPTIONS)
    before = sorted(path.name for path in (tmp_path / "out" / "train").iterdir())
    with pytest.raises(DataError, match=r"has the classes a, good, and the data set .* bad, good.*new_classes=true"):
        ingest_table(out, frame, **OPTIONS)
    assert sorted(path.name for path in (tmp_path / "out" / "train").iterdir()) == before
    summary = ingest_table(out, frame, new_classes=True, **OPTIONS)
    assert summary.parts["train"].classes == ["bad", "good", "a"]
    assert {name for name, big in read_names(tmp_path / "out" / "train") if big} == {"good", "a"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_fraction": 0.2}, "was written with other options: eval_fraction 0.3, now 0.2"),
        ({"label": None}, "was written with other options: label 'quality', now None"),
        ({"append": False}, "append=true adds new files"),
    ],
)
def test_a_delivery_with_other_options_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    ingest_table(str(tmp_path / "out"), make_frame(("good", "bad")), **OPTIONS)
    with pytest.raises(ConfigError, match=message):
        ingest_table(str(tmp_path / "out"), make_frame(("good", "bad"), seed=1), **(OPTIONS | options))


def test_columns_of_a_delivery_get_the_types_of_the_data_set(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    first = pd.DataFrame({"x": [0.5, 1.5], "n": [1, 2], "t": ["a", "b"]})
    ingest_table(out, first, append=True)
    other = pd.DataFrame({"t": [7, 8], "n": pd.array([3, 4], "int32"), "x": [2, 3]})
    assert ingest_table(out, other, append=True).rows == 4
    assert pq.read_table(tmp_path / "out").select(["x", "n", "t"]).sort_by("n").to_pydict() == {
        "x": [0.5, 1.5, 2.0, 3.0],
        "n": [1, 2, 3, 4],
        "t": ["a", "b", "7", "8"],
    }
    for changed, message in (
        (other.assign(n=[1.5, 2.5]), "'n' is double, not int64"),
        (other.assign(x=["a", "b"]), "'x' is string, not double"),
        (other.drop(columns="t"), "'t' is missing"),
        (other.assign(more=1), "'more' is missing in the others"),
    ):
        with pytest.raises(DataError, match=message):
            ingest_table(out, changed, append=True)
    assert describe(out).rows == 4


def test_times_of_a_delivery_are_divided_at_the_value_of_the_first_ingest(tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_fraction": 0.5, "split_by": "day", "append": True}
    for days in (["2026-01-01", "2026-01-02"], ["2026-01-03"], ["2025-12-31"]):
        ingest_table(str(tmp_path / "out"), pd.DataFrame({"day": days, "x": range(len(days))}), **options)
    days = {
        side: sorted(pq.read_table(tmp_path / "out" / side, columns=["day"])["day"].to_pylist())
        for side in ("train", "eval")
    }
    assert days == {"train": ["2025-12-31", "2026-01-01"], "eval": ["2026-01-02", "2026-01-03"]}


@pytest.mark.parametrize("next_seed", [1, 2], ids=["the same delivery", "another one"])
@pytest.mark.parametrize("at", ["write_input_split", "put_json", "_replace_descriptions", "_remove_markers"])
def test_an_interrupted_addition_is_continued_finished_or_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, next_seed: int
) -> None:
    out = tmp_path / "out"
    ingest_table(str(out), make_frame(("good", "bad")), **OPTIONS)

    class KilledError(BaseException):
        pass

    def die(*_: Any) -> None:
        raise KilledError

    with monkeypatch.context() as patch:
        # `put_json` of this module writes the marks: here the second one, when shards are there.
        calls = iter(range(10))
        late = lambda path, value: die() if next(calls) == 3 else put_json(path, value)  # noqa: E731
        patch.setattr(ingest if at == "write_input_split" else additions, at, late if at == "put_json" else die)
        with pytest.raises(KilledError):
            ingest_table(str(out), make_frame(("good", "bad"), seed=1), **OPTIONS)
    was_complete = at in ("_replace_descriptions", "_remove_markers")
    if at != "_remove_markers":
        assert sum(open_dataset(str(out / side)).manifest.num_rows for side in ("train", "eval")) == 100
    summary = ingest_table(str(out), make_frame(("good", "bad"), seed=next_seed), **OPTIONS)
    expected = 200 + 100 * (was_complete and next_seed == 2)
    assert summary.rows == expected
    assert sum(open_dataset(str(out / side)).manifest.num_rows for side in ("train", "eval")) == expected
    assert not list(out.rglob("_ingest.json"))
    assert describe(str(out)).rows == expected


def test_the_folder_is_a_parquet_data_set_for_other_libraries(tmp_path: Path) -> None:
    """Spark and Hive leave out names that begin with `_` or `.`; the others skip them, or read `**/*.parquet`."""
    out = tmp_path / "out"
    (tmp_path / "one.csv").write_text("x,y\n1,a\n2,b\n3\n4,a\n")
    options = IngestOptions("csv", str(out), str(tmp_path / "one.csv"), label="y", on_bad_row="skip", append=True)
    ingest.ingest(options, partial(run_in_threads, threads=1))
    (tmp_path / "two.csv").write_text("x,y\n5,b\n6\n")
    ingest_files(str(out), "csv", str(tmp_path / "two.csv"), label="y", on_bad_row="skip", append=True)
    assert [path.name for path in out.iterdir() if not path.name.startswith(("_", "."))] != []
    assert {path.suffix for path in out.iterdir() if not path.name.startswith(("_", "."))} == {".parquet"}
    assert sorted(pd.read_parquet(out)["x"]) == [1, 2, 4, 5]
    assert list(pd.read_parquet(out).columns) == ["row_id", "x", "label"]
    assert pa.dataset.dataset(out).count_rows() == 4
    assert sorted(pl.scan_parquet(out, hidden_file_prefix="_").collect()["x"]) == [1, 2, 4, 5]
    assert sorted(duckdb.sql(f"select x from read_parquet('{out}/**/*.parquet')").pl()["x"]) == [1, 2, 4, 5]
