"""Checks of rows that the first training row does not represent: value ranges, the longest row, decoding in training.

A model may lack classes, a vocabulary or positions for values and lengths that occur late in the data, or only in the
evaluation data.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pyarrow as pa
from torch import nn

from ray_app.data.arrays import ArraySpec, spec_of_values
from ray_app.data.dataset import Dataset
from ray_app.data.probes import find_longest_row
from ray_app.data.reader import POSITION, Reader, table_to_rows
from ray_app.errors import ConfigError, DataError, TaskError
from ray_app.preflight.context import MAX_NUMBERS, PreflightContext, RowProbe, count_numbers, longest_of
from ray_app.task.environment import restore_process_state
from ray_app.task.language_model import CausalLanguageModel
from ray_app.task.module import ModuleTask
from ray_app.task.ragged import Arrays, Ragged, concat_fields, to_batch
from ray_app.task.user_code import user_code
from ray_app.task.user_loop import LoopTask

logger = logging.getLogger(__name__)
MAX_OPERATIONS = 1e12
"""Largest number of floating-point operations on a long row; on two cores they take about half a minute."""


def check_value_ranges(
    row_probe: RowProbe, rows: Arrays, eval_ranges: dict[str, list[float]] | None = None, prefix: str = ""
) -> None:
    """Trains or evaluates, without a step, on rows with the smallest and the largest numbers of the columns.

    Args:
        row_probe: A `ModuleTask` and its model.
        rows: Decoded rows that the task accepts; short ones, because they are used several times.
        eval_ranges: The smallest and the largest number of each column of the evaluation data, of which those that
            training has covered are left out; None: the ranges of the training data are checked.
        prefix: Beginning of an error message.

    Raises:
        ConfigError: The model has no class, or no embedding, for a number.
    """
    task = row_probe.task
    assert isinstance(task, ModuleTask)
    evaluates = eval_ranges is not None
    all_ranges = task.ranges if eval_ranges is None else eval_ranges
    ranges = {name: one for name, one in all_ranges.items() if name in rows}
    covered = {name: one for name, one in task.ranges.items() if evaluates and name != task.target}
    # What is tried together: the largest numbers, the smallest, and what all lists but targets are padded with.
    groups = [
        {name: one[i] for name, one in ranges.items() if name not in covered or not _is_in(one[i], covered[name])}
        for i in (1, 0)
    ]
    lists = {name: values for name in ranges if isinstance(values := rows[name], Ragged)}
    groups += [{name: values.fill for name, values in lists.items() if not evaluates and name not in task.targets()}]
    for extremes in filter(None, groups):
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


def _is_in(value: float, bounds: list[float]) -> bool:
    return bounds[0] <= value <= bounds[1]


def _fill(values: np.ndarray | Ragged, value: float) -> np.ndarray | Ragged:
    """Returns values of the same shape and lengths that are all `value`."""
    if isinstance(values, Ragged):
        return replace(values, values=np.full_like(values.values, value))
    return np.full_like(values, value)


def _missing_class_message(
    name: str, value_range: list[float], value: float, error: BaseException, evaluates: bool
) -> str:
    """Returns the message for a value of the target for which the model or a metric has no output."""
    missing, owner = ("loss or no metric", "the model and the metrics") if evaluates else ("loss", "the model")
    return (
        f"Column {name!r} has values from {value_range[0]:g} to {value_range[1]:g}, but there is no {missing} for"
        f" {value:g}: {_error_line(error)}. Give {owner} one output per class (num_classes, num_labels), or correct the"
        " column."
    )


def _missing_embedding_message(
    model: nn.Module, name: str, value_range: list[float], value: float, error: BaseException
) -> str:
    """Returns the message for a value of a column for which the model has no embedding."""
    sizes = sorted({module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)})
    padding = "" if value in value_range else f" and is padded with {value:g}"
    return (
        f"Column {name!r} has values up to {value_range[1]:g}{padding}, but the model has no embedding for {value:g}:"
        f" {_error_line(error)}. Its embeddings have {', '.join(map(str, sizes)) or 'no'} rows. Set the model's"
        " vocab_size (num_embeddings) to the tokenizer's, or correct the column or task.init_args.pad_with."
    )


def _error_line(error: BaseException) -> str:
    """Returns an error in one line; torchmetrics' errors about classes have several."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".")


