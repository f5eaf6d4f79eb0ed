"""Checks of training steps in which several logical workers give another result than plain PyTorch.

A step adds the gradients of its logical workers: a missing gradient counts as zeros, and the loss of each micro-batch
is weighted by its number of rows. Parameters that no row uses, and losses that are not means over rows, are therefore
reported at the start. So are batch normalizations of a single value, which has no variance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ray_app.config.config import Config
from ray_app.data.probes import sample_rows
from ray_app.errors import ConfigError, join_names
from ray_app.preflight.context import PreflightContext, RowProbe, cut_unevenly
from ray_app.preflight.metric_checks import MAX_ROWS, MIN_ROWS, Means, Part, compare_means, cycle_rows
from ray_app.task.losses import check_losses, step_rows, sum_losses
from ray_app.task.ragged import Arrays, to_batch
from ray_app.task.whole_batches import BatchTask
from ray_app.torch_private import BatchNorm
from ray_app.train.state.state import TrainingState
from ray_app.train.step.micro_batch import module_modes, restore_modes


def try_gradients(context: PreflightContext) -> list[str]:
    """Returns warnings about parameters without a gradient, and values of a step that are not means over rows.

    Some training rows are tried, unless they cannot be decoded.
    """
    task, state = context.task, context.row_probe.state
    rows = sample_rows(context.dataset, task.columns(), task.decode, MAX_ROWS)
    unused, logical_workers = context.unused_parameters, context.plan.logical_workers
    if rows is not None and context.are_short:
        rows = cut_unevenly(rows)
    if unused and rows is not None:
        unused = _unused_in(context.row_probe, unused, rows)
    optimizers = [state.optimizer] if state.turns is None else state.turns.optimizers.values()
    messages = _unused_parameter_warnings(context.config, logical_workers, optimizers, unused)
    if isinstance(task, BatchTask) and rows is not None and logical_workers > 1:
        messages += _training_mean_warnings(task, context.model, rows)
    return messages


def parameters_of_turn(state: TrainingState, turn: str | None) -> dict[str, nn.Parameter]:
    """Returns the trained parameters by name; with alternating optimizers, those of the optimizer of this turn."""
    trained = {name: p for name, p in state.model.named_parameters() if p.requires_grad}
    if turn is None or state.turns is None:
        return trained
    ids_of_turn = {id(p) for group in state.turns.optimizers[turn].param_groups for p in group["params"]}
    return {name: p for name, p in trained.items() if id(p) in ids_of_turn}


def _unused_in(row_probe: RowProbe, unused: Mapping[str, nn.Parameter], rows: Arrays) -> dict[str, nn.Parameter]:
    """Returns the parameters in `unused` that get no gradient from these rows either."""
    count = len(next(iter(rows.values())))
    without_gradient = set[str]()
    try:
        for turn, losses in row_probe.losses(row_probe.make_batch(rows)):
            values = check_losses(row_probe.task, losses, count).values
            without_gradient.update(parameters_without_gradient(values, parameters_of_turn(row_probe.state, turn)))
    except Exception:
        # The reader reports what is wrong with these rows.
        return dict(unused)
    return {name: p for name, p in unused.items() if name in without_gradient}


def parameters_without_gradient(losses: Tensor, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Returns the names of the trained parameters that losses do not depend on; none if `graph_nodes` is None."""
    if (nodes := graph_nodes(losses)) is None:
        return []
    reached = {id(node.variable) for node in nodes if hasattr(node, "variable")}
    return [name for name, p in parameters.items() if p.requires_grad and id(p) not in reached]


def graph_nodes(losses: Tensor) -> set[Any] | None:
    """Returns the nodes of the autograd graph of losses; those of parameters have the attribute `variable`.

    None if the graph does not show its dependencies (activation checkpointing with `use_reentrant=True`).
    """
    nodes = set[Any]()
    pending = [losses.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        if node.name() == "CheckpointFunctionBackward":
            return None
        pending.extend(following for following, _ in node.next_functions)
    return nodes


def _unused_parameter_warnings(
    config: Config, logical_workers: int, optimizers: Iterable[Optimizer], unused: Mapping[str, nn.Parameter]
) -> list[str]:
    """Returns warnings about trained parameters that get no gradient (`unused`) but are changed by weight decay."""
    if logical_workers == 1 and not config.train.strategy_traits.fills_missing_gradients:
        return []
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    decayed = {id(p) for group in groups if group.get("weight_decay") for p in group["params"]}
    names = [name for name, p in unused.items() if id(p) in decayed]
    if not names:
        return []
    subject, pronoun = ("parameters get", "them") if len(names) > 1 else ("parameter gets", "it")
    return [
        f"{len(names)} trained {subject} no gradient from the rows of the dry run: {join_names(names, 5)}. A missing"
        f" gradient counts as zeros here, so weight decay and momentum change {pronoun}, while plain PyTorch does not."
        f" Freeze {pronoun} with train.freeze, or give {pronoun} a group with weight_decay 0 in optimizer.groups."
    ]


def _training_mean_warnings(task: BatchTask, model: nn.Module, rows: Arrays) -> list[str]:
    """Returns warnings about values of a training step that are not means over rows, so that they depend on L.

    Layers are in evaluation mode if the step works in this mode, so that dropout makes no difference. Nothing is
    compared if a value is random nevertheless, or if the step fails.
    """
    count = max(len(next(iter(rows.values()))), MIN_ROWS)
    means_of = partial(_means, task, model, cycle_rows(rows, count))
    modes, has_batch_norm = module_modes(model), any(isinstance(layer, BatchNorm) for layer in model.modules())
    try:
        for is_training in (False,) if has_batch_norm else (False, True):
            model.train(is_training)
            # A step may need more rows than a part has, and raise any error.
            with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]):
                unequal, random_values = compare_means(model, means_of, count, is_exact=False)
                if not random_values:
                    return [_not_a_mean_message(type(task).__name__, model, name) for name in unequal]
    finally:
        restore_modes(modes)
    return []


