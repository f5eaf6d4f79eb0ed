"""Layers that normalize by statistics of so few values that they never train: one value has no variance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ray_app.errors import ConfigError
from ray_app.plan.order import Plan

_NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)


@contextmanager
def values_of_statistics(model: nn.Module, rows: int) -> Iterator[dict[str, int]]:
    """Counts what the normalization layers of a model in training mode have their statistics from.

    Args:
        model: The model.
        rows: Rows of the batch that is run through it meanwhile.

    Yields:
        By the name of a layer, in the order of the model, the least number of values of one statistic: of batch normalization those that
        one row gives a channel, of others all.
    """
    found: dict[str, int] = {}

    def count(name: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(x := inputs[0], Tensor) and layer.training and x.numel():
            found[name] = min(found.get(name, x.numel()), _values(layer, x, rows))

    layers = [(name or type(layer).__name__, layer) for name, layer in model.named_modules() if isinstance(layer, _NORMS)]
    hooks = [layer.register_forward_pre_hook(partial(count, name)) for name, layer in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _values(layer: nn.Module, x: Tensor, rows: int) -> int:
    if isinstance(layer, nn.GroupNorm):
        return x.numel() // (x.size(0) * layer.num_groups)
    if isinstance(layer, nn.LayerNorm):
        return math.prod(layer.normalized_shape)
    return x.numel() // (x.size(1) * rows)


def refuse_single_values(model: nn.Module, plan: Plan, counts: dict[str, int]) -> None:
    """Refuses layers that would normalize one value by itself in every step: their output would be their bias, whatever the input.

    Args:
        model: The model.
        plan: How many rows the micro-batches have.
        counts: See `values_of_statistics`.

    Raises:
        ConfigError: There is such a layer; the message names it and the smallest batch that trains it.
    """
    layers = dict(model.named_modules())
    rows = min(min(plan.micro_batch, plan.stream_rows(v)) for v in range(plan.logical_workers) if plan.stream_rows(v))
    for name, values in counts.items():
        layer = layers.get(name, model)
        kind = type(layer).__name__
        if values == 1 and not isinstance(layer, _BatchNorm):
            raise ConfigError(
                f"{name} of the model is a {kind} that normalizes each value by itself, so its output is its bias and what is before it"
                " never trains. Give it fewer groups, or more values to normalize together."
            )
        if isinstance(layer, _BatchNorm) and values * rows == 1:
            raise ConfigError(
                f"{name} of the model is a {kind}, and {_few(plan)}: one value has no variance, so the layer would use its running"
                f" statistics, which never change. {_remedy(plan)}"
            )


def single_value_doubts(model: nn.Module, plan: Plan, counts: dict[str, int]) -> list[str]:
    """What to say of micro-batches of one row at the end of an epoch, which batch normalization has no variance of.

    Args:
        model, plan, counts: See `refuse_single_values`.
    """
    layers = dict(model.named_modules())
    named = [name for name, values in counts.items() if values == 1 and isinstance(layers.get(name, model), _BatchNorm)]
    last = [rows for rows in plan.rows_of_step(plan.steps_per_epoch - 1) if rows]
    if not named or 1 not in last:
        return []
    return [
        f"In the last step of an epoch {last.count(1)} of {plan.logical_workers} logical workers have one row, of which {named[0]}, batch"
        " normalization, has no variance: there it uses its running statistics and does not change them. data.last_batch: drop leaves"
        " such a step out."
    ]


def _few(plan: Plan) -> str:
    """Why some micro-batches have one row."""
    if plan.micro_batch == 1:
        return (
            f"data.global_batch_size {plan.global_batch_size} gives each of the {plan.logical_workers} logical workers"
            " (scaling.logical_workers) a micro-batch of one row"
        )
    return (
        f"the {plan.all_rows} rows of the data give some of the {plan.logical_workers} logical workers (scaling.logical_workers) one row"
        " in an epoch"
    )


def _remedy(plan: Plan) -> str:
    if plan.micro_batch == 1:
        return f"The smallest valid data.global_batch_size is {2 * plan.logical_workers}; or lower scaling.logical_workers in a new run."
    return f"Give at least {2 * plan.logical_workers} rows, or lower scaling.logical_workers in a new run."