def try_rare_rows(context: PreflightContext) -> None:
    """Trains or evaluates, without a step, on the longest rows and on values that only the evaluation data has.

    A row that would take too much time or memory is logged and not tried.

    Raises:
        ConfigError: The model lacks positions, classes or a vocabulary for the rows.
        TaskError: The task fails, and its model is not one by configuration.
    """
    if isinstance(context.task, CausalLanguageModel):
        batch = to_batch(context.accepted_rows)
        with user_code(lambda: "looking for scores that depend on later tokens"):
            if (why := context.task.describe_leak(context.model, batch)) is not None:
                raise ConfigError(why)
    # The accepted rows are two copies of one row.
    tried_numbers = count_numbers(context.accepted_rows) // 2
    row = _read_longest(context, context.dataset)
    first = longest_of(context.rows)
    if row is None or count_numbers(row) < count_numbers(first):
        row = first
    tried_numbers = _try_longest(context, f"data.path {context.config.data.path}", row, False, tried_numbers)
    if context.eval_dataset is None:
        return
    name, task = context.config.data.evaluation_name, context.eval_task
    if isinstance(task, CausalLanguageModel) and (why := task.describe_unknown_tokens(context.model)) is not None:
        raise ConfigError(f"{name}: {why}")
    # The script of a `LoopTask` would start again for every value.
    if isinstance(task, ModuleTask) and not isinstance(task, LoopTask):
        check_value_ranges(context.row_probe, context.accepted_rows, task.ranges, f"{name}: ")
    if (row := _read_longest(context, context.eval_dataset)) is not None:
        _try_longest(context, name, row, True, tried_numbers)


def _try_longest(context: PreflightContext, name: str, row: Arrays, evaluates: bool, tried_numbers: int) -> int:
    """Trains or evaluates on a row of more than `tried_numbers` numbers; returns the numbers that were tried now."""
    numbers, row_probe = count_numbers(row), context.row_probe
    # The script of a `LoopTask` would start again.
    if isinstance(context.task, LoopTask) or not tried_numbers < numbers <= MAX_NUMBERS:
        return tried_numbers
    rows = {field: concat_fields([row[field], row[field]]) for field in context.accepted_rows}
    # Two operations for each parameter and number of the two copies.
    if (operations := 4.0 * numbers * sum(p.numel() for p in context.model.parameters())) > MAX_OPERATIONS:
        logger.warning(
            "The longest row of %s (%d numbers) is not tried before the start, which would take about %.1e operations."
            " If the model has too few positions for it, training or evaluation fails at this row.",
            *(name, numbers, operations),
        )
        return tried_numbers
    try:
        row_probe.run(rows, evaluates, "the longest row")
    except TaskError as error:
        if isinstance(context.task, ModuleTask) and (why := row_probe.explain_too_long(rows, evaluates)) is not None:
            raise ConfigError(f"{name}: {why} The error was: {error}") from error
        raise error.with_context(f"the longest row of {name} ({numbers} numbers)") from error
    return numbers


def _read_longest(context: PreflightContext, dataset: Dataset) -> Arrays | None:
    """Returns the longest row; None if there is none or it cannot be decoded, which the reader reports later."""
    task, fields = context.task, context.fields
    if all(spec.padding is None for spec in fields.values()):
        return None
    reader = Reader(dataset.root, task.columns(), task.decode, fields, rules=dataset.manifest.rules)
    span = find_longest_row(dataset, reader.columns, MAX_NUMBERS)
    if span is None:
        return None
    try:
        return table_to_rows(pa.concat_tables(reader.read((span,))).drop_columns([POSITION]))
    except DataError:
        return None


_KEYS = np.array([3, 5, 8], np.int64)


def check_training_decode(context: PreflightContext) -> None:
    """Decodes a training row with some keys, for tasks that decode differently in every epoch.

    Raises:
        ConfigError: The row cannot be decoded, or a field has another type or shape than from `decode`.
    """
    task, fields = context.task, context.fields
    where = " Check task.init_args.transforms." if getattr(task, "transforms", None) else ""
    for key in _KEYS:
        try:
            with restore_process_state(), user_code(lambda: "decoding a training row"):
                decoded = task.decode_training(context.undecoded_row, key[None])
        except TaskError as error:
            raise ConfigError(f"A training row cannot be decoded: {error}{where}") from error
        training_fields = {name: spec_of_values(values) for name, values in decoded.items()}
        for name in fields.keys() | training_fields.keys():
            if training_fields.get(name) != fields.get(name):
                raise ConfigError(
                    f"{type(task).__name__} decodes {name!r} of a training row to"
                    f" {_describe_spec(training_fields.get(name))}, but of an evaluation row to"
                    f" {_describe_spec(fields.get(name))}; both must be the same in every epoch."
                    + (
                        " Let task.init_args.transforms and evaluate_transforms return the same size and type."
                        if where
                        else ""
                    )
                )


def _describe_spec(spec: ArraySpec | None) -> str:
    """Returns the type and the shape of a decoded field for a message."""
    if spec is None:
        return "nothing"
    return f"{np.dtype(spec.dtype).name} of shape {spec.shape if spec.padding is None else ('length', *spec.shape)}"
