"""Optimizers without PyTorch's compiler, and without marks for a profiler that does not listen (torch 2.15).

They import the compiler when they are made and at every step, only to be left out of what is compiled: two seconds of every process that
trains. Each step tells the profiler when it begins and ends, which takes 30 us of a small one. Both are undone here for a run that compiles
nothing. Where another version does it in another way, it is left as it is.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

_of_all = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
_is_profiled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


def without_compiler(optimizer: type[Optimizer]) -> None:
    """Changes the methods of a class of optimizers, before the first is made, so that they do not import the compiler."""
    if "torch._dynamo" in sys.modules:  # nothing to save
        return
    for method in filter(inspect.isfunction, vars(Optimizer).values()):
        plain: Any = getattr(method, "__wrapped__", method)
        plain.__dynamo_disable = plain  # what `torch._disable_dynamo` keeps of its first call
    step = optimizer.step
    if getattr(step, "__code__", _with_grad.__code__).co_name == "_use_grad":
        if not torch.accelerator.is_available():  # it would be looked for at each step, to ask whether it captures a graph
            optimizer._accelerator_graph_capture_health_check = lambda self: None  # type: ignore[method-assign]
        optimizer.step = _hooked(_with_grad(vars(step)["__wrapped__"]))  # type: ignore[method-assign]


def _with_grad(step: Callable[..., Any]) -> Callable[..., Any]:
    """As `torch.optim.optimizer._use_grad_for_differentiable`, without its marks for the compiler."""

    @functools.wraps(step)
    def stepped(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return stepped


def _hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """As `torch.optim.Optimizer.profile_hook_step`, which is called only where there is a hook or a profiler."""
    told = Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def stepped(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        is_told = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or _of_all[0] or _of_all[1] or _is_profiled()
        return (told if is_told else step)(self, *args, **kwargs)

    stepped.hooked = True  # type: ignore[attr-defined]  # or the first optimizer that is made would wrap it again
    return stepped
