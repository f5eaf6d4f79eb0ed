"""What the arguments of a task by configuration must be, beyond their types.

A loss of the configuration: one of `torch.nn`, or whatever is called with outputs and target, for each row; and what
was right.

Which values a target may have for a loss of the configuration.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ray_app.config.import_paths import load_class
from ray_app.errors import ConfigError, DataError
from ray_app.plan.manifest import ColumnFacts, DataFacts
from ray_app.task.base import Losses
from ray_app.task.metrics import Mode, mode_of
from ray_app.task.transforms import Spec, instantiate

_INIT_ARGS = "task.init_args"
_RESERVED_METRICS = ("loss", "rows")
"""What an evaluation has besides its metrics."""


def need_specs(**given: Any) -> None:
    """Refuses what is no specification: `class_path` and `init_args`, or a list or mapping of such.

    Raises:
        ConfigError: Something is none.
    """
    for name, value in given.items():
        if name == "metrics":
            need_names(value)
        several = {f"{name}.{key}": one for key, one in value.items()} if name == "metrics" else None
        several = {f"{name}[{i}]": one for i, one in enumerate(value)} if isinstance(value, list) else several
        for place, one in ({name: value} if several is None else several).items():
            if not isinstance(one, dict) or not isinstance(one.get("class_path"), str):
                raise ConfigError(
                    f"{_INIT_ARGS}.{place} is {one!r}; it must have class_path, an import path such as"
                    " torch.nn.CrossEntropyLoss, and may have init_args."
                )


def need_names(metrics: Iterable[str]) -> None:
    """Refuses metrics by the name of something else."""
    for name in metrics:
        if name in _RESERVED_METRICS:
            raise ConfigError(
                f"{_INIT_ARGS}.metrics has {name!r}, which every evaluation has. Give the metric another name."
            )


def need_numbers(mean: Sequence[float], std: Sequence[float], pad_to: int, max_length: int | None) -> None:
    """Refuses numbers with which nothing can be computed.

    Raises:
        ConfigError: One is such.
    """
    if not all(value > 0 for value in std):
        raise ConfigError(f"{_INIT_ARGS}.std is {list(std)}; images are divided by it, so each must be greater than 0.")
    if not mean or not std:
        raise ConfigError(
            f"{_INIT_ARGS}.mean and std are {list(mean)} and {list(std)}; give a number for each channel, or one for"
            " all."
        )
    if pad_to < 1:
        raise ConfigError(
            f"{_INIT_ARGS}.pad_to is {pad_to}; padded lists are as long as a multiple of it, so it must be at least 1."
        )
    if max_length is not None and max_length < 1:
        raise ConfigError(f"{_INIT_ARGS}.max_length is {max_length}; it must be at least 1, or null for all.")


def parse_mask_values(values: Any) -> list[list[int]]:
    """Value and class of masks in the order of the values, as `task.init_args.mask_values` has them; empty where that
    is not given.

    Raises:
        ConfigError: These are no integers.
    """
    given = values or {}
    if not isinstance(given, Mapping) or not all(type(n) is int for pair in given.items() for n in pair):
        raise ConfigError(
            f"{_INIT_ARGS}.mask_values is {values!r}; it must be classes by the values of a mask, integers both, as"
            " {0: 0, 255: 1}."
        )
    return [[value, given[value]] for value in sorted(given)]


def need_channels(name: str, column: ColumnFacts, **given: Sequence[float]) -> None:
    """Refuses a `mean` or `std` that an image column has not as many channels for."""
    channels = 3 if column.kind == "bytes" else column.shape[2] if len(column.shape) == 3 else 1
    for argument, values in given.items():
        if len(values) not in (1, channels):
            raise ConfigError(
                f"{_INIT_ARGS}.{argument} is {list(values)}, {len(values)} numbers; images of {name!r} have {channels}"
                " channels. Give a number for each, or one for all."
            )


def need_lists(data: DataFacts, facts: Mapping[str, ColumnFacts], padded: Iterable[str]) -> None:
    """Refuses `COLUMN.mask` of columns that are never padded."""
    for name in padded:
        if facts[name].kind != "list":
            raise DataError(
                f"{_INIT_ARGS}.inputs names {name}.mask, which is 1 where a list has a number and 0 where it is padded;"
                f" column {name!r} of {data.path} holds {facts[name].kind}, no lists. Leave .mask out."
            )


def need_flat(data: DataFacts, name: str, column: ColumnFacts) -> None:
    """Refuses a target of lists of lists, of which nothing says which of their axes is padded in the outputs.

    Raises:
        DataError: It is one.
    """
    if column.kind == "list" and (column.shape or column.dtype.count("list<") > 1):
        raise DataError(
            f"{_INIT_ARGS}.target names {name!r}, and of {data.path} that holds lists of lists, {column.dtype}; a"
            " target is one number for each place of a list. Name another column, make lists of one size of it, or"
            " write a Task, whose `loss` gets the lists padded."
        )


def resolve_best_mode(metric: str, mode: Mode | None, metrics: Mapping[str, Spec]) -> Mode:
    """Whether less or more of the metric that decides is better.

    Args:
        metric: Its name.
        mode: As configured.
        metrics: The task's.

    Raises:
        ConfigError: Nothing says so.
    """
    if mode is not None and mode not in get_args(Mode):
        raise ConfigError(f"{_INIT_ARGS}.best_mode is {mode!r}; it must be min or max.")
    spec = metrics.get(metric) if mode is None else None
    found = mode or mode_of(metric, instantiate(spec, f"{_INIT_ARGS}.metrics.{metric}") if spec else None)
    if found is None:
        named = f" The metrics are {', '.join(['loss', *metrics])}." if metrics and not spec else ""
        raise ConfigError(
            f"{_INIT_ARGS}.best_metric is {metric!r}, and nothing says whether less or more of it is better.{named} Set"
            f" {_INIT_ARGS}.best_mode to min or max."
        )
    return found


Activation = Literal["sigmoid", "softmax", "none"]
"""What makes probabilities of a model's outputs."""
_CLASS_WEIGHT_ARGUMENTS = ("weight", "pos_weight")
"""Arguments of losses that are tensors, lists in a configuration."""
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
"""Losses of torch and torchvision that take scores, by what makes probabilities of these; softmax does of
log-probabilities, too.
"""
_BINARY_THRESHOLDS = {
    nn.BCEWithLogitsLoss: 0.0,
    nn.MultiLabelSoftMarginLoss: 0.0,
    nn.SoftMarginLoss: 0.0,
    nn.BCELoss: 0.5,
}
"""Losses of two classes with one output, and the output between the two."""


