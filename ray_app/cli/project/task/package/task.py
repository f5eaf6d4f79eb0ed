"""What is trained: the height of a wavy surface from the position on it."""

from typing import Any

import torch
from torch import Tensor, nn

from ray_app.task.base import Batch, Task, uniform


class Surface(Task):
    """Predicts `height` from `x` and `y` with a network of two layers.

    Args:
        hidden: Width of the hidden layer.
        jitter: Training positions are moved at random by at most this much.
    """

    best_metric = "error"
    best_mode = "min"

    def __init__(self, hidden: int = 64, jitter: float = 0.0) -> None:
        self.hidden, self.jitter = hidden, jitter

    def columns(self) -> list[str]:
        """What is read from the Parquet files."""
        return ["x", "y", "height"]

    def targets(self) -> list[str]:
        """Data to predict on may lack the height."""
        return ["height"]

    def build_model(self) -> nn.Module:
        """A network of two layers."""
        return nn.Sequential(nn.Linear(2, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 1))

    def augment(self, batch: Batch, keys: Tensor) -> Batch:
        """Moves every training position a little."""
        moved = {name: self.jitter * (uniform(keys, salt) * 2 - 1) for salt, name in enumerate(["x", "y"])}
        return batch | {name: batch[name] + by.to(batch[name]) for name, by in moved.items()}

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Predicted heights, shape (rows,)."""
        return model(torch.stack([batch["x"], batch["y"]], dim=1)).squeeze(1)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Squared error of every row, shape (rows,)."""
        return (outputs - batch["height"]) ** 2

    def metrics(self) -> Any:
        """What an evaluation measures."""
        import torchmetrics  # three seconds that only an evaluation has to spend

        return torchmetrics.MetricCollection({"error": torchmetrics.MeanAbsoluteError()})
