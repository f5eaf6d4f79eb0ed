"""Notebooks, exports, the registry and predictions select the checkpoint of a run by one rule."""

from __future__ import annotations

import io
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import ray_app
from ray_app import load_config
from ray_app.checkpoint.format import Snapshot, pack, params_digest
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.config.config import Config
from ray_app.driver.model_export import ExportOptions, export_run, try_to_register
from ray_app.driver.result import Result
from ray_app.driver.trained_run import best_commit, load_trained_job
from ray_app.errors import CheckpointError, ConfigError, DataError
from ray_app.predict.predict import model_of_run
from ray_app.preflight.prepare import claim, prepare
from ray_app.runlog.evaluations import Evaluation, put_evaluation
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.stored_config import read_config
from ray_app.storage.files import put_json
from ray_app.train.job import Job
from tests.support.checkpoints import commit_of
from tests.support.jobs import digits_config
from tests.support.paths import ROOT


@pytest.fixture
def job(digits: Path, tmp_path: Path) -> Job:
    """Returns a run with checkpoints of steps 10, 20 and 30; step 20 is the best of the two that are evaluated."""
    config = digits_config(digits, tmp_path / "runs", run__name="run", data__eval_path=None)
    run_job = write_checkpoints(config, 10, 20, 30)
    evaluate(run_job, 10, 0.5)
    evaluate(run_job, 20, 0.7)
    put_json(
        run_job.paths.summary,
        {"status": "finished", "steps": 30, "best": {"step": 20, "metric": "accuracy", "value": 0.7}},
    )
    return run_job


def write_checkpoints(config: Config, *steps: int) -> Job:
    """Returns a run with checkpoints that are written without training."""
    job = claim(prepare(config), 1).job
    for step in steps:
        state = {
            name: values + step if values.is_floating_point() else values
            for name, values in job.task.build_model().state_dict().items()
        }
        digests = {"params_digest": params_digest(state), "manifest_digest": job.plan.manifest.digest}
        CheckpointStore(job.paths).write(pack(Snapshot(step, state, {}, None)), replace(commit_of(step), **digests))
    return job


def evaluate(job: Job, step: int, accuracy: float) -> None:
    [commit] = [c for c in CheckpointStore(job.paths).commits() if c.step == step]
    put_evaluation(job.paths, Evaluation(step, 0, commit.params_digest, {"accuracy": accuracy}, 10, 0.1, 0.0))


def result_of(job: Job) -> Result:
    return Result(
        job.paths.root,
        {"status": "finished", "steps": 30, "best": {"step": 20, "metric": "accuracy", "value": 0.7}},
        job.task,
    )


def step_of(job: Job, model: nn.Module) -> int:
    digest = params_digest(model.state_dict())
    return next(c.step for c in CheckpointStore(job.paths).commits() if c.params_digest == digest)


def best_steps(job: Job, folder: Path) -> set[int]:
    """Returns the steps of the best checkpoint by each way to use it; all are equal if the set has one element."""
    result = result_of(job)
    best = result.best_checkpoint
    assert best is not None
    exported = export_run(ExportOptions(str(job.paths.root), str(folder), overwrite=True))["step"]
    predicting = model_of_run(job.config, str(job.paths.root))[1]["step"]
    registered = best_commit(job)[0].step
    return {step_of(job, result.load_model()), int(best.name.split("-")[1]), exported, predicting, registered}


@pytest.mark.parametrize(
    ("name", "step"), [("best", 20), ("newest", 30), ("step-10", 10), ("step-20", 20), ("step-00000010-0001", 10)]
)
def test_a_notebook_loads_the_checkpoint_that_it_names(job: Job, name: str, step: int) -> None:
    model = result_of(job).load_model(name)
    assert step_of(job, model) == step
    assert not model.training


@pytest.mark.parametrize("name", ["foo", "step-999", "step-10-7", "last", ""])
def test_an_unknown_checkpoint_name_is_refused_with_the_existing_names(job: Job, tmp_path: Path, name: str) -> None:
    expected = r"best, newest or one of step-00000010-0001, step-00000020-0001, step-00000030-0001"
    with pytest.raises(ConfigError, match=expected):
        result_of(job).load_model(name)
    with pytest.raises(ConfigError, match=expected):
        result_of(job).export(str(tmp_path / "out"), name)


