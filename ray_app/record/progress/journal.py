"""The run's own record: metrics by step and events, in small files that are never appended to.

It is the truth that the console's summary and MLflow are fed from. A step that is done again is recorded again; readers take the
first record of a step for its timings (so that replays to MLflow repeat the original points) and may compare the rest.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from ray_app.errors import ConfigError
from ray_app.record.files import Location, listing, poll_s, put_json, read_all, read_all_json
from ray_app.record.paths import RunPaths
from ray_app.record.progress.segments import MOST_SMALL, Segments, StepRecord, in_order, join, put_segment, read_segment
from ray_app.record.redact import guard_run, redacted
from ray_app.record.schema import known_fields, understood, versioned

logger = logging.getLogger(__name__)


FLUSH_S = 1.25
"""Seconds between two segments at least: with their joining and looks at the nodes less than an object a second is written."""


class MetricsWriter:
    """Collects step records and writes them in segments from a thread of its own, never on the step path.

    Args:
        paths: The run.
        fence: Number of the driver's start.
        flush_s: Seconds between two segments; not given: as the storage likes it.
    """

    def __init__(self, paths: RunPaths, fence: int, flush_s: float | None = None) -> None:
        self._paths, self._fence, self._flush_s = paths, fence, flush_s or max(FLUSH_S, poll_s(paths.metrics))
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
            if flushed % MOST_SMALL == 0:
                self._try_join()
            flushed += 1

    def _try_join(self) -> None:
        try:
            join(self._paths)
        except (OSError, ConfigError) as error:
            logger.warning("The segments of metrics could not be joined, will try again: %s", error)

    def _try_flush(self) -> None:
        try:
            self.flush()
        except OSError as error:
            logger.warning("The metrics of %d steps could not be written, will try again: %s", len(self._pending), error)


class FirstRecords:
    """The first record of each step of a run, also while they are written; remembers which there were, not what was in them.

    Args:
        paths: The run.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._segments = Segments(paths)
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
        self._segments = Segments(paths)
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
    for name in reversed(in_order(paths)):
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
    """Records an event, without secrets; a failure to write it is logged and never stops the caller. Returns whether it was written."""
    guard_run(paths.config)
    event = Event(kind, time.time(), fence, redacted(details))
    try:
        return put_json(paths.events / f"{time.time_ns():020d}-{kind}-{os.getpid()}.json", versioned(asdict(event)))
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
        """Those that no earlier call has returned, in the order of time; one may be older than what was returned: clocks differ, and a
        storage is slow at times. See `read`.
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
        there = {name: file for name, file in listing(self._paths.events).items() if not kinds or name.split("-")[1] in kinds}
        new = [(name, file) for name, file in there.items() if name not in self._known]
        for (name, file), value in zip(new, read_all_json(file for _, file in new), strict=True):
            self._known[name] = _event(file, value)
        return [self._known[name] for name in there]


def read_events(paths: RunPaths, *kinds: str) -> list[Event]:
    """See `EventsReader`."""
    return EventsReader(paths).read(*kinds)


def newest_detail(events: list[Event], name: str) -> Any:
    """What the newest start said of something, or None."""
    return next((event.details[name] for event in reversed(events) if event.kind == "started" and name in event.details), None)


def _event(file: Location, value: Any) -> Event:
    with understood(file, value):
        return known_fields(Event, value)
