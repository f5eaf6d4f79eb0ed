"""What a report tells, read from a run's directory: finished, failed or running, with or without steps and evaluations.

What happened to the cluster, in one line.

How many rows each logical worker used, and which rows were skipped because they cannot be decoded.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.config.config import Config, flatten
from ray_app.config.sections import FailureSection
from ray_app.errors import ConfigError
from ray_app.report.charts import Clock, seconds, starts_of
from ray_app.runlog.endings import RunEnd, metric_key, read_ends
from ray_app.runlog.evaluations import Evaluation, evaluator_names, rank_evaluations, read_evaluations
from ray_app.runlog.history import counted_word, disturbances, goodput, recoveries, world_sizes
from ray_app.runlog.journal import Event, EventsReader, StepRecord, newest_detail
from ray_app.runlog.lease import is_held
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact_value
from ray_app.runlog.step_records import Course, StepsReader
from ray_app.runlog.stored_config import read_config
from ray_app.storage.files import list_files, read_all, read_json

_MOST_SIZES = 8


def slow_now(events: list[Event]) -> dict[int, Event]:
    """Of the newest set of workers those that keep the others waiting, by rank, with what was said of them."""
    found = dict[int, Event]()
    for event in events:
        if event.kind == "formed":
            found.clear()
        elif event.kind == "slowed":
            found[event.details["rank"]] = event
        elif event.kind == "straggler_recovered":
            found.pop(event.details["rank"], None)
    return found


def what_happened(events: list[Event], course: Course, limits: FailureSection) -> str:
    """One line: disturbances against their budgets, numbers of workers, steps done again, and seconds until the next
    step.

    Args:
        events: The run's, in the order of time.
        course: Its steps.
        limits: The budgets.
    """
    happened = disturbances(events, limits)
    parts = [happened or "nothing went wrong"]
    sizes = [workers for _, workers in world_sizes(course.records)]
    if len(sizes) == 1:
        parts.append(f"{counted_word(sizes[0], 'worker')} throughout")
    elif len(sizes) > _MOST_SIZES:
        parts.append(f"{len(sizes) - 1} changes between {min(sizes)} and {counted_word(max(sizes), 'worker')}")
    elif sizes:
        parts.append(f"workers {' → '.join(map(str, sizes))}")
    if course.repeated:
        parts.append(f"{counted_word(len(course.repeated), 'step')} redone")
    elif happened:
        parts.append("nothing lost: 0 steps redone")
    waits = recoveries(events, course.in_time)
    if waits:
        low, high = seconds(min(waits)), seconds(max(waits))
        parts.append(f"back after {low}" if low == high else f"back after {low} to {high}")
    return "; ".join(parts)


_MOST_SHOWN = 20


@dataclass(frozen=True)
class Share:
    """What one logical worker used.

    Args:
        logical_worker: Which.
        rows: Rows of all recorded steps.
        part: Of those of the one that used most.
    """

    logical_worker: int
    rows: int
    part: float


@dataclass(frozen=True)
class Shares:
    """What the logical workers used.

    Args:
        shown: The first of them.
        logical_workers: How many there are.
        least: Fewest rows of one.
        most: Most rows of one.
    """

    shown: list[Share]
    logical_workers: int
    least: int
    most: int


def shares(used: list[int]) -> Shares | None:
    """The rows of every logical worker; None if there is only one, or no step."""
    if len(used) < 2:
        return None
    most = max(used)
    shown = [Share(v, rows, rows / most if most else 0.0) for v, rows in enumerate(used[:_MOST_SHOWN])]
    return Shares(shown, len(used), min(used), most)


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be decoded.

    Args:
        position: In the manifest.
        path: Its file.
        row_group: Number of the row group in the file.
        row: Number of the row in the row group.
        reason: Why.
    """

    position: int
    path: str
    row_group: int
    row: int
    reason: str


@dataclass(frozen=True)
class ReportedBadRows:
    """The rows that a run met and cannot decode.

    Args:
        first: The first of them by position.
        distinct: How many they are.
    """

    first: list[BadRow]
    distinct: int


def read_bad_rows(paths: RunPaths) -> ReportedBadRows:
    """Reads the list that a run keeps of them.

    Raises:
        OSError: The storage does not answer.
    """
    found = sorted(list_files(paths.bad_rows))
    first = read_all(paths.bad_rows / name for name in found[:_MOST_SHOWN])
    return ReportedBadRows([BadRow(**json.loads(data)) for data in first], len(found))


