"""The interface of a task. A user's own task is a class in their own file, named by `task.class_path`.

What a task says of the rows of a batch: their losses, how much each counts, and what else is recorded of them.

Rows to predict on, which need no targets.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ray_app.errors import ConfigError
from ray_app.plan.manifest import DataFacts
from ray_app.task.annotations import MetricCollection
from ray_app.task.fields import Mistake, class_names, count_classes, need_column, need_finite, to_model_types
from ray_app.task.ragged import LENGTHS, Arrays
from ray_app.task.transforms import uniform

if TYPE_CHECKING:
    from ray_app.config.config import Config

STEP_METRICS = frozenset(
    {"loss", "lr", "grad_norm", "step_ms", "data_wait_ms", "rows_per_s", "workers", "restarts", "imbalance"}
)
"""What is recorded of every step; a metric of a task's own has another name."""
_MAX_SEPARATE_READS = 16
"""So many tensors of the host are read one by one in less time than at once."""
_NAME = re.compile(r"(?!eval_)[A-Za-z0-9_][A-Za-z0-9_. -]{0,99}")


@dataclass(frozen=True)
class Losses:
    """Losses of a batch whose mean is not one over rows, or with which more is recorded.

    The loss of a step, or of an evaluation, is the sum of `values` over the sum of `weights`, both over all rows of the
    global batch, and so is its gradient. In a language model the values of a row are the sum over its tokens, its
    weight is their number.

    Args:
        values: The sum of the losses of each row's parts, shape (rows,).
        weights: How much each row counts, 0 or more, shape (rows,); not given: 1 each.
        metrics: What else is recorded of every training step, by name, as sums over each row's parts like `values`,
            shape (rows,); the mean is over the same weights.
    """

    values: Tensor
    weights: Tensor | None = None
    metrics: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Tensor | Losses) -> Losses:
        """What `Task.loss` or `Task.training_loss` returned."""
        return found if isinstance(found, Losses) else cls(found)

    def float(self) -> Losses:
        """With values in full precision, which their backward begins with."""
        return self if self.values.dtype == torch.float32 else replace(self, values=self.values.float())


class LossSums(NamedTuple):
    """What rows add to the means of a step or an evaluation.

    Args:
        loss: The sum of their losses.
        weight: The sum of their weights.
        metrics: The sum of each of their metrics.
    """

    loss: float
    weight: float
    metrics: dict[str, float]


ZERO_SUMS = LossSums(0.0, 0.0, {})
"""What no rows add."""


def check_losses(task: object, found: Tensor | Losses, rows: int) -> Losses:
    """What `Task.loss` or `Task.training_loss` returned for so many rows.

    Raises:
        ConfigError: It is not one value for each row, or a metric has a name that cannot be recorded.
    """
    losses = Losses.of(found)
    given = (
        {"": losses.values} | ({"weights": losses.weights} if losses.weights is not None else {}) | dict(losses.metrics)
    )
    for name, value in given.items():
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if shape != (rows,):
            raise ConfigError(
                f"{type(task).__name__}.loss returned {name and f'{name!r} of '}shape {shape} for {rows} rows; it must"
                " return one value per row, shape (rows,). Use reduction='none' in the loss function."
            )
    for name in losses.metrics:
        if name in STEP_METRICS or not _NAME.fullmatch(name):
            raise ConfigError(
                f"{type(task).__name__}.loss returned a metric {name!r}; use letters, digits, '_', '.', '-' and spaces,"
                f" nothing that begins with eval_, and none of {', '.join(sorted(STEP_METRICS))}, which every step has."
            )
    return losses


class DeviceSums(NamedTuple):
    """Sums over rows that are still where they were computed.

    Args:
        values: That of the losses and, with weights or metrics, those of the weights and of each metric; shape (1,) or
            (2 + metrics,).
        rows: How many.
        metrics: Their names; None without weights and metrics.
    """

    values: Tensor
    rows: int
    metrics: tuple[str, ...] | None


def sum_on_device(losses: Losses) -> DeviceSums:
    """The sums over rows; does not wait for the device."""
    values = losses.values.detach()
    if losses.weights is None and not losses.metrics:
        return DeviceSums(values.sum(), len(values), None)
    weights = losses.weights.detach() if losses.weights is not None else torch.ones_like(values)
    more = [each.detach().sum(dtype=torch.float64) for each in (weights, *losses.metrics.values())]
    return DeviceSums(torch.stack([values.sum().double(), *more]), len(values), tuple(losses.metrics))


