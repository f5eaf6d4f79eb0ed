"""Models, a loss and a task with arguments without type hints, as users often write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ray_app.task.base import Batch, Task


class NumericColumns(nn.Module):
    """A network of two layers for numeric columns."""

    def __init__(self, width, outputs=1):  # type: ignore[no-untyped-def]
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, width), nn.ReLU(), nn.Linear(width, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x[:, None])


def numbers(width, outputs=1):  # type: ignore[no-untyped-def]
    return NumericColumns(width, outputs)


class ScaledLoss(nn.Module):
    """A scaled squared error."""

    def __init__(self, scale, reduction="none"):  # type: ignore[no-untyped-def]
        super().__init__()
        self.scale = scale

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return self.scale * (outputs - target) ** 2


class MeanSquare(nn.Module):
    """A mean over all rows, without an `__init__` of its own."""

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return ((outputs[:, 0] - target) ** 2).mean()


class WithParts(nn.Module):
    """A loss and one of its parts."""

    def forward(self, outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        values = (outputs[:, 0] - target) ** 2
        return values, values.detach()


class LightningStyle(NumericColumns):
    """A module with the step methods of Lightning."""

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x)[:, 0], y)

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Untyped(Task):
    """A task without type hints."""

    def __init__(self, width):  # type: ignore[no-untyped-def]
        self.width = width

    def columns(self) -> list[str]:
        return ["x", "y"]

    def targets(self) -> list[str]:
        return ["y"]

    def build_model(self) -> nn.Module:
        return NumericColumns(self.width)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return (outputs[:, 0] - batch["y"]) ** 2
