"""The copies of a checkpoint that ranks other than 0 keep until it is committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_app.checkpoint.store import CheckpointStore
from ray_app.reduction.base import World
from ray_app.testing import KilledError, WorkerPool
from ray_app.train.checkpointing.persistence import keeps_copies
from ray_app.train.job import Hooks
from tests.support.injector import KillSaving
from tests.support.local_world import TinyImages, make_job, write_images
from tests.support.shifting_world import train_shifting


@pytest.mark.parametrize(
    ("hosts", "ranks"),
    [((), [1]), (("a",) * 5, [1]), (("a", "a", "b", "b", "c"), [2, 4]), (tuple("abcde"), [1, 2, 3, 4])],
)
def test_one_rank_of_each_host_keeps_copies_and_a_second_one_if_there_is_one_host(
    hosts: tuple[str, ...], ranks: list[int]
) -> None:
    assert [rank for rank in range(5) if keeps_copies(World(rank, 5, 5, hosts=hosts))] == ranks


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
        kill = KillSaving(str(tmp_path / f"{name}-proof"), step=4 if name == "killed" else -1)
        groups = [[0, 1, 2, 3], [1, 2, 3]] if name == "killed" else [[0]]
        outcomes = train_shifting(worker_pool, job, groups, [], Hooks(before_commit=kill), hosts=hosts)
        assert [type(outcome.error) for outcome in outcomes if outcome.error is not None] == (
            [KilledError] if name == "killed" else []
        )
        commits = CheckpointStore(job.paths).commits()
        runs[name] = [(commit.step, commit.params_digest) for commit in commits]
        assert kill.num_fired == (name == "killed")
    assert [step for step, _ in runs["killed"]] == [4, 8, 10]
    assert runs["killed"] == runs["undisturbed"]