def read_sums(
    task: object, found: Sequence[DeviceSums | None], also: Sequence[Tensor] = ()
) -> tuple[list[LossSums], list[float]]:
    """What sums are, `ZERO_SUMS` for None, and other numbers; waits for the device once.

    Args:
        task: Whose they are.
        found: The sums.
        also: The numbers, each of shape () or (n,).

    Raises:
        ConfigError: Weights are negative, infinite or NaN.
    """
    numbers = _read_values([*[each.values for each in found if each is not None], *also])
    told, at = [], 0
    for each in found:
        if each is None:
            told.append(ZERO_SUMS)
        elif each.metrics is None:
            told.append(LossSums(numbers[at], float(each.rows), {}))
            at += 1
        else:
            loss, weight, *metrics = numbers[at : at + 2 + len(each.metrics)]
            if not 0 <= weight < math.inf:
                raise ConfigError(
                    f"{type(task).__name__}.loss returned weights whose sum over {each.rows} rows is {weight}; each"
                    " must be a number of at least 0, such as how many tokens a row has."
                )
            told.append(LossSums(loss, weight, dict(zip(each.metrics, metrics, strict=True))))
            at += 2 + len(metrics)
    return told, numbers[at:]


def _read_values(held: list[Tensor]) -> list[float]:
    """All their values, read at once from a device."""
    if len(held) <= (_MAX_SEPARATE_READS if _are_on_cpu(held) else 1):
        return [value for each in held for value in (each.tolist() if each.ndim else (each.item(),))]
    return (torch.stack if {each.ndim for each in held} == {0} else torch.hstack)(held).tolist()


def _are_on_cpu(held: list[Tensor]) -> bool:
    return not held or held[0].is_cpu


def sum_losses(task: object, losses: Losses) -> LossSums:
    """The sums over rows; see `read`."""
    return read_sums(task, [sum_on_device(losses)])[0][0]


__all__ = ["Batch", "Mistake", "Rows", "Task", "class_names", "count_classes", "need_column", "uniform"]

_NUMERIC_KINDS = ("number", "integer", "array", "list")
_MIN_UNIT_VALUES = 100_000
"""Fewer are not worth an exchange of their own."""

Batch = dict[str, Tensor]
Rows = dict[str, Any]
"""Rows as read: arrays of numbers or arrays, `Ragged` lists of numbers, lists of `bytes` or `str`, by column."""


