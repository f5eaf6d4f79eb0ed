"""All step records of a run in little memory: columns of numbers, a hundred megabytes for a million steps."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from ray_app.runlog.journal import RecordReader, StepRecord
from ray_app.runlog.paths import RunPaths

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
        recomputed: Number of shares that were computed twice, over the first records.
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
