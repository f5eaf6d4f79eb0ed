"""Which values a target may have for a loss of the configuration."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from ray_app.task.configured.losses import make_loss
from ray_app.task.rows.transforms import Spec

_BY_INDEX = (nn.CrossEntropyLoss, nn.NLLLoss)
_OF_TWO = (nn.BCEWithLogitsLoss, nn.BCELoss, nn.MultiLabelSoftMarginLoss)
_MAX_NAMED = 8


def range_of(spec: Spec, outputs: Any, target: Tensor) -> list[int] | None:
    """The least and the greatest value that a loss takes in a target, and the one that it ignores, if there is one.

    Args:
        spec: The loss of the configuration.
        outputs: What of the model's outputs is compared, shape (rows, classes, ...) where these are scores of classes.
        target: What they are compared with, shape (rows, ...).

    Returns:
        None for a loss that takes any value, or of which this is not known, as it is of a class with a `forward` of its own.
    """
    loss = make_loss(json.dumps(spec), "cpu")
    kind = next((kind for kind in (*_BY_INDEX, *_OF_TWO) if isinstance(loss, kind) and type(loss).forward is kind.forward), None)
    if kind is None or not isinstance(outputs, Tensor):
        return None
    if kind in _BY_INDEX and outputs.ndim == target.ndim + 1 and not target.is_floating_point():
        return [0, outputs.shape[1] - 1, int(loss.ignore_index)]
    return [0, 1] if kind in _OF_TWO and outputs.shape == target.shape else None


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
    least, greatest, *ignored = allowed
    if not values.size or least <= values.min() <= values.max() <= greatest:
        return
    if ((values >= least) & (values <= greatest) | np.isin(values, ignored)).all():
        return
    remedy = (
        "Map the values of masks to classes by task.init_args.mask_values, such as {0: 0, 255: 1}; or leave pixels of a value out by"
        " ignore_index of the loss (task.init_args.loss.init_args.ignore_index: 255); or let the model have an output for each class"
        if is_mask
        else "Correct the column, or let the model have an output for each class"
    )
    raise ValueError(
        f"the {'mask' if is_mask else 'target'} {column!r} has the values {_some(values)}; the loss and the model's {greatest + 1} classes"
        f" allow {least} to {greatest}. {remedy}"
    )


def _some(values: npt.NDArray) -> str:
    distinct = np.unique(values).tolist()
    return ", ".join(f"{value:g}" for value in distinct[:_MAX_NAMED]) + (
        f", ... ({len(distinct)} values)" if len(distinct) > _MAX_NAMED else ""
    )
