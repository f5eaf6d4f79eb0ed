"""A `LightningModule` as a task: its steps, the values that it logs and its optimizer, without Lightning's trainer.

Lightning is not imported: any module with `training_step` works. `capture_logs` records what a method of the module
logs, and refuses any use of the trainer.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ray_app.config.import_paths import load_class
from ray_app.config.strategies import list_strategies
from ray_app.errors import ConfigError
from ray_app.task.annotations import Metric
from ray_app.task.base import Batch
from ray_app.task.losses import Losses
from ray_app.task.metric_states import isolate
from ray_app.task.transforms import instantiate
from ray_app.task.whole_batches import BatchTask, Evaluated, as_mean, count_rows

if TYPE_CHECKING:
    from ray_app.config.config import Config

_LIGHTNING_PACKAGES = ("pytorch_lightning", "lightning", "torch")
# Hooks that only Lightning's trainer calls.
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
_VALIDATION_LOSSES = ("loss", "val_loss")


def has_user_attribute(kind: type, name: str) -> bool:
    """Whether a class, or a base of it outside Lightning, defines an attribute."""
    return any(
        name in vars(base) and base.__module__.partition(".")[0] not in _LIGHTNING_PACKAGES for base in kind.__mro__
    )


def refuse_hooks(module: nn.Module) -> None:
    """Raises ConfigError for a module with hooks that only Lightning's trainer calls, or that optimizes manually."""
    kind = type(module)
    hooks = [
        name
        for name in dir(kind)
        if (name.startswith("on_") or name in _NEVER_CALLED) and has_user_attribute(kind, name)
    ]
    if hooks:
        raise ConfigError(
            f"{type(module).__name__} has {', '.join(hooks)}, which only Lightning's trainer calls. Remove them: move"
            " changes of a batch to augment(batch, keys) in a subclass of LightningTask, changes of an update to"
            " apply_gradients, clipping to train.grad_clip_norm, and monitoring to an observer (docs/runs.md)."
        )
    if not getattr(module, "automatic_optimization", True):
        raise ConfigError(
            f"{type(module).__name__} sets automatic_optimization to False; its own calls of optimizers would not wait"
            " for the gradients of the other workers. Write a Task with loss_for_optimizer and configure alternating"
            " optimizers (docs/own-task.md)."
        )


class Log(NamedTuple):
    """The values that a method logs; numbers are means over a batch, each of shape ()."""

    numbers: dict[str, Tensor]
    metrics: dict[str, Metric]


def _metric_of(value: Any, parts: list[Any]) -> Metric | None:
    """Returns the torchmetrics object that a value is, or the one among some metrics that returned it as a result."""
    if hasattr(value, "_update_count"):
        return value
    if not isinstance(value, Tensor):
        return None
    return next((part for part in parts if value is part._forward_cache or value is part._computed), None)


@contextmanager
def capture_logs(module: nn.Module, method: str, rows: int | None = None) -> Iterator[Log]:
    """Records what a method of a module logs while the block calls it; access to the trainer raises an error.

    Args:
        rows: Rows of the batch that it gets; None: it gets no batch.

    Yields:
        The logged values. The module's torchmetrics objects have the states of the batch until the block ends, and are
        reset then.
    """
    logged = Log({}, {})
    own_metrics = [part for part in module.modules() if hasattr(part, "_update_count") and hasattr(part, "reset")]

    def log(name: str, value: Any, *flags: Any, **options: Any) -> None:
        recorded = name.replace("/", ".")
        if (metric := _metric_of(value, own_metrics)) is not None:
            logged.metrics[recorded] = metric
            return
        # Of Lightning's arguments after the value these are the fifth and the tenth.
        options = {**dict(zip(("reduce_fx", "batch_size"), flags[4:10:5], strict=False)), **options}
        batch_size = options.get("batch_size")
        if batch_size is not None and rows is not None and int(batch_size) != rows:
            raise ValueError(
                f"{name!r} is logged with batch_size {int(batch_size)}, but the batch has {rows} rows, which weight its"
                " mean here. Leave batch_size out; for a mean over tokens, update a torchmetrics.MeanMetric with"
                " weights"
            )
        if options.get("reduce_fx", "mean") not in ("mean", torch.mean):
            raise ValueError(
                f"{name!r} is logged with reduce_fx; only means over rows and torchmetrics objects can be recorded"
            )
        logged.numbers[recorded] = as_mean(name, value).detach().float()

    def log_dict(values: Any, *flags: Any, **options: Any) -> None:
        # A module is a MetricCollection; its `items` copies the metrics unless told not to.
        is_collection = isinstance(values, nn.Module)
        for name, value in values.items(keep_base=False, copy_state=False) if is_collection else values.items():
            log(name, value, *flags, **options)

    shadows = {"log": log, "log_dict": log_dict, "_trainer": _NoTrainer(method)}
    parts = [vars(part) for part in module.modules() if part is module or "_trainer" in vars(part)]
    before = [{name: attributes[name] for name in shadows if name in attributes} for attributes in parts]
    for attributes in parts:
        attributes.update(shadows)
    try:
        yield logged
    finally:
        for attributes, original in zip(parts, before, strict=True):
            for name in shadows:
                del attributes[name]
            attributes.update(original)
        for metric in own_metrics:
            metric.reset()  # type: ignore[operator]