def compute_row_losses(
    spec: Spec, outputs: Any, target: Tensor, accuracy: bool = False, there: Tensor | None = None
) -> Tensor | Losses:
    """What a loss gives for each row; where that is several values (pixels, several numbers), the mean is over all of
    them.

    With weights of classes the mean is over these, as `torch.nn.CrossEntropyLoss` has it.

    Args:
        spec: The loss. It is made with `reduction: none`; of a row's several values the mean is over all of them, with
            `batchmean` (`torch.nn.KLDivLoss`) over the rows.
        outputs: What of the model's is compared.
        target: What with; of the outputs' shape it becomes of their type, both of at least 32 bits.
        accuracy: Whether what is right of each row is the metric `accuracy`; it counts as its losses do.
        there: Which values of a target of lists are there; the others are padding, and do not count. Not given: all.

    Raises:
        ConfigError: It compares each of a row's outputs with each of its targets, or makes one value of a padded list;
            or the accuracy is asked for, and these are no classes.
    """
    if there is not None:
        target = target.masked_fill(~there, 0)
    loss = make_loss(json.dumps(spec), str(target.device))
    right = _is_correct(loss, outputs, target) if accuracy else None
    if isinstance(outputs, Tensor) and outputs.shape == target.shape and outputs.is_floating_point():
        outputs, target = _to_full_precision(outputs), target.to(_to_full_precision(outputs).dtype)
    losses = _to_full_precision(loss(outputs, target))
    is_torchs = type(loss).__module__ == "torch.nn.modules.loss"
    if is_torchs and isinstance(outputs, Tensor) and losses.shape == outputs.shape != target.shape:
        raise ConfigError(
            f"The model's outputs are of shape {_format_shape(outputs)}, the target of {_format_shape(target)};"
            f" {spec['class_path']} compares each with each of these. Let the model give as many outputs as there are"
            " numbers in a row of the target."
        )
    counted = _value_weights(loss, losses, target)
    if there is not None:
        if losses.shape != target.shape:
            raise ConfigError(
                f"{spec['class_path']} gave values of shape {_format_shape(losses)} for a target of lists,"
                f" {_format_shape(target)}, which are padded: what is padding would count. Use a loss that gives a"
                " value for each number of a list; where classes are the last axis of the outputs, set"
                " task.init_args.classes_last."
            )
        losses, counted = losses.masked_fill(~there, 0), there if counted is None else counted * there
    if right is None and (
        (counted is None and losses.ndim < 2) or (spec.get("init_args") or {}).get("reduction") == "batchmean"
    ):
        return _sum_by_row(losses)
    counted = torch.ones_like(losses) if counted is None else counted
    if right is None:
        return Losses(_sum_by_row(losses), _sum_by_row(counted))
    right = (
        right.float() if right.ndim <= counted.ndim else right.float().flatten(1).mean(1)
    )  # the loss made one value of a row's
    return Losses(_sum_by_row(losses), _sum_by_row(counted), {"accuracy": _sum_by_row(right * counted)})


