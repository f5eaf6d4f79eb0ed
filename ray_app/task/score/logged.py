"""Means over rows of numbers that a model names while it is evaluated, as a metric that can be put together from parts."""

from __future__ import annotations

import json
import math

import torch
from torch import Tensor
from torchmetrics import Metric


class Logged(Metric):
    """The names go along as states, since whoever adds up the parts has seen no batch."""

    full_state_update = False
    names: list[Tensor]
    values: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("names", [], "cat")
        self.add_state("values", [], "cat")

    def update(self, logged: dict[str, Tensor], rows: int) -> None:
        """Adds the means of so many rows, each of shape ()."""
        self.names.append(torch.tensor(list(json.dumps(list(logged)).encode()), dtype=torch.uint8))
        self.values.append(torch.tensor([rows, *map(float, logged.values())], dtype=torch.float64))

    def compute(self) -> dict[str, Tensor]:
        """The mean of each over the rows that had it."""
        found: dict[str, list[tuple[float, float]]] = {}
        for names, values in zip(self.names, self.values, strict=True):
            rows, *means = values.tolist()
            for name, mean in zip(json.loads(bytes(names.tolist())), means, strict=True):
                found.setdefault(name, []).append((mean * rows, rows))
        means_of = {name: math.fsum(s for s, _ in parts) / math.fsum(n for _, n in parts) for name, parts in found.items()}
        return {name: torch.tensor(mean, dtype=torch.float64) for name, mean in means_of.items()}