class _NoTrainer:
    """Replaces Lightning's trainer: every access to an attribute raises an error."""

    def __init__(self, method: str) -> None:
        vars(self)["method"] = method

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            f"{self.method} asks the trainer for {name}, but there is no trainer: a step may depend only on its rows,"
            " and a schedule that needs the number of steps is `schedule` in the configuration"
        )


class NoNumber:
    """Replaces the index of a batch, which differs between workers: passing it on works, any use of it raises."""

    def __init__(self, method: str) -> None:
        self._method = method

    def _refuse(self, *others: Any) -> NoReturn:
        raise RuntimeError(
            f"{self._method} uses batch_idx, which would depend on the workers; log at every step, without it"
        )

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __mod__ = __bool__ = __int__ = __index__ = __add__ = __hash__ = _refuse


class LightningTask(BatchTask):
    """A task of a `LightningModule` by its import path, with the columns that its steps get::

        task:
          class_path: ray_app.task.lightning.LightningTask
          init_args:
            module: {class_path: net.Net, init_args: {width: 64}}
            batch: [image, label]
            target: label

    The task calls `training_step`, `validation_step`, `configure_optimizers` unless the configuration has an
    `optimizer`, and for predictions `forward` with all of the batch but the target. docs/lightning.md lists what is
    refused.

    Args:
    """

    keeps_modes = True

    def validate_config(self, config: Config) -> list[str]:
        """Returns a problem for each setting that needs calls of the module itself instead of `training_step`."""
        problems = {
            f"train.strategy is {config.train.strategy}, which gathers parameters outside its units when the module is"
            " called, but Lightning calls training_step. Use"
            f" {list_strategies(lambda t: not t.shards_parameters)}.": config.train.strategy_traits.shards_parameters,
            "train.compile compiles calls of the module, and training_step is not one; compile parts of it in its"
            " __init__.": config.train.compile,
            "train.capture needs identical steps, but training_step may differ in each; leave it"
            " out.": config.train.capture,
        }
        return [problem for problem, applies in problems.items() if applies]

    def build_model(self) -> nn.Module:
        """Builds the module; raises ConfigError for one without `training_step`, and see `refuse_hooks`."""
        module = instantiate(self.model, "task.init_args.module")
        if not isinstance(module, nn.Module) or not hasattr(module, "training_step"):
            raise ConfigError(
                f"task.init_args.module creates a {type(module).__name__}; it must create a module with training_step."
            )
        refuse_hooks(module)
        if "torchmetrics" in sys.modules:
            isolate(module)
        return module

    @property
    def has_own_optimizer(self) -> bool:
        """Whether the module has `configure_optimizers`."""
        factory = load_class(self.model["class_path"])
        with torch.random.fork_rng(devices=[]):
            kind = factory if isinstance(factory, type) else type(self.build_model())
        return has_user_attribute(kind, "configure_optimizers")

    def configure_optimizers(self, model: nn.Module) -> tuple[Optimizer, LRScheduler | None]:
        """Returns the optimizer of the module's `configure_optimizers`, and its schedule or None.

        Raises:
            ConfigError: The method returns several optimizers or schedules, or a schedule that is not stepped after
                every step.
        """
        with capture_logs(model, "configure_optimizers"):
            return _one_optimizer(model.configure_optimizers())  # type: ignore[operator]

    def training_loss(self, model: nn.Module, batch: Batch) -> Losses:
        """Returns the mean loss of `training_step` for each row, with what it logs as metrics."""
        with self._stepped(model, "training_step", batch) as (returned, log):
            computed = {name: as_mean(name, metric.compute()).float() for name, metric in log.metrics.items()}
            logged = computed | log.numbers
        if returned is None:
            raise ConfigError(
                f"{type(model).__name__}.training_step returned no loss, but every row of every step must be used."
                " Return the mean over the batch."
            )
        rows = count_rows(batch)
        # The loss is recorded of every step, so a logged one is left out.
        metrics = {
            name: value.detach().to(returned.device).expand(rows) for name, value in logged.items() if name != "loss"
        }
        return Losses(returned.expand(rows), metrics=metrics)

    def eval_outputs(self, model: nn.Module, batch: Batch) -> Evaluated:
        """Returns the loss of `validation_step` and what it logs.

        The loss is a number that it logs as `loss`, else a `MeanMetric` that it logs as `loss` or `val_loss`, with its
        weights, else what it returns, else a number that it logs as `val_loss`.

        Raises:
            ConfigError: There is no `validation_step`, or it has no loss.
        """
        if not has_user_attribute(type(model), "validation_step"):
            raise ConfigError(
                f"{type(model).__name__} has no validation_step, but data.eval_path is set. Write one, or leave"
                " data.eval_path out."
            )
        from ray_app.task.metric_classes import refuse_name_clash, take_metrics, weighted_mean

        with self._stepped(model, "validation_step", batch) as (returned, log):
            # Lightning knows what is logged as loss, and ignores what the step returns.
            logged_loss, val_loss = map(log.numbers.get, _VALIDATION_LOSSES)
            named = [log.metrics[name] for name in _VALIDATION_LOSSES if name in log.metrics and logged_loss is None]
            means = [weighted_mean(metric) for metric in named]
            metrics = take_metrics(log.metrics)
        refuse_name_clash(log.numbers, metrics)
        device = next(iter(batch.values())).device
        logged = {name: value.to(device) for name, value in log.numbers.items() if name != "loss"}
        metrics = {name: metric for name, metric in metrics.items() if name != "loss"}
        if (mean := next((one for one in means if one is not None), None)) is not None:
            return Evaluated(mean.value.to(device), logged, metrics, mean.weight.to(device))
        loss = next((value for value in (logged_loss, returned, val_loss) if value is not None), None)
        if loss is None:
            raise ConfigError(
                f"{type(model).__name__}.validation_step has no loss; return it, or log it as val_loss: a number, or a"
                " torchmetrics.MeanMetric."
            )
        return Evaluated(loss.to(device), logged, metrics)

    @contextmanager
    def _stepped(self, model: nn.Module, name: str, batch: Batch) -> Iterator[tuple[Tensor | None, Log]]:
        """Runs a step; yields its loss, shape (), or None, and its logs with the states of the batch."""
        fields, step = self.fields(batch), getattr(model, name)
        arguments = (fields if isinstance(self.batch, dict) else tuple(fields.values()), NoNumber(name))
        with capture_logs(model, name, count_rows(batch)) as log:
            returned = step(*arguments[: len(inspect.signature(step).parameters)])
            loss = returned.get("loss") if isinstance(returned, dict) else returned
            yield None if loss is None else as_mean(f"{name}'s loss", loss), log


