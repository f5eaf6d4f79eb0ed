"""The tables of a report: budgets, counters, where the time went, what happened, and the comparison with an earlier
run.

What an evaluation found about the classes: confusion matrix, figures per class, examples. Nothing of it is trusted.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ray_app.report.charts import seconds, starts_of
from ray_app.report.facts import Facts, slow_now
from ray_app.report.figures import described
from ray_app.runlog.evaluations import Evaluation
from ray_app.runlog.history import count, counted_word, recoveries, restarts

_ORDINARY = ("checkpointed", "evaluated", "worker_exit", "workers")
_MOST_HAPPENINGS, _MOST_CHARS = 300, 8000


@dataclass(frozen=True)
class BudgetLine:
    """What may go wrong, and what did.

    Args:
        name: What.
        used: In the newest start.
        allowed: Per start; None: any number.
        ever: In all starts.
    """

    name: str
    used: int
    allowed: int | None
    ever: int

    @property
    def part(self) -> float:
        """Of the budget, at most 1."""
        return min(1.0, self.used / self.allowed) if self.allowed else float(self.allowed == 0 and self.used > 0)


def budgets(facts: Facts) -> list[BudgetLine]:
    """The ledger: failures and preemptions against what is allowed in one start."""
    limits, starts = facts.config.failure, starts_of(facts.events)
    this = [event for event in facts.events if starts and event.fence == starts[-1].fence]
    made = []
    for name, kind, most in (
        ("failures", "failed", limits.max_failures),
        ("preemptions", "preempted", limits.max_preemptions),
    ):
        made.append(BudgetLine(name, count(this, kind), most if most >= 0 else None, count(facts.events, kind)))
    return made


def counters(facts: Facts) -> list[tuple[str, str, str]]:
    """What has no budget, over all starts: name, number and a note."""
    events, happened = facts.events, restarts(facts.events)
    waits = recoveries(events, facts.in_time)
    back = ", ".join(seconds(wait) for wait in waits[:12]) + (f" and {len(waits) - 12} more" if len(waits) > 12 else "")
    return [
        ("steps done again", f"{len(facts.repeated):,}", "finished before, and lost with the workers"),
        ("recoveries", f"{len(waits):,}", f"seconds from a loss to the next finished step: {back}" if waits else ""),
        ("resizes", f"{count(events, 'resized'):,}", ""),
        ("workers replaced", f"{count(events, 'replaced'):,}", "after failures"),
        ("failures of the storage", f"{happened['storage']:,}", "charged to no budget"),
        ("driver restarts", f"{happened['driver']:,}", ""),
        ("checkpoints", f"{count(events, 'checkpointed'):,}", "committed"),
        (
            "checkpoint writes",
            f"{count(events, 'write_retried'):,}",
            f"retried; {count(events, 'write_failed'):,} failed for good",
        ),
        ("fallbacks", f"{count(events, 'fallback'):,}", "checkpoints passed over as damaged"),
        ("evaluations", f"{len(facts.evaluations):,}", f"{count(events, 'evaluation_skipped'):,} skipped"),
        *health(facts),
    ]


def health(facts: Facts) -> list[tuple[str, str, str]]:
    """What is known of workers that are slow or compute wrongly: name, number and a note; nothing where there is
    nothing to tell.
    """
    found, slow = list[tuple[str, str, str]](), slow_now(facts.events)
    if slow:
        found.append(("slow workers now", f"{len(slow)}", "; ".join(described(event) for event in slow.values())))
    if facts.course.replayed:
        wrong = counted_word(count(facts.events, "sdc_detected"), "worker")
        found.append(("shares computed twice", f"{facts.course.replayed:,}", f"{wrong} found to compute wrongly"))
    return found


def time_parts(facts: Facts) -> list[tuple[str, str, float]]:
    """Where the time since the first step went: tone, name, part of it; the parts add up to 1. Empty without a
    goodput.
    """
    part, records = facts.goodput, facts.in_time
    if part is None:
        return []
    wall_s = records[-1].time_s - facts.records[0].time_s
    redone = sum(record.step_ms for record in facts.repeated) / 1e3 / wall_s
    still = sum(max(0.0, b.time_s - a.time_s - b.step_ms / 1e3) for a, b in pairwise(records)) / wall_s
    redone = min(redone, 1 - part)
    still = min(still, 1 - part - redone)
    slower = 1 - part - redone - still
    return [
        ("green", "steps that counted, at the undisturbed speed", part),
        ("orange", "steps on fewer workers, or slower ones", slower),
        ("purple", "nobody stepped: recovery, new starts", still),
        ("red", "steps done again", redone),
    ]


def happenings(facts: Facts) -> list[tuple[str, str, str]]:
    """Everything that is not ordinary: the run's time, the kind, and words. At most the newest 300."""
    told = [event for event in facts.events if event.kind not in _ORDINARY]
    return [
        (seconds(facts.clock.at(event.time_s)), event.kind.replace("_", " "), described(event)[:_MOST_CHARS])
        for event in told[-_MOST_HAPPENINGS:]
    ]


