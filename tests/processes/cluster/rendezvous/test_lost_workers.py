"""Workers that are lost on devices like GPUs, where a collective spins until its own rank aborts: the real rendezvous,
clients and training loop, without Ray.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from ray_app.errors import ConfigError
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths
from ray_app.task.base import Batch
from ray_app.testing import KilledError, WorkerPool, cache_windows, read_trained_run
from ray_app.train.job import Hooks, Job
from tests.support.device_group import BACKEND, BACKEND_2, DeviceGroup
from tests.support.local_world import TinyImages, make_job, write_images
from tests.support.quick_cases import only_quick
from tests.support.rendezvous_thread import (
    RECOVERY_S,
    FailOnce,
    RemoteRendezvous,
    RendezvousThread,
    check_survivors,
    start_rendezvous,
    train_at_rendezvous,
)
from tests.support.waiting import wait_until

NO_SHARED_MEMORY = (
    "Failed to initialize NCCL communicator: unhandled system error (run with NCCL_DEBUG=INFO for details). Last error:"
    " Error while creating shared memory segment /dev/shm/nccl-Ab12 (size 9637888)"
)


class SlowToEnd(TinyImages):
    """A task with which a worker ends only when the others have formed again after its error, as if it had to upload.

    Args:
        run: The run's folder.
    """

    def __init__(self, run: Path) -> None:
        super().__init__()
        self.run = run

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        if FailOnce.has_mistake:
            raise ValueError("a mistake")
        return super().loss(outputs, batch)

    def finish(self, model: nn.Module) -> None:
        proof = FailOnce(str(self.run), "").proof
        if proof.exists() and proof.read_text() == str(os.getpid()):
            wait_until(lambda: len(read_events(RunPaths(self.run), "formed")) > 1, "no other generation", 30.0)


@pytest.fixture
def rendezvous() -> Iterator[RendezvousThread]:
    thread = start_rendezvous(3)
    yield thread
    thread.close()


def small_job(folder: Path, **fields: Any) -> Job:
    """Returns a job of which each parameter has its own bucket, so that the second collective is one of a backward."""
    data = write_images(folder / "data", [[20, 13]])
    defaults = {"train__epochs": 2, "train__bucket_mb": 1e-5}
    task = SlowToEnd(folder / "run")
    return make_job(folder / "run", data, logical_workers=3, batch=12, task=task, **(defaults | fields))


@pytest.mark.parametrize("fault", ["memory", "mistake"])
@pytest.mark.parametrize("backend", only_quick([BACKEND, BACKEND_2], BACKEND))
def test_survivors_form_again_at_once_after_an_error_of_one_worker(
    worker_pool: WorkerPool, rendezvous: RendezvousThread, tmp_path: Path, backend: str, fault: str
) -> None:
    """Nothing but the rendezvous can tell them: their collectives spin, and the failed worker still has work to do."""
    job = small_job(tmp_path)
    expected = worker_pool.train_new_run(job, 2, cache_windows).commit.params_digest
    hook = FailOnce(job.run_root, fault)
    outcomes = worker_pool.call(3, train_at_rendezvous, job, rendezvous.remote, backend, None, Hooks(at=hook))
    check_survivors(job, outcomes, hook)
    assert read_trained_run(job).commit.params_digest == expected


def lose_rank_2_while_it_connects(rank: int, store: Path, job: Job, remote: RemoteRendezvous, backend: str) -> str:
    """Trains; the process of rank 2 is killed before it has connected."""

    def die() -> None:
        FailOnce(job.run_root, "").proof.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(DeviceGroup, "on_connecting", die)
        return train_at_rendezvous(rank, store, job, remote, backend, None, Hooks())


@pytest.mark.parametrize("backend", [BACKEND, BACKEND_2])
def test_a_worker_lost_while_a_group_connects_costs_no_other_worker(
    worker_pool: WorkerPool, rendezvous: RendezvousThread, tmp_path: Path, backend: str
) -> None:
    job = small_job(tmp_path)
    outcomes = worker_pool.call(3, lose_rank_2_while_it_connects, job, rendezvous.remote, backend)
    assert isinstance(outcomes[2].error, KilledError)
    assert [outcome.value for outcome in outcomes[:2]] == ["done", "done"], [outcome.trace for outcome in outcomes]
    [formed] = read_events(job.paths, "formed")
    assert formed.details["workers"] == 2
    assert formed.time_s - FailOnce(job.run_root, "").proof.stat().st_mtime < RECOVERY_S


def refuse() -> None:
    raise RuntimeError(NO_SHARED_MEMORY)


def train_without_shared_memory(rank: int, store: Path, job: Job, remote: RemoteRendezvous, hook: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceGroup, hook, refuse)
        return train_at_rendezvous(rank, store, job, remote, BACKEND_2, None, Hooks())


@pytest.mark.parametrize("hook", ["on_connecting", "on_launching"])
def test_a_group_that_cannot_connect_ends_the_run_with_the_causes(
    worker_pool: WorkerPool, rendezvous: RendezvousThread, tmp_path: Path, hook: str
) -> None:
    """NCCL connects neighbors in the first collective. A worker goes on without a group if all others have ended."""
    outcomes = worker_pool.call(3, train_without_shared_memory, small_job(tmp_path), rendezvous.remote, hook)
    errors = [str(outcome.error) for outcome in outcomes if isinstance(outcome.error, ConfigError)]
    assert errors, [outcome.trace for outcome in outcomes]
    for words in ("a small /dev/shm", "NCCL_SOCKET_IFNAME is", "InfiniBand", "a blocked port", NO_SHARED_MEMORY):
        assert words in errors[0]
