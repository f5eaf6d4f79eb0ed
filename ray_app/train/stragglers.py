"""Who holds the steps up: found in what every worker tells of its time in their tables, so by all ranks alike, without
asking anybody.

Steps are looked at in windows. A worker is slow if it has kept the others waiting, for long and by much, in several
windows in a row; one that held up a single step is told of, too. Logical workers may move from slow workers to fast
ones, which changes no bits; medians, limits and pauses that double keep noise from moving them.

What is told of the time of the workers: which of them is slow and why, that logical workers moved, and what each did
with its time.
"""

from __future__ import annotations

import os
import platform
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from ray_app.plan.assignment import blocks_by_speed
from ray_app.reduction.base import World, gather
from ray_app.runlog.journal import put_event
from ray_app.task.device import describe
from ray_app.train.job import Job
from ray_app.train.step.timing import TimeBreakdown, TimeValues

Seconds = npt.NDArray[np.float64]
"""Of each rank, shape (W,), or in each step, shape (steps, W)."""
Cause = Literal["compute", "data", "other"]
_CAUSES: tuple[Cause, ...] = ("compute", "data", "other")

_STEP = TimeBreakdown._fields.index("step_s")
_WARM_UP = 3
_LEAST_STEPS, _LEAST_S = 10, 0.2
_SLOW, _FINE = 1.3, 1.15
"""Times as long as the others from which a worker is slow, and below which it no longer is."""
_LOST = 0.1
"""The part of a step that all must lose by a worker that is slow."""
_IN_A_ROW, _LOOKED_BACK = 3, 8
_STALL_S, _STALL, _MOST_STALLS = 1.0, 5.0, 10
_WORTH, _GAINED = 0.9, 0.98
"""What is left of a step, expected and then found, for a move to be worth it."""
_SETTLED = 2
_LONGEST_PAUSE = 64
"""Windows between two moves, at most."""
_MANY = 32
_NOTHING = 1e-12


@dataclass(frozen=True)
class Straggler:
    """A worker that keeps the others waiting.

    Args:
        rank: Which.
        cause: Whether it computes for longer than others, or waits for its data, or does something else; see
            `TimeBreakdown`.
        times: How many times as long as the others it takes.
        lost: The part of each step that all lose by it; for a single step the seconds.
        what: `slowed`: for many steps now; `straggler_recovered`: no longer; `stalled`: in a single step.
    """

    rank: int
    cause: Cause
    times: float
    lost: float
    what: Literal["slowed", "straggler_recovered", "stalled"]


