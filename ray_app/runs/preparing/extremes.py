"""The greatest numbers of the data: classes and a vocabulary that a model may not have."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import nn

from ray_app.errors import ConfigError, TaskError
from ray_app.runs.preparing.attempt import Attempt
from ray_app.task.loop import LoopTask
from ray_app.task.module import ModuleTask
from ray_app.task.rows.ragged import Arrays, Ragged


def refuse_out_of_range(attempt: Attempt, rows: Arrays, evaluated: dict[str, list[float]] | None = None, where: str = "") -> None:
    """Trains, or evaluates, on rows that have the least and the greatest numbers of the columns, without a step.

    Args:
        attempt: The task and its model; only a model by configuration is tried.
        rows: Decoded rows with which that works; short ones, since it is done several times.
        evaluated: The least and the greatest number of the columns of the data to evaluate on, if it is that: there must be metrics of its
            classes, too. What training has tried already is left out.
        where: What a message begins with.

    Raises:
        ConfigError: There is no class, or no embedding, of such a number.
    """
    task = attempt.task
    if not isinstance(task, ModuleTask) or isinstance(task, LoopTask):  # whose script would begin again for each
        return
    evaluates = evaluated is not None
    ranges = task.ranges if evaluated is None else evaluated
    for some in _values(task, ranges, rows, evaluates):
        if attempt.works({**rows, **{name: _filled(rows[name], value) for name, value in some.items()}}, evaluates):
            continue
        for name, value in some.items():
            try:
                attempt.on({**rows, name: _filled(rows[name], value)}, evaluates, "the extreme numbers of a column")
            except TaskError as error:
                cause = error.__cause__
                if isinstance(cause, IndexError) or (cause is not None and evaluates and name == task.target):
                    told = _told_class if name == task.target else _told_embedding
                    raise ConfigError(where + told(attempt.state.model, name, ranges[name], value, cause, evaluates)) from error


def _values(task: ModuleTask, ranges: dict[str, list[float]], rows: Arrays, evaluates: bool) -> Iterator[dict[str, float]]:
    """What to try at once: all that is greatest, all that is least, and what lists are padded with, which a target's loss leaves out."""
    names = [name for name in ranges if name in rows]
    for which in (1, 0):
        some = {name: ranges[name][which] for name in names}
        known = {name: task.ranges[name] for name in names if evaluates and name != task.target and name in task.ranges}
        if new := {name: value for name, value in some.items() if name not in known or not known[name][0] <= value <= known[name][1]}:
            yield new
    lists = {name: values.fill for name in names if isinstance(values := rows[name], Ragged) and name not in task.targets()}
    if lists and not evaluates:
        yield lists


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
