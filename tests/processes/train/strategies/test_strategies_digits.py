"""All strategies learn the digits, although a worker is killed and the run resumes on more workers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ray_app.checkpoint.format import unpack
from ray_app.checkpoint.store import CheckpointStore
from ray_app.data.reader import fetch_in_process, load_all
from ray_app.drill.faults import HookChain
from ray_app.driver.single import train_in_process
from ray_app.models.inputs import open_rows
from ray_app.runlog.journal import read_events
from ray_app.task.image import ImageClassification
from ray_app.task.metrics import combine, score
from ray_app.testing import DieAfter, KilledError, WorkerPool, cache_windows
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import SingleProcessMembership
from tests.support.local_world import CPU, make_job
from tests.support.server_world import ServerWorld
from tests.support.shifting_world import KillOnce, train_shifting

Fields = dict[str, Any]
OVERLAPPED = {"train__reduction": "overlapped", "train__bucket_mb": 0.02}


@pytest.mark.parametrize(
    "fields",
    [{"train__strategy": "fsdp"}, {"train__strategy": "central_storage"}, OVERLAPPED],
    ids=["fsdp", "central_storage", "overlapped"],
)
@pytest.mark.rest
def test_a_strategy_learns_the_digits_after_a_kill_and_a_resume(
    worker_pool: WorkerPool, digits: Path, tmp_path: Path, fields: Fields
) -> None:
    job = digits_job(tmp_path, digits, fields)
    kill = KillOnce(tmp_path / "killed", step=60, rank=0)
    stop = DieAfter(160)
    train_shifting(worker_pool, job, [[0, 1], [1]], [], Hooks(after_step=HookChain((kill, stop))))
    assert kill.proof.exists()
    assert CheckpointStore(job.paths).commits()[-1].step == 6 * job.plan.steps_per_epoch == 138
    worker_pool.train_to_end(job, 3, cache_windows)
    assert accuracy_of(job, digits) >= 0.97


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.rest
def test_parameter_servers_learn_the_digits_after_a_kill_and_a_resume(
    digits: Path, tmp_path: Path, staleness: int
) -> None:
    fields = {"train__strategy": "parameter_server", "train__servers": 2, "train__staleness": staleness}
    world = ServerWorld(digits_job(tmp_path, digits, fields), 2)
    world.run_until(60)
    world.kill("0")
    world.run_until(160)
    world.close()
    job = dataclasses.replace(digits_job(tmp_path, digits, fields | {"train__servers": 1}), fence=2)
    ServerWorld(job, 3).run()
    assert [e.details["step"] for e in read_events(job.paths, "resumed")] == [138]
    assert accuracy_of(job, digits) >= 0.97


@pytest.mark.rest
def test_the_strategy_single_learns_the_digits_after_a_kill(digits: Path, tmp_path: Path) -> None:
    job = digits_job(tmp_path, digits, {"train__strategy": "single"})
    with pytest.raises(KilledError):
        train_in_process(job, SingleProcessMembership(4, lambda: False), Hooks(after_step=DieAfter(160)))
    train_in_process(job, SingleProcessMembership(4, lambda: False), Hooks())
    assert [e.details["step"] for e in read_events(job.paths, "resumed")] == [138]
    assert accuracy_of(job, digits) >= 0.97


def digits_job(tmp_path: Path, digits: Path, fields: Fields) -> Job:
    return make_job(
        tmp_path / "run",
        digits / "train",
        logical_workers=4,
        batch=64,
        task=ImageClassification(model="small_cnn", pixel_max=16, crop_padding=1),
        optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.003, "weight_decay": 0.0001}},
        schedule={"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": 0.01}},
        train__epochs=12,
        checkpoint__every_epochs=2,
        **fields,
    )


def accuracy_of(job: Job, digits: Path) -> float:
    """Returns the accuracy of the last checkpoint on held-out images."""
    store = CheckpointStore(job.paths)
    commit = store.commits()[-1]
    assert commit.step == job.total_steps
    model = job.task.build_model()
    model.load_state_dict(unpack(store.load(commit)).model)
    source = open_rows(job.task, str(digits / "eval"))
    return combine(job.task, score(job.task, model, load_all(fetch_in_process, source).arrays, 256, CPU)).values[
        "accuracy"
    ]
