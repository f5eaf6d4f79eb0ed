"""What a task raises in mid-run: told with rank, logical worker, step and rows, whatever the strategy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import Tensor

from ray_app.driver.single import train_in_process
from ray_app.errors import TaskError
from ray_app.task.base import Batch
from ray_app.testing import WorkerPool
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import SingleProcessMembership
from tests.support import server_world
from tests.support.local_world import TinyImages, make_job, write_images


class Raising(TinyImages):
    """Does not like one row."""

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        if (batch["id"] == self.bad[0]).any():
            raise ValueError("not this one")
        return super().loss(outputs, batch)


def raised(pool: WorkerPool, job: Job) -> TaskError:
    """What a run of a strategy ends with: on two workers, in this process, or on a parameter server."""
    strategy = job.config.train.strategy
    if strategy == "single":
        with pytest.raises(TaskError) as caught:
            train_in_process(job, SingleProcessMembership(4, lambda: False), Hooks())
        return caught.value
    if strategy == "parameter_server":
        with pytest.raises(TaskError) as caught:
            server_world.World(job, 2).run()
        return caught.value
    [error] = [outcome.error for outcome in pool.train(job, 2) if isinstance(outcome.error, TaskError)]
    return error


@pytest.mark.parametrize("strategy", ["ddp", "local_sgd", "fsdp", "central_storage", "single", "parameter_server"])
def test_a_step_tells_rank_logical_worker_step_and_rows(pool: WorkerPool, tmp_path: Path, strategy: str) -> None:
    data = write_images(tmp_path / "data", [[20, 12], [16]])
    job = make_job(
        tmp_path / "run", data, logical_workers=4, batch=16, task=Raising(bad=(25,)), train__strategy=strategy
    )
    told = str(raised(pool, job))
    assert "ValueError: not this one (test_task_errors.py, line " in told.splitlines()[0]
    assert told.splitlines()[0].endswith("in loss)")
    [line] = [line for line in told.splitlines() if line.startswith("  rank ")]
    found = re.fullmatch(r"  rank (\d) after step (\d), logical worker (\d), 4 rows: (.*)", line)
    assert found is not None, line
    played = int(found[3])
    ranks = {"fsdp": played % 2, "single": 0, "parameter_server": int(found[1])}  # of the last, whoever asked for it
    assert int(found[1]) == ranks.get(strategy, played // 2)
    assert re.search(r"part-0\.parquet, row group 1, rows? [\d, ]*\b5\b", found[4]), "the row at position 25"
