"""The workers evaluate every planned checkpoint exactly once, with the same result on any number of workers."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_app import load_config
from ray_app.data.reader import fetch_in_process
from ray_app.driver.result import Result
from ray_app.evaluate.evaluator import Evaluator
from ray_app.evaluate.job import EvaluationJob
from ray_app.models.inputs import open_rows
from ray_app.preflight.prepare import claim, prepare
from ray_app.runlog import journal
from ray_app.runlog.evaluations import Evaluation, put_evaluation, read_evaluations
from ray_app.runlog.journal import put_event, read_events
from ray_app.runlog.paths import RunPaths
from ray_app.testing import DieAfter, KilledError, WorkerPool, cache_windows
from ray_app.train.context import WorkerContext
from ray_app.train.job import Hooks, Job
from ray_app.train.loop import train
from ray_app.train.membership import SingleProcessMembership
from ray_app.train.step import worker_evaluation
from tests.support.batch_models import DEPENDENT_TASKS, write_data
from tests.support.local_world import LocalMembership, TinyImages, make_job, write_images
from tests.support.waiting import wait_until

PLANNED_STEPS = [4, 8, 12, 16, 18]
"""18 steps in two epochs of nine."""
EVAL_ROWS = 40


class CountsRows(TinyImages):
    """Records how many rows are evaluated.

    Args:
        notes: File that gets one line per chunk.
    """

    def __init__(self, notes: str) -> None:
        super().__init__()
        self.notes = notes

    def update(self, metrics: Any, outputs: Any, batch: Any) -> None:
        with Path(self.notes).open("a") as file:
            file.write(f"{len(batch['id'])}\n")
        super().update(metrics, outputs, batch)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("validation")
    write_images(folder / "eval", [[EVAL_ROWS]])
    return write_images(folder / "data", [[50, 1], [46]])


def evaluated_job(folder: Path, data: Path, **fields: Any) -> Job:
    eval_path = str(data.with_name("eval"))
    defaults = {"evaluate__batch_size": 8, "evaluate__where": "workers", "data__eval_path": eval_path}
    folder.mkdir()
    job = make_job(folder / "run", data, task=CountsRows(str(folder / "notes")), every=4, **(defaults | fields))
    return dataclasses.replace(job, eval_source=open_rows(job.task, eval_path))


def read_results(job: Job) -> list[dict[str, Any]]:
    """Returns the results of the evaluations, without times."""
    times = {"duration_s", "time_s", "lag_s"}
    return [{k: v for k, v in dataclasses.asdict(e).items() if k not in times} for e in read_evaluations(job.paths)]


def steps_of(evaluations: list[dict[str, Any]]) -> list[int]:
    return [e["step"] for e in evaluations]


def count_evaluated_rows(job: Job) -> int:
    assert isinstance(job.task, CountsRows)
    return sum(map(int, Path(job.task.notes).read_text().split()))


@pytest.mark.rest
def test_every_planned_checkpoint_is_evaluated_on_any_workers_and_after_stops(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    undisturbed, stopped = (evaluated_job(tmp_path / name, data) for name in ("one", "stopped"))
    worker_pool.train_to_end(undisturbed, 1)
    expected = read_results(undisturbed)
    assert steps_of(expected) == PLANNED_STEPS == undisturbed.planned_evaluations(18)
    assert all(e["rows"] == EVAL_ROWS for e in expected)
    assert count_evaluated_rows(undisturbed) == len(PLANNED_STEPS) * EVAL_ROWS

    outcomes = worker_pool.train(stopped, 2, Hooks(after_step=DieAfter(8)))
    assert all(isinstance(o.error, KilledError) for o in outcomes), [o.trace for o in outcomes]
    assert steps_of(read_results(stopped)) == [4], "the run died before the evaluation of its last checkpoint"
    worker_pool.train(stopped, 2, membership=partial(LocalMembership, stop={0: 2}))
    assert steps_of(read_results(stopped)) == [4, 8], "the extra checkpoint of the stop at step 10 is not a planned one"
    outcomes = worker_pool.train(stopped, 1, Hooks(after_step=DieAfter(14)))
    assert isinstance(outcomes[0].error, KilledError)
    worker_pool.train_to_end(stopped, 2)
    assert read_results(stopped) == expected, "parameters and metrics differ from those of the undisturbed run"
    assert count_evaluated_rows(stopped) == count_evaluated_rows(undisturbed), "a checkpoint was evaluated twice"
    assert len(read_events(stopped.paths, "evaluated")) == len(PLANNED_STEPS)


def test_checkpoints_at_the_end_of_an_epoch_are_evaluated(worker_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    job = evaluated_job(tmp_path / "epochs", data, checkpoint__every_steps=None, checkpoint__every_epochs=1)
    worker_pool.train_to_end(job, 1)
    assert steps_of(read_results(job)) == [9, 18]


def test_a_storage_outage_does_not_stop_training(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation that the storage refuses twice is written; one that it always refuses is recorded as skipped."""
    job = evaluated_job(tmp_path / "outage", data)
    attempts = Counter[int]()

    def put(paths: RunPaths, result: Evaluation) -> bool:
        attempts[result.step] += 1
        if result.step in (12, 18) or (result.step == 8 and attempts[8] <= 2):
            raise OSError("503")
        return put_evaluation(paths, result)

    skip_events = Counter[int]()

    def record_event(paths: RunPaths, kind: str, fence: int, **details: Any) -> bool:
        skip_events[details["step"]] += kind == "evaluation_skipped"
        return skip_events[details["step"]] != 1 and put_event(paths, kind, fence, **details)

    def fail_to_list(paths: RunPaths) -> set[int]:
        raise OSError(f"503 {paths.name}")

    monkeypatch.setattr(worker_evaluation, "put_evaluation", put)
    monkeypatch.setattr(journal, "put_event", record_event)
    monkeypatch.setattr(worker_evaluation, "evaluated_steps", fail_to_list)
    pauses = list[float]()
    monkeypatch.setattr(time, "sleep", pauses.append)
    train(WorkerContext(job, SingleProcessMembership(4, lambda: False), cache_windows, torch.device("cpu")))
    assert (attempts[8], attempts[12]) == (3, worker_evaluation._RETRY.attempts)
    assert pauses == [0.5, 1.0, *([0.5, 1.0, 2.0, 4.0, 8.0] * 2)], "the pauses are not those between the attempts"
    assert steps_of(read_results(job)) == [4, 8, 16]
    skipped = [(e.details["step"], e.details["reason"]) for e in read_events(job.paths, "evaluation_skipped")]
    assert skipped == [(step, "OSError: 503") for step in (12, 18)], (
        "early stopping would wait for the missing evaluations"
    )


