"""A task that prints in training and in evaluations."""

from typing import Any

from torch import Tensor

from ray_app.task.base import Batch
from ray_app.task.image import ImageClassification


class PrintingTask(ImageClassification):
    """Digits; prints the number of rows of each batch."""

    def training_loss(self, model: Any, batch: Batch) -> Tensor:
        print("rows to train on:", len(batch["label"]))
        return super().training_loss(model, batch)

    def update(self, metrics: Any, outputs: Tensor, batch: Batch) -> None:
        print("rows to evaluate:", len(batch["label"]))
        super().update(metrics, outputs, batch)
