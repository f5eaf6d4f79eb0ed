"""The membership of a process that trains alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray_app.exchange.exchange import World
from ray_app.record.progress.segments import StepRecord
from ray_app.train.group.messages import Flags, Formed, Phase


class Alone:
    """The membership of the only worker, see `Membership`.

    Args:
        logical_workers: L, all of which it plays.
        stops: Tells whether to stop.
    """

    recovers = False

    def __init__(self, logical_workers: int, stops: Callable[[], bool]) -> None:
        self._logical_workers, self._stops = logical_workers, stops
        self._recorded = 0
        self.newest: StepRecord | None = None
        """The newest finished step."""

    @contextmanager
    def generation(self, step: int, lost: bool) -> Iterator[tuple[World, Formed]]:
        """See `Membership.generation`; there is one."""
        del step, lost
        yield World(0, 1, self._logical_workers), Formed(1, 0, 1, "", 0)

    def flags(self) -> Flags:
        """See `Membership.flags`."""
        return Flags.STOP if self._stops() else Flags(0)

    def is_leaving(self) -> bool:
        """See `Membership.is_leaving`."""
        return False

    def enter(self, phase: Phase) -> None:
        """See `Membership.enter`; nobody asks."""

    def moved(self) -> None:
        """See `Membership.moved`; nobody waits."""

    def report(self, step: int, record: StepRecord | None, recorded: int) -> None:
        """See `Membership.report`."""
        del step
        self.newest, self._recorded = record or self.newest, recorded

    def recorded(self) -> int:
        """See `Membership.recorded`."""
        return self._recorded
