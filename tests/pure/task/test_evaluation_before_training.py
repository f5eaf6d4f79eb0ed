"""A model can be trained after an evaluation before its first step, as on a resume without a stored evaluation."""

import numpy as np
import torch
from torch import Tensor, nn

from ray_app.task.losses import Losses
from ray_app.task.metrics import combine, score
from ray_app.task.ragged import to_batch
from tests.support.local_world import CLASSES, TinyImages


class CachedTableModel(nn.Module):
    """Caches a table at its first forward pass, as models with rotary position embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(64, CLASSES), None

    def forward(self, images: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, CLASSES, device=images.device)
        return self.layer(images.flatten(1).float()) * self.table


class CachedTableTask(TinyImages):
    def __init__(self) -> None:
        super().__init__()
        self.num_classes, self.classes = CLASSES, [str(i) for i in range(CLASSES)]

    def build_model(self) -> nn.Module:
        return CachedTableModel()


def test_a_tensor_that_a_model_caches_in_an_evaluation_can_be_trained_with() -> None:
    task = CachedTableTask()
    arrays = {"image": np.zeros((6, 8, 8), np.uint8), "label": np.arange(6) % CLASSES, "id": np.arange(6)}
    model = task.build_model()
    combine(task, list(score(task, model, arrays, 3, torch.device("cpu"))))
    model.train()
    Losses.of(task.training_loss(model, to_batch(arrays))).values.sum().backward()
    assert model.layer.weight.grad is not None


def test_an_evaluation_builds_no_autograd_graph() -> None:
    task, requires_grad = CachedTableTask(), list[bool]()
    model = task.build_model()
    model.register_forward_hook(lambda module, inputs, outputs: requires_grad.append(outputs.requires_grad))
    arrays = {"image": np.zeros((6, 8, 8), np.uint8), "label": np.arange(6) % CLASSES, "id": np.arange(6)}
    list(score(task, model, arrays, 3, torch.device("cpu")))
    assert set(requires_grad) == {False}
