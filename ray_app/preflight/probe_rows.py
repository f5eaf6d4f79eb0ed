"""Rows that are taken through a task without a step: which ones, and whether it is their length that it fails for.

What it takes to try a long row, from what short ones take: so that a trial ends, and fits into memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ray_app.errors import TaskError
from ray_app.task.base import Task
from ray_app.task.metrics import score
from ray_app.task.ragged import Arrays, Ragged, to_batch
from ray_app.task.user_code import user_code
from ray_app.task.user_loop import LoopTask
from ray_app.train.state.state import TrainingState

MAX_NUMBERS = 1 << 16
"""Rows of more are not looked for: a trial should not take long."""
SHORT_LENGTH = 8
"""Numbers of a list with which much is tried."""


@dataclass(frozen=True)
class RowProbe:
    """A task and a model before the start.

    Args:
        task: The prepared task.
        state: The model, and whose turns there are.
    """

    task: Task
    state: TrainingState

    @property
    def turns(self) -> list[str | None]:
        """The optimizers that take turns; None for the only one."""
        return [*self.state.turns.optimizers] if self.state.turns is not None else [None]

    def on(self, rows: Arrays, evaluates: bool, what: str) -> None:
        """Trains on rows without a step, or evaluates on them.

        Args:
            rows: Decoded rows.
            evaluates: Whether they are evaluated on.
            what: What they are, for messages.

        Raises:
            TaskError: It cannot be done.
        """
        count, model = len(next(iter(rows.values()))), self.state.model
        with torch.no_grad(), user_code(lambda: f"{'evaluating' if evaluates else 'training'} on {what}"):
            if evaluates:
                list(score(self.task, model, rows, count, torch.device("cpu")))
                return
            self.state.train()
            fields = self.task.augment(to_batch(rows), torch.arange(count))
            for turn in self.turns:
                if turn is None:
                    self.task.training_loss(model, fields)
                else:
                    self.task.loss_for_optimizer(turn, model, fields)

    def works(self, rows: Arrays, evaluates: bool) -> bool:
        """Whether that can be done."""
        try:
            self.on(rows, evaluates, "rows")
        except TaskError:
            return False
        return True

    def too_long(self, rows: Arrays, evaluates: bool) -> str | None:
        """Whether it is the length of rows that they cannot be trained, or evaluated, on for, in words; None if not.

        It is, if the first number of each row can be, alone, but not as often as the row has numbers.
        """
        lists = {name: values for name, values in rows.items() if isinstance(values, Ragged)}
        if not lists or isinstance(self.task, LoopTask):
            return None
        repeated = {**rows, **{name: _repeat_first(values) for name, values in lists.items()}}
        if (
            self.works(rows, evaluates)
            or not self.works(truncate(rows, 1), evaluates)
            or self.works(repeated, evaluates)
        ):
            return None
        most = max(int(values.lengths.max()) for values in lists.values())
        return (
            f"Rows of {most} numbers in {' or '.join(map(repr, lists))} cannot be"
            f" {'evaluated' if evaluates else 'trained'} on,"
            " rows of one can. Models know only so many"
            " positions (max_position_embeddings, block_size): make these more, or set task.init_args.max_length to as"
            " many."
        )


def longest_of(rows: Arrays) -> Arrays:
    """The longest of some rows, by itself, each field of shape (1, ...); the first, where all are of one length."""
    total = _numbers_per_row(rows)
    return _row_at(rows, int(np.where(total <= MAX_NUMBERS, total, 0).argmax()))


def shortest_of(rows: Arrays) -> Arrays:
    """The shortest of some rows that has `SHORT_LENGTH` numbers, by itself, each field of shape (1, ...); the longest, where
    none has.
    """
    total = _numbers_per_row(rows)
    enough = total >= SHORT_LENGTH
    return _row_at(rows, int(np.where(enough, total, total.max() + 1).argmin() if enough.any() else total.argmax()))


def _row_at(rows: Arrays, place: int) -> Arrays:
    return {name: values[place : place + 1] for name, values in rows.items()}


def count_numbers(rows: Arrays) -> int:
    """Numbers in the lists of some rows."""
    return int(_numbers_per_row(rows).sum())


def _numbers_per_row(rows: Arrays) -> np.ndarray:
    lengths = [values.lengths for values in rows.values() if isinstance(values, Ragged) and not values.row_shape]
    return np.sum(lengths, axis=0) if lengths else np.zeros(1, np.int64)


def truncate(rows: Arrays, most: int) -> Arrays:
    """The rows with at most so many of each list."""
    return {name: values.cut(most) if isinstance(values, Ragged) else values for name, values in rows.items()}


def _repeat_first(values: Ragged) -> Ragged:
    rows = (np.repeat(values.row(i)[:1], length, axis=0) for i, length in enumerate(values.lengths))
    return Ragged.of(rows, values.values.dtype, values.fill, values.multiple, values.row_shape)


MAX_OPERATIONS = 1e12
"""Floating point operations of one attempt: on two cores about half a minute."""
_LIVE_TENSORS = 4
"""How many tensors as large as the largest there are at a time: scores, as float32, their logarithms, and what reads
them.
"""


def explain_cost(attempt: RowProbe, rows: Arrays) -> str | None:
    """What it would take to train on rows without a step, in words, if that is more than a trial may; None if not.

    Operations are at least two for each parameter and number, but for embeddings. Where the lists can be cut, what
    short ones take, of three lengths, is continued: operations, and bytes of the largest tensor, grow at most with the
    square of the length.

    Args:
        attempt: The task, and the model.
        rows: Decoded rows.
    """
    operations, held = float(2 * _count_parameters(attempt.state.model) * count_numbers(rows)), 0.0
    lists = [values for values in rows.values() if isinstance(values, Ragged)]
    multiple = max(values.multiple for values in lists)
    base, length = (
        -(-n // multiple) * multiple for n in (SHORT_LENGTH, max(int(values.lengths.max()) for values in lists))
    )  # as padded
    if operations <= MAX_OPERATIONS and length >= 8 * base:
        lengths = np.array([base, 2 * base, 4 * base])
        try:
            some = [_measure_cost(attempt, truncate(rows, int(most))) for most in lengths]
        except TaskError:  # lists of this task have a length for a reason
            some = []
        if some:
            operations = max(operations, _extrapolate(lengths, np.array([[found] for found, _ in some]), length))
            same = len({len(sizes) for _, sizes in some}) == 1
            held = _LIVE_TENSORS * _extrapolate(
                lengths, np.array([sizes if same else [max(sizes)] for _, sizes in some]), length
            )
    free = max_probe_bytes()
    if operations <= MAX_OPERATIONS and held <= free:
        return None
    return (
        f"about {operations:.1e} operations"
        + (f" and {held / 1e9:.1f} GB" if held else "")
        + f"; a trial takes at most {MAX_OPERATIONS:.0e} and {free / 1e9:.1f} GB"
    )


def max_probe_bytes() -> float:
    """Memory that a trial may take: a quarter of what is free."""
    return psutil.virtual_memory().available / 4


def _count_parameters(model: nn.Module) -> int:
    embedded = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for p in module.parameters()
    }
    return sum(p.numel() for p in model.parameters() if id(p) not in embedded)


def _extrapolate(lengths: np.ndarray, found: np.ndarray, length: int) -> float:
    """The greatest of some quantities, shape (lengths, quantities), at another length."""
    scale = lengths[0]
    c, b, a = np.polyfit(lengths / scale, found, 2)
    return float((a + (length / scale) * (b + (length / scale) * c)).max())


def _measure_cost(attempt: RowProbe, rows: Arrays) -> tuple[int, list[int]]:
    with FlopCounterMode(display=False) as flops, _TensorSizes(attempt.state.model) as made:
        attempt.on(rows, False, "short rows")
    return flops.get_total_flops(), made.sizes or [0]


class _TensorSizes(TorchDispatchMode):
    """Notes the bytes of what each operation gives, but for a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self._known = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        found = function(*args, **(options or {}))
        stored = [
            each.untyped_storage()
            for each in tree_leaves(found)
            if isinstance(each, Tensor) and each.layout is torch.strided
        ]
        self.sizes.append(max((each.nbytes() for each in stored if each.data_ptr() not in self._known), default=0))
        return found
