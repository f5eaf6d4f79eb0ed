"""A task with a mistake that a dry run on two rows does not find."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ray_app.task.base import Batch
from ray_app.task.image import ImageClassification


class LateMistake(ImageClassification):
    """Digits; raises KeyError for batches of more than two rows.

    Args:
        method: The method that raises: `loss` or `update`.
        pixel_max: See `ImageClassification`.
    """

    def __init__(self, method: str, pixel_max: float = 16.0) -> None:
        super().__init__(pixel_max=pixel_max)
        self.method = method

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Raises in training if `method` is `loss`."""
        if self.method == "loss" and len(batch["label"]) > 2 and torch.is_grad_enabled():
            batch["labels"]
        return super().loss(outputs, batch)

    def update(self, metrics: Any, outputs: Tensor, batch: Batch) -> None:
        """Raises in evaluations if `method` is `update`."""
        if self.method == "update" and len(batch["label"]) > 2:
            batch["labels"]
        super().update(metrics, outputs, batch)
