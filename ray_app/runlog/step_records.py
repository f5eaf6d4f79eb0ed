"""The steps of a run in little memory: numbers in columns, so that a million steps take a hundred megabytes."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import overload

from ray_app.runlog.journal import SegmentReader, StepRecord
from ray_app.runlog.paths import RunPaths

_WHOLE = ("step", "epoch", "workers", "skipped")
_REAL = ("time_s", "loss", "lr", "grad_norm", "step_ms", "data_wait_ms")


class _Columns:
    """Records by the row that they are in."""

    def __init__(self) -> None:
        self.whole = {name: array("q") for name in _WHOLE}
        self.real = {name: array("d") for name in _REAL}
        self.rows, self.generation, self.weight, self.imbalance = array("q"), array("i"), array("d"), array("d")
        self.numbers: dict[str, int] = {}
        self.names: list[str] = []
        self.metrics: dict[str, array[float]] = {}

    def add(self, record: StepRecord) -> int:
        """Takes a record; returns its row."""
        for name, numbers in self.whole.items():
            numbers.append(getattr(record, name))
        for name, values in self.real.items():
            values.append(getattr(record, name))
        self.weight.append(math.nan if record.weight is None else record.weight)
        self.imbalance.append(math.nan if record.imbalance is None else record.imbalance)
        for name in record.metrics.keys() - self.metrics.keys():
            self.metrics[name] = array("d", [math.nan]) * len(self.rows)
        for name, values in self.metrics.items():
            values.append(record.metrics.get(name, math.nan))
        number = self.numbers.setdefault(record.generation, len(self.names))
        if number == len(self.names):
            self.names.append(record.generation)
        self.rows.append(sum(record.rows))
        self.generation.append(number)
        return len(self.rows) - 1

    def at(self, row: int) -> StepRecord:
        """The record in a row."""
        whole, real, weight, imbalance = self.whole, self.real, self.weight[row], self.imbalance[row]
        return StepRecord(
            whole["step"][row],
            whole["epoch"][row],
            real["time_s"][row],
            real["loss"][row],
            real["lr"][row],
            real["grad_norm"][row],
            real["step_ms"][row],
            real["data_wait_ms"][row],
            whole["workers"][row],
            [self.rows[row]],
            [],
            self.names[self.generation[row]],
            whole["skipped"][row],
            None if math.isnan(weight) else weight,
            {name: values[row] for name, values in self.metrics.items() if not math.isnan(values[row])},
            None if math.isnan(imbalance) else imbalance,
        )


class Steps(Sequence[StepRecord]):
    """Records in an order, made when they are asked for; `rows` is one number, their sum over the logical workers,
    `row_hash` and `slow` are empty, `replayed` is 0.

    Args:
        columns: Where they are.
        order: The rows in which they are.
    """

    def __init__(self, columns: _Columns, order: array[int]) -> None:
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
        in_time: All of them, in the order of time.
        rows: Rows of the first records, of each logical worker.
        skipped: Rows that cannot be decoded, in the first records.
        replayed: Shares that were computed twice, in the first records.
    """

    records: Sequence[StepRecord]
    repeated: Sequence[StepRecord]
    in_time: Sequence[StepRecord]
    rows: list[int] = field(default_factory=list)
    skipped: int = 0
    replayed: int = 0


class StepsReader:
    """Reads the steps of a run, also while they are written: each segment once.

    Args:
        paths: The run.
        last_step: Of first records only those up to here; not given: all.
    """

    def __init__(self, paths: RunPaths, last_step: int | None = None) -> None:
        self._segments, self._last = SegmentReader(paths), last_step
        self._columns, self._place = _Columns(), array("q")
        self._again: dict[tuple[int, str], int] = {}
        self._rows, self._skipped, self._replayed = list[int](), 0, 0

    def read(self) -> Course:
        """All that was written so far.

        Raises:
            ConfigError: A segment is damaged, or of a newer version.
            OSError: The storage does not answer.
        """
        for record in chain.from_iterable(self._segments.unread()):
            self._add(record)
        columns, end = self._columns, None if self._last is None else self._last + 1
        first, again = array("q", (row for row in self._place[:end] if row >= 0)), array("q", self._again.values())
        times = columns.real["time_s"]
        in_time = array("q", sorted(range(len(times)), key=times.__getitem__))
        return Course(
            Steps(columns, first),
            Steps(columns, again),
            Steps(columns, in_time),
            list(self._rows),
            self._skipped,
            self._replayed,
        )

    def _add(self, record: StepRecord) -> None:
        columns, place = self._columns, self._place
        if record.step >= len(place):
            place.extend([-1] * (record.step + 1 - len(place)))
        known, this = place[record.step], (record.step, record.generation)
        if known >= 0:
            if columns.names[columns.generation[known]] != record.generation and this not in self._again:
                self._again[this] = columns.add(record)
            return
        place[record.step] = columns.add(record)
        if self._last is None or record.step <= self._last:
            self._rows.extend([0] * (len(record.rows) - len(self._rows)))
            for v, each in enumerate(record.rows):
                self._rows[v] += each
            self._skipped += record.skipped
            self._replayed += record.replayed


def read_steps(paths: RunPaths, last_step: int | None = None) -> Course:
    """See `StepsReader`."""
    return StepsReader(paths, last_step).read()
