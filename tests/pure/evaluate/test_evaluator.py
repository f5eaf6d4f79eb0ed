"""The evaluator without Ray: it pins checkpoints for as long as it needs them, and evaluates each one once."""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ray_app.checkpoint.format import Snapshot, pack, params_digest
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.config.config import Config
from ray_app.config.sections import EvaluateSection
from ray_app.data.reader import fetch_in_process, load_all
from ray_app.devices import HOST, KINDS
from ray_app.errors import ConfigError, RunHeldError
from ray_app.evaluate import evaluator as actor
from ray_app.evaluate.evaluator import Evaluator, count_deaths_in_a_row
from ray_app.evaluate.job import EvaluationJob, pending_commits
from ray_app.runlog import journal
from ray_app.runlog.evaluations import read_evaluations
from ray_app.runlog.journal import read_events
from ray_app.runlog.lease import acquire_lease
from ray_app.storage.files import put_json, read_json
from ray_app.task.metrics import combine, score
from tests.support.local_world import make_job, write_images
from tests.support.waiting import wait_until


@pytest.fixture
def job(tmp_path: Path) -> EvaluationJob:
    data = write_images(tmp_path / "data", [[20, 11]])
    train_job = make_job(tmp_path / "run", data, logical_workers=1, batch=8)
    return EvaluationJob(EvaluateSection(batch_size=7), train_job.task, train_job.run_root, 1, train_job.source)


def test_runs_with_one_name_in_two_folders_have_different_actors(job: EvaluationJob, tmp_path: Path) -> None:
    other = replace(job, run_root=str(tmp_path / "elsewhere" / "run"))
    assert other.paths.name == job.paths.name
    assert other.actor_name != job.actor_name == replace(job).actor_name


def write_checkpoint(job: EvaluationJob, step: int) -> None:
    model = job.task.build_model().state_dict()
    snapshot = Snapshot(step, {name: tensor.clone() for name, tensor in model.items()}, {}, None)
    commit_record = Commit(step, 1, 0, step, "cadence", "", "", 1, params_digest(snapshot.model), {}, time.time())
    CheckpointStore(job.paths).write(pack(snapshot), commit_record)


@contextmanager
def evaluating(
    job: EvaluationJob,
    before: Callable[[Commit], None] | None = None,
    when_orphaned: Callable[[str], object] | None = None,
) -> Iterator[Evaluator]:
    evaluator = Evaluator(job, fetch_in_process, before, when_orphaned)
    try:
        yield evaluator
    finally:
        evaluator.stop()


@pytest.mark.rest
def test_pending_checkpoints_stay_pinned_during_a_long_evaluation(
    job: EvaluationJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "PIN_LIFE_S", 5.0)
    for step in (1, 2, 3):
        write_checkpoint(job, step)
    go, started = threading.Event(), threading.Event()

    def slow(_: Commit) -> None:
        started.set()
        go.wait(30)

    with evaluating(job, slow):
        assert started.wait(30)
        [first] = CheckpointStore(job.paths).read_pins()
        expires_s = first.expires_s + 2.5
        wait_until(lambda: CheckpointStore(job.paths).read_pins()[0].expires_s > expires_s, "renewed for half its life")
        assert CheckpointStore(job.paths).retain(1, []) == []
        go.set()
        wait_until(lambda: not pending_commits(job), "all evaluated")
    assert [e.step for e in read_evaluations(job.paths)] == [1, 2, 3]
    assert CheckpointStore(job.paths).retain(1, []) == [1, 2]