class Task(ABC):
    """What is trained.

    Instances are made from the configuration on the driver and pickled to the readers, the workers and the evaluator,
    so they hold settings, not tensors. Everything random must come from torch's default generators or from the `keys`
    given to `augment`: then the result does not depend on the number of workers. `columns`, `build_model` and `loss`
    are what a task must have.
    """

    best_metric: ClassVar[str] = "loss"
    """Metric that decides which checkpoint is best, unless `evaluate.metric` says otherwise."""
    best_mode: ClassVar[str] = "min"
    """Whether less (`min`) or more (`max`) of `best_metric` is better."""
    classes: list[str] = []  # noqa: RUF012 - replaced, never changed
    """Names of the classes, in the order of their numbers; set by `prepare` of a classification."""
    data_schema: dict[str, Any] = {}  # noqa: RUF012 - replaced, never changed
    """Columns and classes of the data that the task was prepared with, see `ray_app.task.schema`; set after `prepare`.
    """

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """Makes a prepared task again from what `vars` said of it."""
        task = cls.__new__(cls)
        vars(task).update(settings)
        return task

    def prepare(self, data: DataFacts) -> Task:
        """Checks the data set and completes the settings from it; called on the driver before anything starts.

        Returns:
            A task with nothing left open (such as the number of classes); not overridden: this one.

        Raises:
            DataError: The data set does not fit; the message says what to do. Not overridden: a column is not there or
                has missing values, or holds what `decode`, not overridden either, does not know.
        """
        if type(self).decode is Task.decode:
            for name in self.columns():
                need_column(data, name, _NUMERIC_KINDS, f"task {type(self).__name__}, which leaves `decode` out,")
        return self

    def validate_config(self, config: Config) -> list[str]:
        """Returns what of a configuration the task cannot be trained with, a sentence for each problem that says what
        to do.

        Not overridden: no problems. Called on the driver, before anything starts.
        """
        del config
        return []

    @abstractmethod
    def columns(self) -> list[str]:
        """Columns to read."""

    def targets(self) -> list[str]:
        """Those of `columns` that only the loss and the metrics need; a prediction does not read them, and `decode`
        gets zeros for them.
        """
        return []

    def decode(self, rows: Rows) -> Arrays:
        """Turns rows as read into an array of one fixed shape for each name, (rows, ...), or into a `Ragged`, on any
        CPU of the cluster.

        Not overridden: the columns by their names; fractions as float32, integers as int64, lists of these as `Ragged`,
        arrays of integers as they are; a value that is NaN or infinite as float32 is refused.

        The arrays are used as they are, and must not change afterwards. A ragged field `x` is in a batch as `x`, padded
        to the longest of its rows, and `x_lengths`.

        Raises:
            Exception: Any, for rows that cannot be decoded; the reader finds out which row it is and says so.
        """
        fields = {name: to_model_types(rows[name]) for name in self.columns()}
        for name, values in fields.items():
            need_finite(f"column {name!r}", values)
        return fields

    def decode_training(self, rows: Rows, keys: npt.NDArray[np.int64]) -> Arrays:
        """Turns rows to train on into arrays like those of `decode`, another way in every epoch: random crops,
        augmentations.

        To be replaced where the random part of a row is made in the readers and not in `augment`, on the device;
        without a cache of decoded rows (`data.cache`).

        Args:
            rows: As in `decode`.
            keys: A 63-bit integer for each row, a hash of (seed, epoch, row): the only source of randomness to use
                here, see `ray_app.task.transforms.drawing`.
        """
        del keys
        return self.decode(rows)

    @property
    def has_epoch_decode(self) -> bool:
        """Whether `decode_training` is to be called for rows to train on: it is not that of `Task`."""
        return type(self).decode_training is not Task.decode_training

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Makes the model; torch's generators are seeded before the call."""

    def augment(self, batch: Batch, keys: Tensor) -> Batch:
        """Changes a training batch on the device.

        Args:
            batch: The decoded fields, each (rows, ...).
            keys: One 63-bit integer per row, a hash of (seed, epoch, row), shape (rows,), on the CPU: the only source
                of randomness to use here, so that a row is augmented alike wherever it is processed.
        """
        del keys
        return batch

    def shard_units(self, model: nn.Module) -> list[nn.Module]:
        """The parts of a model whose parameters `train.strategy: fsdp` gathers together while they compute; the rest is
        one more part.

        Each must be called as a module, once or more, wherever its parameters are used. To be replaced where the blocks
        of a model are not in an `nn.Sequential` or `nn.ModuleList`.

        Returns:
            Modules of the model: without a method of its own, what is in its sequences and has 100,000 parameters or
            more.
        """
        found: list[nn.Module] = []
        for child in model.children():
            if isinstance(child, nn.Sequential | nn.ModuleList):
                found += Task.shard_units(self, child)
            elif sum(p.numel() for p in child.parameters()) >= _MIN_UNIT_VALUES:
                found.append(child)
        return found

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Runs the model on a batch and returns its outputs.

        Not overridden: the model is called with the fields of `columns` that are not `targets`, in that order, a ragged
        one followed by its lengths.

        Raises:
            ConfigError: `decode` makes fields of other names.
        """
        names = [name for name in self.columns() if name not in self.targets()]
        if absent := [name for name in names if name not in batch]:
            raise ConfigError(
                f"{type(self).__name__} leaves `forward` out, so its model is called with its columns"
                f" {', '.join(names)}; decoded fields are {', '.join(batch)}, without {', '.join(absent)}. Write"
                " `forward`, or let `decode` name its fields as the columns."
            )
        return model(*(batch[field] for name in names for field in (name, name + LENGTHS) if field in batch))

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> Tensor | Losses:
        """The loss of every row, shape (rows,): not their mean, which the step makes over all workers.

        Where the mean is not one over rows, but over tokens or boxes, or where more is to be recorded of the training,
        return `Losses`.
        """

    def training_loss(self, model: nn.Module, batch: Batch) -> Tensor | Losses:
        """What `loss` returns, of a training batch; backward of its sum follows.

        To be replaced where training is more than one `forward` and `loss`: several forward passes, penalties on
        gradients, auxiliary losses. It is called once for each logical worker and step, with torch's generators seeded
        for it, so what it draws from them does not depend on the number of workers.
        """
        return self.loss(self.forward(model, batch), batch)

    def loss_for_optimizer(self, turn: str, model: nn.Module, batch: Batch) -> Tensor | Losses:
        """What `training_loss` returns, where several optimizers take turns (`optimizers`).

        Args:
            turn: The name of the optimizer whose turn it is; only its parameters get gradients.
            model: The model.
            batch: The training batch.
        """
        del turn
        return self.training_loss(model, batch)

    def apply_gradients(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Moves the parameters by the gradients in their `.grad`, which are those of the global batch, equal on all
        workers.

        To be replaced where an update is more than `optimizer.step()`: constraints on weights, other rules for some
        parameters. All workers call it in the same state and must end in the same one; with `central_storage` rank 0
        alone calls it, and with `local_sgd` each replica does, in its own state and with its own gradient.
        """
        del model
        optimizer.step()

    @property
    def has_own_optimizer(self) -> bool:
        """Whether the task makes an optimizer where the configuration has none: it overrides `configure_optimizers`."""
        return type(self).configure_optimizers is not Task.configure_optimizers

    def configure_optimizers(self, model: nn.Module) -> tuple[Optimizer, LRScheduler | None]:
        """Makes the optimizer, and a schedule that is stepped after every step or None; called where the configuration
        has no optimizer.

        Raises:
            ConfigError: The task does not override it, and `optimizer` names `OwnOptimizer` all the same.
        """
        raise ConfigError(
            f"{type(self).__name__} makes no optimizer for a {type(model).__name__}; name another than this in"
            " `optimizer`."
        )

    def eval_outputs(self, model: nn.Module, batch: Batch) -> Any:
        """Computes the outputs of an evaluated batch, which `loss` and `update` get.

        Not overridden: those of `forward`. To be replaced where `loss` or `update` need more than a prediction does.
        """
        return self.forward(model, batch)

    def finish(self, model: nn.Module) -> None:
        """Called where a model was trained, when that is over: frees what the task holds of it in this process."""
        del model

    def metrics(self) -> MetricCollection:
        """Makes the metrics of one evaluation; the mean loss is added under the name `loss`. Not overridden: none but
        that.
        """
        from torchmetrics import MetricCollection

        return MetricCollection({})

    def update(self, metrics: MetricCollection, outputs: Any, batch: Batch) -> None:
        """Adds one evaluated batch to the metrics; not overridden: they compare the outputs with the only one of
        `targets`.

        Raises:
            ConfigError: There are metrics and several targets, or none.
        """
        targets = self.targets()
        if len(metrics) and len(targets) != 1:
            raise ConfigError(
                f"{type(self).__name__} has metrics and leaves `update` out, which then compares the outputs with the"
                f" only target; its `targets` are {', '.join(targets) or 'none'}. Write `update`."
            )
        if len(metrics):
            metrics.update(outputs, batch[targets[0]])

    def predictions(self, outputs: Any, batch: Batch) -> Arrays:
        """Returns the columns that a batch prediction writes for every row: numbers or text, each (rows, ...), or
        `Ragged`, which become lists.

        Not overridden: the outputs themselves, a single tensor as `predicted`.

        Args:
            outputs: From `forward`, on the CPU.
            batch: The decoded fields that they were computed from, on the device of the model, such as the lengths of
                lists.
        """
        del batch
        named = outputs if isinstance(outputs, dict) else {"predicted": outputs}
        return {name: values.numpy() for name, values in named.items()}

    def export_files(self, model: nn.Module, folder: Path) -> None:
        """Writes more into the folder of an export: what programs without ray_app load the model from; not overridden:
        nothing.

        Args:
            model: The trained model, on the CPU, in evaluation mode; to be left as it is.
            folder: Of the export; `export.json` and the folders `code` and `data` are there already.
        """
        del model, folder

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


@dataclass(frozen=True)
class WithoutTargets:
    """Decodes rows whose targets were not read: zeros stand in for them.

    Args:
        task: The prepared task.
    """

    task: Task

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        return [name for name in self.task.columns() if name not in self.task.targets()]

    def __call__(self, rows: Rows) -> Arrays:
        """See `Task.decode`."""
        count = len(next(iter(rows.values())))
        targets = [name for name in self.task.columns() if name in self.task.targets()]
        return self.task.decode(rows | {name: np.zeros(count, np.int64) for name in targets})
