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
        self._behind = logical_workers
        self._holder: list[str | None] = [None] * logical_workers
        self._held: dict[str, set[int]] = {}
        self._running: dict[int, str] = {}
        self._doing: dict[str, int] = {}
        self._is_even = True
        self.complete = first
        """Steps of which every unit is done."""
        self.begun = first
        """Steps of which a unit was handed out; whoever got it may have sent its gradient before it was lost."""
        self.workers: list[str] = []
        """Those who asked and were not lost since."""

    def take(self, worker: str, end: int) -> tuple[int, int] | None:
        """The next unit for a worker, who has nothing else to do any more.

        Args:
            worker: Who.
            end: The first step not to be begun yet.

        Returns:
            Step and logical worker; None: it has to wait.
        """
        self._drop(worker)
        if worker not in self._held:
            self.workers.append(worker)
            self._held[worker], self._is_even = set(), False
        if not self._is_even:
            self._claim(worker)
        end = min(end, self.complete + self._staleness + 1)
        ready = [(self._next[v], v) for v in self._held[worker] if self._next[v] < end]
        if not ready:
            return None
        step, logical_worker = min(ready)
        self._running[logical_worker], self._doing[worker] = worker, logical_worker
        self.begun = max(self.begun, step + 1)
        return step, logical_worker

    def finish(self, step: int, logical_worker: int) -> bool:
        """A unit is done; returns whether that is new."""
        if self._next[logical_worker] != step:
            return False
        self._next[logical_worker] += 1
        if step == self.complete:
            self._behind -= 1
            if not self._behind:
                self.complete = min(self._next)
                self._behind = self._next.count(self.complete)
        if (worker := self._running.get(logical_worker)) is not None:
            self._drop(worker)
        return True

    def held_by(self, worker: str) -> tuple[int, ...]:
        """The logical workers that a worker holds."""
        return tuple(sorted(self._held.get(worker, ())))

    def lose(self, worker: str) -> None:
        """A worker is gone; what it held is for the others."""
        self._drop(worker)
        if worker in self._held:
            self.workers.remove(worker)
            self._is_even = False
            for v in self._held.pop(worker):
                self._holder[v] = None

    def _drop(self, worker: str) -> None:
        """A worker works at nothing any more."""
        if worker in self._doing:
            del self._running[self._doing.pop(worker)]

    def _claim(self, worker: str) -> None:
        """Takes a fair share of what nobody holds, and takes over from who holds two more; nothing, once all hold as many or one more."""
        mine, most = self._held[worker], -(-len(self._holder) // len(self.workers))
        for v, held in enumerate(self._holder):
            if held is None and len(mine) < most:
                self._give(v, worker)
        for v, held in reversed(list(enumerate(self._holder))):
            if held not in (None, worker) and v not in self._running and len(self._held[held]) - len(mine) >= 2:
                self._held[held].discard(v)
                self._give(v, worker)
        counts = [len(each) for each in self._held.values()]
        self._is_even = sum(counts) == len(self._holder) and max(counts) - min(counts) < 2

    def _give(self, v: int, worker: str) -> None:
        self._holder[v] = worker
        self._held[worker].add(v)
