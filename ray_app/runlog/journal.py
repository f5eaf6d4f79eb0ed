"""The journal of a run: step records in segments, and events, all in small files that are never appended to.

The console, `summary.json` and MLflow are computed from it. A step that is done again is recorded again; readers take
the first record of a step for its timings, so that points that are sent to MLflow again are equal, and may compare the
rest.

A segment contains columns of step records in the order in which they were written. Segments are ordered by the time of
their first record, which is in the name. Small segments are joined, so that their number does not grow with the length
of a run: a file with the records of several consecutive segments is put, and only then these are removed. A process
that is stopped in between leaves records in two files, and readers count the record of a step in a generation once.

A joined segment that is full is a Parquet file. It takes a third of the bytes of JSON, and a million steps are read in
a second. Its name has a digest of its content, so that the Parquet library never reads a damaged file.

All functions raise `OSError` while the storage does not answer. Those that read raise `ConfigError` for a file that is
damaged or of a newer version.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

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
"""A joined segment of at least this size is not joined again."""
MAX_SMALL_FILES = 64
"""Files that are not full are joined when there are this many."""
_MIN_AGE_S = 30.0
"""Only segments of at least this age are joined.

So the last segments of a replaced rank 0 are ordered before those of its successor.
"""
_MAX_JOINED = 256
"""The number of segments that are joined in one call, since the writer of the next segments waits for it."""
_READ_AT_ONCE = 8
_NAME = re.compile(r"\d+-\d+-\d+[-.]")
_FULL = "-full"
_PARQUET = ".parquet"
_DIGEST_CHARS = 32


@dataclass(slots=True)
class StepRecord:
    """The record of one finished step, written by rank 0; a frozen one would take five times as long to make.

    Args:
        step: Number of finished steps of the run, this one included.
        epoch: Epoch of the step, from 0.
        time_s: Time of the end, seconds since 1970 (UTC).
        loss: Mean loss over the global batch.
        grad_norm: L2 norm of the global gradient, before clipping.
        step_ms: Milliseconds since the end of the previous step.
        data_wait_ms: Milliseconds of `step_ms` in which the worker waited for data.
        workers: World size.
        rows: Number of rows of every logical worker.
        row_hash: For every logical worker, the sum of its rows' 64-bit hashes, modulo 2**64.
        generation: Number of the driver's start, a dot, number of the generation. If rank 0 is lost, another rank may
            write the same execution of a step; by this field it is distinguished from a step that was done again.
        skipped: Number of rows that were planned for the step and cannot be decoded; they are not among `rows`.
        weight: The sum of the rows' weights, if means are over these and not over `rows`.
        metrics: The task's own metrics of the step, means like the loss, or values over the rows of the epoch so far.
        running: The names of those of the latter kind.
        imbalance: Load of the busiest worker in the steps before, as a multiple of the mean; None if unknown.
        recomputed: Number of shares of logical workers that two workers computed, with equal checksums.
        slow: The stragglers by rank, with their time as a multiple of the others' time.
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
    recomputed: int = 0
    slow: Mapping[str, float] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)

    @property
    def over(self) -> float:
        """The weight that the means are over."""
        return sum(self.rows) if self.weight is None else self.weight


_FLOAT_MAP, _FLOAT = pa.map_(pa.string(), pa.float64()), pa.float64()
_TYPES = {
    "row_hash": pa.list_(pa.uint64()),
    "rows": pa.list_(pa.int64()),
    "running": pa.list_(pa.string()),
    "generation": pa.string(),
    "metrics": _FLOAT_MAP,
    "slow": _FLOAT_MAP,
}
_INTEGERS = ("step", "epoch", "workers", "skipped", "recomputed")
_SCHEMA = pa.schema(
    [(f.name, _TYPES.get(f.name, pa.int64() if f.name in _INTEGERS else _FLOAT)) for f in fields(StepRecord)]
)
"""The columns of a segment as a table."""
_NUMBERS = ("loss", "lr", "grad_norm", "metrics")
"""Columns with numbers that may not be finite, as the norm of a gradient that overflowed; JSON has null for them."""
_DEFAULTS: Any = {"weight": None, "metrics": {}, "imbalance": None, "recomputed": 0, "slow": {}, "running": []}
"""Columns that are left out of a segment in which every record has this value."""


