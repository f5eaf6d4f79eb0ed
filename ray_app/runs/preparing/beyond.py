"""What the data has that the first rows to train on do not have: longer rows, and what there is in the rows to evaluate on alone."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
from torch import nn

from ray_app.data.dataset.arrays import ArraySpec
from ray_app.data.dataset.dataset import Dataset
from ray_app.data.read.longest import longest_row
from ray_app.data.read.reader import POSITION, Reader, rows_of
from ray_app.errors import ConfigError, DataError, TaskError
from ray_app.runs.preparing.extremes import MOST_NUMBERS, numbers_of, refuse_out_of_range, too_long, use_rows
from ray_app.task.base import Task
from ray_app.task.language_model import CausalLanguageModel
from ray_app.task.loop import LoopTask
from ray_app.task.module import ModuleTask
from ray_app.task.rows.ragged import Arrays, twice


@dataclass(frozen=True)
class Beyond:
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
    def of(cls, name: str, task: Task, dataset: Dataset, fields: dict[str, ArraySpec], evaluated: Task | None = None) -> Beyond:
        """Looks for the longest row of a data set."""
        row = None
        if any(spec.padding is not None for spec in fields.values()):
            row = _decoded(Reader(dataset.root, task.columns(), task.decode, fields), dataset)
        return cls(name, task, row, evaluated)

    def refuse(self, model: nn.Module, tried: Arrays) -> None:
        """Trains, or evaluates, on what the rows that were tried do not have, without a step.

        Args:
            model: The model.
            tried: Two decoded rows that can be trained and evaluated on.

        Raises:
            ConfigError: It cannot be done; the model lacks positions, classes or a vocabulary.
            TaskError: It cannot be done, and the task is no model by configuration.
        """
        if isinstance(self.evaluated, CausalLanguageModel) and (why := self.evaluated.unknown_tokens(model)) is not None:
            raise ConfigError(f"{self.name}: {why}")
        if self._is_longer_than(tried) and self.longest is not None:
            rows = {name: twice(self.longest[name]) for name in tried}
            evaluates = self.evaluated is not None
            try:
                use_rows(self.task, model, rows, evaluates, "the longest row")
            except TaskError as error:
                if isinstance(self.task, ModuleTask) and (why := too_long(self.task, model, rows, evaluates)) is not None:
                    raise ConfigError(f"{self.name}: {why} What was raised: {error}") from error
                raise error.met(f"the longest row of {self.name} ({numbers_of(self.longest)} numbers)") from error
        if isinstance(self.task, ModuleTask) and isinstance(self.evaluated, ModuleTask):
            refuse_out_of_range(self.task, model, tried, self.evaluated.ranges, f"{self.name}: ")

    def _is_longer_than(self, tried: Arrays) -> bool:
        """Whether the longest row is longer than each of the two that were tried, and not so long that a trial would take long."""
        if self.longest is None or isinstance(self.task, LoopTask):  # whose script would begin again
            return False
        return numbers_of(tried) < 2 * numbers_of(self.longest) <= 2 * MOST_NUMBERS


def _decoded(reader: Reader, dataset: Dataset) -> Arrays | None:
    """The longest row; None if there is none, or it cannot be decoded, which is told where it is read."""
    span = longest_row(dataset, reader.columns, MOST_NUMBERS)
    if span is None:
        return None
    try:
        return rows_of(pa.concat_tables(reader.read((span,))).drop_columns([POSITION]))
    except DataError:
        return None
