"""What does not go together with several optimizers, or with one that the task makes."""

from __future__ import annotations

from typing import Any

from ray_app.config.config import Config
from ray_app.config.optimizers import OWN_OPTIMIZER

_NUMBERS = ("lr", "weight_decay", "momentum", "dampening", "eps", "alpha")


def check_optimizers(config: Config) -> list[str]:
    """What does not go together with several optimizers, or with one that the task makes."""
    problems: list[str] = []
    if config.optimizer.class_path == OWN_OPTIMIZER and config.train.strategy not in ("ddp", "single", "central_storage"):
        problems.append(
            f"The task makes the optimizer (configure_optimizers, or Task.own_optimizer), and train.strategy {config.train.strategy} makes"
            " several. Name it in optimizer, or use ddp, single or central_storage."
        )
    problems += _check_groups("optimizer.groups", config.optimizer.groups)
    for name, spec in (config.optimizers or {}).items():
        problems += _check_groups(f"optimizers.{name}.groups", spec.groups)
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


def _check_groups(field: str, groups: list[dict[str, Any]] | None) -> list[str]:
    """What is no number among the options of groups that are numbers, of which an optimizer takes true for 1."""
    return [
        f"{field} has {option} = {group[option]!r}; it must be a number."
        for group in groups or []
        for option in _NUMBERS
        if option in group and (isinstance(group[option], bool) or not isinstance(group[option], int | float))
    ]
