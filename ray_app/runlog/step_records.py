"""All step records of a run in little memory: columns of numbers, a hundred megabytes for a million steps."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import overload

from ray_app.runlog.journal import SegmentReader, StepRecord
from ray_app.runlog.paths import RunPaths

_INTEGERS = ("step", "epoch", "workers", "skipped")
_FLOATS = ("time_s", "loss", "lr", "grad_norm", "step_ms", "data_wait_ms")


class _RecordColumns:
    """Step records as columns of numbers; a record is one row."""

    def __init__(self) -> None:
        self.integers = {name: array("q") for name in _INTEGERS}
        self.floats = {name: array("d") for name in _FLOATS}
        self.rows, self.generation = array("q"), array("i")
        self.weight, self.imbalance = array("d"), array("d")
        # The generation of a record is stored as the index of its name.
        self.generation_index: dict[str, int] = {}
        self.generation_names: list[str] = []
        self.metrics: dict[str, array[float]] = {}

    def add(self, record: StepRecord) -> int:
        """Adds a record; returns its row."""
        for name, numbers in self.integers.items():
            numbers.append(getattr(record, name))
        for name, values in self.floats.items():
            values.append(getattr(record, name))
        self.weight.append(math.nan if record.weight is None else record.weight)
        self.imbalance.append(math.nan if record.imbalance is None else record.imbalance)
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
        integers, floats = self.integers, self.floats
        weight, imbalance = self.weight[row], self.imbalance[row]
        return StepRecord(
            integers["step"][row],
            integers["epoch"][row],
            floats["time_s"][row],
            floats["loss"][row],
            floats["lr"][row],
            floats["grad_norm"][row],
            floats["step_ms"][row],
            floats["data_wait_ms"][row],
            integers["workers"][row],
            [self.rows[row]],
            [],
            self.generation_names[self.generation[row]],
            integers["skipped"][row],
            None if math.isnan(weight) else weight,
            {name: values[row] for name, values in self.metrics.items() if not math.isnan(values[row])},
            None if math.isnan(imbalance) else imbalance,
        )


class Steps(Sequence[StepRecord]):
    """A sequence of step records that are created at each access.

    `rows` of a record is one number, the sum over the logical workers; `row_hash` and `slow` are empty, `recomputed` is
    0.

    Args:
        order: The rows of the columns, in the order of the sequence.
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

    Args:
        last_step: The last step of which first records count; None counts all.
    """

    def __init__(self, paths: RunPaths, last_step: int | None = None) -> None:
        self._segments, self._last = SegmentReader(paths), last_step
        self._columns = _RecordColumns()
        # The row of each step's first record; -1 for a step without one.
        self._row_of_step = array("q")
        self._repeated: dict[tuple[int, str], int] = {}
        self._rows: list[int] = []
        self._skipped = self._recomputed = 0

    def read(self) -> Course:
        """Returns all steps that were written so far.

        Raises:
            ConfigError: A segment is damaged, or of a newer version.
            OSError: The storage does not answer.
        """
        for record in chain.from_iterable(self._segments.read_new()):
            self._add(record)
        columns, end = self._columns, None if self._last is None else self._last + 1
        first = array("q", (row for row in self._row_of_step[:end] if row >= 0))
        repeated = array("q", self._repeated.values())
        times = columns.floats["time_s"]
        in_time = array("q", sorted(range(len(times)), key=times.__getitem__))
        return Course(
            Steps(columns, first),
            Steps(columns, repeated),
            Steps(columns, in_time),
            list(self._rows),
            self._skipped,
            self._recomputed,
        )

    def _add(self, record: StepRecord) -> None:
        columns, row_of_step = self._columns, self._row_of_step
        if record.step >= len(row_of_step):
            row_of_step.extend([-1] * (record.step + 1 - len(row_of_step)))
        first, key = row_of_step[record.step], (record.step, record.generation)
        if first >= 0:
            if columns.generation_names[columns.generation[first]] != record.generation and key not in self._repeated:
                self._repeated[key] = columns.add(record)
            return
        row_of_step[record.step] = columns.add(record)
        if self._last is None or record.step <= self._last:
            self._rows.extend([0] * (len(record.rows) - len(self._rows)))
            for v, rows in enumerate(record.rows):
                self._rows[v] += rows
            self._skipped += record.skipped
            self._recomputed += record.recomputed


def read_steps(paths: RunPaths, last_step: int | None = None) -> Course:
    """Returns all steps of a run, see `StepsReader`."""
    return StepsReader(paths, last_step).read()
