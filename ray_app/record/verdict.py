"""Early stopping as a pure function of the evaluations of planned checkpoints in the order of their steps.

When an evaluation came, and how far training had run ahead by then, makes no difference: the same evaluations name the same step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """Training is over.

    Args:
        stop_step: The planned checkpoint at which patience ran out; what came after it does not count.
        best_step: The best planned checkpoint up to there: the result of the run. Of equals the earlier one.
    """

    stop_step: int
    best_step: int


def verdict(values: Mapping[int, float | None], planned: Iterable[int], patience: int, min_delta: float, mode: str) -> Verdict | None:
    """Looks whether patience has run out.

    Args:
        values: The metric by step; None for a checkpoint that can never be evaluated, which does not count.
        planned: Steps of the planned checkpoints in order; looked at up to the first one that is not in `values`.
        patience: Planned checkpoints in a row without an improvement after which it has.
        min_delta: An improvement is more than this.
        mode: Whether more (`max`) or less (`min`) is better. NaN is never an improvement.
    """
    sign = -1.0 if mode == "min" else 1.0
    best_step, best, bar, waited = 0, -math.inf, -math.inf, 0
    for step in planned:
        if step not in values:
            return None
        value = values[step]
        if value is None:
            continue
        signed = -math.inf if math.isnan(value) else sign * value
        if not best_step or signed > best:
            best_step, best = step, signed
        is_better = signed > bar + min_delta
        bar, waited = (signed, 0) if is_better else (bar, waited + 1)
        if waited == patience:
            return Verdict(step, best_step)
    return None
