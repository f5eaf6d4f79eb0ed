"""Tasks and models that a start refuses, for the import paths of configurations."""

import threading
from typing import Any

from torch import Tensor, nn

from ray_app.task.base import Batch, Task
from ray_app.task.module import ModuleTask


class UnpicklableTask(Task):
    """A task that predicts y from x, with an attribute that cannot be pickled."""

    def __init__(self, content: str) -> None:
        parts: dict[str, Any] = {
            "lock": threading.Lock(),
            "generator": (i for i in range(3)),
            "deep": {"locks": [threading.RLock()]},
        }
        self.resource = parts.get(content)

    def columns(self) -> list[str]:
        """See `Task.columns`."""
        return ["x", "y"]

    def targets(self) -> list[str]:
        """See `Task.targets`."""
        return ["y"]

    def build_model(self) -> nn.Module:
        """See `Task.build_model`."""
        return nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 1))

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Squared errors, shape (rows,)."""
        return (outputs[:, 0] - batch["y"]).square()


def normalized(norm: str) -> nn.Module:
    """Returns a model from four features to two classes with this normalization layer."""
    layers: dict[str, list[nn.Module]] = {
        "batch": [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)],
        "frozen": [nn.Linear(4, 6), nn.BatchNorm1d(6).requires_grad_(False), nn.Linear(6, 2)],
        "spatial": [nn.Unflatten(1, (1, 2, 2)), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 2)],
    }
    return nn.Sequential(*layers[norm])


def pixels(classes: int) -> nn.Module:
    """Returns a model that scores the classes of each pixel of images with three channels, with outputs (rows, classes,
    height, width), or (rows, height, width) for one class.
    """
    scores = nn.Conv2d(3, classes, 1)
    return scores if classes > 1 else nn.Sequential(scores, nn.Flatten(1, 2))


def locked_pixels(classes: int) -> nn.Module:
    """Returns the model of `pixels` with a lock, which can be neither copied nor pickled."""
    model = nn.Sequential(pixels(classes))
    model.lock = threading.Lock()
    return model


class HiddenIgnoreIndex(nn.CrossEntropyLoss):
    """A loss that ignores pixels of the value 255 without an argument for it."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(ignore_index=255, reduction=reduction)


class ModuloTargets(nn.CrossEntropyLoss):
    """A loss that accepts all integers as targets."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Returns the losses of the targets modulo the number of classes."""
        return super().forward(input, target % input.shape[1])


class CustomTrainingLoss(ModuleTask):
    """A task with its own training loss, for which the outputs need not fit the target."""

    def training_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean of each image's scores, shape (rows,)."""
        scores: Tensor = self.forward(model, batch)
        return scores.flatten(1).mean(1)
