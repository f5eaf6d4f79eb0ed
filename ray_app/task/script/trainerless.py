"""Methods of a `LightningModule` without its trainer: what they log is kept, and what only the trainer could give is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ray_app.errors import ConfigError
from ray_app.task.annotations import Metric
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
    "training_epoch_end",
    "training_step_end",
    "transfer_batch_to_device",
    "validation_epoch_end",
    "validation_step_end",
)
_LOG_OPTIONS = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "enable_graph",
    "sync_dist",
    "sync_dist_group",
    "add_dataloader_idx",
    "batch_size",
)
"""Arguments of Lightning's `log` and `log_dict` after the values, in their order."""


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


class Log(NamedTuple):
    """What a method logs.

    Args:
        numbers: Means over a batch, each of shape ().
        metrics: torchmetrics objects, with the states of the batch.
    """

    numbers: dict[str, Tensor]
    metrics: dict[str, Metric]


def _metric_of(value: Any, parts: list[Any]) -> Metric | None:
    """The torchmetrics object that a value is, or the one of a module's that returned it."""
    if hasattr(value, "_update_count"):
        return value
    if not isinstance(value, Tensor):
        return None
    return next((part for part in parts if value is part._forward_cache or value is part._computed), None)


@contextmanager
def played(module: nn.Module, method: str, rows: int | None = None) -> Iterator[Log]:
    """The time in which a method of a module is called: what it logs is kept, and whoever asks for a trainer hears that there is none.

    Args:
        module: The module.
        method: Name of the method.
        rows: Rows of the batch that it gets; not given: it gets none.

    Yields:
        What it logs. The states of its torchmetrics objects are those of the batch until it ends; then nothing of them stays.
    """
    logged, own_metrics = Log({}, {}), [part for part in module.modules() if hasattr(part, "_update_count") and hasattr(part, "reset")]

    def log(name: str, value: Any, *flags: Any, **options: Any) -> None:
        recorded = name.replace("/", ".")
        if (metric := _metric_of(value, own_metrics)) is not None:
            logged.metrics[recorded] = metric
            return
        options = {**dict(zip(_LOG_OPTIONS, flags, strict=False)), **options}
        counted = options.get("batch_size")
        if counted is not None and rows is not None and int(counted) != rows:
            raise ValueError(
                f"{name!r} is logged with batch_size {int(counted)}, and the batch has {rows} rows, by which its mean counts here. Leave"
                " batch_size out; a mean over something else than rows (tokens) is a torchmetrics.MeanMetric that is updated with weights"
            )
        if options.get("reduce_fx", "mean") not in ("mean", torch.mean):
            raise ValueError(f"{name!r} is logged with reduce_fx; means over rows are recorded, or torchmetrics objects, nothing else")
        logged.numbers[recorded] = mean_of(name, value).detach().float()

    def log_dict(values: Any, *flags: Any, **options: Any) -> None:
        is_collection = isinstance(values, nn.Module)  # a MetricCollection, whose items may be copies
        for name, value in values.items(keep_base=False, copy_state=False) if is_collection else values.items():
            log(name, value, *flags, **options)

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
        for metric in own_metrics:
            metric.reset()  # type: ignore[operator]


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
