"""What it takes to try a long row, from what short ones take: so that a trial ends, and fits into memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ray_app.errors import TaskError
from ray_app.runs.preparing.attempt import SHORT, Attempt, cut, numbers_of
from ray_app.task.rows.ragged import Arrays, Ragged

MOST_OPERATIONS = 1e12
"""Floating point operations of one attempt: on two cores about half a minute."""
_HELD_AT_ONCE = 4
"""How many tensors as large as the largest there are at a time: scores, as float32, their logarithms, and what reads them."""


def too_costly(attempt: Attempt, rows: Arrays) -> str | None:
    """What it would take to train on rows without a step, in words, if that is more than a trial may; None if not.

    Operations are at least two for each parameter and number, but for embeddings. Where the lists can be cut, what short ones take, of
    three lengths, is continued: operations, and bytes of the largest tensor, grow at most with the square of the length.

    Args:
        attempt: The task, and the model.
        rows: Decoded rows.
    """
    operations, held = float(2 * _parameters(attempt.state.model) * numbers_of(rows)), 0.0
    lists = [values for values in rows.values() if isinstance(values, Ragged)]
    multiple = max(values.multiple for values in lists)
    base, length = (-(-n // multiple) * multiple for n in (SHORT, max(int(values.lengths.max()) for values in lists)))  # as padded
    if operations <= MOST_OPERATIONS and length >= 8 * base:
        lengths = np.array([base, 2 * base, 4 * base])
        try:
            some = [_measured(attempt, cut(rows, int(most))) for most in lengths]
        except TaskError:  # lists of this task have a length for a reason
            some = []
        if some:
            operations = max(operations, _continued(lengths, np.array([[found] for found, _ in some]), length))
            same = len({len(sizes) for _, sizes in some}) == 1
            held = _HELD_AT_ONCE * _continued(lengths, np.array([sizes if same else [max(sizes)] for _, sizes in some]), length)
    free = most_bytes()
    if operations <= MOST_OPERATIONS and held <= free:
        return None
    return (
        f"about {operations:.1e} operations"
        + (f" and {held / 1e9:.1f} GB" if held else "")
        + f"; a trial takes at most {MOST_OPERATIONS:.0e} and {free / 1e9:.1f} GB"
    )


def most_bytes() -> float:
    """Memory that a trial may take: a quarter of what is free."""
    return psutil.virtual_memory().available / 4


def _parameters(model: nn.Module) -> int:
    embedded = {id(p) for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag) for p in module.parameters()}
    return sum(p.numel() for p in model.parameters() if id(p) not in embedded)


def _continued(lengths: np.ndarray, found: np.ndarray, length: int) -> float:
    """The greatest of some quantities, shape (lengths, quantities), at another length."""
    scale = lengths[0]
    c, b, a = np.polyfit(lengths / scale, found, 2)
    return float((a + (length / scale) * (b + (length / scale) * c)).max())


def _measured(attempt: Attempt, rows: Arrays) -> tuple[int, list[int]]:
    with FlopCounterMode(display=False) as flops, _Sizes(attempt.state.model) as made:
        attempt.on(rows, False, "short rows")
    return flops.get_total_flops(), made.sizes or [0]


class _Sizes(TorchDispatchMode):
    """Notes the bytes of what each operation gives, but for a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self._known = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None) -> Any:
        found = function(*args, **(options or {}))
        stored = [each.untyped_storage() for each in tree_leaves(found) if isinstance(each, Tensor) and each.layout is torch.strided]
        self.sizes.append(max((each.nbytes() for each in stored if each.data_ptr() not in self._known), default=0))
        return found
