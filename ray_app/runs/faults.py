"""What tests and drills may put into a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ray_app.checkpoint.commit import Commit
from ray_app.train.hooks import Hooks
from ray_app.train.job import Job


@dataclass(frozen=True)
class Faults:
    """Where fault tests can make something happen; users have no need of it.

    Args:
        train: In every worker.
        before_evaluation: In the evaluator, before each evaluation.
    """

    train: Hooks = field(default_factory=Hooks)
    before_evaluation: Callable[[Commit], None] | None = None


Observe = Callable[[Job], None]
"""Called in the driver, a few times a second while workers train; what it raises ends the run."""
