"""How many tokens a language model wavers between, on an average. Importing this takes what torchmetrics takes.

What a model names while it is evaluated, as a metric that can be put together from parts: means over rows, and metrics
of its own.
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
from ray_app.task.metric_states import States, isolate, load_states, reset_parts, states_of


class Perplexity(Metric):
    """e to the mean loss of a token, over all tokens that were evaluated."""

    loss: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("loss", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, losses: Tensor, tokens: Tensor) -> None:
        """Adds rows.

        Args:
            losses: The sum of the losses of each row's tokens, shape (rows,).
            tokens: How many tokens that is over, shape (rows,).
        """
        self.loss += losses.sum(dtype=torch.float64)
        self.tokens += tokens.sum()

    def compute(self) -> Tensor:
        """One number; not a number if there are no tokens."""
        return (self.loss / self.tokens).exp()


class LoggedMetric(NamedTuple):
    """A torchmetrics object that was logged.

    Args:
        metric: The object as it was made, on the CPU.
        states: Its states after a batch.
    """

    metric: Metric
    states: States


def take_metrics(logged: Mapping[str, Metric]) -> dict[str, LoggedMetric]:
    """The states of metrics that saw a batch, by the names that they are logged under; the metrics are reset."""
    states = {id(metric): states_of(metric) for metric in logged.values()}
    for metric in logged.values():
        reset_parts(metric)
    return {name: LoggedMetric(_copy_metric(name, metric), states[id(metric)]) for name, metric in logged.items()}


class WeightedMean(NamedTuple):
    """The mean of a batch and its weight, each of shape ()."""

    value: Tensor
    weight: Tensor


def weighted_mean(metric: Metric) -> WeightedMean | None:
    """What a `MeanMetric` holds of a batch, with 0 for the mean of no weight; None for any other metric."""
    if not isinstance(metric, MeanMetric):
        return None
    weight = metric.weight.detach()
    return WeightedMean((metric.mean_value.detach() / weight).where(weight != 0, 0.0), weight)


def _copy_metric(name: str, metric: Metric) -> Metric:
    try:
        return copy.deepcopy(metric).cpu()
    except Exception as error:  # an attribute of a user's raises anything
        raise ConfigError(
            f"The metric {name!r} ({type(metric).__name__}) cannot be copied to be computed of all rows:"
            f" {type(error).__name__}: {error}. Keep states and settings in it, and make locks, open files and"
            " connections where they are used."
        ) from error


class Logged(Metric):
    """The names and the metrics go along as states, since whoever adds up the parts has seen no batch."""

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
        """Adds the means of so many rows, each of shape (), and the states of metrics that saw these rows."""
        self.names.append(torch.tensor(list(json.dumps(list(logged)).encode()), dtype=torch.uint8))
        self.values.append(torch.tensor([rows, *map(float, logged.values())], dtype=torch.float64))
        if metrics:
            self.metrics.append(torch.frombuffer(bytearray(pickle.dumps(dict(metrics))), dtype=torch.uint8))

    def compute(self) -> dict[str, Tensor]:
        """The mean of each number over the rows that had it, and what each metric computes of all rows that it saw."""
        found: dict[str, list[tuple[float, float]]] = {}
        for names, values in zip(self.names, self.values, strict=True):
            rows, *means = values.tolist()
            for name, mean in zip(json.loads(bytes(names.tolist())), means, strict=True):
                found.setdefault(name, []).append((mean * rows, rows))
        means_of = {
            name: math.fsum(s for s, _ in parts) / math.fsum(n for _, n in parts) for name, parts in found.items()
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
            load_states(metric, [each.states for each in some])
            value = metric.compute()
            values |= (
                {f"{name}_{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
            )
        return values


def refuse_name_clash(numbers: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
    """Refuses a name that is a number and a metric.

    Raises:
        ConfigError: There is one.
    """
    if both := sorted(numbers.keys() & metrics.keys()):
        raise ConfigError(
            f"{', '.join(map(repr, both))} is logged as a number and as a torchmetrics object; give one of them another"
            " name."
        )
