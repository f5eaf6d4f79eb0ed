"""The losses that a task returns for the rows of a batch, and numbers of its own that `reduce` adds to a step.

`Losses` carries the loss and the weight of every row; the functions after it check them and sum them over rows on the
device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ray_app.devices import KINDS
from ray_app.errors import ConfigError

STEP_METRICS = frozenset(
    {"loss", "lr", "grad_norm", "step_ms", "data_wait_ms", "rows_per_s", "workers", "restarts", "imbalance"}
)
"""Names of the metrics that are recorded of every step, which a task's metrics must not have."""
_MAX_SEPARATE_READS = 16
"""Up to so many CPU tensors are read faster one by one than stacked."""
ReplicaReduction = Literal["sum", "mean", "max"]
"""How `reduce` combines the values of the logical workers."""
_METRIC_NAME = re.compile(r"(?!eval_)[A-Za-z0-9_][A-Za-z0-9_. -]{0,99}")


@dataclass(frozen=True)
class Losses:
    """The losses of a batch, for a mean that is not one over rows, or to record further metrics.

    The loss of a step, or of an evaluation, is the sum of `values` over the sum of `weights`, both over all rows of the
    global batch, and so is its gradient. In a language model the value of a row is the sum over its tokens, and its
    weight is their number.

    Args:
        values: The sum of the losses of each row's parts, shape (rows,).
        weights: The weight of each row, 0 or more, shape (rows,); None: 1 each.
        metrics: Further metrics of a training step by name, as sums over each row's parts like `values`, shape (rows,);
            their means are over the same weights.
        states: States of metrics after these rows, as one tensor of shape (n,), see `Task.running_metrics`.
        reduced: The values that `reduce` has got; the step sets them.
    """

    values: Tensor
    weights: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    states: Tensor | None = None
    reduced: Mapping[MetricKey, Tensor] = field(default_factory=dict)

    @property
    def row_weights(self) -> Tensor:
        """The weight of each row, shape (rows,)."""
        return torch.ones_like(self.values) if self.weights is None else self.weights

    @classmethod
    def of(cls, losses: Tensor | Losses) -> Losses:
        """Returns the result of `Task.loss` or `Task.training_loss` as `Losses`."""
        return losses if isinstance(losses, Losses) else cls(losses)

    def float(self) -> Losses:
        """Returns the losses with float32 values, so that backward begins in full precision."""
        return self if self.values.dtype == torch.float32 else replace(self, values=self.values.float())


class LossSums(NamedTuple):
    """The sums of the losses, the weights and each metric over some rows, and the `Losses.states` of these."""

    loss: float
    weight: float
    metrics: dict[MetricKey, float]
    states: Sequence[float] = ()


ZERO_SUMS = LossSums(0.0, 0.0, {})
"""The sums over no rows."""


class MetricKey(NamedTuple):
    """A metric of a training step: its name, and its reduction if `reduce` has got it, which else is a mean of rows."""

    name: str
    reduction: ReplicaReduction | None = None


reduced_values: ContextVar[dict[MetricKey, Tensor] | None] = ContextVar("reduced_values", default=None)
"""The values, of shape (), that `reduce` has got for the present micro-batch; None outside of a training loss."""


step_rows: ContextVar[int | None] = ContextVar("step_rows", default=None)
"""The number of rows of all logical workers in the present step; None outside of a step."""


def reduce(name: str, value: Tensor | float, reduction: ReplicaReduction) -> None:
    """Records the sum, the mean or the maximum of a number over all logical workers of a training step.

    Call it in `Task.forward`, `loss` or `training_loss`, for the same names in every step. Each logical worker with
    rows contributes one value. The values are combined exactly, in float64, so the result is bit-identical for any
    number of workers. It is recorded like a metric of `Losses`. Outside of a training step (in an evaluation, a
    prediction, in `augment`) the call only checks its arguments.

    Args:
        name: The name of the result, as of a metric of `Losses`.
        value: A real number, or a tensor with one element.
        reduction: `sum`, `mean` or `max`.

    Raises:
        ConfigError: An argument is not allowed, or the loss of the micro-batch has used the name before.
    """
    call = f"ray_app.reduce({name!r}, ...)"
    if reduction not in get_args(ReplicaReduction):
        raise ConfigError(
            f"{call} got the reduction {reduction!r}; use one of {', '.join(get_args(ReplicaReduction))}."
        )
    _check_metric_name(name, f"{call} got")
    number = value if isinstance(value, Tensor) else torch.tensor(value)
    if number.numel() != 1 or number.is_complex():
        raise ConfigError(
            f"{call} got {number.dtype} of shape {tuple(number.shape)}; pass one real number, such as their sum."
        )
    values = reduced_values.get()
    if values is None:
        return
    if any(name == key.name for key in values):
        raise ConfigError(
            f"{call} is the second call with this name for one micro-batch; use a different name for each value."
        )
    values[MetricKey(name, reduction)] = number.detach().double().reshape(())


def _check_metric_name(name: str, source: str) -> None:
    """Raises ConfigError if a metric of a training step cannot be recorded under a name."""
    if name in STEP_METRICS or not _METRIC_NAME.fullmatch(name):
        raise ConfigError(
            f"{source} a metric {name!r}; use letters, digits, '_', '.', '-' and spaces, not eval_ at the beginning,"
            f" and none of {', '.join(sorted(STEP_METRICS))}, which every step has."
        )


