"""Readers of other formats store the values of the source, and refuse damaged or hostile input with a reason."""

from __future__ import annotations

import io
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ray_app.errors import ConfigError, DataError
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.ingest.readers import base
from ray_app.ingest.shards import Shards
from tests.support.ingest_inputs import (
    ingest_and_read,
    ingest_error,
    read_columns,
)
from tests.support.paths import SUPPORT

HF = SUPPORT / "hf"


def test_a_column_that_parquet_rejects_is_not_a_storage_error(tmp_path: Path) -> None:
    """pyarrow raises an OSError for both, so ingest has to distinguish them."""
    shards = Shards(tmp_path / "out", "part-", tmp_path / "scratch", (9, 9, 9), None)
    shards.write(base.make_table(["a"], {"x": np.ones((1, 2, 0))}))
    with pytest.raises(DataError, match=r"the columns .* cannot be written: Invalid FIXED_LEN_BYTE_ARRAY length: 0"):
        shards.close()


@pytest.mark.parametrize("kind", ["saved", "saved/train", "loaded", "parquet", "parquet/train-00000-of-00001.parquet"])
def test_hugging_face_data_is_read_without_its_library(tmp_path: Path, kind: str) -> None:
    """The real library wrote the files in `hf/`, see `hf/make.py`."""
    ingest(IngestOptions("hf", str(tmp_path / "out"), str(HF / kind), split_bytes=1))
    sides = {"": 7} if "train" in kind else {"train": 7, "test": 3}
    for side, rows in sides.items():
        columns = read_columns(tmp_path / "out" / side)
        assert list(columns) == ["row_id", "image", "label", "text", "vector", "grid"]
        assert [np.asarray(Image.open(io.BytesIO(image)))[0, 0, 0] for image in columns["image"]] == [
            10 * i for i in range(rows)
        ]
        assert (columns["label"], columns["text"]) == ([i % 3 for i in range(rows)], [f"row {i}" for i in range(rows)])
        np.testing.assert_array_equal(columns["vector"], [[i, 1, 2] for i in range(rows)])
        np.testing.assert_array_equal(columns["grid"], np.array([[[i, 1], [2, 3]] for i in range(rows)], np.float32))
        assert json.loads((tmp_path / "out" / side / "_dataset.json").read_text())["classes"] == ["ant", "bee", "cat"]


def write_saved_dataset(folder: Path, table: pa.Table, features: dict[str, Any]) -> Path:
    """Writes a data set in the layout of `save_to_disk` and returns its folder."""
    folder.mkdir()
    with (
        pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": None})
    )
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


CLASSES = {"y": {"names": ["u", "v"], "_type": "ClassLabel"}}


def test_hugging_face_rows_without_a_label_can_be_skipped(tmp_path: Path) -> None:
    folder = write_saved_dataset(
        tmp_path / "in", pa.table({"a": [1, 2, 3], "y": [1, -1, 0], "more": [{"b": 1}] * 3}), CLASSES
    )
    columns = ingest_and_read(tmp_path, "hf", folder, label="y", columns=["a"], on_bad_row="skip")
    assert (columns["a"], columns["label"]) == ([1, 3], [1, 0])
    about = json.loads((tmp_path / "out" / "_dataset.json").read_text())
    assert (about["classes"], about["refused"]) == (["u", "v"], 1)


@pytest.mark.parametrize(
    ("table", "options", "expected"),
    [
        ({"a": [1], "y": [-1]}, {"label": "y"}, "row data-00000-of-00001.arrow:0: no label"),
        ({"a": [1], "y": [b"u"]}, {"label": "y"}, "a label is a ClassLabel, an integer, text, a truth value"),
        ({"a": [[{"b": 1}]]}, {}, "column 'a' holds lists that are not of numbers"),
        ({"a": [{"bytes": None, "path": "x.png"}]}, {}, "has no bytes, only a path"),
        ({"a": [{"bytes": b"x", "path": None}]}, {}, "not an image that can be decoded"),
        ({"a": [1]}, {"columns": ["b"]}, "no column 'b'; the columns are ['a']"),
    ],
)
def test_bad_hugging_face_data_is_refused(
    tmp_path: Path, table: dict[str, Any], options: dict[str, Any], expected: str
) -> None:
    assert expected in ingest_error(
        tmp_path, "hf", write_saved_dataset(tmp_path / "in", pa.table(table), CLASSES), **options
    )


def test_incomplete_hugging_face_folders_are_refused(tmp_path: Path) -> None:
    folder = write_saved_dataset(tmp_path / "in", pa.table({"a": list(range(1000))}), {})
    file = folder / "data-00000-of-00001.arrow"
    data = file.read_bytes()
    file.write_bytes(data[:3000])
    assert "The file is damaged or of another format" in ingest_error(tmp_path, "hf", folder)
    file.unlink()
    assert "state.json names 'data-00000-of-00001.arrow', which is not in" in ingest_error(tmp_path, "hf", folder)
    (folder / "state.json").unlink()
    assert "nothing of Hugging Face datasets" in ingest_error(tmp_path, "hf", folder)


