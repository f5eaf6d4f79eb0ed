"""Metrics of Keras as metrics of torchmetrics, which combine the states of parts of the rows.

A metric of Keras keeps variables, most of which are sums over rows. Their states after a chunk of rows are those of a
torchmetrics metric here, so that an evaluation combines, shares and resamples them like any other metric's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from ray_app.devices import HOST
from ray_app.errors import ConfigError
from ray_app.task.keras import library
from ray_app.task.losses import STEP_METRICS


class KerasMetric(Metric):
    """A metric of Keras; its states are the variables of that metric.

    Args:
        metric: The metric of Keras, in the shapes that it has after an update. It computes the value and keeps nothing.

    Raises:
        ConfigError: States of parts of the rows cannot be combined.
    """

    full_state_update = False
    parts: list[Tensor]
    total: Tensor

    def __init__(self, metric: Any) -> None:
        super().__init__()
        # torchmetrics and the preflight copy and compare the values of attributes, but not what a function returns.
        self._metric: Callable[[], Any] = lambda: metric
        # torchmetrics makes this attribute of a class constant, and Keras has it of an object.
        vars(self)["higher_is_better"] = library.is_higher_better(metric)
        self._is_merged = library.is_merged(metric)
        if self._is_merged:
            self.add_state("parts", [], "cat")
            return
        for variable in metric.variables:
            if variable.aggregation not in ("sum", "none"):
                raise ConfigError(
                    f"The metric {metric.name!r} ({type(metric).__name__}) keeps {variable.name} as"
                    f" {variable.aggregation} over replicas, which cannot be combined from parts of the rows. Make it a"
                    " sum (add_variable(aggregation='sum')), or write merge_state(metrics)."
                )
        self.add_state("total", torch.zeros_like(library.flat_states(metric)), "sum")

    def update(self, states: Tensor) -> None:
        """Adds the variables that Keras' metric has after some rows, see `library.flat_states`."""
        if self._is_merged:
            # Torch concatenates the parts of several chunks.
            self.parts.append(states[None])
        else:
            self.total = self.total + states

    def compute(self) -> Any:
        """Returns the value of all rows; a dictionary if the metric has several."""
        parts = torch.cat(self.parts).unbind() if self._is_merged else [self.total]
        _, result = _combine(self._metric(), parts)
        return {k: _plain(v) for k, v in result.items()} if isinstance(result, dict) else _plain(result)


def add_states(
    metrics: Mapping[str, Any], before: Sequence[float], parts: Sequence[Sequence[float]], begun: Collection[str]
) -> tuple[list[float], dict[str, float]]:
    """Returns the states of metrics over parts of the rows, in their order, and the metrics with one number by name.

    Args:
        metrics: The metrics of Keras.
        before: The states over earlier rows; empty before the first ones.
        parts: In each part the states of all metrics, see `library.flat_states`.
        begun: The names of the metrics that begin with these parts, without earlier rows.
    """
    table = torch.tensor([*filter(None, [before]), *parts], dtype=torch.float64)
    sizes = [library.flat_states(m).numel() for m in metrics.values()]
    totals, values = list[Tensor](), dict[str, Any]()
    for (name, metric), columns in zip(metrics.items(), table.split(sizes, 1), strict=True):
        total, result = _combine(metric, columns[bool(before) and name in begun :].unbind())
        totals.append(total)
        values |= result if isinstance(result, dict) else {name: result}
    numbers = {name: _plain(value) for name, value in values.items() if name not in STEP_METRICS}
    return torch.cat(totals).tolist(), {name: value.item() for name, value in numbers.items() if value.numel() == 1}


def _combine(metric: Any, parts: Sequence[Tensor]) -> tuple[Tensor, Any]:
    """Returns the states of a metric over parts of the rows, and the value of it, which is reset."""
    with library.device_scope(HOST), torch.no_grad():
        metric.reset_state()
        if library.is_merged(metric):
            for states in parts:
                other = type(metric).from_config(metric.get_config())
                _assign(other, states)
                metric.merge_state([other])
            total = library.flat_states(metric)
        else:
            total = sum(parts[1:], start=parts[0])
            _assign(metric, total)
        # A result may be a variable itself, which the reset would change.
        result = library.import_keras().tree.map_structure(lambda one: _plain(one).clone(), metric.result())
        metric.reset_state()
    return total, result


def _assign(metric: Any, states: Tensor) -> None:
    parts = states.split([math.prod(variable.shape) for variable in metric.variables])
    for variable, part in zip(metric.variables, parts, strict=True):
        variable.assign(part.reshape(variable.shape))


def _plain(value: Any) -> Tensor:
    return torch.as_tensor(value).detach().cpu().double()
