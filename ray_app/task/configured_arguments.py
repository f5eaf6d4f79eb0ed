"""Checks of the arguments of configured tasks, and losses that the configuration specifies.

The `need_*` functions check values beyond their types. `compute_row_losses` computes a configured loss, of `torch.nn`
or any callable of outputs and target, for each row, and the accuracy. `target_range` determines the values that a
target may have for such a loss.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, islice
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ray_app.config.import_paths import load_class
from ray_app.devices import HOST
from ray_app.errors import ConfigError, DataError, join_names
from ray_app.plan.manifest import ColumnFacts, DataFacts
from ray_app.task.images import image_size
from ray_app.task.losses import Losses
from ray_app.task.metrics import Mode, mode_of
from ray_app.task.transforms import Spec, instantiate, same_in_each_process

_INIT_ARGS = "task.init_args"
_MAX_SIZES_READ = 1000
_RESERVED_METRICS = ("loss", "rows")
"""Names of the results that every evaluation has besides its metrics."""


def need_specs(**values: Any) -> None:
    """Raises ConfigError for values that are not specifications, and for reserved names of metrics."""
    for name, value in values.items():
        if reserved := [metric for metric in _RESERVED_METRICS if name == "metrics" and metric in value]:
            raise ConfigError(
                f"{_INIT_ARGS}.metrics has {reserved[0]!r}, which every evaluation has already. Rename the metric."
            )
        several = {f"{name}.{key}": one for key, one in value.items()} if name == "metrics" else None
        several = {f"{name}[{i}]": one for i, one in enumerate(value)} if isinstance(value, list) else several
        for field, one in ({name: value} if several is None else several).items():
            if not isinstance(one, dict) or not isinstance(one.get("class_path"), str):
                raise ConfigError(
                    f"{_INIT_ARGS}.{field} is {one!r}; it must have class_path, an import path such as"
                    " torch.nn.CrossEntropyLoss, and may have init_args."
                )


def need_numbers(mean: Sequence[float], std: Sequence[float], pad_to: int, max_length: int | None) -> None:
    """Raises ConfigError for `mean`, `std`, `pad_to` and `max_length` that cannot be computed with."""
    if not all(value > 0 for value in std):
        raise ConfigError(f"{_INIT_ARGS}.std is {list(std)}; images are divided by them, so each must be above 0.")
    if not mean or not std:
        raise ConfigError(
            f"{_INIT_ARGS}.mean and std are {list(mean)} and {list(std)}; set one number for each channel, or one for"
            " all."
        )
    if pad_to < 1:
        raise ConfigError(
            f"{_INIT_ARGS}.pad_to is {pad_to}; it must be at least 1: padded lists have a multiple of this length."
        )
    if max_length is not None and max_length < 1:
        raise ConfigError(f"{_INIT_ARGS}.max_length is {max_length}; it must be at least 1, or null for no limit.")


def need_channels(name: str, column: ColumnFacts, **statistics: Sequence[float]) -> None:
    """Raises ConfigError unless `mean` or `std` has one value, or as many as an image column has channels."""
    channels = 3 if column.kind == "bytes" else column.shape[2] if len(column.shape) == 3 else 1
    for argument, values in statistics.items():
        if len(values) not in (1, channels):
            raise ConfigError(
                f"{_INIT_ARGS}.{argument} is {list(values)}, {len(values)} numbers; images of {name!r} have {channels}"
                " channels. Set one for each, or one for all."
            )


def need_lists(data: DataFacts, facts: Mapping[str, ColumnFacts], padded: Iterable[str]) -> None:
    """Raises DataError for `COLUMN.mask` of columns that are never padded."""
    for name in padded:
        if facts[name].kind != "list":
            raise DataError(
                f"{_INIT_ARGS}.inputs names {name}.mask, which marks the padding of lists, but column {name!r} of"
                f" {data.path} holds {facts[name].kind}, not lists. Leave .mask out."
            )


def need_flat(data: DataFacts, name: str, column: ColumnFacts) -> None:
    """Raises DataError for a target of lists of lists: no axis of the outputs is known to be the padded one."""
    if column.kind == "list" and (column.shape or column.dtype.count("list<") > 1):
        raise DataError(
            f"{_INIT_ARGS}.target names {name!r}, but this column of {data.path} holds lists of lists, {column.dtype};"
            " a target has one number per position of a list. Name another column, convert it to lists of one size, or"
            " write a Task, whose `loss` receives the padded lists."
        )


def need_one_size(data: DataFacts, name: str, exif_orientation: bool) -> None:
    """Raises DataError if the first encoded images of a column have several sizes, as the headers of 1,000 say.

    A later image of another size cannot be decoded with the rows of its micro-batch, and is refused then.
    """
    sizes: dict[tuple[int, int], None] = {}
    read: Iterator[Any] = iter(())
    if data.read is not None:
        read = chain.from_iterable(rows[name] for rows in data.read([name]))
    for encoded in islice(read, _MAX_SIZES_READ):
        if encoded is not None and (size := image_size(encoded, exif_orientation)) is not None:
            sizes[size] = None
        if len(sizes) > 1:
            listed = " and ".join(f"{height} x {width}" for height, width in sizes)
            raise DataError(
                f"Column {name!r} of {data.path} holds images of several sizes, {listed} (height x width); set"
                f" {_INIT_ARGS}.evaluate_transforms to give them one size (torchvision.transforms.v2.Resize,"
                " CenterCrop)."
            )


def resolve_best_mode(metric: str, mode: Mode | None, metrics: Mapping[str, Spec]) -> Mode:
    """Returns whether less or more of the best metric is better; raises ConfigError if that is not defined."""
    spec = metrics.get(metric) if mode is None else None
    resolved = mode or mode_of(metric, instantiate(spec, f"{_INIT_ARGS}.metrics.{metric}") if spec else None)
    if resolved is None:
        names = f" The metrics are {', '.join(['loss', *metrics])}." if metrics and not spec else ""
        raise ConfigError(
            f"{_INIT_ARGS}.best_metric is {metric!r}, but no setting defines whether a lower or a higher value is"
            f" better.{names} Set {_INIT_ARGS}.best_mode to min or max."
        )
    return resolved


Activation = Literal["sigmoid", "softmax", "none"]
"""The function that turns a model's outputs into probabilities."""
_CLASS_WEIGHT_ARGUMENTS = ("weight", "pos_weight")
"""Arguments of losses that are tensors; a configuration has lists."""
_LOSSES_OF_SCORES: dict[Activation, tuple[str, ...]] = {
    "sigmoid": (
        "BCEWithLogitsLoss",
        "MultiLabelSoftMarginLoss",
        "MultiLabelMarginLoss",
        "SoftMarginLoss",
        "binary_cross_entropy_with_logits",
        "multilabel_soft_margin_loss",
        "multilabel_margin_loss",
        "soft_margin_loss",
        "sigmoid_focal_loss",
    ),
    "softmax": ("CrossEntropyLoss", "NLLLoss", "MultiMarginLoss", "cross_entropy", "nll_loss", "multi_margin_loss"),
}
"""Losses of torch and torchvision that take scores, by the function that turns scores into probabilities.

Softmax also turns log-probabilities into probabilities.
"""
_BINARY_THRESHOLDS = {
    nn.BCEWithLogitsLoss: 0.0,
    nn.MultiLabelSoftMarginLoss: 0.0,
    nn.SoftMarginLoss: 0.0,
    nn.BCELoss: 0.5,
}
"""Losses of two classes with one output, and the output that separates the two."""


