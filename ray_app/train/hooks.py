"""Where a test can make something happen; users have no need of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ray_app.checkpoint.commit import Commit


@dataclass(frozen=True)
class Hooks:
    """Called in every worker.

    Args:
        after_step: With (rank, finished steps) after each step.
        before_commit: With the checkpoint before each commit, in the saver's thread.
        built: With the model when it has been made.
        at: With (phase, rank, finished steps) whenever a worker begins something else: `forming`, `data`, `compute`, `exchange`,
            `evaluate`, `done`.
    """

    after_step: Callable[[int, int], None] | None = None
    before_commit: Callable[[Commit], None] | None = None
    at: Callable[[str, int, int], None] | None = None
    built: Callable[[nn.Module], None] | None = None
