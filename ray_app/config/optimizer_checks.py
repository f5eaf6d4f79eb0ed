"""What does not go together with several optimizers, or with one that the task makes."""

from __future__ import annotations

from ray_app.config.config import Config
from ray_app.config.optimizers import OWN_OPTIMIZER


def check_optimizers(config: Config) -> list[str]:
    """What does not go together with several optimizers, or with one that the task makes."""
    problems: list[str] = []
    if config.optimizer.class_path == OWN_OPTIMIZER and config.train.strategy not in ("ddp", "single", "central_storage"):
        problems.append(
            f"The task makes the optimizer (configure_optimizers, or Task.own_optimizer), and train.strategy {config.train.strategy} makes"
            " several. Name it in optimizer, or use ddp, single or central_storage."
        )
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
