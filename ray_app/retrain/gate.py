"""Is the challenger better than the champion? Pure functions of what the blocks of the evaluation rows gave for the two.

The interval of the gain is that of the paired bootstrap: blocks of consecutive rows are drawn with replacement, the same for both models,
and the metric of both is computed for each draw (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, percentile interval;
Künsch 1989 for blocks). Rows of a block may depend on each other, blocks may not. The draws are keyed, so the same rows and models give the
same interval. The rule is that of a one-sided test at (1 - confidence) / 2: superiority if `min_gain` is at least 0, non-inferiority by
that margin below it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_app.plan.keyed import hash_array, key
from ray_app.retrain.section import RetrainSection
from ray_app.task.base import Task
from ray_app.task.score.resampling import resampled
from ray_app.task.score.scoring import Chunk, combine

GUARD = "recall"
"""The metric of one number per class that is watched, where the task has it."""


@dataclass(frozen=True)
class ClassRecall:
    """The recall of one class.

    Args:
        rows: Evaluation rows of the class.
        champion: Its recall.
        challenger: Its recall.
        least_drop: Lower bound of the interval of the fall, which holds for all classes together.
    """

    rows: int
    champion: float
    challenger: float
    least_drop: float


@dataclass(frozen=True)
class GateFigures:
    """What was found about a challenger.

    Args:
        metric: The metric that decides.
        mode: Whether more (`max`) or less (`min`) of it is better.
        rows: Rows that both were scored on.
        challenger: Its value.
        champion: The champion's; None: there is no champion.
        gain: How much better the challenger is, in the metric's unit; below 0: worse.
        low: Lower bound of the interval of the gain.
        high: Its upper bound.
        recalls: Of every class with enough rows, by its name.
    """

    metric: str
    mode: str
    rows: int
    challenger: float
    champion: float | None = None
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    recalls: dict[str, ClassRecall] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """What the gate says.

    Args:
        promote: Whether the challenger becomes the champion.
        reason: Why, with the figures.
    """

    promote: bool
    reason: str


def draws(seed: int, resamples: int, blocks: int) -> npt.NDArray[np.int64]:
    """How often each block occurs in each bootstrap resample, shape (resamples, blocks); a function of the arguments only."""
    chosen = hash_array(key(seed, 0x67617465), np.arange(resamples * blocks).reshape(resamples, blocks)) % np.uint64(blocks)
    return np.stack([np.bincount(row, minlength=blocks) for row in chosen.astype(np.int64)])


def figures(
    task: Task, metric: str, mode: str, challenger: Sequence[Chunk], champion: Sequence[Chunk] | None, seed: int, section: RetrainSection
) -> GateFigures:
    """Compares two models on the same rows.

    Args:
        task: The prepared task; its metrics are those of the chunks.
        metric: The metric that decides.
        mode: Whether more (`max`) or less (`min`) of it is better.
        challenger: What each block of the rows gave for it.
        champion: The same for the champion; None: there is none.
        seed: Chooses the draws.
        section: Resamples, confidence and the fewest rows of a class.
    """
    scores, rows = combine(task, challenger), sum(chunk.rows for chunk in challenger)
    if champion is None:
        return GateFigures(metric, mode, rows, scores.values[metric])
    before = combine(task, champion)
    sign = 1 if mode == "max" else -1
    counts = draws(seed, section.resamples, len(challenger))
    gains = sign * (resampled(task, challenger, metric, counts) - resampled(task, champion, metric, counts))
    low, high = np.quantile(gains, [(1 - section.confidence) / 2, (1 + section.confidence) / 2]).tolist()
    recalls = {task.classes[i]: recall for i, recall in _recalls(challenger, champion, counts, section).items() if i < len(task.classes)}
    gain = sign * (scores.values[metric] - before.values[metric])
    return GateFigures(metric, mode, rows, scores.values[metric], before.values[metric], gain, low, high, recalls)


def judge(found: GateFigures, section: RetrainSection) -> Decision:
    """Says whether a challenger becomes the champion."""
    problems = []
    worst = section.min_metric
    if worst is not None and not (found.challenger >= worst if found.mode == "max" else found.challenger <= worst):  # also NaN
        problems.append(f"its {found.metric} of {found.challenger:.4f} is not as good as retrain.min_metric = {worst:g}")
    if not math.isfinite(found.challenger):
        problems.append(f"its {found.metric} is no number to judge it by; look at the rows of the gate (one class, a constant target?)")
    if found.champion is None or not math.isfinite(found.champion):
        other = (
            "no champion to compare with" if found.champion is None else f"the champion's is {found.champion}, which nothing compares with"
        )
        said = f"{found.metric} {found.challenger:.4f} on {found.rows:,} rows, {other}"
        return Decision(not problems, "; ".join([said, *problems]))
    assert found.gain is not None
    assert found.low is not None
    said = (
        f"{found.metric} {found.challenger:.4f} against the champion's {found.champion:.4f} on {found.rows:,} rows: gain {found.gain:+.4f}"
        f" ({section.confidence:.0%} interval {found.low:+.4f} to {found.high:+.4f})"
    )
    if not found.low > section.min_gain:
        problems.append(f"the lower bound is not above retrain.min_gain = {section.min_gain:g}, so it may be no better")
    for name, recall in found.recalls.items():
        if recall.least_drop > section.max_recall_drop:
            problems.append(
                f"the recall of class {name} falls from {recall.champion:.3f} to {recall.challenger:.3f} ({recall.rows} rows), by at least"
                f" {recall.least_drop:.3f} beyond chance; allowed are {section.max_recall_drop:g} (retrain.max_recall_drop)"
            )
    return Decision(not problems, "; ".join([said, *problems]))


def _recalls(
    challenger: Sequence[Chunk], champion: Sequence[Chunk], counts: npt.NDArray[np.int64], section: RetrainSection
) -> dict[int, ClassRecall]:
    """The recalls of the classes with enough rows, by their numbers, from the states of the guard metric; none if it keeps others.

    Both models are drawn alike, so what they agree on does not count. The bound is normal, with the standard deviation of the draws, at
    (1 - confidence) / 2 over the number of classes (Bonferroni): draws alone do not reach so far into the tail for many classes.
    """
    states: list[list[dict[str, Any]]] = [[chunk.states.get(GUARD, {}) for chunk in chunks] for chunks in (challenger, champion)]
    if not all({"tp", "fn"} <= state.keys() for found in states for state in found):
        return {}
    new, old = (np.stack([state["tp"].numpy() for state in found]).astype(np.float64) for found in states)  # (blocks, classes)
    rows = np.stack([(state["tp"] + state["fn"]).numpy() for state in states[0]]).astype(np.float64)
    watched = np.flatnonzero(rows.sum(0) >= section.min_class_rows).tolist()
    if not watched:
        return {}
    far = NormalDist().inv_cdf(1 - (1 - section.confidence) / 2 / len(watched))
    drops = (counts @ (old - new)[:, watched]) / np.maximum(1, counts @ rows[:, watched])  # (draws, classes)
    total = rows.sum(0)
    return {
        i: ClassRecall(int(total[i]), float(was), float(now), float(was - now - far * spread))
        for i, was, now, spread in zip(
            watched, (old.sum(0) / np.maximum(1, total))[watched], (new.sum(0) / np.maximum(1, total))[watched], drops.std(0), strict=True
        )
    }
