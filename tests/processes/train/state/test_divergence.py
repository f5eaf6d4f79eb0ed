"""Divergent ranks: survivors with different states are detected at the next generation, and training stays
bit-identical to an undisturbed run.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ray_app.checkpoint.store import CheckpointStore
from ray_app.errors import CheckpointError, PeerLostError
from ray_app.runlog.journal import read_events
from ray_app.task.base import Batch
from ray_app.task.losses import Losses
from ray_app.testing import KilledError, WorkerPool, cache_windows, read_trained_run
from ray_app.train.job import Hooks, Job
from ray_app.train.state.transfer import divergent_ranks
from tests.support.injector import KillSaving
from tests.support.local_world import TinyImages, make_job, write_images
from tests.support.shifting_world import train_shifting
from tests.support.waiting import wait_until


class DivergesAfterUpdate(TinyImages):
    """Changes a parameter of rank 1 after one of its updates.

    Args:
        proof: File that exists after the change.
        update: Number of the update, counted from 1 in the process.
        is_rank_0_killed: Whether rank 0 waits after its update until another thread kills it. A step with it would add
            gradients of the changed parameters to those of all ranks.
    """

    def __init__(self, proof: Path, update: int, is_rank_0_killed: bool = False, **args: Any) -> None:
        super().__init__(**args)
        self._proof, self._update = proof, update
        self._is_rank_0_killed = is_rank_0_killed

    def training_loss(self, model: nn.Module, batch: Batch) -> Tensor | Losses:
        world = dist.group.WORLD
        if self._is_rank_0_killed and not self._update and (world.rank(), world.size()) == (0, 4):
            wait_until(lambda: False, "rank 0 lives")
        return super().training_loss(model, batch)

    def apply_gradients(self, model: nn.Module, optimizer: Optimizer) -> None:
        optimizer.step()
        self._update -= 1
        if self._update == 0 and dist.group.WORLD.rank() == 1:
            self._proof.touch()
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] += 2**-10


@dataclasses.dataclass(frozen=True)
class KillLast:
    """A hook that kills the worker of a rank after a step, once `checkpoints` checkpoints are committed."""

    job: Job
    rank: int
    step: int
    checkpoints: int

    def __call__(self, rank: int, step: int) -> None:
        if (rank, step) == (self.rank, self.step):
            wait_until(
                lambda: len(list(CheckpointStore(self.job.paths).commits())) >= self.checkpoints, "no checkpoint"
            )
            os.kill(os.getpid(), signal.SIGKILL)


def job_in(folder: Path, update: int = 0, **task_args: Any) -> Job:
    """Returns a job of six steps, with a checkpoint after every third one."""
    data = folder / "data"
    if not data.exists():
        write_images(data, [[20, 13]])
    task = DivergesAfterUpdate(folder / "proof", update, **task_args) if update else TinyImages()
    return make_job(folder / f"run-{update}", data, task=task, train__epochs=2)


def read_divergences(job: Job) -> list[tuple[list[int], int]]:
    """Returns the divergent ranks and the step that training continued from, for each event."""
    return [(event.details["ranks"], event.details["step"]) for event in read_events(job.paths, "params_diverged")]


def test_a_divergent_rank_gets_the_state_of_the_majority(worker_pool: WorkerPool, tmp_path: Path) -> None:
    job = job_in(tmp_path, update=4)
    hook = KillLast(job, 3, 4, 1)
    outcomes = train_shifting(worker_pool, job, [[0, 1, 2, 3], [0, 1, 2]], [], Hooks(after_step=hook))
    assert isinstance(outcomes[3].error, KilledError)
    assert (tmp_path / "proof").exists()
    assert [outcome.value for outcome in outcomes[:3]] == ["done"] * 3, [outcome.trace for outcome in outcomes[:3]]
    assert read_divergences(job) == [([1], 4)]
    assert (
        read_trained_run(job).commit.params_digest
        == worker_pool.train_new_run(job_in(tmp_path), 2, cache_windows).commit.params_digest
    )


@pytest.mark.rest
def test_a_divergent_copy_of_a_checkpoint_is_not_committed(worker_pool: WorkerPool, tmp_path: Path) -> None:
    """Rank 0 dies before it commits; rank 1, which would write its own copy instead, has other parameters."""
    undisturbed, job = job_in(tmp_path), job_in(tmp_path, update=3, is_rank_0_killed=True)
    worker_pool.train_to_end(undisturbed, 2, cache_windows)
    kill = KillSaving(str(tmp_path / "killed"), step=3)
    outcomes = train_shifting(worker_pool, job, [[0, 1, 2, 3], [1, 2, 3]], [], Hooks(before_commit=kill))
    assert kill.num_fired == 1
    assert (tmp_path / "proof").exists()
    assert [outcome.trace for outcome in outcomes[1:4]] == [""] * 3
    [(ranks, _)] = read_divergences(job)
    assert ranks == [0], "the divergent rank is not the one that commits"
    expected, commits = (
        {commit.step: commit.params_digest for commit in CheckpointStore(run.paths).commits()}
        for run in (undisturbed, job)
    )
    assert commits[6] == expected[6]
    assert commits.get(3, expected[3]) == expected[3]


def test_ranks_without_a_majority_restore_the_newest_checkpoint(worker_pool: WorkerPool, tmp_path: Path) -> None:
    job = job_in(tmp_path, update=4)
    outcomes = train_shifting(worker_pool, job, [[0, 1, 2], [0, 1]], [], Hooks(after_step=KillLast(job, 2, 4, 1)))
    assert (tmp_path / "proof").exists()
    assert [outcome.value for outcome in outcomes[:2]] == ["done"] * 2, [outcome.trace for outcome in outcomes[:2]]
    assert read_divergences(job) == [([0, 1], 3)]
    run = read_trained_run(job)
    assert (
        run.commit.params_digest == worker_pool.train_new_run(job_in(tmp_path), 2, cache_windows).commit.params_digest
    )
    assert [len(workers) for workers in run.workers] == [1, 1, 1, 2, 1, 1], (
        "the records do not show that step 4 was repeated"
    )


@pytest.mark.rest
def test_ranks_without_a_majority_and_a_checkpoint_end_the_run(worker_pool: WorkerPool, tmp_path: Path) -> None:
    job = job_in(tmp_path, update=2)
    first, second, _ = train_shifting(
        worker_pool, job, [[0, 1, 2], [0, 1]], [], Hooks(after_step=KillLast(job, 2, 2, 0))
    )
    assert isinstance(first.error, CheckpointError), first.trace
    assert "different states of the same step" in str(first.error)
    assert second.error is not None
    assert not isinstance(second.error, KilledError)
    assert isinstance(second.error, PeerLostError | IndexError), second.trace


@pytest.mark.parametrize(
    ("steps", "digests", "divergent"),
    [
        ([7, 7, 7], "aaa", []),
        ([7, 7, 7], "aba", [1]),
        ([7, 7, 6], "ab-", [0, 1]),
        ([7, 7, 7, 7], "aabb", [0, 1, 2, 3]),
        ([7, 7, 7, 7, -1], "abcc-", [0, 1, 2, 3]),
        ([7, 7, 7, 7, 7], "abccc", [0, 1]),
        ([6, 7, -1], "-a-", []),
    ],
)
def test_ranks_at_the_newest_step_with_a_minority_digest_are_divergent(
    steps: list[int], digests: str, divergent: list[int]
) -> None:
    assert divergent_ranks(steps, list(digests)) == divergent
