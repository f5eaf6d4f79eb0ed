"""Columns of lists of any length (`ragged`): training reads each row as the source has it; other rows are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_app.data.dataset import open_dataset
from ray_app.data.probes import probe
from ray_app.data.reader import Reader, plan_all_reads
from ray_app.data.reader import table_to_rows as as_read
from ray_app.errors import ConfigError, DataError
from ray_app.ingest import options, shuffle
from ray_app.ingest.ingest import DatasetSummary, IngestOptions, ingest
from ray_app.ingest.readers.converter import ANY, first_shape, ragged_shape
from ray_app.ingest.shards import row_bytes
from ray_app.task.ragged import Ragged, concat_fields
from tests.support.ingest_inputs import read_columns, source_order

IDS = [[5, 6, 7], [8], [], [9, 10, 11, 12, 13]]
BOXES = [[[0, 1, 2, 3], [4, 5, 6, 7.5]], [], [[8, 9, 10, 11]], [[1, 1, 2, 2]] * 3]
WIDTHS = (
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "bool",
)


def write_lines(folder: Path, files: dict[str, list[dict[str, Any]]]) -> Path:
    folder.mkdir()
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_table(path: Path, table: pa.Table, rows: int = 2) -> Path:
    """Writes a table as `datasets` does, in batches of `rows` rows, and returns the file."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows)
        return path
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, rows)
    return path


def ingest_source(tmp_path: Path, source: Any, path: Path, **options: Any) -> DatasetSummary:
    return ingest(IngestOptions(source, str(tmp_path / "out"), str(path), **options))


def refusal(tmp_path: Path, source: Any, path: Path, **options: Any) -> str:
    with pytest.raises((DataError, ConfigError)) as caught:
        ingest_source(tmp_path, source, path, **options)
    assert not list(tmp_path.glob("out*"))
    return str(caught.value)


def read_as_training(folder: Path, *names: str) -> dict[str, Any]:
    """Returns columns as training reads them, in the order of the source."""
    dataset = open_dataset(str(folder))
    columns = ["row_id", *names]
    reader = Reader(dataset.root, list(names), dict, probe(dataset, list(names), dict))
    tables = [table for spec in plan_all_reads(dataset.manifest, 2) for table in reader.read(spec)]
    parts = [as_read(table) for table in tables]
    output = {name: concat_fields([part[name] for part in parts]) for name in names}
    ids = [
        row_id
        for path in dataset.manifest.paths
        for row_id in pq.read_table(folder / path, columns=columns)["row_id"].to_pylist()
    ]
    order = np.array(sorted(range(len(ids)), key=[source_order(row_id) for row_id in ids].__getitem__))
    return {name: values[order] for name, values in output.items()}


def to_lists(values: Any) -> list[Any]:
    assert isinstance(values, Ragged)
    return [values.row(i).tolist() for i in range(len(values))]


@pytest.mark.parametrize("split_bytes", [1, 1 << 20])
def test_json_lines_keep_the_lengths_of_their_lists(tmp_path: Path, split_bytes: int) -> None:
    rows = [{"ids": ids, "boxes": boxes, "n": i} for i, (ids, boxes) in enumerate(zip(IDS, BOXES, strict=True))]
    folder = write_lines(tmp_path / "in", {"a": [{"ids": [], "boxes": [], "n": 9}], "b": rows[:1], "c": rows[1:]})
    summary = ingest_source(
        tmp_path, "jsonl", folder, ragged=["ids", "boxes"], rename={"ids": "tokens"}, split_bytes=split_bytes
    )
    assert read_columns(tmp_path / "out") == {
        "row_id": ["a.jsonl:1", "b.jsonl:1", "c.jsonl:1", "c.jsonl:2", "c.jsonl:3"],
        "tokens": [[], *IDS],
        "boxes": [[], *BOXES],
        "n": [9, 0, 1, 2, 3],
    }
    columns = summary.parts[""].columns
    assert columns["tokens"] == {"type": "large_list<item: int64>", "shape": None, "dtype": None, "nulls": 0}
    assert columns["boxes"] == {**columns["tokens"], "type": "large_list<item: fixed_size_list<item: double>[4]>"}
    facts = open_dataset(str(tmp_path / "out")).facts.columns
    assert (facts["tokens"].kind, facts["tokens"].minimum, facts["tokens"].maximum) == ("list", 5, 13)
    assert facts["boxes"].kind == "list"
    output = read_as_training(tmp_path / "out", "tokens", "boxes")
    assert to_lists(output["tokens"]) == [[], *IDS]
    assert to_lists(output["boxes"]) == [[], *BOXES]
    assert (output["tokens"].values.dtype, output["boxes"].row_shape) == (np.int64, (4,))