@pytest.mark.parametrize("name", ["../other", "..", ".", "", "/etc", "a/../../other"])
def test_splits_and_files_of_hugging_face_elsewhere_are_not_read(tmp_path: Path, name: str) -> None:
    table = pa.table({"a": [1]})
    write_saved_dataset(tmp_path / "other", table, {})
    folder = write_saved_dataset(tmp_path / "in", table, {})
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    assert "state.json names" in ingest_error(tmp_path, "hf", folder)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    assert f"dataset_dict.json names the split {name!r}" in ingest_error(tmp_path, "hf", folder)


@pytest.mark.parametrize(("name", "compression"), [("a.feather", "lz4"), ("a.arrow", None)])
def test_files_of_arrow_as_pandas_and_polars_write_them_are_read(
    tmp_path: Path, name: str, compression: str | None
) -> None:
    table = pa.table({"a": list(range(1000)), "b": ["x", None] * 500})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(tmp_path / name, table.schema, options=options) as file:
        file.write_table(table, max_chunksize=300)
    rows = ingest_and_read(tmp_path, "hf", tmp_path / name)
    assert (rows["a"], rows["b"]) == (table["a"].to_pylist(), table["b"].to_pylist())
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:3000])
    assert "The file is damaged" in ingest_error(tmp_path / "cut", "hf", tmp_path / name)


@pytest.mark.parametrize("suffix", [".arrow", "-0f1e2d.parquet"])
def test_missing_and_duplicate_numbered_files_are_refused(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "in").mkdir()
    for number in range(3):
        path = tmp_path / "in" / f"train-{number:05d}-of-00003{suffix}"
        if suffix == ".arrow":
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, pa.schema({"a": pa.int64()})) as writer:
                writer.write_table(pa.table({"a": [number]}))
        else:
            pq.write_table(pa.table({"a": [number]}), path)
    assert ingest_and_read(tmp_path / "whole", "hf", tmp_path / "in")["a"] == [0, 1, 2]
    duplicate = (
        tmp_path
        / "in"
        / (f"train-00000-of-00001{suffix}" if suffix == ".arrow" else "train-00001-of-00003-ffffff.parquet")
    )
    shutil.copy(tmp_path / "in" / f"train-00001-of-00003{suffix}", duplicate)
    assert "the files train-... are numbered more than once" in ingest_error(tmp_path, "hf", tmp_path / "in")
    duplicate.unlink()
    (tmp_path / "in" / f"train-00001-of-00003{suffix}").unlink()
    assert "train-00001-of-00003 is missing, 2 of 3 are there" in ingest_error(tmp_path, "hf", tmp_path / "in")


@pytest.mark.parametrize("split_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (pa.array([1], pa.int32()), pa.array([1], pa.int64()), "int64"),
        (pa.array([[1]], pa.list_(pa.int32())), pa.array([[1]], pa.list_(pa.int64())), "int64"),
        (pa.array([[1]]), pa.array([1]), "column 'a' holds int64, and lists of numbers in the first file. Save it"),
        (pa.array([[], []], pa.list_(pa.list_(pa.int8()))), pa.array([1]), "column 'a' has no value at all"),
        (pa.array([[1]]), pa.array([["x"]]), "column 'a' holds list<element: string>, and lists of numbers in the"),
    ],
)
def test_files_of_one_split_with_different_types_are_refused(
    tmp_path: Path, first: pa.Array, second: pa.Array, expected: str, split_bytes: int
) -> None:
    (tmp_path / "in").mkdir()
    for number, column in enumerate((first, second)):
        pq.write_table(pa.table({"a": column}), tmp_path / "in" / f"train-{number:05d}-of-00002.parquet")
    ragged = ["a"] if pa.types.is_nested(first.type) else None
    for ragged_option in (None, ragged):
        message = ingest_error(
            tmp_path, "hf", tmp_path / "in", split_bytes=split_bytes, on_bad_row="skip", ragged=ragged_option
        )
        assert expected in message
    assert expected != "int64" or "all files of a data set have the same. Correct the input." in message


