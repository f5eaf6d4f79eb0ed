"""Checks of what the objects of the user keep from one call for the next.

State outside the model belongs to one process: its value depends on how many logical workers the process has run, and
no checkpoint has it. So a parameter outside the model is refused, and so are counters, tensors and generators that a
task, a loss, a transform or a part of the model changes with every call.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ray_app.devices import HOST
from ray_app.errors import ConfigError, TaskError
from ray_app.preflight.context import PreflightContext
from ray_app.preflight.gradient_checks import graph_nodes
from ray_app.preflight.purity import is_same, iter_parts, kept_values
from ray_app.reduction.sharded import build_without_values
from ray_app.task.base import Task
from ray_app.task.configured_arguments import make_loss
from ray_app.task.losses import Losses
from ray_app.task.module import ModuleTask
from ray_app.task.transforms import instantiate_once
from ray_app.task.user_code import is_user_code, user_code
from ray_app.train.state.state import seed_step

_MAX_PARAMETERS = 1 << 24
"""Size of the largest model that is built once more, values included, to see what a used one keeps."""
_IN_TRAINING = (
    "Keep the state in the model, as a buffer (register_buffer) or a parameter: checkpoints store these, and every"
    " logical worker starts a step with the same values. Draw random numbers from torch's generators in the model and"
    " the loss, and from the keys in augment"
)
_IN_READERS = "A decoded row must depend only on its values and its key: draw from torch's generators, or from the key"


def check_decoding_state(context: PreflightContext) -> list[str]:
    """Refuses tasks and transforms that decode a row by something that they keep; see `_check_calls`."""
    task, rows = context.task, context.undecoded_row
    warnings = list[str]()
    calls: dict[str, Callable[[], Any]] = {"decode": lambda: task.decode(rows)}
    if task.has_epoch_decode:
        calls["decode_training"] = lambda: task.decode_training(rows, np.array([3], np.int64))
    for name, call in calls.items():
        warnings += _check_calls(
            task, f"{name} of a row", call, lambda: kept_values(_list_roots(task, nn.Module())), _IN_READERS
        )
    return warnings


def check_kept_state(context: PreflightContext) -> list[str]:
    """Refuses tasks, losses and models that train by something outside the model's parameters and buffers.

    Raises:
        ConfigError: A trained parameter is no part of the model, or an attribute changes with every call.
    """
    task, model = context.task, context.model
    of_model = {id(one) for one in (*model.modules(), *model.parameters(), *model.buffers())}

    def read_values() -> dict[str, Any]:
        roots = _list_roots(task, model)
        return kept_values(roots, of_model - set(map(id, roots.values())))

    call = partial(_training_losses, context)
    warnings = list(_check_calls(task, "the training loss of two rows", call, read_values, _IN_TRAINING))
    if (name := _kept_since_first_call(task, model)) is not None and _depends_on_first_rows(context):
        raise ConfigError(
            f"The model keeps {name} from its first call, and the training loss of other rows depends on it. In each"
            f" worker these are the first rows of this worker, and no checkpoint has them. {_IN_TRAINING}."
        )
    return warnings


def _kept_since_first_call(task: Task, model: nn.Module) -> str | None:
    """Returns the name of a number that a used model has other than a new one, or of a tensor that it has besides."""
    # Only for large models, since a build without values imports PyTorch's compiler.
    is_small = sum(p.numel() for p in model.parameters()) <= _MAX_PARAMETERS
    new_model = task.build_model() if is_small else build_without_values(task.build_model)
    if new_model is None:
        return None
    used, new = (kept_values(_list_roots(task, one)) for one in (model, new_model))
    changed = (
        name for name, value in used.items() if name not in new or (isinstance(value, str) and value != new[name])
    )
    of_model = (name for name in changed if name.startswith("model.") and not name.endswith(".training"))
    return next(of_model, None)


def _depends_on_first_rows(context: PreflightContext) -> bool:
    """Returns whether the losses of a new model depend on the rows before; False if the task refuses shifted rows."""
    try:
        return not is_same(_losses_after(context, 0), _losses_after(context, 1))
    except TaskError:
        return False


def _losses_after(context: PreflightContext, shift: int) -> list[Tensor]:
    """Returns the training losses of some rows by a new model that has first computed those of shifted rows."""
    task, state = context.task, context.row_probe.state
    model = task.build_model()
    model.load_state_dict(context.model.state_dict(), strict=False)
    new_state: Any = SimpleNamespace(model=model, turns=state.turns)
    probe, fields = replace(context.row_probe, state=new_state), context.row_probe.make_batch(context.accepted_rows)
    for module, used in zip(model.modules(), context.model.modules(), strict=True):
        module.training = used.training
    buffers = [buffer.clone() for buffer in model.buffers()]
    first = {
        name: values + shift if values.is_floating_point() else values.roll(shift, -1) if values.ndim > 1 else values
        for name, values in fields.items()
    }
    for batch in (first, fields):
        seed_step(0, 0, 0, 0, HOST)
        with torch.no_grad():
            for buffer, before in zip(model.buffers(), buffers, strict=False):
                buffer.copy_(before)
        with user_code(lambda: "the training loss of two rows by a new model"):
            losses = [Losses.of(one).values.detach() for _, one in probe.losses(batch)]
    return losses


def _training_losses(context: PreflightContext) -> list[Tensor]:
    """Returns the training losses of the rows that the task accepts; leaves buffers and modes as they were."""
    row_probe, model = context.row_probe, context.model
    buffers = [buffer.clone() for buffer in model.buffers()]
    batch = row_probe.make_batch(context.accepted_rows)
    values = [Losses.of(losses).values for _, losses in row_probe.losses(batch)]
    for one in values:
        refuse_outside_parameters(model, one)
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
    return values


def refuse_outside_parameters(model: nn.Module, losses: Tensor) -> None:
    """Refuses losses that depend on a parameter which is no part of the model, by the autograd graph."""
    of_model = {id(p) for p in model.parameters()}
    leaves = (getattr(node, "variable", None) for node in graph_nodes(losses) or ())
    outside = next((leaf for leaf in leaves if isinstance(leaf, nn.Parameter) and id(leaf) not in of_model), None)
    if outside is not None:
        modules = (one for one in gc.get_objects() if issubclass(type(one), nn.Module))
        named = ((type(one), *pair) for one in modules for pair in one.named_parameters(recurse=False))
        names = (f"the parameter {name} of {kind.__name__}" for kind, name, p in named if p is outside)
        raise ConfigError(
            f"The training loss depends on {next(names, f'a parameter of shape {tuple(outside.shape)}')}, which is not"
            " part of the model: each process would initialize it separately, and nothing trains or stores it. Make its"
            " module a part of the model that build_model returns (self.criterion = ... in the model). A loss given as"
            " task.init_args.loss becomes part of the model automatically."
        )


def _check_calls(
    task: Task, result: str, call: Callable[[], Any], read_values: Callable[[], dict[str, Any]], advice: str
) -> Iterator[str]:
    """Makes a call three times, and refuses attributes that the last one changes; yields a warning for other results.

    The first call may fill caches.
    """
    results = []
    for _ in range(3):
        before = read_values()
        seed_step(0, 0, 0, 0, HOST)
        with user_code(lambda: f"{result}, computed three times"):
            results.append(call())
    after = read_values()
    if changed := [name for name, value in before.items() if not is_same(value, after.get(name, value))]:
        raise ConfigError(
            f"{changed[0]} changes with every call: {result} was computed three times, with the same rows, keys and"
            " seeds. Each worker and each reader has its own value, so the result would depend on their number, and no"
            f" checkpoint contains it. {advice}."
        )
    if not is_same(results[1], results[2]):
        yield (
            f"{result} changes if {type(task).__name__} computes it again with the same rows, keys and torch seeds, so"
            " two runs differ. `ray-app check` names the line."
        )


def _list_roots(task: Task, model: nn.Module) -> dict[str, Any]:
    """Returns the objects of the user that a training calls, and the variables of the files of their classes, by name.

    Modules of libraries are left out: they keep figures of their own, such as the longest sequence so far.
    """
    roots: dict[str, Any] = {type(task).__name__: task}
    if isinstance(task, ModuleTask):
        if type(task).loss is ModuleTask.loss and task.loss_spec:
            roots["task.init_args.loss"] = make_loss(json.dumps(task.loss_spec), str(HOST))
        for field in (f"task.init_args.{name}" for name in ("transforms", "evaluate_transforms")):
            roots[field] = instantiate_once(getattr(task, field.rpartition(".")[2]), field)
    for name, module in model.named_modules():
        if _file_of(type(module)) and not hasattr(module, "_update_count"):
            roots[".".join(filter(None, ("model", name)))] = module
    kinds = [type(one) for root in roots.values() for one in (root if isinstance(root, list) else [root])]
    names = {kind.__module__ for kind in kinds if _file_of(kind)}
    for name in sorted(names):
        roots[name] = {k: v for k, v in vars(sys.modules[name]).items() if k[:2] != "__"}
        for kind in (one for one in roots[name].values() if isinstance(one, type) and one.__module__ == name):
            # Of a function the default arguments, which a call may change.
            roots[f"{name}.{kind.__name__}"] = {
                k: getattr(v, "__defaults__", v) for k, v in vars(kind).items() if k[:2] != "__"
            }
    return roots


def _file_of(kind: type) -> str | None:
    """Returns the file of a class if the user has written it, otherwise None."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file if file and not kind.__module__.startswith("ray_app.") and is_user_code(file) else None


