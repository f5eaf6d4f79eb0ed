"""A task with secrets as arguments, and an error message that contains them."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ray_app.errors import DataError
from ray_app.task.base import Batch
from ray_app.task.image import ImageClassification

_losses = 0


class SecretTask(ImageClassification):
    """Digits, until a login fails.

    Args:
        api_token: A secret.
        source: A URI with another secret.
        fail_at: The number of the loss that raises; 0: none.
        pixel_max: See `ImageClassification`.
    """

    def __init__(self, api_token: str, source: str, fail_at: int = 0, pixel_max: float = 16.0) -> None:
        super().__init__(pixel_max=pixel_max)
        self.api_token = api_token
        self.source = source
        self.fail_at = fail_at

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the cross-entropy; raises an error with the secrets in its message at the loss `fail_at`."""
        global _losses
        if torch.is_grad_enabled():
            _losses += 1
            if _losses == self.fail_at:
                raise DataError(f"no login at {self.source} with {self.api_token!r} or {os.environ['CANARY_API_KEY']}")
        return super().loss(outputs, batch)
