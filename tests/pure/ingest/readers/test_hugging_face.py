"""Files of Hugging Face `datasets`, pandas, Polars and Arrow: types of columns, classes, splits, and damaged files."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import io
import json
import shutil
import struct
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ray_app import ingest_table
from ray_app.data.dataset import open_dataset
from ray_app.errors import ConfigError
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.ingest.readers import converter, sources
from ray_app.task.tabular import TabularClassification
from tests.support.ingest_inputs import ingest_and_read, ingest_error, read_columns
from tests.support.ingest_rows import write_rows
from tests.support.paths import SUPPORT

HF = SUPPORT / "hf"
SUFFIXES = ("arrow", "parquet")
TAGS = [["y", "x"], [], ["2020-01-01"], ["x", "x"]]
MULTI_HOT = [[0, 1, 1], [0, 0, 0], [1, 0, 0], [0, 1, 0]]
TEXT_LISTS = pa.list_(pa.string())


def put_table(path: Path, table: pa.Table) -> Path:
    """Writes a table as the suffix says, and returns the file."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    return path


def put_files(tmp_path: Path, columns: dict[str, Any], end: str = "parquet") -> Path:
    """Writes files of a column `c` by their names, and returns the folder."""
    for name, values in columns.items():
        put_table(tmp_path / "in" / f"{name}.{end}", pa.table({"c": values}))
    return tmp_path / "in"


def description_of(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "_dataset.json").read_text())
    return facts


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
    "inexact in Arrow": (pa.array([decimal.Decimal("729.05"), None], pa.decimal128(30, 10)), [729.05, None]),
    "decimal of a wide type": (pa.array([decimal.Decimal("1.50"), None], pa.decimal128(38, 18)), [1.5, None]),
    "bool8": (pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, None], pa.int8())), [True, None]),
}


@pytest.mark.parametrize("end", SUFFIXES)
@pytest.mark.parametrize("kind", ALLOWED)
def test_columns_keep_values_and_nulls(tmp_path: Path, kind: str, end: str) -> None:
    column, expected = ALLOWED[kind]
    assert ingest_and_read(tmp_path, "hf", put_table(tmp_path / f"t.{end}", pa.table({"c": column})))["c"] == expected
    assert description_of(tmp_path / "out")["columns"]["c"]["nulls"] == 1


NO_NUMBERS = "holds lists that are not of numbers"
REFUSED: dict[str, tuple[pa.Array, str]] = {
    "map": (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), "holds map<string, int64"),
    "lists of structs": (pa.array([[{"a": 1}]]), NO_NUMBERS),
    "lists of times": (pa.array([[NOON.replace(tzinfo=None)]]), NO_NUMBERS),
    "runs": (pa.RunEndEncodedArray.from_arrays([1], [7]), "holds run_end_encoded<"),
    "interval": (pa.array([(1, 2, 3)], pa.month_day_nano_interval()), "holds month_day_nano_interval"),
    "union": (pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])]), "holds sparse_union<"),
    "nothing": (pa.nulls(1), "has no value at all"),
}
NOT_IN_PARQUET = ("runs", "interval", "union")


@pytest.mark.parametrize(
    ("kind", "end"),
    [(kind, end) for kind in REFUSED for end in SUFFIXES if end == "arrow" or kind not in NOT_IN_PARQUET],
)
def test_columns_of_other_types_are_refused_by_name(tmp_path: Path, kind: str, end: str) -> None:
    column, expected = REFUSED[kind]
    path = put_table(tmp_path / f"t.{end}", pa.table({"x": [1], "c": column}))
    message = ingest_error(tmp_path, "hf", path)
    assert f"t.{end}: column 'c' {expected}" in message
    assert "Name the columns to keep" in message
    assert ingest_and_read(tmp_path, "hf", path, columns=["x"])["x"] == [1]