def name_unused_outputs(context: PreflightContext) -> list[str]:
    """Returns a sentence for what the model computes and the training loss does not depend on, by the autograd graph.

    These are outputs, and numbers that a part keeps as an attribute, as a mixture of experts does. A number that equals
    the mean loss of the rows is the same loss, computed by the model.
    """
    task, model = context.task, context.model
    computed: list[tuple[str, Tensor]] = []
    hook = model.register_forward_hook(lambda _, __, outputs: computed.extend(_list_tensors("output", outputs)))
    row_probe = context.row_probe
    nodes, means = set[Any](), list[float]()
    try:
        batch = row_probe.make_batch(context.accepted_rows)
        for losses in map(Losses.of, (losses for _, losses in row_probe.losses(batch))):
            nodes |= graph_nodes(losses.values) or set()
            weight = len(losses.values) if losses.weights is None else float(losses.weights.sum())
            means.append(float(losses.values.detach().sum()) / (weight or 1))
    finally:
        hook.remove()
    for name, module in model.named_modules():
        kept = [(key, value) for key, value in vars(module).items() if isinstance(value, Tensor) and value.numel() == 1]
        computed += [(f"{name or type(model).__name__}.{key}", value) for key, value in kept]
    unused = [
        name
        for name, value in computed
        if value.grad_fn is not None
        and value.grad_fn not in nodes
        and not (value.numel() == 1 and any(math.isclose(value.item(), mean, rel_tol=1e-4) for mean in means))
    ]
    messages = []
    if nodes and unused:
        messages.append(
            f"The model computes {', '.join(dict.fromkeys(unused))}, and the training loss does not depend on it. If"
            " the output is a loss, add it in Task.training_loss (docs/own-task.md); otherwise this is only a note."
        )
    if isinstance(task, ModuleTask) and task.target in (columns := task.columns_of_model()) and len(columns) > 1:
        messages.append(
            f"Column {task.target!r} is the target and also an input: the model reads the value that it predicts, and a"
            " prediction needs this column. Leave the column out of task.init_args.inputs unless this is intended."
        )
    return messages


def _list_tensors(name: str, outputs: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a model's outputs with their names."""
    if isinstance(outputs, Tensor):
        yield name, outputs
    elif isinstance(outputs, Mapping | list | tuple) or name == "output":
        for key, part in iter_parts(outputs):
            yield from _list_tensors(f"{name}{key}", part)
