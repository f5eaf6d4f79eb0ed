"""Tasks that use forbidden sources of random numbers, or state that a replaced worker does not have."""

import os
import random
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ray_app.task.base import Batch
from ray_app.task.image import ImageClassification
from tests.support.small_models import count_calls


class Transform:
    """A transform with its own generators, of NumPy and of Python, as in albumentations."""

    def __init__(self) -> None:
        self.random_generator, self.py_random = np.random.default_rng(), random.Random()

    def __call__(self, image: Tensor) -> Tensor:
        return image * float(self.random_generator.uniform(0.9, 1.1))


class Impure(ImageClassification):
    """Digits, with one kind of impure or failing code.

    Args:
        mistake: The kind of impure code, one of the strings below.
        pixel_max: See `ImageClassification`.
    """

    def __init__(self, mistake: str = "", pixel_max: float = 16.0) -> None:
        super().__init__(pixel_max=pixel_max)
        self.mistake, self.made_in = mistake, os.getpid()
        self.transform = Transform() if mistake == "transform" else None

    def build_model(self) -> nn.Module:
        model = super().build_model()
        if self.mistake == "lock":
            model.lock = threading.Lock()
        return model

    def decode(self, rows: dict[str, Any]) -> dict[str, Any]:
        decoded = super().decode(rows)
        if self.mistake == "decode":
            decoded["image"] = decoded["image"] + np.uint8(random.random() < 0.5)
        if self.mistake == "batch":
            decoded["image"] = decoded["image"] + np.uint8(len(decoded["image"]))
        return decoded

    def augment(self, batch: Batch, keys: Tensor) -> Batch:
        batch = super().augment(batch, keys)
        if self.mistake == "numpy":
            np.random.rand()
        if self.mistake == "unseeded":
            batch["image"] = batch["image"].float() + float(np.random.default_rng().random())
        if self.transform is not None:
            batch["image"] = self.transform(batch["image"].float())
        return batch

    def training_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        losses = super().training_loss(model, batch)
        if self.mistake == "pid":
            losses = losses * (1 + os.getpid() % 1000)
        if self.mistake == "kept":
            losses = losses * count_calls()
        if self.mistake == "mistake" or (self.mistake == "raises" and torch.distributed.is_initialized()):
            raise KeyError("labels")
        if self.mistake == "dies" and os.getpid() != self.made_in:
            os._exit(9)
        return losses