@pytest.mark.parametrize("end", SUFFIXES)
def test_two_columns_of_one_name_are_refused(tmp_path: Path, end: str) -> None:
    path = put_table(tmp_path / f"t.{end}", pa.table([pa.array([1])] * 3, names=["a", "b", "a"]))
    assert f"t.{end}: two columns with the same name: ['a']" in ingest_error(tmp_path, "hf", path)


LABELS: dict[str, pa.Array] = {
    "large": pa.array(["yes", "no", "yes"], pa.large_string()),
    "view": pa.array(["yes", "no", "yes"], pa.string_view()),
    "categories": pa.array(["yes", "no", "yes"]).dictionary_encode(),
    "unused category": pa.DictionaryArray.from_arrays([2, 1, 2], ["maybe", "no", "yes"]),
}


@pytest.mark.parametrize("end", SUFFIXES)
@pytest.mark.parametrize("kind", LABELS)
def test_text_labels_become_classes_in_sorted_order(tmp_path: Path, kind: str, end: str) -> None:
    path = put_table(tmp_path / f"t.{end}", pa.table({"c": LABELS[kind]}))
    assert ingest_and_read(tmp_path, "hf", path, label="c")["label"] == [1, 0, 1]
    about = description_of(tmp_path / "out")
    assert (about["classes"], about["class_counts"]) == (["no", "yes"], {"no": 1, "yes": 2})


def test_classes_of_text_labels_are_the_same_in_all_splits_and_files(tmp_path: Path) -> None:
    folder = put_files(tmp_path, {"train-0": ["b", "d"], "train-1": ["c", "c"], "test": ["a", "d"]})
    ingest(IngestOptions("hf", str(tmp_path / "out"), str(folder), label="c", split_bytes=1))
    labels = {part: read_columns(tmp_path / "out" / part)["label"] for part in ("train", "test")}
    assert labels == {"train": [1, 3, 2, 2], "test": [0, 3]}
    assert [description_of(tmp_path / "out" / part)["classes"] for part in labels] == [["a", "b", "c", "d"]] * 2


def test_a_label_that_is_text_in_one_split_only_is_refused(tmp_path: Path) -> None:
    folder = put_files(tmp_path, {"train": ["a"], "test": [0]})
    assert "the label 'c' is text in ['train'], but not" in ingest_error(tmp_path, "hf", folder, label="c")


def test_a_label_that_is_no_number_is_a_bad_row(tmp_path: Path) -> None:
    path = put_table(tmp_path / "t.parquet", pa.table({"c": [1.0, float("nan"), 0.0]}))
    assert "row t.parquet:1: no label" in ingest_error(tmp_path, "hf", path, label="c")


@pytest.mark.parametrize(
    "kind",
    [pa.large_list(pa.large_string()), pa.list_(pa.dictionary(pa.int32(), pa.string())), pa.list_(pa.string_view())],
)
def test_lists_of_each_type_of_text_are_labels(tmp_path: Path, kind: pa.DataType) -> None:
    table = pa.table({"a": [0, 1, 2, 3], "tags": pa.array(TAGS, TEXT_LISTS).cast(kind)})
    ingest_table(str(tmp_path / "out"), table, label="tags")
    assert read_columns(tmp_path / "out")["target"].tolist() == MULTI_HOT


def test_rows_of_many_classes_are_stored_in_several_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 30)
    table = pa.table({"a": [0, 1, 2, 3], "tags": pa.array(TAGS, TEXT_LISTS)})
    rows = ingest_and_read(tmp_path, "hf", put_table(tmp_path / "t.parquet", table), label="tags")
    assert (rows["a"], rows["target"].tolist()) == ([0, 1, 2, 3], MULTI_HOT)


