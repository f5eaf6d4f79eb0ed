"""The evaluator without Ray: it holds what it reads for as long as it needs, and each checkpoint is evaluated once."""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ray_app.checkpoint.format import Snapshot, pack, params_digest
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.config.sections import EvaluateSection
from ray_app.data.local_readers import load_all
from ray_app.data.reader import fetch_in_process
from ray_app.errors import RunHeldError
from ray_app.evaluate import evaluator as actor
from ray_app.evaluate.evaluator import Evaluator, count_deaths_in_a_row
from ray_app.evaluate.job import EvaluationJob, pending_commits
from ray_app.runlog import journal
from ray_app.runlog.evaluations import read_evaluations
from ray_app.runlog.journal import read_events
from ray_app.runlog.lease import acquire_lease
from ray_app.storage.files import put_json
from ray_app.task import device as environment
from ray_app.task.metrics import combine, score
from tests.support.local_world import make_job, write_images


@pytest.fixture
def job(tmp_path: Path) -> EvaluationJob:
    data = write_images(tmp_path / "data", [[20, 11]])
    made = make_job(tmp_path / "run", data, logical_workers=1, batch=8)
    return EvaluationJob(EvaluateSection(batch_size=7), made.task, made.run_root, 1, made.source)


def test_runs_of_one_name_in_two_places_have_actors_of_their_own(job: EvaluationJob, tmp_path: Path) -> None:
    other = replace(job, run_root=str(tmp_path / "elsewhere" / "run"))
    assert other.paths.name == job.paths.name
    assert other.actor_name != job.actor_name == replace(job).actor_name


def commit(job: EvaluationJob, step: int) -> None:
    model = job.task.build_model().state_dict()
    snapshot = Snapshot(step, {name: tensor.clone() for name, tensor in model.items()}, {}, None)
    made = Commit(step, 1, 0, step, "cadence", "", "", 1, params_digest(snapshot.model), {}, time.time())
    CheckpointStore(job.paths).write(pack(snapshot), made)


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 30.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not in time: {what}"
        time.sleep(0.01)


@contextmanager
def following(
    job: EvaluationJob,
    before: Callable[[Commit], None] | None = None,
    when_orphaned: Callable[[str], object] | None = None,
) -> Iterator[Evaluator]:
    evaluator = Evaluator(job, fetch_in_process, before, when_orphaned)
    try:
        yield evaluator
    finally:
        evaluator.stop()


def test_what_waits_is_held_however_long_an_evaluation_takes(
    job: EvaluationJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "PIN_LIFE_S", 5.0)
    for step in (1, 2, 3):
        commit(job, step)
    go, started = threading.Event(), threading.Event()

    def slow(_: Commit) -> None:
        started.set()
        go.wait(30)

    with following(job, slow):
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
    go, started, now = threading.Event(), threading.Event(), time.time
    for step in (1, 2, 3):
        commit(job, step)

    def slow(_: Commit) -> None:
        started.set()
        go.wait(30)

    monkeypatch.setattr(actor, "time", SimpleNamespace(time=lambda: now() - 900, perf_counter=time.perf_counter))
    with following(job, slow):
        assert started.wait(30)
        [pin] = CheckpointStore(job.paths).read_pins()
        assert pin.expires_s < now() + actor.PIN_LIFE_S - 800, "its clock is right"
        assert CheckpointStore(job.paths).retain(1, []) == []
        go.set()
        wait_until(lambda: not pending_commits(job), "all evaluated")
    assert [e.step for e in read_evaluations(job.paths)] == [1, 2, 3]


