"""The greatest numbers of the data: classes and a vocabulary that a model may not have.

What the data has that the first rows to train on do not have: longer rows, and what there is in the rows to evaluate on
alone.

What a task makes of rows to train on, where that is another in every epoch: it must look like what it evaluates on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from torch import nn

from ray_app.data.arrays import ArraySpec, spec_of_values
from ray_app.data.dataset import Dataset
from ray_app.data.probes import find_longest_row
from ray_app.data.reader import POSITION, Reader, table_to_rows
from ray_app.errors import ConfigError, DataError, TaskError
from ray_app.preflight.probe_rows import MAX_NUMBERS, RowProbe, count_numbers, explain_cost
from ray_app.task.base import Rows, Task
from ray_app.task.device import restore_process_state
from ray_app.task.language_model import CausalLanguageModel
from ray_app.task.module import ModuleTask
from ray_app.task.ragged import Arrays, Ragged, repeat_rows
from ray_app.task.user_code import user_code
from ray_app.task.user_loop import LoopTask


def check_value_ranges(
    attempt: RowProbe, rows: Arrays, evaluated: dict[str, list[float]] | None = None, where: str = ""
) -> None:
    """Trains, or evaluates, on rows that have the least and the greatest numbers of the columns, without a step.

    Args:
        attempt: The task and its model; only a model by configuration is tried.
        rows: Decoded rows with which that works; short ones, since it is done several times.
        evaluated: The least and the greatest number of the columns of the data to evaluate on, if it is that: there
            must be metrics of its classes, too. What training has tried already is left out.
        where: What a message begins with.

    Raises:
        ConfigError: There is no class, or no embedding, of such a number.
    """
    task = attempt.task
    if not isinstance(task, ModuleTask) or isinstance(task, LoopTask):  # whose script would begin again for each
        return
    evaluates = evaluated is not None
    ranges = task.ranges if evaluated is None else evaluated
    for some in _extreme_values(task, ranges, rows, evaluates):
        if attempt.works({**rows, **{name: _fill(rows[name], value) for name, value in some.items()}}, evaluates):
            continue
        for name, value in some.items():
            try:
                attempt.on({**rows, name: _fill(rows[name], value)}, evaluates, "the extreme numbers of a column")
            except TaskError as error:
                cause = error.__cause__
                if isinstance(cause, IndexError) or (cause is not None and evaluates and name == task.target):
                    told = _missing_class_message if name == task.target else _missing_embedding_message
                    raise ConfigError(
                        where + told(attempt.state.model, name, ranges[name], value, cause, evaluates)
                    ) from error


def _extreme_values(
    task: ModuleTask, ranges: dict[str, list[float]], rows: Arrays, evaluates: bool
) -> Iterator[dict[str, float]]:
    """What to try at once: all that is greatest, all that is least, and what lists are padded with, which a target's
    loss leaves out.
    """
    names = [name for name in ranges if name in rows]
    for which in (1, 0):
        some = {name: ranges[name][which] for name in names}
        known = {name: task.ranges[name] for name in names if evaluates and name != task.target and name in task.ranges}
        if new := {
            name: value
            for name, value in some.items()
            if name not in known or not known[name][0] <= value <= known[name][1]
        }:
            yield new
    lists = {
        name: values.fill for name in names if isinstance(values := rows[name], Ragged) and name not in task.targets()
    }
    if lists and not evaluates:
        yield lists


def _fill(values: np.ndarray | Ragged, value: float) -> np.ndarray | Ragged:
    if isinstance(values, Ragged):
        return Ragged(np.full_like(values.values, value), values.offsets, values.fill, values.multiple)
    return np.full_like(values, value)


def _missing_class_message(
    model: nn.Module, name: str, known: list[float], value: float, error: BaseException, evaluates: bool
) -> str:
    del model
    missing, who = ("loss or no metric", "the model and the metrics") if evaluates else ("loss", "the model")
    return (
        f"Column {name!r} has values from {known[0]:g} to {known[1]:g}, and with {value:g} there is no {missing}:"
        f" {_error_line(error)}. Let {who} have an output for each class (num_classes, num_labels), or correct the column."
    )


def _missing_embedding_message(
    model: nn.Module, name: str, known: list[float], value: float, error: BaseException, evaluates: bool
) -> str:
    del evaluates
    sizes = sorted({module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)})
    what = f"Column {name!r} has values up to {known[1]:g}" + (
        "" if value in known else f" and is padded with {value:g}"
    )
    return (
        f"{what}, and the model has no embedding for {value:g}: {_error_line(error)}. Its embeddings have"
        f" {', '.join(map(str, sizes)) or 'no'}"
        " rows. Set the model's vocab_size (num_embeddings) to that of the tokenizer, or correct the column or"
        " task.init_args.pad_with."
    )


def _error_line(error: BaseException) -> str:
    """An error in a line; what torchmetrics says of a class takes several."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".")


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RareRows:
    """One data set, the one to train or the one to evaluate on.

    Args:
        name: What it is, for messages.
        task: The task, prepared with the data to train on.
        longest: Its longest row as far as was looked, decoded, each field of shape (1, ...).
        evaluated: The task, prepared with this data, if it is evaluated on.
    """

    name: str
    task: Task
    longest: Arrays | None
    evaluated: Task | None = None

    @classmethod
    def of(
        cls,
        name: str,
        task: Task,
        dataset: Dataset,
        fields: dict[str, ArraySpec],
        evaluated: Task | None = None,
        seen: Arrays | None = None,
    ) -> RareRows:
        """Looks for the longest row of a data set; `seen` is one that may be it."""
        row = None
        if any(spec.padding is not None for spec in fields.values()):
            row = _read_longest(
                Reader(dataset.root, task.columns(), task.decode, fields, partitions=dataset.manifest.partitions),
                dataset,
            )
        if seen is not None and (row is None or count_numbers(row) < count_numbers(seen)):
            row = seen
        return cls(name, task, row, evaluated)

    def refuse(self, attempt: RowProbe, tried: Arrays, known: int) -> int:
        """Trains, or evaluates, on what the rows that were tried do not have, without a step.

        Args:
            attempt: The task and the model.
            tried: Two decoded rows that can be trained and evaluated on.
            known: Numbers in the lists of a row that can be, the longest so far.

        Returns:
            Those of the longest row now. A row that would take too long, or too much memory, is logged and not tried.

        Raises:
            ConfigError: It cannot be done; the model lacks positions, classes or a vocabulary.
            TaskError: It cannot be done, and the task is no model by configuration.
        """
        if (
            isinstance(self.evaluated, CausalLanguageModel)
            and (why := self.evaluated.unknown_tokens(attempt.state.model)) is not None
        ):
            raise ConfigError(f"{self.name}: {why}")
        if isinstance(self.evaluated, ModuleTask):
            check_value_ranges(attempt, tried, self.evaluated.ranges, f"{self.name}: ")
        if self.longest is None or isinstance(self.task, LoopTask):  # whose script would begin again
            return known
        numbers = count_numbers(self.longest)
        if not known < numbers <= MAX_NUMBERS:
            return known
        rows = {name: repeat_rows(self.longest[name]) for name in tried}
        if (cost := explain_cost(attempt, rows)) is not None:
            logger.warning(
                "The longest row of %s (%d numbers) is not tried before the start: it would take %s. Whether the model"
                " knows as many"
                " positions is seen when it is trained or evaluated on.",
                *(self.name, numbers, cost),
            )
            return known
        self._try_longest(attempt, rows, numbers)
        return numbers

    def _try_longest(self, attempt: RowProbe, rows: Arrays, numbers: int) -> None:
        evaluates = self.evaluated is not None
        try:
            attempt.on(rows, evaluates, "the longest row")
        except TaskError as error:
            if isinstance(self.task, ModuleTask) and (why := attempt.too_long(rows, evaluates)) is not None:
                raise ConfigError(f"{self.name}: {why} What was raised: {error}") from error
            raise error.with_context(f"the longest row of {self.name} ({numbers} numbers)") from error


