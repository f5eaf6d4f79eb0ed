"""The greatest numbers and the longest rows of the data: classes, vocabulary and positions that a model may not have."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from ray_app.errors import ConfigError, TaskError
from ray_app.task.loop import LoopTask
from ray_app.task.module import ModuleTask
from ray_app.task.own_code import own_code
from ray_app.task.rows.ragged import Arrays, Ragged, to_batch

_MOST_NUMBERS = 1 << 16
"""Rows of more are not looked for: a trial should not take long."""


def longest(rows: Arrays) -> Arrays:
    """The longest of some rows, by itself, each field of shape (1, ...); the first, where all are of one length."""
    lengths = [values.lengths for values in rows.values() if isinstance(values, Ragged) and not values.row_shape]
    total = np.sum(lengths, axis=0) if lengths else np.zeros(1, np.int64)
    place = int(np.where(total <= _MOST_NUMBERS, total, 0).argmax())
    return {name: values[place : place + 1] for name, values in rows.items()}


def refuse_out_of_range(task: ModuleTask, model: nn.Module, rows: Arrays) -> None:
    """Trains on rows that have the least and the greatest numbers of a column, without a step.

    Args:
        task: The prepared task.
        model: Its model.
        rows: Decoded rows that can be trained on.

    Raises:
        ConfigError: There is no class, or no embedding, of such a number.
    """
    if isinstance(task, LoopTask):  # whose script would begin again for each
        return
    for name, value in _values(task, rows):
        changed = {**rows, name: _filled(rows[name], value)}
        try:
            with torch.no_grad(), own_code(lambda: "training on the extreme numbers of a column"):
                task.training_loss(model, to_batch(changed))
        except TaskError as error:
            if isinstance(error.__cause__, IndexError):
                raise ConfigError(_told(task, model, name, value, error.__cause__)) from error


def too_long(task: ModuleTask, model: nn.Module, rows: Arrays) -> str | None:
    """Whether rows that cannot be trained on could be if they were shorter, in words; None if not.

    Args:
        task: The prepared task.
        model: Its model.
        rows: Decoded rows that cannot be trained on.
    """
    columns = [name for name, values in rows.items() if isinstance(values, Ragged)]
    if not columns or isinstance(task, LoopTask):
        return None
    most = max(int(values.lengths.max()) for values in rows.values() if isinstance(values, Ragged))
    short = {name: values.cut(1) if isinstance(values, Ragged) else values for name, values in rows.items()}
    try:
        with torch.no_grad():
            task.training_loss(model, to_batch(short))
    except Exception:  # it is not the length
        return None
    return (
        f"Rows of {most} numbers in {' or '.join(map(repr, columns))} cannot be trained on, rows of one can. Models know only so many"
        " positions (max_position_embeddings, block_size): make these more, or set task.init_args.max_length to as many."
    )


def _values(task: ModuleTask, rows: Arrays) -> Iterator[tuple[str, float]]:
    for name, (least, most) in task.ranges.items():
        if name in rows:
            values = rows[name]
            yield name, most
            yield name, least
            if isinstance(values, Ragged):
                yield name, values.fill


def _filled(values: np.ndarray | Ragged, value: float) -> np.ndarray | Ragged:
    if isinstance(values, Ragged):
        return Ragged(np.full_like(values.values, value), values.offsets, values.fill, values.multiple)
    return np.full_like(values, value)


def _told(task: ModuleTask, model: nn.Module, name: str, value: float, error: BaseException) -> str:
    said = f"{type(error).__name__}: {error}".rstrip(".")
    if name == task.target:
        return (
            f"Column {name!r} has values from {task.ranges[name][0]:g} to {task.ranges[name][1]:g}, and with {value:g} there is no loss:"
            f" {said}. Let the model have an output for each class (num_classes, num_labels), or correct the column."
        )
    known = sorted({module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)})
    what = f"Column {name!r} has values up to {task.ranges[name][1]:g}" + (
        "" if value in task.ranges[name] else f" and is padded with {value:g}"
    )
    return (
        f"{what}, and the model has no embedding for {value:g}: {said}. Its embeddings have {', '.join(map(str, known)) or 'no'} rows. Set"
        " the model's vocab_size (num_embeddings) to that of the tokenizer, or correct the column or task.init_args.pad_with."
    )
