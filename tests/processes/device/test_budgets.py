"""A step and a re-forming need no more than their budgets (`tests/device/budgets.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_app.testing import WorkerPool
from ray_app.train.job import Hooks, Job
from tests.device.budgets import NO_CHECKPOINTS, STEPS, CountSteps
from tests.device.strategies import strategy_job
from tests.device.training import check_races, train_on_devices


def count(pool: WorkerPool, job: Job, folder: Path, groups: list[list[int]]) -> CountSteps:
    """Trains in generations of these workers, and returns what was counted."""
    counts = CountSteps(folder)
    hooks = Hooks(after_step=counts.after_step, at=counts.enter, built=counts.build)
    check_races(train_on_devices(pool, job, groups, hooks=hooks))
    return counts


@pytest.mark.parametrize("name", STEPS)
def test_a_step_stays_within_its_budget(device_pool: WorkerPool, data: Path, tmp_path: Path, name: str) -> None:
    budget = STEPS[name]
    job = strategy_job(tmp_path / "run", data, 0.3, **NO_CHECKPOINTS | {"train__epochs": 1} | budget.fields)
    counts = count(device_pool, job, tmp_path / "counts", [[*range(budget.workers)]]).read("step")
    assert {key: number for key, number in counts.items() if number > budget.counts.get(key, 0)} == {}
