"""A loss of the configuration: one of `torch.nn`, or whatever is called with outputs and target, for each row; and what was right."""

from __future__ import annotations

import inspect
import json
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ray_app.config.class_path import load_class
from ray_app.errors import ConfigError
from ray_app.task.losses import Losses
from ray_app.task.rows.transforms import Spec, made

Activation = Literal["sigmoid", "softmax", "none"]
"""What makes probabilities of a model's outputs."""
_OF_CLASSES = ("weight", "pos_weight")
"""Arguments of losses that are tensors, lists in a configuration."""
_OF_LOGITS: dict[Activation, tuple[str, ...]] = {
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
"""Losses of torch and torchvision that take scores, by what makes probabilities of these; softmax does of log-probabilities, too."""
_BETWEEN = {nn.BCEWithLogitsLoss: 0.0, nn.MultiLabelSoftMarginLoss: 0.0, nn.SoftMarginLoss: 0.0, nn.BCELoss: 0.5}
"""Losses of two classes with one output, and the output between the two."""


def loss_of_rows(spec: Spec, outputs: Any, target: Tensor, accuracy: bool = False, there: Tensor | None = None) -> Tensor | Losses:
    """What a loss gives for each row; where that is several values (pixels, several numbers), the mean is over all of them.

    With weights of classes the mean is over these, as `torch.nn.CrossEntropyLoss` has it.

    Args:
        spec: The loss. It is made with `reduction: none`; of a row's several values the mean is over all of them, with `batchmean`
            (`torch.nn.KLDivLoss`) over the rows.
        outputs: What of the model's is compared.
        target: What with; of the outputs' shape it becomes of their type, both of at least 32 bits.
        accuracy: Whether what is right of each row is the metric `accuracy`; it counts as its losses do.
        there: Which values of a target of lists are there; the others are padding, and do not count. Not given: all.

    Raises:
        ConfigError: It compares each of a row's outputs with each of its targets, or makes one value of a padded list; or the accuracy is
            asked for, and these are no classes.
    """
    if there is not None:
        target = target.masked_fill(~there, 0)
    loss = make_loss(json.dumps(spec), str(target.device))
    right = _right(loss, outputs, target) if accuracy else None
    if isinstance(outputs, Tensor) and outputs.shape == target.shape and outputs.is_floating_point():
        outputs, target = _in_full(outputs), target.to(_in_full(outputs).dtype)
    losses = _in_full(loss(outputs, target))
    is_torchs = type(loss).__module__ == "torch.nn.modules.loss"
    if is_torchs and isinstance(outputs, Tensor) and losses.shape == outputs.shape != target.shape:
        raise ConfigError(
            f"The model's outputs are of shape {_rows(outputs)}, the target of {_rows(target)}; {spec['class_path']} compares each with"
            " each of these. Let the model give as many outputs as there are numbers in a row of the target."
        )
    counted = _counted(loss, losses, target)
    if there is not None:
        if losses.shape != target.shape:
            raise ConfigError(
                f"{spec['class_path']} gave values of shape {_rows(losses)} for a target of lists, {_rows(target)}, which are padded:"
                " what is padding would count. Use a loss that gives a value for each number of a list; where classes are the last axis"
                " of the outputs, set task.init_args.classes_last."
            )
        losses, counted = losses.masked_fill(~there, 0), there if counted is None else counted * there
    if right is None and ((counted is None and losses.ndim < 2) or (spec.get("init_args") or {}).get("reduction") == "batchmean"):
        return _of_rows(losses)
    counted = torch.ones_like(losses) if counted is None else counted
    if right is None:
        return Losses(_of_rows(losses), _of_rows(counted))
    right = right.float() if right.ndim <= counted.ndim else right.float().flatten(1).mean(1)  # the loss made one value of a row's
    return Losses(_of_rows(losses), _of_rows(counted), {"accuracy": _of_rows(right * counted)})


def reduction_of(spec: Spec) -> str:
    """The `reduction` of a loss, of which its values for each row are put together.

    Raises:
        ConfigError: It is none that a step can have.
    """
    given = spec.get("init_args") or {}
    reduction = given.get("reduction", "mean")
    known = ["mean", "none", *(["batchmean"] if "KLDiv" in spec["class_path"] or "kl_div" in spec["class_path"] else [])]
    if reduction not in known:
        raise ConfigError(
            f"task.init_args.loss has reduction {reduction!r}; it must be one of {', '.join(known)}. A step's loss is a mean over the"
            " global batch, so that the learning rate does not depend on its rows; with a sum of before, multiply the learning rate by"
            " the rows that were summed."
        )
    if old := sorted(name for name in ("size_average", "reduce") if given.get(name) is not None):
        raise ConfigError(f"task.init_args.loss has {', '.join(old)}, which torch replaces by reduction; leave it out, the mean is taken.")
    return str(reduction)


@lru_cache(64)
def activation_of(spec: str) -> Activation:
    """What makes probabilities of the outputs that a loss compares; `none` for one that takes these, or numbers, or is not known.

    Args:
        spec: The loss, as JSON.
    """
    loss = make_loss(spec, "cpu")
    kinds = [loss.func] if isinstance(loss, partial) else [kind for kind in type(loss).__mro__ if kind is not object]
    names = {kind.__name__ for kind in kinds if kind.__module__.partition(".")[0] in ("torch", "torchvision")}
    return next((activation for activation, losses in _OF_LOGITS.items() if names & set(losses)), "none")


def probabilities(outputs: Any, activation: Activation) -> Any:
    """What metrics of probabilities get: torchmetrics itself would decide by the values of each batch whether they are logits.

    Args:
        outputs: Scores of classes along axis 1, or one of each value.
        activation: What makes probabilities of them.
    """
    if activation == "none" or not isinstance(outputs, Tensor):
        return outputs
    scores = _in_full(outputs)
    return scores.sigmoid() if activation == "sigmoid" else scores.softmax(1) if scores.ndim > 1 else scores


def _in_full(values: Tensor) -> Tensor:
    """Values of half precision in single precision, others as they are: targets and sums are not rounded to what a model computes in."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _of_rows(values: Tensor) -> Tensor:
    """The sum of what a row has, shape (rows,)."""
    return values.flatten(1).sum(1) if values.ndim > 1 else values


def _right(loss: Any, outputs: Any, target: Tensor) -> Tensor:
    """Where the outputs say the target's class, in its shape: by the highest score, of two classes with one score by what the loss parts.

    Raises:
        ConfigError: These are not classes.
    """
    if isinstance(outputs, Tensor):
        if outputs.ndim == target.ndim + 1 and not target.is_floating_point():
            return outputs.argmax(1) == target
        parts = next((value for kind, value in _BETWEEN.items() if isinstance(loss, kind)), None)
        if outputs.shape == target.shape and parts is not None:
            return (outputs > parts) == (target > 0.5)
    raise ConfigError(
        f"task.init_args.train_accuracy is true, and the target, {target.dtype} of shape {_rows(target)}, is not the index of a class for"
        f" which the outputs have a score, nor 0 and 1 for {', '.join(kind.__name__ for kind in _BETWEEN)}. Leave it out."
    )


def _rows(values: Tensor) -> str:
    return f"({', '.join(['rows', *map(str, values.shape[1:])])})"


def _counted(loss: Any, losses: Tensor, target: Tensor) -> Tensor | None:
    """How much each value of a loss that goes by class indices counts, as torch's own mean has it; None: as much as the others."""
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
    """Makes a loss on a device once in a process, with weights that backward can save even if an evaluation asks for it first.

    Args:
        spec: The loss, as JSON.
        device: As `str(torch.device)` gives it.
    """
    given = json.loads(spec)
    init_args = {**(given.get("init_args") or {}), "reduction": "none"}
    tensors = {name: torch.tensor(init_args[name], dtype=torch.float32) for name in _OF_CLASSES if isinstance(init_args.get(name), list)}
    if (called := _function_of(given, init_args)) is not None:
        return partial(called, **(init_args | {name: value.to(device) for name, value in tensors.items()}))
    loss = made({**given, "init_args": init_args | tensors}, "task.init_args.loss")
    return loss.to(device) if isinstance(loss, nn.Module) else loss


def _function_of(spec: Spec, init_args: dict[str, Any]) -> Any:
    """The function that is the loss itself, called with outputs and target (`torchvision.ops.sigmoid_focal_loss`); None: it makes one."""
    try:
        found = load_class(spec["class_path"])
        parameters = inspect.signature(found).parameters.values()
    except (ImportError, AttributeError, TypeError, ValueError):  # `made` says what is wrong
        return None
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    is_loss = inspect.isfunction(found) and len([p for p in needed if p.name not in init_args]) == 2
    return found if is_loss else None
