"""Generated programs give what a plain PyTorch loop gives: each step's loss, the final state, and the evaluation."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ray_app import load_config
from ray_app.errors import RayAppError
from ray_app.runlog.evaluations import read_scores
from ray_app.testing import (
    FileStoreMembership,
    Hooks,
    TrainedRun,
    WorkerPool,
    make_job,
    read_trained_run,
    stream_windows,
    train_rank,
)
from ray_app.train.job import Job
from tests.support.generated_programs import (
    GRAMMAR,
    Ended,
    Program,
    assert_none_differs,
    configuration,
    draw,
    train_plainly,
)

SEARCHED = 1000
ON_SEVERAL_WORKERS = 100
ALLOWED = {
    "give max_lr as a list": "The schedule would replace the rates of the groups; refused with the remedy.",
    "total_steps, but got 0": "An optimizer without a turn in the run has no cycle; torch refuses it, too.",
}
"""Differences that are right, by a part of their text, with the reason."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def compare(job: Job, run: TrainedRun, plain: Ended) -> str:
    """Returns the first difference of losses, state and evaluation beyond rounding."""
    ours = [loss for _, loss, *_ in run.steps]
    if len(ours) != len(plain.losses):
        return f"{len(ours)} steps, {len(plain.losses)} by the plain loop"
    # A number of bfloat16 has 8 significant bits, and the plain loop rounds the gradient of the whole batch, while a
    # run rounds that of each logical worker.
    tolerance = 2**-8 if job.config.train.precision == "bf16" else 2e-4
    for step, (a, b) in enumerate(zip(ours, plain.losses, strict=True), 1):
        if not math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance):
            return f"the loss of step {step} is {a}, by the plain loop {b}"
    state = run.snapshot.model
    if set(state) != set(plain.state):
        return f"other names in the state: {sorted(set(state) ^ set(plain.state))}"
    for name, value in plain.state.items():
        distance = (state[name].double() - value.double()).abs().max().item()
        if not distance <= 5 * tolerance * max(1.0, value.double().abs().max().item()):
            return f"{name} differs by {distance}"
    evaluations = read_scores(job.paths)
    for name, value in plain.evaluation.items():
        if not math.isclose(evaluations[-1].metrics[name], value, rel_tol=5 * tolerance, abs_tol=5 * tolerance):
            return f"{name} of the evaluation is {evaluations[-1].metrics[name]}, by the plain loop {value}"
    return ""


@pytest.mark.parametrize("seed", range(4))
def test_a_generated_program_trains_like_a_plain_loop(seed: int) -> None:
    assert_none_differs(GRAMMAR, [draw(seed)], difference)


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
