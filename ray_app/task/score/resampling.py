"""Metrics of resampled data sets, from the states that chunks of rows left: nothing is scored again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ray_app.errors import ConfigError
from ray_app.task.annotations import Metric
from ray_app.task.base import Task
from ray_app.task.score.scoring import Chunk, kept_metrics
from ray_app.task.score.states import metric_parts, state_key


def resampled(task: Task, chunks: Sequence[Chunk], name: str, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A metric of data sets in which each chunk occurs so many times.

    Args:
        task: The prepared task.
        chunks: What the chunks of a data set gave, in their order.
        name: A metric of one number, or `loss`.
        counts: How often each chunk occurs in each data set, shape (data sets, chunks).

    Returns:
        Its values, shape (data sets,).

    Raises:
        ConfigError: The metric cannot be put together from parts.
    """
    if name == "loss":
        losses, weights = np.array([chunk.loss for chunk in chunks]), np.array([chunk.weight for chunk in chunks])
        return (counts @ losses) / (counts @ weights)
    metrics = kept_metrics(task, chunks)
    if name not in metrics:
        raise ConfigError(
            f"{name!r} is no metric of its own of the task, so it cannot be resampled; there are {', '.join(map(str, metrics))}."
        )
    metric = metrics[name]
    parts = {
        key: (part, state) for path, part in metric_parts(metric).items() for state in part._defaults for key in [state_key(path, state)]
    }
    states = {key: _states(part, state, [chunk.states[name][key] for chunk in chunks], counts) for key, (part, state) in parts.items()}
    values = []
    for i in range(len(counts)):
        for key, (part, state) in parts.items():
            setattr(part, state, states[key][i])
            part._update_count, part._computed = len(chunks), None
        found = metric.compute()
        values.append(float(found[name] if isinstance(found, dict) else found))
    return np.array(values)


def _states(metric: Metric, name: str, parts: list[Any], counts: npt.NDArray[np.int64]) -> Sequence[Any]:
    """One state of a metric for each data set."""
    from torchmetrics.utilities import dim_zero_cat, dim_zero_sum

    if isinstance(parts[0], list):
        return [[piece for i in np.repeat(np.arange(len(parts)), row) for piece in parts[i]] for row in counts]
    if metric._reductions[name] is dim_zero_cat:
        return [torch.cat([parts[i] for i in np.repeat(np.arange(len(parts)), row)]) for row in counts]
    if metric._reductions[name] is not dim_zero_sum:
        raise ConfigError(
            f"The metric {type(metric).__name__} cannot be resampled: its state {name!r} is neither a sum nor a list. Set"
            " evaluate.metric to another one, such as loss."
        )
    stacked = torch.stack(parts)
    total = torch.tensordot(torch.from_numpy(counts).double(), stacked.double(), dims=1)
    return total.to(stacked.dtype).unbind()
