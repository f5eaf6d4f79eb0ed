"""The schedulers that promote the trials of a study: synchronous and asynchronous successive halving, or the median.

The scheduler is a state machine that neither reads files nor knows time: `put` adds a result and returns the trials
that it promotes. Rungs do not affect each other's decisions, except that the promotions of a rung, in their order, are
the entrants of the next one. In the fixed order a rung takes results in the order of its entrants. So the promotions
depend on the results alone, and not on the order in which they come.

Sources: successive halving, Jamieson and Talwalkar 2016; ASHA, Li et al., MLSys 2020; median, Golovin et al., "Google
Vizier", KDD 2017, section 3.2.2.
"""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

_MIN_AVERAGES = 3
"""Earlier trials in a rung without which the median stops no trial."""
Key = tuple[float, int]
"""What orders the trials of a rung: the smaller, the better."""


class Promotion(NamedTuple):
    """A trial that goes on to a rung; the first rung is 0."""

    trial: int
    rung: int


def rung_epochs(kind: str, eta: int, min_epochs: int, epochs: int) -> tuple[int, ...]:
    """Returns the number of epochs that a trial has trained at the end of each rung, of which the last is `epochs`."""
    rungs = list[int]()
    while kind != "none" and min_epochs * eta <= epochs:
        rungs.append(min_epochs)
        min_epochs *= eta
    return (*rungs, epochs)


@dataclass
class _Rung:
    """The trials that have come to a rung.

    Args:
        size: Number of trials that will come, if it is known before they have.
    """

    size: int | None = None
    entrants: list[int] = field(default_factory=list)
    taken: int = 0
    ranked: list[Key] = field(default_factory=list)
    promoted: set[int] = field(default_factory=set)


class Scheduler:
    """Decides on the trials of a study.

    Args:
        kind: `halving`, `asha`, `median` or `none`.
        eta: One over the share of trials that is promoted.
        num_rungs: Number of rungs.
        num_trials: Number of trials.
        mode: Whether a higher (`max`) or a lower (`min`) result is better.
        is_fixed: Whether decisions do not depend on the order in which results come.
    """

    def __init__(self, kind: str, eta: int, num_rungs: int, num_trials: int, mode: str, is_fixed: bool) -> None:
        self._is_synchronous, self._is_median = kind in ("halving", "none"), kind == "median"
        self._eta, self._mode = eta, mode
        self._is_fixed = is_fixed or self._is_synchronous
        self._results = dict[Promotion, Key]()
        self._failed = set[Promotion]()
        self._rungs = [_Rung() for _ in range(num_rungs)]
        size = num_trials
        for rung in self._rungs if self._is_synchronous else ():
            rung.size = size
            size = max(1, size // eta)
        self._rungs[0].entrants = list(range(num_trials))

    def put(self, trial: int, rung: int, value: float | None) -> list[Promotion]:
        """Adds the result of a trial in a rung, None for a failure, and returns the trials that are promoted now."""
        job = Promotion(trial, rung)
        if value is None:
            self._failed.add(job)
        is_worst = value is None or math.isnan(value)
        # A trial that failed is not ranked at all, other than one that reached a NaN.
        number = math.inf if is_worst else -float(value or 0) if self._mode == "max" else float(value or 0)
        self._results[job] = (number, trial)
        if not self._is_fixed and trial in self._rungs[rung].entrants:
            # The order of arrival becomes the order of the entrants.
            entrants, taken = self._rungs[rung].entrants, self._rungs[rung].taken
            entrants.remove(trial)
            entrants.insert(taken, trial)
        return self._advance(rung)

    def _advance(self, number: int) -> list[Promotion]:
        """Takes the results of a rung that can be taken, and promotes; also those of the rungs that follow from it."""
        if number + 1 == len(self._rungs):
            return []
        rung, chosen = self._rungs[number], list[int]()
        while (taken := self._next_result(number)) is not None:
            rung.entrants.remove(taken)
            rung.entrants.insert(rung.taken, taken)
            rung.taken += 1
            if Promotion(taken, number) not in self._failed:
                insort(rung.ranked, self._results[Promotion(taken, number)])
                if self._is_median and self._reaches_median(taken, number):
                    chosen.append(taken)
            chosen += self._choose(number)
        # A rung also closes when the one below it does, without a result.
        chosen += self._choose(number)
        self._rungs[number + 1].entrants += chosen
        # The result of an earlier start may be there already.
        return [*(Promotion(trial, number + 1) for trial in chosen), *self._advance(number + 1)]

    def _next_result(self, number: int) -> int | None:
        """Returns the entrant with the result that the rung takes next, None if it has to wait.

        A synchronous rung takes the results in any order.
        """
        rung = self._rungs[number]
        waiting = rung.entrants[rung.taken :] if self._is_synchronous else rung.entrants[rung.taken : rung.taken + 1]
        return next((trial for trial in waiting if Promotion(trial, number) in self._results), None)

    def _reaches_median(self, trial: int, number: int) -> bool:
        """Returns whether the best result of a trial is not worse than the median of the averages of earlier ones.

        An average is that of all results of a trial up to this rung; those without a number do not count.
        """
        ranked = [one for _, one in self._rungs[number].ranked]
        results = {one: [self._results[Promotion(one, rung)][0] for rung in range(number + 1)] for one in ranked}
        best = min(results.pop(trial))
        averages = [average for numbers in results.values() if math.isfinite(average := fmean(numbers))]
        return len(averages) < _MIN_AVERAGES or best <= median(averages)

    def _choose(self, number: int) -> list[int]:
        """Returns the trials that a rung promotes by their rank in the results taken, without those before."""
        if self._is_median:
            return []
        rung, is_closed = self._rungs[number], self._is_closed(number)
        if rung.size is None:
            best, unknown = rung.taken // self._eta, 0
        else:
            # Fewer trials than expected come if trials fail.
            size = rung.taken if is_closed else rung.size
            best, unknown = size // self._eta, size - rung.taken
        if is_closed and not rung.promoted:
            best = max(1, best)
        # In a synchronous rung a trial is promoted once it stays among the best whatever the others will reach.
        chosen = [trial for _, trial in rung.ranked[: max(0, best - unknown)] if trial not in rung.promoted]
        rung.promoted.update(chosen)
        return chosen

    def _is_closed(self, number: int) -> bool:
        """Returns whether no more result comes to a rung."""
        return all(rung.taken == len(rung.entrants) for rung in self._rungs[: number + 1])

    def waiting(self) -> list[Promotion]:
        """Returns what has no result yet, the highest rung first, and within a rung in the order of its entrants."""
        return [
            job
            for number in reversed(range(len(self._rungs)))
            for trial in self._rungs[number].entrants
            if (job := Promotion(trial, number)) not in self._results
        ]

    def is_decided(self) -> bool:
        """Returns whether all trials have ended and none is promoted any more."""
        return not self.waiting()

    def winner(self) -> Promotion | None:
        """Returns the best trial of the highest rung that one has finished without a failure; None if all failed."""
        for number in reversed(range(len(self._rungs))):
            jobs = [Promotion(trial, number) for trial in self._rungs[number].entrants]
            ended = [job for job in jobs if job in self._results and job not in self._failed]
            if ended:
                return min(ended, key=self._results.__getitem__)
        return None
