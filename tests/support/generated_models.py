"""The models of generated programs, and losses that are not of torch."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

FEATURES, CLASSES = 5, 4
POSITIONS = 3
WITH_PARAMETERS = ("TrainedVariance", "Centres")
"""The losses with parameters, which are a part of the model."""


class Model(nn.Module):
    """The model of a program: (rows, FEATURES), or two parts of it, or integers, to the outputs of its target."""

    def __init__(self, target: str, body: str, inputs: str, outputs: str) -> None:
        super().__init__()
        self.kind, self.target = body, target
        self.named = outputs
        width = {"number": 1, "binary": 1, "place classes": CLASSES * POSITIONS}.get(target, CLASSES)
        self.embedding = nn.Embedding(7, FEATURES) if inputs in ("integers", "lists") else None
        self.first, self.last = nn.Linear(FEATURES, 6), nn.Linear(6, width)
        self.middle = nn.Linear(6, 6)
        if body == "tied":
            self.other = nn.Linear(6, 6)
            self.other.weight = self.middle.weight
        if body == "batch norm":
            self.norm = nn.BatchNorm1d(6)
        if body == "gru":
            self.gru = nn.GRU(1, 6, batch_first=True)
        if body == "unused":
            self.unused = nn.Parameter(torch.ones(3))
        if body == "frozen":
            self.middle.requires_grad_(False)
        if body == "counter":
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        if body == "buffer":
            self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))
            self.register_buffer("shift", torch.ones(6), persistent=False)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Any:
        """Returns the outputs as a tensor, in a dictionary or in an object; beside lists, `z` is their mask."""
        if self.embedding is not None:
            x = self.embedding(x)
        if x.ndim == 3 and z is not None:
            x = (x * z[:, :, None]).sum(1) / z.sum(1, keepdim=True)
        elif z is not None:
            x = torch.cat((x, z), 1)
        hidden = self.first(x).tanh()
        if self.kind in ("layers", "frozen", "tied"):
            hidden = self.middle(hidden).tanh()
        if self.kind == "tied":
            hidden = self.other(hidden).tanh()
        if self.kind == "batch norm":
            hidden = self.norm(hidden)
        if self.kind == "gru":
            hidden = hidden + self.gru(x[:, :, None])[0][:, -1]
        if self.kind == "counter" and self.training:
            self.steps += 1
        if self.kind == "buffer":
            hidden = hidden * self.scale + self.shift
        scores = self.last(hidden)
        if self.target == "place classes":
            scores = scores.view(-1, CLASSES, POSITIONS)
        if self.target == "soft log":
            scores = scores.log_softmax(1)
        if self.named == "tensor":
            return scores
        return {"hidden": hidden, "scores": scores} if self.named == "dict" else Outputs(hidden, scores)


class TrainedVariance(nn.Module):
    """Gives the negative logarithm of a normal distribution's density with a trained variance, for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros(()))

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return (outputs - target) ** 2 * (-self.log_variance).exp() + self.log_variance


class Centres(nn.Module):
    """Gives the cross entropy of distances to trained centres of the classes, for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.eye(CLASSES))

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        distances = ((outputs[:, None] - self.centres) ** 2).sum(2)
        return nn.functional.cross_entropy(-distances, target, reduction="none")


class LogCosh(nn.Module):
    """A loss of the user's own without parameters, with the `reduction` of torch's losses."""

    def __init__(self, scale: float, reduction: str = "mean") -> None:
        super().__init__()
        self.scale, self.reduction = scale, reduction

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        values = ((outputs - target) / self.scale).cosh().log()
        return values.mean() if self.reduction == "mean" else values


@dataclasses.dataclass
class Outputs:
    """Outputs as an object, as models of `transformers` return them."""

    hidden: Tensor
    scores: Tensor
