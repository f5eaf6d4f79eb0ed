"""The interface of a task. A user's own task is a class in their own file, named by `task.class_path`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ray_app.errors import DataError
from ray_app.plan.facts import ColumnFacts, DataFacts
from ray_app.plan.keyed import hash_array, key
from ray_app.task.annotations import MetricCollection

_UNIT_VALUES = 100_000
"""Fewer are not worth an exchange of their own."""

Batch = dict[str, Tensor]
Rows = dict[str, Any]
"""Rows as read: an array per number or array column, a list of `bytes` or `str` per binary or text column."""


@dataclass(frozen=True)
class Mistake:
    """A row that a model predicted wrong.

    Args:
        row: Which one: its place in the batch, later in the data set.
        truth: What it is.
        predicted: What the model said.
        confidence: How sure it was, 0 to 1.
        image: The row's `Task.picture`.
    """

    row: int
    truth: str
    predicted: str
    confidence: float
    image: bytes | None = None


class Task(ABC):
    """What is trained.

    Instances are made from the configuration on the driver and pickled to the readers, the workers and the evaluator, so they hold
    settings, not tensors. Everything random must come from torch's default generators or from the `keys` given to `augment`: then
    the result does not depend on the number of workers.
    """

    best_metric: ClassVar[str] = "loss"
    """Metric that decides which checkpoint is best, unless `evaluate.metric` says otherwise."""
    best_mode: ClassVar[str] = "min"
    """Whether less (`min`) or more (`max`) of `best_metric` is better."""
    classes: list[str] = []  # noqa: RUF012 - replaced, never changed
    """Names of the classes, in the order of their numbers; set by `prepare` of a classification."""

    @classmethod
    def of_settings(cls, settings: dict[str, Any]) -> Self:
        """Makes a prepared task again from what `vars` said of it."""
        task = cls.__new__(cls)
        vars(task).update(settings)
        return task

    @abstractmethod
    def prepare(self, data: DataFacts) -> Task:
        """Checks the data set and completes the settings from it; called on the driver before anything starts.

        Returns:
            A task with nothing left open (such as the number of classes).

        Raises:
            DataError: The data set does not fit; the message says what to do.
        """

    @abstractmethod
    def columns(self) -> list[str]:
        """Columns to read."""

    def targets(self) -> list[str]:
        """Those of `columns` that only the loss and the metrics need; a prediction does not read them, and `decode` gets zeros for them."""
        return []

    @abstractmethod
    def decode(self, rows: Rows) -> dict[str, npt.NDArray]:
        """Turns rows as read into arrays of one fixed shape per name, each (rows, ...); runs on any CPU of the cluster.

        The arrays are used as they are, and must not change afterwards.

        Raises:
            Exception: Any, for rows that cannot be decoded; the reader finds out which row it is and says so.
        """

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Makes the model; torch's generators are seeded before the call."""

    def augment(self, batch: Batch, keys: Tensor) -> Batch:
        """Changes a training batch on the device.

        Args:
            batch: The decoded fields, each (rows, ...).
            keys: One 63-bit integer per row, a hash of (seed, epoch, row), shape (rows,), on the CPU: the only source of randomness to
                use here, so that a row is augmented alike wherever it is processed.
        """
        del keys
        return batch

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        """The parts of a model whose parameters `train.strategy: fsdp` gathers together while they compute; the rest is one more part.

        Each must be called as a module, once or more, wherever its parameters are used. To be replaced where the blocks of a model are not
        in an `nn.Sequential` or `nn.ModuleList`.

        Returns:
            Modules of the model: without a method of its own, what is in its sequences and has 100,000 parameters or more.
        """
        found: list[nn.Module] = []
        for child in model.children():
            if isinstance(child, nn.Sequential | nn.ModuleList):
                found += Task.shard_units(self, child)
            elif sum(p.numel() for p in child.parameters()) >= _UNIT_VALUES:
                found.append(child)
        return found

    @abstractmethod
    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Runs the model on a batch and returns its outputs."""

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """The loss of every row, shape (rows,): not their mean, since the step weights rows over all workers."""

    def training_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of every row of a training batch, shape (rows,); backward of its weighted sum follows.

        To be replaced where training is more than one `forward` and `loss`: several forward passes, penalties on gradients, auxiliary
        losses. It is called once for each logical worker and step, with torch's generators seeded for it, so what it draws from them does
        not depend on the number of workers.
        """
        return self.loss(self.forward(model, batch), batch)

    def apply_gradients(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Moves the parameters by the gradients in their `.grad`, which are those of the global batch, equal on all workers.

        To be replaced where an update is more than `optimizer.step()`: constraints on weights, other rules for some parameters. All
        workers call it in the same state and must end in the same one; with `central_storage` rank 0 alone calls it, and with `local_sgd`
        each replica does, in its own state and with its own gradient.
        """
        del model
        optimizer.step()

    @abstractmethod
    def metrics(self) -> MetricCollection:
        """Makes the metrics of one evaluation; the mean loss is added under the name `loss`."""

    @abstractmethod
    def update(self, metrics: MetricCollection, outputs: Any, batch: Batch) -> None:
        """Adds one evaluated batch to the metrics."""

    def predictions(self, outputs: Any) -> dict[str, npt.NDArray]:
        """What a batch prediction writes for every row.

        Args:
            outputs: From `forward`, on the CPU.

        Returns:
            Numbers or text by column, each (rows, ...); not overridden: the outputs themselves, a single tensor as `predicted`.
        """
        named = outputs if isinstance(outputs, dict) else {"predicted": outputs}
        return {name: values.numpy() for name, values in named.items()}

    def mistakes(self, outputs: Any, batch: Batch, most: int) -> list[Mistake]:
        """The rows of an evaluated batch that were predicted most surely and wrong, for people to look at.

        Args:
            outputs: From `forward`.
            batch: The decoded fields, each (rows, ...).
            most: How many at most.
        """
        del outputs, batch, most
        return []

    def picture(self, batch: Batch, row: int) -> bytes | None:
        """A row of an evaluated batch as PNG, for people to look at; None if it has no picture."""
        del batch, row
        return None


def uniform(keys: Tensor, salt: int) -> Tensor:
    """One uniform number in [0, 1) per key, the same everywhere for the same (key, salt).

    Args:
        keys: 63-bit integers, shape (rows,), on the CPU.
        salt: Which of a row's random numbers; another salt gives an independent one.

    Returns:
        float64, shape (rows,).
    """
    hashed = hash_array(key(salt), keys.numpy())
    return torch.from_numpy((hashed >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def need_column(data: DataFacts, name: str, kinds: tuple[str, ...], use: str) -> ColumnFacts:
    """The facts of a column that a task needs.

    Raises:
        DataError: There is no such column, it has another kind, or missing values.
    """
    facts = data.columns.get(name)
    if facts is None:
        raise DataError(
            f"{data.path} has no column {name!r} for the {use}; its columns are {', '.join(sorted(data.columns))}. Name another"
            " column in task.init_args or ingest the data again."
        )
    if facts.kind not in kinds:
        raise DataError(
            f"Column {name!r} of {data.path} holds {facts.kind} {facts.dtype}".rstrip()
            + f"; the {use} needs {' or '.join(kinds)}. Name another column in task.init_args or convert it."
        )
    if facts.nulls:
        raise DataError(f"Column {name!r} of {data.path} has {facts.nulls} missing values; fill or drop them before training.")
    return facts


def count_classes(data: DataFacts, label: str, wanted: int | None) -> int:
    """The number of classes: as configured, as the ingest recorded it, or the greatest label plus one.

    Raises:
        DataError: A label lies outside the classes, or nothing tells how many there are.
    """
    facts = need_column(data, label, ("integer",), "label")
    known = wanted or (len(data.classes) if data.classes else None)
    if known is None and facts.maximum is None:
        raise DataError(f"{data.path} does not say how many classes column {label!r} has; set task.init_args.num_classes.")
    count = known if known is not None else int(facts.maximum or 0) + 1
    low, high = facts.minimum, facts.maximum
    if (low is not None and low < 0) or (high is not None and high >= count):
        raise DataError(
            f"Column {label!r} of {data.path} has labels from {low:g} to {high:g}; {count} classes allow 0 to {count - 1}. Correct the"
            " labels or set task.init_args.num_classes."
        )
    return count


def class_names(data: DataFacts, count: int) -> list[str]:
    """The names of the classes as the ingest recorded them; a class without one is called by its number."""
    named = list(data.classes or ())
    return named + [str(number) for number in range(len(named), count)]