def check_losses(
    task: object, returned: Tensor | Losses, rows: int, reduced: Mapping[MetricKey, Tensor] | None = None
) -> Losses:
    """Returns what `Task.loss` or `Task.training_loss` returned as `Losses`, after checking shapes and names.

    Args:
        task: The task.
        returned: Its result.
        rows: Number of rows.
        reduced: The values of `reduced_values`, which become metrics of the step, too.

    Raises:
        ConfigError: There is not one value for each row, or a metric has a name that cannot be recorded.
    """
    # The usual case, by fewer calls.
    if type(returned) is Tensor and returned.shape == (rows,) and not reduced:
        return Losses(returned)
    losses = Losses.of(returned)
    weights = {"weights": losses.weights} if losses.weights is not None else {}
    for name, value in {"": losses.values, **weights, **losses.metrics}.items():
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if shape != (rows,):
            raise ConfigError(
                f"{type(task).__name__}.loss returned {name and f'{name!r} of '}shape {shape} for {rows} rows; it must"
                " return one value per row, shape (rows,). Use reduction='none' in the loss function. A loss of the"
                " rows as a whole (a correlation, negatives from the batch) returns value.expand(rows), of the rows of"
                " a logical worker."
            )
    for name in losses.metrics:
        _check_metric_name(name, f"{type(task).__name__}.loss returned")
    if not reduced:
        return losses
    if names := losses.metrics.keys() & {key.name for key in reduced}:
        raise ConfigError(
            f"{type(task).__name__}.loss returns the metrics {', '.join(sorted(names))}, but ray_app.reduce is called"
            " with the same names; use other names."
        )
    return replace(losses, reduced=reduced)


class DeviceSums(NamedTuple):
    """Sums over rows, still on the device that computed them.

    Args:
        values: The sum of the losses and, with weights, metrics or states, the sums of the weights and of each metric,
            and the states; one value, or shape (2 + metrics + states,).
        metrics: The metrics in their order; None without weights, metrics and states.
    """

    values: Tensor
    rows: int
    metrics: tuple[MetricKey, ...] | None


def sum_on_device(losses: Losses) -> DeviceSums:
    """Returns the sums over rows without waiting for the device."""
    values = losses.values.detach()
    if losses.weights is None and not losses.metrics and not losses.reduced and losses.states is None:
        return DeviceSums(values.sum(), values.shape[0], None)
    weights = losses.row_weights.detach()
    sums = {MetricKey(name): value.detach().sum(dtype=torch.float64) for name, value in losses.metrics.items()}
    sums |= {key: value.to(values.device) for key, value in losses.reduced.items()}
    keys = sorted(sums)
    others = [weights.sum(dtype=torch.float64), *(sums[key] for key in keys)]
    numbers = torch.stack([values.sum().double(), *others])
    if losses.states is not None:
        numbers = torch.cat([numbers, losses.states.detach().to(numbers)])
    return DeviceSums(numbers, len(values), tuple(keys))


def read_sums(
    task: object, sums: Sequence[DeviceSums | None], more: Sequence[Tensor] = ()
) -> tuple[list[LossSums], list[float]]:
    """Reads sums, `ZERO_SUMS` for None, and further numbers from the device; synchronizes with it once.

    Args:
        more: Further numbers to read, each of shape () or (n,).

    Raises:
        ConfigError: Weights are negative, infinite or NaN.
    """
    numbers = _read_values([*[one.values for one in sums if one is not None], *more])
    loss_sums, at = list[LossSums](), 0
    for one in sums:
        if one is None:
            loss_sums.append(ZERO_SUMS)
        elif one.metrics is None:
            loss_sums.append(LossSums(numbers[at], float(one.rows), {}))
            at += 1
        else:
            loss, weight, *values = numbers[at : at + len(one.values)]
            check_weight(task, weight, one.rows)
            metrics = dict(zip(one.metrics, values, strict=False))
            loss_sums.append(LossSums(loss, weight, metrics, values[len(metrics) :]))
            at += len(one.values)
    return loss_sums, numbers[at:]


def check_weight(task: object, weight: float, rows: int) -> None:
    """Checks the sum of the weights of some rows.

    Raises:
        ConfigError: It is negative, infinite or NaN.
    """
    if not 0 <= weight < math.inf:
        raise ConfigError(
            f"{type(task).__name__}.loss returned weights whose sum over {rows} rows is {weight}; each must be a number"
            " of at least 0, such as how many tokens a row has."
        )


def join_values(tensors: Sequence[Tensor]) -> Tensor:
    """Returns all values of tensors of shape () or (n,), in their order, as one tensor of float64.

    A device joins tensors of one dtype by one launch, and others one by one.
    """
    parts = [torch.hstack([*same]).double() for _, same in groupby(tensors, attrgetter("dtype"))]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _read_values(tensors: list[Tensor]) -> list[float]:
    """Returns all values of some tensors, read from a device in one transfer."""
    needs_no_transfer = are_on_host(tensors)
    if len(tensors) <= (_MAX_SEPARATE_READS if needs_no_transfer else 1):
        return [value for tensor in tensors for value in (tensor.tolist() if tensor.ndim else (tensor.item(),))]
    if not needs_no_transfer:
        return join_values(tensors).tolist()
    return (torch.stack if {tensor.ndim for tensor in tensors} == {0} else torch.hstack)(tensors).tolist()


def are_on_host(tensors: list[Tensor]) -> bool:
    """Returns whether tensors of one device are in the memory of the host."""
    return not tensors or KINDS[tensors[0].device.type].is_host


def sum_losses(task: object, losses: Losses) -> LossSums:
    """Returns the sums over rows as numbers; see `read_sums`."""
    return read_sums(task, [sum_on_device(losses)])[0][0]
