"""The option `classes` names the numbers and truth values of a label, in every source that has a label column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.ingest_inputs import ingest_and_read, ingest_error
from tests.support.ingest_rows import write_rows


def write_source(folder: Path, source: str, labels: list[Any]) -> Path:
    """Writes rows with the numbers `a` and a label `y`; returns the file."""
    return write_rows(folder, source, [{"a": number, "y": label} for number, label in enumerate(labels)])


@pytest.mark.parametrize("source", ["csv", "jsonl", "hf", "tfrecord", "webdataset"])
@pytest.mark.parametrize("labels", [[-1, 1, -1], [5, 3, 5], [-1.0, 1.0, -1.0], [True, False, True]], ids=str)
def test_labels_are_numbered_in_the_order_of_classes(tmp_path: Path, source: str, labels: list[Any]) -> None:
    if source == "tfrecord" and isinstance(labels[0], bool):
        # TFRecord has no booleans.
        labels = [int(label) for label in labels]
    # A CSV is text: its classes are as they were written.
    classes = [
        str(label) if source == "csv" else f"{label:.0f}" if isinstance(label, float) else json.dumps(label)
        for label in labels[:2]
    ]
    path = write_source(tmp_path, source, labels)
    assert ingest_and_read(tmp_path, source, path, label="y", classes=classes)["label"] == [0, 1, 0]


@pytest.mark.parametrize("source", ["jsonl", "hf", "tfrecord", "webdataset"])
def test_a_number_that_is_no_class_is_refused_or_left_out(tmp_path: Path, source: str) -> None:
    path = write_source(tmp_path, source, [-1, 7, 1])
    message = ingest_error(tmp_path, source, path, label="y", classes=["1", "-1"])
    assert "none of the classes" in message or "expected one of ['1', '-1']" in message
    rows = ingest_and_read(tmp_path, source, path, label="y", classes=["1", "-1"], on_bad_row="skip")
    assert rows["label"] == [1, 0]


def test_a_label_of_tfrecord_that_is_no_whole_number_is_refused(tmp_path: Path) -> None:
    path = write_source(tmp_path, "tfrecord", [1.0, 1.5])
    assert "row in.tfrecord:1 has 1.5, which is not an integer" in ingest_error(tmp_path, "tfrecord", path, label="y")


def test_class_labels_of_hugging_face_keep_their_order(tmp_path: Path) -> None:
    info = {"info": {"features": {"y": {"names": ["b", "a"], "_type": "ClassLabel"}}}}
    table = pa.table({"a": [1, 2], "y": [0, 1]}).replace_schema_metadata({"huggingface": json.dumps(info)})
    pq.write_table(table, tmp_path / "in.parquet")
    assert ingest_and_read(tmp_path, "hf", tmp_path / "in.parquet", label="y", classes=["b", "a"])["label"] == [0, 1]
    (tmp_path / "second").mkdir()
    message = ingest_error(tmp_path / "second", "hf", tmp_path / "in.parquet", label="y", classes=["a", "b"])
    assert "has the classes ['b', 'a'], and classes is ['a', 'b']" in message


@pytest.mark.parametrize("source", ["jsonl", "hf", "csv"])
def test_a_column_that_cannot_be_stored_is_left_out_by_drop(tmp_path: Path, source: str) -> None:
    # A label column of this name beside another label is refused.
    other = {"label": 1} if source == "csv" else {"inner": [[{"b": 1}]]}
    path = write_rows(tmp_path, source, [{"a": number, **other, "y": number} for number in range(3)])
    drop = ["label"] if source == "csv" else ["inner"]
    columns = ingest_and_read(tmp_path, source, path, label="y", drop=[*drop])
    assert (columns["a"], columns["label"]) == ([0, 1, 2], [0, 1, 2])
    assert "inner" not in columns


@pytest.mark.parametrize("source", ["jsonl", "hf"])
def test_a_label_in_a_list_of_one_is_the_number(tmp_path: Path, source: str) -> None:
    assert ingest_and_read(tmp_path, source, write_source(tmp_path, source, [[1], [0]]), label="y")["label"] == [1, 0]


def test_a_label_of_lists_of_numbers_is_refused_with_advice(tmp_path: Path) -> None:
    path = write_source(tmp_path, "hf", [[1, 0], [0, 0]])
    message = ingest_error(tmp_path, "hf", path, label="y")
    assert "has lists of shape [2]" in message
    assert "--rename label=target" in message
    path = tmp_path / "second.parquet"
    pq.write_table(pa.table({"label": [[1, 0], [0, 0]]}), path)
    assert ingest_and_read(tmp_path, "hf", path, rename={"label": "target"})["target"].tolist() == [[1, 0], [0, 0]]


@pytest.mark.parametrize("source", ["jsonl", "hf"])
def test_numbers_in_lists_of_one_are_numbered_in_the_order_of_classes(tmp_path: Path, source: str) -> None:
    path = write_source(tmp_path, source, [[1], [2], [1], [0]])
    assert ingest_and_read(tmp_path, source, path, label="y", classes=["2", "1", "0"])["label"] == [1, 0, 1, 2]


@pytest.mark.parametrize("source", ["csv", "jsonl", "hf"])
def test_a_label_is_not_left_out_in_silence(tmp_path: Path, source: str) -> None:
    path = write_source(tmp_path, source, [1, 0])
    for name in ("label", "y"):
        message = ingest_error(tmp_path, source, path, label="y", drop=[name])
        assert f"drop names '{name}'; the" in message
