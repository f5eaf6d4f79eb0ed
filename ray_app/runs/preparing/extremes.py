"""The greatest numbers and the longest rows of the data: classes, vocabulary and positions that a model may not have."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from ray_app.errors import ConfigError, TaskError
from ray_app.task.base import Task
from ray_app.task.loop import LoopTask
from ray_app.task.module import ModuleTask
from ray_app.task.own_code import own_code
from ray_app.task.rows.ragged import Arrays, Ragged, to_batch
from ray_app.task.score.scoring import score

MOST_NUMBERS = 1 << 16
"""Rows of more are not looked for: a trial should not take long."""


def longest(rows: Arrays) -> Arrays:
    """The longest of some rows, by itself, each field of shape (1, ...); the first, where all are of one length."""
    total = _numbers(rows)
    place = int(np.where(total <= MOST_NUMBERS, total, 0).argmax())
    return {name: values[place : place + 1] for name, values in rows.items()}


def numbers_of(rows: Arrays) -> int:
    """Numbers in the lists of some rows."""
    return int(_numbers(rows).sum())


def _numbers(rows: Arrays) -> np.ndarray:
    lengths = [values.lengths for values in rows.values() if isinstance(values, Ragged) and not values.row_shape]
    return np.sum(lengths, axis=0) if lengths else np.zeros(1, np.int64)


def use_rows(task: Task, model: nn.Module, rows: Arrays, evaluates: bool, what: str) -> None:
    """Trains on rows without a step, or evaluates on them.

    Args:
        task: The prepared task.
        model: Its model, in the mode that it is trained in; an evaluation leaves it in its own.
        rows: Decoded rows.
        evaluates: Whether they are evaluated on.
        what: What they are, for messages.

    Raises:
        TaskError: It cannot be done.
    """
    count = len(next(iter(rows.values())))
    with torch.no_grad(), own_code(lambda: f"{'evaluating' if evaluates else 'training'} on {what}"):
        if evaluates:
            list(score(task, model, rows, count, torch.device("cpu")))
        else:
            task.training_loss(model, task.augment(to_batch(rows), torch.arange(count)))


def refuse_out_of_range(
    task: ModuleTask, model: nn.Module, rows: Arrays, evaluated: dict[str, list[float]] | None = None, where: str = ""
) -> None:
    """Trains, or evaluates, on rows that have the least and the greatest numbers of a column, without a step.

    Args:
        task: The prepared task.
        model: Its model.
        rows: Decoded rows with which that works.
        evaluated: The least and the greatest number of the columns of the data to evaluate on, if it is that: there must be metrics of its
            classes, too.
        where: What a message begins with.

    Raises:
        ConfigError: There is no class, or no embedding, of such a number.
    """
    if isinstance(task, LoopTask):  # whose script would begin again for each
        return
    evaluates = evaluated is not None
    ranges = task.ranges if evaluated is None else evaluated
    for name, value in _values(ranges, rows):
        try:
            use_rows(task, model, {**rows, name: _filled(rows[name], value)}, evaluates, "the extreme numbers of a column")
        except TaskError as error:
            cause = error.__cause__
            if isinstance(cause, IndexError) or (cause is not None and evaluates and name == task.target):
                told = _told_class if name == task.target else _told_embedding
                raise ConfigError(where + told(model, name, ranges[name], value, cause, evaluates)) from error


def too_long(task: ModuleTask, model: nn.Module, rows: Arrays, evaluates: bool = False) -> str | None:
    """Whether rows that cannot be trained on could be if they were shorter, in words; None if not.

    Args:
        task: The prepared task.
        model: Its model.
        rows: Decoded rows that cannot be trained on.
        evaluates: Whether they are rows to evaluate on.
    """
    columns = [name for name, values in rows.items() if isinstance(values, Ragged)]
    if not columns or isinstance(task, LoopTask):
        return None
    most = max(int(values.lengths.max()) for values in rows.values() if isinstance(values, Ragged))
    short = {name: values.cut(1) if isinstance(values, Ragged) else values for name, values in rows.items()}
    try:
        use_rows(task, model, short, evaluates, "short rows")
    except Exception:  # it is not the length
        return None
    return (
        f"Rows of {most} numbers in {' or '.join(map(repr, columns))} cannot be {'evaluated' if evaluates else 'trained'} on,"
        " rows of one can. Models know only so many"
        " positions (max_position_embeddings, block_size): make these more, or set task.init_args.max_length to as many."
    )


def _values(ranges: dict[str, list[float]], rows: Arrays) -> Iterator[tuple[str, float]]:
    for name, (least, most) in ranges.items():
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


def _told_class(model: nn.Module, name: str, known: list[float], value: float, error: BaseException, evaluates: bool) -> str:
    del model
    missing, who = ("loss or no metric", "the model and the metrics") if evaluates else ("loss", "the model")
    return (
        f"Column {name!r} has values from {known[0]:g} to {known[1]:g}, and with {value:g} there is no {missing}:"
        f" {_said(error)}. Let {who} have an output for each class (num_classes, num_labels), or correct the column."
    )


def _told_embedding(model: nn.Module, name: str, known: list[float], value: float, error: BaseException, evaluates: bool) -> str:
    del evaluates
    sizes = sorted({module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)})
    what = f"Column {name!r} has values up to {known[1]:g}" + ("" if value in known else f" and is padded with {value:g}")
    return (
        f"{what}, and the model has no embedding for {value:g}: {_said(error)}. Its embeddings have {', '.join(map(str, sizes)) or 'no'}"
        " rows. Set the model's vocab_size (num_embeddings) to that of the tokenizer, or correct the column or task.init_args.pad_with."
    )


def _said(error: BaseException) -> str:
    """An error in a line; what torchmetrics says of a class takes several."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".")
