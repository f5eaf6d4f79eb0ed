"""The training loop over several generations: due checkpoints, snapshots and recoveries, in one process with
real files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_app.checkpoint import store as store_module
from ray_app.checkpoint.format import Snapshot
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.errors import CheckpointError, PeerLostError, PreemptedError
from ray_app.reduction.world import World
from ray_app.retry import Retry
from ray_app.runlog.evaluations import Evaluation, Verdict, put_evaluation
from ray_app.runlog.history import recoveries
from ray_app.runlog.journal import StepRecord, put_event, read_events, read_records
from ray_app.storage.files import Location, list_tree
from ray_app.testing import KilledError, cache_windows
from ray_app.train.checkpointing import persistence as writer_module
from ray_app.train.checkpointing.persistence import SnapshotSender
from ray_app.train.context import WorkerContext
from ray_app.train.job import Hooks, Job
from ray_app.train.loop import MAX_BROKEN_GENERATIONS, train
from ray_app.train.membership import DrainedError, Flags, GenerationInfo, Phase, SingleProcessMembership
from ray_app.train.state.state import NO_STATE
from tests.support.local_world import TinyImages, make_job, write_images

CPU = torch.device("cpu")


class Regrouping(SingleProcessMembership):
    """The membership of one worker; each `PeerLostError` of a hook breaks its generation."""

    recovers = True

    def __init__(self) -> None:
        super().__init__(4, lambda: False)
        self.generations = 0
        self.phases: list[Phase] = []

    @contextmanager
    def generation(self, step: int, was_broken: bool) -> Iterator[tuple[World, GenerationInfo]]:
        del step, was_broken
        self.generations += 1
        yield World(0, 1, 4), GenerationInfo(self.generations, 0, 1, "", 0)

    def enter(self, phase: Phase) -> None:
        self.phases.append(phase)


class MemorySender(SnapshotSender):
    """Keeps the newest snapshot in this process, as snapshot actors do; it arrives once the worker waits for it."""

    def __init__(self) -> None:
        super().__init__([])
        self.newest_snapshot: tuple[Snapshot, list[StepRecord]] | None = None
        self.sent_snapshot: tuple[Snapshot, list[StepRecord]] | None = None

    def send(self, take: Callable[[], Snapshot], records: list[StepRecord]) -> None:
        self.wait()
        snapshot = take()
        model = {name: values.clone() for name, values in snapshot.model.items()}
        self.sent_snapshot = Snapshot(**vars(snapshot) | {"model": model}), records

    def wait(self) -> None:
        self.newest_snapshot = self.sent_snapshot

    def newest(self) -> tuple[Snapshot, list[StepRecord]] | None:
        return self.newest_snapshot


@pytest.fixture
def new_job(tmp_path: Path) -> Callable[..., Job]:
    data = write_images(tmp_path / "data", [[50, 1], [45]])

    def make(name: str = "run", **fields: Any) -> Job:
        (tmp_path / name).mkdir()
        cadence = {"checkpoint__every_steps": 4, "checkpoint__every_epochs": None, "train__epochs": 1}
        return make_job(tmp_path / name, data, logical_workers=4, batch=12, task=TinyImages(), **(cadence | fields))

    return make


class DrainedMembership(SingleProcessMembership):
    """The membership of a new worker that gets a preemption notice while it waits for its first generation."""

    def __init__(self) -> None:
        super().__init__(4, lambda: False)

    def generation(self, step: int, was_broken: bool) -> Any:
        del step, was_broken
        raise DrainedError

    def is_draining(self) -> bool:
        return True


def train_alone(job: Job, hooks: Hooks = Hooks(), sender: SnapshotSender | None = None) -> bool:
    membership = SingleProcessMembership(4, lambda: False)
    return train(WorkerContext(job, membership, cache_windows, CPU, hooks, sender))


def committed_steps(job: Job) -> list[int]:
    return [commit.step for commit in CheckpointStore(job.paths).commits()]


@pytest.mark.parametrize("strategy", ["ddp", "central_storage"])
def test_a_joining_worker_that_leaves_before_its_first_step_writes_no_checkpoint(
    new_job: Callable[..., Job], strategy: str
) -> None:
    job = new_job(train__strategy=strategy)
    with pytest.raises(PreemptedError):
        train(WorkerContext(job, DrainedMembership(), cache_windows, CPU, Hooks()))
    assert list_tree(job.paths.root) == {}


def test_checkpoints_are_written_by_steps_and_by_epochs(new_job: Callable[..., Job]) -> None:
    """An epoch has 8 steps."""
    job = new_job(checkpoint__every_steps=5, checkpoint__every_epochs=1, checkpoint__keep_last=9, train__epochs=2)
    train_alone(job)
    assert committed_steps(job) == job.planned_evaluations(16) == [5, 8, 10, 15, 16]
    branch = dataclasses.replace(job, config=job.config.replace(run__branch_point="8-sha"))
    assert branch.planned_evaluations(16) == [8, 10, 15, 16], "the other run has evaluated the steps before"


class Outage:
    """Lists the checkpoints, or raises during an outage of the storage."""

    def __init__(self) -> None:
        self.is_on, self.num_refused = False, 0

    def __call__(self, *args: Any, **options: Any) -> dict[str, Location]:
        if self.is_on:
            self.num_refused += 1
            raise OSError("503 Slow Down")
        return list_tree(*args, **options)


@pytest.fixture
def outage(monkeypatch: pytest.MonkeyPatch) -> Outage:
    outage = Outage()
    monkeypatch.setattr(store_module, "list_tree", outage)
    return outage


def test_a_due_checkpoint_is_written_after_a_restore_from_a_snapshot(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers are lost after the last step, before its checkpoint is committed."""
    undisturbed = new_job("undisturbed")
    train_alone(undisturbed)
    job, memory = new_job(checkpoint__snapshot_every_steps=2), MemorySender()
    monkeypatch.setattr(writer_module, "_RETRY", Retry(0.5, attempts=1))

    def die(commit: Any) -> None:
        if commit.step == job.total_steps:
            raise KilledError

    with pytest.raises(CheckpointError):
        train_alone(job, Hooks(before_commit=die), memory)
    assert committed_steps(job) == [4]
    assert memory.newest_snapshot is not None
    assert memory.newest_snapshot[0].step == job.total_steps == 8
    train_alone(job, Hooks(), memory)
    assert committed_steps(job) == [4, 8]
    digests = [CheckpointStore(run.paths).commits()[-1].params_digest for run in (job, undisturbed)]
    assert digests[0] == digests[1]