def put_segment(paths: RunPaths, fence: int, records: list[StepRecord]) -> None:
    """Writes records as a new segment."""
    name = f"{records[0].step:010d}-{fence:04d}-{time.time_ns()}.json"
    put_atomic(paths.metrics / name, _to_bytes(records))


def list_segments(paths: RunPaths) -> list[str]:
    """Returns the names of a run's segments in the order in which their records were written."""
    return sorted(filter(_NAME.match, list_files(paths.metrics)), key=lambda name: (_written_ns(name), name))


def read_segment(file: Location, data: bytes) -> pa.Table:
    """Returns the records of a segment, see `_SCHEMA`."""
    columns: Any = None
    with translate_format_errors(file, columns):
        if file.name.endswith(_PARQUET):
            if hashlib.sha256(data).hexdigest()[:_DIGEST_CHARS] not in file.name:
                raise ValueError("it differs from what was written (SHA-256)")
            return pq.ParquetFile(pa.BufferReader(data)).read(use_threads=False)
        columns = json.loads(data)
    with translate_format_errors(file, columns):
        columns |= {name: restore_nan(columns[name]) for name in _NUMBERS if name in columns}
        try:
            return _to_table(columns)
        except OverflowError as error:
            raise ValueError(str(error)) from error


def _to_table(columns: Mapping[str, list[Any]]) -> pa.Table:
    """Returns columns of values of records as a table; columns that are left out have their default."""
    arrays = []
    for column in _SCHEMA:
        values = columns.get(column.name)
        if values is None:
            values = [(_DEFAULTS | {"skipped": 0})[column.name]] * len(columns["step"])
        if column.type == _FLOAT_MAP:
            values = [list(value.items()) for value in values]
        arrays.append(pa.array(values, column.type))
    return pa.Table.from_arrays(arrays, schema=_SCHEMA)


def to_records(table: pa.Table) -> list[StepRecord]:
    """Returns the records in a table, see `_SCHEMA`."""
    columns = [
        map(dict, table[column.name].to_pylist()) if column.type == _FLOAT_MAP else table[column.name].to_pylist()
        for column in _SCHEMA
    ]
    return [StepRecord(*values) for values in zip(*columns, strict=True)]


def join_segments(paths: RunPaths, min_age_s: float = _MIN_AGE_S, full_bytes: int = FULL_BYTES) -> int:
    """Joins consecutive segments that are not full, if there are many; returns their number.

    Two processes may do it at once. If a segment is damaged, all stay as they are.
    """
    before_ns = time.time_ns() - int(min_age_s * 1e9)
    old = [name for name in list_segments(paths) if _written_ns(name) <= before_ns]
    if sum(_FULL not in name for name in old) < MAX_SMALL_FILES:
        return 0
    joined, remaining = 0, _MAX_JOINED
    for full, run in groupby(old, key=lambda name: _FULL in name):
        parts = [] if full else list(run)[:remaining]
        if len(parts) > 1:
            joined += _join_run(paths, parts, full_bytes)
            remaining -= len(parts)
    return joined


def _join_run(paths: RunPaths, run: list[str], full_bytes: int) -> int:
    """Joins consecutive segments into as many files as they fill; returns the number of joined segments."""
    joined = size = 0
    parts: list[str] = []
    records: dict[tuple[int, str], StepRecord] = {}
    for name in run:
        [data] = read_all([paths.metrics / name], missing=b"")
        # If the segment is gone, another process joins the same ones.
        if not data:
            return joined
        for record in to_records(read_segment(paths.metrics / name, data)):
            records.setdefault((record.step, record.generation), record)
        parts.append(name)
        size += len(data)
        if size >= full_bytes:
            joined += _put_joined(paths, parts, list(records.values()), is_full=True)
            parts, records = [], {}
            size = 0
    return joined + (_put_joined(paths, parts, list(records.values()), is_full=False) if len(parts) > 1 else 0)


