"""The cursor: the whole position of a run in its data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Cursor:
    """The next step to do: `step` (from 0) of `epoch` (from 0)."""

    epoch: int = 0
    step: int = 0

    @classmethod
    def at(cls, global_step: int, steps_per_epoch: int) -> Cursor:
        """The cursor after `global_step` finished steps."""
        return cls(*divmod(global_step, steps_per_epoch))

    def next(self, steps_per_epoch: int) -> Cursor:
        """The cursor one step later."""
        return Cursor(self.epoch, self.step + 1) if self.step + 1 < steps_per_epoch else Cursor(self.epoch + 1, 0)