class StragglerDetector:
    """How the workers of a generation keep up with each other.

    Args:
        world: They.
        balances: Whether logical workers move to where they are done sooner.

    Attributes:
        shares: What each rank should play from now on; None: what it does.
        slow: The slow workers, by rank, as they are now.
        imbalance: What the busiest worker has to do in a step, in times of the mean; None before the first window.
    """

    def __init__(self, world: World, balances: bool) -> None:
        self._balances = balances
        self.slow: dict[int, Straggler] = {}
        self.imbalance: float | None = None
        self._stalls = self._moves = 0
        self._before: tuple[tuple[range, ...], float] | None = None
        self._totals = np.zeros((4, world.size))
        self.begin(world)

    def begin(self, world: World) -> None:
        """Goes on after logical workers have moved."""
        self._blocks = [world.assigned_to(rank) for rank in range(world.size)]
        self._sizes = np.array([len(block) for block in self._blocks], dtype=np.float64)
        self.shares: tuple[range, ...] | None = None
        self._left, self._window, self._window_s = _WARM_UP, list[list[TimeValues]](), 0.0
        self._data: deque[Seconds] = deque(maxlen=_LOOKED_BACK)
        self._rows = dict.fromkeys(range(world.size), 0)
        self._better, self._seen = 0, 0
        self._step_s: list[float] = []

    def add(self, spent: Sequence[TimeValues]) -> list[Straggler] | None:
        """Takes note of a step; returns what a window of steps has shown if it ends a window.

        Args:
            spent: Of every logical worker the time of its rank, see `TimeBreakdown`.
        """
        if self._left:
            self._left -= 1
            return None
        self._window.append([spent[block.start] for block in self._blocks])
        self._window_s += spent[0][_STEP]
        if len(self._window) < _LEAST_STEPS or self._window_s < _LEAST_S:
            return None
        compute, data, other, step = np.moveaxis(np.array(self._window), 2, 0)
        self._window, self._window_s = [], 0.0
        return self._look(np.stack([compute * self._sizes, data, other]), step[:, 0])

    def _look(self, spent: Seconds, step: Seconds) -> list[Straggler]:
        """Looks at a window: seconds for each cause, step and rank, and of the steps."""
        step_s, usual = float(np.median(step)), np.median(spent, 1)
        self._data.append(spent[1].mean(0))  # waits are rare and long: all but those of the worst window
        usual[1] = (np.sum(self._data, 0) - np.max(self._data, 0)) / max(1, len(self._data) - 1)
        whole, unit = usual.sum(0), usual[0] / self._sizes
        self.imbalance = float(whole.max() / max(_NOTHING, whole.mean()))
        self._totals += np.vstack([spent.sum(1), np.full(len(unit), step.sum())])
        found = [*self._stalled(spent, step_s), *self._slowed(usual, unit, step_s)]
        if self._balances:
            self._consider(unit, step_s)
        return found

    def _stalled(self, spent: Seconds, step_s: float) -> list[Straggler]:
        """The worst of the steps in which one worker was far behind the others."""
        busy = spent.sum(0)
        second, first = np.partition(busy, -2, 1)[:, -2:].T
        at = int((first - second).argmax())
        rank, over_s = int(busy[at].argmax()), float(first[at] - second[at])
        if over_s < max(_STALL_S, _STALL * step_s) or self._stalls == _MOST_STALLS or rank in self.slow:
            return []
        self._stalls += 1
        return [
            Straggler(rank, _CAUSES[int(spent[:, at, rank].argmax())], float(first[at] / second[at]), over_s, "stalled")
        ]

    def _slowed(self, usual: Seconds, unit: Seconds, step_s: float) -> list[Straggler]:
        whole, found = usual.sum(0), list[Straggler]()
        over = whole - median_of_others(whole)
        causes = np.argmax([each - median_of_others(each) for each in usual], 0)
        times = np.where(
            causes == 0,
            unit / np.maximum(_NOTHING, median_of_others(unit)),
            whole / np.maximum(_NOTHING, median_of_others(whole)),
        )
        for rank, (ratio, lost) in enumerate(zip(times.tolist(), (over / max(_NOTHING, step_s)).tolist(), strict=True)):
            known = self.slow.get(rank)
            changes = ratio < _FINE or lost < _LOST / 2 if known else ratio > _SLOW and lost > _LOST
            self._rows[rank] = self._rows[rank] + 1 if changes else 0
            cause = known.cause if known else _CAUSES[causes[rank]]
            now = Straggler(rank, cause, ratio, max(0.0, lost), "slowed")
            if known:
                self.slow[rank] = now
            if self._rows[rank] < _IN_A_ROW:
                continue
            self._rows[rank] = 0
            if known:
                found.append(replace(self.slow.pop(rank), what="straggler_recovered"))
            else:
                found.append(now)
                self.slow[rank] = now
        return found

    def _consider(self, unit: Seconds, step_s: float) -> None:
        """Moves logical workers if two windows have said that it is worth it, or back if it was not."""
        self._seen += 1
        self._step_s.append(step_s)
        if self._before is not None and self._seen == _SETTLED:
            shares, before_s = self._before
            self._before = None
            if float(np.median(self._step_s)) > _GAINED * before_s:
                self.shares, self._balances = shares, False
                return
        wanted = blocks_by_speed(unit.tolist(), self._blocks[-1].stop)
        sizes = np.array([len(block) for block in wanted])
        self._better = self._better + 1 if (sizes * unit).max() < _WORTH * (self._sizes * unit).max() else 0
        if self._better >= _SETTLED and self._seen >= min(_LONGEST_PAUSE, 1 << self._moves):
            self._before = tuple(self._blocks), float(np.median(self._step_s[-_SETTLED:]))
            self._moves += 1
            self.shares = wanted

    def spent(self) -> list[dict[str, float]]:
        """What each worker has done with its time since the generation began, in parts of it; none if that was too
        short to tell.
        """
        *parts, whole = self._totals
        if not whole.any():
            return []
        named = [dict(zip(_CAUSES, each.tolist(), strict=True)) for each in (np.stack(parts) / whole).T.round(4)]
        return [each | {"waits": round(max(0.0, 1 - sum(each.values())), 4)} for each in named]


