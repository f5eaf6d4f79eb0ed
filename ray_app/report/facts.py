"""The facts of a run for its report (`Facts`), read from the run's directory.

The run may be finished, failed or running, and may have no steps and no evaluations.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.config.config import Config, flatten
from ray_app.config.sections import FailureSection
from ray_app.report.charts import Clock, seconds, start_events
from ray_app.runlog.evaluations import Evaluation, evaluator_names, rank_evaluations, read_scores
from ray_app.runlog.history import (
    Course,
    StepsReader,
    column,
    counted_word,
    disturbances,
    goodput,
    recoveries,
    world_sizes,
)
from ray_app.runlog.journal import Event, EventsReader, StepRecord, newest_detail
from ray_app.runlog.lease import is_held
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact_value
from ray_app.runlog.stored_config import read_config
from ray_app.storage.files import list_files, read_all, read_json
from ray_app.task.constant_scores import describe_constant

_MAX_SIZES = 8


def current_stragglers(events: list[Event]) -> dict[int, Event]:
    """Returns the stragglers of the newest generation, by rank, with the newest event of each."""
    stragglers = dict[int, Event]()
    for event in events:
        if event.kind == "formed":
            stragglers.clear()
        elif event.kind == "straggler_detected":
            stragglers[event.details["rank"]] = event
        elif event.kind == "straggler_recovered":
            stragglers.pop(event.details["rank"], None)
    return stragglers


def describe_cluster(events: list[Event], course: Course, limits: FailureSection) -> str:
    """Returns one line: disturbances, budgets, world sizes, repeated steps, times to the next finished step."""
    happened = disturbances(events, limits)
    parts = [happened or "nothing went wrong"]
    sizes = [workers for _, workers in world_sizes(course.records)]
    if len(sizes) == 1:
        parts.append(f"{counted_word(sizes[0], 'worker')} throughout")
    elif len(sizes) > _MAX_SIZES:
        parts.append(f"{len(sizes) - 1} changes between {min(sizes)} and {counted_word(max(sizes), 'worker')}")
    elif sizes:
        parts.append(f"workers {' → '.join(map(str, sizes))}")
    if course.repeated:
        parts.append(f"{counted_word(len(course.repeated), 'step')} redone")
    elif happened and not any(event.kind == "resumed" for event in events):
        # After a resume, steps may have been done again, the records of which were lost with rank 0.
        parts.append("nothing lost: 0 steps redone")
    waits = recoveries(events, course.in_time)
    if waits:
        low, high = seconds(min(waits)), seconds(max(waits))
        parts.append(f"back after {low}" if low == high else f"back after {low} to {high}")
    return "; ".join(parts)


_MAX_SHOWN = 20


@dataclass(frozen=True)
class Share:
    """The rows that one logical worker used."""

    logical_worker: int
    rows: int
    part: float


@dataclass(frozen=True)
class Shares:
    """The rows that the logical workers used."""

    first: list[Share]
    logical_workers: int
    min_rows: int
    max_rows: int


def logical_worker_shares(used: list[int]) -> Shares | None:
    """Returns the rows of each logical worker; None if there is only one, or no step."""
    if len(used) < 2:
        return None
    max_rows = max(used)
    first = [Share(v, rows, rows / max_rows if max_rows else 0.0) for v, rows in enumerate(used[:_MAX_SHOWN])]
    return Shares(first, len(used), min(used), max_rows)


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be decoded."""

    position: int
    path: str
    row_group: int
    row: int
    reason: str


@dataclass(frozen=True)
class ReportedBadRows:
    """The rows that a run has read and cannot decode."""

    first: list[BadRow]
    distinct: int


def read_bad_rows(paths: RunPaths) -> ReportedBadRows:
    """Reads a run's list of rows that cannot be decoded; raises OSError if the storage does not answer."""
    files = sorted(list_files(paths.bad_rows))
    first = read_all(paths.bad_rows / name for name in files[:_MAX_SHOWN])
    return ReportedBadRows([BadRow(**json.loads(data)) for data in first], len(files))


_ENDS = {"finished": "finished", "stopped_early": "stopped early", "interrupted": "interrupted", "run_failed": "failed"}
_LOST = "driver_lost"
"""Event of the process that has noticed the death of the driver; it has the status of the run."""
_NOT_SET = "not set"
_PRIVATE = ("run.", "tracking.")
"""Sections with fields that do not affect the result, or may contain credentials."""


