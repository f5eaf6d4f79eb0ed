"""A label of lists, of all classes of a row, becomes the array column `target` with a 1 for each class."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_app import ingest_files, ingest_table
from ray_app.errors import DataError
from ray_app.ingest.readers import base, converter
from tests.support.ingest_inputs import ingest_and_read, read_columns
from tests.support.ingest_rows import write_rows

TAGS = [["y", "x"], [], ["2020-01-01"], ["x", "x"]]
MULTI_HOT = [[0, 1, 1], [0, 0, 0], [1, 0, 0], [0, 1, 0]]
TEXT_LISTS = pa.list_(pa.string())


def write_source(folder: Path, source: str, tags: list[Any]) -> Path:
    """Writes rows with the numbers `a` and the lists `tags`; returns the file."""
    rows = [{"a": number, "tags": names} for number, names in enumerate(tags)]
    return write_rows(folder, source, rows, pa.schema({"a": pa.int64(), "tags": TEXT_LISTS}))


def test_rows_of_many_classes_are_stored_in_several_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "BLOCK_BYTES", 30)
    rows = ingest_and_read(tmp_path, "jsonl", write_source(tmp_path, "jsonl", TAGS), label="tags")
    assert (rows["a"], rows["target"].tolist()) == ([0, 1, 2, 3], MULTI_HOT)


def test_lists_of_class_labels_have_the_names_of_hugging_face(tmp_path: Path) -> None:
    feature = {"feature": {"names": ["joy", "fear", "love"], "_type": "ClassLabel"}, "_type": "Sequence"}
    table = pa.table({"a": [0, 1, 2], "labels": pa.array([[2, 0], [], [1]], pa.list_(pa.int8()))})
    metadata = {"huggingface": json.dumps({"info": {"features": {"labels": feature}}})}
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "in.parquet")
    rows = ingest_and_read(tmp_path, "hf", tmp_path / "in.parquet", label="labels")
    assert rows["target"].tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]
    wrong = pa.table({"labels": pa.array([[0], [3]], pa.list_(pa.int8()))}).replace_schema_metadata(metadata)
    pq.write_table(wrong, tmp_path / "wrong.parquet")
    with pytest.raises(DataError, match=converter.NOT_IN_CLASSES):
        ingest_files(str(tmp_path / "second"), "hf", str(tmp_path / "wrong.parquet"), label="labels")


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_list(pa.large_string()),
        pa.list_(pa.dictionary(pa.int32(), pa.string())),
        pa.list_(pa.string_view()),
    ],
    ids=str,
)
def test_lists_of_each_type_of_text_are_read(tmp_path: Path, kind: pa.DataType) -> None:
    table = pa.table({"a": [0, 1, 2, 3], "tags": pa.array(TAGS, TEXT_LISTS).cast(kind)})
    ingest_table(str(tmp_path / "out"), table, label="tags")
    assert read_columns(tmp_path / "out")["target"].tolist() == MULTI_HOT


def test_a_second_file_with_another_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"tags": [["x"]]}), tmp_path / "in" / "part-0.parquet")
    pq.write_table(pa.table({"tags": [[1]]}), tmp_path / "in" / "part-1.parquet")
    with pytest.raises(DataError, match=r"part-1\.parquet: column 'tags' holds list<.*> in the first file"):
        ingest_files(str(tmp_path / "out"), "hf", str(tmp_path / "in"), label="tags")