def test_a_clock_that_is_a_quarter_of_an_hour_behind_loses_no_checkpoint(
    job: EvaluationJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    started = threading.Event()
    now = time.time
    for step in (1, 2, 3):
        write_checkpoint(job, step)

    def slow(_: Commit) -> None:
        started.set()
        go.wait(30)

    monkeypatch.setattr(actor, "time", SimpleNamespace(time=lambda: now() - 900, perf_counter=time.perf_counter))
    with evaluating(job, slow):
        assert started.wait(30)
        [pin] = CheckpointStore(job.paths).read_pins()
        assert pin.expires_s < now() + actor.PIN_LIFE_S - 800, "the clock of the evaluator is not behind"
        assert CheckpointStore(job.paths).retain(1, []) == []
        go.set()
        wait_until(lambda: not pending_commits(job), "all evaluated")
    assert [e.step for e in read_evaluations(job.paths)] == [1, 2, 3]


def test_a_damaged_checkpoint_is_recorded_as_skipped_and_a_removed_one_is_not(job: EvaluationJob) -> None:
    for step in (1, 2, 3):
        write_checkpoint(job, step)
    data = bytearray((job.paths.checkpoint(1, 1) / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (job.paths.checkpoint(1, 1) / "model.safetensors").write_bytes(data)

    def remove(commit: Commit) -> None:
        if commit.step == 2:
            folder = job.paths.checkpoint(2, 1)
            for path in [folder / "COMMIT.json", *folder.iterdir()]:
                path.unlink(missing_ok=True)
            folder.rmdir()

    with evaluating(job, remove):
        wait_until(lambda: not pending_commits(job), "all evaluated")
    assert [e.step for e in read_evaluations(job.paths)] == [3]
    [skipped] = read_events(job.paths, "evaluation_skipped")
    assert skipped.details["step"] == 1
    assert not job.paths.checkpoint(2, 1).exists()


def test_a_skipped_evaluation_is_recorded_later_if_the_storage_refuses_the_event(
    job: EvaluationJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the event, early stopping would wait for the evaluation for ever."""
    write_checkpoint(job, 1)
    (job.paths.checkpoint(1, 1) / "model.safetensors").write_bytes(b"damaged")
    refusals = [OSError("503"), OSError("503")]

    def put(*arguments: Any, **options: Any) -> bool:
        if refusals:
            raise refusals.pop()
        return put_json(*arguments, **options)

    monkeypatch.setattr(journal, "put_json", put)
    with evaluating(job):
        wait_until(lambda: bool(read_events(job.paths, "evaluation_skipped")), "recorded in the end")
    assert not refusals
    assert [event.details["step"] for event in read_events(job.paths, "evaluation_skipped")] == [1]


@pytest.mark.rest
def test_an_evaluation_is_retried_while_storage_fails(job: EvaluationJob) -> None:
    write_checkpoint(job, 1)
    calls = []

    def failing(commit: Commit) -> None:
        calls.append(commit.step)
        if len(calls) < 3:
            raise OSError("storage does not answer")

    with evaluating(job, failing) as evaluator:
        wait_until(lambda: not pending_commits(job), "evaluated at last")
        assert evaluator.error() is None
    assert calls == [1, 1, 1]
    assert [e.step for e in read_evaluations(job.paths)] == [1]


def test_the_result_does_not_depend_on_the_batch_size(job: EvaluationJob) -> None:
    arrays = load_all(fetch_in_process, job.data).arrays
    model = job.task.build_model()
    results = [combine(job.task, score(job.task, model, arrays, size, HOST)).values for size in (1, 7, 31, 1000)]
    assert {values["accuracy"] for values in results} == {results[0]["accuracy"]}
    assert all(values["loss"] == pytest.approx(results[0]["loss"], rel=1e-5) for values in results)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_evaluation_computes_in_the_precision_and_layout_of_training(job: EvaluationJob, precision: str) -> None:
    config = Config().replace(train__precision=precision, train__channels_last=True)
    job = EvaluationJob.of(config, job.task, job.run_root, 1, job.data)
    arrays, dtypes = load_all(fetch_in_process, job.data).arrays, set[torch.dtype]()
    model, task = job.task.build_model(), copy.copy(job.task)

    def forward(model_: Any, batch: Any) -> Any:
        outputs = type(task).forward(task, model_, batch)
        dtypes.add(outputs.dtype)
        return outputs

    def update(metrics: Any, outputs: Any, batch: Any) -> None:
        assert outputs.dtype is torch.float32
        type(task).update(task, metrics, outputs, batch)

    vars(task).update(forward=forward, update=update)
    values = combine(task, score(task, model, arrays, 31, HOST, precision=job.precision)).values
    assert dtypes == {{"fp32": torch.float32, "bf16": torch.bfloat16}[precision]}
    image = job.precision.arrange({"image": torch.zeros(2, 3, 4, 4)})["image"]
    assert image.is_contiguous(memory_format=torch.channels_last)
    plain = combine(job.task, score(job.task, model, arrays, 31, HOST)).values
    assert values["loss"] == pytest.approx(plain["loss"], rel=0.05)
    assert (values["loss"] == plain["loss"]) == (precision == "fp32")


def test_outputs_that_are_not_a_tensor_are_computed_once_per_row(job: EvaluationJob) -> None:
    """Each row goes through the model once, at most 7 at a time, and the metrics are those of tensor outputs."""
    arrays = load_all(fetch_in_process, job.data).arrays
    model = job.task.build_model()
    rows = len(arrays["label"])
    tensor_task = copy.copy(job.task)
    batch_sizes = list[int]()
    dict_task = copy.copy(job.task)

    def forward(model_: Any, batch: Any) -> Any:
        batch_sizes.append(len(batch["label"]))
        return {"scores": type(tensor_task).forward(tensor_task, model_, batch)}

    vars(dict_task).update(
        forward=forward,
        loss=lambda outputs, batch: tensor_task.loss(outputs["scores"], batch),
        update=lambda metrics, outputs, batch: tensor_task.update(metrics, outputs["scores"], batch),
        mistakes=lambda outputs, batch, max_mistakes: tensor_task.mistakes(outputs["scores"], batch, max_mistakes),
    )
    expected, result = (
        combine(tensor_task, score(task, model, arrays, 7, HOST, chunk_rows=21)) for task in (tensor_task, dict_task)
    )
    assert batch_sizes == [*[7] * (rows // 7), *([rows % 7] if rows % 7 else [])]
    assert result.values["accuracy"] == expected.values["accuracy"]
    assert result.values["loss"] == pytest.approx(expected.values["loss"], rel=1e-6)
    assert [m.row for m in result.mistakes] == [m.row for m in expected.mistakes]


@pytest.mark.parametrize(("max_pending", "evaluated"), [(1, [3]), (2, [2, 3])])
def test_no_more_than_max_pending_checkpoints_wait_for_the_evaluator(
    job: EvaluationJob, max_pending: int, evaluated: list[int]
) -> None:
    for step in (1, 2, 3):
        write_checkpoint(job, step)
    go, started = threading.Event(), threading.Event()

    def slow(_: Commit) -> None:
        started.set()
        go.wait(30)

    with evaluating(replace(job, section=replace(job.section, max_pending=max_pending)), slow) as evaluator:
        assert started.wait(30)
        assert CheckpointStore(job.paths).retain(1, []) == [step for step in (1, 2, 3) if step not in evaluated]
        go.set()
        wait_until(lambda: not pending_commits(job), "all evaluated")
        assert evaluator.error() is None
    assert [e.step for e in read_evaluations(job.paths)] == evaluated


def test_each_evaluation_records_its_lag(job: EvaluationJob) -> None:
    for step in (1, 2, 3):
        write_checkpoint(job, step)
    with evaluating(job):
        wait_until(lambda: not pending_commits(job), "all evaluated")
    evaluations = read_evaluations(job.paths)
    assert [e.behind for e in evaluations] == [2, 1, 0]
    committed = {c.step: c.time_s for c in CheckpointStore(job.paths).commits()}
    assert all(e.lag_s == pytest.approx(e.time_s - committed[e.step]) for e in evaluations)
    assert evaluations[0].data_digest == job.data.manifest.digest


def test_an_evaluator_without_driver_finishes_and_closes_the_run(
    job: EvaluationJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "LIFE_S", 0.5)
    lease = acquire_lease(job.paths)
    write_checkpoint(job, 1)
    closed: list[str] = []
    with evaluating(replace(job, fence=lease.fence), when_orphaned=closed.append):
        wait_until(lambda: not pending_commits(job), "the first evaluation")
        assert closed == []
        write_checkpoint(job, 2)
        lease.release()
        wait_until(lambda: bool(closed), "the end of the driver is noticed")
    assert [e.step for e in read_evaluations(job.paths)] == [1, 2]
    assert closed == [job.run_root]


def test_an_evaluator_of_a_superseded_start_ends_without_closing_the_run(
    job: EvaluationJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "LIFE_S", 0.5)
    acquire_lease(job.paths).release()
    with acquire_lease(job.paths), evaluating(replace(job, fence=1), when_orphaned=pytest.fail) as evaluator:
        wait_until(evaluator.stopped.is_set, "it ends")
        assert evaluator.error() is None


@pytest.mark.parametrize("error", [ValueError("the metric is broken"), ConfigError("the metric has no mode")])
def test_a_failed_evaluator_without_driver_closes_the_run(
    job: EvaluationJob, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(actor, "LIFE_S", 0.5)
    lease = acquire_lease(job.paths)
    write_checkpoint(job, 1)
    closed: list[str] = []

    def broken(_: Commit) -> None:
        raise error

    with evaluating(replace(job, fence=lease.fence), broken, closed.append) as evaluator:
        wait_until(lambda: evaluator.error() is not None, "it gives up")
        assert closed == []
        lease.release()
        wait_until(evaluator.stopped.is_set, "it ends")
    assert evaluator.error() == f"{type(error).__name__}: {error}"
    assert closed == [job.run_root]
    assert read_evaluations(job.paths) == []


def test_an_evaluator_follows_a_driver_that_renewed_its_overdue_lease(
    job: EvaluationJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease was overdue because storage was unreachable."""
    monkeypatch.setattr(actor, "LIFE_S", 0.5)
    lease = acquire_lease(job.paths)
    record = read_json(job.paths.fence(lease.fence))
    closed_roots: list[str] = []

    def renewed_and_held(root: str) -> None:
        closed_roots.append(root)
        if len(closed_roots) == 1:
            put_json(job.paths.fence(lease.fence), record)
            raise RunHeldError("its driver lives")

    with evaluating(replace(job, fence=lease.fence), when_orphaned=renewed_and_held) as evaluator:
        put_json(job.paths.fence(lease.fence), record | {"holder": record["holder"] | {"pid_ticks": -1}})
        wait_until(lambda: bool(closed_roots), "it seems to be gone")
        wait_until(lambda: evaluator.driver == "held", "it is seen to live")
        write_checkpoint(job, 1)
        wait_until(lambda: not pending_commits(job), "what comes then is evaluated")
        assert evaluator.error() is None
        lease.release()
        wait_until(evaluator.stopped.is_set, "it ends with the driver")
    assert len(closed_roots) == 2


def test_closing_the_run_is_retried_while_storage_is_unreachable(
    job: EvaluationJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "LIFE_S", 0.5)
    acquire_lease(job.paths).release()
    answers = iter([OSError("away"), None])

    def close(_: str) -> None:
        if (error := next(answers)) is not None:
            raise error

    with evaluating(job, when_orphaned=close) as evaluator:
        wait_until(evaluator.stopped.is_set, "it ends")
    assert next(answers, "all used") == "all used"


def test_pending_checkpoints_are_evaluated_although_another_process_closed_the_run(
    job: EvaluationJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "LIFE_S", 0.5)
    acquire_lease(job.paths).release()
    for step in (1, 2, 3):
        write_checkpoint(job, step)
    closed_roots: list[str] = []

    def before_evaluation(commit: Commit) -> None:
        if commit.step == 1:
            # `ray-app track --replay` closes a run like this.
            acquire_lease(job.paths, closing=True).release()
        else:
            wait_until(lambda: evaluator.driver != "held", "the end of the driver is seen")

    evaluator = Evaluator(job, fetch_in_process, before_evaluation, closed_roots.append)
    wait_until(evaluator.stopped.is_set, "it ends")
    evaluator.stop()
    assert [e.step for e in read_evaluations(job.paths)] == [1, 2, 3]
    assert closed_roots == [job.run_root]


@pytest.mark.parametrize(("exact", "num_cpus", "threads"), [(True, 0.5, 1), (False, 2.0, 2)])
def test_the_evaluator_uses_the_determinism_and_threads_of_its_configuration(
    job: EvaluationJob, exact: bool, num_cpus: float, threads: int
) -> None:
    section = replace(job.section, num_cpus=num_cpus)
    with evaluating(dataclasses.replace(job, deterministic=exact, section=section)):
        assert torch.are_deterministic_algorithms_enabled() is exact
        assert torch.get_num_threads() == threads


def test_the_device_is_set_in_the_thread_that_builds_and_the_one_that_evaluates(
    job: EvaluationJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current GPU is a property of a thread, and a new thread begins with GPU 0."""
    threads = list[str]()
    monkeypatch.setattr(KINDS[HOST.type], "use", lambda device: threads.append(threading.current_thread().name))
    write_checkpoint(job, 1)
    with evaluating(job):
        wait_until(lambda: not pending_commits(job), "evaluated")
    assert threads == [threading.current_thread().name, "_follow"]


def test_only_a_process_with_a_pending_checkpoint_records_its_start(
    job: EvaluationJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, repeated deaths of idle evaluators would count as failures of a checkpoint that none of them read."""
    recorded_steps = list[int]()
    pending_lists = list[list[Commit]]()

    def list_pending(job: EvaluationJob) -> list[Commit]:
        pending_lists.append(pending_commits(job))
        return pending_lists[-1]

    monkeypatch.setattr(actor, "pending_commits", list_pending)
    monkeypatch.setattr(
        Evaluator, "_record_start", lambda self, commit=None: recorded_steps.append(commit and commit.step)
    )
    with evaluating(job):
        wait_until(lambda: len(pending_lists) > 1, "looked twice")
        assert not recorded_steps
        write_checkpoint(job, 3)
        wait_until(lambda: not pending_commits(job), "evaluated")
    assert recorded_steps == [3]


@pytest.mark.parametrize(
    ("processes", "deaths"),
    [
        ([], 0),
        ([("a", -1)], 1),
        ([("a", -1), ("a", 8), ("a", 8)], 3),
        ([("a", -1), ("a", -1), ("a", -1), ("a", 8)], 2),
        ([("gone", 8), ("a", 8), ("gone", 8)], 1),
    ],
    ids=["first", "one", "three in a row", "others died before the last evaluation", "lost nodes do not count"],
)
def test_deaths_since_the_last_evaluation_are_counted(processes: list[tuple[str, int]], deaths: int) -> None:
    ended = [{"node": node, "after_step": step} for node, step in processes]
    assert count_deaths_in_a_row(ended, 8, {"a"}) == deaths