def _one_optimizer(returned: Any) -> tuple[Optimizer, LRScheduler | None]:
    """Extracts the optimizer and the schedule from one of the forms that `configure_optimizers` may return."""
    parts = returned if isinstance(returned, list | tuple) else [returned]
    is_pair = len(parts) == 2 and all(isinstance(part, list | tuple) for part in parts)
    optimizers, schedulers = parts if is_pair else (parts, [])
    if len(optimizers) == 1 and isinstance(optimizers[0], dict):
        fields = optimizers[0]
        _refuse_unknown(fields, ("optimizer", "lr_scheduler", "monitor"))
        optimizers = [fields.get("optimizer")]
        schedulers = [fields["lr_scheduler"]] if fields.get("lr_scheduler") is not None else []
    if len(optimizers) != 1 or len(schedulers) > 1 or not isinstance(optimizers[0], Optimizer):
        raise ConfigError(
            f"configure_optimizers returned {len(optimizers)} optimizers and {len(schedulers)} schedulers; one torch"
            " optimizer and at most one scheduler can be used. For several, use `optimizers` in the configuration, with"
            " a Task that has loss_for_optimizer."
        )
    first = schedulers[0] if schedulers else {}
    settings: dict[str, Any] = first if isinstance(first, dict) else {"scheduler": first}
    _refuse_unknown(settings, ("scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"))
    schedule = settings.get("scheduler")
    if schedule is None:
        if settings:
            raise ConfigError(
                f"configure_optimizers returned a schedule without scheduler, {settings}. Add it, or return only the"
                " optimizer."
            )
        return optimizers[0], None
    by_value = isinstance(schedule, ReduceLROnPlateau) or settings.get("reduce_on_plateau")
    by_step = settings.get("interval", "epoch") == "step" and settings.get("frequency", 1) == 1
    if not isinstance(schedule, LRScheduler) or by_value or not by_step:
        raise ConfigError(
            f"configure_optimizers returned {type(schedule).__name__}, {_describe_settings(settings)}; a schedule here"
            " is one of torch.optim.lr_scheduler and advances after every step. Return {'scheduler': ..., 'interval':"
            " 'step'} with numbers in steps, or return only the optimizer and set `schedule` in the configuration."
        )
    return optimizers[0], schedule


def _refuse_unknown(fields: dict[str, Any], names: tuple[str, ...]) -> None:
    """Refuses fields that Lightning does not define either: a misspelled one would silently have no effect."""
    if unknown := sorted(map(str, fields.keys() - set(names))):
        raise ConfigError(
            f"configure_optimizers returned a dictionary with {', '.join(unknown)}; its fields are {', '.join(names)}."
        )


def _describe_settings(settings: dict[str, Any]) -> str:
    """Returns the settings that decide when a schedule is stepped as text for a message."""
    parts = [f"interval {settings.get('interval', 'epoch')!r}"]
    frequency = settings.get("frequency", 1)
    if frequency != 1:
        parts.append(f"frequency {frequency!r} (leave it out: let the schedule count {frequency} times as many steps)")
    if isinstance(settings["scheduler"], ReduceLROnPlateau) or settings.get("reduce_on_plateau"):
        parts.append(f"monitor {settings.get('monitor')!r}, a value that no step has")
    return ", ".join(parts)
