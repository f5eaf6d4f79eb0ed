"""Peer replicas: the next worker keeps a copy of each worker's state shard, so a killed worker repeats no step."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ray_app.drill.faults import HookChain
from ray_app.testing import WorkerPool, cache_windows, read_trained_run
from ray_app.train.job import Hooks
from tests.support.bit_identity import assert_bit_identical
from tests.support.sharded import Units, committed_before, fsdp_job
from tests.support.shifting_world import KillOnce, train_shifting

PLAIN = {"train__strategy": "ddp", "train__peer_replica": False}
FIELDS: dict[str, Any] = {"train__peer_replica": True, "train__ema_decay": 0.9, "checkpoint__every_steps": None}


@dataclass(frozen=True)
class KillIn:
    """A hook that kills the worker of a rank at the start of a phase of a step."""

    proof: Path
    phase: str
    step: int
    rank: int

    def __call__(self, phase: str, rank: int, step: int) -> None:
        if (phase, rank, step) == (self.phase, self.rank, self.step) and not self.proof.exists():
            self.proof.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def workers_without(lost: int) -> list[int]:
    return [worker for worker in (0, 1, 2) if worker != lost]


@pytest.mark.rest
@pytest.mark.parametrize(
    ("strategy", "lost", "step"),
    [
        ("fsdp", 1, 8),
        pytest.param("central_storage", 0, 8, marks=pytest.mark.rest),
        pytest.param("fsdp", 0, 1, marks=pytest.mark.rest),
        pytest.param("fsdp", 2, 8, marks=pytest.mark.rest),
        pytest.param("central_storage", 1, 8, marks=pytest.mark.rest),
    ],
)
def test_a_kill_in_the_middle_of_a_step_repeats_no_step(
    worker_pool: WorkerPool, data: Path, tmp_path: Path, strategy: str, lost: int, step: int
) -> None:
    """A worker is killed in the middle of a step, and later one of the two survivors."""
    plain = worker_pool.train_new_run(fsdp_job(tmp_path / "plain", data, **(FIELDS | PLAIN)), 2, cache_windows)
    job = fsdp_job(tmp_path / "run", data, **(FIELDS | {"train__strategy": strategy}))
    first = KillIn(tmp_path / "first", "reduction", step, lost)
    second = KillOnce(tmp_path / "second", step=12, rank=0)
    train_shifting(
        worker_pool,
        job,
        [[0, 1, 2], workers_without(lost), workers_without(lost)[1:]],
        [],
        Hooks(after_step=second, at=first),
    )
    assert first.proof.exists()
    assert second.proof.exists()
    run = read_trained_run(job)
    assert [set(sizes) for sizes in run.workers] == [{3}] * step + [{2}] * (12 - step) + [{1}] * 6, (
        "a step was repeated"
    )
    assert_bit_identical(run, plain)


class KilledInUpdate(Units):
    """Kills rank 2 before it updates its shards in step 9, while its peers update theirs."""

    def __init__(self, proof: Path) -> None:
        super().__init__()
        self.proof, self.updates = proof, 0

    def apply_gradients(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.updates += 1
        if self.updates == 9 and dist.group.WORLD.size() == 3 and dist.group.WORLD.rank() == 2:
            self.proof.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().apply_gradients(model, optimizer)


@pytest.mark.rest
def test_a_kill_in_the_middle_of_an_update_is_bit_identical(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    """No peer has the updated shards of the lost worker, so all ranks take the shards of the step before."""
    plain = worker_pool.train_new_run(fsdp_job(tmp_path / "plain", data, **(FIELDS | PLAIN)), 2, cache_windows)
    job = fsdp_job(tmp_path / "run", data, KilledInUpdate(tmp_path / "proof"), **FIELDS)
    train_shifting(worker_pool, job, [[0, 1, 2], [0, 1]], [])
    assert (tmp_path / "proof").exists()
    sizes = [set(workers) for workers in read_trained_run(job).workers]
    assert sizes[:8] == [{3}] * 8
    assert sizes[9:] == [{2}] * 9
    assert_bit_identical(read_trained_run(job), plain)


@pytest.mark.rest
def test_two_killed_neighbours_roll_back_to_the_last_checkpoint(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    fields = FIELDS | {"checkpoint__every_steps": 5}
    job = fsdp_job(tmp_path / "run", data, **fields)
    plain = worker_pool.train_new_run(fsdp_job(tmp_path / "plain", data, **(fields | PLAIN)), 2, cache_windows)
    kills = [KillOnce(tmp_path / str(rank), step=8, rank=rank) for rank in (0, 1)]
    hooks = Hooks(after_step=HookChain((committed_before(job, 8, step=5), *kills)))
    train_shifting(worker_pool, job, [[0, 1, 2], [2]], [], hooks)
    assert all(kill.proof.exists() for kill in kills)
    sizes = [set(workers) for workers in read_trained_run(job).workers]
    assert sizes[:5] == [{3}] * 5
    assert sizes[5:7] == [{3, 1}] * 2, "the steps after the checkpoint were not repeated"
    assert sizes[8:] == [{1}] * 10
    assert_bit_identical(read_trained_run(job), plain)