@pytest.mark.rest
def test_each_way_uses_the_same_best_checkpoint_after_late_evaluations_and_removals(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert best_steps(job, tmp_path / "out") == {20}
    # This evaluation comes after summary.json was written.
    evaluate(job, 30, 0.9)
    assert best_steps(job, tmp_path / "out") == {30}
    assert "is missing" not in caplog.text
    shutil.rmtree(job.paths.checkpoint(30, 1))
    with caplog.at_level(logging.WARNING):
        assert best_steps(job, tmp_path / "out") == {20}
    assert caplog.text.count("The best checkpoint, of step 30, is missing") == 5


def test_evaluations_of_other_data_are_not_compared(job: Job) -> None:
    [newest] = [c for c in CheckpointStore(job.paths).commits() if c.step == 30]
    put_evaluation(
        job.paths, Evaluation(30, 0, newest.params_digest, {"accuracy": 0.6}, 10, 0.1, time_s=1.0, data_digest="other")
    )
    assert best_commit(job)[0].step == 30


def test_a_run_is_exported_from_any_folder_and_without_its_data(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(digits / "train", tmp_path / "train")
    fields: dict[str, Any] = {"data__path": "train", "data__eval_path": "train", "run__storage_path": "runs"}
    config = load_config(ROOT / "conf" / "digits.yaml").replace(run__name="run", **fields)
    monkeypatch.chdir(tmp_path)
    run_job = write_checkpoints(config, 10)
    stored = read_config(run_job.paths)
    assert (stored.data.path, stored.data.eval_path) == (str(tmp_path / "train"), str(tmp_path / "train"))
    assert stored.run.storage_path == str(tmp_path / "runs")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "train")
    moved = RunPaths(tmp_path / "elsewhere" / "moved")
    shutil.move(run_job.paths.root, moved.root)
    assert export_run(ExportOptions("moved", "model"))["step"] == 10
    assert ray_app.load_model("model").predict(np.zeros((3, 1, 8, 8), np.uint8), scores=True).shape == (3, 10)
    assert vars(load_trained_job(moved).task) == vars(run_job.task)
    # A task with settings that JSON does not keep is made again from the data.
    put_json(moved.task, None)
    with pytest.raises(DataError, match="does not exist"):
        export_run(ExportOptions("moved", "other"))
    shutil.copytree(digits / "eval", tmp_path / "train")
    with pytest.raises(DataError, match="has changed since training"):
        export_run(ExportOptions("moved", "other"))


def test_parameters_are_exported_in_files_of_limited_size(job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    description = export_run(ExportOptions(str(job.paths.root), str(folder), "newest", max_file_gb=1e-6))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = sorted(set(index["weight_map"].values()))
    assert len(names) > 1
    parameters = {name: value for file in names for name, value in load_file(folder / file).items()}
    assert params_digest(parameters) == description["params_digest"]
    assert set(description["files"]) == {*names, "model.safetensors.index.json"}
    assert all(name in load_file(folder / file) for name, file in index["weight_map"].items())


def test_loading_the_model_of_a_run_without_checkpoints_is_an_error(job: Job) -> None:
    shutil.rmtree(job.paths.checkpoints)
    assert result_of(job).best_checkpoint is None
    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        result_of(job).load_model()


def test_parameters_that_differ_from_the_committed_digest_are_refused(job: Job) -> None:
    state = {name: torch.zeros_like(values) for name, values in job.task.build_model().state_dict().items()}
    CheckpointStore(job.paths).write(
        pack(Snapshot(40, state, {}, None)), replace(commit_of(40), params_digest="0" * 64)
    )
    with pytest.raises(CheckpointError, match="other parameters than its commit recorded"):
        result_of(job).load_model("newest")


@pytest.mark.rest
@pytest.mark.parametrize("eval_data", [False, True])
def test_a_run_that_skips_bad_rows_is_exported_although_its_first_row_is_bad(tmp_path: Path, eval_data: bool) -> None:
    pictures = [io.BytesIO() for _ in range(8)]
    for shade, picture in enumerate(pictures):
        Image.new("RGB", (8, 8), (shade, 0, 0)).save(picture, "png")
    files = [picture.getvalue() for picture in pictures]
    for name, column in (("train", [b"no image", *files[1:]]), ("eval", files)):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"image": column, "label": [0, 1] * 4}), tmp_path / name / "part-0.parquet")
    config = Config().replace(
        task={
            "class_path": "ray_app.task.image.ImageClassification",
            "init_args": {"size": 8, "model_args": {"channels": 4}},
        },
        run__storage_path=str(tmp_path / "runs"),
        run__name="run",
        scaling__max_workers=1,
        data__path=str(tmp_path / "train"),
        data__eval_path=str(tmp_path / "eval") if eval_data else None,
        data__global_batch_size=4,
        data__on_bad_row="skip",
    )
    run_job = write_checkpoints(config, 10)
    exported = export_run(ExportOptions(str(run_job.paths.root), str(tmp_path / "out")))
    assert (exported["step"], exported["format"]) == (10, "torch.export")


def test_unreachable_storage_at_registration_does_not_fail_the_run(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(store: CheckpointStore) -> list[Commit]:
        raise OSError("503 Slow Down")

    monkeypatch.setattr(CheckpointStore, "commits", refuse)
    registering = replace(job, config=job.config.replace(tracking__registered_model="surface"))
    assert try_to_register(registering) is None
    assert "The run itself is complete" in caplog.text
