"""Segments: the files that step records are in, and joining small ones, so that their number does not grow with the length of a run.

A segment holds columns of records in the order in which they were written. Its name tells the time of its first record, by which segments
are ordered. Joining puts a file with the records of several segments that follow each other, and only then removes these; who is stopped in
between leaves records in two files, and readers count a record, a step of a generation, once.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import groupby
from typing import Any

from ray_app.record.files import Location, names, put_atomic, read_all, to_json, with_nan
from ray_app.record.paths import RunPaths
from ray_app.record.schema import understood, versioned

logger = logging.getLogger(__name__)

FULL_BYTES = 4 << 20
"""A joined segment of so many bytes is joined no more."""
MOST_SMALL = 64
"""Segments that are not full and wait until they are joined."""
_SETTLED_S = 30.0
"""Only what was written longer ago is joined: what a rank 0 that was replaced has just written comes before what its successor writes."""
_MOST_JOINED = 256
"""Segments that are joined in one go: who writes the next ones waits for it."""
_AT_ONCE = 8
_NAME = re.compile(r"\d+-\d+-\d+[-.]")
_FULL = "-full"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What rank 0 knows of one finished step.

    Args:
        step: Finished steps of the run, this one included.
        epoch: Epoch of the step, from 0.
        time_s: When it finished, seconds since 1970 (UTC).
        loss: Mean loss over the global batch.
        lr: Learning rate that the step used.
        grad_norm: L2 norm of the global gradient, before clipping.
        step_ms: Milliseconds since the previous step finished.
        data_wait_ms: Of these, milliseconds of waiting for data.
        workers: World size.
        rows: Rows of every logical worker.
        row_hash: For every logical worker, the sum of its rows' 64-bit hashes, modulo 2**64.
        generation: Which set of workers did it: number of the driver's start, a dot, number of the generation. When rank 0 is lost
            another rank may write the same execution of a step; it is told by this from one that was done again.
        skipped: Rows that were planned for the step and cannot be decoded; the planned rows are these and `rows`.
        weight: What the means are over, if not over `rows`: the sum of the rows' weights.
        metrics: The task's own metrics of the step, means as the loss.
        imbalance: What the busiest worker had to do in each of the steps before, in times of the mean; None if it is not known.
        replayed: Shares of logical workers that two workers computed, with the same bits.
        slow: The workers that held the others up, by rank, with how many times as long as they they took.
    """

    step: int
    epoch: int
    time_s: float
    loss: float
    lr: float
    grad_norm: float
    step_ms: float
    data_wait_ms: float
    workers: int
    rows: list[int]
    row_hash: list[int]
    generation: str
    skipped: int = 0
    weight: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    imbalance: float | None = None
    replayed: int = 0
    slow: Mapping[str, float] = field(default_factory=dict)

    @property
    def over(self) -> float:
        """What the means are over."""
        return sum(self.rows) if self.weight is None else self.weight


_COLUMNS = [column.name for column in fields(StepRecord)]
_IF_ANY: dict[str, Any] = {"weight": None, "metrics": {}, "imbalance": None, "replayed": 0, "slow": {}}
"""Columns that are left out of a segment with nothing but this in them."""


def put_segment(paths: RunPaths, fence: int, records: list[StepRecord]) -> None:
    """Writes a new segment.

    Raises:
        OSError: The storage refuses.
    """
    name = f"{records[0].step:010d}-{fence:04d}-{time.time_ns()}.json"
    put_atomic(paths.metrics / name, _written(records))


_NUMBERS = ("loss", "lr", "grad_norm", "metrics")
"""Columns whose numbers may be other than finite, as the norm of a gradient that overflowed; JSON has null for them."""


def in_order(paths: RunPaths) -> list[str]:
    """The names of a run's segments in the order in which their records were written."""
    return sorted(filter(_NAME.match, names(paths.metrics)), key=lambda name: (_written_ns(name), name))