@pytest.mark.parametrize("outer", ["list", "large_list", "fixed_size_list"])
@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_hugging_face_lists_keep_their_lengths_and_types(tmp_path: Path, suffix: str, outer: str) -> None:
    rows = [[1, 0], [0, 1], [1, 1]] if outer == "fixed_size_list" else [[1, 0, 1], [], [1]]

    def list_type(item: str) -> pa.DataType:
        number = pa.from_numpy_dtype(item)
        return {"list": pa.list_(number), "large_list": pa.large_list(number), "fixed_size_list": pa.list_(number, 2)}[
            outer
        ]

    for number in range(2):
        table = pa.table(
            {item: pa.array([list(np.array(row, item)) for row in rows], list_type(item)) for item in WIDTHS}
        )
        write_table(tmp_path / "in" / f"train-{number:05d}-of-00002{suffix}", table)
    ingest_source(tmp_path, "hf", tmp_path / "in", ragged=[*WIDTHS], split_bytes=1)
    output = read_as_training(tmp_path / "out", *WIDTHS)
    facts = open_dataset(str(tmp_path / "out")).facts.columns
    for item in WIDTHS:
        assert to_lists(output[item]) == rows * 2
        assert output[item].values.dtype == np.dtype(item)
        assert facts[item].kind == "list"


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("inner", [pa.list_(pa.float32()), pa.large_list(pa.float32()), pa.list_(pa.float32(), 4)])
def test_hugging_face_boxes_are_read_where_the_first_file_has_none(
    tmp_path: Path, suffix: str, inner: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file has only empty lists."""
    monkeypatch.setattr(options, "ROW_GROUP_ROWS", 1)
    for number, rows in enumerate(([[], []], BOXES)):
        table = pa.table({"boxes": pa.array(rows, pa.list_(inner))})
        write_table(tmp_path / "in" / f"train-{number:05d}-of-00002{suffix}", table)
    ingest_source(tmp_path, "hf", tmp_path / "in", ragged=["boxes"], split_bytes=1)
    boxes = read_as_training(tmp_path / "out", "boxes")["boxes"]
    assert (to_lists(boxes), boxes.row_shape, boxes.values.dtype) == ([[], [], *BOXES], (4,), np.float32)


@pytest.mark.parametrize("split_bytes", [1, 1 << 20])
def test_integers_in_one_file_and_floats_in_another_become_floats(tmp_path: Path, split_bytes: int) -> None:
    folder = write_lines(
        tmp_path / "in", {"f": [{"a": [1], "b": [[1, 2]]}], "g": [{"a": [1.5, 2], "b": [[0.5, 2]]}, {"a": [], "b": []}]}
    )
    ingest_source(tmp_path, "jsonl", folder, ragged=["a", "b"], split_bytes=split_bytes)
    output = read_as_training(tmp_path / "out", "a", "b")
    assert {name: (to_lists(rows), rows.values.dtype) for name, rows in output.items()} == {
        "a": ([[1.0], [1.5, 2.0], []], np.float64),
        "b": ([[[1.0, 2.0]], [[0.5, 2.0]], []], np.float64),
    }


def test_a_data_set_of_empty_lists_is_read(tmp_path: Path) -> None:
    path = write_table(tmp_path / "in" / "f.parquet", pa.table({"a": pa.array([[], []], pa.list_(pa.int8()))}))
    ingest_source(tmp_path, "hf", path, ragged=["a"])
    assert to_lists(read_as_training(tmp_path / "out", "a")["a"]) == [[], []]


@pytest.mark.parametrize("source", ["csv", "images", "numpy", "idx", "webdataset"])
def test_other_sources_have_no_ragged_columns(tmp_path: Path, source: Any) -> None:
    message = refusal(tmp_path, source, tmp_path / "in", ragged=["a"])
    assert message == f"ragged is ['a'], an option only of jsonl, tfrecord, hf; leave it out for {source!r}."
    with pytest.raises(ConfigError, match=r"with pack the tokens are the only column; leave it out"):
        ingest(
            IngestOptions(
                "jsonl", str(tmp_path / "out"), str(tmp_path / "in"), ragged=["a"], tokenizer="t.json", pack=4
            )
        )


def test_row_bytes_counts_the_bytes_of_lists() -> None:
    table = pa.table(
        {
            "ids": pa.array([[1, 2, 3], [], [4]], pa.large_list(pa.int32())),
            "boxes": pa.array([[], [[1, 2, 3, 4]], [[1, 2, 3, 4]] * 2], pa.large_list(pa.list_(pa.float64(), 4))),
            "grids": pa.array([[], [], [[[1, 2], [3, 4]]]], pa.large_list(pa.list_(pa.list_(pa.int16(), 2), 2))),
            "on": pa.array([[True] * 9, [], [False]], pa.large_list(pa.bool_())),
        }
    )
    assert row_bytes(table).tolist() == [12 + 9, 32, 4 + 64 + 8 + 1]
    assert row_bytes(table.slice(1)).tolist() == [32, 4 + 64 + 8 + 1]


def test_row_groups_of_boxes_and_tokens_are_bounded_in_bytes_and_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several runs and buckets and both parts of a split store each row once, in row groups within the bound."""
    monkeypatch.setattr(shuffle, "RUN_BYTES", 20_000)
    monkeypatch.setattr(shuffle, "BUCKET_BYTES", 30_000)
    monkeypatch.setattr(options, "ROW_GROUP_BYTES", 4000)
    random = np.random.default_rng(0)
    rows = [
        {
            "n": i,
            "ids": random.integers(0, 99, random.integers(0, 40)).tolist(),
            "boxes": random.random((random.integers(0, 9), 4)).tolist(),
        }
        for i in range(400)
    ]
    folder = write_lines(
        tmp_path / "in", {name: rows[low : low + 100] for name, low in zip("abcd", range(0, 400, 100), strict=True)}
    )
    summary = ingest_source(tmp_path, "jsonl", folder, ragged=["ids", "boxes"], eval_fraction=0.3, split_bytes=1)
    assert summary.parts.keys() == {"train", "eval"}
    rows_read: dict[int, dict[str, Any]] = {}
    for part in summary.parts:
        files = sorted((tmp_path / "out" / part).glob("*.parquet"))
        assert part == "eval" or len(files) > 1
        for file in map(pq.ParquetFile, files):
            groups = [file.read_row_group(i) for i in range(file.num_row_groups)]
            assert all(row_bytes(group).sum() <= 4000 for group in groups)
            assert len(groups) > 1
        columns = read_as_training(tmp_path / "out" / part, "n", "ids", "boxes")
        for n, ids, boxes in zip(
            columns["n"].tolist(), to_lists(columns["ids"]), to_lists(columns["boxes"]), strict=True
        ):
            assert n not in rows_read, f"row {n} is stored twice"
            rows_read[n] = {"n": n, "ids": ids, "boxes": boxes}
    assert [rows_read[n] for n in sorted(rows_read)] == rows


def test_a_list_that_begins_with_a_null_list_gives_no_shape() -> None:
    column = pa.array([None, [], [[], [1, 2]], [None, [1, 2]], [[1, 2], [3, 4], [5, 6]]])
    assert first_shape(column) == (3, 2)
    assert first_shape(column[:4]) is None
    assert ragged_shape(pa.array([[[None, [1]]], [[[1, 2]]]])) == (ANY, 1, 2)