@pytest.mark.parametrize("split_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    ("first", "second", "ragged", "expected"),
    [
        (pa.array([1, 2]), pa.nulls(2), False, [1, 2, None, None]),
        (pa.array(["x", "y"]).dictionary_encode(), pa.nulls(2), False, ["x", "y", None, None]),
        (pa.array([[1], [2, 3]]), pa.nulls(2), True, [[1], [2, 3]]),
        (pa.array([[1], [2, 3]]), pa.array([[], []]), True, [[1], [2, 3], [], []]),
        (pa.array([[[1, 2]], []]), pa.array([[], [[]]]), True, [[[1, 2]], [], []]),
        (pa.array([[1, 2], [2, 3]], pa.list_(pa.int8(), 2)), pa.nulls(2), False, [[1, 2], [2, 3]]),
    ],
)
def test_a_column_without_values_in_a_later_file_has_the_first_files_type(
    tmp_path: Path, first: pa.Array, second: pa.Array, ragged: bool, expected: list[Any], split_bytes: int
) -> None:
    (tmp_path / "in").mkdir()
    for number, column in enumerate((first, second)):
        pq.write_table(pa.table({"a": column}), tmp_path / "in" / f"train-{number:05d}-of-00002.parquet")
    columns = ingest_and_read(
        tmp_path,
        "hf",
        tmp_path / "in",
        split_bytes=split_bytes,
        on_bad_row="skip",
        max_bad_rows=9,
        ragged=["a"] if ragged else None,
    )
    values = sorted(
        (list(np.asarray(value).tolist()) if pa.types.is_nested(first.type) else value for value in columns["a"]),
        key=str,
    )
    assert values == sorted(expected, key=str)


def test_changed_class_names_count_as_a_changed_source(tmp_path: Path) -> None:
    names = write_saved_dataset(tmp_path / "in", pa.table({"a": [1], "y": [1]}), CLASSES) / "dataset_info.json"
    options = IngestOptions("hf", str(tmp_path / "out"), str(tmp_path / "in"), label="y")
    ingest(options)
    assert ingest(options).reused
    names.write_text(names.read_text().replace('"u"', '"other"'))
    with pytest.raises(ConfigError, match="its source has changed since"):
        ingest(options)


@pytest.mark.parametrize("end", [400, 2_000_000_000, 2])
def test_an_arrow_stream_that_points_outside_itself_is_refused(tmp_path: Path, end: int) -> None:
    """Without the check, rows would contain bytes of this process's memory, or crash it."""
    folder = write_saved_dataset(tmp_path / "in", pa.table({"a": [{"bytes": b"abc", "path": None}] * 3}), {})
    file = folder / "data-00000-of-00001.arrow"
    data = file.read_bytes()
    assert data.count(struct.pack("<4i", 0, 3, 6, 9)) == 1
    file.write_bytes(data.replace(struct.pack("<4i", 0, 3, 6, 9), struct.pack("<4i", 0, 3, 6, end)))
    assert "The file is damaged" in ingest_error(tmp_path, "hf", folder, check=False)


def test_hugging_face_labels_outside_the_classes_are_bad_rows(tmp_path: Path) -> None:
    folder = write_saved_dataset(tmp_path / "in", pa.table({"a": [1, 2, 3], "y": [1, 7, 0]}), CLASSES)
    assert ingest_and_read(tmp_path, "hf", folder, label="y", on_bad_row="skip")["label"] == [1, 0]
    [refused] = (tmp_path / "out" / "_refused.jsonl").read_text().splitlines()
    assert json.loads(refused)["reason"] == "label 7; the 2 classes allow 0 to 1"


@pytest.mark.parametrize("legacy_format", [False, True])
def test_an_arrow_stream_without_its_end_marker_is_refused(tmp_path: Path, legacy_format: bool) -> None:
    """The file is truncated between two batches; the last value equals the end marker, so the file ends as a complete
    one does.
    """
    sink = io.BytesIO()
    table = pa.table({"a": [1, 2**32 - 1]})
    ends = []
    with pa.ipc.new_stream(
        sink, table.schema, options=pa.ipc.IpcWriteOptions(use_legacy_format=legacy_format)
    ) as writer:
        for _ in range(3):
            writer.write_table(table)
            ends.append(sink.tell())
    path = tmp_path / "data.arrow"
    path.write_bytes(sink.getvalue()[: ends[1]])
    assert "it was cut off" in ingest_error(tmp_path, "hf", path)
    path.write_bytes(sink.getvalue())
    assert ingest_and_read(tmp_path, "hf", path)["a"] == [1, 2**32 - 1] * 3


def test_parquet_is_described_and_not_rewritten(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for i, rows in enumerate((5, 3)):
        pq.write_table(
            pa.table({"x": [0.5] * rows, "label": [i] * rows}), tmp_path / "in" / f"{i}.parquet", row_group_size=2
        )
    summary = ingest(IngestOptions("parquet", input=str(tmp_path / "in")))
    part = summary.parts[""]
    assert (summary.reused, part.rows, part.path) == (True, 8, str(tmp_path / "in"))
    assert [(s["path"], s["rows"], s["row_groups"]) for s in part.shards] == [("0.parquet", 5, 3), ("1.parquet", 3, 2)]
    assert part.columns["label"]["type"] == "integer"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["0.parquet", "1.parquet", "in"]
    (tmp_path / "in" / "1.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        ingest(IngestOptions("parquet", input=str(tmp_path / "in")))
