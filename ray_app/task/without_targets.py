"""Rows to predict on, which need no targets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ray_app.task.base import Rows, Task
from ray_app.task.rows.ragged import Arrays


@dataclass(frozen=True)
class WithoutTargets:
    """Decodes rows whose targets were not read: zeros stand in for them.

    Args:
        task: The prepared task.
    """

    task: Task

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        return [name for name in self.task.columns() if name not in self.task.targets()]

    def __call__(self, rows: Rows) -> Arrays:
        """See `Task.decode`."""
        count = len(next(iter(rows.values())))
        targets = [name for name in self.task.columns() if name in self.task.targets()]
        return self.task.decode(rows | {name: np.zeros(count, np.int64) for name in targets})
