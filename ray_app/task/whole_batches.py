"""Base of tasks with user code that computes means over whole batches: Lightning, loops of scripts, Keras.

`OwnOptimizer` is the optimizer of a configuration where the task makes the optimizer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ray_app.errors import ConfigError
from ray_app.task.annotations import MetricCollection
from ray_app.task.base import Batch
from ray_app.task.losses import Losses
from ray_app.task.metrics import Mode
from ray_app.task.module import ModuleTask
from ray_app.task.transforms import Spec


class Evaluated(NamedTuple):
    """The results of user code for an evaluated batch.

    Args:
        loss: The mean over its rows, shape ().
        logged: Other means over its rows, each of shape ().
        metrics: What the metrics of the task are updated with, by name: the torchmetrics objects that were updated with
            the batch (`LoggedMetric`), or their states.
        weight: The weight of the batch in the mean loss of all batches, shape (), such as its number of tokens; None:
            its number of rows.
    """

    loss: Tensor
    logged: dict[str, Tensor]
    metrics: Mapping[str, Any] = MappingProxyType({})
    weight: Tensor | None = None


class BatchTask(ModuleTask):
    """Reads and decodes as `ModuleTask` does, and evaluates by `eval_outputs` of the derived class.

    Arguments that are not listed are those of `ModuleTask`.

    Args:
        module: The model, or a function that returns one.
        batch: Columns of a batch, as a tuple or by the names in a dictionary; `COLUMN.mask` as in `ModuleTask`.
        target: Column that a prediction lacks; default: a prediction has all columns.
        best_metric: The mean of an evaluation that decides which checkpoint is best.
        best_mode: Whether a lower (`min`) or a higher (`max`) value of it is better; default: `min` for a loss.
    """

    def __init__(
        self,
        module: Spec,
        batch: list[str] | dict[str, str],
        target: str | None = None,
        transforms: list[Spec] | None = None,
        evaluate_transforms: list[Spec] | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        pad_with: float = 0,
        pad_to: int = 1,
        max_length: int | None = None,
        best_metric: str = "loss",
        best_mode: Mode | None = None,
        exif_orientation: bool = True,
    ) -> None:
        columns = list(batch.values() if isinstance(batch, dict) else batch)
        if not columns or (target is not None and target not in columns):
            raise ConfigError(
                f"The columns of a batch are {columns}; name its columns, including the target, {target}."
            )
        inputs: list[str] | dict[str, str] = [v for v in columns if v != target]
        if isinstance(batch, dict):
            inputs = {k: v for k, v in batch.items() if v != target}
        super().__init__(
            module,
            inputs,
            target or columns[0],
            loss={},
            transforms=transforms,
            evaluate_transforms=evaluate_transforms,
            mean=mean,
            std=std,
            pad_with=pad_with,
            pad_to=pad_to,
            max_length=max_length,
            best_metric=best_metric,
            best_mode=best_mode,
            exif_orientation=exif_orientation,
        )
        self.batch = batch

    @abstractmethod
    def eval_outputs(self, model: nn.Module, batch: Batch) -> Evaluated:
        """Computes the results of user code for an evaluated batch, see `Task.eval_outputs`."""

    def loss(self, outputs: Any, batch: Batch) -> Tensor | Losses:
        """Returns the mean loss of an evaluated batch for each row, with an equal share of its weight."""
        if not isinstance(outputs, Evaluated):
            raise ConfigError(
                f"A {type(self).__name__} is evaluated with its model, but a packaged model has only outputs."
            )
        rows = count_rows(batch)
        if outputs.weight is None:
            return outputs.loss.expand(rows)
        share = outputs.weight / rows
        return Losses((outputs.loss * share).expand(rows), share.expand(rows))

    def metrics(self) -> MetricCollection:
        """Makes the metric that combines the logged means and metrics of batches."""
        from torchmetrics import MetricCollection

        from ray_app.task.metric_classes import Logged

        return MetricCollection({"logged": Logged()})

    def update(self, metrics: MetricCollection, outputs: Evaluated, batch: Batch) -> None:
        """Updates the metrics with a batch, see `Task.update`."""
        metrics["logged"].update(outputs.logged, count_rows(batch), outputs.metrics)

    def fields(self, batch: Batch) -> dict[Any, Tensor]:
        """Returns the columns as user code gets them, by their names in its batch or their indices."""
        columns = self.batch.items() if isinstance(self.batch, dict) else enumerate(self.batch)
        return {key: self._input(batch, column) for key, column in columns}


def count_rows(batch: Batch) -> int:
    """Returns the number of rows of a batch."""
    return len(next(iter(batch.values())))


def as_mean(name: str, value: Any) -> Tensor:
    """Returns a mean that user code computed as a tensor of shape (); raises ValueError for several numbers."""
    if not isinstance(value, Tensor | float | int) or torch.as_tensor(value).numel() != 1:
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise ValueError(
            f"{name!r} is a {type(value).__name__}{shape}; return one number, the mean over the rows of this batch, or"
            " a torchmetrics object"
        )
    return torch.as_tensor(value).reshape(())


class OwnOptimizer(Optimizer):
    """Names the optimizer that the task makes, the default then, see `Task.configure_optimizers`."""

    def __init__(self) -> None:
        raise TypeError("OwnOptimizer only stands for what Task.configure_optimizers makes")
