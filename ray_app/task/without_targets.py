"""Decoding of rows without their targets, for a prediction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ray_app.task.base import Rows, Task
from ray_app.task.ragged import Arrays


@dataclass(frozen=True)
class WithoutTargets:
    """Decodes rows without their targets: `decode` of the prepared task gets zeros for these."""

    task: Task

    @property
    def columns(self) -> list[str]:
        """The columns to read: those of the task without its targets."""
        return [name for name in self.task.columns() if name not in self.task.targets()]

    def __call__(self, rows: Rows) -> Arrays:
        """Decodes rows as `Task.decode` does."""
        count = len(next(iter(rows.values())))
        targets = [name for name in self.task.columns() if name in self.task.targets()]
        return self.task.decode(rows | {name: np.zeros(count, np.int64) for name in targets})
