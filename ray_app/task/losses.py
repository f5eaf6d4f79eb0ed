"""What a task says of the rows of a batch: their losses, how much each counts, and what else is recorded of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ray_app.errors import ConfigError

TAKEN = frozenset({"loss", "lr", "grad_norm", "step_ms", "data_wait_ms", "rows_per_s", "workers", "restarts", "imbalance"})
"""What is recorded of every step; a metric of a task's own has another name."""
_FEW = 16
"""So many tensors of the host are read one by one in less time than at once."""
_NAME = re.compile(r"(?!eval_)[A-Za-z0-9_][A-Za-z0-9_. -]{0,99}")


@dataclass(frozen=True)
class Losses:
    """Losses of a batch whose mean is not one over rows, or with which more is recorded.

    The loss of a step, or of an evaluation, is the sum of `values` over the sum of `weights`, both over all rows of the global batch, and
    so is its gradient. In a language model the values of a row are the sum over its tokens, its weight is their number.

    Args:
        values: The sum of the losses of each row's parts, shape (rows,).
        weights: How much each row counts, 0 or more, shape (rows,); not given: 1 each.
        metrics: What else is recorded of every training step, by name, as sums over each row's parts like `values`, shape (rows,); the
            mean is over the same weights.
    """

    values: Tensor
    weights: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Tensor | Losses) -> Losses:
        """What `Task.loss` or `Task.training_loss` returned."""
        return found if isinstance(found, Losses) else cls(found)

    def float(self) -> Losses:
        """With values in full precision, which their backward begins with."""
        return self if self.values.dtype == torch.float32 else replace(self, values=self.values.float())


class Sums(NamedTuple):
    """What rows add to the means of a step or an evaluation.

    Args:
        loss: The sum of their losses.
        weight: The sum of their weights.
        metrics: The sum of each of their metrics.
    """

    loss: float
    weight: float
    metrics: dict[str, float]


NOTHING = Sums(0.0, 0.0, {})
"""What no rows add."""


def of_rows(task: object, found: Tensor | Losses, rows: int) -> Losses:
    """What `Task.loss` or `Task.training_loss` returned for so many rows.

    Raises:
        ConfigError: It is not one value for each row, or a metric has a name that cannot be recorded.
    """
    losses = Losses.of(found)
    given = {"": losses.values} | ({"weights": losses.weights} if losses.weights is not None else {}) | dict(losses.metrics)
    for name, value in given.items():
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if shape != (rows,):
            raise ConfigError(
                f"{type(task).__name__}.loss returned {name and f'{name!r} of '}shape {shape} for {rows} rows; it must return one value per"
                " row, shape (rows,). Use reduction='none' in the loss function."
            )
    for name in losses.metrics:
        if name in TAKEN or not _NAME.fullmatch(name):
            raise ConfigError(
                f"{type(task).__name__}.loss returned a metric {name!r}; use letters, digits, '_', '.', '-' and spaces, nothing that begins"
                f" with eval_, and none of {', '.join(sorted(TAKEN))}, which every step has."
            )
    return losses


class Unread(NamedTuple):
    """Sums over rows that are still where they were computed.

    Args:
        values: That of the losses and, with weights or metrics, those of the weights and of each metric; shape (1,) or (2 + metrics,).
        rows: How many.
        metrics: Their names; None without weights and metrics.
    """

    values: Tensor
    rows: int
    metrics: tuple[str, ...] | None


def sums_of(losses: Losses) -> Unread:
    """The sums over rows; does not wait for the device."""
    values = losses.values.detach()
    if losses.weights is None and not losses.metrics:
        return Unread(values.sum(), len(values), None)
    weights = losses.weights.detach() if losses.weights is not None else torch.ones_like(values)
    more = [each.detach().sum(dtype=torch.float64) for each in (weights, *losses.metrics.values())]
    return Unread(torch.stack([values.sum().double(), *more]), len(values), tuple(losses.metrics))


def read(task: object, found: Sequence[Unread | None], also: Sequence[Tensor] = ()) -> tuple[list[Sums], list[float]]:
    """What sums are, `NOTHING` for None, and other numbers; waits for the device once.

    Args:
        task: Whose they are.
        found: The sums.
        also: The numbers, each of shape () or (n,).

    Raises:
        ConfigError: Weights are negative, infinite or NaN.
    """
    numbers = _numbers([*[each.values for each in found if each is not None], *also])
    told, at = [], 0
    for each in found:
        if each is None:
            told.append(NOTHING)
        elif each.metrics is None:
            told.append(Sums(numbers[at], float(each.rows), {}))
            at += 1
        else:
            loss, weight, *metrics = numbers[at : at + 2 + len(each.metrics)]
            if not 0 <= weight < math.inf:
                raise ConfigError(
                    f"{type(task).__name__}.loss returned weights whose sum over {each.rows} rows is {weight}; each must be a number of at"
                    " least 0, such as how many tokens a row has."
                )
            told.append(Sums(loss, weight, dict(zip(each.metrics, metrics, strict=True))))
            at += 2 + len(metrics)
    return told, numbers[at:]


def _numbers(held: list[Tensor]) -> list[float]:
    """All their values, read at once from a device."""
    if len(held) <= (_FEW if _are_here(held) else 1):
        return [value for each in held for value in (each.tolist() if each.ndim else (each.item(),))]
    return (torch.stack if {each.ndim for each in held} == {0} else torch.hstack)(held).tolist()


def _are_here(held: list[Tensor]) -> bool:
    return not held or held[0].is_cpu


def summed(task: object, losses: Losses) -> Sums:
    """The sums over rows; see `read`."""
    return read(task, [sums_of(losses)])[0][0]