def test_a_generation_forms_while_the_storage_does_not_answer(new_job: Callable[..., Job], outage: Outage) -> None:
    job, membership = new_job(), Regrouping()

    def after_step(rank: int, step: int) -> None:
        if (rank, step) == (0, 6) and membership.generations == 1:
            outage.is_on = True
            raise PeerLostError("lost")
        if step == 7:
            outage.is_on = False

    train(WorkerContext(job, membership, cache_windows, CPU, Hooks(after_step=after_step)))
    assert membership.generations == 2
    assert outage.num_refused
    assert committed_steps(job) == [4, 8]


def test_a_run_resumes_from_a_snapshot_where_no_checkpoint_can_be_read(
    new_job: Callable[..., Job], outage: Outage
) -> None:
    job, memory = new_job(checkpoint__snapshot_every_steps=2), MemorySender()

    def die(rank: int, step: int) -> None:
        if (rank, step) == (0, 6):
            raise KilledError

    with pytest.raises(KilledError):
        train_alone(job, Hooks(after_step=die), memory)
    outage.is_on = True

    def end_outage(rank: int, step: int) -> None:
        if (rank, step) == (0, 7):
            outage.is_on = False

    with pytest.raises(OSError, match="503"):
        train_alone(job, Hooks(), MemorySender())
    train_alone(job, Hooks(after_step=end_outage), memory)
    assert [(e.details["step"], e.details["source"]) for e in read_events(job.paths, "resumed")] == [(6, "snapshot")]
    assert committed_steps(job) == [4, 8]


