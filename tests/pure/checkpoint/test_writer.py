"""The checkpoint writer retries failed writes, and metrics, events and evaluations are read as they were written."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_app.checkpoint import store as store_module
from ray_app.checkpoint.format import TRAINING, Snapshot, file_writers, params_digest
from ray_app.checkpoint.retention import Pin
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.config.sections import CheckpointSection
from ray_app.errors import CheckpointError
from ray_app.reduction.world import World
from ray_app.retry import Retry
from ray_app.runlog import journal
from ray_app.runlog.evaluations import Evaluation, put_evaluation, read_evaluations, read_scores
from ray_app.runlog.journal import MetricsWriter, RecordReader, StepRecord, put_event, read_events, read_records
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import put_atomic
from ray_app.testing import DieAfter, KilledError, TrainedRun, cache_windows, read_trained_run
from ray_app.train.checkpointing import persistence as writer_module
from ray_app.train.checkpointing.persistence import CheckpointWriter
from ray_app.train.context import WorkerContext
from ray_app.train.job import Hooks, Job
from ray_app.train.loop import train
from tests.support.checkpoints import DAMAGES, commit_of, snapshot_of
from tests.support.local_world import CPU, LocalMembership, make_job, write_images


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path / "run")


# --- the checkpoint writer: a failed write is retried and never stops training


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_RETRY", Retry(0.001, attempts=6))


class FailingDisk:
    """A `before_commit` hook that fails the first writes of some steps.

    Args:
        num_failures: Number of writes that fail, by step; -1: all of them.
    """

    def __init__(self, num_failures: dict[int, int]) -> None:
        self.failures_left, self.raised = dict(num_failures), 0

    def __call__(self, commit: Commit) -> None:
        if self.failures_left.get(commit.step, 0):
            self.failures_left[commit.step] -= 1
            self.raised += 1
            raise OSError("disk full")


@pytest.mark.usefixtures("short_pauses")
def test_a_failed_checkpoint_write_is_retried(paths: RunPaths) -> None:
    disk = FailingDisk({1: 3})
    writer = CheckpointWriter(paths, CheckpointSection(), list, disk)
    writer.save(lambda: snapshot_of(1), commit_of(1))
    writer.wait_for_commit()
    assert disk.raised == 3
    [commit] = CheckpointStore(paths).commits()
    assert commit.params_digest == params_digest(snapshot_of(1).model)
    assert [e.kind for e in read_events(paths)] == ["checkpointed", "write_retried"]
    assert read_events(paths)[1].details == {"step": 1, "attempts": 4, "reason": "OSError: disk full"}


@pytest.mark.usefixtures("short_pauses")
def test_a_damaged_pin_fails_no_checkpoint_write(paths: RunPaths) -> None:
    put_atomic(paths.pins / "eval.json", b"{")
    writer = CheckpointWriter(paths, CheckpointSection(), list)
    for step in (1, 2, 3):
        writer.save(lambda step=step: snapshot_of(step), commit_of(step))
    writer.wait_for_commit()
    assert [c.step for c in CheckpointStore(paths).commits()] == [1, 2, 3], (
        "a checkpoint was removed while a pin is unreadable"
    )
    assert [e.kind for e in read_events(paths)] == ["checkpointed"] * 3


def test_the_checkpoint_writer_waits_for_the_previous_write(paths: RunPaths) -> None:
    may_write = threading.Event()
    could_write: list[bool] = []

    def slow(commit: Commit) -> None:
        assert may_write.wait(10), commit

    def take_snapshot() -> Snapshot:
        could_write.append(may_write.is_set())
        return snapshot_of(len(could_write))

    writer = CheckpointWriter(paths, CheckpointSection(), list, slow)
    writer.save(take_snapshot, commit_of(1))
    assert CheckpointStore(paths).commits() == [], "the step waited for the write"
    threading.Timer(0.05, may_write.set).start()
    writer.save(take_snapshot, commit_of(2))
    writer.wait_for_commit()
    assert could_write == [False, True]
    assert [c.step for c in CheckpointStore(paths).commits()] == [1, 2]


def run_alone(job: Job, **hooks: Any) -> TrainedRun:
    train(WorkerContext(job, LocalMembership(World(0, 1, 2), Path()), cache_windows, CPU, Hooks(**hooks)))
    return read_trained_run(job)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    data = write_images(tmp_path / "data", [[20, 3]])
    return make_job(
        tmp_path / "run", data, logical_workers=2, batch=4, checkpoint__every_steps=1, checkpoint__keep_last=10
    )


@pytest.mark.usefixtures("short_pauses")
def test_a_full_disk_does_not_stop_training(job: Job) -> None:
    expected = run_alone(replace(job, run_root=f"{job.run_root}-undisturbed"))
    disk = FailingDisk({1: 2, 2: -1, 6: 5})
    run = run_alone(job, before_commit=disk)
    assert (run.digests, run.steps) == (expected.digests, expected.steps)
    assert [c.step for c in CheckpointStore(job.paths).commits()] == [1, 3, 4, 5, 6]
    [failed] = read_events(job.paths, "write_failed")
    assert failed.details == {"step": 2, "attempts": 6, "reason": "OSError: disk full"}
    assert [e.details["step"] for e in read_events(job.paths, "write_retried")] == [1, 6]
    assert disk.raised == 2 + 6 + 5


@pytest.mark.usefixtures("short_pauses")
def test_a_last_checkpoint_that_cannot_be_written_is_an_error(job: Job) -> None:
    with pytest.raises(CheckpointError, match="disk full"):
        run_alone(job, before_commit=FailingDisk({6: -1}))
    assert len(read_trained_run(job).steps) == 6, "not all steps were done"
    assert read_trained_run(job).commit.step == 5
    assert run_alone(job).commit.step == 6, "the second start does not continue"


@pytest.mark.parametrize("damage", ["model flipped", "training missing", "commit cut"])
@pytest.mark.parametrize("new_fence", [False, True])
def test_a_run_that_falls_back_ends_with_bit_identical_parameters(job: Job, damage: str, new_fence: bool) -> None:
    expected = run_alone(replace(job, run_root=f"{job.run_root}-undisturbed"))
    with pytest.raises(KilledError):
        run_alone(job, after_step=DieAfter(4))
    DAMAGES[damage][0](job.paths.checkpoint(4, 1))
    run = run_alone(replace(job, fence=1 + new_fence))
    assert (run.digests, run.steps) == (expected.digests, expected.steps)
    [fallback] = read_events(job.paths, "fallback")
    assert fallback.details["checkpoint"] == "step-00000004-0001"
    assert DAMAGES[damage][1] in fallback.details["reason"]
    assert [e.details["step"] for e in read_events(job.paths, "resumed")] == [3]
    assert [len(w) for w in run.workers] == [1, 1, 1, 2, 1, 1], "not only the lost step was repeated"
    assert [c.step for c in CheckpointStore(job.paths).commits()] == [1, 2, 3, 4, 5, 6]


# --- metrics and events


def record_of(step: int, loss: float = 0.5, generation: str = "1.1") -> StepRecord:
    return StepRecord(step, 0, 1e9 + step, loss, 0.1, 2.5, 1.0, 0.5, 2, [3, 4], [2**64 - 1, 0], generation)


def test_metrics_are_read_back_and_a_repeated_step_counts_once(paths: RunPaths) -> None:
    reader = RecordReader(paths)
    assert list(reader.first_records()) == []
    first = MetricsWriter(paths, fence=1, flush_s=60)
    for step in (1, 2):
        first.add(record_of(step))
    assert list(reader.first_records()) == []
    first.flush()
    assert list(reader.first_records()) == [record_of(1), record_of(2)]
    first.add(record_of(3))
    first.close()
    again = MetricsWriter(paths, fence=2, flush_s=60)
    for step in (2, 3, 4):
        again.add(record_of(step, loss=0.75, generation="2.1"))
    again.close()
    assert list(reader.first_records()) == [record_of(3), record_of(4, loss=0.75, generation="2.1")]
    third = MetricsWriter(paths, fence=2, flush_s=60)
    # This is another rank's record of the same execution.
    third.add(record_of(4, loss=0.5, generation="2.1"))
    third.close()
    assert list(reader.first_records()) == []
    assert read_records(paths) == (
        {s: record_of(s) for s in (1, 2, 3)} | {4: record_of(4, loss=0.75, generation="2.1")},
        [record_of(2, loss=0.75, generation="2.1"), record_of(3, loss=0.75, generation="2.1")],
    )


def test_metrics_that_could_not_be_written_are_written_later(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    writer, reader = MetricsWriter(paths, fence=1, flush_s=60), RecordReader(paths)
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        writer.add(record_of(1))
        with pytest.raises(OSError, match="disk full"):
            writer.flush()
        # An event that cannot be written is not an error either.
        put_event(paths, "failed", 1)
    assert list(reader.first_records()) == []
    writer.add(record_of(2))
    writer.close()
    assert list(reader.first_records()) == [record_of(1), record_of(2)]
    assert read_events(paths) == []


def test_the_metrics_writer_flushes_after_its_interval(paths: RunPaths) -> None:
    writer, reader = MetricsWriter(paths, fence=1, flush_s=0.01), RecordReader(paths)
    writer.add(record_of(1))
    deadline_s = time.monotonic() + 10
    while not list(reader.first_records()):
        assert time.monotonic() < deadline_s, "the writer has flushed nothing within 10 s"
    writer.close()
    assert read_records(paths)[0] == {1: record_of(1)}


def test_events_are_read_back_in_order(paths: RunPaths) -> None:
    for i, kind in enumerate(("started", "checkpointed", "resumed", "checkpointed")):
        put_event(paths, kind, fence=i, step=10 * i)
    assert [(e.kind, e.fence, e.details) for e in read_events(paths)] == [
        ("started", 0, {"step": 0}), ("checkpointed", 1, {"step": 10}), ("resumed", 2, {"step": 20}), ("checkpointed", 3, {"step": 30}),  # noqa: E501
    ]  # fmt: skip
    assert [e.details["step"] for e in read_events(paths, "checkpointed", "started")] == [0, 10, 30]


def test_a_checkpoint_evaluated_during_retention_is_kept(paths: RunPaths) -> None:
    """The evaluation ends after retention has read the best checkpoints and before it reads the pins."""
    store = CheckpointStore(paths)
    store.put_pin("evaluator", Pin(1, time.time() + 1000))

    def best_then_evaluated() -> list[int]:
        store.put_pin("evaluator", Pin(2, time.time() + 1000))
        return []

    writer = CheckpointWriter(paths, CheckpointSection(keep_last=1), best_then_evaluated)
    for step in (1, 2, 3):
        store.put_pin("evaluator", Pin(1, time.time() + 1000))
        writer.save(lambda step=step: snapshot_of(step), commit_of(step))
        writer.wait()
    assert [c.step for c in store.commits()] == [2, 3]
    assert read_events(paths, "evaluation_skipped") == []


def test_checkpoints_that_exceed_the_pin_of_a_slow_evaluator_are_recorded_as_skipped(paths: RunPaths) -> None:
    store = CheckpointStore(paths)
    store.put_pin("evaluator", Pin(2, time.time() + 1000))
    writer = CheckpointWriter(paths, CheckpointSection(keep_last=2), lambda: [])
    for step in range(1, Pin.max_checkpoints + 6):
        writer.save(lambda step=step: snapshot_of(step), commit_of(step))
    writer.wait_for_commit()
    assert [c.step for c in store.commits()] == list(range(6, Pin.max_checkpoints + 6))
    assert [e.details["step"] for e in read_events(paths, "evaluation_skipped")] == [3, 4, 5]


def test_skipped_evaluations_are_recorded_before_the_checkpoints_are_removed(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_remove(folder: Path) -> None:
        assert [e.details["step"] for e in read_events(paths, "evaluation_skipped")] == [3], (
            "the event would be lost if this process ended now"
        )
        monkeypatch.undo()
        raise OSError(f"503 {folder}")

    store = CheckpointStore(paths)
    store.put_pin("evaluator", Pin(2, time.time() + 1000, max_checkpoints=1))
    writer = CheckpointWriter(paths, CheckpointSection(keep_last=2), lambda: [])
    for step in range(3, 5):
        writer.save(lambda step=step: snapshot_of(step), commit_of(step))
    writer.wait()
    monkeypatch.setattr(store_module, "remove_tree", fail_to_remove)
    for step in range(5, 7):
        writer.save(lambda step=step: snapshot_of(step), commit_of(step))
    writer.wait_for_commit()
    assert [c.step for c in store.commits()] == [5, 6]
    assert [e.details["step"] for e in read_events(paths, "evaluation_skipped")] == [3, 4]


def test_skipped_evaluations_are_recorded_later_if_the_storage_refuses_the_event(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(paths: RunPaths, kind: str, fence: int, **details: Any) -> bool:
        return kind != "evaluation_skipped" and put_event(paths, kind, fence, **details)

    CheckpointStore(paths).put_pin("evaluator", Pin(0, time.time() + 1000, max_checkpoints=1))
    writer = CheckpointWriter(paths, CheckpointSection(keep_last=1), lambda: [])
    with monkeypatch.context() as outage:
        outage.setattr(journal, "put_event", refuse)
        for step in (1, 2):
            writer.save(lambda step=step: snapshot_of(step), commit_of(step))
        writer.wait()
    assert read_events(paths, "evaluation_skipped") == []
    writer.save(lambda: snapshot_of(3), commit_of(3))
    writer.wait_for_commit()
    assert [e.details["step"] for e in read_events(paths, "evaluation_skipped")] == [1, 2]


def test_checkpoints_deleted_before_an_evaluator_starts_are_recorded_as_skipped(
    paths: RunPaths,
) -> None:
    store = CheckpointStore(paths)
    # This evaluator has waited for longer than its pin lasts; step 2 was its last evaluation.
    store.put_pin("evaluator", Pin(1, time.time() - 1))
    put_evaluation(paths, Evaluation(2, 0, "", {}, 1, 0.1, 0.0))
    store.put_pin("evaluator-august-attached", Pin(3, time.time() + 1000, max_checkpoints=1, evaluator="august"))
    store.put_pin("evaluator-gone-attached", Pin(-1, time.time() - 1, evaluator="gone"))
    writer = CheckpointWriter(paths, CheckpointSection(keep_last=1), lambda: [])
    for step in range(1, 6):
        writer.save(lambda step=step: snapshot_of(step), commit_of(step))
    writer.wait_for_commit()
    assert [c.step for c in store.commits()] == [5]
    skipped = [(e.details["step"], e.details.get("by")) for e in read_events(paths, "evaluation_skipped")]
    assert set(skipped) == {(3, None), (4, None), (4, "august")}
    assert len(skipped) == 3


def test_an_evaluation_is_read_once_and_an_unreadable_one_is_skipped(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files_read: list[str] = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: files_read.append(path.name) or real(path))
    for step in (8, 16, 24, 32):
        put_evaluation(
            paths, Evaluation(step, 0, "", {"accuracy": 0.5}, 10, 0.1, 0.0, examples=[{"image": "x" * 1000}])
        )
    newer = json.loads(paths.evaluation(16).read_text())
    assert newer["schema_version"] == 2
    paths.evaluation(16).write_text(json.dumps(newer | {"schema_version": 3, "of_a_later_version": [1]}))
    paths.evaluation(24).write_text("{")
    paths.evaluation(32).write_text('{"step": 32}')
    for _ in range(3):
        assert [e.step for e in read_scores(paths)] == [8, 16]
    assert sorted(files_read) == [paths.evaluation(step).name for step in (8, 16, 24, 32)]
    assert len(caplog.records) == 2
    assert read_scores(paths)[0].examples == []
    assert read_evaluations(paths)[0].examples
    paths.evaluation(8).unlink()
    put_evaluation(paths, Evaluation(8, 0, "", {"accuracy": 0.75}, 10, 0.1, 0.0))
    assert read_scores(paths)[0].metrics == {"accuracy": 0.75}


def test_metrics_and_events_of_other_versions_are_read(paths: RunPaths) -> None:
    put_event(paths, "started", 1, step=1)
    [file] = paths.events.iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema_version": 3, "more": 1}))
    assert [event.kind for event in read_events(paths)] == ["started"]
    record = StepRecord(1, 0, 1.0, 0.5, 0.1, 1.0, 1.0, 1.0, 1, [1], [1], "1.1")
    columns = {name: [value] for name, value in asdict(record).items() if name != "skipped"}
    for fence, more in ((1, {}), (2, {"more": [1], "schema_version": 3})):
        put_atomic(
            paths.metrics / f"{fence:010d}-{fence:04d}-{fence}.json",
            json.dumps(columns | more | {"step": [fence]}).encode(),
        )
    reader = RecordReader(paths)
    assert list(reader.first_records()) == [record, replace(record, step=2)]


class BlockingFile(io.BytesIO):
    """A file that blocks in its first write until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.write_started = threading.Event()
        self.may_write = threading.Event()

    def write(self, data: Any) -> int:
        self.write_started.set()
        assert self.may_write.wait(20)
        return super().write(data)


def test_two_concurrent_checkpoint_writes_restore_the_options_of_torch() -> None:
    """Each write changes an option of torch, which torch 2.15 keeps per thread."""
    content = file_writers(Snapshot(1, {}, {"state": {0: torch.ones(9)}}, None))[TRAINING]
    assert callable(content)
    files = [BlockingFile(), BlockingFile()]
    threads = [threading.Thread(target=content, args=(file,)) for file in files]
    for thread, file in zip(threads, files, strict=True):
        thread.start()
        assert file.write_started.wait(20)
    files[0].may_write.set()
    threads[0].join()
    assert torch.serialization.get_crc32_options(), (
        "the option is not restored while the other file is still being written"
    )
    files[1].may_write.set()
    threads[1].join()
    assert torch.serialization.get_crc32_options()
    assert files[0].getvalue() == files[1].getvalue()
