"""A task whose model `torch.export` refuses, because what it does depends on its outputs; it was used for the package in safetensors."""

from __future__ import annotations

from torch import Tensor, nn

from ray_app.task.base import Batch
from ray_app.task.image import ImageClassification


class Doubtful(ImageClassification):
    """Turns its scores around if there is nothing that it believes in."""

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        """Class scores, shape (rows, classes)."""
        scores = super().forward(model, batch)
        return scores if scores.max() > 0 else -scores