def with_features(table: pa.Table, **features: Any) -> pa.Table:
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def test_lists_of_class_labels_have_their_names(tmp_path: Path) -> None:
    feature = {"feature": {"names": ["joy", "fear", "love"], "_type": "ClassLabel"}, "_type": "Sequence"}
    table = pa.table({"a": [0, 1, 2], "labels": pa.array([[2, 0], [], [1]], pa.list_(pa.int8()))})
    path = put_table(tmp_path / "in.parquet", with_features(table, labels=feature))
    assert ingest_and_read(tmp_path, "hf", path, label="labels")["target"].tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    wrong = pa.table({"labels": pa.array([[0], [3]], pa.list_(pa.int8()))})
    put_table(path, with_features(wrong, labels=feature))
    assert converter.NOT_IN_CLASSES in ingest_error(tmp_path / "second", "hf", path, label="labels")


def test_class_labels_keep_their_order(tmp_path: Path) -> None:
    feature = {"names": ["b", "a"], "_type": "ClassLabel"}
    path = put_table(tmp_path / "in.parquet", with_features(pa.table({"a": [1, 2], "y": [0, 1]}), y=feature))
    assert ingest_and_read(tmp_path, "hf", path, label="y", classes=["b", "a"])["label"] == [0, 1]
    message = ingest_error(tmp_path / "second", "hf", path, label="y", classes=["a", "b"])
    assert "has the classes ['b', 'a'], and classes is ['a', 'b']" in message


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
    folder = put_files(tmp_path, {name: [1] for name in names})
    parts = ingest(IngestOptions("hf", str(tmp_path / "out"), str(folder))).parts
    assert {name: part.rows for name, part in parts.items()} == splits


def test_a_numbered_file_next_to_split_files_is_refused(tmp_path: Path) -> None:
    folder = put_files(tmp_path, {"train": [1], "part-0": [1]})
    assert "part-0.parquet does not name its split" in ingest_error(tmp_path, "hf", folder)


@pytest.mark.parametrize(("end", "mark"), [("arrow", ""), ("parquet", "-0f1e2d")])
def test_missing_and_duplicate_numbered_files_are_refused(tmp_path: Path, end: str, mark: str) -> None:
    folder = put_files(tmp_path, {f"train-{number:05d}-of-00003{mark}": [number] for number in range(3)}, end)
    second = folder / f"train-00001-of-00003{mark}.{end}"
    assert ingest_and_read(tmp_path / "whole", "hf", folder)["c"] == [0, 1, 2]
    duplicate = folder / (f"train-00001-of-00003-ffffff.{end}" if mark else f"train-00000-of-00001.{end}")
    shutil.copy(second, duplicate)
    assert "the files train-... are numbered more than once" in ingest_error(tmp_path, "hf", folder)
    duplicate.unlink()
    second.unlink()
    assert "train-00001-of-00003 is missing; 2 of 3 files exist" in ingest_error(tmp_path, "hf", folder)


def test_the_part_files_of_pyarrow_are_one_data_set(tmp_path: Path) -> None:
    pyarrow.dataset.write_dataset(
        pa.table({"x": range(100)}), tmp_path / "in", format="parquet", max_rows_per_file=50, max_rows_per_group=50
    )
    assert ingest_and_read(tmp_path, "hf", tmp_path / "in")["x"] == list(range(100))


@pytest.mark.parametrize("end", SUFFIXES)
@pytest.mark.parametrize("index", ["customer", None])
def test_the_index_of_a_pandas_table_stays_an_index(tmp_path: Path, end: str, index: str | None) -> None:
    frame = pd.DataFrame({"x": [0.5, 1.5, 2.5], "label": [0, 1, 0]}, [3, 7, 5]).rename_axis(index)
    path = put_table(tmp_path / "in" / f"train.{end}", pa.Table.from_pandas(frame))
    name = index or "__index_level_0__"
    options = IngestOptions("hf", str(tmp_path / "out"), str(path.parent), rename={name: "key"})
    assert open_dataset(ingest(options).parts[""].path).facts.index_columns == ("key",)
    options = dataclasses.replace(options, out=str(tmp_path / "as it is"), rename={})
    facts = open_dataset(ingest(options).parts[""].path).facts
    assert facts.index_columns == (name,)
    assert TabularClassification("label").prepare(facts).columns() == ["x", "label"]