def read_segment(place: Location, data: bytes) -> list[StepRecord]:
    """The records of a segment.

    Raises:
        ConfigError: It is damaged, or of a newer version.
    """
    columns: Any = None
    with understood(place, columns):
        columns = json.loads(data)
    with understood(place, columns):
        known = [name for name in _COLUMNS if name in columns]
        columns |= {name: with_nan(columns[name]) for name in _NUMBERS if name in columns}
        values = zip(*(columns[name] for name in known), strict=True)
        return [StepRecord(**dict(zip(known, one, strict=True))) for one in values]


class Segments:
    """A run's segments, each read once, also while they are written and joined.

    Args:
        paths: The run.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._seen: set[str] = set()

    def unread(self) -> Iterator[list[StepRecord]]:
        """The records of each segment that is new, in order. What was read and joined since comes again.

        Raises:
            ConfigError: One is damaged, or of a newer version.
            OSError: The storage does not answer.
        """
        gone = set[str]()
        while True:
            there = in_order(self._paths)
            self._seen &= set(there)
            for name, data in self._contents([name for name in there if name not in self._seen]):
                if not data and name not in gone:
                    gone.add(name)
                    break  # it was joined meanwhile: what it is in now comes before the rest
                self._seen.add(name)
                yield read_segment(self._paths.metrics / name, data)
            else:
                return

    def _contents(self, new: list[str]) -> Iterator[tuple[str, bytes]]:
        """What is in segments, a few at a time; of one that is gone, nothing."""
        for first in range(0, len(new), _AT_ONCE):
            some = new[first : first + _AT_ONCE]
            yield from zip(some, read_all((self._paths.metrics / name for name in some), missing=b""), strict=True)


def join(paths: RunPaths, settled_s: float = _SETTLED_S, full_bytes: int = FULL_BYTES) -> int:
    """Joins segments that follow each other and are not full, if many wait; two may do it at once.

    Args:
        paths: The run.
        settled_s: See `_SETTLED_S`.
        full_bytes: See `FULL_BYTES`.

    Returns:
        How many were joined.

    Raises:
        ConfigError: One is damaged, or of a newer version; it is left alone, and so are all.
        OSError: The storage does not answer.
    """
    before_ns = time.time_ns() - int(settled_s * 1e9)
    settled = [name for name in in_order(paths) if _written_ns(name) <= before_ns]
    if sum(_FULL not in name for name in settled) < MOST_SMALL:
        return 0
    joined, room = 0, _MOST_JOINED
    for full, run in groupby(settled, key=lambda name: _FULL in name):
        parts = [] if full else list(run)[:room]
        if len(parts) > 1:
            joined, room = joined + _join_run(paths, parts, full_bytes), room - len(parts)
    return joined


def _join_run(paths: RunPaths, run: list[str], full_bytes: int) -> int:
    """Joins segments that follow each other, in as many files as they fill."""
    joined, parts, size, records = 0, list[str](), 0, dict[tuple[int, str], StepRecord]()
    for name in run:
        [data] = read_all([paths.metrics / name], missing=b"")
        if not data:
            return joined  # somebody else joins them
        for record in read_segment(paths.metrics / name, data):
            records.setdefault((record.step, record.generation), record)
        parts, size = [*parts, name], size + len(data)
        if size >= full_bytes:
            joined += _put_joined(paths, parts, list(records.values()), _FULL)
            parts, size, records = [], 0, {}
    return joined + (_put_joined(paths, parts, list(records.values()), "") if len(parts) > 1 else 0)


def _put_joined(paths: RunPaths, parts: list[str], records: list[StepRecord], mark: str) -> int:
    beginning = parts[0].removesuffix(".json").split("-")[:3]
    put_atomic(paths.metrics / f"{'-'.join(beginning)}-{uuid.uuid4().hex[:12]}{mark}.json", _written(records))
    for name in parts:
        (paths.metrics / name).unlink(missing_ok=True)
    return len(parts)


def _written(records: list[StepRecord]) -> bytes:
    columns = {name: [getattr(record, name) for record in records] for name in _COLUMNS}
    for name, nothing in _IF_ANY.items():
        if all(value == nothing for value in columns[name]):
            del columns[name]
    return to_json(versioned(columns)).encode()


def _written_ns(name: str) -> int:
    return int(name.removesuffix(".json").split("-")[2])
