"""Who steps together, as the loop sees it; `cluster.rendezvous.membership` is a Ray Train worker's, `Alone` that of a process alone."""

from __future__ import annotations

from typing import Any, Protocol

from ray_app.record.progress.segments import StepRecord
from ray_app.train.group.messages import Flags, Phase


class LeavingError(Exception):
    """This worker has to leave while it waits for a generation."""


class Membership(Protocol):
    """What the loop needs to know about the other workers."""

    recovers: bool
    """Whether a lost peer leads to another generation; otherwise the group is started again from outside."""

    def generation(self, step: int, lost: bool) -> Any:
        """A context that yields the `World` of a new generation and what formed it, and leaves its process group at the end.

        Args:
            step: Finished steps of this worker, -1 without a state.
            lost: Whether the last generation broke.
        """
        ...

    def flags(self) -> Flags:
        """What is to be said to all workers in the next exchange."""
        ...

    def is_leaving(self) -> bool:
        """Whether this worker has to end when its generation does."""
        ...

    def enter(self, phase: Phase) -> None:
        """Says what this worker is doing now."""
        ...

    def moved(self) -> None:
        """Says that this worker moves on, although no step is finished."""
        ...

    def report(self, step: int, record: StepRecord | None, recorded: int) -> None:
        """Says how far this worker is; returns at once.

        Args:
            step: Its finished steps.
            record: Rank 0: the newest of them.
            recorded: Rank 0: the last step whose record is on storage.
        """
        ...

    def recorded(self) -> int:
        """The last step whose record is on storage, as far as is known here."""
        ...
