"""The run's own record: metrics by step and events, in small files that are never appended to.

It is the truth that the console's summary and MLflow are fed from. A step that is done again is recorded again; readers
take the first record of a step for its timings (so that replays to MLflow repeat the original points) and may compare
the rest.

Segments: the files that step records are in, and joining small ones, so that their number does not grow with the length
of a run.

A segment holds columns of records in the order in which they were written. Its name tells the time of its first record,
by which segments are ordered. Joining puts a file with the records of several segments that follow each other, and only
then removes these; who is stopped in between leaves records in two files, and readers count a record, a step of a
generation, once.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import chain, groupby
from typing import Any

from ray_app.errors import ConfigError
from ray_app.runlog.paths import RunPaths, add_version, from_known_fields, translate_format_errors
from ray_app.runlog.redaction import redact_value, register_run_secrets
from ray_app.storage.files import (
    Location,
    list_files,
    list_tree,
    poll_interval_s,
    put_atomic,
    put_json,
    read_all,
    read_all_json,
    restore_nan,
    to_json,
)

logger = logging.getLogger(__name__)

FULL_BYTES = 4 << 20
"""A joined segment of so many bytes is joined no more."""
MAX_SMALL_FILES = 64
"""Segments that are not full and wait until they are joined."""
_SETTLED_S = 30.0
"""Only what was written longer ago is joined: what a rank 0 that was replaced has just written comes before what its
successor writes.
"""
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
        generation: Which set of workers did it: number of the driver's start, a dot, number of the generation. When
            rank 0 is lost another rank may write the same execution of a step; it is told by this from one that was
            done again.
        skipped: Rows that were planned for the step and cannot be decoded; the planned rows are these and `rows`.
        weight: What the means are over, if not over `rows`: the sum of the rows' weights.
        metrics: The task's own metrics of the step, means as the loss.
        imbalance: What the busiest worker had to do in each of the steps before, in times of the mean; None if it is
            not known.
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


def list_segments(paths: RunPaths) -> list[str]:
    """The names of a run's segments in the order in which their records were written."""
    return sorted(filter(_NAME.match, list_files(paths.metrics)), key=lambda name: (_written_ns(name), name))


def read_segment(place: Location, data: bytes) -> list[StepRecord]:
    """The records of a segment.

    Raises:
        ConfigError: It is damaged, or of a newer version.
    """
    columns: Any = None
    with translate_format_errors(place, columns):
        columns = json.loads(data)
    with translate_format_errors(place, columns):
        known = [name for name in _COLUMNS if name in columns]
        columns |= {name: restore_nan(columns[name]) for name in _NUMBERS if name in columns}
        values = zip(*(columns[name] for name in known), strict=True)
        return [StepRecord(**dict(zip(known, one, strict=True))) for one in values]


class SegmentReader:
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
            there = list_segments(self._paths)
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


def join_segments(paths: RunPaths, settled_s: float = _SETTLED_S, full_bytes: int = FULL_BYTES) -> int:
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
    settled = [name for name in list_segments(paths) if _written_ns(name) <= before_ns]
    if sum(_FULL not in name for name in settled) < MAX_SMALL_FILES:
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
    return to_json(add_version(columns)).encode()


def _written_ns(name: str) -> int:
    return int(name.removesuffix(".json").split("-")[2])


FLUSH_S = 1.25
"""Seconds between two segments at least: with their joining and looks at the nodes less than an object a second is
written.
"""


class MetricsWriter:
    """Collects step records and writes them in segments from a thread of its own, never on the step path.

    Args:
        paths: The run.
        fence: Number of the driver's start.
        flush_s: Seconds between two segments; not given: as the storage likes it.
    """

    def __init__(self, paths: RunPaths, fence: int, flush_s: float | None = None) -> None:
        self._paths, self._fence, self._flush_s = paths, fence, flush_s or max(FLUSH_S, poll_interval_s(paths.metrics))
        self._pending: list[StepRecord] = []
        self.written_step = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-writer", daemon=True)
        self._thread.start()

    def add(self, record: StepRecord) -> None:
        """Takes one record; returns at once."""
        self._pending.append(record)

    def flush(self) -> None:
        """Writes what was added so far.

        Raises:
            OSError: The storage refuses; it is kept, and tried again with the next.
        """
        with self._lock:
            records = self._pending[:]
            if not records:
                return
            put_segment(self._paths, self._fence, records)
            del self._pending[: len(records)]
            self.written_step = max(self.written_step, records[-1].step)

    def close(self) -> None:
        """Writes the rest and ends the thread."""
        self._closed.set()
        self._thread.join()
        self._try_flush()

    def _run(self) -> None:
        flushed = 0
        while not self._closed.wait(self._flush_s):
            self._try_flush()
            if flushed % MAX_SMALL_FILES == 0:
                self._try_join()
            flushed += 1

    def _try_join(self) -> None:
        try:
            join_segments(self._paths)
        except (OSError, ConfigError) as error:
            logger.warning("The segments of metrics could not be joined, will try again: %s", error)

    def _try_flush(self) -> None:
        try:
            self.flush()
        except OSError as error:
            logger.warning(
                "The metrics of %d steps could not be written, will try again: %s", len(self._pending), error
            )