def test_a_damaged_checkpoint_is_marked_and_passed_over_and_one_that_went_is_not(job: EvaluationJob) -> None:
    for step in (1, 2, 3):
        commit(job, step)
    data = bytearray((job.paths.checkpoint(1, 1) / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (job.paths.checkpoint(1, 1) / "model.safetensors").write_bytes(data)

    def remove(found: Commit) -> None:
        if found.step == 2:
            folder = job.paths.checkpoint(2, 1)
            for path in [folder / "COMMIT.json", *folder.iterdir()]:
                path.unlink(missing_ok=True)
            folder.rmdir()

    with following(job, remove):
        wait_until(lambda: not pending_commits(job), "all evaluated")
    assert [e.step for e in read_evaluations(job.paths)] == [3]
    [skipped] = read_events(job.paths, "evaluation_skipped")
    assert skipped.details["step"] == 1
    assert not job.paths.checkpoint(2, 1).exists()


def test_a_skipped_evaluation_is_recorded_later_if_the_storage_refuses_the_event(
    job: EvaluationJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Early stopping would wait for the evaluation for ever."""
    commit(job, 1)
    (job.paths.checkpoint(1, 1) / "model.safetensors").write_bytes(b"damaged")
    refusals = [OSError("503"), OSError("503")]

    def put(*arguments: Any, **options: Any) -> bool:
        if refusals:
            raise refusals.pop()
        return put_json(*arguments, **options)

    monkeypatch.setattr(journal, "put_json", put)
    with following(job):
        wait_until(lambda: bool(read_events(job.paths, "evaluation_skipped")), "recorded in the end")
    assert not refusals
    assert [event.details["step"] for event in read_events(job.paths, "evaluation_skipped")] == [1]


@pytest.mark.rest
def test_storage_that_fails_for_a_while_is_asked_again(job: EvaluationJob) -> None:
    commit(job, 1)
    calls = []

    def failing(found: Commit) -> None:
        calls.append(found.step)
        if len(calls) < 3:
            raise OSError("storage does not answer")

    with following(job, failing) as evaluator:
        wait_until(lambda: not pending_commits(job), "evaluated at last")
        assert evaluator.error() is None
    assert calls == [1, 1, 1]
    assert [e.step for e in read_evaluations(job.paths)] == [1]


def test_the_result_does_not_depend_on_the_batch_size(job: EvaluationJob) -> None:
    arrays = load_all(fetch_in_process, job.data).arrays
    model = job.task.build_model()
    cpu = actor.torch.device("cpu")
    found = [combine(job.task, score(job.task, model, arrays, size, cpu)).values for size in (1, 7, 31, 1000)]
    assert {values["accuracy"] for values in found} == {found[0]["accuracy"]}
    assert all(values["loss"] == pytest.approx(found[0]["loss"], rel=1e-5) for values in found)


def test_outputs_that_are_no_tensor_are_made_once(job: EvaluationJob) -> None:
    """Each row goes through the model once, at most `size` at a time, and what is found is that of tensors."""
    arrays = load_all(fetch_in_process, job.data).arrays
    model, cpu = job.task.build_model(), actor.torch.device("cpu")
    rows = len(arrays["label"])
    plain, seen = copy.copy(job.task), list[int]()
    named = copy.copy(job.task)

    def forward(made: Any, batch: Any) -> Any:
        seen.append(len(batch["label"]))
        return {"scores": type(plain).forward(plain, made, batch)}

    vars(named).update(
        forward=forward,
        loss=lambda outputs, batch: plain.loss(outputs["scores"], batch),
        update=lambda metrics, outputs, batch: plain.update(metrics, outputs["scores"], batch),
        mistakes=lambda outputs, batch, most: plain.mistakes(outputs["scores"], batch, most),
    )
    expected, found = (combine(plain, score(task, model, arrays, 7, cpu, chunk_rows=21)) for task in (plain, named))
    assert seen == [*[7] * (rows // 7), *([rows % 7] if rows % 7 else [])]
    assert found.values["accuracy"] == expected.values["accuracy"]
    assert found.values["loss"] == pytest.approx(expected.values["loss"], rel=1e-6)
    assert [m.row for m in found.mistakes] == [m.row for m in expected.mistakes]


@pytest.mark.parametrize(("max_pending", "evaluated"), [(1, [3]), (2, [2, 3])])
def test_only_so_many_checkpoints_wait_for_it(job: EvaluationJob, max_pending: int, evaluated: list[int]) -> None:
    for step in (1, 2, 3):
        commit(job, step)
    go, started = threading.Event(), threading.Event()

    def slow(_: Commit) -> None:
        started.set()
        go.wait(30)

    with following(replace(job, section=replace(job.section, max_pending=max_pending)), slow) as evaluator:
        assert started.wait(30)
        assert CheckpointStore(job.paths).retain(1, []) == [step for step in (1, 2, 3) if step not in evaluated]
        go.set()
        wait_until(lambda: not pending_commits(job), "all evaluated")
        assert evaluator.error() is None
    assert [e.step for e in read_evaluations(job.paths)] == evaluated


def test_how_far_it_is_behind_is_recorded(job: EvaluationJob) -> None:
    for step in (1, 2, 3):
        commit(job, step)
    with following(job):
        wait_until(lambda: not pending_commits(job), "all evaluated")
    evaluations = read_evaluations(job.paths)
    assert [e.behind for e in evaluations] == [2, 1, 0]
    committed = {c.step: c.time_s for c in CheckpointStore(job.paths).commits()}
    assert all(e.lag_s == pytest.approx(e.time_s - committed[e.step]) for e in evaluations)
    assert evaluations[0].data_digest == job.data.manifest.digest


def test_without_its_driver_it_finishes_and_has_the_run_closed(
    job: EvaluationJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "LIFE_S", 0.5)
    lease = acquire_lease(job.paths)
    commit(job, 1)
    closed: list[str] = []
    with following(replace(job, fence=lease.fence), when_orphaned=closed.append):
        wait_until(lambda: not pending_commits(job), "the first evaluation")
        assert closed == []
        commit(job, 2)
        lease.release()
        wait_until(lambda: bool(closed), "the end of the driver is noticed")
    assert [e.step for e in read_evaluations(job.paths)] == [1, 2]
    assert closed == [job.run_root]


def test_when_a_later_start_has_taken_over_it_just_ends(job: EvaluationJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "LIFE_S", 0.5)
    acquire_lease(job.paths).release()
    with acquire_lease(job.paths), following(replace(job, fence=1), when_orphaned=pytest.fail) as evaluator:
        wait_until(evaluator._stopped.is_set, "it ends")
        assert evaluator.error() is None


def test_one_that_gave_up_has_the_run_closed_all_the_same(job: EvaluationJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "LIFE_S", 0.5)
    lease = acquire_lease(job.paths)
    commit(job, 1)
    closed: list[str] = []

    def broken(_: Commit) -> None:
        raise ValueError("the metric is broken")

    with following(replace(job, fence=lease.fence), broken, closed.append) as evaluator:
        wait_until(lambda: evaluator.error() is not None, "it gives up")
        assert closed == []
        lease.release()
        wait_until(evaluator._stopped.is_set, "it ends")
    assert evaluator.error() == "ValueError: the metric is broken"
    assert closed == [job.run_root]
    assert read_evaluations(job.paths) == []


def test_a_driver_that_lives_after_all_is_followed_on(job: EvaluationJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease was overdue because the storage was away."""
    monkeypatch.setattr(actor, "LIFE_S", 0.5)
    lease = acquire_lease(job.paths)
    asked: list[str] = []

    def renewed_and_held(root: str) -> None:
        asked.append(root)
        if len(asked) == 1:
            put_json(job.paths.fence(lease.fence), asdict(lease._record))
            raise RunHeldError("its driver lives")

    with following(replace(job, fence=lease.fence), when_orphaned=renewed_and_held) as evaluator:
        gone = replace(lease._record, holder=replace(lease._record.holder, pid_ticks=-1))
        put_json(job.paths.fence(lease.fence), asdict(gone))
        wait_until(lambda: bool(asked), "it seems to be gone")
        wait_until(lambda: evaluator._driver == "held", "it is seen to live")
        commit(job, 1)
        wait_until(lambda: not pending_commits(job), "what comes then is evaluated")
        assert evaluator.error() is None
        lease.release()
        wait_until(evaluator._stopped.is_set, "it ends with the driver")
    assert len(asked) == 2


def test_storage_that_is_away_at_the_end_is_asked_again(job: EvaluationJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "LIFE_S", 0.5)
    acquire_lease(job.paths).release()
    answers = iter([OSError("away"), None])

    def close(_: str) -> None:
        if (error := next(answers)) is not None:
            raise error

    with following(job, when_orphaned=close) as evaluator:
        wait_until(evaluator._stopped.is_set, "it ends")
    assert next(answers, "all used") == "all used"


def test_what_is_left_is_evaluated_also_if_somebody_else_has_closed_the_run(
    job: EvaluationJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor, "LIFE_S", 0.5)
    acquire_lease(job.paths).release()
    for step in (1, 2, 3):
        commit(job, step)
    seen: list[str] = []

    def meanwhile(found: Commit) -> None:
        if found.step == 1:
            acquire_lease(job.paths, closing=True).release()  # as `ray-app track --replay` does
        else:
            wait_until(lambda: evaluator._driver != "held", "the end of the driver is seen")

    evaluator = Evaluator(job, fetch_in_process, meanwhile, seen.append)
    wait_until(evaluator._stopped.is_set, "it ends")
    evaluator.stop()
    assert [e.step for e in read_evaluations(job.paths)] == [1, 2, 3]
    assert seen == [job.run_root]


@pytest.mark.parametrize(("exact", "num_cpus", "threads"), [(True, 0.5, 1), (False, 2.0, 2)])
def test_it_computes_as_the_workers_do(job: EvaluationJob, exact: bool, num_cpus: float, threads: int) -> None:
    section = replace(job.section, num_cpus=num_cpus)
    with following(dataclasses.replace(job, deterministic=exact, section=section)):
        assert torch.are_deterministic_algorithms_enabled() is exact
        assert torch.get_num_threads() == threads


def test_the_device_is_current_where_the_model_is_made_and_where_it_evaluates(
    job: EvaluationJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current GPU belongs to a thread, and a new thread begins with the first one."""
    threads = list[str]()
    monkeypatch.setattr(environment, "use_device", lambda device: threads.append(threading.current_thread().name))
    commit(job, 1)
    with following(job):
        wait_until(lambda: not pending_commits(job), "evaluated")
    assert threads == [threading.current_thread().name, "_follow"]


def test_only_a_process_that_has_something_to_evaluate_counts(
    job: EvaluationJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is killed again and again while it waits would otherwise be given up for a checkpoint that it
    never saw.
    """
    noted, looks = list[int](), list[list[Commit]]()

    def look(job: EvaluationJob) -> list[Commit]:
        looks.append(pending_commits(job))
        return looks[-1]

    monkeypatch.setattr(actor, "pending_commits", look)
    monkeypatch.setattr(Evaluator, "_record_start", lambda self, commit=None: noted.append(commit and commit.step))
    with following(job):
        wait_until(lambda: len(looks) > 1, "looked twice")
        assert not noted
        commit(job, 3)
        wait_until(lambda: not pending_commits(job), "evaluated")
    assert noted == [3]


@pytest.mark.parametrize(
    ("lives", "deaths"),
    [
        ([], 0),
        ([("a", -1)], 1),
        ([("a", -1), ("a", 8), ("a", 8)], 3),
        ([("a", -1), ("a", -1), ("a", -1), ("a", 8)], 2),
        ([("gone", 8), ("a", 8), ("gone", 8)], 1),
    ],
    ids=["first", "one", "the one that evaluated died of the next", "others died before it", "lost nodes do not count"],
)
def test_processes_count_that_died_since_the_last_evaluation(lives: list[tuple[str, int]], deaths: int) -> None:
    ended = [{"node": node, "after_step": step} for node, step in lives]
    assert count_deaths_in_a_row(ended, 8, {"a"}) == deaths
