"""What the data has that the first rows to train on do not have: longer rows, and what there is in the rows to evaluate on alone."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pyarrow as pa

from ray_app.data.dataset.arrays import ArraySpec
from ray_app.data.dataset.dataset import Dataset
from ray_app.data.read.longest import longest_row
from ray_app.data.read.reader import POSITION, Reader, rows_of
from ray_app.errors import ConfigError, DataError, TaskError
from ray_app.runs.preparing.attempt import MOST_NUMBERS, Attempt, numbers_of
from ray_app.runs.preparing.costs import too_costly
from ray_app.runs.preparing.extremes import refuse_out_of_range
from ray_app.task.base import Task
from ray_app.task.language_model import CausalLanguageModel
from ray_app.task.loop import LoopTask
from ray_app.task.module import ModuleTask
from ray_app.task.rows.ragged import Arrays, twice

logger = logging.getLogger(__name__)


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
    def of(
        cls,
        name: str,
        task: Task,
        dataset: Dataset,
        fields: dict[str, ArraySpec],
        evaluated: Task | None = None,
        seen: Arrays | None = None,
    ) -> Beyond:
        """Looks for the longest row of a data set; `seen` is one that may be it."""
        row = None
        if any(spec.padding is not None for spec in fields.values()):
            row = _decoded(Reader(dataset.root, task.columns(), task.decode, fields, partitions=dataset.manifest.partitions), dataset)
        if seen is not None and (row is None or numbers_of(row) < numbers_of(seen)):
            row = seen
        return cls(name, task, row, evaluated)

    def refuse(self, attempt: Attempt, tried: Arrays, known: int) -> int:
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
        if isinstance(self.evaluated, CausalLanguageModel) and (why := self.evaluated.unknown_tokens(attempt.state.model)) is not None:
            raise ConfigError(f"{self.name}: {why}")
        if isinstance(self.evaluated, ModuleTask):
            refuse_out_of_range(attempt, tried, self.evaluated.ranges, f"{self.name}: ")
        if self.longest is None or isinstance(self.task, LoopTask):  # whose script would begin again
            return known
        numbers = numbers_of(self.longest)
        if not known < numbers <= MOST_NUMBERS:
            return known
        rows = {name: twice(self.longest[name]) for name in tried}
        if (cost := too_costly(attempt, rows)) is not None:
            logger.warning(
                "The longest row of %s (%d numbers) is not tried before the start: it would take %s. Whether the model knows as many"
                " positions is seen when it is trained or evaluated on.",
                *(self.name, numbers, cost),
            )
            return known
        self._try_longest(attempt, rows, numbers)
        return numbers

    def _try_longest(self, attempt: Attempt, rows: Arrays, numbers: int) -> None:
        evaluates = self.evaluated is not None
        try:
            attempt.on(rows, evaluates, "the longest row")
        except TaskError as error:
            if isinstance(self.task, ModuleTask) and (why := attempt.too_long(rows, evaluates)) is not None:
                raise ConfigError(f"{self.name}: {why} What was raised: {error}") from error
            raise error.met(f"the longest row of {self.name} ({numbers} numbers)") from error


def _decoded(reader: Reader, dataset: Dataset) -> Arrays | None:
    """The longest row; None if there is none, or it cannot be decoded, which is told where it is read."""
    span = longest_row(dataset, reader.columns, MOST_NUMBERS)
    if span is None:
        return None
    try:
        return rows_of(pa.concat_tables(reader.read((span,))).drop_columns([POSITION]))
    except DataError:
        return None
