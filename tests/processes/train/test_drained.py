"""All nodes with workers drain at once: the workers save the state and end, and new workers resume from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_app.checkpoint.store import CheckpointStore
from ray_app.errors import PreemptedError
from ray_app.reduction.world import World
from ray_app.testing import WorkerPool, cache_windows, read_trained_run
from ray_app.train.context import WorkerContext
from ray_app.train.job import Job
from ray_app.train.loop import train
from ray_app.train.membership import Flags
from tests.support.bit_identity import assert_bit_identical
from tests.support.local_world import CPU, LocalMembership, TinyImages, make_job, write_images

STEP = 5


class DrainedMembership(LocalMembership):
    """All workers leave after a step, as `Rendezvous.answer` orders when no worker stays."""

    def flags(self) -> Flags:
        self._num_steps += 1
        return Flags.REFORM | Flags.SAVE if self._num_steps == STEP else Flags(0)

    def is_draining(self) -> bool:
        return self._num_steps >= STEP


def _train(rank: int, store: Path, job: Job) -> None:
    train(WorkerContext(job, DrainedMembership(World(rank, 2, job.plan.logical_workers), store), cache_windows, CPU))


@pytest.mark.rest
def test_draining_workers_leave_a_checkpoint_and_new_workers_resume_from_it(
    worker_pool: WorkerPool, tmp_path: Path
) -> None:
    data = write_images(tmp_path / "data", [[50, 1], [46]])
    fields = {"train__epochs": 2, "checkpoint__every_epochs": None, "checkpoint__every_steps": 8}
    job, plain = (
        make_job(tmp_path / name, data, logical_workers=4, batch=12, task=TinyImages(), **fields)
        for name in ("run", "undisturbed")
    )
    worker_pool.train_to_end(plain, 1, cache_windows)
    for outcome in worker_pool.call(2, _train, job):
        assert isinstance(outcome.error, PreemptedError), outcome.trace
        assert f"after step {STEP}; a checkpoint was written" in str(outcome.error)
    assert [(c.step, c.why) for c in CheckpointStore(job.paths).commits()] == [(STEP, "extra")]
    worker_pool.train_to_end(job, 3, cache_windows)
    assert_bit_identical(read_trained_run(job), read_trained_run(plain))
    assert [len(workers) for workers in read_trained_run(job).workers] == [1] * job.total_steps, "a step was repeated"
