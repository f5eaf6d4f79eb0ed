"""Checks of rows that the first training row does not represent: value ranges, the longest row, decoding in training.

A model may lack classes, a vocabulary or positions for values and lengths that occur late in the data, or only in the
evaluation data. `check_training_decode` compares rows that a task decodes differently in every epoch with the rows that
it evaluates on.
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

logger = logging.getLogger(__name__)


def check_value_ranges(
    row_probe: RowProbe, rows: Arrays, eval_ranges: dict[str, list[float]] | None = None, prefix: str = ""
) -> None:
    """Trains or evaluates, without a step, on rows with the smallest and the largest numbers of the columns.

    Only models by configuration (`ModuleTask`) are checked.

    Args:
        row_probe: The task and its model.
        rows: Decoded rows that the task accepts; short ones, because they are used several times.
        eval_ranges: The smallest and the largest number of each column of the evaluation data; None: the ranges of the
            training data are checked. An evaluation needs metrics of all classes, too. Values that training has covered
            are left out.
        prefix: Beginning of an error message.

    Raises:
        ConfigError: The model has no class, or no embedding, for a number.
    """
    task = row_probe.task
    # The script of a `LoopTask` would start again for every value.
    if not isinstance(task, ModuleTask) or isinstance(task, LoopTask):
        return
    evaluates = eval_ranges is not None
    ranges = task.ranges if eval_ranges is None else eval_ranges
    for extremes in _extreme_values(task, ranges, rows, evaluates):
        extreme_rows = {**rows, **{name: _fill(rows[name], value) for name, value in extremes.items()}}
        if row_probe.can_run(extreme_rows, evaluates):
            continue
        for name, value in extremes.items():
            try:
                row_probe.run({**rows, name: _fill(rows[name], value)}, evaluates, "the extreme numbers of a column")
            except TaskError as error:
                cause = error.__cause__
                if isinstance(cause, IndexError) or (cause is not None and evaluates and name == task.target):
                    if name == task.target:
                        message = _missing_class_message(name, ranges[name], value, cause, evaluates)
                    else:
                        message = _missing_embedding_message(row_probe.state.model, name, ranges[name], value, cause)
                    raise ConfigError(prefix + message) from error


def _extreme_values(
    task: ModuleTask, ranges: dict[str, list[float]], rows: Arrays, evaluates: bool
) -> Iterator[dict[str, float]]:
    """Yields values by column to check together: all largest numbers, all smallest numbers, and the padding of lists.

    The padding of a target is left out, because the loss ignores it.
    """
    names = [name for name in ranges if name in rows]
    for bound in (1, 0):
        extremes = {name: ranges[name][bound] for name in names}
        covered = {
            name: task.ranges[name] for name in names if evaluates and name != task.target and name in task.ranges
        }
        if uncovered := {
            name: value
            for name, value in extremes.items()
            if name not in covered or not covered[name][0] <= value <= covered[name][1]
        }:
            yield uncovered
    paddings = {
        name: values.fill for name in names if isinstance(values := rows[name], Ragged) and name not in task.targets()
    }
    if paddings and not evaluates:
        yield paddings


def _fill(values: np.ndarray | Ragged, value: float) -> np.ndarray | Ragged:
    """Returns values of the same shape and lengths that are all `value`."""
    if isinstance(values, Ragged):
        return Ragged(np.full_like(values.values, value), values.offsets, values.fill, values.multiple)
    return np.full_like(values, value)


def _missing_class_message(
    name: str, value_range: list[float], value: float, error: BaseException, evaluates: bool
) -> str:
    """Returns the message for a value of the target for which the model or a metric has no output."""
    missing, owner = ("loss or no metric", "the model and the metrics") if evaluates else ("loss", "the model")
    return (
        f"Column {name!r} has values from {value_range[0]:g} to {value_range[1]:g}, and with {value:g} there is no"
        f" {missing}: {_error_line(error)}. Let {owner} have an output for each class (num_classes, num_labels), or"
        " correct the column."
    )


def _missing_embedding_message(
    model: nn.Module, name: str, value_range: list[float], value: float, error: BaseException
) -> str:
    """Returns the message for a value of a column for which the model has no embedding."""
    sizes = sorted({module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)})
    padding = "" if value in value_range else f" and is padded with {value:g}"
    return (
        f"Column {name!r} has values up to {value_range[1]:g}{padding}, and the model has no embedding for {value:g}:"
        f" {_error_line(error)}. Its embeddings have {', '.join(map(str, sizes)) or 'no'} rows. Set the model's"
        " vocab_size (num_embeddings) to that of the tokenizer, or correct the column or task.init_args.pad_with."
    )


def _error_line(error: BaseException) -> str:
    """Returns an error in one line; torchmetrics' errors about classes have several."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".")


