"""Which values a target may have for a loss of the configuration."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from ray_app.config.class_path import load_class
from ray_app.task.rows.transforms import Spec

_BY_INDEX = (nn.CrossEntropyLoss, nn.NLLLoss)
_IGNORED = -100
"""`ignore_index` of these, where it is not given."""
_OF_TWO = (nn.BCEWithLogitsLoss, nn.BCELoss, nn.MultiLabelSoftMarginLoss)
_MAX_NAMED = 8


def range_of(loss: Spec, outputs: Any, target: Tensor) -> list[int] | None:
    """The least and the greatest value that a loss takes in a target, then the one that it ignores (-100, if none is set).

    Args:
        loss: The loss of the configuration.
        outputs: What of the model's outputs is compared, shape (rows, classes, ...) where these are scores of classes.
        target: What they are compared with, shape (rows, ...).

    Returns:
        None for a loss that takes any value, or of which this is not known.
    """
    kind = load_class(loss["class_path"])
    if not isinstance(kind, type) or not isinstance(outputs, Tensor):
        return None
    if issubclass(kind, _BY_INDEX) and outputs.ndim == target.ndim + 1 and not target.is_floating_point():
        return [0, outputs.shape[1] - 1, int((loss.get("init_args") or {}).get("ignore_index", _IGNORED))]
    return [0, 1, _IGNORED] if issubclass(kind, _OF_TWO) and outputs.shape == target.shape else None


def refuse_values(column: str, values: npt.NDArray, allowed: list[int], is_mask: bool) -> None:
    """Refuses values of a target that the loss does not take.

    Args:
        column: The target.
        values: Its values, of any shape.
        allowed: See `range_of`.
        is_mask: Whether they are masks of images.

    Raises:
        ValueError: It has such values; the message names them and what to do.
    """
    least, greatest, ignored = allowed
    if not values.size or least <= values.min() <= values.max() <= greatest:
        return
    if ((values >= least) & (values <= greatest) | (values == ignored)).all():
        return
    remedy = (
        "Map the values of masks to classes by task.init_args.mask_values, such as {0: 0, 255: 1}; or leave pixels of a value out by"
        " ignore_index of the loss (task.init_args.loss.init_args.ignore_index: 255); or let the model have an output for each class"
        if is_mask
        else "Correct the column, or let the model have an output for each class"
    )
    raise ValueError(
        f"the {'mask' if is_mask else 'target'} {column!r} has the values {_some(values)}; the loss and {_outputs(allowed)} allow {least}"
        f" to {greatest}. {remedy}"
    )


def _outputs(allowed: list[int]) -> str:
    return f"the model's {allowed[1] + 1} classes"


def _some(values: npt.NDArray) -> str:
    found = np.unique(values).tolist()
    return ", ".join(f"{value:g}" for value in found[:_MAX_NAMED]) + (f", ... ({len(found)} values)" if len(found) > _MAX_NAMED else "")