def compute_row_losses(
    spec: Spec,
    outputs: Any,
    target: Tensor,
    accuracy: bool = False,
    is_value: Tensor | None = None,
    loss: nn.Module | None = None,
) -> Tensor | Losses:
    """Computes a configured loss for each row; of rows with several loss values (pixels) the mean is over all values.

    With class weights the mean is weighted, as that of `torch.nn.CrossEntropyLoss`.

    Args:
        spec: The loss, which is made with `reduction: none`. With `batchmean` (`torch.nn.KLDivLoss`) the mean is over
            rows and not over all values.
        target: The target. If it has the outputs' shape it is converted to their type; both get at least 32 bits.
        accuracy: Whether to add the metric `accuracy`, with the weights of the losses.
        is_value: The values of a target of lists that are not padding; the others have weight 0. None: all are values.
        loss: The loss, if it is a part of the model, see `attach_loss`; None: a loss without a state is made.

    Raises:
        ConfigError: The loss compares each output of a row with each of its targets, or returns one value for a padded
            list; or `accuracy` is set, and the target is not classes.
    """
    if is_value is not None:
        target = target.masked_fill(~is_value, 0)
    loss = _make_stateless_loss(json.dumps(spec), str(target.device)) if loss is None else loss
    correct = _is_correct(loss, outputs, target) if accuracy else None
    if isinstance(outputs, Tensor) and outputs.shape == target.shape and outputs.is_floating_point():
        outputs, target = _to_full_precision(outputs), target.to(_to_full_precision(outputs).dtype)
    if not isinstance(losses := loss(outputs, target), Tensor):
        raise ConfigError(
            f"{spec['class_path']} returned a {type(losses).__name__}; a loss must return a tensor with one value per"
            " row. Record further values of a step by ray_app.reduce."
        )
    losses = _to_full_precision(losses)
    is_torchs = type(loss).__module__ == "torch.nn.modules.loss"
    if is_torchs and isinstance(outputs, Tensor) and losses.shape == outputs.shape != target.shape:
        raise ConfigError(
            f"The model's outputs have the shape {_format_shape(outputs)}, but the target has {_format_shape(target)};"
            f" {spec['class_path']} compares them one by one. Let the model return as many outputs as a row of the"
            " target has numbers."
        )
    weights = _value_weights(loss, losses, target)
    if is_value is not None:
        if losses.shape != target.shape:
            raise ConfigError(
                f"{spec['class_path']} returned values of shape {_format_shape(losses)} for a target of padded lists,"
                f" {_format_shape(target)}, so padding would count. Use a loss that returns a value for each number of"
                " a list; if classes are the last axis of the outputs, set task.init_args.classes_last."
            )
        losses = losses.masked_fill(~is_value, 0)
        weights = is_value if weights is None else weights * is_value
    is_batchmean = (spec.get("init_args") or {}).get("reduction") == "batchmean"
    if correct is None and ((weights is None and losses.ndim < 2) or is_batchmean):
        return _sum_by_row(losses)
    weights = torch.ones_like(losses) if weights is None else weights
    if correct is None:
        return Losses(_sum_by_row(losses), _sum_by_row(weights))
    # A loss may reduce several values of a row to one; the accuracy of the row is then their mean.
    share = correct.float() if correct.ndim <= weights.ndim else correct.float().flatten(1).mean(1)
    return Losses(_sum_by_row(losses), _sum_by_row(weights), {"accuracy": _sum_by_row(share * weights)})