def _put_joined(paths: RunPaths, parts: list[str], records: list[StepRecord], is_full: bool) -> int:
    """Puts a segment with all records of some, and then removes these; returns their number."""
    beginning = "-".join(parts[0].removesuffix(".json").split("-")[:3])
    if is_full:
        data = _to_parquet(_to_table(_to_columns(records)))
        end = f"{hashlib.sha256(data).hexdigest()[:_DIGEST_CHARS]}{_FULL}{_PARQUET}"
    else:
        data, end = _to_bytes(records), f"{uuid.uuid4().hex[:12]}.json"
    put_atomic(paths.metrics / f"{beginning}-{end}", data)
    for name in parts:
        (paths.metrics / name).unlink(missing_ok=True)
    return len(parts)


def _to_parquet(table: pa.Table) -> bytes:
    floats, sink = [column.name for column in _SCHEMA if column.type == _FLOAT], io.BytesIO()
    # The bytes of floats of the same significance next to each other compress to two thirds.
    pq.write_table(table, sink, compression="zstd", use_dictionary=["generation"], use_byte_stream_split=floats)
    return sink.getvalue()


def _to_columns(records: list[StepRecord]) -> dict[str, list[Any]]:
    return {name: [getattr(record, name) for record in records] for name in _SCHEMA.names}


def _to_bytes(records: list[StepRecord]) -> bytes:
    columns = _to_columns(records)
    for name, default in _DEFAULTS.items():
        if all(value == default for value in columns[name]):
            del columns[name]
    return to_json(add_version(columns)).encode()


def _written_ns(name: str) -> int:
    return int(name.removesuffix(".json").split("-")[2])


FLUSH_S = 1.25
"""The minimum number of seconds between two segments.

So less than one object per second is written, together with joined segments and samples of the nodes' load.
"""


class MetricsWriter:
    """Collects step records and writes them as segments in a thread of its own, so that no step waits.

    `flush_s` are the seconds between two segments; None: as suits the storage.
    """

    def __init__(self, paths: RunPaths, fence: int, flush_s: float | None = None) -> None:
        self._paths = paths
        self._fence = fence
        self._flush_s = flush_s or max(FLUSH_S, poll_interval_s(paths.metrics))
        self._pending: list[StepRecord] = []
        self.stored_step = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-writer", daemon=True)
        self._thread.start()

    def add(self, record: StepRecord) -> None:
        """Queues one record; returns at once."""
        self._pending.append(record)

    def flush(self) -> None:
        """Writes the queued records; if the storage refuses (`OSError`), they stay queued."""
        with self._lock:
            records = self._pending[:]
            if not records:
                return
            put_segment(self._paths, self._fence, records)
            del self._pending[: len(records)]
            self.stored_step = max(self.stored_step, records[-1].step)

    def close(self) -> None:
        """Writes the queued records and ends the thread."""
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
            join_events(self._paths)
        except (OSError, ConfigError, ValueError) as error:
            logger.warning("The segments of metrics or events could not be joined, trying again: %s", error)

    def _try_flush(self) -> None:
        try:
            self.flush()
        except OSError as error:
            logger.warning("The metrics of %d steps could not be written, trying again: %s", len(self._pending), error)