@pytest.mark.parametrize("pandas", [b"[]", b"no JSON", b'{"index_columns": null}', b'{"index_columns": "x"}'])
def test_invalid_pandas_metadata_names_no_index(tmp_path: Path, pandas: bytes) -> None:
    pq.write_table(pa.table({"x": [1.0]}).replace_schema_metadata({b"pandas": pandas}), tmp_path / "a.parquet")
    assert open_dataset(str(tmp_path)).facts.index_columns == ()


@pytest.mark.parametrize("source", ["jsonl", "hf"])
def test_a_column_that_cannot_be_stored_is_left_out_by_drop(tmp_path: Path, source: str) -> None:
    path = write_rows(tmp_path, source, [{"a": number, "inner": [[{"b": 1}]]} for number in range(3)])
    assert ingest_and_read(tmp_path, source, path, drop=["inner"])["a"] == [0, 1, 2]


IN_FIRST = "lists of numbers in the first file"


@pytest.mark.parametrize("split_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    ("first", "second", "options", "expected"),
    [
        (pa.array([1], pa.int32()), pa.array([1], pa.int64()), {}, "all files of a data set need the same"),
        (pa.array([[1]], pa.list_(pa.int32())), pa.array([[1]], pa.list_(pa.int64())), {}, "int64"),
        (pa.array([[1]]), pa.array([1]), {}, f"column 'c' holds int64, but {IN_FIRST}. Save it again"),
        (pa.array([[1]]), pa.array([1]), {"ragged": ["c"]}, f"column 'c' holds int64, but {IN_FIRST}. Save it again"),
        (pa.array([[], []], pa.list_(pa.list_(pa.int8()))), pa.array([1]), {}, "column 'c' has no value at all"),
        (pa.array([[1]]), pa.array([["x"]]), {}, f"column 'c' holds list<element: string>, but {IN_FIRST}"),
        (pa.array([["x"]]), pa.array([[1]]), {"label": "c"}, "part-00001.parquet: column 'c' holds list<"),
    ],
)
def test_files_of_one_split_with_different_types_are_refused(
    tmp_path: Path, first: pa.Array, second: pa.Array, options: dict[str, Any], expected: str, split_bytes: int
) -> None:
    folder = put_files(tmp_path, {"part-00000": first, "part-00001": second})
    assert expected in ingest_error(tmp_path, "hf", folder, split_bytes=split_bytes, on_bad_row="skip", **options)


@pytest.mark.parametrize("split_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    ("first", "second", "ragged", "expected"),
    [
        (pa.array([1, 2]), pa.nulls(2), None, [1, 2, None, None]),
        (pa.array(["x", "y"]).dictionary_encode(), pa.nulls(2), None, ["x", "y", None, None]),
        (pa.array([[1], [2, 3]]), pa.nulls(2), ["c"], [[1], [2, 3]]),
        (pa.array([[1], [2, 3]]), pa.array([[], []]), ["c"], [[1], [2, 3], [], []]),
        (pa.array([[[1, 2]], []]), pa.array([[], [[]]]), ["c"], [[[1, 2]], [], []]),
        (pa.array([[1, 2], [2, 3]], pa.list_(pa.int8(), 2)), pa.nulls(2), None, [[1, 2], [2, 3]]),
    ],
)
def test_a_column_without_values_in_a_later_file_has_the_first_files_type(
    tmp_path: Path, first: pa.Array, second: pa.Array, ragged: list[str] | None, expected: list[Any], split_bytes: int
) -> None:
    folder = put_files(tmp_path, {"train-00000-of-00002": first, "train-00001-of-00002": second})
    options: dict[str, Any] = {"split_bytes": split_bytes, "on_bad_row": "skip", "ragged": ragged}
    values = ingest_and_read(tmp_path, "hf", folder, **options)["c"]
    assert (values.tolist() if isinstance(values, np.ndarray) else values) == expected


