"""The tables of a report: budgets, counters, parts of the time, events, an earlier run, and the results by class.

The results by class are those of one evaluation: confusion matrix, metrics per class and examples.
The contents of evaluations are validated, because user code writes them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ray_app.errors import join_names
from ray_app.report.charts import seconds, start_events
from ray_app.report.facts import Facts, current_stragglers
from ray_app.report.figures import describe_event
from ray_app.runlog.evaluations import Evaluation, read_evaluation
from ray_app.runlog.history import column, count, counted_word, recoveries, restarts

_ORDINARY = ("checkpointed", "evaluated", "worker_exit", "workers")
_MAX_HAPPENINGS, _MAX_CHARS = 300, 8000


@dataclass(frozen=True)
class BudgetLine:
    """A budget of disturbances, and its use."""

    name: str
    used: int
    allowed: int | None
    ever: int

    @property
    def part(self) -> float:
        """The used part of the budget, at most 1."""
        return min(1.0, self.used / self.allowed) if self.allowed else float(self.allowed == 0 and self.used > 0)


def budgets(facts: Facts) -> list[BudgetLine]:
    """Returns the budgets of failures and preemptions, with their use in the newest start."""
    limits, starts = facts.config.failure, start_events(facts.events)
    newest_events = [event for event in facts.events if starts and event.fence == starts[-1].fence]
    kinds = (("failures", "failed", limits.max_failures), ("preemptions", "preempted", -1))
    return [
        BudgetLine(name, count(newest_events, kind), limit if limit >= 0 else None, count(facts.events, kind))
        for name, kind, limit in kinds
    ]


def counters(facts: Facts) -> list[tuple[str, str, str]]:
    """Returns the counters without a budget, over all starts: name, number and a note."""
    events, restart_counts = facts.events, restarts(facts.events)
    recovery_times_s = recoveries(events, facts.in_time)
    recovery_text = join_names(list(map(seconds, recovery_times_s)))
    recovery_note = f"seconds from a loss to the next finished step: {recovery_text}" if recovery_times_s else ""
    write_note = f"retried; {count(events, 'write_failed'):,} failed for good"
    return [
        ("steps done again", f"{len(facts.course.repeated):,}", "finished before, and lost with the workers"),
        ("recoveries", f"{len(recovery_times_s):,}", recovery_note),
        ("resizes", f"{count(events, 'resized'):,}", ""),
        ("workers replaced", f"{count(events, 'replaced'):,}", "after failures"),
        ("failures of the storage", f"{restart_counts['storage']:,}", "charged to no budget"),
        ("driver restarts", f"{restart_counts['driver']:,}", ""),
        ("checkpoints", f"{count(events, 'checkpointed'):,}", "committed"),
        ("checkpoint writes", f"{count(events, 'write_retried'):,}", write_note),
        ("fallbacks", f"{count(events, 'fallback'):,}", "damaged checkpoints skipped"),
        ("evaluations", f"{len(facts.evaluations):,}", f"{count(events, 'evaluation_skipped'):,} skipped"),
        *health(facts),
    ]


def health(facts: Facts) -> list[tuple[str, str, str]]:
    """Returns name, number and note about stragglers and silent data corruption, if there is any."""
    rows, stragglers = list[tuple[str, str, str]](), current_stragglers(facts.events)
    if stragglers:
        rows.append(("slow workers now", f"{len(stragglers)}", "; ".join(map(describe_event, stragglers.values()))))
    if facts.course.recomputed:
        corrupt_workers = counted_word(count(facts.events, "sdc_detected"), "worker")
        rows.append(("shares computed twice", f"{facts.course.recomputed:,}", f"{corrupt_workers} computed wrongly"))
    return rows


def time_parts(facts: Facts) -> list[tuple[str, str, float]]:
    """Returns tone, name and part, of 1, of each use of the time since the first step, if there is a goodput."""
    part, records = facts.goodput, facts.in_time
    if part is None:
        return []
    times, steps_s = column(records, "time_s"), column(records, "step_ms") / 1e3
    wall_s = float(times[-1]) - facts.records[0].time_s
    redone = float(column(facts.course.repeated, "step_ms").sum()) / 1e3 / wall_s
    idle = float(np.maximum(0, np.diff(times) - steps_s[1:]).sum()) / wall_s
    redone = min(redone, 1 - part)
    idle = min(idle, 1 - part - redone)
    slower = 1 - part - redone - idle
    return [
        ("green", "steps that counted, at the undisturbed speed", part),
        ("orange", "steps on fewer workers, or slower ones", slower),
        ("purple", "no worker stepped: recovery, new starts", idle),
        ("red", "steps done again", redone),
    ]


def happenings(facts: Facts) -> list[tuple[str, str, str]]:
    """Returns the events except ordinary ones, at most the newest 300: the run's time, the kind and the text."""
    events = [event for event in facts.events if event.kind not in _ORDINARY]
    return [
        (seconds(facts.clock.at(event.time_s)), event.kind.replace("_", " "), describe_event(event)[:_MAX_CHARS])
        for event in events[-_MAX_HAPPENINGS:]
    ]


