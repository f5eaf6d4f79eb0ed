"""What a step on several logical workers makes of a model that plain PyTorch would train otherwise, tried on some rows before the start.

A step adds the gradients of its logical workers: a gradient that is missing counts as zeros, and the loss of each micro-batch counts by its
rows. A part of the model that no row uses, or a loss that is no mean over rows, is therefore named at the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ray_app.config.config import Config
from ray_app.runs.preparing.attempt import SHORT, Attempt
from ray_app.runs.preparing.metric_checks import MIN_ROWS, are_close, disturbed, num_trials, repeated
from ray_app.task.losses import of_rows, summed
from ray_app.task.rows.ragged import Arrays, Ragged, to_batch
from ray_app.task.script.batches import BatchTask
from ray_app.train.job import Job
from ray_app.train.state.state import TrainingState
from ray_app.train.step.logical import modes_of, restore

_MAX_NAMED = 5
_COUNT_ZEROS = ("fsdp", "local_sgd")
"""Strategies that fill in a missing gradient with zeros on one logical worker, too."""


def gradient_doubts(job: Job, attempt: Attempt, unused: Mapping[str, nn.Parameter], rows: Arrays | None) -> list[str]:
    """What to say of parameters that no tried row uses, and of numbers of a training step that are no means over rows.

    Args:
        job: What is to start.
        attempt: Its task and model.
        unused: The parameters that two rows do not use, by name.
        rows: Some decoded rows of the data to train on.
    """
    state = attempt.state
    if unused and rows is not None:
        unused = _unused_by(attempt, unused, rows)
    optimizers = [state.optimizer] if state.turns is None else state.turns.optimizers.values()
    doubts = unused_doubts(job.config, job.plan.logical_workers, optimizers, unused)
    if isinstance(job.task, BatchTask) and rows is not None and job.plan.logical_workers > 1:
        doubts += training_mean_doubts(job.task, state.model, rows)
    return doubts


def moved_parameters(state: TrainingState, turn: str | None) -> dict[str, nn.Parameter]:
    """The trained parameters by name, those of a turn alone if optimizers take turns."""
    named = {name: p for name, p in state.model.named_parameters() if p.requires_grad}
    if turn is None or state.turns is None:
        return named
    moved = {id(p) for group in state.turns.optimizers[turn].param_groups for p in group["params"]}
    return {name: p for name, p in named.items() if id(p) in moved}


def _unused_by(attempt: Attempt, unused: Mapping[str, nn.Parameter], rows: Arrays) -> dict[str, nn.Parameter]:
    """Those of the parameters that these rows do not use either."""
    task, state, count = attempt.task, attempt.state, len(next(iter(rows.values())))
    state.train()
    without = set[str]()
    try:
        fields = task.augment(to_batch(rows), torch.arange(count))
        for turn in attempt.turns:
            losses = task.training_loss(state.model, fields) if turn is None else task.turn_loss(turn, state.model, fields)
            without.update(parameters_without_gradient(of_rows(task, losses, count).values, moved_parameters(state, turn)))
    except Exception:  # what is wrong with these rows is said where they are read
        return dict(unused)
    return {name: p for name, p in unused.items() if name in without}


def parameters_without_gradient(losses: Tensor, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Finds the trained parameters that a loss does not depend on, by its graph and without a backward.

    Args:
        losses: What a backward would begin with.
        parameters: The model's by name.

    Returns:
        Names in the order of the model; none where the graph does not show what it depends on (a checkpoint with `use_reentrant=True`).
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


def unused_doubts(config: Config, logical_workers: int, optimizers: Iterable[Optimizer], unused: Mapping[str, nn.Parameter]) -> list[str]:
    """What to say of trained parameters that get no gradient and that weight decay moves all the same.

    Args:
        config: Of the run.
        logical_workers: How many there are.
        optimizers: What moves the parameters.
        unused: The parameters without a gradient, by name.
    """
    if logical_workers == 1 and config.train.strategy not in _COUNT_ZEROS:
        return []
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    decayed = {id(p) for group in groups if group.get("weight_decay") for p in group["params"]}
    names = [name for name, p in unused.items() if id(p) in decayed]
    if not names:
        return []
    shown = ", ".join(names[:_MAX_NAMED]) + (", ..." if len(names) > _MAX_NAMED else "")
    are, them = ("parameters get", "them") if len(names) > 1 else ("parameter gets", "it")
    return [
        f"{len(names)} trained {are} no gradient from the rows that were tried: {shown}. A missing gradient counts as zeros here, so weight"
        f" decay and momentum move {them}, while plain PyTorch leaves {them} alone. Freeze {them} by train.freeze, or give {them} a group"
        " with weight_decay 0 by optimizer.groups."
    ]


def cut_unevenly(rows: Arrays) -> Arrays:
    """Rows whose lists are cut to different lengths, at most `SHORT`: a mean over tokens is one over rows where all are of one length."""
    return {
        name: Ragged.of(
            (values.row(i)[: SHORT - i % (SHORT // 2)] for i in range(len(values))),
            values.values.dtype,
            values.fill,
            values.multiple,
            values.row_shape,
        )
        if isinstance(values, Ragged)
        else values
        for name, values in rows.items()
    }


def training_mean_doubts(task: BatchTask, model: nn.Module, rows: Arrays) -> list[str]:
    """What to say of numbers of a training step that are no means over the rows of its batch, so that they depend on the logical workers.

    The step of a batch is compared with the steps of two parts of it. Dropout does not count: layers are in evaluation mode where the step
    can be made so, and what is random all the same is not looked at.

    Args:
        task: The prepared task.
        model: What it trains.
        rows: Some decoded rows of the data to train on.
    """
    count = max(len(next(iter(rows.values()))), MIN_ROWS)
    rows, cut = repeated(rows, count), max(1, count // 3)
    parts = [slice(count), slice(cut), slice(cut, count)]
    modes, has_batch_norm = modes_of(model), any(isinstance(layer, _BatchNorm) for layer in model.modules())
    try:
        for is_training in (False,) if has_batch_norm else (False, True):
            model.train(is_training)
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                different = _different(model, partial(_means, task, model, rows), parts)
            if different is not None:
                return [_no_mean(type(task).__name__, model, name) for name in different]
    finally:
        restore(modes)
    return []


Means = dict[str, tuple[float, float]]
"""Sums over rows of the loss and of what is logged, and their weight."""


def _means(task: BatchTask, model: nn.Module, rows: Arrays, part: slice, seed: int) -> Means:
    torch.manual_seed(seed)
    keys = torch.arange(len(next(iter(rows.values()))))[part]
    batch = task.augment(to_batch({name: values[part] for name, values in rows.items()}), keys)
    sums = summed(task, of_rows(task, task.training_loss(model, batch), len(keys)))
    return {name: (value, sums.weight) for name, value in {"loss": sums.loss, **sums.metrics}.items()}


def _different(model: nn.Module, means_of: Callable[[slice, int], Means], parts: list[slice]) -> list[str] | None:
    """Names of what is another number for a batch than for its parts; None: the step cannot be made in this mode, or is random."""
    different = dict[str, None]()
    for trial in range(num_trials(model)):
        with disturbed(model, trial):
            try:
                whole, again, *some = (means_of(part, seed) for part, seed in zip([parts[0], *parts], (0, 1, 2, 3), strict=True))
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


def _no_mean(task: str, model: nn.Module, name: str) -> str:
    step = f"training_step of {type(model).__name__}" if hasattr(model, "training_step") else f"the step of {task}"
    if name == "loss":
        return (
            f"The loss that {step} gives is not a mean over rows (a mean over tokens, a loss between rows): each micro-batch counts by its"
            " rows, so the gradient depends on scaling.logical_workers. Where it is a mean over tokens, write a Task whose loss returns"
            " Losses with the tokens as weights (docs/own-task.md)."
        )
    return (
        f"{name!r}, which {step} logs, is not a mean over rows: it is recorded as the mean over the micro-batches, which depends on"
        " scaling.logical_workers. Log it in the evaluation, where the states of a torchmetrics object are combined over all rows."
    )