logger = logging.getLogger(__name__)

_ENDS = {"finished": "finished", "stopped_early": "stopped early", "interrupted": "interrupted", "run_failed": "failed"}
_LOST = "driver_lost"
"""What whoever found the driver gone has recorded, with the status."""
_NOT_SET = "not set"
_PRIVATE = ("run.", "tracking.")
"""Fields that say nothing about the result, or may hold credentials."""


@dataclass(frozen=True)
class Earlier:
    """The best run that ended before this one began.

    Args:
        name: Its name.
        value: Its best value of the metric.
        step: Where that was.
        summary: Its `summary.json`.
        differs: Fields of the configuration with another value: its value and that of this run, as text.
        of: From how many runs it was chosen.
    """

    name: str
    value: float
    step: int
    summary: dict[str, Any]
    differs: dict[str, tuple[str, str]]
    of: int


@dataclass(frozen=True)
class Facts:
    """Everything that a report shows.

    Args:
        paths: The run.
        config: Its configuration.
        status: `running`, `finished`, `stopped early`, `interrupted`, `failed`, or `vanished`: no driver lives, and
            none said how it ended.
        course: Its steps.
        events: In the order of time.
        evaluations: Those of the run's own evaluator, by step.
        others: Those of other evaluators, by their name.
        newest: The newest checkpoint.
        summary: `summary.json` of a run whose newest start has ended, otherwise empty.
        metric: Metric that decides which checkpoint is best.
        mode: Whether more (`max`) or less (`min`) of it is better.
        bad_rows: Those that cannot be decoded.
        earlier: What it is compared with.
        made_s: When this was read, seconds since 1970 (UTC).
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
    earlier: Earlier | None
    made_s: float

    @property
    def records(self) -> Sequence[StepRecord]:
        """Its steps, in order, the first record of each; with the sum of the rows of all logical workers."""
        return self.course.records

    @property
    def repeated(self) -> Sequence[StepRecord]:
        """Records of steps that were done again."""
        return self.course.repeated

    @property
    def in_time(self) -> Sequence[StepRecord]:
        """All records in the order of time, also of steps that were done again."""
        return self.course.in_time

    @property
    def best(self) -> Evaluation | None:
        """The best evaluation: of a run that has ended the one that its summary names."""
        named = (self.summary.get("best") or {}).get("step")
        return next((e for e in self.evaluations if e.step == named), None) or next(
            iter(rank_evaluations(self.evaluations, self.metric, self.mode)), None
        )

    @property
    def digest(self) -> str | None:
        """Digest of the run's result: of its newest checkpoint, or of the best where training stopped early."""
        return self.summary.get("params_digest") or (self.newest.params_digest if self.newest else None)

    @property
    def story(self) -> str:
        """What happened to the cluster, in one line."""
        return what_happened(self.events, self.course, self.config.failure)

    @property
    def reason(self) -> str | None:
        """Why the run ended, if that was not its plan."""
        end = _end(self.events)
        return str(end.details["reason"]) if end and end.details.get("reason") else None

    @property
    def ray_job(self) -> str | None:
        """Page of its newest job in the dashboard of Ray's cluster, if that had one."""
        known = newest_detail(self.events, "ray_job")
        page = str(known.get("page")) if isinstance(known, dict) else ""
        return page if page.startswith(("http://", "https://")) else None

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run, if its start said so."""
        return newest_detail(self.events, "total_steps")

    @cached_property
    def clock(self) -> Clock:
        """The run's clock."""
        signs = (
            [e.time_s for e in self.events] + [r.time_s for r in self.in_time] + [e.time_s for e in self.evaluations]
        )
        return Clock([e.time_s for e in starts_of(self.events)], signs)

    @cached_property
    def goodput(self) -> float | None:
        """See `summary.json`."""
        return goodput(self.records, self.repeated)

    @property
    def epochs_begun(self) -> int:
        """Epochs as the configuration counts them, of which a step was done."""
        if not self.records:
            return 0
        last, steps = self.records[-1], self.config.train.steps_per_epoch
        return -(-last.step // steps) if steps else last.epoch + 1

    @property
    def rows(self) -> int:
        """Rows of all recorded steps."""
        return sum(self.course.rows)

    @property
    def skipped(self) -> int:
        """Uses of rows that cannot be decoded, in all recorded steps."""
        return self.course.skipped

    @property
    def wall_s(self) -> float:
        """Seconds in which a driver worked on the run."""
        return self.clock.end_s

    @property
    def sizes(self) -> list[list[int]]:
        """See `summary.json`."""
        return world_sizes(self.records)


class FactsReader:
    """Reads a run again and again: steps and events that were read once are not read again.

    Args:
        paths: The run.
    """

    def __init__(self, paths: RunPaths) -> None:
        self.paths, self.events, self.steps = paths, EventsReader(paths), StepsReader(paths)

    def read(self) -> Facts:
        """See `read_facts`."""
        return read_facts(self.paths, with_earlier=False, reader=self)


def read_facts(paths: RunPaths, with_earlier: bool = True, reader: FactsReader | None = None) -> Facts:
    """Reads a run.

    Args:
        paths: The run.
        with_earlier: Look also at the runs beside it, for the best that ended before it began.
        reader: What has read it before.

    Raises:
        ConfigError: It is no run, or not one of this version.
        OSError: The storage does not answer.
    """
    config, reader = read_config(paths, with_defaults=True), reader or FactsReader(paths)
    events, evaluations = reader.events.read(), read_evaluations(paths)
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
        {name: read_evaluations(paths, name) for name in evaluator_names(paths)},
        commits[-1] if commits else None,
        (read_json(paths.summary) or {}) if _end(events) is not None else {},
        metric,
        mode,
        read_bad_rows(paths),
        _best_earlier(paths, config, metric, mode, _started_s(events)) if with_earlier else None,
        time.time(),
    )


