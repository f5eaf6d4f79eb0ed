"""What does not go together with several optimizers, or with one that the task makes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ray_app.config.config import Config
from ray_app.config.optimizers import OWN_OPTIMIZER, OptimizerSpec

_NUMBERS = ("lr", "weight_decay", "momentum", "dampening", "eps", "alpha")
_NOT_NEGATIVE = ("lr", "weight_decay", "momentum", "eps")


def check_optimizers(config: Config) -> list[str]:
    """What does not go together with several optimizers, or with one that the task makes."""
    problems: list[str] = []
    if config.optimizer.class_path == OWN_OPTIMIZER and config.train.strategy not in ("ddp", "single", "central_storage"):
        problems.append(
            f"The task makes the optimizer (configure_optimizers, or Task.own_optimizer), and train.strategy {config.train.strategy} makes"
            " several. Name it in optimizer, or use ddp, single or central_storage."
        )
    problems += _check_spec("optimizer", config.optimizer)
    for name, spec in (config.optimizers or {}).items():
        problems += _check_spec(f"optimizers.{name}", spec)
    schedules = {"schedule": config.schedule} | {
        f"optimizers.{name}.schedule": spec.schedule for name, spec in (config.optimizers or {}).items()
    }
    for field, schedule in schedules.items():
        if schedule is not None:
            problems += _check_numbers(f"{field}.init_args", schedule.class_path, schedule.init_args)
    if not config.optimizers:
        return problems if config.optimizers is None else ["optimizers is empty; name an optimizer, or leave it out."]
    if config.optimizer != Config.optimizer:
        problems.append("optimizer and optimizers are both given; leave one of them out.")
    if config.schedule is not None:
        problems.append("schedule is given with optimizers, of which each has its own: optimizers.NAME.schedule.")
    if config.train.strategy not in ("ddp", "single"):
        problems.append(
            f"optimizers are given with train.strategy {config.train.strategy}, whose state belongs to one optimizer that moves all"
            " parameters in each step. Use ddp or single."
        )
    for name, spec in config.optimizers.items():
        if spec.steps < 1:
            problems.append(f"optimizers.{name}.steps is {spec.steps}; it must be at least 1.")
        if not spec.parameters:
            problems.append(f"optimizers.{name}.parameters is missing; name the parameters that it moves, with * for any text.")
    return problems


def _check_spec(field: str, spec: OptimizerSpec) -> list[str]:
    """What is wrong with the numbers among the arguments of an optimizer and its groups."""
    problems = _check_numbers(f"{field}.init_args", spec.class_path, spec.init_args)
    for i, group in enumerate(spec.groups or []):
        # Of a group jsonargparse knows no types, and an optimizer takes true for 1.
        wrong = [name for name in _NUMBERS if name in group and (isinstance(group[name], bool) or not isinstance(group[name], int | float))]
        problems += [f"{field}.groups has {name} = {group[name]!r}; it must be a number." for name in wrong]
        problems += _check_numbers(f"{field}.groups[{i}]", spec.class_path, group)
    return problems


def _check_numbers(field: str, class_path: str, arguments: Mapping[str, Any]) -> list[str]:
    """What is NaN, or what PyTorch's classes do not take: infinity, and a negative learning rate.

    A class of a user's may take infinity for "no limit", and a negative rate.
    """
    problems, is_torchs = list[str](), class_path.startswith("torch.")
    for name, argument in arguments.items():
        for number in _numbers_in(argument):
            if math.isnan(number) or (math.isinf(number) and (is_torchs or name in _NUMBERS)):
                problems.append(f"{field}.{name} is {argument}; it must be finite.")
            elif number < 0 and is_torchs and name in _NOT_NEGATIVE:
                problems.append(f"{field}.{name} is {argument}; it must be at least 0.")
    return problems


def _numbers_in(value: Any) -> Iterator[float]:
    """The numbers in a value of a configuration."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers_in(part)
