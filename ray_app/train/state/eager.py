"""Optimizers without PyTorch's compiler (torch 2.15).

They import it when they are made and at every step, only to be left out of what is compiled: two seconds of every process that trains. Both
are undone here for a run that compiles nothing. Where another version does it in another way, the compiler is imported as before.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


def without_compiler(optimizer: type[Optimizer]) -> None:
    """Changes the methods of a class of optimizers, before the first is made, so that they do not import the compiler."""
    if "torch._dynamo" in sys.modules:  # nothing to save
        return
    for method in filter(inspect.isfunction, vars(Optimizer).values()):
        plain: Any = getattr(method, "__wrapped__", method)
        plain.__dynamo_disable = plain  # what `torch._disable_dynamo` keeps of its first call
    step = optimizer.step
    if getattr(step, "__code__", _with_grad.__code__).co_name == "_use_grad":
        optimizer.step = _with_grad(vars(step)["__wrapped__"])  # type: ignore[method-assign]


def _with_grad(step: Callable[..., Any]) -> Callable[..., Any]:
    """As `torch.optim.optimizer._use_grad_for_differentiable`, without its marks for the compiler."""

    @functools.wraps(step)
    def stepped(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return stepped