class RecordReader:
    """Reads each execution of each step once, also while records are written; it keeps some bytes for each step."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._read: set[str] = set()
        self.generations: dict[str, int] = {}
        # The number of the generation of each step's first record; 0 for a step without one.
        self._first_generation: npt.NDArray[np.int32] = np.zeros(1024, np.int32)
        self._repeated_keys: set[tuple[int, int]] = set()

    def _new_segments(self) -> Iterator[pa.Table]:
        """Yields the table of each new segment, in order; records that were read and joined since come again."""
        removed: set[str] = set()
        while True:
            names = list_segments(self._paths)
            self._read &= set(names)
            for name, data in self._contents([name for name in names if name not in self._read]):
                if not data and name not in removed:
                    # The segment was joined meanwhile. The joined one is ordered before the rest, so list again.
                    removed.add(name)
                    break
                self._read.add(name)
                yield read_segment(self._paths.metrics / name, data)
            else:
                return

    def _contents(self, new: list[str]) -> Iterator[tuple[str, bytes]]:
        """Yields the contents of segments, which are read a few at a time; that of a removed segment is empty."""
        for first in range(0, len(new), _READ_AT_ONCE):
            batch = new[first : first + _READ_AT_ONCE]
            yield from zip(batch, read_all((self._paths.metrics / name for name in batch), missing=b""), strict=True)

    def read_tables(self) -> Iterator[tuple[pa.Table, npt.NDArray[np.bool_]]]:
        """Yields the new records of each segment, in order, and whether each is the first one of its step."""
        for table in self._new_segments():
            steps, names = table["step"].to_numpy(), table["generation"].combine_chunks().dictionary_encode()
            numbers = [self.generations.setdefault(n, len(self.generations) + 1) for n in names.dictionary.to_pylist()]
            generations = np.array(numbers, np.int32)[names.indices.to_numpy()]
            if (missing := int(steps.max(initial=0)) + 1 - len(self._first_generation)) > 0:
                missing = max(missing, len(self._first_generation))
                self._first_generation = np.pad(self._first_generation, (0, missing))
            is_first = np.zeros(len(steps), bool)
            is_first[np.unique(steps, return_index=True)[1]] = True
            is_first &= self._first_generation[steps] == 0
            self._first_generation[steps[is_first]] = generations[is_first]
            is_new = is_first.copy()
            for row in np.flatnonzero(self._first_generation[steps] != generations).tolist():
                if (key := (int(steps[row]), int(generations[row]))) not in self._repeated_keys:
                    self._repeated_keys.add(key)
                    is_new[row] = True
            yield table if is_new.all() else table.filter(pa.array(is_new)), is_first[is_new]

    def read_new(self) -> Iterator[tuple[StepRecord, bool]]:
        """Yields the new records, in the order of their segments, and whether each is the first one of its step."""
        for table, is_first in self.read_tables():
            yield from zip(to_records(table), is_first.tolist(), strict=True)

    def first_records(self, after_step: int = 0) -> Iterator[StepRecord]:
        """Yields those of the new records that are the first one of their step, and of a step after `after_step`."""
        for table, is_first in self.read_tables():
            is_wanted = is_first & (table["step"].to_numpy() > after_step)
            yield from to_records(table.filter(pa.array(is_wanted))) if is_wanted.any() else ()


def read_records(paths: RunPaths) -> tuple[dict[int, StepRecord], list[StepRecord]]:
    """Returns the first record of each step, in order, and the records of steps that were done again.

    For a long run see `read_steps`.
    """
    first, repeated = dict[int, StepRecord](), list[StepRecord]()
    for record, is_first in RecordReader(paths).read_new():
        if is_first:
            first[record.step] = record
        else:
            repeated.append(record)
    return dict(sorted(first.items())), repeated


def newest_record(paths: RunPaths) -> StepRecord | None:
    """Returns the newest step record; None before the first."""
    for name in reversed(list_segments(paths)):
        [data] = read_all([paths.metrics / name], missing=b"")
        # A segment that was joined meanwhile is empty here; its records are in another one.
        if data:
            return to_records(read_segment(paths.metrics / name, data)[-1:])[0]
    return None


@dataclass(frozen=True)
class Event:
    """An event of the run.

    Args:
        kind: `started`, `resumed`, `resized`, `failed`, `checkpointed`, `evaluated`, `fallback`, `finished`, ...
        time_s: Time of the event, seconds since 1970 (UTC).
        fence: Number of the driver's start.
        details: Other facts: step, workers, reason.
    """

    kind: str
    time_s: float
    fence: int
    details: dict[str, Any]


_FREQUENT_EVENTS = ("checkpointed", "evaluated")
_MAX_SINGLE_EVENTS = 256
"""Events of a frequent kind are joined in one file when there are so many files with one event."""
_JOINED = "-joined-"


def join_events(paths: RunPaths, min_age_s: float = _MIN_AGE_S) -> None:
    """Joins the files of events of frequent kinds, if there are many; two processes may do it at once."""
    before_ns = time.time_ns() - int(min_age_s * 1e9)
    names = [name for name in sorted(list_files(paths.events)) if _JOINED not in name]
    for kind in _FREQUENT_EVENTS:
        single = [name for name in names if name.split("-")[1] == kind and int(name.split("-")[0]) <= before_ns]
        if len(single) < _MAX_SINGLE_EVENTS:
            continue
        values = read_all_json((paths.events / name for name in single), missing=b"null")
        # If an event is gone, another process joins the same ones.
        if all(values):
            joined = f"{single[0].split('-')[0]}-{kind}{_JOINED}{uuid.uuid4().hex[:12]}.json"
            put_json(paths.events / joined, {"events": dict(zip(single, values, strict=True))})
            for name in single:
                (paths.events / name).unlink(missing_ok=True)


def put_event(paths: RunPaths, kind: str, fence: int, **details: Any) -> bool:
    """Records an event without secrets; returns whether it was written. A failure is logged and raises nothing."""
    register_run_secrets(paths.config)
    event = Event(kind, time.time(), fence, redact_value(details))
    try:
        return put_json(paths.events / f"{time.time_ns():020d}-{kind}-{os.getpid()}.json", add_version(asdict(event)))
    except OSError as error:
        logger.warning("The event %r could not be recorded: %s", kind, error)
        return False


class PendingEvents:
    """Writes events that must not be lost: an event that the storage refuses stays pending, and so do later ones.

    Early stopping, for example, waits for the evaluation of each planned checkpoint, or for the event that there will
    be none. The methods are not to be called by several threads at a time.

    Args:
        paths: The run.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._events: list[tuple[str, int, dict[str, Any]]] = []

    def put(self, kind: str, fence: int, **details: Any) -> None:
        """Writes the pending events and this one, see `put_event`; what the storage refuses stays pending."""
        self._events.append((kind, fence, details))
        self.flush()

    def flush(self) -> None:
        """Writes the pending events, in order, until the storage refuses one."""
        while self._events:
            kind, fence, details = self._events[0]
            if not put_event(self._paths, kind, fence, **details):
                return
            self._events.pop(0)


