"""Segments of metrics: joining loses and duplicates no record wherever it stops, and files and memory stay small."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
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
from ray_app.runlog.history import StepsReader, means, read_steps
from ray_app.runlog.journal import (
    MAX_SMALL_FILES,
    EventsReader,
    MetricsWriter,
    PendingEvents,
    RecordReader,
    StepRecord,
    join_events,
    join_segments,
    list_segments,
    newest_record,
    put_event,
    put_segment,
    read_events,
    read_records,
)
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import list_files, list_tree, put_atomic, put_json
from ray_app.task.losses import STEP_METRICS
from ray_app.track.mlflow_client import RUN_EVALUATOR, Backlog, Point, SentState, make_evaluation_point, make_step_point
from tests.support.waiting import wait_until


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    # The tests write a thousand files and need no durability.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    return RunPaths(tmp_path / "run")


def record_of(step: int, generation: str = "1.1", logical_workers: int = 2) -> StepRecord:
    rows, hashes = [3 + step % 2] * logical_workers, [2**63 + 977 * step + v for v in range(logical_workers)]
    return StepRecord(step, step // 50, 1e9 + step, 1 / step, 0.1, 1.0, 1.0, 0.5, 2, rows, hashes, generation)


def write_segments_with_repeats(paths: RunPaths, last: int = 100) -> None:
    """Writes a segment per step; after every 30th step the last five repeat, and a new rank 0 writes these again."""
    generation, step = 1, 0
    while step < last:
        step += 1
        put_segment(paths, 1, [record_of(step, f"1.{generation}")])
        if step % 30 == 0 and generation <= step // 30:
            generation, step = generation + 1, step - 5
            repeated = [record_of(repeated_step, f"1.{generation}") for repeated_step in range(step + 1, step + 6)]
            put_segment(paths, 1, repeated)
            # A new rank 0 writes the same records.
            put_segment(paths, 1, repeated)
            step += 5


def read_all(paths: RunPaths) -> tuple[dict[int, StepRecord], list[StepRecord], StepRecord | None]:
    return *read_records(paths), newest_record(paths)


class StoppedError(Exception):
    pass


def stop_at_effect(real: Callable[..., Any], left: list[int], after: bool) -> Callable[..., Any]:
    """Wraps a function so that the last of the remaining effects raises, before or after it takes place."""

    def call(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and not after:
            raise StoppedError
        result = real(*args, **options)
        if left[0] == 0:
            raise StoppedError
        return result

    return call


def test_joining_stopped_at_any_write_loses_and_duplicates_no_record(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "MAX_SMALL_FILES", 8)
    write_segments_with_repeats(paths, 35)
    expected, before = read_all(paths), {name: (paths.metrics / name).read_bytes() for name in list_segments(paths)}
    assert (len(expected[0]), len(expected[1]), len({(r.step, r.generation) for r in expected[1]})) == (35, 5, 5)
    stops = 0
    for after in (False, True):
        for effect in range(1, 1000):
            for name in list_segments(paths):
                (paths.metrics / name).unlink()
            for name, data in before.items():
                (paths.metrics / name).write_bytes(data)
            remaining_effects = [effect]
            with monkeypatch.context() as patch:
                patch.setattr(segments, "put_atomic", stop_at_effect(put_atomic, remaining_effects, after))
                patch.setattr(Path, "unlink", stop_at_effect(Path.unlink, remaining_effects, after))
                try:
                    join_segments(paths, 0, 5000)
                except StoppedError:
                    stops += 1
            if remaining_effects[0] > 0:
                break
            assert read_all(paths) == expected, effect
            join_segments(paths, 0, 5000)
            assert read_all(paths) == expected, effect
    assert stops > 60
    assert len(list_segments(paths)) < 8


def test_concurrent_joins_lose_no_record_while_readers_poll(paths: RunPaths) -> None:
    write_segments_with_repeats(paths)
    expected = read_all(paths)
    record_reader = RecordReader(paths)
    is_over = threading.Event()
    first_record_steps: list[int] = []

    def poll_repeatedly() -> None:
        while not is_over.is_set():
            first_record_steps.extend(record.step for record in record_reader.first_records())

    def merge() -> None:
        for full_bytes in (700, 3000, 20000):
            join_segments(paths, 0, full_bytes)

    threads = [threading.Thread(target=merge) for _ in range(3)]
    polling = threading.Thread(target=poll_repeatedly)
    for thread in (*threads, polling):
        thread.start()
    for thread in threads:
        thread.join()
    is_over.set()
    polling.join()
    records, repeated = read_records(paths)
    first_record_steps.extend(record.step for record in record_reader.first_records())
    assert (records, sorted(repeated, key=repr)) == (expected[0], sorted(expected[1], key=repr))
    assert sorted(first_record_steps) == sorted(expected[0]), "a record reader returns each step once"


def test_a_writer_joins_old_segments_and_skips_recent_ones(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    write_segments_with_repeats(paths)
    count = len(list_segments(paths))
    assert join_segments(paths) == 0
    assert len(list_segments(paths)) == count
    monkeypatch.setattr(journal, "join_segments", partial(join_segments, min_age_s=0))
    writer = MetricsWriter(paths, 2, flush_s=0.01)
    wait_until(lambda: len(list_segments(paths)) < MAX_SMALL_FILES, "no segment was joined")
    writer.close()


def test_many_segments_are_joined_in_several_calls(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_MAX_JOINED", 70)
    write_segments_with_repeats(paths, 150)
    expected, counts = read_all(paths), [len(list_segments(paths))]
    for _ in range(4):
        assert join_segments(paths, 0, 3000) <= 70
        counts.append(len(list_segments(paths)))
        assert read_all(paths) == expected
    assert counts[0] - counts[1] < 70
    assert counts[-1] < 64 + counts[0] // 4


def test_a_damaged_segment_is_named_and_no_segment_is_joined(paths: RunPaths) -> None:
    write_segments_with_repeats(paths)
    [*_, last] = list_segments(paths)
    (paths.metrics / last).write_bytes(b"{")
    before = list_segments(paths)
    for read in (lambda: join_segments(paths, 0, 10**9), lambda: read_records(paths), lambda: read_steps(paths)):
        with pytest.raises(ConfigError, match=f"{last} is damaged"):
            read()
    assert list_segments(paths) == before


@pytest.mark.rest
def test_the_number_of_files_is_bounded_and_memory_per_step_is_small(paths: RunPaths) -> None:
    """A step takes at most 140 bytes for every number of logical workers; a record in a list takes 3 kilobytes."""
    num_files, allocated_bytes = [], []
    for low, high in ((1, 700), (701, 2100)):
        for first in range(low, high, 10):
            put_segment(
                paths, 1, [record_of(step, logical_workers=64) for step in range(first, min(first + 10, high + 1))]
            )
            join_segments(paths, 0, 1 << 19)
        num_files.append(len(list_segments(paths)))
        tracemalloc.start()
        steps = read_steps(paths)
        allocated_bytes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert (len(steps.records), steps.rows[0]) == (high, sum(3 + step % 2 for step in range(1, high + 1)))
    assert num_files[1] <= MAX_SMALL_FILES + 12
    assert allocated_bytes[1] - allocated_bytes[0] < 1400 * 140


@pytest.mark.parametrize("full_bytes", [None, 3000], ids=["small", "joined"])
def test_step_columns_equal_the_records(paths: RunPaths, full_bytes: int | None) -> None:
    reader = StepsReader(paths)
    assert len(reader.read().records) == 0
    write_segments_with_repeats(paths)
    records, repeated, _ = read_all(paths)
    assert repr(list(reader.read().records)) == repr(list(read_steps(paths).records)), "the first steps came later"
    if full_bytes is not None:
        assert join_segments(paths, 0, full_bytes) > 0
        assert {name.rpartition(".")[2] for name in list_segments(paths)} == {"json", "parquet"}
    steps = read_steps(paths)

    def small(record: StepRecord) -> StepRecord:
        return StepRecord(
            *(
                getattr(record, n) if n not in ("rows", "row_hash") else [sum(record.rows)] * (n == "rows")
                for n in NAMES
            )
        )

    assert list(steps.records) == [small(record) for _, record in sorted(records.items())]
    assert list(steps.repeated) == [small(record) for record in repeated]
    assert [r.time_s for r in steps.in_time] == sorted(r.time_s for r in (*records.values(), *repeated))
    assert [steps.records[-1], *steps.records[2:4]] == [small(records[step]) for step in (100, 3, 4)]
    assert read_steps(paths, 40).rows == [sum(records[step].rows[0] for step in range(1, 41))] * 2
    assert len(read_steps(paths, 40).records) == 40


def test_a_full_segment_takes_less_than_a_hundred_bytes_a_step(paths: RunPaths) -> None:
    generator = random.Random(0)
    for step in range(1, 2001):
        times = 1e9 + step + generator.random() / 100, 2 / step * (1 + generator.random()), 1e-3
        others = generator.random(), 100 * generator.random(), generator.random()
        hashes = [generator.getrandbits(64) for _ in range(4)]
        put_segment(paths, 1, [StepRecord(step, step // 50, *times, *others, 2, [16] * 4, hashes, "1.1")])
    while join_segments(paths, 0, 1 << 17) > 1:
        pass
    contents = {name: (paths.metrics / name).read_bytes() for name in full(paths)}
    steps = sum(len(segments.read_segment(paths.metrics / name, data)) for name, data in contents.items())
    assert steps > 500
    assert sum(map(len, contents.values())) / steps < 100


def full(paths: RunPaths) -> list[str]:
    """Returns the names of the full segments."""
    return [name for name in list_segments(paths) if name.endswith(".parquet")]


def test_a_flipped_bit_of_a_full_segment_is_noticed_before_it_is_parsed(paths: RunPaths) -> None:
    write_segments_with_repeats(paths)
    join_segments(paths, 0, 3000)
    file = paths.metrics / full(paths)[0]
    data = file.read_bytes()
    for position in (0, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(ConfigError, match=f"{file.name} is damaged"):
            read_records(paths)


def put_frequent_events(paths: RunPaths, count: int) -> None:
    for step in range(count):
        put_event(paths, "checkpointed", 1, step=step)
        put_event(paths, "evaluated" if step % 2 else "failed", 1, step=step)


def test_joining_events_stopped_at_any_write_loses_and_duplicates_none(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_MAX_SINGLE_EVENTS", 5)
    put_frequent_events(paths, 10)
    expected, before = read_events(paths), {file: file.read_bytes() for file in Path(str(paths.events)).iterdir()}
    reader = EventsReader(paths)
    assert reader.read_new() == expected
    join_events(paths)
    assert len(list_files(paths.events)) == 20, "recent events were joined"
    for after in (False, True):
        for effect in range(1, 1000):
            shutil.rmtree(str(paths.events))
            Path(str(paths.events)).mkdir()
            for file, data in before.items():
                file.write_bytes(data)
            remaining_effects = [effect]
            with monkeypatch.context() as patch:
                patch.setattr(journal, "put_json", stop_at_effect(put_json, remaining_effects, after))
                patch.setattr(Path, "unlink", stop_at_effect(Path.unlink, remaining_effects, after))
                with suppress(StoppedError):
                    join_events(paths, 0)
            assert read_events(paths) == expected, effect
            assert [e.kind for e in read_events(paths, "evaluated")] == ["evaluated"] * 5
            assert reader.read_new() == [], "the events of a joined file were read before"
            if remaining_effects[0] > 0:
                break
    assert len(list_files(paths.events)) == 5 + 2
    put_frequent_events(paths, 1)
    assert [e.details["step"] for e in reader.read_new()] == [0, 0]


def test_events_that_are_joined_while_they_are_read_are_read_again(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_MAX_SINGLE_EVENTS", 5)
    put_frequent_events(paths, 10)
    expected = read_events(paths)
    monkeypatch.setattr(journal, "list_tree", lambda folder: (list_tree(folder), join_events(paths, 0))[0])
    assert read_events(paths) == expected


def test_step_columns_keep_weights_and_metrics_of_single_steps(paths: RunPaths) -> None:
    stored = [
        record_of(1),
        replace(record_of(2), weight=0.0, metrics={"a": 0.5}),
        replace(record_of(3), weight=7.5, metrics={"b": -1.0}),
    ]
    for record in stored:
        put_segment(paths, 1, [record])
    loaded = list(read_steps(paths).records)
    assert [(r.weight, r.metrics) for r in loaded] == [(None, {}), (0.0, {"a": 0.5}), (7.5, {"b": -1.0})]
    assert [r.over for r in loaded] == [8, 0.0, 7.5]
    assert [
        segments.to_records(segments.read_segment(paths.metrics / name, (paths.metrics / name).read_bytes()))
        for name in list_segments(paths)
    ] == [[record] for record in stored]


def test_means_are_weighted_by_the_rows_or_weight_of_each_step() -> None:
    steps = [
        replace(record_of(1), loss=1.0, metrics={"right": 0.5}),
        replace(record_of(2), loss=4.0, weight=16.0, metrics={"right": 1.0}),
    ]
    assert means(steps) == {"loss": (8 + 64) / 24, "right": (4 + 16) / 24}
    assert means([record_of(3), *steps])["right"] == (4 + 16) / 24, (
        "the mean of a metric is over the steps that have it"
    )
    one = replace(record_of(1), loss=0.4258133252461751, weight=30.0)
    assert means([one])["loss"] == one.loss, "times and divided by its weight it would have another last bit"
    assert "imbalance" not in make_step_point(steps, []).metrics, "one worker has no imbalance"
    metrics = make_step_point([steps[0], replace(steps[1], imbalance=1.25)], []).metrics
    assert metrics.keys() == STEP_METRICS | {"right"}, "these names are reserved for metrics of the step"
    assert metrics["imbalance"] == 1.25


NAMES = list(StepRecord.__dataclass_fields__)


def evaluate(paths: RunPaths, step: int, value: float) -> None:
    put_evaluation(paths, Evaluation(step, 0, "", {"accuracy": value}, 10, 0.1, float(step)))


def test_an_unreadable_evaluation_does_not_block_early_stopping(paths: RunPaths) -> None:
    for step, value in ((10, 0.5), (20, 0.4), (30, 0.3), (40, 0.3)):
        evaluate(paths, step, value)
    paths.evaluation(20).write_text("{")
    verdict = early_stop(
        paths, EvaluateSection(patience=2), "accuracy", "max", lambda last: list(range(10, last + 1, 10))
    )
    assert verdict is not None
    assert (verdict.stop_step, verdict.best_step) == (40, 10)


def test_the_tracker_reads_an_evaluation_once_and_caches_few_folders(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    files_read: list[str] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: files_read.append(path.name) or read_bytes(path))
    backlog = Backlog(paths, 10)
    for step in (10, 20, 30):
        evaluate(paths, step, 0.5)
        backlog.read(SentState())
    assert [point.step for point in backlog.unsent_evaluations(SentState())] == [10, 20, 30]
    assert len(files_read) == 3
    for number in range(40):
        other = RunPaths(Path(str(paths.root)).with_name(f"run{number}"))
        evaluate(other, 1, 0.5)
        Backlog(other, 10).read(SentState())
    from ray_app.runlog import evaluations

    assert len(evaluations._scores) <= 16


def test_a_backlog_does_not_repeat_points_after_a_join(paths: RunPaths) -> None:
    write_segments_with_repeats(paths)
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


def test_a_backlog_discards_sent_points(paths: RunPaths) -> None:
    put_segment(paths, 1, [record_of(step) for step in range(1, 21)])
    backlog = Backlog(paths, 10)
    backlog.read(SentState())
    backlog.sent(SentState(10))
    assert [point.step for point in backlog.points(SentState(), finished=True)] == [20]


def test_a_backlog_of_a_branch_does_not_wait_for_the_steps_before_it(paths: RunPaths) -> None:
    put_segment(paths, 1, [record_of(step) for step in range(26, 41)])
    backlog = Backlog(paths, 10, first_step=25)
    backlog.read(SentState())
    assert [point.step for point in backlog.points(SentState(), finished=False)] == [30, 40]


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


def test_joining_returns_the_number_of_replaced_files(paths: RunPaths) -> None:
    for step in range(1, MAX_SMALL_FILES + 1):
        put_segment(paths, 1, [record_of(step)])
    assert join_segments(paths, 0, 10**6) == MAX_SMALL_FILES
    assert len(list_segments(paths)) == 1
    assert join_segments(paths, 0, 10**6) == 0


def test_events_of_a_storage_outage_are_written_later_in_order(
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
