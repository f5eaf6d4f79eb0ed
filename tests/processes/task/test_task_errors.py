"""An error that a task raises during a run is reported with rank, logical worker, step and rows, for every strategy."""

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
    """Raises an error for one row."""

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        if (batch["id"] == self.bad_rows[0]).any():
            raise ValueError("not this one")
        return super().loss(outputs, batch)


def run_until_error(pool: WorkerPool, job: Job) -> TaskError:
    """Returns the error of a run: on two workers, in this process, or on a parameter server."""
    strategy = job.config.train.strategy
    if strategy == "single":
        with pytest.raises(TaskError) as caught:
            train_in_process(job, SingleProcessMembership(4, lambda: False), Hooks())
        return caught.value
    if strategy == "parameter_server":
        with pytest.raises(TaskError) as caught:
            server_world.ServerWorld(job, 2).run()
        return caught.value
    [error] = [outcome.error for outcome in pool.train(job, 2) if isinstance(outcome.error, TaskError)]
    return error


@pytest.mark.parametrize("strategy", ["ddp", "local_sgd", "fsdp", "central_storage", "single", "parameter_server"])
def test_an_error_in_a_step_reports_rank_logical_worker_step_and_rows(
    worker_pool: WorkerPool, tmp_path: Path, strategy: str
) -> None:
    data = write_images(tmp_path / "data", [[20, 12], [16]])
    job = make_job(
        tmp_path / "run", data, logical_workers=4, batch=16, task=Raising(bad_rows=(25,)), train__strategy=strategy
    )
    message = str(run_until_error(worker_pool, job))
    assert "ValueError: not this one (test_task_errors.py, line " in message.splitlines()[0]
    assert message.splitlines()[0].endswith("in loss)")
    [line] = [line for line in message.splitlines() if line.startswith("  rank ")]
    match = re.fullmatch(r"  rank (\d) after step (\d), logical worker (\d), 4 rows: (.*)", line)
    assert match is not None, line
    logical_worker = int(match[3])
    # With a parameter server, any rank may request the logical worker.
    ranks = {"fsdp": logical_worker % 2, "single": 0, "parameter_server": int(match[1])}
    assert int(match[1]) == ranks.get(strategy, logical_worker // 2)
    assert re.search(r"part-0\.parquet, row group 1, rows? [\d, ]*\b5\b", match[4]), (
        "the message lacks the row at position 25"
    )