def reduction_of(spec: Spec) -> str:
    """Returns the configured `reduction` of a loss; raises ConfigError for one that a step cannot use."""
    init_args = spec.get("init_args") or {}
    reduction = init_args.get("reduction", "mean")
    has_batchmean = "KLDiv" in spec["class_path"] or "kl_div" in spec["class_path"]
    allowed = ["mean", "none", *(["batchmean"] if has_batchmean else [])]
    if reduction not in allowed:
        raise ConfigError(
            f"task.init_args.loss has reduction {reduction!r}; it must be one of {', '.join(allowed)}. A step's loss is"
            " a mean over the global batch, so that the learning rate does not depend on its rows; if you used a sum"
            " before, multiply the learning rate by the rows of a batch."
        )
    if old := sorted(name for name in ("size_average", "reduce") if init_args.get(name) is not None):
        raise ConfigError(
            f"task.init_args.loss has {', '.join(old)}, which torch has replaced by reduction; leave it out, the"
            " default is the mean."
        )
    return str(reduction)


@lru_cache(64)
def activation_of(spec: str) -> Activation:
    """Returns what turns outputs that a loss takes into probabilities; `none` for an unknown loss."""
    loss = make_loss(spec, str(HOST))
    kinds = [loss.func] if isinstance(loss, partial) else [kind for kind in type(loss).__mro__ if kind is not object]
    names = {kind.__name__ for kind in kinds if kind.__module__.partition(".")[0] in ("torch", "torchvision")}
    return next((activation for activation, losses in _LOSSES_OF_SCORES.items() if names & set(losses)), "none")


def probabilities(outputs: Any, activation: Activation) -> Any:
    """Returns the probabilities for scores of classes along axis 1, or for one score of each value.

    Metrics get probabilities because torchmetrics would decide by the values of each batch whether they are logits.
    """
    if activation == "none" or not isinstance(outputs, Tensor):
        return outputs
    scores = _to_full_precision(outputs)
    return scores.sigmoid() if activation == "sigmoid" else scores.softmax(1) if scores.ndim > 1 else scores