@pytest.mark.parametrize("kind", ["saved", "saved/train", "loaded", "parquet", "parquet/train-00000-of-00001.parquet"])
def test_data_of_the_library_is_read_without_it(tmp_path: Path, kind: str) -> None:
    """The real library wrote the files in `hf/`, see `hf/make.py`."""
    ingest(IngestOptions("hf", str(tmp_path / "out"), str(HF / kind), split_bytes=1))
    for side, rows in ({"": 7} if "train" in kind else {"train": 7, "test": 3}).items():
        columns = read_columns(tmp_path / "out" / side)
        assert list(columns) == ["row_id", "image", "label", "text", "vector", "grid"]
        pixels = [np.asarray(Image.open(io.BytesIO(image)))[0, 0, 0] for image in columns["image"]]
        assert pixels == [10 * i for i in range(rows)]
        assert (columns["label"], columns["text"]) == ([i % 3 for i in range(rows)], [f"row {i}" for i in range(rows)])
        np.testing.assert_array_equal(columns["vector"], [[i, 1, 2] for i in range(rows)])
        np.testing.assert_array_equal(columns["grid"], np.array([[[i, 1], [2, 3]] for i in range(rows)], np.float32))
        assert description_of(tmp_path / "out" / side)["classes"] == ["ant", "bee", "cat"]


ARROW_FILE = "data-00000-of-00001.arrow"
CLASSES = {"y": {"names": ["u", "v"], "_type": "ClassLabel"}}


def save_to_disk(folder: Path, columns: dict[str, Any], features: dict[str, Any] | None = None) -> Path:
    """Writes a data set in the layout of `save_to_disk` and returns its folder."""
    put_table(folder / ARROW_FILE, pa.table(columns))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": ARROW_FILE}], "_split": None}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features or {}}))
    return folder


@pytest.mark.parametrize(("label", "reason"), [(-1, "no label"), (7, "label 7; the 2 classes allow 0 to 1")])
def test_rows_without_one_of_the_classes_can_be_skipped(tmp_path: Path, label: int, reason: str) -> None:
    folder = save_to_disk(tmp_path / "in", {"a": [1, 2, 3], "y": [1, label, 0], "more": [{"b": 1}] * 3}, CLASSES)
    assert f"row {ARROW_FILE}:1: {reason}" in ingest_error(tmp_path, "hf", folder, label="y", columns=["a"])
    columns = ingest_and_read(tmp_path, "hf", folder, label="y", columns=["a"], on_bad_row="skip")
    assert (columns["a"], columns["label"]) == ([1, 3], [1, 0])
    about = description_of(tmp_path / "out")
    assert (about["classes"], about["refused"]) == (["u", "v"], 1)


@pytest.mark.parametrize(
    ("columns", "options", "expected"),
    [
        ({"a": [1], "y": [b"u"]}, {"label": "y"}, "a label must be a ClassLabel, an integer, text, a truth value"),
        ({"a": [{"bytes": None, "path": "x.png"}]}, {}, "has no bytes, only a path"),
        ({"a": [{"bytes": b"x", "path": None}]}, {}, "not an image that can be decoded"),
        ({"a": [1]}, {"columns": ["b"]}, "no column 'b'; the columns are ['a']"),
    ],
)
def test_bad_saved_data_is_refused(
    tmp_path: Path, columns: dict[str, Any], options: dict[str, Any], expected: str
) -> None:
    assert expected in ingest_error(tmp_path, "hf", save_to_disk(tmp_path / "in", columns, CLASSES), **options)


