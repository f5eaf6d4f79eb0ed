"""The models of generated programs, and losses that are not of torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import get_world_size as count_ranks
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

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
        if body == "bag" and inputs == "lists":
            self.embedding = nn.EmbeddingBag(7, FEATURES, mode="sum")
        self.first, self.last = nn.Linear(FEATURES, 6), nn.Linear(6, width)
        self.middle = nn.Linear(6, 6)
        if body == "tied":
            self.other = nn.Linear(6, 6)
            self.other.weight = self.middle.weight
        if body == "batch norm":
            self.norm = nn.BatchNorm1d(6)
        if body == "gru":
            self.gru = nn.GRU(1, 6, batch_first=True)
        if body == "packed":
            self.sequence = nn.LSTM(FEATURES, FEATURES, batch_first=True)
        if body in LAYERS:
            self.layer = LAYERS[body]()
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
        x = self._embed(x, z)
        hidden = self.first(x).tanh()
        if self.kind in ("layers", "frozen", "tied"):
            hidden = self.middle(hidden).tanh()
        if self.kind == "tied":
            hidden = self.other(hidden).tanh()
        if self.kind in LAYERS:
            hidden = self.layer(hidden)
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

    def _embed(self, x: Tensor, z: Tensor | None) -> Tensor:
        """Returns (rows, FEATURES) of all inputs."""
        if isinstance(self.embedding, nn.EmbeddingBag) and z is not None:
            return self.embedding(x, per_sample_weights=z.float()) / z.sum(1, keepdim=True)
        if self.embedding is not None:
            x = self.embedding(x)
        if z is None:
            return x
        if x.ndim == 2:
            return torch.cat((x, z), 1)
        if self.kind == "packed":
            packed = nn.utils.rnn.pack_padded_sequence(x, z.sum(1).cpu(), batch_first=True, enforce_sorted=False)
            return self.sequence(packed)[1][0][0]
        return (x * z[:, :, None]).sum(1) / z.sum(1, keepdim=True)


class Spectrum(nn.Module):
    """Multiplies the frequencies of each row by trained complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x.float()) * self.filter, n=6)


class Force(nn.Module):
    """Adds the derivative of an energy by the inputs, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            positions = x if x.requires_grad else x.clone().requires_grad_()
            [force] = torch.autograd.grad(self.energy(positions).tanh().sum(), positions, create_graph=True)
        return x - force


class RareParameters(nn.Module):
    """Has parameters of rare kinds: without values, a number, not contiguous, integers."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 6))
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(6, 6).t())
        self.shift = nn.Parameter(torch.arange(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.turned * self.factor + self.shift / 6 + self.nothing.sum()


class LinearWithHooks(nn.Linear):
    """A layer with a hook for the gradient of its weight and one for its outputs."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.weight.register_hook(_halve)
        self.register_forward_hook(_halve_outputs)


class Recomputed(nn.Module):
    """Computes its layer once more in the backward pass, instead of keeping what it computed."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Linear(6, 6), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._compute, x, use_reentrant=self.reentrant).tanh()

    def _compute(self, x: Tensor) -> Tensor:
        return self.layer(x).sin()


class Attention(nn.Module):
    """Sees each row as three tokens; an encoder of torch has another implementation for evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(2, 1, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x.view(-1, 3, 2)).flatten(1)


class InPrecision(nn.Module):
    """Computes in its own precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.to(self.layer.weight.dtype)).float()


class DividedByRanks(nn.Module):
    """Divides by the number of ranks if there are several, as code for DDP does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        return self.layer(x) / ranks / _ask_for_ranks()


class Chosen(nn.Module):
    """Uses one of its layers, by the sign of the rows' sum: the other one has no gradient in this step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"plus": nn.Linear(6, 6), "minus": nn.Linear(6, 6)})

    def forward(self, x: Tensor) -> Tensor:
        return self.layers["plus" if x.sum() > 0 else "minus"](x)


def _ask_for_ranks() -> int:
    try:
        return count_ranks()
    except (RuntimeError, ValueError):
        return 1


def _halve(gradient: Tensor) -> Tensor:
    return gradient / 2


def _halve_outputs(module: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
    del module, inputs
    return outputs / 2


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(6, 6)),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Linear(6, 6)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 6)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(6, 6)),
    "complex": Spectrum,
    "force": Force,
    "odd": RareParameters,
    "hooked": LinearWithHooks,
    "recomputed": lambda: Recomputed(reentrant=False),
    "recomputed, reentrant": lambda: Recomputed(reentrant=True),
    "attention": Attention,
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Tanh())),
    "double": lambda: InPrecision(torch.float64),
    "bfloat16": lambda: InPrecision(torch.bfloat16),
    "chosen": Chosen,
    "divided by ranks": DividedByRanks,
}
"""Layers of the bodies that have one: (rows, 6) to (rows, 6)."""


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
