"""Whether less or more of a metric is better, where nobody said so."""

from __future__ import annotations

from typing import Any, Literal, get_args

from ray_app.errors import ConfigError
from ray_app.task.base import Task
from ray_app.task.score.states import make_metrics

Mode = Literal["min", "max"]


def mode_of(name: str, metric: Any) -> Mode | None:
    """What a metric says of itself; None if it says nothing.

    Args:
        name: What it is recorded under; less of a loss is better.
        metric: The `torchmetrics.Metric`, or None.
    """
    if name == "loss" or name.endswith("_loss"):
        return "min"
    higher = getattr(metric, "higher_is_better", None)
    return None if higher is None else "max" if higher else "min"


def completed_mode(task: Task, metric: str | None, mode: str | None) -> str | None:
    """`evaluate.mode`, where `evaluate.metric` is another metric than the task's own, and nothing says whether less or more is better.

    Args:
        task: The prepared task.
        metric: `evaluate.metric`.
        mode: `evaluate.mode`.

    Raises:
        ConfigError: The metric does not say so either, or the task's own `best_mode` is none.
    """
    if task.best_mode not in get_args(Mode):
        raise ConfigError(f"{type(task).__name__}.best_mode is {task.best_mode!r}; it must be min or max.")
    if mode is not None or metric in (None, task.best_metric):
        return mode
    known = dict(make_metrics(task).items(keep_base=True, copy_state=False))
    if (found := mode_of(metric, known.get(metric))) is None:
        raise ConfigError(
            f"evaluate.metric is {metric!r}, and nothing says whether less or more of it is better. The task's metrics are"
            f" {', '.join(['loss', *map(str, known)])}. Name one of them, or set evaluate.mode to min or max."
        )
    return found
