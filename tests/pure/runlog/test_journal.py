"""Segments of metrics: joining loses nothing and doubles nothing, wherever it is stopped; files and memory do not grow
with the steps.
"""

from __future__ import annotations

import json
import os
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ray_app.config.sections import EvaluateSection
from ray_app.errors import ConfigError
from ray_app.runlog import journal
from ray_app.runlog import journal as segments
from ray_app.runlog.evaluations import Evaluation, early_stop, put_evaluation
from ray_app.runlog.history import means
from ray_app.runlog.journal import (
    MAX_SMALL_FILES,
    MetricsReader,
    MetricsWriter,
    PendingEvents,
    RecordReader,
    StepRecord,
    join_segments,
    list_segments,
    newest_record,
    put_segment,
    read_events,
)
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.step_records import read_steps
from ray_app.task.base import STEP_METRICS
from ray_app.track.mlflow_client import RUN_EVALUATOR, Backlog, Point, SentState, make_evaluation_point, make_step_point
from tests.support.waiting import until


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a thousand files; no power fails here
    return RunPaths(tmp_path / "run")


def record_of(step: int, generation: str = "1.1", logical_workers: int = 2) -> StepRecord:
    rows, hashes = [3 + step % 2] * logical_workers, [2**63 + 977 * step + v for v in range(logical_workers)]
    return StepRecord(step, step // 50, 1e9 + step, 1 / step, 0.1, 1.0, 1.0, 0.5, 2, rows, hashes, generation)


def written(paths: RunPaths, last: int = 100) -> None:
    """A segment per step; after every 30th step the last five are lost and done again, and a new rank 0 writes these
    once more.
    """
    generation, step = 1, 0
    while step < last:
        step += 1
        put_segment(paths, 1, [record_of(step, f"1.{generation}")])
        if step % 30 == 0 and generation <= step // 30:
            generation, step = generation + 1, step - 5
            again = [record_of(done, f"1.{generation}") for done in range(step + 1, step + 6)]
            put_segment(paths, 1, again)
            put_segment(paths, 1, again)  # by a new rank 0
            step += 5


def seen(paths: RunPaths) -> tuple[dict[int, StepRecord], list[StepRecord], StepRecord | None]:
    reader = MetricsReader(paths)
    reader.poll()
    return reader.records, reader.repeated, newest_record(paths)


class Stopped(Exception):
    pass


def stopping(real: Callable[..., Any], left: list[int], after: bool) -> Callable[..., Any]:
    """Ends its process, so to speak, before or after so many effects."""

    def call(*args: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and not after:
            raise Stopped
        made = real(*args, **named)
        if left[0] == 0:
            raise Stopped
        return made

    return call


def test_joining_that_is_stopped_at_each_write_loses_and_doubles_nothing(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "MAX_SMALL_FILES", 8)
    written(paths, 35)
    whole, before = seen(paths), {name: (paths.metrics / name).read_bytes() for name in list_segments(paths)}
    assert (len(whole[0]), len(whole[1]), len({(r.step, r.generation) for r in whole[1]})) == (35, 5, 5)
    stops = 0
    for after in (False, True):
        for effect in range(1, 1000):
            for name in list_segments(paths):
                (paths.metrics / name).unlink()
            for name, data in before.items():
                (paths.metrics / name).write_bytes(data)
            left = [effect]
            with monkeypatch.context() as broken:
                broken.setattr(segments, "put_atomic", stopping(segments.put_atomic, left, after))
                broken.setattr(Path, "unlink", stopping(Path.unlink, left, after))
                try:
                    join_segments(paths, 0, 5000)
                except Stopped:
                    stops += 1
            if left[0] > 0:
                break
            assert seen(paths) == whole, effect
            join_segments(paths, 0, 5000)
            assert seen(paths) == whole, effect
    assert stops > 60
    assert len(list_segments(paths)) < 8


def test_two_join_at_once_while_others_read_and_write(paths: RunPaths) -> None:
    written(paths)
    whole, live, firsts, over = seen(paths), MetricsReader(paths), RecordReader(paths), threading.Event()
    told: list[int] = []

    def look() -> None:
        while not over.is_set():
            live.poll()
            told.extend(record.step for record in firsts.first_records())

    def merge() -> None:
        for full_bytes in (700, 3000, 20000):
            join_segments(paths, 0, full_bytes)

    threads = [threading.Thread(target=merge) for _ in range(3)]
    looking = threading.Thread(target=look)
    for thread in (*threads, looking):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    looking.join()
    look_again = MetricsReader(paths)
    look_again.poll()
    live.poll()
    told.extend(record.step for record in firsts.first_records())
    assert (look_again.records, sorted(look_again.repeated, key=repr)) == (whole[0], sorted(whole[1], key=repr))
    assert live.records.keys() == whole[0].keys()
    assert sorted(told) == sorted(whole[0]), "MLflow gets a step once"
    assert len(live.records) + len(live.repeated) == len(whole[0]) + len(whole[1])


def test_a_writer_joins_by_itself_and_leaves_alone_what_was_just_written(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(paths)
    count = len(list_segments(paths))
    assert join_segments(paths) == 0
    assert len(list_segments(paths)) == count
    monkeypatch.setattr(journal, "join_segments", partial(join_segments, min_age_s=0))
    writer = MetricsWriter(paths, 2, flush_s=0.01)
    until(lambda: len(list_segments(paths)) < MAX_SMALL_FILES, "nothing is joined")
    writer.close()


def test_many_that_were_left_are_joined_in_several_goes(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_MAX_JOINED", 70)
    written(paths, 150)
    whole, counts = seen(paths), [len(list_segments(paths))]
    for _ in range(4):
        assert join_segments(paths, 0, 3000) <= 70
        counts.append(len(list_segments(paths)))
        assert seen(paths) == whole
    assert counts[0] - counts[1] < 70
    assert counts[-1] < 64 + counts[0] // 4


def test_a_damaged_segment_is_named_and_nothing_is_joined(paths: RunPaths) -> None:
    written(paths)
    [*_, last] = list_segments(paths)
    (paths.metrics / last).write_bytes(b"{")  # type: ignore[union-attr]
    before = list_segments(paths)
    for read in (
        lambda: join_segments(paths, 0, 10**9),
        lambda: MetricsReader(paths).poll(),
        lambda: read_steps(paths),
    ):
        with pytest.raises(ConfigError, match=f"{last} is damaged"):
            read()
    assert list_segments(paths) == before


def test_files_and_memory_hardly_grow_with_the_steps(paths: RunPaths) -> None:
    """At most 140 bytes a step, whatever the number of logical workers is; records in lists take 3 kilobytes."""
    files, held = [], []
    for low, high in ((1, 700), (701, 2100)):
        for first in range(low, high, 10):
            put_segment(
                paths, 1, [record_of(step, logical_workers=64) for step in range(first, min(first + 10, high + 1))]
            )
            join_segments(paths, 0, 1 << 19)
        files.append(len(list_segments(paths)))
        tracemalloc.start()
        course = read_steps(paths)
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert (len(course.records), course.rows[0]) == (high, sum(3 + step % 2 for step in range(1, high + 1)))
    assert files[1] <= MAX_SMALL_FILES + 12
    assert held[1] - held[0] < 1400 * 140


def test_columns_say_what_the_records_say(paths: RunPaths) -> None:
    written(paths)
    records, repeated, _ = seen(paths)
    course = read_steps(paths)

    def small(record: StepRecord) -> StepRecord:
        return StepRecord(
            *(
                getattr(record, n) if n not in ("rows", "row_hash") else [sum(record.rows)] * (n == "rows")
                for n in NAMES
            )
        )

    assert list(course.records) == [small(record) for _, record in sorted(records.items())]
    assert list(course.repeated) == [small(record) for record in repeated]
    assert [r.time_s for r in course.in_time] == sorted(r.time_s for r in (*records.values(), *repeated))
    assert [course.records[-1], *course.records[2:4]] == [small(records[step]) for step in (100, 3, 4)]
    assert read_steps(paths, 40).rows == [sum(records[step].rows[0] for step in range(1, 41))] * 2
    assert len(read_steps(paths, 40).records) == 40


def test_weights_and_metrics_of_some_steps_are_those_of_the_records(paths: RunPaths) -> None:
    some = [
        record_of(1),
        replace(record_of(2), weight=0.0, metrics={"a": 0.5}),
        replace(record_of(3), weight=7.5, metrics={"b": -1.0}),
    ]
    for record in some:
        put_segment(paths, 1, [record])
    found = list(read_steps(paths).records)
    assert [(r.weight, r.metrics) for r in found] == [(None, {}), (0.0, {"a": 0.5}), (7.5, {"b": -1.0})]
    assert [r.over for r in found] == [8, 0.0, 7.5]
    assert [
        segments.read_segment(paths.metrics / name, (paths.metrics / name).read_bytes())
        for name in list_segments(paths)
    ] == [[record] for record in some]


def test_means_are_over_what_each_step_was_over() -> None:
    steps = [
        replace(record_of(1), loss=1.0, metrics={"right": 0.5}),
        replace(record_of(2), loss=4.0, weight=16.0, metrics={"right": 1.0}),
    ]
    assert means(steps) == {"loss": (8 + 64) / 24, "right": (4 + 16) / 24}
    assert means([record_of(3), *steps])["right"] == (4 + 16) / 24, "of the steps that have it"
    assert "imbalance" not in make_step_point(steps, []).metrics, "of one worker"
    known = make_step_point([steps[0], replace(steps[1], imbalance=1.25)], []).metrics
    assert known.keys() == STEP_METRICS | {"right"}, "what a metric of a task's own may not be called"
    assert known["imbalance"] == 1.25


NAMES = list(StepRecord.__dataclass_fields__)


def evaluate(paths: RunPaths, step: int, value: float) -> None:
    put_evaluation(paths, Evaluation(step, 0, "", {"accuracy": value}, 10, 0.1, float(step)))


def test_an_evaluation_that_cannot_be_read_does_not_hold_patience_up(paths: RunPaths) -> None:
    for step, value in ((10, 0.5), (20, 0.4), (30, 0.3), (40, 0.3)):
        evaluate(paths, step, value)
    paths.evaluation(20).write_text("{")  # type: ignore[union-attr]
    found = early_stop(
        paths, EvaluateSection(patience=2), "accuracy", "max", lambda last: list(range(10, last + 1, 10))
    )
    assert found is not None
    assert (found.stop_step, found.best_step) == (40, 10)


def test_the_tracker_reads_an_evaluation_once_and_remembers_those_of_few_folders(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or real(path))
    backlog = Backlog(paths, 10)
    for step in (10, 20, 30):
        evaluate(paths, step, 0.5)
        backlog.read(SentState())
    assert [point.step for point in backlog.unsent_evaluations(SentState())] == [10, 20, 30]
    assert len(read) == 3
    for number in range(40):
        other = RunPaths(Path(str(paths.root)).with_name(f"run{number}"))
        evaluate(other, 1, 0.5)
        Backlog(other, 10).read(SentState())
    from ray_app.runlog import evaluations

    assert len(evaluations._scores) <= 16


def test_a_backlog_does_not_get_what_was_joined_again(paths: RunPaths) -> None:
    written(paths)
    backlog, sent = Backlog(paths, 10), SentState()
    first = []
    for _ in range(3):
        backlog.read(sent)
        for point in list(backlog.points(sent, finished=True)):
            sent.add(point)
            first.append((point.step, json.dumps(point.metrics, sort_keys=True)))
        backlog.sent(sent)
        join_segments(paths, 0, 5000)
    assert [step for step, _ in first] == list(range(10, 101, 10))
    again = Backlog(paths, 10)
    again.read(SentState())
    assert [(p.step, json.dumps(p.metrics, sort_keys=True)) for p in again.points(SentState(), finished=True)] == first


def test_a_backlog_forgets_what_was_sent(paths: RunPaths) -> None:
    put_segment(paths, 1, [record_of(step) for step in range(1, 21)])
    backlog = Backlog(paths, 10)
    backlog.read(SentState())
    backlog.sent(SentState(10))
    assert [point.step for point in backlog.points(SentState(), finished=True)] == [20]


def test_a_metrics_block_has_the_time_of_its_last_step_and_the_failures_so_far() -> None:
    steps = [
        replace(record_of(step), time_s=1e9 + step, step_ms=250.0, data_wait_ms=2.0 * step, lr=0.1 * step)
        for step in (1, 2, 3)
    ]
    point = make_step_point(steps, [1e9 + 2.5, 1e9 + 3, 1e9 + 3.5])
    assert (point.step, point.time_ms) == (3, 1_000_000_003_000)
    assert point.metrics["restarts"] == 2.0
    assert point.metrics["rows_per_s"] == pytest.approx(sum(sum(step.rows) for step in steps) / 0.75)
    assert (point.metrics["step_ms"], point.metrics["data_wait_ms"], point.metrics["lr"]) == (
        250.0,
        4.0,
        pytest.approx(0.3),
    )


def test_the_point_of_an_evaluation_has_its_time_and_only_its_numbers() -> None:
    evaluation = Evaluation(7, 0, "", {"accuracy": 0.5, "words": "none"}, 10, 0.1, 2.5)
    assert make_evaluation_point(evaluation) == Point(7, 2500, {"eval_accuracy": 0.5}, RUN_EVALUATOR)
    assert make_evaluation_point(evaluation, "other").metrics == {"eval_other_accuracy": 0.5}


def test_joining_counts_the_files_that_it_replaced(paths: RunPaths) -> None:
    for step in range(1, MAX_SMALL_FILES + 1):
        put_segment(paths, 1, [record_of(step)])
    assert join_segments(paths, 0, 10**6) == MAX_SMALL_FILES
    assert len(list_segments(paths)) == 1
    assert join_segments(paths, 0, 10**6) == 0


def test_events_that_the_storage_refuses_are_written_later_in_their_order(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = PendingEvents(paths)
    with monkeypatch.context() as outage:
        outage.setattr(journal, "put_json", refuse)
        events.put("write_failed", 1, step=4)
        events.put("evaluation_skipped", 1, step=4)
    assert read_events(paths) == []
    events.put("write_failed", 2, step=8)
    events.flush()
    assert [(e.kind, e.fence, e.details) for e in read_events(paths)] == [
        ("write_failed", 1, {"step": 4}),
        ("evaluation_skipped", 1, {"step": 4}),
        ("write_failed", 2, {"step": 8}),
    ]


def refuse(*_: Any, **__: Any) -> bool:
    raise OSError("503")
