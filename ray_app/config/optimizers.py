"""What moves the parameters, as it stands in a configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ray_app.config.sections import ClassSpec

OWN_OPTIMIZER = "ray_app.task.script.optimizer.OwnOptimizer"
"""Stands for the optimizer that the task makes."""


@dataclass(frozen=True)
class OptimizerSpec(ClassSpec):
    """An optimizer.

    Args:
        class_path: Import path, such as `torch.optim.AdamW`.
        init_args: Keyword arguments of the class, but for the parameters.
        groups: Parameters with options of their own, each a mapping: `names`, patterns with `*` for any text, or `norms_and_biases: true`,
            which is all parameters of at most one dimension (those of normalisation layers, and biases), or both; and options of the
            optimizer, such as `lr` and `weight_decay`. A parameter is in the first group that names it; the others have `init_args`, and
            the learning rate that is recorded is theirs. Schedules move each group's rate. Not given: none.
    """

    groups: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class TurnSpec(OptimizerSpec):
    """One of several optimizers that take turns.

    Args:
        class_path: See `OptimizerSpec`.
        init_args: See `OptimizerSpec`.
        groups: See `OptimizerSpec`.
        parameters: Names of the parameters that it moves, with `*` for any text; each that is trained belongs to one optimizer.
        steps: Steps in a row that are its turn.
        schedule: Its learning-rate schedule, moved after each step of its own turns; not given: none.
    """

    parameters: list[str] = field(default_factory=list)
    steps: int = 1
    schedule: ClassSpec | None = None