def reduction_of(spec: Spec) -> str:
    """The `reduction` of a loss, of which its values for each row are put together.

    Raises:
        ConfigError: It is none that a step can have.
    """
    given = spec.get("init_args") or {}
    reduction = given.get("reduction", "mean")
    known = [
        "mean",
        "none",
        *(["batchmean"] if "KLDiv" in spec["class_path"] or "kl_div" in spec["class_path"] else []),
    ]
    if reduction not in known:
        raise ConfigError(
            f"task.init_args.loss has reduction {reduction!r}; it must be one of {', '.join(known)}. A step's loss is a"
            " mean over the global batch, so that the learning rate does not depend on its rows; with a sum of before,"
            " multiply the learning rate by the rows that were summed."
        )
    if old := sorted(name for name in ("size_average", "reduce") if given.get(name) is not None):
        raise ConfigError(
            f"task.init_args.loss has {', '.join(old)}, which torch replaces by reduction; leave it out, the mean is"
            " taken."
        )
    return str(reduction)


@lru_cache(64)
def activation_of(spec: str) -> Activation:
    """What makes probabilities of the outputs that a loss compares; `none` for one that takes these, or numbers, or is
    not known.

    Args:
        spec: The loss, as JSON.
    """
    loss = make_loss(spec, "cpu")
    kinds = [loss.func] if isinstance(loss, partial) else [kind for kind in type(loss).__mro__ if kind is not object]
    names = {kind.__name__ for kind in kinds if kind.__module__.partition(".")[0] in ("torch", "torchvision")}
    return next((activation for activation, losses in _LOSSES_OF_SCORES.items() if names & set(losses)), "none")


def probabilities(outputs: Any, activation: Activation) -> Any:
    """What metrics of probabilities get: torchmetrics itself would decide by the values of each batch whether they are
    logits.

    Args:
        outputs: Scores of classes along axis 1, or one of each value.
        activation: What makes probabilities of them.
    """
    if activation == "none" or not isinstance(outputs, Tensor):
        return outputs
    scores = _to_full_precision(outputs)
    return scores.sigmoid() if activation == "sigmoid" else scores.softmax(1) if scores.ndim > 1 else scores


def _to_full_precision(values: Tensor) -> Tensor:
    """Values of half precision in single precision, others as they are: targets and sums are not rounded to what a
    model computes in.
    """
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _sum_by_row(values: Tensor) -> Tensor:
    """The sum of what a row has, shape (rows,)."""
    return values.flatten(1).sum(1) if values.ndim > 1 else values


def _is_correct(loss: Any, outputs: Any, target: Tensor) -> Tensor:
    """Where the outputs say the target's class, in its shape: by the highest score, of two classes with one score by
    what the loss parts.

    Raises:
        ConfigError: These are not classes.
    """
    if isinstance(outputs, Tensor):
        if outputs.ndim == target.ndim + 1 and not target.is_floating_point():
            return outputs.argmax(1) == target
        parts = next((value for kind, value in _BINARY_THRESHOLDS.items() if isinstance(loss, kind)), None)
        if outputs.shape == target.shape and parts is not None:
            return (outputs > parts) == (target > 0.5)
    raise ConfigError(
        f"task.init_args.train_accuracy is true, and the target, {target.dtype} of shape {_format_shape(target)}, is"
        " not the index of a class for which the outputs have a score, nor 0 and 1 for"
        f" {', '.join(kind.__name__ for kind in _BINARY_THRESHOLDS)}. Leave it out."
    )


def _format_shape(values: Tensor) -> str:
    return f"({', '.join(['rows', *map(str, values.shape[1:])])})"


def _value_weights(loss: Any, losses: Tensor, target: Tensor) -> Tensor | None:
    """How much each value of a loss that goes by class indices counts, as torch's own mean has it; None: as much as the
    others.
    """
    if losses.shape != target.shape or target.is_floating_point() or (ignored := _option(loss, "ignore_index")) is None:
        return None
    weights, counted = _option(loss, "weight"), target != ignored
    return counted.to(losses.dtype) if weights is None else weights[torch.where(counted, target, 0)] * counted


