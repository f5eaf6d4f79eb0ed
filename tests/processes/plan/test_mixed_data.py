"""Ingested folders in different places train in a ratio, with classes by name, and may move before a resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from ray_app.config.config import Config
from ray_app.driver.finalize import stored_job
from ray_app.driver.parsing import load_config
from ray_app.errors import DataError, RunExistsError
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.preflight.prepare import claim, prepare
from ray_app.runlog.paths import RunPaths
from ray_app.testing import WorkerPool, cache_windows, stream_windows
from tests.support.local_world import disk_cached

CONFIG = """
task: {class_path: ray_app.task.tabular.TabularClassification, init_args: {features: [height], hidden: [8]}}
run: {storage_path: FOLDER/runs, name: mixed}
data:
  path: [{path: FOLDER/own, weight: 3}, {path: FOLDER/elsewhere/public, weight: 1}]
  eval_path: FOLDER/own
  global_batch_size: 8
  shuffle_window_rows: 16
scaling: {max_workers: 2}
tracking: {enabled: false}
"""


def write_data(folder: Path, name: str, classes: list[str], rows: int) -> None:
    lines = ["height,label", *(f"{i + len(name)},{classes[i % len(classes)]}" for i in range(rows))]
    (folder / "rows.csv").write_text("\n".join(lines))
    ingest(IngestOptions("csv", str(folder / name), str(folder / "rows.csv"), label="label"))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "elsewhere").mkdir()
    write_data(tmp_path, "own", ["ant", "bee"], 60)
    write_data(tmp_path, "elsewhere/public", ["bee", "cat", "ant"], 15)
    (tmp_path / "mixed.yaml").write_text(CONFIG.replace("FOLDER", str(tmp_path)))
    return load_config(tmp_path / "mixed.yaml")


def test_ingested_folders_train_in_a_ratio(worker_pool: WorkerPool, config: Config, tmp_path: Path) -> None:
    job = claim(prepare(config), 1).job
    first, second = config.data.sources
    assert job.plan.describe_uses(config.data.sources) == (
        f"weighted: a pass over the data uses 80 rows: 60 of {first} (1 per row), 20 of {second} (1.33 per row)"
    )
    assert job.task.data_schema["classes"] == ["ant", "bee", "cat"]
    # A standardization is that of all rows, each counted once.
    assert job.task.fitted["mean"] == [np.median([*range(3, 63), *range(16, 31)])]
    alone = worker_pool.train_new_run(job, 1, cache_windows)
    cached = config.replace(run__name="cached", data__cache="disk", data__cache_dir=str(tmp_path / "cache"))
    for windows, variant in ((stream_windows, config), (disk_cached, cached)):
        other = claim(prepare(variant.replace(run__name=windows.__name__)), 1).job
        assert worker_pool.train_new_run(other, 2, windows).digests == alone.digests


def test_folders_may_move_and_weights_may_not_change(config: Config, tmp_path: Path) -> None:
    claim(prepare(config), 1)
    moved = {"path": str(tmp_path / "moved"), "weight": 3}
    shutil.move(tmp_path / "own", moved["path"])
    public = {"path": str(tmp_path / "elsewhere" / "public"), "weight": 1}
    config = config.replace(data__eval_path=moved["path"])
    assert prepare(config.replace(data__path=[moved, public])).resumes
    assert stored_job(RunPaths(tmp_path / "runs" / "mixed")).plan.rows_per_epoch == 80
    with pytest.raises(RunExistsError, match=r"(?s)- data.weights: \[3, 1\].*\+ data.weights: \[1, 1\]"):
        prepare(config.replace(data__path=[moved | {"weight": 1}, public]))


def test_folds_divide_the_rows_of_all_data_sets(config: Config) -> None:
    config = config.replace(data__eval_path=None)
    job = prepare(config.replace(data__fold=0, data__folds=3)).job
    assert job.eval_source is not None
    assert [job.plan.manifest.num_rows, job.eval_source.manifest.num_rows] == [50, 25]
    # The last of five folds has all rows of the second data set.
    with pytest.raises(DataError, match=r"Data set 1 of data.path has no row to train on \(data.fold\)"):
        prepare(config.replace(data__fold=4))