class FirstRecords:
    """The first record of each step of a run, also while they are written; remembers which there were, not what was in
    them.

    Args:
        paths: The run.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._segments = SegmentReader(paths)
        self._known = bytearray()

    def poll(self) -> Iterator[StepRecord]:
        """Those that are new, in the order of their segments.

        Raises:
            ConfigError: A segment is damaged, or of a newer version.
            OSError: The storage does not answer.
        """
        for records in self._segments.unread():
            for record in records:
                if record.step >= len(self._known):
                    self._known.extend(bytes(record.step + 1 - len(self._known)))
                if not self._known[record.step]:
                    self._known[record.step] = 1
                    yield record


class MetricsReader:
    """Reads a run's step records whole, also while they are written; for a long run see `read_steps`.

    `records` holds the first record of each step, `repeated` those of steps that were done again.

    Args:
        paths: The run.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._segments = SegmentReader(paths)
        self._again: set[tuple[int, str]] = set()
        self.records: dict[int, StepRecord] = {}
        self.repeated: list[StepRecord] = []

    def poll(self) -> list[StepRecord]:
        """Reads what is new; returns the steps that were not known before, in the order of their segments.

        Raises:
            ConfigError: A segment is damaged, or of a newer version.
            OSError: The storage does not answer.
        """
        new = []
        for record in chain.from_iterable(self._segments.unread()):
            known, this = self.records.get(record.step), (record.step, record.generation)
            if known is None:
                self.records[record.step] = record
                new.append(record)
            elif known.generation != record.generation and this not in self._again:
                self._again.add(this)
                self.repeated.append(record)
        return new


def newest_record(paths: RunPaths) -> StepRecord | None:
    """The step that was recorded last; None before the first.

    Raises:
        ConfigError: The segment is damaged, or of a newer version.
        OSError: The storage does not answer.
    """
    for name in reversed(list_segments(paths)):
        [data] = read_all([paths.metrics / name], missing=b"")
        if data:  # else it was joined meanwhile, and what it is in has another name
            return read_segment(paths.metrics / name, data)[-1]
    return None


@dataclass(frozen=True)
class Event:
    """Something that happened to the run.

    Args:
        kind: `started`, `resumed`, `resized`, `failed`, `checkpointed`, `evaluated`, `fallback`, `write_retried`,
            `write_failed`, `finished`, ...
        time_s: When, seconds since 1970 (UTC).
        fence: Number of the driver's start.
        details: More about it: step, workers, reason.
    """

    kind: str
    time_s: float
    fence: int
    details: dict[str, Any]


def put_event(paths: RunPaths, kind: str, fence: int, **details: Any) -> bool:
    """Records an event, without secrets; a failure to write it is logged and never stops the caller. Returns whether it
    was written.
    """
    register_run_secrets(paths.config)
    event = Event(kind, time.time(), fence, redact_value(details))
    try:
        return put_json(paths.events / f"{time.time_ns():020d}-{kind}-{os.getpid()}.json", add_version(asdict(event)))
    except OSError as error:
        logger.warning("The event %r could not be recorded: %s", kind, error)
        return False


class EventsReader:
    """Reads a run's events, also while they are written: each file once.

    Args:
        paths: The run.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._known: dict[str, Event] = {}
        self._returned: set[str] = set()

    def unread(self) -> list[Event]:
        """Those that no earlier call has returned, in the order of time; one may be older than what was returned:
        clocks differ, and a storage is slow at times. See `read`.
        """
        self.read()
        new = sorted(self._known.keys() - self._returned)
        self._returned.update(new)
        return [self._known[name] for name in new]

    def read(self, *kinds: str) -> list[Event]:
        """All events in the order of time, or those of some kinds.

        Raises:
            ConfigError: One is damaged, or of a newer version.
            OSError: The storage does not answer.
        """
        there = {
            name: file
            for name, file in list_tree(self._paths.events).items()
            if not kinds or name.split("-")[1] in kinds
        }
        new = [(name, file) for name, file in there.items() if name not in self._known]
        for (name, file), value in zip(new, read_all_json(file for _, file in new), strict=True):
            self._known[name] = _event(file, value)
        return [self._known[name] for name in there]


def read_events(paths: RunPaths, *kinds: str) -> list[Event]:
    """See `EventsReader`."""
    return EventsReader(paths).read(*kinds)


def newest_detail(events: list[Event], name: str) -> Any:
    """What the newest start said of something, or None."""
    return next(
        (event.details[name] for event in reversed(events) if event.kind == "started" and name in event.details), None
    )


def _event(file: Location, value: Any) -> Event:
    with translate_format_errors(file, value):
        return from_known_fields(Event, value)
