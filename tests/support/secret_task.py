"""A task with secrets as arguments, and an error message that contains them."""

from __future__ import annotations

import base64
import os
from io import StringIO
from urllib.parse import quote

import torch
from rich.console import Console
from rich.panel import Panel
from torch import Tensor

from ray_app.errors import DataError
from ray_app.task.base import Batch
from ray_app.task.image import ImageClassification
from tests.support.gated_task import is_in_actor

_losses = 0


def quoted(secret: str) -> str:
    """Returns a text with the secret as errors contain it: plain, in Python, a URL and a header, and in a box."""
    box = StringIO()
    Console(file=box, width=20).print(Panel(f"login by {secret} failed"))
    header = base64.b64encode(f"me:{secret}".encode()).decode()
    return f"{secret}, {secret!r}, //h/{quote(secret, safe='')}, {{'auth': {header!r}}}, {header}\n{box.getvalue()}"


class SecretTask(ImageClassification):
    """Digits, until a login fails.

    Args:
        api_token: A secret.
        source: A URI with another secret.
        fail_at: The number of the loss in an actor that raises; 0: none.
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
            _losses += is_in_actor()
            if _losses == self.fail_at > 0:
                text = f"no login at {self.source} with {self.api_token!r} or {quoted(os.environ['CANARY_API_KEY'])}"
                print(text)
                raise DataError(text)
        return super().loss(outputs, batch)
