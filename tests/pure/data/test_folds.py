"""Folds have the rows of scikit-learn's, in every way of reading, and halves are the same under any name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.model_selection import GroupKFold, KFold, StratifiedKFold, TimeSeriesSplit

from ray_app.config.checks import check_config
from ray_app.config.config import Config
from ray_app.data.arrays import ArraySpec
from ray_app.data.dataset import Dataset
from ray_app.data.folds import fold_configs, open_evaluation_data, open_training_data
from ray_app.data.reader import Reader, RowSource, fetch_in_process, fetch_in_threads, load_all
from ray_app.errors import BadRowError, DataError
from ray_app.plan.manifest import Manifest

FILES = [[40, 1, 13], [], [29, 0], [20]]
"""The rows of each row group of each file."""
ROWS = 103
FOLDS: dict[str, tuple[Any, Any]] = {
    "rows": (5, KFold(5)),
    "patient": ({"folds": 4, "by": "patient"}, GroupKFold(4)),
    "label": ({"folds": 3, "by_class": "label"}, StratifiedKFold(3)),
    "day": ({"by_time": "day"}, TimeSeriesSplit(5)),
    "date": ({"folds": 7, "by_time": "date"}, TimeSeriesSplit(7)),
}


def make_columns() -> dict[str, Any]:
    """Returns the columns of the rows; several patients have equally many, and one class is rare."""
    random = np.random.default_rng(3)
    label = random.choice(["cat", "ant", "bee"], ROWS, p=[0.6, 0.35, 0.05])
    days = np.arange(ROWS)
    return {
        "id": np.arange(ROWS),
        "patient": random.permutation(np.arange(ROWS) % 17),
        "label": label,
        "day": days,
        "date": (np.datetime64("2026-01-01") + days).astype(str),
        "week": days // 10,
        "target": random.normal(size=ROWS),
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    table, done = pa.table(make_columns()), 0
    for i, groups in enumerate(FILES):
        with pq.ParquetWriter(folder / f"part-{i}.parquet", table.schema) as writer:
            for count in groups:
                writer.write_table(table.slice(done, count))
                done += count
    return folder


def make_config(data: Path, **fields: Any) -> Config:
    return Config().replace(task__class_path="any", data__path=str(data), **fields)


def decode(rows: dict[str, Any]) -> dict[str, Any]:
    return {"id": rows["id"]}


def make_source(dataset: Dataset, task_rows: int) -> RowSource:
    reader = Reader(dataset.root, ["id"], decode, {"id": ArraySpec("<i8", ())}, rules=dataset.manifest.rules)
    return RowSource(reader, dataset.manifest, task_rows)


def read_ids(dataset: Dataset) -> list[int]:
    assert dataset.facts.read is not None
    return [int(row) for rows in dataset.facts.read(["id"]) for row in rows["id"]]


@pytest.mark.parametrize("name", FOLDS)
def test_folds_have_the_rows_of_scikit_learn(data: Path, name: str) -> None:
    folds, splitter = FOLDS[name]
    columns = make_columns()
    configs = fold_configs(make_config(data, data__eval_path="elsewhere"), folds)
    expected = list(splitter.split(columns["id"], columns["label"], columns["patient"] if name == "patient" else None))
    assert len(configs) == len(expected)
    evaluated = []
    for config, (training, evaluation) in zip(configs, expected, strict=True):
        check_config(config)
        assert read_ids(open_training_data(config)) == training.tolist()
        evaluated += (ids := read_ids(open_evaluation_data(config)))
        assert ids == evaluation.tolist()
    if not isinstance(splitter, TimeSeriesSplit):
        assert sorted(evaluated) == list(range(ROWS)), "every row is evaluated on once"


@pytest.mark.parametrize("seed", range(30))
def test_random_groups_and_classes_are_divided_as_by_scikit_learn(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, folds = int(random.integers(30, 200)), int(random.integers(2, 7))
    values = random.integers(0, random.integers(folds, 20), rows)
    values[:folds] = np.arange(folds)
    pq.write_table(pa.table({"id": np.arange(rows), "value": values}), tmp_path / "part.parquet", row_group_size=50)
    splits = {"by": GroupKFold(folds).split(values, groups=values)}
    if np.bincount(values)[values].min() >= folds:
        splits["by_class"] = StratifiedKFold(folds).split(values, values)
    for rule, rows_of_folds in splits.items():
        configs = fold_configs(make_config(tmp_path), {"folds": folds, rule: "value"})
        for config, (_, evaluation) in zip(configs, rows_of_folds, strict=True):
            assert read_ids(open_evaluation_data(config)) == evaluation.tolist()


def test_rows_of_one_time_stay_together_and_after_those_trained_on(data: Path) -> None:
    weeks = make_columns()["week"]
    evaluated = []
    for config in fold_configs(make_config(data), {"folds": 4, "by_time": "week"}):
        training, evaluation = (
            weeks[read_ids(open_data(config))] for open_data in (open_training_data, open_evaluation_data)
        )
        assert training.max() < evaluation.min()
        evaluated += evaluation.tolist()
    assert evaluated == weeks[weeks >= 2].tolist()


@pytest.mark.parametrize("task_rows", [1000, 5])
def test_a_fold_is_the_same_in_every_way_of_reading(data: Path, task_rows: int) -> None:
    config = fold_configs(make_config(data), {"folds": 4, "by": "patient"})[1]
    dataset = open_training_data(config)
    expected = read_ids(dataset)
    source = make_source(dataset, task_rows)
    for fetch in fetch_in_process, lambda reader, specs: fetch_in_threads(reader, specs, 2):
        assert load_all(fetch, source).arrays["id"].tolist() == expected
    thinned = RowSource(source.reader, dataset.manifest.thin_out(20), task_rows)
    ids = load_all(fetch_in_process, thinned).arrays["id"].tolist()
    assert len(ids) == 20
    assert set(ids) < set(expected)
    counts = dataset.facts.count
    assert counts is not None
    assert sum(counts("patient").values()) == dataset.facts.num_rows == len(expected)


def test_a_large_row_group_is_read_in_slices(tmp_path: Path) -> None:
    ids = np.arange(5000)
    pq.write_table(pa.table({"id": ids, "group": ids**2 % 11}), tmp_path / "part.parquet")
    dataset = open_evaluation_data(fold_configs(make_config(tmp_path), {"folds": 3, "by": "group"})[1])
    expected = read_ids(dataset)
    assert len(expected) > 1000
    assert load_all(fetch_in_process, make_source(dataset, 100)).arrays["id"].tolist() == expected


def test_messages_name_rows_by_their_place_in_the_file(data: Path) -> None:
    dataset = open_evaluation_data(fold_configs(make_config(data), {"folds": 4, "by": "patient"})[1])
    expected = read_ids(dataset)
    locations = [
        (f"part-{i}.parquet", group, row)
        for i, groups in enumerate(FILES)
        for group, rows in enumerate(groups)
        for row in range(rows)
    ]
    assert [dataset.manifest.locate(position) for position in range(len(expected))] == [locations[i] for i in expected]

    def refuse(rows: dict[str, Any]) -> dict[str, Any]:
        if expected[7] in rows["id"]:
            raise ValueError("no")
        return decode(rows)

    source = make_source(dataset, 1000)
    reader = Reader(dataset.root, ["id"], refuse, source.fields, rules=dataset.manifest.rules)
    with pytest.raises(BadRowError) as error:
        load_all(fetch_in_process, RowSource(reader, dataset.manifest, 1000))
    path, group, row = locations[expected[7]]
    assert f"{path}, row group {group}, row {row}" in str(error.value)


def test_a_stored_manifest_knows_which_rows_it_has(data: Path) -> None:
    manifests = [
        open_training_data(config).manifest
        for folds in (5, {"by": "patient"})
        for config in fold_configs(make_config(data), folds)
    ]
    assert len({manifest.digest for manifest in manifests}) == 10
    for manifest in manifests:
        assert Manifest.from_json(manifest.to_json()).digest == manifest.digest
    with pytest.raises(DataError, match="its digest does not match its files"):
        Manifest.from_json(manifests[0].to_json().replace(manifests[0].selection, manifests[1].selection))


def test_ranges_of_rows_need_bits_for_the_row_groups_at_their_ends_only(data: Path) -> None:
    manifest = open_evaluation_data(fold_configs(make_config(data), 5)[0]).manifest
    assert manifest.rows.tolist() == [21, 0, 0, 0, 0, 0]
    assert sorted((len(bits) for bits in manifest.kept.values()), reverse=True) == [3, 0, 0, 0, 0]


def test_the_halves_of_the_same_files_are_the_same_under_any_name(data: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(data, tmp_path / "copy")
    (copy / "part-3.parquet").rename(copy / "part-4.parquet")
    halves = []
    for folder in data, copy:
        configs = [
            make_config(folder, data__eval_path=str(folder), evaluate__half=half) for half in ("selection", "report")
        ]
        halves.append([read_ids(open_evaluation_data(config)) for config in configs])
    assert halves[0] == halves[1]
    selection, report = halves[0]
    assert sorted(selection + report) == list(range(ROWS))
    assert 30 < len(selection) < 70
    config = fold_configs(make_config(data, evaluate__half="report"), {"folds": 4, "by": "patient"})[2]
    fold = read_ids(open_evaluation_data(config.replace(evaluate__half=None)))
    assert read_ids(open_evaluation_data(config)) == [row for row in fold if row in report]


def test_folds_that_cannot_be_made_are_refused(data: Path, tmp_path: Path) -> None:
    config = make_config(data, data__fold=0)
    for fields, message in {
        (("data__folds", 200), ("data__fold", 150)): "Fold 150 of 200 .* has 103 rows to train on and 0 to evaluate on",
        (("data__folds", 20), ("data__fold", 19), ("data__fold_by", "patient")): "or of different values of 'patient'",
        (("data__folds", 40), ("data__fold", 38), ("data__fold_by_time", "week")): "Lower data.folds",
        (("data__fold_by", "target"),): "classes must be integers or text",
        (("data__fold_by_time", "label"),): "data.fold_by_time 'label' of part-0.parquet is a column of string",
        (("data__fold_by_time", "hour"),): "has no column 'hour'; its columns are date, day",
    }.items():
        with pytest.raises(DataError, match=message):
            open_evaluation_data(config.replace(**dict(fields)))
    pq.write_table(pa.table({"day": pa.array([1.0, None, float("nan"), 4])}), tmp_path / "part.parquet")
    with pytest.raises(DataError, match="has 2 rows without a 'day'"):
        open_training_data(make_config(tmp_path, data__fold=0, data__fold_by_time="day"))