def test_incomplete_folders_are_refused(tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "in", {"a": range(1000)})
    (folder / ARROW_FILE).write_bytes((folder / ARROW_FILE).read_bytes()[:3000])
    assert "The file is damaged or has another format" in ingest_error(tmp_path, "hf", folder)
    (folder / ARROW_FILE).unlink()
    assert f"state.json names '{ARROW_FILE}', which is not in" in ingest_error(tmp_path, "hf", folder)
    (folder / "state.json").unlink()
    assert "nothing of Hugging Face datasets" in ingest_error(tmp_path, "hf", folder)


@pytest.mark.parametrize("name", ["../other", "..", ".", "", "/etc", "a/../../other"])
def test_splits_and_files_elsewhere_are_not_read(tmp_path: Path, name: str) -> None:
    save_to_disk(tmp_path / "other", {"a": [1]})
    folder = save_to_disk(tmp_path / "in", {"a": [1]})
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    assert "state.json names" in ingest_error(tmp_path, "hf", folder)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    assert f"dataset_dict.json names the split {name!r}" in ingest_error(tmp_path, "hf", folder)


def test_changed_class_names_count_as_a_changed_source(tmp_path: Path) -> None:
    names = save_to_disk(tmp_path / "in", {"a": [1], "y": [1]}, CLASSES) / "dataset_info.json"
    options = IngestOptions("hf", str(tmp_path / "out"), str(tmp_path / "in"), label="y")
    ingest(options)
    assert ingest(options).reused
    names.write_text(names.read_text().replace('"u"', '"other"'))
    with pytest.raises(ConfigError, match="its source has changed since"):
        ingest(options)


@pytest.mark.parametrize(("name", "compression"), [("a.feather", "lz4"), ("a.arrow", None)])
def test_files_of_arrow_as_pandas_and_polars_write_them_are_read(
    tmp_path: Path, name: str, compression: str | None
) -> None:
    table = pa.table({"a": range(1000), "b": ["x", None] * 500})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(tmp_path / name, table.schema, options=options) as file:
        file.write_table(table, max_chunksize=300)
    rows = ingest_and_read(tmp_path, "hf", tmp_path / name)
    assert (rows["a"], rows["b"]) == (table["a"].to_pylist(), table["b"].to_pylist())
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:3000])
    assert "The file is damaged" in ingest_error(tmp_path / "cut", "hf", tmp_path / name)


@pytest.mark.parametrize("end", [400, 2_000_000_000, 2])
def test_an_arrow_stream_that_points_outside_itself_is_refused(tmp_path: Path, end: int) -> None:
    """Without the check, rows would contain bytes of this process's memory, or crash it."""
    folder = save_to_disk(tmp_path / "in", {"a": [{"bytes": b"abc", "path": None}] * 3})
    data = (folder / ARROW_FILE).read_bytes()
    assert data.count(struct.pack("<4i", 0, 3, 6, 9)) == 1
    (folder / ARROW_FILE).write_bytes(data.replace(struct.pack("<4i", 0, 3, 6, 9), struct.pack("<4i", 0, 3, 6, end)))
    assert "The file is damaged" in ingest_error(tmp_path, "hf", folder, check=False)


@pytest.mark.parametrize("legacy_format", [False, True])
def test_an_arrow_stream_without_its_end_marker_is_refused(tmp_path: Path, legacy_format: bool) -> None:
    """The file is truncated between two batches; the last value equals the end marker, so the file ends as a complete
    one does.
    """
    sink, ends = io.BytesIO(), []
    table = pa.table({"a": [1, 2**32 - 1]})
    options = pa.ipc.IpcWriteOptions(use_legacy_format=legacy_format)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        for _ in range(3):
            writer.write_table(table)
            ends.append(sink.tell())
    path = tmp_path / "data.arrow"
    path.write_bytes(sink.getvalue()[: ends[1]])
    assert "the file was cut off" in ingest_error(tmp_path, "hf", path)
    path.write_bytes(sink.getvalue())
    assert ingest_and_read(tmp_path, "hf", path)["a"] == [1, 2**32 - 1] * 3
