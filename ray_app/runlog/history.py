"""The history of a run: all its step records in little memory, and what follows from records and events.

`Course` has the step records as columns of numbers, a hundred megabytes for a million steps. World sizes, restarts,
recoveries and goodput are pure functions of step records and events.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_app.config.sections import FailureSection
from ray_app.runlog.journal import Event, RecordReader, StepRecord
from ray_app.runlog.paths import RunPaths

Numbers = npt.NDArray[Any]
"""Numbers, one for each record."""

SETTLING_S = 3.0
"""Steps in the first seconds after a change of workers do not count as undisturbed."""

_INTEGERS = ("step", "epoch", "workers", "skipped", "recomputed")
_OPTIONAL = ("weight", "imbalance")
_FLOATS = ("time_s", "loss", "lr", "grad_norm", "step_ms", "data_wait_ms", *_OPTIONAL)
_TYPES: dict[str, type[np.generic]] = dict.fromkeys(("step", "rows"), np.int64)
_TYPES |= dict.fromkeys((*_INTEGERS[1:], "generation"), np.int32) | dict.fromkeys(_FLOATS, np.float64)


class RecordColumns:
    """Step records as columns of numbers; a record is one row, and NaN stands for None."""

    def __init__(self) -> None:
        # Each column with space for more rows; the memory of space that was not written is not used.
        self._arrays: dict[str, Numbers] = {name: np.empty(1024, kind) for name, kind in _TYPES.items()}
        self.num_rows = 0
        self._num_shown = 0
        self.metrics: list[str] = []
        self.generation_names: list[str] = []

    def add(self, table: pa.Table, generations: dict[str, int]) -> None:
        """Adds records of a `RecordReader`, which has given the generations their numbers from 1 on."""
        for name in (*_INTEGERS, *_FLOATS):
            self._append(name, table[name].to_numpy())
        names = table["generation"].combine_chunks().dictionary_encode()
        numbers = np.array([generations[name] - 1 for name in names.dictionary.to_pylist()], np.int32)
        self.generation_names = list(generations)
        self._append("generation", numbers[names.indices.to_numpy()])
        lists = table["rows"].combine_chunks()
        self._append("rows", np.bincount(_entry_rows(lists), lists.values.to_numpy(), len(table)))
        self._add_metrics(table["metrics"].combine_chunks())
        self.num_rows += len(table)

    def _add_metrics(self, maps: pa.MapArray) -> None:
        rows, values = _entry_rows(maps), maps.items.to_numpy()
        encoded = maps.keys.dictionary_encode()
        indices, names = encoded.indices.to_numpy(), encoded.dictionary.to_pylist()
        for name in [name for name in names if name not in self.metrics]:
            self.metrics.append(name)
            self._arrays[f"metrics.{name}"] = np.full(self.num_rows, np.nan)
        for name in self.metrics:
            column = np.full(len(maps), np.nan)
            if name in names:
                is_metric = indices == names.index(name)
                column[rows[is_metric]] = values[is_metric]
            self._append(f"metrics.{name}", column)

    def _append(self, name: str, values: Numbers) -> None:
        array, end = self._arrays[name], self.num_rows + len(values)
        if end > len(array):
            self._arrays[name] = np.empty(max(end, len(array) * 5 // 4), array.dtype)
            self._arrays[name][: len(array)] = array
        self._arrays[name][self.num_rows : end] = values

    def show(self) -> None:
        """Shows the added records; another thread may read the columns meanwhile."""
        self._num_shown = self.num_rows

    def __getitem__(self, name: str) -> Numbers:
        return self._arrays[name][: self._num_shown]

    def at(self, row: int) -> StepRecord:
        """Returns the record in a row."""
        values: dict[str, Any] = {name: self[name][row].item() for name in (*_INTEGERS, *_FLOATS)}
        values |= {name: None for name in _OPTIONAL if math.isnan(values[name])}
        metrics = {name: self[f"metrics.{name}"][row].item() for name in self.metrics}
        metrics = {name: value for name, value in metrics.items() if not math.isnan(value)}
        generation, rows = self.generation_names[self["generation"][row]], [self["rows"][row].item()]
        return StepRecord(rows=rows, row_hash=[], generation=generation, metrics=metrics, **values)


def _entry_rows(lists: Any) -> Numbers:
    """Returns the row of each entry of an array of lists, or of maps, that begins at the first of its entries."""
    return np.repeat(np.arange(len(lists)), np.diff(lists.offsets.to_numpy()))


class Steps(Sequence[StepRecord]):
    """A sequence of step records that are created at each access, in an order of the rows of columns.

    `rows` of a record is one number, the sum over the logical workers; `row_hash` and `slow` are empty.
    """

    def __init__(self, columns: RecordColumns, order: npt.NDArray[np.int64]) -> None:
        self._columns, self._order = columns, order

    def column(self, name: str) -> Numbers:
        """Returns a field of all records, see `column`."""
        is_absent = name.startswith("metrics.") and name.removeprefix("metrics.") not in self._columns.metrics
        return np.full(len(self), np.nan) if is_absent else self._columns[name][self._order]

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Steps: ...
    def __getitem__(self, index: int | slice) -> StepRecord | Steps:
        if isinstance(index, slice):
            return Steps(self._columns, self._order[index])
        return self._columns.at(int(self._order[index]))


def column(records: Sequence[StepRecord], name: str) -> Numbers:
    """Returns a field of all records as numbers: NaN for None, of `rows` the sum; `metrics.NAME` is a metric."""
    if isinstance(records, Steps):
        return records.column(name)
    if name == "rows":
        return np.array([sum(record.rows) for record in records])
    if (metric := name.removeprefix("metrics.")) != name:
        return np.array([record.metrics.get(metric, math.nan) for record in records])
    return np.array([getattr(record, name) for record in records])


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
        self._columns = RecordColumns()
        # The rows of the first records, and of repeated ones, of each segment.
        self._first, self._repeated = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        self._rows = np.zeros(0, np.int64)

    def read(self) -> Course:
        """Returns all steps that were written so far."""
        for table, is_first in self._reader.read_tables():
            number = np.arange(self._columns.num_rows, self._columns.num_rows + len(table))
            self._first.append(number[is_first])
            self._repeated.append(number[~is_first])
            self._columns.add(table, self._reader.generations)
            self._count_rows(table, is_first)
        columns = self._columns
        columns.show()
        first = np.concatenate(self._first)
        steps = columns["step"][first]
        first = first[np.argsort(steps, kind="stable")][: None if self._last is None else (steps <= self._last).sum()]
        in_time = np.argsort(columns["time_s"], kind="stable")
        records, repeated, all_records = (
            Steps(columns, order) for order in (first, np.concatenate(self._repeated), in_time)
        )
        skipped, recomputed = (int(columns[name][first].sum()) for name in ("skipped", "recomputed"))
        return Course(records, repeated, all_records, self._rows.tolist(), skipped, recomputed)

    def _count_rows(self, table: pa.Table, is_first: npt.NDArray[np.bool_]) -> None:
        """Adds up the rows of each logical worker, over the first records."""
        if self._last is not None:
            is_first = is_first & (table["step"].to_numpy() <= self._last)
        lists = table["rows"].filter(pa.array(is_first)).combine_chunks()
        logical_workers = np.arange(len(lists.values)) - lists.offsets.to_numpy()[_entry_rows(lists)]
        rows = np.bincount(logical_workers, lists.values.to_numpy(), len(self._rows)).astype(np.int64)
        self._rows = rows + np.pad(self._rows, (0, len(rows) - len(self._rows)))


def read_steps(paths: RunPaths, last_step: int | None = None) -> Course:
    """Returns all steps of a run, see `StepsReader`."""
    return StepsReader(paths, last_step).read()


def world_sizes(records: Sequence[StepRecord]) -> list[list[int]]:
    """Returns `[from_step, workers]` for every stretch of steps with one number of workers; steps count from 0."""
    steps, workers = column(records, "step"), column(records, "workers")
    return [[int(steps[row]) - 1, int(workers[row])] for row in np.flatnonzero(np.diff(workers, prepend=-1))]


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
    times = column(records, "time_s")
    newest = times.max(initial=0.0)
    started = next((event for event in reversed(events) if event.kind == "started" and event.time_s <= newest), None)
    if started is None:
        return {}
    first_s = float(times[times >= started.time_s].min())
    before = [event for event in events if started.time_s <= event.time_s <= first_s]
    phases, since = dict(started.details.get("phases", {})), started.time_s
    for kind, phase in (("workers", "workers"), ("formed", "forming")):
        for event in before:
            if event.kind == kind and event.time_s >= since:
                phases[phase], since = event.time_s - since, event.time_s
                break
    phases["first step"] = first_s - since
    return {phase: round(seconds, 3) for phase, seconds in phases.items()}


def recoveries(events: list[Event], records: Sequence[StepRecord]) -> list[float]:
    """Returns the seconds from each loss of workers, as the others notice it, to the next finished step."""

    times = np.sort(column(records, "time_s"))
    lost_times = [
        e.time_s for e in events if e.kind in ("failed", "preempted", "storage_failed") and not e.details["left"]
    ]
    lost_times += [e.details["lost_s"] for e in events if e.kind == "formed" and "lost_s" in e.details]
    after = np.searchsorted(times, sorted(lost_times), side="right")
    return [round(float(times[i]) - t, 3) for i, t in zip(after, sorted(lost_times), strict=True) if i < len(times)]


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
    times = column(records, "time_s")
    wall_s = max(times.max(), column(repeated, "time_s").max(initial=0.0)) - times[0]
    rows = column(records, "rows")[1:].sum()
    return round(min(1.0, float(rows * undisturbed_row_s(records) / wall_s)), 4) if wall_s > 0 else None


def undisturbed_row_s(records: Sequence[StepRecord]) -> float:
    """Returns the seconds per row of the undisturbed steps on the maximum number of workers that the run had.

    A step is undisturbed if it is not in the first 3 s of its stretch; a stretch ends where the generation or the
    number of workers changes. Checkpoints and waiting for data count as normal work. In a run that is too short for
    such steps, all steps on that number of workers count. The first of at least two records only sets the clock.
    """
    times, workers, generations, ms, rows = (
        column(records, name) for name in ("time_s", "workers", "generation", "step_ms", "rows")
    )
    is_new = np.ones(len(times), bool)
    is_new[1:] = (workers[1:] != workers[:-1]) | (generations[1:] != generations[:-1])
    began_s = times[np.maximum.accumulate(np.where(is_new, np.arange(len(times)), 0))]
    is_counted = workers == workers[1:].max()
    is_undisturbed = is_counted & (times > began_s + SETTLING_S)
    is_counted[0] = False
    if rows[is_undisturbed].any():
        is_counted = is_undisturbed
    return float(ms[is_counted].sum() / 1e3 / max(1, rows[is_counted].sum()))


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