def _to_full_precision(values: Tensor) -> Tensor:
    """Converts values of half precision to float32, so that targets and sums are not rounded to a model's precision."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _sum_by_row(values: Tensor) -> Tensor:
    """Returns the sum of the values of each row, shape (rows,)."""
    return values.flatten(1).sum(1) if values.ndim > 1 else values


def _is_correct(loss: Any, outputs: Any, target: Tensor) -> Tensor:
    """Returns where the outputs predict the target's class, in the shape of the target.

    The predicted class has the highest score; with one score for two classes, the loss defines the threshold.
    """
    if isinstance(outputs, Tensor):
        if outputs.ndim == target.ndim + 1 and not target.is_floating_point():
            return outputs.argmax(1) == target
        threshold = next((value for kind, value in _BINARY_THRESHOLDS.items() if isinstance(loss, kind)), None)
        if outputs.shape == target.shape and threshold is not None:
            return (outputs > threshold) == (target > 0.5)
    raise ConfigError(
        f"task.init_args.train_accuracy is true, but the target, {target.dtype} of shape {_format_shape(target)}, is"
        " neither the index of a class with a score in the outputs, nor 0 and 1 for"
        f" {', '.join(kind.__name__ for kind in _BINARY_THRESHOLDS)}. Leave train_accuracy out."
    )


def _format_shape(values: Tensor) -> str:
    return f"({', '.join(['rows', *map(str, values.shape[1:])])})"


def _value_weights(loss: Any, losses: Tensor, target: Tensor) -> Tensor | None:
    """Returns the weight of each value of a loss of class indices, as in torch's mean; None if all weights are 1."""
    if losses.shape != target.shape or target.is_floating_point() or (ignored := _option(loss, "ignore_index")) is None:
        return None
    class_weights, is_used = _option(loss, "weight"), target != ignored
    if class_weights is None:
        return is_used.to(losses.dtype)
    return class_weights[torch.where(is_used, target, 0)] * is_used


def _option(loss: Any, name: str) -> Any:
    """Returns an option of a loss module or function (`torch.nn.functional.cross_entropy`), None if it has none."""
    if not isinstance(loss, partial):
        return getattr(loss, name, None)
    option = inspect.signature(loss).parameters.get(name)
    return None if option is None or option.default is option.empty else option.default


TASK_LOSS = "task_loss"
"""The name of a loss with a state among the parts of the model."""


def attach_loss(model: nn.Module, spec: Spec) -> None:
    """Makes a configured loss a part of the model if it is a module with parameters or buffers.

    It is then initialized, trained, averaged, stored and sharded like the other parts. Losses of `torch.nn` have no
    state: the weights of classes are arguments.

    Raises:
        ConfigError: The model has another attribute of this name.
    """
    if not _has_state(make_loss(json.dumps(spec), str(HOST))):
        return
    if hasattr(model, TASK_LOSS):
        raise ConfigError(
            f"{type(model).__name__} has an attribute {TASK_LOSS}, but {spec['class_path']}, a loss with parameters or"
            " buffers, is stored in the model under this name. Rename the attribute."
        )
    if isinstance(model, nn.Sequential):
        # An `nn.Sequential` calls its parts one after the other, and the loss is none of them.
        kind = type(model)
        subclass: Any = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__iter__": _iter_layers})
        model.__class__ = subclass
    model.add_module(TASK_LOSS, _instantiate_loss(json.dumps(spec)))


def load_loss(model: nn.Module, spec: Spec, state: Mapping[str, Tensor]) -> None:
    """Gives a packaged model, which computes outputs alone, the loss that is stored with its parameters, if any.

    Args:
        model: The model.
        spec: The loss.
        state: The parameters and buffers of the package by name.
    """
    attach_loss(model, spec)
    if (loss := getattr(model, TASK_LOSS, None)) is not None:
        start = f"{TASK_LOSS}."
        loss.load_state_dict({name[len(start) :]: value for name, value in state.items() if name.startswith(start)})


def _has_state(loss: Any) -> bool:
    is_torchs = type(loss).__module__ == "torch.nn.modules.loss"
    return isinstance(loss, nn.Module) and not is_torchs and bool(loss.state_dict())


@lru_cache(64)
def _make_stateless_loss(spec: str, device: str) -> Any:
    """Makes a loss, see `make_loss`; raises ConfigError for one with parameters or buffers."""
    loss = make_loss(spec, device)
    if _has_state(loss):
        raise ConfigError(
            f"{type(loss).__name__} has parameters or buffers, but the model has no {TASK_LOSS} to hold their values."
            " In your own build_model, call attach_loss(model, self.loss_spec) of ray_app.task.configured_arguments."
        )
    return loss