def comparison(facts: Facts) -> list[tuple[str, str, str]]:
    """This run and the best earlier one: what, here, there. Empty if there is none."""
    earlier = facts.earlier
    if earlier is None:
        return []
    theirs, best = earlier.summary, facts.best
    digest = facts.digest
    same = " (equal)" if digest and digest == theirs.get("params_digest") else ""
    wall_s = (theirs.get("timing") or {}).get("wall_s")
    return [
        (
            f"best {facts.metric}",
            f"{best.metrics[facts.metric]:.4f} at step {best.step:,}" if best else "-",
            f"{earlier.value:.4f} at step {earlier.step:,}",
        ),
        ("parameters", _short(digest) + same, _short(theirs.get("params_digest"))),
        ("steps", f"{facts.records[-1].step if facts.records else 0:,}", _text(theirs.get("steps"))),
        ("rows", f"{facts.rows:,}", _text(theirs.get("rows"))),
        ("wall time", seconds(facts.wall_s), seconds(wall_s) if isinstance(wall_s, (int, float)) else "-"),
        ("goodput", _percent(facts.goodput), _percent(theirs.get("goodput"))),
        ("workers", sizes_text(facts.sizes), sizes_text(theirs.get("world_sizes"))),
    ]


def _short(digest: Any) -> str:
    return str(digest)[:12] if digest else "-"


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else "-"


def _percent(value: Any) -> str:
    return f"{value:.1%}" if isinstance(value, (int, float)) else "-"


def sizes_text(sizes: Any) -> str:
    """`2 → 1 → 2`, shortened in the middle."""
    try:
        shown = [str(int(workers)) for _, workers in sizes]
    except (TypeError, ValueError):
        return "-"
    return " → ".join(shown if len(shown) <= 12 else [*shown[:6], "…", *shown[-5:]]) or "-"


_IMAGE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]+")
_MOST_CLASSES, _MOST_PAIRS, _MOST_EXAMPLES = 30, 25, 24


@dataclass(frozen=True)
class Cell:
    """One field of the confusion matrix.

    Args:
        count: Rows.
        part: Of the rows of the true class.
        is_right: Whether truth and prediction are the same.
        title: The same in words.
    """

    count: int
    part: float
    is_right: bool
    title: str


@dataclass(frozen=True)
class ByClass:
    """What is shown of one evaluation.

    Args:
        step: Its step.
        is_best: Whether it is the best of the run.
        classes: Names.
        matrix: Rows of cells by true class; empty if there are too many classes or there is none.
        pairs: Instead: true class, predicted class and rows of the most frequent confusions.
        columns: Names of the figures per class.
        per_class: Name of the class and its figures.
        left_out: Classes that `per_class` leaves out, the better ones.
        examples: Rows that were predicted wrong.
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
    """What to show of the best evaluation, or of the last one that has tables or examples; None if none has."""
    best = facts.best
    candidates = [*([best] if best else []), *reversed(facts.evaluations)]
    chosen = next((e for e in candidates if e.tables or e.examples), None)
    if chosen is None:
        return None
    made = _counts(chosen.tables.get("confusion_matrix"))
    matrix = made if len(made) > 1 and len(made) == len(made[0]) else []
    classes = [str(name) for name in chosen.classes]
    classes += [str(i) for i in range(len(classes), len(matrix))]
    is_small = len(matrix) <= _MOST_CLASSES
    columns, rows = _per_class(chosen, classes)
    return ByClass(
        chosen.step,
        chosen is best,
        classes,
        _cells(matrix, classes) if is_small else [],
        [] if is_small else _confused(matrix, classes),
        columns,
        rows[:_MOST_CLASSES],
        max(0, len(rows) - _MOST_CLASSES),
        [_example(example) for example in chosen.examples[:_MOST_EXAMPLES]],
    )


def _counts(table: Any) -> list[list[int]]:
    """A matrix of counts, or nothing if it is none."""
    try:
        made = [[int(value) for value in row] for row in table or []]
    except (TypeError, ValueError, OverflowError):
        return []
    return made if all(len(row) == len(made) for row in made) else []


def _cells(matrix: list[list[int]], classes: list[str]) -> list[list[Cell]]:
    made = []
    for truth, row in enumerate(matrix):
        rows = max(1, sum(row))
        titles = [f"{classes[truth]} predicted as {classes[p]}: {n:,} of {sum(row):,} rows" for p, n in enumerate(row)]
        made.append([Cell(n, n / rows, p == truth, titles[p]) for p, n in enumerate(row)])
    return made


def _confused(matrix: list[list[int]], classes: list[str]) -> list[tuple[str, str, int]]:
    """The most frequent confusions."""
    wrong = ((n, truth, p) for truth, row in enumerate(matrix) for p, n in enumerate(row) if n and truth != p)
    return [(classes[truth], classes[p], n) for n, truth, p in sorted(wrong, reverse=True)[:_MOST_PAIRS]]


def _per_class(found: Evaluation, classes: list[str]) -> tuple[list[str], list[tuple[str, list[float | None]]]]:
    """Figures per class; if there are many classes, those with the lowest F1 first, without it those with the lowest
    last figure.
    """
    tables = {name: _numbers(table) for name, table in found.tables.items()}
    usable = {name: values for name, values in tables.items() if values and len(values) == len(classes)}
    rows: list[tuple[str, list[float | None]]] = [
        (name, [v[i] for v in usable.values()]) for i, name in enumerate(classes)
    ]
    if len(rows) > _MOST_CLASSES and usable:
        worth = [math.inf if value is None else value for value in usable.get("f1", list(usable.values())[-1])]
        rows = [rows[i] for i in sorted(range(len(rows)), key=worth.__getitem__)]
    return list(usable), rows if usable else []


def _numbers(table: Any) -> list[float | None]:
    """A list of numbers, NaN as None, or nothing if it is none."""
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
