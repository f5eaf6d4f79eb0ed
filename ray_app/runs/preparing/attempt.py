"""Rows that are taken through a task without a step: which ones, and whether it is their length that it fails for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ray_app.errors import TaskError
from ray_app.task.base import Task
from ray_app.task.loop import LoopTask
from ray_app.task.own_code import own_code
from ray_app.task.rows.ragged import Arrays, Ragged, to_batch
from ray_app.task.score.scoring import score
from ray_app.train.state.state import TrainingState

MOST_NUMBERS = 1 << 16
"""Rows of more are not looked for: a trial should not take long."""
SHORT = 8
"""Numbers of a list with which much is tried."""


@dataclass(frozen=True)
class Attempt:
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
        with torch.no_grad(), own_code(lambda: f"{'evaluating' if evaluates else 'training'} on {what}"):
            if evaluates:
                list(score(self.task, model, rows, count, torch.device("cpu")))
                return
            self.state.train()
            fields = self.task.augment(to_batch(rows), torch.arange(count))
            for turn in self.turns:
                if turn is None:
                    self.task.training_loss(model, fields)
                else:
                    self.task.turn_loss(turn, model, fields)

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
        repeated = {**rows, **{name: _repeated(values) for name, values in lists.items()}}
        if self.works(rows, evaluates) or not self.works(cut(rows, 1), evaluates) or self.works(repeated, evaluates):
            return None
        most = max(int(values.lengths.max()) for values in lists.values())
        return (
            f"Rows of {most} numbers in {' or '.join(map(repr, lists))} cannot be {'evaluated' if evaluates else 'trained'} on,"
            " rows of one can. Models know only so many"
            " positions (max_position_embeddings, block_size): make these more, or set task.init_args.max_length to as many."
        )


def longest(rows: Arrays) -> Arrays:
    """The longest of some rows, by itself, each field of shape (1, ...); the first, where all are of one length."""
    total = _numbers(rows)
    return _only(rows, int(np.where(total <= MOST_NUMBERS, total, 0).argmax()))


def shortest(rows: Arrays) -> Arrays:
    """The shortest of some rows that has `SHORT` numbers, by itself, each field of shape (1, ...); the longest, where none has."""
    total = _numbers(rows)
    enough = total >= SHORT
    return _only(rows, int(np.where(enough, total, total.max() + 1).argmin() if enough.any() else total.argmax()))


def _only(rows: Arrays, place: int) -> Arrays:
    return {name: values[place : place + 1] for name, values in rows.items()}


def numbers_of(rows: Arrays) -> int:
    """Numbers in the lists of some rows."""
    return int(_numbers(rows).sum())


def _numbers(rows: Arrays) -> np.ndarray:
    lengths = [values.lengths for values in rows.values() if isinstance(values, Ragged) and not values.row_shape]
    return np.sum(lengths, axis=0) if lengths else np.zeros(1, np.int64)


def cut(rows: Arrays, most: int) -> Arrays:
    """The rows with at most so many of each list."""
    return {name: values.cut(most) if isinstance(values, Ragged) else values for name, values in rows.items()}


def _repeated(values: Ragged) -> Ragged:
    rows = (np.repeat(values.row(i)[:1], length, axis=0) for i, length in enumerate(values.lengths))
    return Ragged.of(rows, values.values.dtype, values.fill, values.multiple, values.row_shape)
