"""`open_dataset` lists the files of a data set, and learns its rows and columns from their footers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ray_app.config.config import Config
from ray_app.data import parquet_files
from ray_app.data.classes import with_classes
from ray_app.data.dataset import Dataset, hash_files, open_dataset, read_labels
from ray_app.data.probes import decode_first_row
from ray_app.errors import BadRowError, DataError
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.plan.manifest import ColumnFacts
from ray_app.retrain.rounds import read_delivery
from ray_app.storage.data_files import file_versions, files_below


def write(file: Path, **columns: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns or {"a": [1, 2, 3]}), file)


def test_hidden_and_unfinished_files_of_spark_are_ignored(tmp_path: Path) -> None:
    for name in ("_day=2/part-0.parquet", "_day=1/part-0.parquet"):
        write(tmp_path / name)
    for name in (
        "_temporary/0/part-1.parquet",
        "_started.parquet",
        ".hidden/part-2.parquet",
        "a/_temporary/part-3.parquet",
    ):
        write(tmp_path / name)
    (tmp_path / "_SUCCESS").touch()
    assert open_dataset(str(tmp_path)).manifest.paths == ("_day=1/part-0.parquet", "_day=2/part-0.parquet")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "_dataset.json is damaged; it must contain JSON"),
        ("[1]", "_dataset.json is damaged, it must contain a mapping, but contains a list"),
        ('{"format_version": 2}', r"_dataset.json has format version 2; .* reads 1. Use the version that wrote it"),
    ],
    ids=["no JSON", "no fields", "newer version"],
)
def test_a_description_that_cannot_be_read_is_refused(tmp_path: Path, content: str, message: str) -> None:
    folder = tmp_path / "data"
    write(folder / "a.parquet")
    (tmp_path / "a.csv").write_text("a\n1\n")
    (folder / "_dataset.json").write_text(content)
    for read in (
        lambda: open_dataset(str(folder)),
        lambda: read_delivery(Config().replace(data__path=str(folder), data__eval_path=str(folder))),
        lambda: ingest(IngestOptions("csv", str(folder), str(tmp_path / "a.csv"))),
    ):
        with pytest.raises(DataError, match=message) as caught:
            read()
        assert "ingest the data again: ray-app ingest --help." in str(caught.value)


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ("_delta_log/00000000000000000000.json", "Delta Lake"),
        (".hoodie/hoodie.properties", "Apache Hudi"),
        ("metadata/00001-abc.metadata.json", "Apache Iceberg"),
        ("inner/_delta_log/00000000000000000000.json", "Delta Lake"),
    ],
)
def test_tables_of_delta_hudi_and_iceberg_are_refused(tmp_path: Path, log: str, kind: str) -> None:
    write(tmp_path / "inner" / "part-0.parquet")
    assert open_dataset(str(tmp_path)).manifest.num_rows == 3
    (tmp_path / log).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / log).touch()
    with pytest.raises(DataError, match=f"is a table of {kind} .*write its rows as plain Parquet"):
        open_dataset(str(tmp_path))


def test_columns_of_half_precision_have_no_known_range(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", half=pa.array(np.array([1, 2], np.float16)), whole=[1, 2])
    columns = open_dataset(str(tmp_path)).facts.columns
    assert (columns["half"].dtype, columns["half"].minimum, columns["half"].maximum) == ("float16", None, None)
    assert (columns["whole"].minimum, columns["whole"].maximum) == (1.0, 2.0)


def test_row_groups_without_numbers_do_not_change_the_range(tmp_path: Path) -> None:
    tokens = [[1, 7]] * 10 + [[]] * 10 + [[250]] * 10
    columns = {"tokens": pa.array(tokens, pa.list_(pa.int32())), "none": pa.array([[]] * 30, pa.list_(pa.int32()))}
    missing = pa.array([3] * 10 + [None] * 10 + [5] * 10)
    pq.write_table(pa.table(columns | {"missing": missing}), tmp_path / "part.parquet", row_group_size=10)
    pq.write_table(pa.table(columns | {"missing": missing}).slice(10, 10), tmp_path / "without.parquet")
    facts = open_dataset(str(tmp_path)).facts.columns
    assert (facts["tokens"].minimum, facts["tokens"].maximum) == (1, 250)
    assert (facts["missing"].minimum, facts["missing"].maximum, facts["missing"].nulls) == (3, 5, 20)
    assert facts["none"].maximum is None


def test_a_missing_column_is_not_a_bad_row(tmp_path: Path) -> None:
    write(tmp_path / "x.parquet", width=[1.0], label=[1])
    dataset = open_dataset(str(tmp_path))
    with pytest.raises(DataError, match=r"no column 'widht', which the task reads .*; its columns are") as caught:
        decode_first_row(dataset, ["label", "widht"], dict)
    assert not isinstance(caught.value, BadRowError)


def write_shards(folder: Path, files: int = 4) -> None:
    for i in range(files):
        numbers = {
            "n": [i, i + 1, i + 5, i],
            "x": [0.5 * i, None, 1.0, 2.0],
            "l": [[i], [i + 2], [], [1]],
            "t": ["a", "b", "c", "d"],
        }
        table = pa.table({**numbers, "b": [True, False, None, True], "h": pa.array(np.arange(4, dtype=np.float16))})
        folder.mkdir(exist_ok=True)
        pq.write_table(table, folder / f"part-{i}.parquet", row_group_size=2)


def store_footers(folder: Path) -> None:
    parquet_files.read_footers(folder, files_below(folder, ".parquet")).put(folder)


def open_and_record_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Dataset]:
    """Returns the files with footers that were read, and the data set."""
    files_read = list[str]()
    tail = parquet_files.read_tail
    with monkeypatch.context() as patched:
        patched.setattr(parquet_files, "read_tail", lambda file: (files_read.append(file.name), tail(file))[1])
        dataset = open_dataset(str(folder))
    return sorted(set(files_read)), replace(dataset, facts=replace(dataset.facts, count=None))


def test_a_data_set_opens_from_stored_footers_with_equal_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path)
    names = [f"part-{i}.parquet" for i in range(4)]
    cold = open_and_record_reads(tmp_path, monkeypatch)
    columns = cold[1].facts.columns
    assert columns["n"] == ColumnFacts("integer", "int64", (), 0.0, 8.0, 0, 4.0)
    assert columns["x"] == ColumnFacts("number", "float64", (), 0.0, 2.0, 4, 1.5)
    assert columns["l"] == ColumnFacts("list", "list<element: int64>", (), 0.0, 5.0)
    assert columns["b"] == ColumnFacts("integer", columns["b"].dtype, (), 0.0, 1.0, 4, 1.5)
    assert (columns["h"].minimum, columns["h"].group_span, columns["h"].nulls) == (None, None, 0)
    store_footers(tmp_path)
    warm = open_and_record_reads(tmp_path, monkeypatch)
    assert (cold[0], warm[0]) == (names, [])
    assert (warm[1].manifest.digest, warm[1].facts) == (cold[1].manifest.digest, cold[1].facts)


def test_the_footer_of_a_changed_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path)
    store_footers(tmp_path)
    file = tmp_path / "part-2.parquet"
    table, before = pq.read_table(file), file.stat()
    pq.write_table(table.set_column(0, "n", pa.array([2, 3, 2, 99])), file, row_group_size=2)
    assert file.stat().st_size == before.st_size, (
        "the sizes differ, so this test would not show that the modification time is compared"
    )
    (tmp_path / "part-1.parquet").unlink()
    pq.write_table(table, tmp_path / "part-9.parquet", row_group_size=1)
    files_read, dataset = open_and_record_reads(tmp_path, monkeypatch)
    assert files_read == ["part-2.parquet", "part-9.parquet"]
    assert dataset.manifest.rows.tolist() == [2, 2, 2, 2, 2, 2, 1, 1, 1, 1]
    assert dataset.facts.columns["n"].maximum == 99.0
    (tmp_path / parquet_files.FOOTERS_FILE).unlink()
    assert open_and_record_reads(tmp_path, monkeypatch)[1].facts == dataset.facts
    store_footers(tmp_path)
    pq.write_table(pa.table({"other": [1]}), file)
    with pytest.raises(DataError, match=r"part-2\.parquet has other columns than .*part-0\.parquet"):
        open_dataset(str(tmp_path))


@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: data[:-400] + bytes(400)]
)
def test_damaged_stored_footers_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[bytes], bytes]
) -> None:
    write_shards(tmp_path)
    cold = open_and_record_reads(tmp_path, monkeypatch)
    store_footers(tmp_path)
    (tmp_path / parquet_files.FOOTERS_FILE).write_bytes(damage((tmp_path / parquet_files.FOOTERS_FILE).read_bytes()))
    files_read, dataset = open_and_record_reads(tmp_path, monkeypatch)
    assert (files_read, dataset.manifest.digest, dataset.facts) == (cold[0], cold[1].manifest.digest, cold[1].facts)


def test_footers_are_released_while_others_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path, 100)
    references = list[weakref.ref[object]]()
    max_alive = 0
    file_facts = parquet_files.file_facts
    lock = threading.Lock()

    def count_alive(footer: pq.FileMetaData, indices: list[int | None]) -> object:
        nonlocal max_alive
        with lock:
            references.append(weakref.ref(footer))
            max_alive = max(max_alive, sum(reference() is not None for reference in references))
        return file_facts(footer, indices)

    monkeypatch.setattr(parquet_files, "file_facts", count_alive)
    assert open_dataset(str(tmp_path)).manifest.num_rows == 400
    assert 1 <= max_alive <= 2 * parquet_files._DISK_THREADS + 2


def write_classes(folder: Path, classes: list[str] | None, **columns: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    pq.write_table(table.cast(with_classes(table.schema, classes)), folder / "part-0.parquet")


def test_several_data_sets_are_one_with_classes_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_classes(tmp_path / "a", ["bee", "ant"], label=[0, 1, 1])
    write_classes(tmp_path / "b" / "train", ["ant", "cat"], label=[0, 1, 1, 0])
    paths = [str(tmp_path / "a"), str(tmp_path / "b" / "train" / "part-0.parquet")]
    dataset = open_dataset(paths)
    assert dataset.root == (paths[0], str(tmp_path / "b" / "train"))
    assert dataset.manifest.paths == ("0/part-0.parquet", "1/part-0.parquet")
    assert dataset.facts.classes == ("bee", "ant", "cat")
    labels, label_of_row = read_labels(dataset.root, dataset.manifest, "label")
    assert [labels[number] for number in label_of_row] == [0, 1, 1, 1, 2, 2, 1]
    assert open_dataset(paths, ["cat", "ant", "bee"]).facts.classes == ("cat", "ant", "bee")
    facts = dataset.facts.columns["label"]
    assert (facts.minimum, facts.maximum, facts.nulls) == (0, 2, 0)
    # The content of a file is the same alone and among others.
    alone = hash_files(dataset.root[0], ["part-0.parquet"]) | hash_files(dataset.root[1], ["part-0.parquet"])
    assert hash_files(dataset.root, dataset.manifest.paths)["1/part-0.parquet"] == alone["part-0.parquet"]
    assert file_versions(dataset.root, dataset.manifest.paths) == [
        *file_versions(dataset.root[0], ["part-0.parquet"]),
        *file_versions(dataset.root[1], ["part-0.parquet"]),
    ]
    delivery = read_delivery(
        Config().replace(data__path=weighted(paths), data__eval_path=paths[0]), tmp_path / "memory"
    )
    assert list(delivery.train) == list(dataset.manifest.paths)
    write_classes(tmp_path / "b" / "train", None, label=[0, 1, 2, 2])
    open_dataset(paths)
    assert "b/train/part-0.parquet has no names of classes, and other data sets have: its labels" in caplog.text


def weighted(paths: list[str]) -> list[dict[str, object]]:
    return [{"path": path, "weight": 1} for path in paths]


def test_data_sets_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    write_classes(tmp_path / "a", ["ant", "bee"], label=[0, 1])
    write_classes(tmp_path / "m", ["ant", "bee"], mask=[b"", b""])
    write_classes(tmp_path / "n", ["bee", "ant"], mask=[b"", b""])
    write_classes(tmp_path / "c", ["ant", "bee"], label=[0, 1], height=[0.5, 1.0])
    for names, message in {
        "mn": r"n/part-0.parquet has the classes bee, ant; the data set has ant, bee \(another file\)",
        "ac": r"c has other columns than \S+a: 'height' is missing in the others. Data sets that are used together",
        "aa": r"a is \S+a or in it, so its rows would count twice",
    }.items():
        with pytest.raises(DataError, match=message):
            open_dataset([str(tmp_path / name) for name in names])
    write_classes(tmp_path / "b", ["ant", "bee"], label=[0, 1])
    for name in "ab":
        (tmp_path / name / "_tokenizer.json").write_text(name)
    with pytest.raises(DataError, match="have texts of different tokenizers"):
        open_dataset([str(tmp_path / name) for name in "ab"])
