"""The copies of a checkpoint that ranks other than 0 keep until it is committed."""

from pathlib import Path

import pytest
import torch

from ray_app.checkpoint.store import CheckpointStore
from ray_app.devices import HOST
from ray_app.reduction.world import World
from ray_app.testing import KilledError, WorkerPool
from ray_app.train.checkpointing.persistence import keeps_copies
from ray_app.train.job import Hooks
from tests.support.injector import KillBeforeCommit
from tests.support.local_world import TinyImages, make_job, write_images
from tests.support.shifting_world import train_shifting


@pytest.mark.parametrize(
    ("hosts", "ranks"),
    [((), [1]), (("a",) * 5, [1]), (("a", "a", "b", "b", "c"), [2, 4]), (tuple("abcde"), [1, 2, 3, 4])],
)
def test_on_gpus_few_ranks_keep_copies_unless_the_end_of_the_run_depends_on_each(
    hosts: tuple[str, ...], ranks: list[int]
) -> None:
    worlds, gpu = [World(rank, 5, 5, hosts=hosts) for rank in range(5)], torch.device("cuda", 0)
    assert [world.rank for world in worlds if keeps_copies(world, gpu, None)] == ranks
    assert all(keeps_copies(world, gpu, 3) and keeps_copies(world, HOST, None) for world in worlds)


@pytest.mark.parametrize("others", [(), (1,)], ids=["rank 0 dies", "ranks 0 and 1 die"])
def test_a_checkpoint_that_rank_0_has_not_committed_is_committed_by_the_next(
    worker_pool: WorkerPool, tmp_path: Path, others: tuple[int, ...]
) -> None:
    data = write_images(tmp_path / "data", [[60]])
    runs = {}
    for name in ("undisturbed", "killed"):
        job = make_job(tmp_path / name, data, task=TinyImages(), every=4, checkpoint__keep_last=9)
        kill = KillBeforeCommit(tmp_path, 4 if name == "killed" else -9, others)
        groups = [[0, 1, 2, 3], [r for r in (1, 2, 3) if r not in others]] if name == "killed" else [[0]]
        outcomes = train_shifting(worker_pool, job, groups, [], Hooks(kill.after_step, kill.before_commit))
        assert [type(outcome.error) for outcome in outcomes if outcome.error is not None] == (
            [KilledError] * (1 + len(others)) if name == "killed" else []
        )
        commits = CheckpointStore(job.paths).commits()
        runs[name] = [(commit.step, commit.params_digest) for commit in commits]
        assert (tmp_path / "proof").exists() == (name == "killed")
    assert [step for step, _ in runs["killed"]] == [4, 8, 10]
    assert runs["killed"] == runs["undisturbed"]
