"""A model that is evaluated before its first step can be trained: after a resume at a checkpoint that nobody has
evaluated yet.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from ray_app.task.base import Losses
from ray_app.task.metrics import combine, score
from ray_app.task.ragged import to_batch
from tests.support.local_world import CLASSES, TinyImages


class Kept(nn.Module):
    """Makes a table at its first forward and keeps it, as models with rotary positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(64, CLASSES), None

    def forward(self, images: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, CLASSES, device=images.device)
        return self.layer(images.flatten(1).float()) * self.table


class Tables(TinyImages):
    def __init__(self) -> None:
        super().__init__()
        self.num_classes, self.classes = CLASSES, [str(i) for i in range(CLASSES)]

    def build_model(self) -> nn.Module:
        return Kept()


def test_what_a_model_keeps_of_an_evaluation_is_good_for_training() -> None:
    task = Tables()
    arrays = {"image": np.zeros((6, 8, 8), np.uint8), "label": np.arange(6) % CLASSES, "id": np.arange(6)}
    model = task.build_model()
    combine(task, list(score(task, model, arrays, 3, torch.device("cpu"))))
    model.train()
    Losses.of(task.training_loss(model, to_batch(arrays))).values.sum().backward()
    assert model.layer.weight.grad is not None


def test_an_evaluation_keeps_no_graph() -> None:
    task, seen = Tables(), list[bool]()
    model = task.build_model()
    model.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.requires_grad))
    arrays = {"image": np.zeros((6, 8, 8), np.uint8), "label": np.arange(6) % CLASSES, "id": np.arange(6)}
    list(score(task, model, arrays, 3, torch.device("cpu")))
    assert set(seen) == {False}
