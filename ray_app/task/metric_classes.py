"""Metrics that derive from torchmetrics: perplexity, and the values that a model logs while it is evaluated.

`Logged` combines logged means over rows, and logged torchmetrics objects, from parts of the rows. The module is
imported only where metrics are used, since the import of torchmetrics takes seconds.
"""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from ray_app.errors import ConfigError
from ray_app.task.metric_states import States, isolate, load_states, take_states


class Perplexity(Metric):
    """Computes e to the mean loss of a token over all evaluated tokens."""

    loss: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("loss", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, losses: Tensor, tokens: Tensor) -> None:
        """Adds rows: the sums of the losses of their tokens and the numbers of these, (rows,)."""
        self.loss += losses.sum(dtype=torch.float64)
        self.tokens += tokens.sum()

    def compute(self) -> Tensor:
        """Returns the perplexity; NaN if there are no tokens."""
        return (self.loss / self.tokens).exp()


class LoggedMetric(NamedTuple):
    """A torchmetrics object that was logged: a reset copy on the CPU, and its states after a batch."""

    metric: Metric
    states: States


def take_metrics(logged: Mapping[str, Metric]) -> dict[str, LoggedMetric]:
    """Copies and resets metrics that were updated with a batch; returns them by the names of their logs."""
    # A metric may have several names.
    states = {key: take_states(metric) for key, metric in {id(metric): metric for metric in logged.values()}.items()}
    return {name: LoggedMetric(_copy_metric(name, metric), states[id(metric)]) for name, metric in logged.items()}


class WeightedMean(NamedTuple):
    """The mean of a batch and its weight, each of shape ()."""

    value: Tensor
    weight: Tensor


def weighted_mean(metric: Metric) -> WeightedMean | None:
    """Returns mean and weight of a `MeanMetric`, with mean 0 if the weight is 0; None for any other metric."""
    if not isinstance(metric, MeanMetric):
        return None
    weight = metric.weight.detach()
    return WeightedMean((metric.mean_value.detach() / weight).where(weight != 0, 0.0), weight)


def _copy_metric(name: str, metric: Metric) -> Metric:
    try:
        return copy.deepcopy(metric).cpu()
    except Exception as error:
        # Attributes of a user's metric may raise errors of any type.
        raise ConfigError(
            f"The metric {name!r} ({type(metric).__name__}) cannot be copied to compute it for all rows:"
            f" {type(error).__name__}: {error}. Keep only states and settings in it, and create locks, open files and"
            " connections where they are used."
        ) from error


class Logged(Metric):
    """Combines what a model logs: means over rows, and torchmetrics objects.

    The names and the pickled metrics are states, too, since the process that combines the parts has seen no batch.
    """

    full_state_update = False
    names: list[Tensor]
    values: list[Tensor]
    metrics: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("names", [], "cat")
        self.add_state("values", [], "cat")
        self.add_state("metrics", [], "cat")

    def update(
        self, logged: Mapping[str, Tensor], rows: int, metrics: Mapping[str, LoggedMetric] | None = None
    ) -> None:
        """Adds the means over a number of rows, each of shape (), and the metrics that were updated with these rows."""
        self.names.append(torch.tensor(list(json.dumps(list(logged)).encode()), dtype=torch.uint8))
        self.values.append(torch.tensor([rows, *map(float, logged.values())], dtype=torch.float64))
        if metrics:
            self.metrics.append(torch.frombuffer(bytearray(pickle.dumps(dict(metrics))), dtype=torch.uint8))

    def compute(self) -> dict[str, Tensor]:
        """Returns the mean of each logged number over the rows that have it, and the results of the logged metrics."""
        sums: dict[str, list[tuple[float, float]]] = {}
        for names, values in zip(self.names, self.values, strict=True):
            rows, *means = values.tolist()
            for name, mean in zip(json.loads(bytes(names.tolist())), means, strict=True):
                sums.setdefault(name, []).append((mean * rows, rows))
        means_of = {
            name: math.fsum(s for s, _ in parts) / math.fsum(n for _, n in parts) for name, parts in sums.items()
        }
        return {
            name: torch.tensor(mean, dtype=torch.float64) for name, mean in means_of.items()
        } | self._computed_metrics()

    def _computed_metrics(self) -> dict[str, Any]:
        parts: dict[str, list[LoggedMetric]] = {}
        for packed in self.metrics:
            for name, part in pickle.loads(packed.numpy().tobytes()).items():
                parts.setdefault(name, []).append(LoggedMetric(*part))
        values: dict[str, Any] = {}
        for name, some in parts.items():
            metric = some[0].metric
            isolate(metric)
            load_states(metric, [one.states for one in some])
            value = metric.compute()
            values |= {f"{name}_{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
        return values


def refuse_name_clash(numbers: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
    """Raises ConfigError for a name that is logged both as a number and as a metric."""
    if both := sorted(numbers.keys() & metrics.keys()):
        raise ConfigError(
            f"{', '.join(map(repr, both))} is logged as a number and as a torchmetrics object; rename one of them."
        )
