"""The history of a run: all its step records in little memory, and what follows from records and events.

`Course` has the step records as columns of numbers, a hundred megabytes for a million steps. World sizes, restarts,
recoveries and goodput are pure functions of step records and events.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, overload

from ray_app.config.sections import FailureSection
from ray_app.runlog.journal import Event, RecordReader, StepRecord
from ray_app.runlog.paths import RunPaths

SETTLING_S = 3.0
"""Steps in the first seconds after a change of workers do not count as undisturbed."""

_INTEGERS = ("step", "epoch", "workers", "skipped")
_OPTIONAL = ("weight", "imbalance")
_FLOATS = ("time_s", "loss", "lr", "grad_norm", "step_ms", "data_wait_ms", *_OPTIONAL)


class _RecordColumns:
    """Step records as columns of numbers; a record is one row, and NaN stands for None."""

    def __init__(self) -> None:
        self.integers = {name: array("q") for name in _INTEGERS}
        self.floats = {name: array("d") for name in _FLOATS}
        self.columns: Mapping[str, array[Any]] = {**self.integers, **self.floats}
        self.rows, self.generation = array("q"), array("i")
        # The generation of a record is stored as the index of its name.
        self.generation_index: dict[str, int] = {}
        self.generation_names: list[str] = []
        self.metrics: dict[str, array[float]] = {}

    def add(self, record: StepRecord) -> int:
        """Adds a record; returns its row."""
        for name, numbers in self.integers.items():
            numbers.append(getattr(record, name))
        for name, values in self.floats.items():
            value = getattr(record, name)
            values.append(math.nan if value is None else value)
        for name in record.metrics.keys() - self.metrics.keys():
            self.metrics[name] = array("d", [math.nan]) * len(self.rows)
        for name, values in self.metrics.items():
            values.append(record.metrics.get(name, math.nan))
        index = self.generation_index.setdefault(record.generation, len(self.generation_names))
        if index == len(self.generation_names):
            self.generation_names.append(record.generation)
        self.rows.append(sum(record.rows))
        self.generation.append(index)
        return len(self.rows) - 1

    def at(self, row: int) -> StepRecord:
        """Returns the record in a row."""
        values: dict[str, Any] = {name: column[row] for name, column in self.columns.items()}
        values |= {name: None for name in _OPTIONAL if math.isnan(values[name])}
        metrics = {name: column[row] for name, column in self.metrics.items() if not math.isnan(column[row])}
        generation = self.generation_names[self.generation[row]]
        return StepRecord(rows=[self.rows[row]], row_hash=[], generation=generation, metrics=metrics, **values)


class Steps(Sequence[StepRecord]):
    """A sequence of step records that are created at each access, in an order of the rows of columns.

    `rows` of a record is one number, the sum over the logical workers; `row_hash` and `slow` are empty, `recomputed` is
    0.
    """

    def __init__(self, columns: _RecordColumns, order: array[int]) -> None:
        self._columns, self._order = columns, order

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[StepRecord]:
        return map(self._columns.at, self._order)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Steps: ...
    def __getitem__(self, index: int | slice) -> StepRecord | Steps:
        if isinstance(index, slice):
            return Steps(self._columns, self._order[index])
        return self._columns.at(self._order[index])


@dataclass(frozen=True)
class Course:
    """All steps of a run.

    Args:
        records: The first record of each step, in the order of the steps.
        repeated: The records of steps that were done again, in the order in which they were written.
        in_time: All records, in the order of time.
        rows: Number of rows of each logical worker, over the first records.
        skipped: Number of rows that cannot be decoded, over the first records.
        recomputed: Number of recomputed shares in the first records.
    """

    records: Sequence[StepRecord]
    repeated: Sequence[StepRecord]
    in_time: Sequence[StepRecord]
    rows: list[int] = field(default_factory=list)
    skipped: int = 0
    recomputed: int = 0


class StepsReader:
    """Reads the steps of a run, each segment once, also while they are written.

    First records count up to `last_step`; None counts all.
    """

    def __init__(self, paths: RunPaths, last_step: int | None = None) -> None:
        self._reader, self._last = RecordReader(paths), last_step
        self._columns = _RecordColumns()
        # The row of each step's first record; -1 for a step without one.
        self._row_of_step = array("q")
        self._repeated = array("q")
        self._rows: list[int] = []
        self._skipped = self._recomputed = 0

    def read(self) -> Course:
        """Returns all steps that were written so far."""
        for record, is_first in self._reader.read_new():
            row = self._columns.add(record)
            if is_first:
                self._add_first(record, row)
            else:
                self._repeated.append(row)
        columns, end = self._columns, None if self._last is None else self._last + 1
        first = array("q", (row for row in self._row_of_step[:end] if row >= 0))
        times = columns.floats["time_s"]
        in_time = array("q", sorted(range(len(times)), key=times.__getitem__))
        records, repeated, all_records = (Steps(columns, order) for order in (first, self._repeated[:], in_time))
        return Course(records, repeated, all_records, list(self._rows), self._skipped, self._recomputed)

    def _add_first(self, record: StepRecord, row: int) -> None:
        self._row_of_step.extend([-1] * (record.step + 1 - len(self._row_of_step)))
        self._row_of_step[record.step] = row
        if self._last is None or record.step <= self._last:
            self._rows.extend([0] * (len(record.rows) - len(self._rows)))
            for v, rows in enumerate(record.rows):
                self._rows[v] += rows
            self._skipped += record.skipped
            self._recomputed += record.recomputed


def read_steps(paths: RunPaths, last_step: int | None = None) -> Course:
    """Returns all steps of a run, see `StepsReader`."""
    return StepsReader(paths, last_step).read()


def world_sizes(records: Iterable[StepRecord]) -> list[list[int]]:
    """Returns `[from_step, workers]` for every stretch of steps with one number of workers; steps count from 0."""
    stretches: list[list[int]] = []
    for record in records:
        if not stretches or stretches[-1][1] != record.workers:
            stretches.append([record.step - 1, record.workers])
    return stretches


def restarts(events: list[Event]) -> dict[str, int]:
    """Returns how often workers or driver were restarted, by cause; another start of a finished run does not count."""
    ended = {event.fence for event in events if event.kind in ("finished", "stopped_early")}
    starts = [event.fence for event in events if event.kind == "started"]
    return {
        "failures": count(events, "failed"),
        "preemptions": count(events, "preempted"),
        "storage": count(events, "storage_failed"),
        "resizes": count(events, "resized"),
        "driver": sum(fence not in ended for fence in starts[:-1]),
    }


def start(events: list[Event], records: Sequence[StepRecord]) -> dict[str, float]:
    """Returns the seconds of each phase of the newest start that reached a step, from that of the command on."""
    newest = max((record.time_s for record in records), default=0.0)
    started = next((event for event in reversed(events) if event.kind == "started" and event.time_s <= newest), None)
    if started is None:
        return {}
    first_s = min(record.time_s for record in records if record.time_s >= started.time_s)
    before = [event for event in events if started.time_s <= event.time_s <= first_s]
    phases, since = dict(started.details.get("phases", {})), started.time_s
    for kind, phase in (("workers", "workers"), ("formed", "forming")):
        for event in before:
            if event.kind == kind and event.time_s >= since:
                phases[phase], since = event.time_s - since, event.time_s
                break
    phases["first step"] = first_s - since
    return {phase: round(seconds, 3) for phase, seconds in phases.items()}


def recoveries(events: list[Event], records: Iterable[StepRecord]) -> list[float]:
    """Returns the seconds from each loss of workers, as the others notice it, to the next finished step."""

    times = array("d", sorted(record.time_s for record in records))
    lost_times = [
        e.time_s for e in events if e.kind in ("failed", "preempted", "storage_failed") and not e.details["left"]
    ]
    lost_times += [e.details["lost_s"] for e in events if e.kind == "formed" and "lost_s" in e.details]
    return [round(times[next_] - t, 3) for t in sorted(lost_times) if (next_ := bisect_right(times, t)) < len(times)]


class RunningMeans:
    """Means of loss and metrics, weighted by `StepRecord.over`; of `StepRecord.running` the last values."""

    def __init__(self) -> None:
        # Of each name the sum, the weight, and the value of a single step, which value * weight / weight may differ
        # from in its last bit.
        self._parts = dict[str, tuple[float, float, float | None]]()

    def add(self, record: StepRecord) -> dict[str, float]:
        """Returns the means up to a step, which is added."""
        for name, value in {"loss": record.loss, **record.metrics}.items():
            is_running = name in record.running
            total, over, _ = (0.0, 0.0, None) if is_running else self._parts.get(name, (0.0, 0.0, None))
            single = value if is_running or not over else None
            self._parts[name] = total + value * record.over, over + (1.0 if is_running else record.over), single
        return {
            name: math.nan if not over else total / over if single is None else single
            for name, (total, over, single) in self._parts.items()
        }


def means(records: Sequence[StepRecord]) -> dict[str, float]:
    """Returns the means over some steps, see `RunningMeans`."""
    running, values = RunningMeans(), {"loss": math.nan}
    for record in records:
        values = running.add(record)
    return values


def goodput(records: Sequence[StepRecord], repeated: Sequence[StepRecord]) -> float | None:
    """Returns counted rows x undisturbed time per row / wall time since the first step; None for fewer than two steps.

    1 means that no time was lost. `repeated` has the records of steps that were done again.
    """
    if len(records) < 2:
        return None
    wall_s = max(r.time_s for r in chain(records, repeated)) - records[0].time_s
    rows = sum(sum(r.rows) for r in records[1:])
    return round(min(1.0, rows * undisturbed_row_s(records) / wall_s), 4) if wall_s > 0 else None


def undisturbed_row_s(records: Sequence[StepRecord]) -> float:
    """Returns the seconds per row of the undisturbed steps on the maximum number of workers that the run had.

    A step is undisturbed if it is not in the first 3 s of its stretch; a stretch ends where the generation or the
    number of workers changes. Checkpoints and waiting for data count as normal work. In a run that is too short for
    such steps, all steps on that number of workers count. The first of at least two records only sets the clock.
    """
    max_workers = max(r.workers for r in records[1:])
    stretch, began_s = None, 0.0
    undisturbed_ms = undisturbed_rows = all_ms = all_rows = 0.0
    for number, record in enumerate(records):
        if stretch != (record.generation, record.workers):
            stretch, began_s = (record.generation, record.workers), record.time_s
        if record.workers != max_workers:
            continue
        if number:
            all_ms += record.step_ms
            all_rows += sum(record.rows)
        if record.time_s > began_s + SETTLING_S:
            undisturbed_ms += record.step_ms
            undisturbed_rows += sum(record.rows)
    ms, rows = (undisturbed_ms, undisturbed_rows) if undisturbed_rows else (all_ms, all_rows)
    return ms / 1e3 / max(1, rows)


def disturbances(events: list[Event], limits: FailureSection) -> str:
    """Returns a count of the disturbances in all starts: `1 of 5 failures, 3 preemptions, 2 resizes`."""
    counts = restarts(events)
    allowed = limits.max_failures if limits.max_failures >= 0 else "unlimited"
    texts = {
        "failures": f"{counts['failures']} of {allowed} failures",
        "preemptions": counted_word(counts["preemptions"], "preemption"),
        "storage": f"{counted_word(counts['storage'], 'failure')} of the storage",
        "resizes": counted_word(counts["resizes"], "resize"),
        "driver": counted_word(counts["driver"], "driver restart"),
    }
    return ", ".join(text for name, text in texts.items() if counts[name])


def count(events: Iterable[Event], kind: str) -> int:
    """Returns the number of events of a kind."""
    return sum(event.kind == kind for event in events)


def counted_word(number: int, name: str) -> str:
    """Returns a number with its noun: `1 resize`, `2 resizes`."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"
