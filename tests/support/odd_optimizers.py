"""User-defined optimizers and schedules that a run must support or refuse."""

import threading
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer


class AdaptiveStepSize(Optimizer):
    """An optimizer that adapts its step size and stores it in its groups, as Prodigy and D-Adaptation do."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "size": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            gradient_norm = sum(float(p.grad.abs().sum()) for p in group["params"] if p.grad is not None)
            group["size"] = 0.9 * group["size"] + 0.1 * min(1.0, gradient_norm)
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * group["size"])


class NoisySgd(torch.optim.SGD):
    """Stochastic gradient Langevin dynamics, with noise from torch's generator or from one of its own.

    Args:
        has_generator: Whether it has a generator of its own.
    """

    def __init__(self, params: Any, lr: float = 0.05, has_generator: bool = False) -> None:
        super().__init__(params, lr)
        self.rng = np.random.default_rng(0)
        self.has_generator = has_generator

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=self.rng.random() if self.has_generator else 0.01)


class CountingSgd(Optimizer):
    """An optimizer that counts its steps in an attribute."""

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
    """Returns a NumPy number, which is a Python float but pickles as another type."""
    return 0.5 * (1 + np.cos(np.pi * step / 20))


def single_precision(step: int) -> Any:
    """Returns a NumPy number that is not a Python float."""
    return np.float32(1 / (1 + step))


class LockInGroups(torch.optim.SGD):
    """An optimizer with a lock in its groups, which a checkpoint cannot contain."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.param_groups[0]["lock"] = threading.Lock()