def _means(task: BatchTask, model: nn.Module, rows: Arrays, part: Part, seed: int) -> Means:
    """Returns the values of a training step on some of the rows, with torch's generator seeded."""
    torch.manual_seed(seed)
    step_rows.set(None)
    keys = torch.arange(len(next(iter(rows.values()))))[part]
    batch = task.augment(to_batch({name: values[part] for name, values in rows.items()}), keys)
    sums = sum_losses(task, check_losses(task, task.training_loss(model, batch), len(keys)))
    return {"loss": (sums.loss, sums.weight)} | {key.name: (v, sums.weight) for key, v in sums.metrics.items()}


def _not_a_mean_message(task: str, model: nn.Module, name: str) -> str:
    """Returns the warning about the loss, or about a logged value, that is not a mean over rows."""
    step = f"training_step of {type(model).__name__}" if hasattr(model, "training_step") else f"the step of {task}"
    if name == "loss":
        return (
            f"The loss that {step} returns is not a mean over rows (but over tokens, or between rows). Each micro-batch"
            " is weighted by its number of rows, so the gradient depends on scaling.logical_workers. For a mean over"
            " tokens, write a Task whose loss returns Losses with the tokens as weights (docs/own-task.md)."
        )
    return (
        f"{name!r}, which {step} logs, is not a mean over rows: the run records its mean over the micro-batches, which"
        " depends on scaling.logical_workers. Log the value in the evaluation, where the states of a torchmetrics"
        " object are combined over all rows."
    )


@contextmanager
def find_single_values(model: nn.Module, rows: int) -> Iterator[dict[str, nn.Module]]:
    """Yields a dictionary: the batch normalizations of one value per row and channel in the block, by name.

    The model trains in the block on batches of this number of rows.
    """
    layers: dict[str, nn.Module] = {}

    def note(name: str, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(x := inputs[0], Tensor) and layer.training and 0 < x.numel() < 2 * x.size(1) * rows:
            layers[name or type(layer).__name__] = layer

    norms = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, BatchNorm)]
    hooks = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in norms]
    try:
        yield layers
    finally:
        for hook in hooks:
            hook.remove()


def check_normalization(context: PreflightContext) -> list[str]:
    """Returns warnings about batch normalization of micro-batches of one row at the end of an epoch.

    Raises:
        ConfigError: A layer would normalize a single value in every step.
    """
    plan, layers = context.plan, context.single_values
    rows = min(min(plan.micro_batch, plan.stream_rows(v)) for v in range(plan.logical_workers) if plan.stream_rows(v))
    name, layer = next(iter(layers.items()), (None, None))
    if name is not None and rows == 1:
        raise ConfigError(
            f"{name} of the model is a {type(layer).__name__}, but with data.global_batch_size {plan.global_batch_size}"
            f" and {plan.all_rows} rows of data, some of the {plan.logical_workers} logical workers"
            " (scaling.logical_workers) have micro-batches of one row. One value has no variance, so the layer would"
            " use its running statistics, which would never change. The smallest valid data.global_batch_size, and"
            f" number of rows, is {2 * plan.logical_workers}; or lower scaling.logical_workers in a new run."
        )
    last = [rows for rows in plan.rows_of_step(plan.steps_per_epoch - 1) if rows]
    if name is None or 1 not in last:
        return []
    return [
        f"In the last step of an epoch, {last.count(1)} of {plan.logical_workers} logical workers have one row, of"
        f" which the batch normalization {name} cannot compute a variance: in this step, the layer uses its running"
        " statistics and does not update them. Set data.last_batch to drop to leave out this step."
    ]
