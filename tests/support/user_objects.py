"""Losses, transforms and models as users write them, with parameters, buffers, generators and counters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


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
    """Makes a model whose parts are called one after the other."""
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