def test_a_checkpoint_that_is_older_than_the_snapshot_is_not_read(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a checkpoint of some gigabytes takes a while; a newer checkpoint is read."""
    job, memory = new_job(checkpoint__snapshot_every_steps=2, checkpoint__every_steps=3), MemorySender()

    def die_after(step: int) -> Hooks:
        def die(rank: int, done: int) -> None:
            if (rank, done) == (0, step):
                raise KilledError

        return Hooks(after_step=die)

    steps_loaded: list[int] = []

    def load(store: CheckpointStore, commit: Commit) -> dict[str, bytes]:
        steps_loaded.append(commit.step)
        return original_load(store, commit)

    original_load = CheckpointStore.load
    monkeypatch.setattr(CheckpointStore, "load", load)
    for step in (5, 7):
        with pytest.raises(KilledError):
            train_alone(job, die_after(step), memory)
    memory.newest_snapshot = (
        None
        if memory.newest_snapshot is None
        else (dataclasses.replace(memory.newest_snapshot[0], step=5), memory.newest_snapshot[1])
    )
    train_alone(job, Hooks(), memory)
    assert [(e.details["step"], e.details["source"]) for e in read_events(job.paths, "resumed")] == [
        (4, "snapshot"),
        (6, "checkpoint"),
    ]
    assert steps_loaded == [6]


def test_each_loss_has_its_own_recovery(new_job: Callable[..., Job]) -> None:
    """This holds although no generation has ended in order between the losses."""
    job, membership = new_job(), Regrouping()
    steps_to_lose, reported = [3, 6], set[tuple[int, int]]()

    def lose(rank: int, step: int) -> None:
        if rank == 0 and step in steps_to_lose:
            steps_to_lose.remove(step)
            raise PeerLostError("lost")

    def note_record(phase: str, rank: int, step: int) -> None:
        reported.add((step, membership.newest.step if membership.newest is not None else 0))

    train(WorkerContext(job, membership, cache_windows, CPU, Hooks(after_step=lose, at=note_record)))
    steps = {(step, step) for step in range(1 + job.total_steps)}
    assert reported == {(NO_STATE, 0)} | steps, "the newest record is that of the last step in every phase"
    formed = [event.details["lost_s"] for event in read_events(job.paths, "formed")[1:]]
    records, _ = read_records(job.paths)
    assert records[6].time_s <= formed[1], "the second recovery begins at the time of the first loss"
    assert formed[0] < records[6].time_s
    assert len(recoveries(read_events(job.paths), list(records.values()))) == 2


def test_a_worker_that_waits_for_the_storage_enters_the_phase_saving(new_job: Callable[..., Job]) -> None:
    job, membership = new_job(), Regrouping()
    train(WorkerContext(job, membership, cache_windows, CPU, Hooks()))
    waits = [i for i, phase in enumerate(membership.phases) if phase == "saving"]
    assert len(waits) == 3, "expected a wait before each of the two checkpoints, and one for the last one"
    assert all(membership.phases[i + 1] != "saving" for i in waits)
    assert membership.phases[-1] == "done"
    assert membership.phases.count("compute") == job.total_steps


def test_early_stopping_works_although_a_checkpoint_could_not_be_written(
    new_job: Callable[..., Job],
) -> None:
    job = new_job(evaluate__patience=1, checkpoint__every_steps=2, data__eval_path="somewhere")
    for step, value in ((2, 0.9), (6, 0.5)):
        metrics = {job.best_metric: value}
        put_evaluation(
            job.paths, Evaluation(step, epoch=0, params_digest="", metrics=metrics, rows=1, duration_s=0.0, time_s=0.0)
        )
    assert job.early_stop() is None
    put_event(job.paths, "write_failed", 1, step=4, attempts=6, reason="503")
    assert job.early_stop() == Verdict(6, 2)


class Draining(SingleProcessMembership):
    """The membership of a worker on a draining node, with a request to reform after a step.

    Args:
        reform_after: The step; None if the run ends before the notice takes effect.
    """

    def __init__(self, reform_after: int | None = None) -> None:
        super().__init__(4, lambda: False)
        self.reform_after, self.steps = reform_after, 0

    def flags(self) -> Flags:
        self.steps += 1
        return Flags.REFORM if self.steps == self.reform_after else Flags(0)

    def is_draining(self) -> bool:
        return True


def test_train_returns_whether_the_run_is_over(new_job: Callable[..., Job]) -> None:
    assert train(WorkerContext(new_job(), Draining(), cache_windows, CPU, Hooks())) is True
    assert train(WorkerContext(new_job("left"), Draining(3), cache_windows, CPU, Hooks())) is False


def test_a_preempted_worker_reports_that_its_last_checkpoint_failed(
    new_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_RETRY", Retry(0.001, attempts=6))
    job = new_job()

    def refuse(commit: Commit) -> None:
        if commit.step == job.total_steps:
            raise OSError("503 Slow Down")

    with pytest.raises(CheckpointError, match="503 Slow Down"):
        train(WorkerContext(job, Draining(), cache_windows, CPU, Hooks(before_commit=refuse)))


def test_generations_that_break_within_a_local_sgd_round_end_the_run(
    new_job: Callable[..., Job],
) -> None:
    """With local SGD, each generation begins at the start of the round again."""
    job, membership = new_job(train__strategy="local_sgd", train__local_steps=4), Regrouping()

    def break_generation(rank: int, step: int) -> None:
        assert membership.generations < 10 * MAX_BROKEN_GENERATIONS
        if step == 5 + membership.generations % 2:
            raise PeerLostError("lost")

    with pytest.raises(PeerLostError):
        train(WorkerContext(job, membership, cache_windows, CPU, Hooks(after_step=break_generation)))
    assert membership.generations <= 1 + MAX_BROKEN_GENERATIONS