@dataclass(frozen=True)
class RareRows:
    """The rows of a data set that its first row does not represent.

    Args:
        name: Name of the data set in messages.
        task: The task, prepared with the training data.
        longest: The longest row among those that were examined, decoded, each field of shape (1, ...).
        eval_task: The task, prepared with this data set, if it is the evaluation data.
    """

    name: str
    task: Task
    longest: Arrays | None
    eval_task: Task | None = None

    @classmethod
    def find(
        cls,
        name: str,
        task: Task,
        dataset: Dataset,
        fields: dict[str, ArraySpec],
        eval_task: Task | None = None,
        candidate: Arrays | None = None,
    ) -> RareRows:
        """Finds the longest row of a data set; `candidate` is a decoded row that may be longer."""
        row = None
        if any(spec.padding is not None for spec in fields.values()):
            row = _read_longest(
                Reader(dataset.root, task.columns(), task.decode, fields, partitions=dataset.manifest.partitions),
                dataset,
            )
        if candidate is not None and (row is None or count_numbers(row) < count_numbers(candidate)):
            row = candidate
        return cls(name, task, row, eval_task)

    def check(self, row_probe: RowProbe, accepted_rows: Arrays, checked_length: int) -> int:
        """Trains or evaluates, without a step, on the value ranges and the longest row of this data set.

        Args:
            row_probe: The task and the model.
            accepted_rows: Two decoded rows that the task accepts.
            checked_length: Numbers in the lists of the longest row that was checked so far.

        Returns:
            The new `checked_length`. A row that would take too much time or memory is logged and not checked.

        Raises:
            ConfigError: The model lacks positions, classes or a vocabulary for the rows.
            TaskError: The task fails, and its model is not one by configuration.
        """
        if (
            isinstance(self.eval_task, CausalLanguageModel)
            and (why := self.eval_task.describe_unknown_tokens(row_probe.state.model)) is not None
        ):
            raise ConfigError(f"{self.name}: {why}")
        if isinstance(self.eval_task, ModuleTask):
            check_value_ranges(row_probe, accepted_rows, self.eval_task.ranges, f"{self.name}: ")
        # The script of a `LoopTask` would start again for the longest row.
        if self.longest is None or isinstance(self.task, LoopTask):
            return checked_length
        numbers = count_numbers(self.longest)
        if not checked_length < numbers <= MAX_NUMBERS:
            return checked_length
        rows = {name: repeat_rows(self.longest[name]) for name in accepted_rows}
        if (cost := explain_cost(row_probe, rows)) is not None:
            logger.warning(
                "The longest row of %s (%d numbers) is not tried before the start: it would take %s. Whether the model"
                " knows as many positions is seen when it is trained or evaluated on.",
                *(self.name, numbers, cost),
            )
            return checked_length
        self._check_longest(row_probe, rows, numbers)
        return numbers

    def _check_longest(self, row_probe: RowProbe, rows: Arrays, numbers: int) -> None:
        evaluates = self.eval_task is not None
        try:
            row_probe.run(rows, evaluates, "the longest row")
        except TaskError as error:
            if isinstance(self.task, ModuleTask) and (why := row_probe.explain_too_long(rows, evaluates)) is not None:
                raise ConfigError(f"{self.name}: {why} What was raised: {error}") from error
            raise error.with_context(f"the longest row of {self.name} ({numbers} numbers)") from error


def _read_longest(reader: Reader, dataset: Dataset) -> Arrays | None:
    """Returns the longest row; None if there is none or it cannot be decoded, which the reader reports later."""
    span = find_longest_row(dataset, reader.columns, MAX_NUMBERS)
    if span is None:
        return None
    try:
        return table_to_rows(pa.concat_tables(reader.read((span,))).drop_columns([POSITION]))
    except DataError:
        return None


_KEYS = np.array([3, 5, 8], np.int64)


def check_training_decode(task: Task, rows: Rows, fields: dict[str, ArraySpec]) -> None:
    """Decodes a training row with some keys, for tasks that decode differently in every epoch.

    Args:
        task: The prepared task.
        rows: The row before decoding.
        fields: Type and shape of the fields that `decode` returns.

    Raises:
        ConfigError: The row cannot be decoded, or a field has another type or shape than from `decode`.
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
        training_fields = {name: spec_of_values(values) for name, values in decoded.items()}
        for name in fields.keys() | training_fields.keys():
            if training_fields.get(name) != fields.get(name):
                raise ConfigError(
                    f"{type(task).__name__} decodes {name!r} of a row to train on to"
                    f" {_describe_spec(training_fields.get(name))}, of one to evaluate on to"
                    f" {_describe_spec(fields.get(name))}; both must be alike, in every epoch."
                    + (
                        " Let task.init_args.transforms and evaluate_transforms give the same size and type."
                        if where
                        else ""
                    )
                )


def _describe_spec(spec: ArraySpec | None) -> str:
    """Returns the type and the shape of a decoded field for a message."""
    if spec is None:
        return "nothing"
    return f"{np.dtype(spec.dtype).name} of shape {spec.shape if spec.padding is None else ('length', *spec.shape)}"