@pytest.mark.rest
@pytest.mark.parametrize("name", DEPENDENT_TASKS)
def test_rows_that_depend_on_their_batch_are_evaluated_alike_by_all(
    name: str, worker_pool: WorkerPool, tmp_path: Path
) -> None:
    path = write_data(tmp_path / "data")
    paths = {"data__path": path, "data__eval_path": path, "run__storage_path": str(tmp_path / "runs")}
    fields = {"data__global_batch_size": 12, "scaling__max_workers": 3, "train__max_steps": 2, "run__name": "run"}
    fields |= {"evaluate__where": "workers", "evaluate__batch_size": 20, "tracking__enabled": False, **paths}
    job = claim(prepare(load_config(task=DEPENDENT_TASKS[name], **fields)), 1).job
    assert job.eval_source is not None
    values = []
    for size in (1, 2, 3):
        sized = job if size == 1 else dataclasses.replace(job, run_root=str(tmp_path / f"run-{size}"))
        worker_pool.train_to_end(sized, size)
        values.append(read_evaluations(sized.paths)[-1].metrics)
    section = dataclasses.replace(job.config.evaluate, where="actor")
    evaluator = Evaluator(EvaluationJob(section, job.task, job.run_root, 1, job.eval_source, "other"), fetch_in_process)
    try:
        wait_until(lambda: bool(read_evaluations(job.paths, "other")))
    finally:
        evaluator.stop()
    values += [read_evaluations(job.paths, "other")[-1].metrics]
    values += [Result(job.paths.root, {"status": "finished"}, job.task).evaluate(path)]
    assert all(value == values[0] for value in values), values
