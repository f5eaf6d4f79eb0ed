"""Metrics of Keras as metrics of torchmetrics, which combine the states of parts of the rows.

A metric of Keras keeps variables, most of which are sums over rows. Their states after a chunk of rows are those of a
torchmetrics metric here, so that an evaluation combines, shares and resamples them like any other metric's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torchmetrics import Metric

from ray_app.devices import HOST
from ray_app.errors import ConfigError
from ray_app.task.keras import library


class KerasMetric(Metric):
    """A metric of Keras; its states are the variables of that metric.

    Args:
        metric: The metric of Keras, in the shapes that it has after an update. It computes the value and keeps nothing.

    Raises:
        ConfigError: States of parts of the rows cannot be combined.
    """

    full_state_update = False
    parts: list[Tensor]

    def __init__(self, metric: Any) -> None:
        super().__init__()
        # torchmetrics and the preflight copy and compare the values of attributes, but not what a function returns.
        self._metric: Callable[[], Any] = lambda: metric
        # torchmetrics makes this attribute of a class constant, and Keras has it of an object.
        vars(self)["higher_is_better"] = library.is_higher_better(metric)
        # It may have a method of its own that adds the states of others.
        self._is_merged = callable(getattr(metric, "merge_state", None))
        self._count = len(metric.variables)
        if self._is_merged:
            self.add_state("parts", [], "cat")
            return
        for i, variable in enumerate(metric.variables):
            if variable.aggregation not in ("sum", "none"):
                raise ConfigError(
                    f"The metric {metric.name!r} ({type(metric).__name__}) keeps {variable.name} as"
                    f" {variable.aggregation} over replicas, which cannot be put together from parts of the rows. Make"
                    " it a sum (add_variable(aggregation='sum')), or write merge_state(metrics)."
                )
            self.add_state(f"state_{i}", torch.zeros(tuple(variable.shape), dtype=torch.float64), "sum")

    def update(self, states: Sequence[Tensor]) -> None:
        """Adds the variables that Keras' metric has after some rows, each of its shape."""
        if self._is_merged:
            data = safetensors.torch.save({str(i): state.contiguous() for i, state in enumerate(states)})
            self.parts.append(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            return
        for i, state in enumerate(states):
            name = f"state_{i}"
            setattr(self, name, getattr(self, name) + state.to(getattr(self, name)))

    def compute(self) -> Any:
        """Returns the value of all rows; a dictionary if the metric has several."""
        metric = self._metric()
        with library.device_scope(HOST):
            if self._is_merged:
                self._merge(metric)
            else:
                _assign(metric, [getattr(self, f"state_{i}") for i in range(self._count)])
            result = metric.result()
            metric.reset_state()
        return {k: _plain(v) for k, v in result.items()} if isinstance(result, dict) else _plain(result)

    def _merge(self, metric: Any) -> None:
        """Lets the metric add the states of all parts, in their order."""
        metric.reset_state()
        for part in self.parts:
            other = type(metric).from_config(metric.get_config())
            states = safetensors.torch.load(part.numpy().tobytes())
            _assign(other, [states[str(i)] for i in range(self._count)])
            metric.merge_state([other])


def _assign(metric: Any, states: Sequence[Tensor]) -> None:
    for variable, state in zip(metric.variables, states, strict=True):
        variable.assign(state)


def _plain(value: Any) -> Tensor:
    return torch.as_tensor(value).detach().cpu().double()
