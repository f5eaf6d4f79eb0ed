"""Losses, transforms and models as users write them, with parameters, buffers, generators and counters."""

from __future__ import annotations

import itertools
import random

import numpy as np
import torch
from torch import Tensor, nn

from ray_app.task.base import Batch, Task
from ray_app.task.user_loop import Loop

SHARED = np.random.default_rng(0)
COUNTS: dict[str, int] = {"calls": 0}
num_calls = 0


class LearnedVariance(nn.Module):
    """The negative logarithm of a Gaussian density; its variance is learned, and a buffer follows the errors."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction
        self.log_variance = nn.Parameter(torch.randn(1))
        self.register_buffer("mean_error", torch.zeros(1))

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        squares = (outputs - target) ** 2
        if self.training:
            self.mean_error.mul_(0.9).add_(0.1 * squares.detach().mean())
        losses = squares * torch.exp(-self.log_variance) + self.log_variance
        return losses if self.reduction == "none" else losses.mean()


def linear_chain() -> nn.Sequential:
    """Makes a model of parts that are called one after the other."""
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


class Odd:
    """Keeps something from one call for the next, in one of several ways, or only seems to.

    Args:
        how: The way, see `disturb`.
    """

    calls_of_class = 0

    def __init__(self, how: str) -> None:
        self.how, self.calls = how, 0
        self.numbers = itertools.count()
        self.rows = list[int]()
        self.rng, self.draws = np.random.default_rng(0), random.Random(0)
        self.noise = torch.Generator()
        self.center, self.cache = torch.zeros(1), dict[str, Tensor]()
        self.outside = nn.Linear(1, 1)
        self.first: Tensor | None = None

    def disturb(self, value: Tensor, rows: list[int] = []) -> Tensor:  # noqa: B006
        """Returns a value, changed by what is kept."""
        global num_calls
        if self.how == "default argument":
            rows.append(1)
        if self.how == "class counter":
            Odd.calls_of_class += 1
        if self.how == "global number":
            num_calls += 1
        if self.how == "count":
            next(self.numbers)
        if self.how == "counter":
            self.calls += 1
        if self.how == "global counter":
            COUNTS["calls"] += 1
        if self.how == "list":
            self.rows.append(1)
        if self.how == "tensor":
            self.center = self.center * 0.9 + value.detach().mean()
        if self.how == "cache":
            self.cache["ones"] = torch.ones(1)
        if "first rows" in self.how:
            self.first = value.detach().mean() if self.first is None else self.first
            return value - self.first if self.how == "first rows" else refuse_large(value)
        if self.how == "parameter":
            return value + self.outside(torch.ones(1))
        draws = {
            "numpy": self.rng.random,
            "python": self.draws.random,
            "torch": lambda: float(torch.rand(1, generator=self.noise)),
            "global numpy": SHARED.random,
        }
        return value + draws[self.how]() if self.how in draws else value


def refuse_large(value: Tensor) -> Tensor:
    if value.abs().max() > 10:
        raise ValueError("the value is out of range")
    return value


class OddLoss(Odd):
    """A loss without a class of torch."""

    def __call__(self, outputs: Tensor, target: Tensor) -> Tensor:
        return self.disturb((outputs - target) ** 2)


class OddTransform(nn.Module):
    """A transform of images by their names."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.odd = Odd(how)

    def forward(self, images: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self.odd.disturb(image.float()).to(image.dtype) for name, image in images.items()}


class OddModel(nn.Module):
    """A linear model."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.layer, self.odd = nn.Linear(4, 1), Odd(how)

    def forward(self, x: Tensor) -> Tensor:
        return self.odd.disturb(self.layer(x))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return ((self(x)[:, 0] - y) ** 2).mean()


class OddTask(Task):
    """A task with the oddity in `augment` or in the loss."""

    def __init__(self, how: str, where: str) -> None:
        self.odd, self.where = Odd(how), where

    def columns(self) -> list[str]:
        return ["x", "y"]

    def build_model(self) -> nn.Module:
        return OddModel()

    def augment(self, batch: Batch, keys: Tensor) -> Batch:
        return {**batch, "x": self.odd.disturb(batch["x"])} if self.where == "augment" else batch

    def forward(self, model: nn.Module, batch: Batch) -> Tensor:
        outputs: Tensor = model(batch["x"])[:, 0]
        return outputs

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        losses = (outputs - batch["y"]) ** 2
        return self.odd.disturb(losses) if self.where == "loss" else losses


def odd_script(loop: Loop, how: str) -> None:
    """A loop with a loss of its own."""
    loss = OddLoss(how)
    optimizer = torch.optim.SGD([*loop.model.parameters(), *loss.outside.parameters()], lr=0.1)
    loop.keep(optimizer)
    for step in loop:
        for rows in step:
            step.add(loss(loop.model(rows["x"])[:, 0], rows["y"]).mean())
        optimizer.step()


class ManyOutputs(nn.Module):
    """A model with more than one output, and a part that keeps a loss as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.experts = nn.Linear(4, 1), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor | tuple[Tensor, ...] | None]:
        scores = self.experts(x)
        self.experts.balance = scores.softmax(1).square().mean()
        values = self.layer(x)
        loss = None if y is None else ((values[:, 0] - y) ** 2).mean()
        return {"values": values, "hidden": (x, scores), "loss": loss}
