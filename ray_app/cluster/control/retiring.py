"""Whether a worker that stays slow has to leave: a decision with its reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

_FASTER = 1.1
"""Times by which a step must become shorter for a worker to be left out."""


@dataclass(frozen=True)
class Retirement:
    """A decision.

    Args:
        worker: Id of the worker that has to leave.
        times: How many times as long as the others it takes.
        reason: Why, for the record.
    """

    worker: str
    times: float
    reason: str


class Retiring:
    """Who has been slow since when, and who had to leave for it.

    Args:
        after_s: Seconds for which a worker must have been slow; None: nobody has to leave.
        logical_workers: L.
        min_workers: Fewest to train with.
        most: How many may have to leave.
        clock: Tells the seconds.

    Attributes:
        retired: Ids of those who had to leave.
    """

    def __init__(
        self, after_s: float | None, logical_workers: int, min_workers: int, most: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._after_s, self._logical, self._least, self._most, self._clock = after_s, logical_workers, min_workers, most, clock
        self._since_s: dict[str, float] = {}
        self.retired: set[str] = set()

    @property
    def is_on(self) -> bool:
        """Whether anybody may still have to leave."""
        return self._after_s is not None and len(self.retired) < self._most

    def decide(self, slow: Mapping[str, float], workers: int, ready: int, room: Callable[[str], int]) -> Retirement | None:
        """Who has to leave now, one at a time: if another can take its place, or if all are faster without it.

        Args:
            slow: How many times as long as the others the slow workers take, by their ids.
            workers: How many train.
            ready: How many others are ready to join.
            room: For how many more there is room on other nodes than a worker's own, by its id.
        """
        now_s = self._clock()
        self._since_s = {worker: self._since_s.get(worker, now_s) for worker in slow}
        late = [w for w, since_s in self._since_s.items() if w not in self.retired and now_s - since_s >= (self._after_s or 0.0)]
        if not self.is_on or not late:
            return None
        worker = max(late, key=lambda w: slow[w])
        told = f"{slow[worker]:.1f} times as slow as the others for {now_s - self._since_s[worker]:.0f} s; "
        if not ready and workers - 1 < max(1, self._least):
            return None  # the others would wait until somebody has come, if the room is still there then
        if ready or room(worker):
            reason = "another takes its place"
        else:
            more = ceil(self._logical / (workers - 1)) / ceil(self._logical / workers)
            if slow[worker] < _FASTER * more:
                return None
            reason = f"without it a step takes {more / slow[worker]:.2f} of the time"
        self.retired.add(worker)
        return Retirement(worker, slow[worker], told + reason)
