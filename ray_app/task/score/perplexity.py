"""How many tokens a language model wavers between, on an average. Importing this takes what torchmetrics takes."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric


class Perplexity(Metric):
    """e to the mean loss of a token, over all tokens that were evaluated."""

    loss: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("loss", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, losses: Tensor, tokens: Tensor) -> None:
        """Adds rows.

        Args:
            losses: The sum of the losses of each row's tokens, shape (rows,).
            tokens: How many tokens that is over, shape (rows,).
        """
        self.loss += losses.sum(dtype=torch.float64)
        self.tokens += tokens.sum()

    def compute(self) -> Tensor:
        """One number; not a number if there are no tokens."""
        return (self.loss / self.tokens).exp()
