"""Methods of a `LightningModule` without its trainer: what they log is kept, and what only the trainer could give is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ray_app.errors import ConfigError
from ray_app.task.script.batches import mean_of

_LIGHTNING = ("pytorch_lightning", "lightning", "torch")
_NEVER_CALLED = (
    "backward",
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_model",
    "configure_sharded_model",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "setup",
    "teardown",
    "transfer_batch_to_device",
)


def has_own(kind: type, name: str) -> bool:
    """Whether a class, or one that it derives from, but Lightning's, has something of this name."""
    return any(name in vars(each) and each.__module__.partition(".")[0] not in _LIGHTNING for each in kind.__mro__)


def refuse_hooks(module: nn.Module) -> None:
    """Refuses what only Lightning's trainer would call: left out in silence it would be missed.

    Raises:
        ConfigError: There is such.
    """
    kind = type(module)
    hooks = [name for name in dir(kind) if (name.startswith("on_") or name in _NEVER_CALLED) and has_own(kind, name)]
    if hooks:
        raise ConfigError(
            f"{type(module).__name__} has {', '.join(hooks)}, which Lightning's trainer calls and nothing here does. Take them out: what is"
            " done to a batch belongs into a subclass of LightningTask as augment(batch, keys), what is done to an update as"
            " apply_gradients, clipping into train.grad_clip_norm, and what only watches into an observer (docs/runs.md)."
        )
    if not getattr(module, "automatic_optimization", True):
        raise ConfigError(
            f"{type(module).__name__} sets automatic_optimization to False; its own calls of optimizers would not wait for the gradients of"
            " the other workers. Write a Task with turn_loss and configure optimizers that take turns (docs/own-task.md)."
        )


@contextmanager
def played(module: nn.Module, method: str) -> Iterator[dict[str, Tensor]]:
    """The time in which a method of a module is called: what it logs is kept, and whoever asks for a trainer hears that there is none."""
    logged: dict[str, Tensor] = {}

    def log(name: str, value: Any, *flags: Any, **options: Any) -> None:
        if options.get("reduce_fx", "mean") not in ("mean", torch.mean):
            raise ValueError(f"{name!r} is logged with reduce_fx; means over rows are recorded, nothing else")
        logged[name.replace("/", ".")] = mean_of(name, value).detach().float()

    def log_dict(values: Any, *flags: Any, **options: Any) -> None:
        for name, value in values.items():
            log(name, value, **options)

    shadows = {"log": log, "log_dict": log_dict, "_trainer": _NoTrainer(method)}
    parts = [vars(part) for part in module.modules() if part is module or "_trainer" in vars(part)]
    before = [{name: held[name] for name in shadows if name in held} for held in parts]
    for held in parts:
        held.update(shadows)
    try:
        yield logged
    finally:
        for held, own in zip(parts, before, strict=True):
            for name in shadows:
                del held[name]
            held.update(own)
        for part in module.modules():
            if hasattr(part, "_update_count") and hasattr(part, "reset"):  # a torchmetrics object: nothing stays from step to step
                part.reset()  # type: ignore[operator]


class _NoTrainer:
    """Stands where Lightning's trainer would."""

    def __init__(self, method: str) -> None:
        vars(self)["method"] = method

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            f"{self.method} asks the trainer for {name}, and there is no trainer: what a step computes may depend on its rows alone, and a"
            " schedule that needs the number of steps is `schedule` in the configuration"
        )


class NoNumber:
    """Stands for the number of a batch, which differs between workers: it may be passed on, and not looked at."""

    def __init__(self, method: str) -> None:
        self._method = method

    def _looked_at(self, *others: Any) -> NoReturn:
        raise RuntimeError(f"{self._method} looks at batch_idx, whose value would depend on the workers; log at every step, without it")

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __mod__ = __bool__ = __int__ = __index__ = __add__ = __hash__ = _looked_at
