"""A task that was given a secret, and says it in an error."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ray_app.errors import DataError
from ray_app.task.base import Batch
from ray_app.task.image import ImageClassification

_losses = 0


class SecretTask(ImageClassification):
    """Digits, until it cannot log in.

    Args:
        api_token: A secret.
        source: A URI with another.
        fail_at: Gradient that fails; 0: none.
        pixel_max: See `ImageClassification`.
    """

    def __init__(self, api_token: str, source: str, fail_at: int = 0, pixel_max: float = 16.0) -> None:
        super().__init__(pixel_max=pixel_max)
        self.api_token, self.source, self.fail_at = api_token, source, fail_at

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Cross-entropy; training fails with the secrets in the message."""
        global _losses
        if torch.is_grad_enabled():
            _losses += 1
            if _losses == self.fail_at:
                raise DataError(f"no login at {self.source} with {self.api_token!r} or {os.environ['CANARY_API_KEY']}")
        return super().loss(outputs, batch)