def sizes_text(sizes: Any) -> str:
    """Returns world sizes as a text such as `2 → 1 → 2`, shortened in the middle."""
    try:
        texts = [str(int(workers)) for _, workers in sizes]
    except (TypeError, ValueError):
        return "-"
    return " → ".join(texts if len(texts) <= 12 else [*texts[:6], "…", *texts[-5:]]) or "-"


_IMAGE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]+")
_MAX_CLASSES = 30
_MAX_PAIRS = 25
_MAX_EXAMPLES = 24


@dataclass(frozen=True)
class Cell:
    """One field of the confusion matrix."""

    count: int
    part: float
    is_right: bool
    title: str


@dataclass(frozen=True)
class ByClass:
    """The results of one evaluation by class.

    Args:
        matrix: Rows of cells by true class; empty with too many classes or without a confusion matrix.
        pairs: With too many classes: true class, predicted class and rows of the most frequent confusions.
        left_out: Number of classes that `per_class` does not contain, which have the better metrics.
    """

    step: int
    is_best: bool
    classes: list[str] = field(default_factory=list)
    matrix: list[list[Cell]] = field(default_factory=list)
    pairs: list[tuple[str, str, int]] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    per_class: list[tuple[str, list[float | None]]] = field(default_factory=list)
    left_out: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)


def by_class(facts: Facts) -> ByClass | None:
    """Returns the results by class of the best evaluation, or else of the last one; None if both have none."""
    best = facts.best
    candidates = [read_evaluation(facts.paths, e.step) for e in (best, *facts.evaluations[-1:]) if e is not None]
    evaluation = next((e for e in candidates if e is not None and (e.tables or e.examples)), None)
    if evaluation is None:
        return None
    matrix_counts = _counts(evaluation.tables.get("confusion_matrix"))
    matrix = matrix_counts if len(matrix_counts) > 1 and len(matrix_counts) == len(matrix_counts[0]) else []
    classes = [str(name) for name in evaluation.classes]
    classes += [str(i) for i in range(len(classes), len(matrix))]
    is_small = len(matrix) <= _MAX_CLASSES
    columns, rows = _per_class(evaluation, classes)
    return ByClass(
        evaluation.step,
        best is not None and evaluation.step == best.step,
        classes,
        _cells(matrix, classes) if is_small else [],
        [] if is_small else _confused(matrix, classes),
        columns,
        rows[:_MAX_CLASSES],
        max(0, len(rows) - _MAX_CLASSES),
        [_example(example) for example in evaluation.examples[:_MAX_EXAMPLES]],
    )


def _counts(table: Any) -> list[list[int]]:
    """Returns a table as a square matrix of counts; empty if it is not one."""
    try:
        counts = [[int(value) for value in row] for row in table or []]
    except (TypeError, ValueError, OverflowError):
        return []
    return counts if all(len(row) == len(counts) for row in counts) else []


def _cells(matrix: list[list[int]], classes: list[str]) -> list[list[Cell]]:
    cell_rows = []
    for truth, row in enumerate(matrix):
        rows = max(1, sum(row))
        titles = [f"{classes[truth]} predicted as {classes[p]}: {n:,} of {sum(row):,} rows" for p, n in enumerate(row)]
        cell_rows.append([Cell(n, n / rows, p == truth, titles[p]) for p, n in enumerate(row)])
    return cell_rows


def _confused(matrix: list[list[int]], classes: list[str]) -> list[tuple[str, str, int]]:
    """Returns the most frequent confusions: true class, predicted class, rows."""
    confusions = ((n, truth, p) for truth, row in enumerate(matrix) for p, n in enumerate(row) if n and truth != p)
    return [(classes[truth], classes[p], n) for n, truth, p in sorted(confusions, reverse=True)[:_MAX_PAIRS]]


def _per_class(evaluation: Evaluation, classes: list[str]) -> tuple[list[str], list[tuple[str, list[float | None]]]]:
    """Returns the names of metrics and each class with them; of many classes those with a low F1 first."""
    tables = {name: _numbers(table) for name, table in evaluation.tables.items()}
    usable = {name: values for name, values in tables.items() if values and len(values) == len(classes)}
    rows: list[tuple[str, list[float | None]]] = [
        (name, [v[i] for v in usable.values()]) for i, name in enumerate(classes)
    ]
    if len(rows) > _MAX_CLASSES and usable:
        sort_values = [math.inf if value is None else value for value in usable.get("f1", list(usable.values())[-1])]
        rows = [rows[i] for i in sorted(range(len(rows)), key=sort_values.__getitem__)]
    return list(usable), rows if usable else []


def _numbers(table: Any) -> list[float | None]:
    """Returns a table as a list of numbers, with None for NaN; empty if it is not one."""
    try:
        return [float(value) if value is not None and math.isfinite(float(value)) else None for value in table]
    except (TypeError, ValueError):
        return []


def _example(example: dict[str, Any]) -> dict[str, Any]:
    image, confidence = example.get("image"), example.get("confidence")
    return {
        "row": example.get("row"),
        "truth": str(example.get("truth")),
        "predicted": str(example.get("predicted")),
        "confidence": f"{confidence:.0%}" if isinstance(confidence, (int, float)) and math.isfinite(confidence) else "",
        "image": image if isinstance(image, str) and _IMAGE.fullmatch(image) else None,
    }
