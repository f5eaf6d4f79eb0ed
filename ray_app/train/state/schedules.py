"""Learning-rate schedules of the configuration."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ray_app.config.class_path import load_class
from ray_app.config.sections import ClassSpec
from ray_app.errors import ConfigError

_LENGTHS = {"total_steps", "epochs", "steps_per_epoch"}
"""Arguments by which a schedule (`OneCycleLR`) is told how long it is; where one is given, nothing is added."""


def make_schedule(spec: ClassSpec, optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """Makes a schedule, and those that it is made of (`SequentialLR`, `ChainedScheduler`)."""
    made = load_class(spec)
    parameters = inspect.signature(made).parameters

    def given(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [given(name, part) for part in value]
        if isinstance(value, dict) and "class_path" in value:
            return make_schedule(ClassSpec(value["class_path"], value.get("init_args") or {}), optimizer, total_steps)
        if isinstance(value, str) and name in parameters and "Callable" in str(parameters[name].annotation):
            return load_class(value)
        return value

    args = {name: given(name, value) for name, value in spec.init_args.items()}
    rates = [group["lr"] for group in optimizer.param_groups]
    if len(set(rates)) > 1 and isinstance(args.get("max_lr"), float | int):
        raise ConfigError(
            f"schedule {made.__name__} has max_lr {args['max_lr']} for all {len(rates)} groups of parameters, whose own rates {rates} it"
            " would replace; give max_lr as a list, one for each of these."
        )
    if "total_steps" in parameters and not _LENGTHS & args.keys():
        args["total_steps"] = total_steps
    return made(optimizer=optimizer, **args)


def counts_total_steps(spec: ClassSpec) -> bool:
    """Whether a schedule, or one that it is made of, is told the steps of the whole run."""
    parts = [part for value in spec.init_args.values() for part in (value if isinstance(value, list) else [value])]
    inner = [
        ClassSpec(part["class_path"], part.get("init_args") or {}) for part in parts if isinstance(part, dict) and "class_path" in part
    ]
    takes = "total_steps" in inspect.signature(load_class(spec)).parameters
    return (takes and not _LENGTHS & spec.init_args.keys()) or any(map(counts_total_steps, inner))
