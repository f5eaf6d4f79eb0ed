"""What a step on several logical workers makes of a model that plain PyTorch would train otherwise, tried on some rows
before the start.

A step adds the gradients of its logical workers: a gradient that is missing counts as zeros, and the loss of each
micro-batch counts by its rows. A part of the model that no row uses, or a loss that is no mean over rows, is therefore
named at the start.

Layers that normalize by statistics of so few values that they never train: one value has no variance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ray_app.config.config import Config
from ray_app.errors import ConfigError
from ray_app.plan.order import Plan
from ray_app.preflight.metric_checks import MIN_ROWS, are_close, num_perturbations, perturbed, repeat_rows
from ray_app.preflight.probe_rows import SHORT_LENGTH, RowProbe
from ray_app.task.base import check_losses, sum_losses
from ray_app.task.ragged import Arrays, Ragged, to_batch
from ray_app.task.whole_batches import BatchTask
from ray_app.train.job import Job
from ray_app.train.state.state import TrainingState
from ray_app.train.step.micro_batch import module_modes, restore_modes

_MAX_NAMED = 5
_ZERO_FILLING_STRATEGIES = ("fsdp", "local_sgd")
"""Strategies that fill in a missing gradient with zeros on one logical worker, too."""


def gradient_warnings(
    job: Job, attempt: RowProbe, unused: Mapping[str, nn.Parameter], rows: Arrays | None
) -> list[str]:
    """What to say of parameters that no tried row uses, and of numbers of a training step that are no means over rows.

    Args:
        job: What is to start.
        attempt: Its task and model.
        unused: The parameters that two rows do not use, by name.
        rows: Some decoded rows of the data to train on.
    """
    state = attempt.state
    if unused and rows is not None:
        unused = _unused_in(attempt, unused, rows)
    optimizers = [state.optimizer] if state.turns is None else state.turns.optimizers.values()
    doubts = unused_parameter_warnings(job.config, job.plan.logical_workers, optimizers, unused)
    if isinstance(job.task, BatchTask) and rows is not None and job.plan.logical_workers > 1:
        doubts += training_mean_warnings(job.task, state.model, rows)
    return doubts


def parameters_of_turn(state: TrainingState, turn: str | None) -> dict[str, nn.Parameter]:
    """The trained parameters by name, those of a turn alone if optimizers take turns."""
    named = {name: p for name, p in state.model.named_parameters() if p.requires_grad}
    if turn is None or state.turns is None:
        return named
    moved = {id(p) for group in state.turns.optimizers[turn].param_groups for p in group["params"]}
    return {name: p for name, p in named.items() if id(p) in moved}


def _unused_in(attempt: RowProbe, unused: Mapping[str, nn.Parameter], rows: Arrays) -> dict[str, nn.Parameter]:
    """Those of the parameters that these rows do not use either."""
    task, state, count = attempt.task, attempt.state, len(next(iter(rows.values())))
    state.train()
    without = set[str]()
    try:
        fields = task.augment(to_batch(rows), torch.arange(count))
        for turn in attempt.turns:
            losses = (
                task.training_loss(state.model, fields)
                if turn is None
                else task.loss_for_optimizer(turn, state.model, fields)
            )
            without.update(
                parameters_without_gradient(check_losses(task, losses, count).values, parameters_of_turn(state, turn))
            )
    except Exception:  # what is wrong with these rows is said where they are read
        return dict(unused)
    return {name: p for name, p in unused.items() if name in without}


def parameters_without_gradient(losses: Tensor, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Finds the trained parameters that a loss does not depend on, by its graph and without a backward.

    Args:
        losses: What a backward would begin with.
        parameters: The model's by name.

    Returns:
        Names in the order of the model; none where the graph does not show what it depends on (a checkpoint with
        `use_reentrant=True`).
    """
    reached, seen, pending = set[int](), set[object](), [losses.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            return []
        if (variable := getattr(node, "variable", None)) is not None:
            reached.add(id(variable))
        pending.extend(following for following, _ in node.next_functions)
    return [name for name, p in parameters.items() if p.requires_grad and id(p) not in reached]


def unused_parameter_warnings(
    config: Config, logical_workers: int, optimizers: Iterable[Optimizer], unused: Mapping[str, nn.Parameter]
) -> list[str]:
    """What to say of trained parameters that get no gradient and that weight decay moves all the same.

    Args:
        config: Of the run.
        logical_workers: How many there are.
        optimizers: What moves the parameters.
        unused: The parameters without a gradient, by name.
    """
    if logical_workers == 1 and config.train.strategy not in _ZERO_FILLING_STRATEGIES:
        return []
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    decayed = {id(p) for group in groups if group.get("weight_decay") for p in group["params"]}
    names = [name for name, p in unused.items() if id(p) in decayed]
    if not names:
        return []
    shown = ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
    are, them = ("parameters get", "them") if len(names) > 1 else ("parameter gets", "it")
    return [
        f"{len(names)} trained {are} no gradient from the rows that were tried: {shown}. A missing gradient counts as"
        f" zeros here, so weight"
        f" decay and momentum move {them}, while plain PyTorch leaves {them} alone. Freeze {them} by train.freeze, or"
        f" give {them} a group"
        " with weight_decay 0 by optimizer.groups."
    ]


def cut_unevenly(rows: Arrays) -> Arrays:
    """Rows whose lists are cut to different lengths, at most `SHORT_LENGTH`: a mean over tokens is one over rows where all are
    of one length.
    """
    return {
        name: Ragged.of(
            (values.row(i)[: SHORT_LENGTH - i % (SHORT_LENGTH // 2)] for i in range(len(values))),
            values.values.dtype,
            values.fill,
            values.multiple,
            values.row_shape,
        )
        if isinstance(values, Ragged)
        else values
        for name, values in rows.items()
    }


def training_mean_warnings(task: BatchTask, model: nn.Module, rows: Arrays) -> list[str]:
    """What to say of numbers of a training step that are no means over the rows of its batch, so that they depend on
    the logical workers.

    The step of a batch is compared with the steps of two parts of it. Dropout does not count: layers are in evaluation
    mode where the step can be made so, and what is random all the same is not looked at.

    Args:
        task: The prepared task.
        model: What it trains.
        rows: Some decoded rows of the data to train on.
    """
    count = max(len(next(iter(rows.values()))), MIN_ROWS)
    rows, cut = repeat_rows(rows, count), max(1, count // 3)
    parts = [slice(count), slice(cut), slice(cut, count)]
    modes, has_batch_norm = module_modes(model), any(isinstance(layer, _BatchNorm) for layer in model.modules())
    try:
        for is_training in (False,) if has_batch_norm else (False, True):
            model.train(is_training)
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                different = _find_unequal_means(model, partial(_means, task, model, rows), parts)
            if different is not None:
                return [_not_a_mean_message(type(task).__name__, model, name) for name in different]
    finally:
        restore_modes(modes)
    return []


Means = dict[str, tuple[float, float]]
"""Sums over rows of the loss and of what is logged, and their weight."""


def _means(task: BatchTask, model: nn.Module, rows: Arrays, part: slice, seed: int) -> Means:
    torch.manual_seed(seed)
    keys = torch.arange(len(next(iter(rows.values()))))[part]
    batch = task.augment(to_batch({name: values[part] for name, values in rows.items()}), keys)
    sums = sum_losses(task, check_losses(task, task.training_loss(model, batch), len(keys)))
    return {name: (value, sums.weight) for name, value in {"loss": sums.loss, **sums.metrics}.items()}


def _find_unequal_means(
    model: nn.Module, means_of: Callable[[slice, int], Means], parts: list[slice]
) -> list[str] | None:
    """Names of what is another number for a batch than for its parts; None: the step cannot be made in this mode, or is
    random.
    """
    different = dict[str, None]()
    for trial in range(num_perturbations(model)):
        with perturbed(model, trial):
            try:
                whole, again, *some = (
                    means_of(part, seed) for part, seed in zip([parts[0], *parts], (0, 1, 2, 3), strict=True)
                )
            except Exception:  # a step may want more of a batch than that, and raise what it likes
                return None
        if any(not are_close(value[0], again[name][0]) for name, value in whole.items() if name in again):
            return None
        for name, (total, weight) in whole.items():
            known = [each[name] for each in some if name in each]
            if len(known) < len(some) or not weight or not sum(w for _, w in known):
                continue
            mean = total / weight
            if np.isfinite(mean) and not are_close(mean, sum(value for value, _ in known) / sum(w for _, w in known)):
                different[name] = None
    return list(different)


def _not_a_mean_message(task: str, model: nn.Module, name: str) -> str:
    step = f"training_step of {type(model).__name__}" if hasattr(model, "training_step") else f"the step of {task}"
    if name == "loss":
        return (
            f"The loss that {step} gives is not a mean over rows (a mean over tokens, a loss between rows): each"
            f" micro-batch counts by its"
            " rows, so the gradient depends on scaling.logical_workers. Where it is a mean over tokens, write a Task"
            " whose loss returns"
            " Losses with the tokens as weights (docs/own-task.md)."
        )
    return (
        f"{name!r}, which {step} logs, is not a mean over rows: it is recorded as the mean over the micro-batches,"
        f" which depends on"
        " scaling.logical_workers. Log it in the evaluation, where the states of a torchmetrics object are combined"
        " over all rows."
    )


_NORM_LAYERS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm)


@contextmanager
def count_norm_values(model: nn.Module, rows: int) -> Iterator[dict[str, int]]:
    """Counts what the normalization layers of a model in training mode have their statistics from.

    Args:
        model: The model.
        rows: Rows of the batch that is run through it meanwhile.

    Yields:
        By the name of a layer, in the order of the model, the least number of values of one statistic: of batch
        normalization those that one row gives a channel, of others all.
    """
    found: dict[str, int] = {}

    def count(name: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(x := inputs[0], Tensor) and layer.training and x.numel():
            found[name] = min(found.get(name, x.numel()), _values_per_statistic(layer, x, rows))

    layers = [
        (name or type(layer).__name__, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, _NORM_LAYERS)
    ]
    hooks = [layer.register_forward_pre_hook(partial(count, name)) for name, layer in layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _values_per_statistic(layer: nn.Module, x: Tensor, rows: int) -> int:
    if isinstance(layer, nn.GroupNorm):
        return x.numel() // (x.size(0) * layer.num_groups)
    if isinstance(layer, nn.LayerNorm):
        return math.prod(layer.normalized_shape)
    return x.numel() // (x.size(1) * rows)


def check_norm_values(model: nn.Module, plan: Plan, counts: dict[str, int]) -> None:
    """Refuses layers that would normalize one value by itself in every step: their output would be their bias, whatever
    the input.

    Args:
        model: The model.
        plan: How many rows the micro-batches have.
        counts: See `count_norm_values`.

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
                f"{name} of the model is a {kind} that normalizes each value by itself, so its output is its bias and"
                f" what is before it"
                " never trains. Give it fewer groups, or more values to normalize together."
            )
        if isinstance(layer, _BatchNorm) and values * rows == 1:
            raise ConfigError(
                f"{name} of the model is a {kind}, and {_explain_single_rows(plan)}: one value has no variance, so the layer would use"
                f" its running"
                f" statistics, which never change. {_suggest_batch_size(plan)}"
            )


def norm_value_warnings(model: nn.Module, plan: Plan, counts: dict[str, int]) -> list[str]:
    """What to say of micro-batches of one row at the end of an epoch, which batch normalization has no variance of.

    Args:
        model, plan, counts: See `check_norm_values`.
    """
    layers = dict(model.named_modules())
    named = [name for name, values in counts.items() if values == 1 and isinstance(layers.get(name, model), _BatchNorm)]
    last = [rows for rows in plan.rows_of_step(plan.steps_per_epoch - 1) if rows]
    if not named or 1 not in last:
        return []
    return [
        f"In the last step of an epoch {last.count(1)} of {plan.logical_workers} logical workers have one row, of which"
        f" {named[0]}, batch"
        " normalization, has no variance: there it uses its running statistics and does not change them."
        " data.last_batch: drop leaves"
        " such a step out."
    ]


def _explain_single_rows(plan: Plan) -> str:
    """Why some micro-batches have one row."""
    if plan.micro_batch == 1:
        return (
            f"data.global_batch_size {plan.global_batch_size} gives each of the {plan.logical_workers} logical workers"
            " (scaling.logical_workers) a micro-batch of one row"
        )
    return (
        f"the {plan.all_rows} rows of the data give some of the {plan.logical_workers} logical workers"
        f" (scaling.logical_workers) one row"
        " in an epoch"
    )


def _suggest_batch_size(plan: Plan) -> str:
    if plan.micro_batch == 1:
        return (
            f"The smallest valid data.global_batch_size is {2 * plan.logical_workers}; or lower scaling.logical_workers"
            f" in a new run."
        )
    return f"Give at least {2 * plan.logical_workers} rows, or lower scaling.logical_workers in a new run."