def _iter_layers(model: nn.Sequential) -> Iterator[nn.Module]:
    return (layer for layer in nn.Sequential.__iter__(model) if layer is not model.task_loss)


@lru_cache(64)
def make_loss(spec: str, device: str) -> Any:
    """Makes a loss on a device, `str(torch.device)`, once in a process, alike in each."""
    with same_in_each_process():
        loss = _instantiate_loss(spec, device)
    return loss.to(device) if isinstance(loss, nn.Module) else loss


def _instantiate_loss(spec: str, device: str = str(HOST)) -> Any:
    """Makes a loss that gives a value for each row or each of its parts; `device` is that of a function's tensors."""
    parsed = json.loads(spec)
    init_args = dict(parsed.get("init_args") or {})
    imported, parameters = _inspect(parsed["class_path"])
    # A loss without this argument gives a value for each row by itself.
    if imported is None or any(p.name == "reduction" or p.kind is p.VAR_KEYWORD for p in parameters):
        init_args["reduction"] = "none"
    tensors = {
        name: torch.tensor(init_args[name], dtype=torch.float32)
        for name in _CLASS_WEIGHT_ARGUMENTS
        if isinstance(init_args.get(name), list)
    }
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in kinds and p.default is p.empty and p.name not in init_args]
    # A function of outputs and target, such as torchvision.ops.sigmoid_focal_loss, is the loss and does not make it.
    if inspect.isfunction(imported) and len(needed) == 2:
        return partial(imported, **(init_args | {name: value.to(device) for name, value in tensors.items()}))
    return instantiate({**parsed, "init_args": init_args | tensors}, "task.init_args.loss")


def _inspect(class_path: str) -> tuple[Any, list[inspect.Parameter]]:
    """Returns an imported class or function with its parameters; None if that is impossible, as `instantiate` says."""
    try:
        imported = load_class(class_path)
        if getattr(imported, "__init__", None) is nn.Module.__init__:
            # Its signature has any arguments, of which it accepts none.
            return imported, []
        return imported, [*inspect.signature(imported).parameters.values()]
    except (ImportError, AttributeError, TypeError, ValueError):
        return None, []


_CLASS_INDEX_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_BINARY_LOSSES = (nn.BCEWithLogitsLoss, nn.BCELoss, nn.MultiLabelSoftMarginLoss)


def target_range(spec: Spec, outputs: Any, target: Tensor) -> list[int] | None:
    """Returns the least and the greatest value that a loss takes in a target, and the value that it ignores, if any.

    It is None for a loss that takes any value or is unknown, such as a class that overrides `forward`. Outputs that are
    scores of classes have the shape (rows, classes, ...), the target (rows, ...).
    """
    loss = make_loss(json.dumps(spec), str(HOST))
    kinds = (kind for kind in (*_CLASS_INDEX_LOSSES, *_BINARY_LOSSES) if isinstance(loss, kind))
    kind = next((kind for kind in kinds if type(loss).forward is kind.forward), None)
    if kind is None or not isinstance(outputs, Tensor):
        return None
    if kind in _CLASS_INDEX_LOSSES and outputs.ndim == target.ndim + 1 and not target.is_floating_point():
        return [0, outputs.shape[1] - 1, int(loss.ignore_index)]
    return [0, 1] if kind in _BINARY_LOSSES and outputs.shape == target.shape else None


def refuse_values(column: str, values: npt.NDArray, allowed: list[int], is_mask: bool) -> None:
    """Raises ValueError for values of a target, of any shape, that the loss does not take."""
    smallest, greatest, *ignored = allowed
    if not values.size or smallest <= values.min() <= values.max() <= greatest:
        return
    if ((values >= smallest) & (values <= greatest) | np.isin(values, ignored)).all():
        return
    remedy = (
        "Store the numbers of the classes in masks, as ray-app ingest --mask_values does; or ignore pixels with a value"
        " by ignore_index of the loss (task.init_args.loss.init_args.ignore_index: 255); or give the model an output"
        " for each class"
        if is_mask
        else "Correct the column, or give the model an output for each class"
    )
    listed = join_names([f"{value:g}" for value in np.unique(values)], 8)
    raise ValueError(
        f"the {'mask' if is_mask else 'target'} {column!r} has the values {listed}; the loss and the"
        f" model's {greatest + 1} classes allow {smallest} to {greatest}. {remedy}"
    )
