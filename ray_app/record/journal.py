"""The run's own record: metrics by step and events, in small files that are never appended to.

It is the truth that the console's summary and MLflow are fed from. A step that is done again is recorded again; readers take the
first record of a step for its timings (so that replays to MLflow repeat the original points) and may compare the rest.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from dataclasses import asdict, dataclass, fields
from typing import Any

from ray_app.record.files import Location, listing, names, poll_s, put_atomic, put_json, read_all_json, read_json
from ray_app.record.paths import RunPaths
from ray_app.record.redact import guard_run, redacted
from ray_app.record.schema import known_fields, understood, versioned

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What rank 0 knows of one finished step.

    Args:
        step: Finished steps of the run, this one included.
        epoch: Epoch of the step, from 0.
        time_s: When it finished, seconds since 1970 (UTC).
        loss: Mean loss per row over the global batch.
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


_COLUMNS = [field.name for field in fields(StepRecord)]


class MetricsWriter:
    """Collects step records and writes them in segments from a thread of its own, never on the step path.

    Args:
        paths: The run.
        fence: Number of the driver's start.
        flush_s: Seconds between two segments; not given: as the storage likes it.
    """

    def __init__(self, paths: RunPaths, fence: int, flush_s: float | None = None) -> None:
        self._paths, self._fence, self._flush_s = paths, fence, flush_s or max(1.0, poll_s(paths.metrics))
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
            columns = {name: [getattr(record, name) for record in records] for name in _COLUMNS}
            name = f"{records[0].step:010d}-{self._fence:04d}-{time.time_ns()}.json"
            put_atomic(self._paths.metrics / name, json.dumps(versioned(columns)).encode())
            del self._pending[: len(records)]
            self.written_step = max(self.written_step, records[-1].step)

    def close(self) -> None:
        """Writes the rest and ends the thread."""
        self._closed.set()
        self._thread.join()
        self._try_flush()

    def _run(self) -> None:
        while not self._closed.wait(self._flush_s):
            self._try_flush()

    def _try_flush(self) -> None:
        try:
            self.flush()
        except OSError as error:
            logger.warning("The metrics of %d steps could not be written, will try again: %s", len(self._pending), error)


class MetricsReader:
    """Reads a run's step records, also while they are written.

    `records` holds the first record of each step, `repeated` those of steps that were done again.

    Args:
        paths: The run.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._seen: set[str] = set()
        self.records: dict[int, StepRecord] = {}
        self.repeated: list[StepRecord] = []

    def poll(self) -> list[StepRecord]:
        """Reads what is new; returns the steps that were not known before, in the order of their segments."""
        new = []
        unseen = sorted(set(names(self._paths.metrics)) - self._seen, key=lambda n: n.rsplit("-", 1)[1])
        for name, segment in zip(unseen, read_all_json(self._paths.metrics / name for name in unseen), strict=True):
            self._seen.add(name)
            for record in _read_segment(self._paths.metrics / name, segment):
                known = self.records.get(record.step)
                if known is None:
                    self.records[record.step] = record
                    new.append(record)
                elif known.generation != record.generation:
                    self.repeated.append(record)
        return new


def newest_record(paths: RunPaths) -> StepRecord | None:
    """The step that was recorded last; None before the first.

    Raises:
        OSError: The storage does not answer.
    """
    name = max(names(paths.metrics), key=lambda n: n.rsplit("-", 1)[1], default=None)
    return _read_segment(paths.metrics / name, read_json(paths.metrics / name))[-1] if name else None


def _read_segment(place: Location, columns: dict[str, list[Any]]) -> list[StepRecord]:
    with understood(place, columns):
        known = [name for name in _COLUMNS if name in columns]
        values = zip(*(columns[name] for name in known), strict=True)
        return [StepRecord(**dict(zip(known, one, strict=True))) for one in values]


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


def read_events(paths: RunPaths, *kinds: str) -> list[Event]:
    """The run's events in the order of time, all or those of some kinds.

    Raises:
        ConfigError: One is damaged, or of a newer version.
        OSError: The storage does not answer.
    """
    wanted = [file for name, file in listing(paths.events).items() if not kinds or name.split("-")[1] in kinds]
    return [_event(file, value) for file, value in zip(wanted, read_all_json(wanted), strict=True)]


def _event(file: Location, value: Any) -> Event:
    with understood(file, value):
        return known_fields(Event, value)