def median_of_others(values: Seconds) -> Seconds:
    """For each of several values the median of the others; of many that of all."""
    if len(values) > _MANY:
        return np.full(len(values), np.median(values))
    return np.array([np.median(np.delete(values, i)) for i in range(len(values))])


_MOST_TOLD = 64


class StragglerReporter:
    """The `Pace` of a generation, where its workers compute on their own until they meet: not with `fsdp`, nor of one
    worker.

    Args:
        job: The run.
        world: The workers.
        hosts: Their addresses, if they are known.
        device: Where this one computes.

    Attributes:
        shares, imbalance: See `Pace`.
        slow: Of each slow worker, by its rank, how many times as long as the others it takes.
    """

    def __init__(self, job: Job, world: World, hosts: Sequence[str], device: torch.device) -> None:
        self._job, self._world, self._hosts, self._device = job, world, hosts, device
        self._pace = (
            StragglerDetector(world, job.config.scaling.load_balancing == "speed")
            if world.size > 1 and not world.strided
            else None
        )
        self.shares: tuple[range, ...] | None = None
        self.imbalance: float | None = None
        self.slow: dict[str, float] = {}
        self._step = 0

    def add(self, step: int, spent: Sequence[TimeValues]) -> None:
        """Takes note of the finished step of a number; a collective if that tells something.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        if self._pace is None:
            return
        self._step, pace = step, self._pace
        if (found := pace.add(spent)) is None:
            return
        self.shares, self.imbalance = pace.shares, pace.imbalance
        self.slow = {str(rank): round(slow.times, 2) for rank, slow in pace.slow.items()}
        if found:
            self._tell(found)

    def _tell(self, found: list[Straggler]) -> None:
        places = gather(
            {"name": platform.node(), "pid": os.getpid(), "device": describe(self._device)["device"]}, self._world
        )
        if self._world.rank == 0:
            for slow in found:
                details = asdict(slow) | {"host": self._host(slow.rank)} | places[slow.rank]
                put_event(self._job.paths, details.pop("what"), self._job.fence, step=self._step, **details)

    def _host(self, rank: int) -> str:
        return self._hosts[rank] if self._hosts else ""

    def begin(self, world: World) -> None:
        """Goes on after logical workers have moved."""
        assert self._pace is not None
        if world.rank == 0:
            before, after = ([len(w.assigned_to(rank)) for rank in range(w.size)] for w in (self._world, world))
            put_event(self._job.paths, "balanced", self._job.fence, step=self._step, before=before, after=after)
        self._world, self.shares = world, None
        self._pace.begin(world)

    def end(self) -> None:
        """Tells what the workers did with their time."""
        if self._pace is None or self._world.rank or not (spent := self._pace.spent()):
            return
        workers: list[dict[str, Any]] = [
            {"rank": rank, "host": self._host(rank)} | each for rank, each in enumerate(spent)
        ]
        workers.sort(key=lambda worker: worker["waits"])
        put_event(self._job.paths, "time_breakdown", self._job.fence, step=self._step, workers=workers[:_MOST_TOLD])
