"""Tasks whose own code gets whole batches and returns means over them: steps of Lightning modules, loops of scripts.

What a configuration says where the task makes the optimizer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ray_app.errors import ConfigError
from ray_app.task.annotations import MetricCollection
from ray_app.task.base import Batch, Losses
from ray_app.task.metrics import Mode
from ray_app.task.module import ModuleTask
from ray_app.task.transforms import Spec

if TYPE_CHECKING:
    from ray_app.task.metric_classes import LoggedMetric


class Evaluated(NamedTuple):
    """What code of the user's said of an evaluated batch.

    Args:
        loss: The mean over its rows, shape ().
        logged: Other means over its rows, each of shape ().
        metrics: The torchmetrics objects that saw it, which are combined over all rows.
        weight: How much the batch counts in the mean loss of all batches, shape (), such as its number of tokens; not
            given: its rows.
    """

    loss: Tensor
    logged: dict[str, Tensor]
    metrics: Mapping[str, LoggedMetric] = MappingProxyType({})
    weight: Tensor | None = None


class BatchTask(ModuleTask):
    """Reads and decodes as `ModuleTask` does, and evaluates by `eval_outputs` of those who derive from it.

    Args:
        module: The model, or a function that returns one.
        batch: Columns of a batch, as a tuple or by the names in a dictionary; `COLUMN.mask` as in `ModuleTask`.
        target: Column that a prediction lacks; not given: it has all of them.
        transforms: See `ModuleTask`.
        evaluate_transforms: See `ModuleTask`.
        mean: See `ModuleTask`.
        std: See `ModuleTask`.
        pad_with: See `ModuleTask`.
        pad_to: See `ModuleTask`.
        max_length: See `ModuleTask`.
        best_metric: Which mean of an evaluation decides which checkpoint is best.
        best_mode: Whether less (`min`) or more (`max`) of it is better; not given: less, of a loss.
        exif_orientation: See `ModuleTask`.
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
                f"The columns of a batch are {columns}; name those of which it is made, and among them the target,"
                f" {target}."
            )
        inputs = (
            {k: v for k, v in batch.items() if v != target}
            if isinstance(batch, dict)
            else [v for v in batch if v != target]
        )
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
        """See `Task.eval_outputs`."""

    def loss(self, outputs: Any, batch: Batch) -> Tensor | Losses:
        """The mean of an evaluated batch, for each of its rows, with the share of each in the batch's weight if it has
        one.
        """
        if not isinstance(outputs, Evaluated):
            raise ConfigError(
                f"A {type(self).__name__} is evaluated with its model at hand; of a packaged one there are only the"
                " outputs."
            )
        rows = count_rows(batch)
        if outputs.weight is None:
            return outputs.loss.expand(rows)
        share = outputs.weight / rows
        return Losses((outputs.loss * share).expand(rows), share.expand(rows))

    def metrics(self) -> MetricCollection:
        """The means over rows of what was said of batches, and the metrics that saw them."""
        from torchmetrics import MetricCollection

        from ray_app.task.metric_classes import Logged

        return MetricCollection({"logged": Logged()})

    def update(self, metrics: MetricCollection, outputs: Evaluated, batch: Batch) -> None:
        """See `Task.update`."""
        metrics["logged"].update(outputs.logged, count_rows(batch), outputs.metrics)

    def fields(self, batch: Batch) -> dict[Any, Tensor]:
        """The columns as the user's code gets them, by their names in its batch or their places."""
        named = self.batch.items() if isinstance(self.batch, dict) else enumerate(self.batch)
        return {key: self._input(batch, column) for key, column in named}


def count_rows(batch: Batch) -> int:
    """How many rows a batch has."""
    return len(next(iter(batch.values())))


def as_mean(name: str, value: Any) -> Tensor:
    """A mean over a batch that the user's code made, as a tensor of shape ().

    Raises:
        ValueError: It is not one number.
    """
    if not isinstance(value, Tensor | float | int) or torch.as_tensor(value).numel() != 1:
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        raise ValueError(
            f"{name!r} is a {type(value).__name__}{shape}; give one number, the mean over the rows of this batch, or a"
            " torchmetrics object"
        )
    return torch.as_tensor(value).reshape(())


class OwnOptimizer(Optimizer):
    """Stands for the optimizer that the task makes, see `Task.configure_optimizers`; it is chosen by itself where no
    other is configured.
    """

    def __init__(self) -> None:
        raise TypeError("OwnOptimizer only stands for what Task.configure_optimizers makes")
