"""Training on simulated devices (`tests/device`) is bit-identical for every number of workers, and orders all its work.

The devices compute with the kernels of the CPU, so a run without random numbers has the digest of the CPU, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ray_app.drill.faults import HookChain
from ray_app.runlog.journal import read_events
from ray_app.task.image import ImageClassification
from ray_app.testing import (
    DieAfter,
    KilledError,
    WorkerPool,
    cache_windows,
    read_trained_run,
    stream_windows,
)
from ray_app.train.job import Hooks, Job
from tests.device.training import check_races, device_run, train_on_devices
from tests.support.bit_identity import assert_bit_identical
from tests.support.local_world import make_job
from tests.support.shifting_world import KillOnce


def digits_job(folder: Path, digits: Path, dropout: float = 0.0, **fields: Any) -> Job:
    """Returns `conf/digits.yaml` with two epochs."""
    return make_job(
        folder,
        digits / "train",
        logical_workers=4,
        batch=64,
        task=ImageClassification(model="small_cnn", pixel_max=16, crop_padding=1, model_args={"dropout": dropout}),
        optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.003, "weight_decay": 0.0001}},
        schedule={"class_path": "torch.optim.lr_scheduler.OneCycleLR", "init_args": {"max_lr": 0.01}},
        **{"train__epochs": 2, "checkpoint__every_epochs": 1, **fields},
    )


@pytest.mark.parametrize("reduction", ["exact", pytest.param("overlapped", marks=pytest.mark.rest)])
def test_the_digits_have_the_digest_of_the_cpu_on_any_number_of_devices(
    worker_pool: WorkerPool, device_pool: WorkerPool, digits: Path, tmp_path: Path, reduction: str
) -> None:
    job = digits_job(tmp_path / "run", digits, train__reduction=reduction, train__epochs=1)
    expected = worker_pool.train_new_run(job, 1, cache_windows)
    for workers in (1, 2, 4):
        run = device_run(device_pool, job, workers)
        if reduction == "exact" or workers == 1:
            assert_bit_identical(run, expected)
        assert run.commit.environment["device"] == "sim simulated"


@pytest.mark.rest
def test_dropout_and_streamed_rows_do_not_depend_on_the_number_of_devices(
    device_pool: WorkerPool, digits: Path, tmp_path: Path
) -> None:
    job = digits_job(tmp_path / "run", digits, dropout=0.3, train__epochs=1)
    runs = [device_run(device_pool, job, workers, windows) for workers, windows in WORKERS_AND_WINDOWS]
    assert [run.digests for run in runs] == [runs[0].digests] * len(WORKERS_AND_WINDOWS)


WORKERS_AND_WINDOWS = [(1, cache_windows), (2, stream_windows), (4, stream_windows)]


@pytest.mark.rest
def test_a_killed_worker_and_a_resume_leave_the_digest(device_pool: WorkerPool, digits: Path, tmp_path: Path) -> None:
    """The killed worker is rank 0 of three; the run then stops after its first checkpoint, and goes on with two."""
    job = digits_job(tmp_path / "run", digits, dropout=0.3)
    expected = device_run(device_pool, job, 1)
    kill = KillOnce(tmp_path / "killed", step=9, rank=0)
    hooks = Hooks(after_step=HookChain((kill, DieAfter(30))))
    outcomes = train_on_devices(device_pool, job, [[0, 1, 2], [1, 2]], hooks=hooks)
    assert kill.proof.exists()
    assert all(isinstance(outcome.error, KilledError) for outcome in outcomes), [o.trace for o in outcomes]
    check_races(train_on_devices(device_pool, job, [[0, 1]]))
    assert [event.details["step"] for event in read_events(job.paths, "resumed")] == [23]
    assert read_trained_run(job).digests == expected.digests


@pytest.mark.rest
def test_a_joining_worker_gets_the_state_of_a_device(device_pool: WorkerPool, digits: Path, tmp_path: Path) -> None:
    job = digits_job(tmp_path / "run", digits, dropout=0.3, train__epochs=1)
    expected = device_run(device_pool, job, 1)
    check_races(train_on_devices(device_pool, job, [[0, 1], [0, 1, 2], [2, 1]], reforms=(5, 5)))
    assert read_trained_run(job).digests == expected.digests