def _option(loss: Any, name: str) -> Any:
    """An option of a loss, or of a function that is one (`torch.nn.functional.cross_entropy`); None: it has no such."""
    if not isinstance(loss, partial):
        return getattr(loss, name, None)
    option = inspect.signature(loss).parameters.get(name)
    return None if option is None or option.default is option.empty else option.default


@lru_cache(64)
@torch.inference_mode(False)
def make_loss(spec: str, device: str) -> Any:
    """Makes a loss on a device once in a process, with weights that backward can save even if an evaluation asks for it
    first.

    Args:
        spec: The loss, as JSON.
        device: As `str(torch.device)` gives it.
    """
    given = json.loads(spec)
    init_args = {**(given.get("init_args") or {}), "reduction": "none"}
    tensors = {
        name: torch.tensor(init_args[name], dtype=torch.float32)
        for name in _CLASS_WEIGHT_ARGUMENTS
        if isinstance(init_args.get(name), list)
    }
    if (called := _loss_function(given, init_args)) is not None:
        return partial(called, **(init_args | {name: value.to(device) for name, value in tensors.items()}))
    loss = instantiate({**given, "init_args": init_args | tensors}, "task.init_args.loss")
    return loss.to(device) if isinstance(loss, nn.Module) else loss


def _loss_function(spec: Spec, init_args: dict[str, Any]) -> Any:
    """The function that is the loss itself, called with outputs and target (`torchvision.ops.sigmoid_focal_loss`);
    None: it makes one.
    """
    try:
        found = load_class(spec["class_path"])
        parameters = inspect.signature(found).parameters.values()
    except (ImportError, AttributeError, TypeError, ValueError):  # `instantiate` says what is wrong
        return None
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    is_loss = inspect.isfunction(found) and len([p for p in needed if p.name not in init_args]) == 2
    return found if is_loss else None


_CLASS_INDEX_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_BINARY_LOSSES = (nn.BCEWithLogitsLoss, nn.BCELoss, nn.MultiLabelSoftMarginLoss)
_MAX_NAMED = 8


def target_range(spec: Spec, outputs: Any, target: Tensor) -> list[int] | None:
    """The least and the greatest value that a loss takes in a target, and the one that it ignores, if there is one.

    Args:
        spec: The loss of the configuration.
        outputs: What of the model's outputs is compared, shape (rows, classes, ...) where these are scores of classes.
        target: What they are compared with, shape (rows, ...).

    Returns:
        None for a loss that takes any value, or of which this is not known, as it is of a class with a `forward` of its
        own.
    """
    loss = make_loss(json.dumps(spec), "cpu")
    kind = next(
        (
            kind
            for kind in (*_CLASS_INDEX_LOSSES, *_BINARY_LOSSES)
            if isinstance(loss, kind) and type(loss).forward is kind.forward
        ),
        None,
    )
    if kind is None or not isinstance(outputs, Tensor):
        return None
    if kind in _CLASS_INDEX_LOSSES and outputs.ndim == target.ndim + 1 and not target.is_floating_point():
        return [0, outputs.shape[1] - 1, int(loss.ignore_index)]
    return [0, 1] if kind in _BINARY_LOSSES and outputs.shape == target.shape else None


def refuse_values(column: str, values: npt.NDArray, allowed: list[int], is_mask: bool) -> None:
    """Refuses values of a target that the loss does not take.

    Args:
        column: The target.
        values: Its values, of any shape.
        allowed: See `target_range`.
        is_mask: Whether they are masks of images.

    Raises:
        ValueError: It has such values; the message names them and what to do.
    """
    least, greatest, *ignored = allowed
    if not values.size or least <= values.min() <= values.max() <= greatest:
        return
    if ((values >= least) & (values <= greatest) | np.isin(values, ignored)).all():
        return
    remedy = (
        "Map the values of masks to classes by task.init_args.mask_values, such as {0: 0, 255: 1}; or leave pixels of a"
        " value out by ignore_index of the loss (task.init_args.loss.init_args.ignore_index: 255); or let the model"
        " have an output for each class"
        if is_mask
        else "Correct the column, or let the model have an output for each class"
    )
    raise ValueError(
        f"the {'mask' if is_mask else 'target'} {column!r} has the values {_format_values(values)}; the loss and the"
        f" model's {greatest + 1} classes allow {least} to {greatest}. {remedy}"
    )


def _format_values(values: npt.NDArray) -> str:
    distinct = np.unique(values).tolist()
    return ", ".join(f"{value:g}" for value in distinct[:_MAX_NAMED]) + (
        f", ... ({len(distinct)} values)" if len(distinct) > _MAX_NAMED else ""
    )
