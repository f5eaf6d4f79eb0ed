"""A step and a re-forming need no more than their budgets (`tests/device/budgets.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ray_app.testing import WorkerPool
from ray_app.train.job import Hooks, Job
from tests.device.budgets import FORMINGS, LOCKED, NO_CHECKPOINTS, STEPS, CountSteps
from tests.device.strategies import Fields, strategy_job
from tests.device.training import check_races, train_on_devices
from tests.support.quick_cases import only_quick
from tests.support.shifting_world import KillOnce


@pytest.fixture(scope="module")
def device_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerPool]:
    """Processes for as many devices as a usual machine has."""
    with WorkerPool(8, tmp_path_factory.mktemp("stores")) as pool:
        yield pool


def job_of(folder: Path, data: Path, fields: Fields) -> Job:
    return strategy_job(folder / "run", data, 0.3, **NO_CHECKPOINTS | fields)


def exceeded(counts: dict[str, int], budget: Mapping[str, int]) -> dict[str, int]:
    """Returns the counts that are above a budget."""
    return {
        name: number
        for name, number in counts.items()
        if number > budget.get(name, LOCKED if name == "locked bytes" else 0)
    }


@pytest.mark.parametrize("name", only_quick(STEPS, "exact", "overlapped"))
def test_a_step_stays_within_its_budget(device_pool: WorkerPool, data: Path, tmp_path: Path, name: str) -> None:
    budget = STEPS[name]
    counts = CountSteps(tmp_path / "counts")
    hooks = Hooks(after_step=counts.after_step, built=counts.build)
    job = job_of(tmp_path, data, budget.fields)
    check_races(train_on_devices(device_pool, job, [[*range(budget.workers)]], hooks=hooks))
    assert exceeded(counts.read("step"), budget.counts) == {}


@pytest.mark.parametrize("name", FORMINGS)
def test_a_generation_forms_within_its_budget(device_pool: WorkerPool, data: Path, tmp_path: Path, name: str) -> None:
    budget = FORMINGS[name]
    counts, kill = CountSteps(tmp_path / "counts"), KillOnce(tmp_path / "killed", budget.step, 2)
    hooks = Hooks(at=counts.enter, built=counts.build, after_step=None if budget.reforms else kill)
    results = train_on_devices(device_pool, job_of(tmp_path, data, {}), budget.groups, budget.reforms, hooks)
    assert kill.proof.exists() == (len(budget.groups[0]) == 3)
    check_races(results[: len(budget.groups[-1])])
    assert exceeded(counts.read(f"forming-{budget.step}"), budget.counts) == {}
