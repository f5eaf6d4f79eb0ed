"""Generated programs give what a plain PyTorch loop gives: each step's loss, the final state, and the evaluation."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from ray_app import load_config
from ray_app.errors import ConfigError, RayAppError
from ray_app.testing import (
    FileStoreMembership,
    Hooks,
    WorkerPool,
    make_job,
    read_trained_run,
    stream_windows,
    train_rank,
)
from ray_app.train.job import Job
from ray_app.train.state.parameters import parameter_layout
from tests.support.generated_programs import (
    GRAMMAR,
    Program,
    assert_none_differs,
    configuration,
    draw,
    initial_model,
    train_plainly,
)
from tests.support.program_search import SIMPLEST, compare, one_thread  # noqa: F401

SEARCHED = 1000
ON_SEVERAL_WORKERS = 100
ALLOWED = {
    "set max_lr to a list": "The schedule would replace the rates of the groups; refused with the remedy.",
    "use_reentrant=True": "In the turn of another optimizer, the recomputed part would get no gradient.",
    "ZeroDivisionError": "Adafactor divides by the number of values of a parameter without any; torch fails, too.",
    "total_steps, but got 0": "An optimizer without a turn in the run has no cycle; torch refuses it, too.",
}
"""Differences that are right, by a part of their text, with the reason."""


def difference(program: Program) -> str:
    """Returns how the run of a program differs from the plain loop; empty if it does not."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = job_of(program, folder)
        if isinstance(job, str):
            text = f"refused: {job}"
        else:
            train_rank(0, folder / "store", job, 1, Hooks(), stream_windows, FileStoreMembership)
            text = compare(job, read_trained_run(job), train_plainly(program, job.plan))
        return "" if any(reason in text for reason in ALLOWED) else text


def job_of(program: Program, folder: Path) -> Job | str:
    """Returns the run of a program in a folder, or the reason why it is refused."""
    try:
        return make_job(load_config(**configuration(program, folder)), folder / "run")
    except RayAppError as error:
        return str(error)


@pytest.mark.parametrize("seed", range(4))
def test_a_generated_program_trains_like_a_plain_loop(seed: int) -> None:
    assert_none_differs(GRAMMAR, [draw(seed)], difference)


def test_code_that_asks_for_ranks_gives_the_same_on_any_number_of_workers(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    program = SIMPLEST | {"body": "divided by ranks", "logical_workers": 4, "seed": 0}
    job = job_of(program, tmp_path)
    assert isinstance(job, Job), job
    one, two = (worker_pool.train_new_run(job, size) for size in (1, 2))
    assert one.digests == two.digests


@pytest.mark.parametrize("differs", ["order", "kind"])
def test_another_model_than_in_the_driver_is_refused(differs: str, tmp_path: Path) -> None:
    """Code that iterates over a set of texts has another order in each process; so may variables of modules."""
    program = SIMPLEST | {"seed": 0}
    job = job_of(program, tmp_path)
    assert isinstance(job, Job), job
    assert job.parameters == parameter_layout(initial_model(program))
    (name, _), *rest = job.parameters
    others = {"order": job.parameters[::-1], "kind": ((name, "float64 (1,)"), *rest)}
    other = replace(job, parameters=others[differs])
    with pytest.raises(ConfigError, match={"order": "sort the set", "kind": "torch.set_default_dtype"}[differs]):
        train_rank(0, tmp_path / "store", other, 1, Hooks(), stream_windows, FileStoreMembership)


@pytest.mark.search
@pytest.mark.timeout(3600)
def test_generated_programs_train_like_a_plain_loop() -> None:
    assert_none_differs(GRAMMAR, map(draw, range(SEARCHED)), difference)


@pytest.mark.search
@pytest.mark.timeout(1800)
def test_generated_programs_are_bit_identical_on_any_number_of_workers(worker_pool: WorkerPool, tmp_path: Path) -> None:
    for seed in range(ON_SEVERAL_WORKERS):
        program = draw(seed) | {"batch": 12, "logical_workers": 4}
        job = job_of(program, tmp_path / str(seed))
        if isinstance(job, str):
            assert any(reason in job for reason in ALLOWED), (job, program)
            continue
        first, *others = (worker_pool.train_new_run(job, size) for size in (1, 2, 3))
        assert all(run.digests == first.digests for run in others), program
