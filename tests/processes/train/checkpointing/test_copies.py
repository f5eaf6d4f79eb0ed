"""The copies of a checkpoint that ranks other than 0 keep until it is committed."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.reduction.base import World
from ray_app.testing import KilledError, WorkerPool
from ray_app.train.checkpointing.persistence import keeps_copies
from ray_app.train.job import Hooks
from tests.support.local_world import TinyImages, make_job, write_images
from tests.support.shifting_world import train_shifting
from tests.support.waiting import wait_until


@pytest.mark.parametrize(
    ("hosts", "ranks"),
    [((), [1]), (("a",) * 5, [1]), (("a", "a", "b", "b", "c"), [2, 4]), (tuple("abcde"), [1, 2, 3, 4])],
)
def test_one_rank_of_each_host_keeps_copies_and_a_second_one_if_there_is_one_host(
    hosts: tuple[str, ...], ranks: list[int]
) -> None:
    assert [rank for rank in range(5) if keeps_copies(World(rank, 5, 5, hosts=hosts))] == ranks


@dataclass(frozen=True)
class KillBeforeCommit:
    """Hooks that kill rank 0 two steps after a checkpoint, of which it has written no file yet, the first time."""

    folder: Path
    step: int

    def before_commit(self, commit: Commit) -> None:
        if commit.step == self.step and not (self.folder / "proof").exists():
            wait_until((self.folder / "stepped").exists, "rank 0 makes more steps")
            (self.folder / "proof").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, rank: int, step: int) -> None:
        if (rank, step) == (0, self.step + 2):
            (self.folder / "stepped").touch()


@pytest.mark.parametrize("hosts", [(), ("a", "a", "b", "b")], ids=["rank 1 has a copy", "rank 2 has a copy"])
def test_a_checkpoint_that_rank_0_has_not_committed_is_committed_by_the_next(
    worker_pool: WorkerPool, tmp_path: Path, hosts: tuple[str, ...]
) -> None:
    data = write_images(tmp_path / "data", [[60]])
    runs = {}
    for name in ("undisturbed", "killed"):
        fields = {
            "checkpoint__keep_last": 9,
            "train__epochs": 2,
            "checkpoint__every_epochs": None,
            "checkpoint__every_steps": 4,
        }
        job = make_job(tmp_path / name, data, logical_workers=4, batch=12, task=TinyImages(), **fields)
        kill = KillBeforeCommit(tmp_path, 4 if name == "killed" else -9)
        groups = [[0, 1, 2, 3], [1, 2, 3]] if name == "killed" else [[0]]
        outcomes = train_shifting(worker_pool, job, groups, [], Hooks(kill.after_step, kill.before_commit), hosts=hosts)
        assert [type(outcome.error) for outcome in outcomes if outcome.error is not None] == (
            [KilledError] if name == "killed" else []
        )
        commits = CheckpointStore(job.paths).commits()
        runs[name] = [(commit.step, commit.params_digest) for commit in commits]
        assert (tmp_path / "proof").exists() == (name == "killed")
    assert [step for step, _ in runs["killed"]] == [4, 8, 10]
    assert runs["killed"] == runs["undisturbed"]
