"""What an evaluation found about the classes: confusion matrix, figures per class, examples. Nothing of it is trusted."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from ray_app.record.evaluations import Evaluation
from ray_app.report.facts import Facts

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
    """Figures per class; if there are many classes, those with the lowest F1 first, without it those with the lowest last figure."""
    tables = {name: _numbers(table) for name, table in found.tables.items()}
    usable = {name: values for name, values in tables.items() if values and len(values) == len(classes)}
    rows: list[tuple[str, list[float | None]]] = [(name, [v[i] for v in usable.values()]) for i, name in enumerate(classes)]
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
