"""Who does what with parameter servers: pure bookkeeping of units, a unit being one logical worker's share of one step.

A logical worker's steps are done one after the other, by the worker that holds it, so that reading ahead pays. Its holder changes only when
workers come and go. How far it may be ahead of the slowest is bounded: Ho et al., "More Effective Distributed ML via a Stale Synchronous
Parallel Parameter Server", NIPS 2013.
"""

from __future__ import annotations


class Units:
    """What is done, by whom, and what may be done next.

    Args:
        logical_workers: L.
        first: The first step to do, counted from 0.
        staleness: Steps that a logical worker may be ahead of the slowest.
    """

    def __init__(self, logical_workers: int, first: int, staleness: int) -> None:
        self._staleness = staleness
        self._next = [first] * logical_workers
        self._holder: list[str | None] = [None] * logical_workers
        self._running: dict[int, str] = {}
        self.begun = first
        """Steps of which a unit was handed out; whoever got it may have sent its gradient before it was lost."""
        self.workers: list[str] = []
        """Those who asked and were not lost since."""

    @property
    def complete(self) -> int:
        """Steps of which every unit is done."""
        return min(self._next)

    def take(self, worker: str, end: int) -> tuple[int, int] | None:
        """The next unit for a worker, who has nothing else to do any more.

        Args:
            worker: Who.
            end: The first step not to be begun yet.

        Returns:
            Step and logical worker; None: it has to wait.
        """
        self._running = {v: w for v, w in self._running.items() if w != worker}
        if worker not in self.workers:
            self.workers.append(worker)
        self._claim(worker)
        end = min(end, self.complete + self._staleness + 1)
        ready = [(self._next[v], v) for v, held in enumerate(self._holder) if held == worker and self._next[v] < end]
        if not ready:
            return None
        step, logical_worker = min(ready)
        self._running[logical_worker] = worker
        self.begun = max(self.begun, step + 1)
        return step, logical_worker

    def finish(self, step: int, logical_worker: int) -> bool:
        """A unit is done; returns whether that is new."""
        if self._next[logical_worker] != step:
            return False
        self._next[logical_worker] += 1
        self._running.pop(logical_worker, None)
        return True

    def held_by(self, worker: str) -> tuple[int, ...]:
        """The logical workers that a worker holds."""
        return tuple(v for v, held in enumerate(self._holder) if held == worker)

    def lose(self, worker: str) -> None:
        """A worker is gone; what it held is for the others."""
        if worker in self.workers:
            self.workers.remove(worker)
        self._holder = [None if held == worker else held for held in self._holder]
        self._running = {v: w for v, w in self._running.items() if w != worker}

    def _claim(self, worker: str) -> None:
        """Takes a fair share of what nobody holds, and takes over from who holds two more."""
        most = -(-len(self._holder) // len(self.workers))
        for v, held in enumerate(self._holder):
            if held is None and self._count(worker) < most:
                self._holder[v] = worker
        for v, held in reversed(list(enumerate(self._holder))):
            if held not in (None, worker) and v not in self._running and self._count(held) - self._count(worker) >= 2:
                self._holder[v] = worker

    def _count(self, worker: str | None) -> int:
        return self._holder.count(worker)
