"""What is trained: the height of a wavy surface from the position on it."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ray_app.plan.facts import DataFacts
from ray_app.task.base import Batch, Rows, Task, need_column, uniform


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

    def prepare(self, data: DataFacts) -> Task:
        """Refuses data without the three columns of numbers."""
        for name in self.columns():
            need_column(data, name, ("number",), "surface")
        return self

    def columns(self) -> list[str]:
        """What is read from the Parquet files."""
        return ["x", "y", "height"]

    def targets(self) -> list[str]:
        """Data to predict on may lack the height."""
        return ["height"]

    def decode(self, rows: Rows) -> dict[str, np.ndarray]:
        """Columns to arrays: `position` (rows, 2) and `height` (rows,)."""
        position = np.stack([rows["x"], rows["y"]], axis=1)
        return {"position": position.astype(np.float32), "height": rows["height"].astype(np.float32)}

    def build_model(self) -> nn.Module:
        """A network of two layers."""
        return nn.Sequential(nn.Linear(2, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 1))

    def augment(self, batch: Batch, keys: Tensor) -> Batch:
        """Moves every training position a little."""
        moved = torch.stack([uniform(keys, salt=1), uniform(keys, salt=2)], dim=1) * 2 - 1
        return {**batch, "position": batch["position"] + self.jitter * moved.to(batch["position"])}

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Predicted heights, shape (rows,)."""
        return model(batch["position"]).squeeze(1)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Squared error of every row, shape (rows,)."""
        return (outputs - batch["height"]) ** 2

    def metrics(self) -> Any:
        """What an evaluation measures."""
        import torchmetrics  # three seconds that only an evaluation has to spend

        return torchmetrics.MetricCollection({"error": torchmetrics.MeanAbsoluteError()})

    def update(self, metrics: Any, outputs: Any, batch: Batch) -> None:
        """Adds one batch to the evaluation."""
        metrics.update(outputs, batch["height"])