class EventsReader:
    """Reads the events of a run, each file once, also while they are written and joined."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._read: set[str] = set()
        self._events: dict[str, Event] = {}
        self._returned: set[str] = set()

    def read_new(self) -> list[Event]:
        """Returns the events that no earlier call has returned, in the order of time, see `read`.

        An event may be older than those of earlier calls, since clocks differ and a storage may be slow.
        """
        self.read()
        new = sorted(self._events.keys() - self._returned)
        self._returned.update(new)
        return [self._events[name] for name in new]

    def read(self, *kinds: str) -> list[Event]:
        """Returns all events in the order of time, or those of some kinds."""
        tree = list_tree(self._paths.events)
        new = {name: file for name, file in tree.items() if name not in self._read and _is_of(name, kinds)}
        for (name, file), value in zip(new.items(), read_all_json(new.values(), missing=b"null"), strict=True):
            if value is None and not file.exists():
                # The event was joined meanwhile, so the joined file is in the next listing.
                return self.read(*kinds)
            with translate_format_errors(file, value):
                events = value["events"] if _JOINED in name else {name: value}
                self._events |= {event: from_known_fields(Event, values) for event, values in events.items()}
            self._read.add(name)
        return [self._events[name] for name in sorted(self._events) if _is_of(name, kinds)]


def _is_of(name: str, kinds: Sequence[str]) -> bool:
    """Returns whether the file of an event is of one of some kinds; without kinds it is."""
    return not kinds or name.split("-")[1] in kinds


def read_events(paths: RunPaths, *kinds: str) -> list[Event]:
    """Returns the events of a run, see `EventsReader.read`."""
    return EventsReader(paths).read(*kinds)


def newest_detail(events: list[Event], name: str) -> Any:
    """Returns a detail of the newest `started` event that has it, or None."""
    return next(
        (event.details[name] for event in reversed(events) if event.kind == "started" and name in event.details), None
    )
