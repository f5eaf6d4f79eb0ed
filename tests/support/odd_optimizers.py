"""Optimizers and schedules as users write them, that a run has to keep or to refuse."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer


class Finding(Optimizer):
    """Finds its step size as it goes, and keeps it in its groups (as Prodigy and D-Adaptation do)."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "size": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            seen = sum(float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None)
            group["size"] = 0.9 * group["size"] + 0.1 * min(1.0, seen)
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * group["size"])


class Counting(Optimizer):
    """Counts its steps in itself."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.t = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        self.t += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / self.t)


def cosine(step: int) -> float:
    """A number of NumPy's, which is a Python float and pickles as something else."""
    return 0.5 * (1 + np.cos(np.pi * step / 20))


def single_precision(step: int) -> Any:
    """One that is no Python float."""
    return np.float32(1 / (1 + step))


class Locking(torch.optim.SGD):
    """Keeps a lock in its groups, which no checkpoint can hold."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.param_groups[0]["lock"] = threading.Lock()


def not_a_number(step: int) -> float:
    """A factor that is NaN from the first step on."""
    return float("nan") if step else 1.0
