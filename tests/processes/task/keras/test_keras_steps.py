"""A `train_step` that a model writes itself is bit-identical on any workers, also after a kill and a resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_app.config.config import Config
from ray_app.driver.single import train_in_process
from ray_app.errors import PeerLostError
from ray_app.ingest.in_memory import ingest_arrays
from ray_app.testing import Hooks, WorkerPool, make_job, read_trained_run
from ray_app.train.job import Job
from ray_app.train.membership import SingleProcessMembership
from ray_app.train.step.step import TurnStep
from tests.support.bit_identity import train_and_resume

PROGRAMS = "tests.support.keras_steps."


@pytest.fixture(scope="module")
def worker_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    preloaded = ("ray_app.testing", "torchmetrics", "ray_app.task.keras", "tests.support.keras_steps")
    with WorkerPool(2, tmp_path_factory.mktemp("stores"), preloaded) as pool:
        yield pool


def job_of(folder: Path, function: str, has_target: bool, **fields: Any) -> Job:
    x = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
    data = str(folder / "data")
    ingest_arrays(data, x=x, y=np.arange(48) % 3)
    init_args = {"model": PROGRAMS + function, "inputs": "features", **({"target": "label"} if has_target else {})}
    changes = {
        "data__path": data,
        "data__global_batch_size": 12,
        "scaling__max_workers": 2,
        "train__epochs": 2,
        "checkpoint__every_epochs": None,
        "checkpoint__every_steps": 3,
        **fields,
    }
    task = {"class_path": "ray_app.task.keras.KerasTask", "init_args": init_args}
    return make_job(Config().replace(task=task, **changes), folder / "run")


@pytest.mark.parametrize(
    ("function", "has_target"),
    [
        ("get_gan", False),
        *(
            pytest.param(*case, marks=pytest.mark.rest)
            for case in (("get_vae", False), ("get_distiller", True), ("get_contrastive", True))
        ),
    ],
)
def test_a_step_is_bit_identical_on_any_workers_after_a_kill_and_a_resume(
    worker_pool: WorkerPool, tmp_path: Path, function: str, has_target: bool
) -> None:
    job = job_of(tmp_path, function, has_target)
    train_and_resume(worker_pool, job, (1, 2), ends=(2, 5), resumed=1, killed=1)


@pytest.mark.rest
def test_a_step_that_fails_in_a_later_phase_is_repeated_from_its_start(
    worker_pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, "get_gan", False)
    whole = worker_pool.train_new_run(job, 1)
    run, failures = TurnStep.run, []

    def fail(*_: Any) -> Any:
        failures.append(1)
        raise PeerLostError("a worker is lost")

    def run_twice(step: TurnStep, *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(step.steps["g_optimizer"], "run", fail)
            with pytest.raises(PeerLostError):
                run(step, *arguments)
        return run(step, *arguments)

    monkeypatch.setattr(TurnStep, "run", run_twice)
    train_in_process(job, SingleProcessMembership(job.config.logical_workers, lambda: False), Hooks())
    assert len(failures) == len(whole.steps)
    assert read_trained_run(job).digests == whole.digests
