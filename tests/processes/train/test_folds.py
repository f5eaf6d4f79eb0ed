"""Runs on folds end as runs on copies of the rows that scikit-learn chooses, bit for bit, on any number of workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.model_selection import GroupKFold, KFold, TimeSeriesSplit

from ray_app.config.config import Config
from ray_app.data.folds import fold_configs
from ray_app.models.inputs import open_evaluation_rows
from ray_app.runlog.evaluations import read_evaluations
from ray_app.runlog.paths import RunPaths
from ray_app.testing import WorkerPool, read_trained_run
from ray_app.testing import make_job as prepare_job
from ray_app.train.job import Job
from tests.support.local_world import make_job, write_images
from tests.support.quick_cases import only_quick

ROWS = 103
FIELDS = ("fold", "folds", "fold_by", "fold_by_class", "fold_by_time")
SPLITTERS: dict[str, tuple[Any, Any]] = {
    "KFold": (5, KFold(5)),
    "GroupKFold": ({"by": "patient"}, GroupKFold(5)),
    "TimeSeriesSplit": ({"by_time": "day"}, TimeSeriesSplit(5)),
}


def make_fold_job(folder: Path, data: Path, evaluation: Path | None, config: Config = Config()) -> Job:
    """Returns the job of a run with the fold of a configuration, or with data to evaluate on."""
    fields = {f"data__{name}": getattr(config.data, name) for name in FIELDS}
    path = str(evaluation) if evaluation is not None else None
    job = make_job(folder, data, logical_workers=3, evaluate__where="workers", data__eval_path=path, **fields)
    return replace(job, eval_source=open_evaluation_rows(job.task, job.config))


def train(pool: WorkerPool, job: Job, workers: int) -> tuple[Any, dict[str, float]]:
    """Trains; returns the digests of the parameters, and the last evaluation."""
    pool.train_to_end(job, workers)
    return read_trained_run(job).digests, read_evaluations(RunPaths(Path(job.run_root)))[-1].metrics


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    file = write_images(tmp_path_factory.mktemp("images") / "one", [[ROWS]]) / "part-0.parquet"
    patients = pa.array(np.random.default_rng(1).integers(0, 12, ROWS))
    return pq.read_table(file).append_column("patient", patients).append_column("day", pa.array(range(ROWS)))


def write(table: pa.Table, folder: Path) -> Path:
    """Writes rows as one row group, since the order of row groups follows from the names of all files."""
    folder.mkdir()
    pq.write_table(table, folder / "part-0.parquet")
    return folder


@pytest.mark.parametrize("name", only_quick(SPLITTERS, "KFold"))
def test_a_cross_validation_is_that_of_scikit_learn_bit_for_bit(
    worker_pool: WorkerPool, table: pa.Table, tmp_path: Path, name: str
) -> None:
    folds, splitter = SPLITTERS[name]
    data = write(table, tmp_path / "data")
    ours, expected = [], []
    groups = {"groups": table["patient"].to_numpy()} if name == "GroupKFold" else {}
    splits = splitter.split(np.arange(ROWS), **groups)
    for fold, (config, rows) in enumerate(zip(fold_configs(Config(), folds), splits, strict=True)):
        training, evaluation = (write(table.take(part), tmp_path / f"{i}-{fold}") for i, part in enumerate(rows))
        ours.append(train(worker_pool, make_fold_job(tmp_path / f"fold-{fold}", data, None, config), 1 + fold % 3))
        expected.append(train(worker_pool, make_fold_job(tmp_path / f"copy-{fold}", training, evaluation), 1))
    assert ours == expected
    scores = [[metrics["accuracy"] for _, metrics in runs] for runs in (ours, expected)]
    assert np.mean(scores[0]) == np.mean(scores[1])
    assert np.std(scores[0]) == np.std(scores[1]) > 0


def test_a_fold_of_several_files_is_trained_on_alike_by_any_number_of_workers(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    config = Config().replace(
        task__class_path="ray_app.task.image.ImageClassification",
        task__init_args={"model_args": {"channels": 4}},
        scaling__max_workers=3,
        evaluate__where="workers",
        data__path=str(write_images(tmp_path / "files", [[40, 1, 13], [], [29, 0], [20]])),
        data__global_batch_size=12,
        data__shuffle_window_rows=7,
    )
    [_, _, config, _] = fold_configs(config, {"folds": 4, "by_class": "label"})
    runs = [train(worker_pool, prepare_job(config, tmp_path / f"run-{n}"), n) for n in (1, 2, 3)]
    assert runs[0] == runs[1] == runs[2]