def _read_longest(reader: Reader, dataset: Dataset) -> Arrays | None:
    """The longest row; None if there is none, or it cannot be decoded, which is told where it is read."""
    span = find_longest_row(dataset, reader.columns, MAX_NUMBERS)
    if span is None:
        return None
    try:
        return table_to_rows(pa.concat_tables(reader.read((span,))).drop_columns([POSITION]))
    except DataError:
        return None


_KEYS = np.array([3, 5, 8], np.int64)


def check_training_decode(task: Task, rows: Rows, fields: dict[str, ArraySpec]) -> None:
    """Decodes a row to train on with some keys.

    Args:
        task: The prepared task.
        rows: The row as it was read.
        fields: What `decode` makes of it.

    Raises:
        ConfigError: It cannot be decoded so, or to something else than `decode` makes of it.
    """
    if not task.has_epoch_decode:
        return
    where = " Look at task.init_args.transforms." if getattr(task, "transforms", None) else ""
    for key in _KEYS:
        try:
            with restore_process_state(), user_code(lambda: "decoding a row to train on"):
                decoded = task.decode_training(rows, key[None])
        except TaskError as error:
            raise ConfigError(f"A row to train on cannot be decoded: {error}{where}") from error
        found = {name: spec_of_values(values) for name, values in decoded.items()}
        for name in fields.keys() | found.keys():
            if found.get(name) != fields.get(name):
                raise ConfigError(
                    f"{type(task).__name__} decodes {name!r} of a row to train on to {_describe_spec(found.get(name))}, of one"
                    f" to evaluate on to"
                    f" {_describe_spec(fields.get(name))}; both must be alike, in every epoch."
                    + (
                        " Let task.init_args.transforms and evaluate_transforms give the same size and type."
                        if where
                        else ""
                    )
                )


def _describe_spec(spec: ArraySpec | None) -> str:
    if spec is None:
        return "nothing"
    return f"{np.dtype(spec.dtype).name} of shape {spec.shape if spec.padding is None else ('length', *spec.shape)}"