def _status(paths: RunPaths, events: list[Event]) -> str:
    end = _end(events)
    if end is not None:
        return _ENDS.get(str(end.details.get("status")), "interrupted") if end.kind == _LOST else _ENDS[end.kind]
    return "running" if is_held(paths) else "vanished"


def _end(events: list[Event]) -> Event | None:
    """How the newest start ended, if it said so."""
    starts = starts_of(events)
    return next(
        (e for e in reversed(events) if starts and e.kind in (*_ENDS, _LOST) and e.fence == starts[-1].fence), None
    )


def _started_s(events: list[Event]) -> float:
    return min((event.time_s for event in starts_of(events)), default=time.time())


def _best_earlier(paths: RunPaths, config: Config, metric: str, mode: str, before_s: float) -> Earlier | None:
    """The best of the runs next to this one; what is no finished run, or cannot be read, is passed over."""
    storage, key, sign = paths.root.parent, metric_key(metric), -1 if mode == "max" else 1
    near = [end for end in read_ends(storage) if end.metric == key and end.run != paths.name]
    near = [end for end in near if math.isfinite(end.value) and end.ended_s <= before_s]
    for end in sorted(near, key=lambda end: (sign * end.value, end.ended_s)):
        other = RunPaths(storage / end.run)
        try:
            summary = read_json(other.summary)
            if RunEnd.from_summary(end.run, summary) == end:
                differs = _differing(read_config(other, with_defaults=True), config)
                return Earlier(end.run, end.value, int(summary["best"]["step"]), summary, differs, len(near))
        except (ConfigError, OSError, ValueError, KeyError, TypeError) as error:
            logger.debug("%s is not compared with: %s", other.root, error)
    return None


def _differing(theirs: Config, ours: Config) -> dict[str, tuple[str, str]]:
    one, other = shown_fields(theirs), shown_fields(ours)
    return {
        name: (one.get(name, _NOT_SET), other.get(name, _NOT_SET))
        for name in {**other, **one}
        if one.get(name) != other.get(name)
    }


def shown_fields(config: Config) -> dict[str, str]:
    """The fields of a configuration, but names, places and tracking, as text without secrets."""
    values = flatten(redact_value(config.to_dict()))
    return {
        name: _NOT_SET if value is None else str(value)
        for name, value in values.items()
        if not name.startswith(_PRIVATE)
    }


def changed_fields(config: Config) -> dict[str, str]:
    """Those of them that differ from their default."""
    defaults = shown_fields(Config())
    return {name: value for name, value in shown_fields(config).items() if value != defaults.get(name)}
