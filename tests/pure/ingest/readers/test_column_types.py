"""Values of other programs become columns and labels, or are refused with the file, the row or column, and a remedy."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import json
import uuid
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from ray_app.data.dataset import open_dataset
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.task.tabular import TabularClassification
from tests.support.ingest_inputs import ingest_and_read, ingest_error, read_columns
from tests.support.ingest_rows import write_rows

SUFFIXES = ("arrow", "parquet")


def write_table(tmp_path: Path, column: pa.Array, end: str, name: str = "t", **more: Any) -> Path:
    """Writes a file with the column `c`, and columns of `more` before it."""
    path = tmp_path / f"{name}.{end}"
    content = pa.table({**more, "c": column})
    if end == "parquet":
        pq.write_table(content, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, content.schema) as writer:
            writer.write_table(content)
    return path


NOON = datetime.datetime(2020, 5, 1, 12, tzinfo=datetime.UTC)
ID = uuid.UUID(int=2**100 + 7)
ALLOWED: dict[str, tuple[pa.Array, list[Any]]] = {
    "decimal": (pa.array([decimal.Decimal("0.1"), None], pa.decimal128(15, 2)), [0.1, None]),
    "time zone": (pa.array([NOON, None], pa.timestamp("us", "UTC")), [NOON, None]),
    "time": (pa.array([NOON.time(), None], pa.time64("us")), [NOON.time(), None]),
    "date": (pa.array([NOON.date(), None]), [NOON.date(), None]),
    "duration": (pa.array([datetime.timedelta(1), None], pa.duration("us")), [datetime.timedelta(1), None]),
    "uuid": (pa.array([ID.bytes, None], pa.uuid()), [ID.bytes, None]),
    "json": (pa.array(['{"a": 1}', None], pa.json_()), ['{"a": 1}', None]),
    "bytes of one size": (pa.array([b"ab", None], pa.binary(2)), [b"ab", None]),
    "half": (pa.array([1.5, None], pa.float16()), [1.5, None]),
    "integers": (pa.array([7, None], pa.int8()), [7, None]),
    "categories": (pa.array(["u", None]).dictionary_encode(), ["u", None]),
    "categories of integers": (pa.array([7, None]).dictionary_encode(), [7, None]),
    "large": (pa.array(["u", None], pa.large_string()), ["u", None]),
    "views": (pa.array(["u", None], pa.string_view()), ["u", None]),
    "decimal that Arrow converts inexactly": (
        pa.array([decimal.Decimal("729.05"), None], pa.decimal128(30, 10)),
        [729.05, None],
    ),
    "decimal of a wide type": (pa.array([decimal.Decimal("1.50"), None], pa.decimal128(38, 18)), [1.5, None]),
    "bool8": (pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, None], pa.int8())), [True, None]),
}


@pytest.mark.parametrize("end", SUFFIXES)
@pytest.mark.parametrize("kind", ALLOWED)
def test_hugging_face_columns_keep_values_and_nulls(tmp_path: Path, kind: str, end: str) -> None:
    column, expected = ALLOWED[kind]
    assert ingest_and_read(tmp_path, "hf", write_table(tmp_path, column, end))["c"] == expected
    about = json.loads((tmp_path / "out" / "_dataset.json").read_text())
    assert about["columns"]["c"]["nulls"] == 1


REFUSED: dict[str, tuple[pa.Array, str]] = {
    "map": (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), "holds map<string, int64"),
    "lists of structs": (pa.array([[{"a": 1}]]), "holds lists that are not of numbers"),
    "lists of times": (pa.array([[NOON.replace(tzinfo=None)]]), "holds lists that are not of numbers"),
    "runs": (pa.RunEndEncodedArray.from_arrays([1], [7]), "holds run_end_encoded<"),
    "interval": (pa.array([(1, 2, 3)], pa.month_day_nano_interval()), "holds month_day_nano_interval"),
    "union": (pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])]), "holds sparse_union<"),
    "nothing": (pa.nulls(1), "has no value at all"),
}
_NOT_IN_PARQUET = ("runs", "interval", "union")


@pytest.mark.parametrize(
    ("kind", "end"),
    [(kind, end) for kind in REFUSED for end in SUFFIXES if end == "arrow" or kind not in _NOT_IN_PARQUET],
)
def test_hugging_face_columns_of_other_types_are_refused_by_name(tmp_path: Path, kind: str, end: str) -> None:
    column, expected = REFUSED[kind]
    path = write_table(tmp_path, column, end, x=[1])
    message = ingest_error(tmp_path, "hf", path)
    assert f"t.{end}: column 'c' {expected}" in message
    assert "Leave it out by naming the columns to keep" in message
    assert ingest_and_read(tmp_path, "hf", path, columns=["x"])["x"] == [1]


@pytest.mark.parametrize("end", SUFFIXES)
def test_a_source_with_two_columns_of_one_name_is_refused(tmp_path: Path, end: str) -> None:
    content = pa.table([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "b", "a"])
    if end == "parquet":
        pq.write_table(content, tmp_path / "t.parquet")
    else:
        with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as file, pa.ipc.new_stream(file, content.schema) as writer:
            writer.write_table(content)
    assert f"t.{end}: two columns of one name: ['a']" in ingest_error(tmp_path, "hf", tmp_path / f"t.{end}")


LABELS: dict[str, pa.Array] = {
    "string": pa.array(["yes", "no", "yes"]),
    "large": pa.array(["yes", "no", "yes"], pa.large_string()),
    "view": pa.array(["yes", "no", "yes"], pa.string_view()),
    "categories": pa.array(["yes", "no", "yes"]).dictionary_encode(),
    "unused category": pa.DictionaryArray.from_arrays([2, 1, 2], ["maybe", "no", "yes"]),
}


@pytest.mark.parametrize("end", SUFFIXES)
@pytest.mark.parametrize("kind", LABELS)
def test_text_labels_become_classes_in_sorted_order(tmp_path: Path, kind: str, end: str) -> None:
    columns = ingest_and_read(tmp_path, "hf", write_table(tmp_path, LABELS[kind], end), label="c")
    assert columns["label"] == [1, 0, 1]
    about = json.loads((tmp_path / "out" / "_dataset.json").read_text())
    assert (about["classes"], about["class_counts"]) == (["no", "yes"], {"no": 1, "yes": 2})


def test_classes_of_text_labels_are_the_same_in_all_splits_and_files(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, values in {"train-0": ["b", "d"], "train-1": ["c", "c"], "test": ["a", "d"]}.items():
        write_table(tmp_path / "in", pa.array(values), "parquet", name)
    ingest(IngestOptions("hf", str(tmp_path / "out"), str(tmp_path / "in"), label="c", split_bytes=1))
    assert (read_columns(tmp_path / "out" / "train")["label"], read_columns(tmp_path / "out" / "test")["label"]) == (
        [1, 3, 2, 2],
        [0, 3],
    )
    for part in ("train", "test"):
        assert json.loads((tmp_path / "out" / part / "_dataset.json").read_text())["classes"] == ["a", "b", "c", "d"]


def test_a_label_that_is_text_in_one_split_only_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_table(tmp_path / "in", pa.array(["a"]), "parquet", "train")
    write_table(tmp_path / "in", pa.array([0]), "parquet", "test")
    assert "the label 'c' is text in ['train'], but not" in ingest_error(tmp_path, "hf", tmp_path / "in", label="c")


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_a_missing_label_among_floats_is_a_bad_row(tmp_path: Path, missing: float | None) -> None:
    path = write_table(tmp_path, pa.array([1.0, missing, 0.0]), "parquet")
    assert "row t.parquet:1: no label" in ingest_error(tmp_path, "hf", path, label="c")
    assert ingest_and_read(tmp_path, "hf", path, label="c", on_bad_row="skip")["label"] == [1, 0]


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["part-0", "part-1"], {"": 2}),
        (["0", "1", "2"], {"": 3}),
        (["a", "b"], {"": 2}),
        (["part-00000-3f2a.c000", "part-00001-3f2a.c000"], {"": 2}),
        (["table-00000-of-00002", "table-00001-of-00002"], {"": 2}),
        (["train", "test"], {"train": 1, "test": 1}),
        (["train-0", "train-1", "test-0"], {"train": 2, "test": 1}),
        (["train_0", "train_1", "validation_0"], {"train": 2, "validation": 1}),
        (["mnist-train", "mnist-test"], {"train": 1, "test": 1}),
        (["mnist_train", "mnist_dev"], {"train": 1, "dev": 1}),
        (["x-train", "x-unsupervised"], {"train": 1, "unsupervised": 1}),
        (["chat-train_sft", "chat-train_gen"], {"train_sft": 1, "train_gen": 1}),
        (["train-00000-of-00002-1a2b", "train-00001-of-00002-1a2b", "val-00000-of-00001-3c"], {"train": 2, "val": 1}),
        (["latest", "greatest"], {"": 2}),
    ],
)
def test_only_standard_split_names_make_splits(tmp_path: Path, names: list[str], splits: dict[str, int]) -> None:
    (tmp_path / "in").mkdir()
    for name in names:
        write_table(tmp_path / "in", pa.array([1]), "parquet", name)
    summary = ingest(IngestOptions("hf", str(tmp_path / "out"), str(tmp_path / "in")))
    assert {name: part.rows for name, part in summary.parts.items()} == splits


def test_a_numbered_file_next_to_split_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("train", "part-0"):
        write_table(tmp_path / "in", pa.array([1]), "parquet", name)
    assert "part-0.parquet does not say of which split it is" in ingest_error(tmp_path, "hf", tmp_path / "in")


def test_the_part_files_of_pyarrow_are_one_data_set(tmp_path: Path) -> None:
    pa.dataset.write_dataset(
        pa.table({"x": list(range(100))}),
        tmp_path / "in",
        format="parquet",
        max_rows_per_file=50,
        max_rows_per_group=50,
    )
    assert ingest_and_read(tmp_path, "hf", tmp_path / "in")["x"] == list(range(100))


@pytest.mark.parametrize("end", SUFFIXES)
@pytest.mark.parametrize("index", ["customer", None])
def test_the_index_of_a_pandas_table_stays_an_index(tmp_path: Path, end: str, index: str | None) -> None:
    table = pa.Table.from_pandas(pd.DataFrame({"x": [0.5, 1.5, 2.5], "label": [0, 1, 0]}, [3, 7, 5]).rename_axis(index))
    folder = tmp_path / "in"
    folder.mkdir()
    if end == "parquet":
        pq.write_table(table, folder / "train.parquet")
    else:
        with pa.ipc.new_stream(folder / "train.arrow", table.schema) as stream:
            stream.write_table(table)
    name = index or "__index_level_0__"
    options = IngestOptions("hf", str(tmp_path / "out"), str(folder), rename={name: "key"})
    assert open_dataset(ingest(options).parts[""].path).facts.index_columns == ("key",)
    options = dataclasses.replace(options, out=str(tmp_path / "as it is"), rename={})
    facts = open_dataset(ingest(options).parts[""].path).facts
    assert facts.index_columns == (name,)
    assert TabularClassification("label").prepare(facts).columns() == ["x", "label"]


@pytest.mark.parametrize("pandas", [b"[]", b"no JSON", b'{"index_columns": null}', b'{"index_columns": "x"}'])
def test_invalid_pandas_metadata_names_no_index(tmp_path: Path, pandas: bytes) -> None:
    pq.write_table(pa.table({"x": [1.0]}).replace_schema_metadata({b"pandas": pandas}), tmp_path / "a.parquet")
    assert open_dataset(str(tmp_path)).facts.index_columns == ()


def test_class_labels_of_hugging_face_keep_their_order(tmp_path: Path) -> None:
    info = {"info": {"features": {"y": {"names": ["b", "a"], "_type": "ClassLabel"}}}}
    table = pa.table({"a": [1, 2], "y": [0, 1]}).replace_schema_metadata({"huggingface": json.dumps(info)})
    pq.write_table(table, tmp_path / "in.parquet")
    assert ingest_and_read(tmp_path, "hf", tmp_path / "in.parquet", label="y", classes=["b", "a"])["label"] == [0, 1]
    (tmp_path / "second").mkdir()
    message = ingest_error(tmp_path / "second", "hf", tmp_path / "in.parquet", label="y", classes=["a", "b"])
    assert "has the classes ['b', 'a'], and classes is ['a', 'b']" in message


@pytest.mark.parametrize("source", ["jsonl", "hf"])
def test_a_column_that_cannot_be_stored_is_left_out_by_drop(tmp_path: Path, source: str) -> None:
    path = write_rows(tmp_path, source, [{"a": number, "inner": [[{"b": 1}]]} for number in range(3)])
    assert ingest_and_read(tmp_path, source, path, drop=["inner"])["a"] == [0, 1, 2]