@dataclass(frozen=True)
class Facts:
    """The facts that a report shows.

    Args:
        status: `running`, `finished`, `stopped early`, `interrupted`, `failed`, or `vanished`: no driver lives, and
            none has recorded the end.
        evaluations: Evaluations of the run's own evaluator, by step, see `read_scores`.
        others: Evaluations of the other evaluators, by the evaluator's name.
        summary: The content of `summary.json`; empty unless the newest start has ended.
        made_s: Time at which the facts were read, seconds since 1970 (UTC).
    """

    paths: RunPaths
    config: Config
    status: str
    course: Course
    events: list[Event]
    evaluations: list[Evaluation]
    others: dict[str, list[Evaluation]]
    newest: Commit | None
    summary: dict[str, Any]
    metric: str
    mode: str
    bad_rows: ReportedBadRows
    made_s: float

    @property
    def records(self) -> Sequence[StepRecord]:
        """The first record of each step, in the order of the steps, with the sum of the rows of all logical workers."""
        return self.course.records

    @property
    def in_time(self) -> Sequence[StepRecord]:
        """All records in the order of time, also those of repeated steps."""
        return self.course.in_time

    @property
    def best(self) -> Evaluation | None:
        """The best evaluation; if the run has ended, the one in its summary."""
        named = (self.summary.get("best") or {}).get("step")
        return next((e for e in self.evaluations if e.step == named), None) or next(
            iter(rank_evaluations(self.evaluations, self.metric, self.mode)), None
        )

    @property
    def digest(self) -> str | None:
        """Digest of the run's result: of its newest checkpoint, or of the best one if training stopped early."""
        return self.summary.get("params_digest") or (self.newest.params_digest if self.newest else None)

    @property
    def story(self) -> str:
        """The line about the cluster, see `describe_cluster`."""
        return describe_cluster(self.events, self.course, self.config.failure)

    @property
    def reason(self) -> str | None:
        """The reason for which the run ended before it was complete."""
        end = _end_event(self.events)
        return str(end.details["reason"]) if end and end.details.get("reason") else None

    @property
    def ray_job(self) -> str | None:
        """Address of the run's newest job in the dashboard of the Ray cluster, if the cluster had one."""
        job = newest_detail(self.events, "ray_job")
        page = str(job.get("page")) if isinstance(job, dict) else ""
        return page if page.startswith(("http://", "https://")) else None

    @property
    def total_steps(self) -> int | None:
        """Number of steps of the whole run, if a start has recorded it."""
        return newest_detail(self.events, "total_steps")

    @cached_property
    def clock(self) -> Clock:
        """The run's clock."""
        others = [one.time_s for some in (self.events, self.evaluations) for one in some]
        record_times = np.concatenate([column(self.in_time, "time_s"), others])
        return Clock([e.time_s for e in start_events(self.events)], record_times)

    @property
    def constant_notes(self) -> list[str]:
        """The sentences that compare the evaluation with a constant prediction, as at the end of the run."""
        return describe_constant(self.summary)

    @cached_property
    def goodput(self) -> float | None:
        """The goodput, as in `summary.json`."""
        return goodput(self.records, self.course.repeated)

    @property
    def epochs_begun(self) -> int:
        """Number of epochs, as the configuration counts them, with at least one finished step."""
        if not self.records:
            return 0
        last, steps = self.records[-1], self.config.train.steps_per_epoch
        return -(-last.step // steps) if steps else last.epoch + 1

    @property
    def rows(self) -> int:
        """Rows of all recorded steps."""
        return sum(self.course.rows)

    @property
    def wall_s(self) -> float:
        """Seconds in which a driver worked on the run."""
        return self.clock.end_s

    @property
    def sizes(self) -> list[list[int]]:
        """The first step and the number of workers of each world size, as in `summary.json`."""
        return world_sizes(self.records)


class FactsReader:
    """Reads a run repeatedly; steps and events that it has read before are not read again."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.events = EventsReader(paths)
        self.steps = StepsReader(paths)

    def read(self) -> Facts:
        """See `read_facts`."""
        return read_facts(self.paths, self)


def read_facts(paths: RunPaths, reader: FactsReader | None = None) -> Facts:
    """Reads the facts of a run.

    Raises:
        ConfigError: The directory is not a run directory, or of another version.
        OSError: The storage does not answer.
    """
    config, reader = read_config(paths, with_defaults=True), reader or FactsReader(paths)
    events, evaluations = reader.events.read(), read_scores(paths)
    commits = CheckpointStore(paths).commits()
    metric = config.evaluate.metric or newest_detail(events, "metric") or "loss"
    mode = config.evaluate.mode or newest_detail(events, "mode") or ("min" if metric == "loss" else "max")
    status = _status(paths, events)
    return Facts(
        paths,
        config,
        status,
        reader.steps.read(),
        events,
        evaluations,
        {name: read_scores(paths, name) for name in evaluator_names(paths)},
        commits[-1] if commits else None,
        (read_json(paths.summary) or {}) if _end_event(events) is not None else {},
        metric,
        mode,
        read_bad_rows(paths),
        time.time(),
    )


def _status(paths: RunPaths, events: list[Event]) -> str:
    end = _end_event(events)
    if end is not None:
        return _ENDS.get(str(end.details.get("status")), "interrupted") if end.kind == _LOST else _ENDS[end.kind]
    return "running" if is_held(paths) else "vanished"


def _end_event(events: list[Event]) -> Event | None:
    """Returns the event that ended the newest start, if there is one."""
    starts = start_events(events)
    return next(
        (e for e in reversed(events) if starts and e.kind in (*_ENDS, _LOST) and e.fence == starts[-1].fence), None
    )


def shown_fields(config: Config) -> dict[str, str]:
    """Returns the fields of a configuration as text without secrets, except names, paths and tracking."""
    values = flatten(redact_value(config.to_dict()))
    return {
        name: _NOT_SET if value is None else str(value)
        for name, value in values.items()
        if not name.startswith(_PRIVATE)
    }


def changed_fields(config: Config) -> dict[str, str]:
    """Returns the fields of `shown_fields` that differ from their default."""
    defaults = shown_fields(Config())
    return {name: value for name, value in shown_fields(config).items() if value != defaults.get(name)}
