"""Straggler detection from the time that every worker reports with each step, and load balancing between workers.

All ranks have the same reports with the step statistics, so all detect the same stragglers without another collective.
Steps are examined in windows. A worker is a straggler if it has made the others wait, long enough, in several windows
in a row; a worker that stalled a single step is reported, too. Logical workers may move from slow workers to fast ones,
which changes no bit of the result; medians, thresholds and pauses that double keep noise from moving them.

`StragglerReporter` records which worker is slow and why, how logical workers moved, and where each worker's time went.
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
"""Seconds of each rank, shape (W,), or of each rank in each step, shape (steps, W)."""
Cause = Literal["compute", "data", "other"]
_CAUSES: tuple[Cause, ...] = ("compute", "data", "other")

_STEP = TimeBreakdown._fields.index("step_s")
_WARM_UP_STEPS = 3
_MIN_WINDOW_STEPS = 10
_MIN_WINDOW_S = 0.2
_SLOW_RATIO = 1.3
"""Time relative to the other workers above which a worker is a straggler."""
_RECOVERED_RATIO = 1.15
"""Time relative to the other workers below which it no longer is one."""
_MIN_LOST_FRACTION = 0.1
"""Fraction of each step that all workers must lose by a straggler."""
_WINDOWS_IN_A_ROW = 3
_DATA_WINDOWS = 8
_MIN_STALL_S = 1.0
_STALL_STEPS = 5.0
"""Duration of a stall, in medians of the duration of a step."""
_MAX_STALLS = 10
"""Stalls that are reported in a generation."""
_WORTH_FRACTION = 0.9
"""Fraction of the computing time that may be left, by prediction, for a move of logical workers to be made."""
_GAIN_FRACTION = 0.98
"""Fraction of the duration of a step that may be left after a move for it not to be undone."""
_SETTLING_WINDOWS = 2
_MAX_PAUSE_WINDOWS = 64
"""Most windows between two moves."""
_MANY_VALUES = 32
_EPSILON = 1e-12
_MAX_REPORTED_WORKERS = 64


@dataclass(frozen=True)
class Straggler:
    """A worker that makes the others wait.

    Args:
        rank: Rank of the worker.
        cause: `compute` if it computes for longer than others, `data` if it waits for its data, `other` for anything
            else; see `TimeBreakdown`.
        times: Its time relative to that of the other workers.
        lost: Fraction of each step that all workers lose by it; for a stall the seconds.
        event: `slowed` if it has been slow for many steps, `straggler_recovered` if it no longer is, `stalled` if it
            stalled a single step.
    """

    rank: int
    cause: Cause
    times: float
    lost: float
    event: Literal["slowed", "straggler_recovered", "stalled"]


class StragglerDetector:
    """Detects the stragglers of a generation and proposes moves of logical workers.

    Args:
        world: The workers of the generation.
        balances: Whether to propose moves of logical workers to ranks that complete them sooner.

    Attributes:
        shares: The logical workers that each rank should run from now on; None for the present assignment.
        slow: The present stragglers by rank.
        imbalance: Time of the busiest worker in a step relative to the mean; None before the first window.
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
        """Restarts the windows after logical workers have moved."""
        self._blocks = [world.assigned_to(rank) for rank in range(world.size)]
        self._sizes = np.array([len(block) for block in self._blocks], dtype=np.float64)
        self.shares: tuple[range, ...] | None = None
        self._warm_up_left = _WARM_UP_STEPS
        self._window = list[list[TimeValues]]()
        self._window_s = 0.0
        self._data_waits: deque[Seconds] = deque(maxlen=_DATA_WINDOWS)
        self._windows_in_a_row = dict.fromkeys(range(world.size), 0)
        self._better_windows = 0
        self._num_windows = 0
        self._step_s: list[float] = []

    def add(self, times: Sequence[TimeValues]) -> list[Straggler] | None:
        """Adds a step.

        Args:
            times: Time of every logical worker's rank, see `TimeBreakdown`.

        Returns:
            The events of the window of steps that this step completes, perhaps none; None within a window.
        """
        if self._warm_up_left:
            self._warm_up_left -= 1
            return None
        self._window.append([times[block.start] for block in self._blocks])
        self._window_s += times[0][_STEP]
        if len(self._window) < _MIN_WINDOW_STEPS or self._window_s < _MIN_WINDOW_S:
            return None
        compute, data, other, step = np.moveaxis(np.array(self._window), 2, 0)
        self._window, self._window_s = [], 0.0
        return self._examine(np.stack([compute * self._sizes, data, other]), step[:, 0])

    def _examine(self, seconds: Seconds, step: Seconds) -> list[Straggler]:
        """Examines a window of steps; returns its events.

        Args:
            seconds: Time of each rank by cause and step, shape (3, steps, W).
            step: Duration of each step, shape (steps,).
        """
        step_s, usual = float(np.median(step)), np.median(seconds, 1)
        # Waits for data are rare and long, so a median would miss them: their mean over the recent windows counts,
        # without the worst window.
        self._data_waits.append(seconds[1].mean(0))
        usual[1] = (np.sum(self._data_waits, 0) - np.max(self._data_waits, 0)) / max(1, len(self._data_waits) - 1)
        busy_s = usual.sum(0)
        logical_worker_s = usual[0] / self._sizes
        self.imbalance = float(busy_s.max() / max(_EPSILON, busy_s.mean()))
        self._totals += np.vstack([seconds.sum(1), np.full(len(logical_worker_s), step.sum())])
        events = [*self._detect_stall(seconds, step_s), *self._detect_stragglers(usual, logical_worker_s, step_s)]
        if self._balances:
            self._consider_move(logical_worker_s, step_s)
        return events

    def _detect_stall(self, seconds: Seconds, step_s: float) -> list[Straggler]:
        """Returns the worst of the steps in which one worker was far behind all others, if there is one."""
        busy_s = seconds.sum(0)
        second, first = np.partition(busy_s, -2, 1)[:, -2:].T
        at = int((first - second).argmax())
        rank, lost_s = int(busy_s[at].argmax()), float(first[at] - second[at])
        if lost_s < max(_MIN_STALL_S, _STALL_STEPS * step_s) or self._stalls == _MAX_STALLS or rank in self.slow:
            return []
        self._stalls += 1
        cause = _CAUSES[int(seconds[:, at, rank].argmax())]
        return [Straggler(rank, cause, float(first[at] / second[at]), lost_s, "stalled")]

    def _detect_stragglers(self, usual: Seconds, logical_worker_s: Seconds, step_s: float) -> list[Straggler]:
        """Returns the workers that have become stragglers or are none any more.

        Args:
            usual: Usual time of each rank by cause, shape (3, W).
            logical_worker_s: Computing time of each rank for one logical worker, shape (W,).
            step_s: Median duration of a step.
        """
        busy_s, events = usual.sum(0), list[Straggler]()
        lost_s = busy_s - median_of_others(busy_s)
        causes = np.argmax([of_cause - median_of_others(of_cause) for of_cause in usual], 0)
        # Computing is compared by the logical worker, since ranks may run different numbers of them.
        ratios = np.where(
            causes == 0,
            logical_worker_s / np.maximum(_EPSILON, median_of_others(logical_worker_s)),
            busy_s / np.maximum(_EPSILON, median_of_others(busy_s)),
        )
        lost_fractions = lost_s / max(_EPSILON, step_s)
        for rank, (ratio, lost) in enumerate(zip(ratios.tolist(), lost_fractions.tolist(), strict=True)):
            straggler = self.slow.get(rank)
            changes = (
                ratio < _RECOVERED_RATIO or lost < _MIN_LOST_FRACTION / 2
                if straggler
                else ratio > _SLOW_RATIO and lost > _MIN_LOST_FRACTION
            )
            self._windows_in_a_row[rank] = self._windows_in_a_row[rank] + 1 if changes else 0
            cause = straggler.cause if straggler else _CAUSES[causes[rank]]
            present = Straggler(rank, cause, ratio, max(0.0, lost), "slowed")
            if straggler:
                self.slow[rank] = present
            if self._windows_in_a_row[rank] < _WINDOWS_IN_A_ROW:
                continue
            self._windows_in_a_row[rank] = 0
            if straggler:
                events.append(replace(self.slow.pop(rank), event="straggler_recovered"))
            else:
                events.append(present)
                self.slow[rank] = present
        return events

    def _consider_move(self, logical_worker_s: Seconds, step_s: float) -> None:
        """Proposes a move of logical workers if two windows predict a gain, or undoes the last move without a gain."""
        self._num_windows += 1
        self._step_s.append(step_s)
        if self._before is not None and self._num_windows == _SETTLING_WINDOWS:
            shares, step_before_s = self._before
            self._before = None
            if float(np.median(self._step_s)) > _GAIN_FRACTION * step_before_s:
                self.shares, self._balances = shares, False
                return
        proposed = blocks_by_speed(logical_worker_s.tolist(), self._blocks[-1].stop)
        sizes = np.array([len(block) for block in proposed])
        is_better = (sizes * logical_worker_s).max() < _WORTH_FRACTION * (self._sizes * logical_worker_s).max()
        self._better_windows = self._better_windows + 1 if is_better else 0
        pause_windows = min(_MAX_PAUSE_WINDOWS, 1 << self._moves)
        if self._better_windows >= _SETTLING_WINDOWS and self._num_windows >= pause_windows:
            self._before = tuple(self._blocks), float(np.median(self._step_s[-_SETTLING_WINDOWS:]))
            self._moves += 1
            self.shares = proposed

    def time_fractions(self) -> list[dict[str, float]]:
        """Returns where the time of each worker went since the generation began, as fractions by cause.

        The rest is `waits`, for other workers. The list is empty if the generation was too short.
        """
        *by_cause, step_s = self._totals
        if not step_s.any():
            return []
        fractions = (np.stack(by_cause) / step_s).T.round(4)
        workers = [dict(zip(_CAUSES, of_worker.tolist(), strict=True)) for of_worker in fractions]
        return [worker | {"waits": round(max(0.0, 1 - sum(worker.values())), 4)} for worker in workers]


def median_of_others(values: Seconds) -> Seconds:
    """Returns for each value the median of the others; for many values the median of all."""
    if len(values) > _MANY_VALUES:
        return np.full(len(values), np.median(values))
    return np.array([np.median(np.delete(values, i)) for i in range(len(values))])


class StragglerReporter:
    """Runs the `StragglerDetector` of a generation and records its events.

    It does nothing for a single worker, nor with `fsdp`, where workers wait for each other while they compute.

    Args:
        job: The run.
        world: The workers of the generation.
        hosts: The host of each rank, if it is known.
        device: Device on which this worker computes.

    Attributes:
        shares, imbalance: See `StragglerDetector`.
        slow: Time of each straggler relative to the other workers, by rank as text.
    """

    def __init__(self, job: Job, world: World, hosts: Sequence[str], device: torch.device) -> None:
        self._job, self._world, self._hosts, self._device = job, world, hosts, device
        self._detector = (
            StragglerDetector(world, job.config.scaling.load_balancing == "speed")
            if world.size > 1 and not world.strided
            else None
        )
        self.shares: tuple[range, ...] | None = None
        self.imbalance: float | None = None
        self.slow: dict[str, float] = {}
        self._step = 0

    def add(self, step: int, times: Sequence[TimeValues]) -> None:
        """Adds a finished step; a collective if there is something to record.

        Args:
            step: Finished steps of the run.
            times: Time of every logical worker's rank, see `TimeBreakdown`.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        if self._detector is None:
            return
        self._step, detector = step, self._detector
        if (events := detector.add(times)) is None:
            return
        self.shares, self.imbalance = detector.shares, detector.imbalance
        self.slow = {str(rank): round(straggler.times, 2) for rank, straggler in detector.slow.items()}
        if events:
            self._record(events)

    def _record(self, events: list[Straggler]) -> None:
        """Records events with the process and device of the straggler; a collective."""
        workers = gather(
            {"name": platform.node(), "pid": os.getpid(), "device": describe(self._device)["device"]}, self._world
        )
        if self._world.rank == 0:
            for straggler in events:
                details = asdict(straggler) | {"host": self._host(straggler.rank)} | workers[straggler.rank]
                put_event(self._job.paths, details.pop("event"), self._job.fence, step=self._step, **details)

    def _host(self, rank: int) -> str:
        return self._hosts[rank] if self._hosts else ""

    def begin(self, world: World) -> None:
        """Records that logical workers have moved, and continues with the new assignment."""
        assert self._detector is not None
        if world.rank == 0:
            before, after = ([len(w.assigned_to(rank)) for rank in range(w.size)] for w in (self._world, world))
            put_event(self._job.paths, "balanced", self._job.fence, step=self._step, before=before, after=after)
        self._world, self.shares = world, None
        self._detector.begin(world)

    def end(self) -> None:
        """Records where the workers' time went."""
        if self._detector is None or self._world.rank or not (fractions := self._detector.time_fractions()):
            return
        workers: list[dict[str, Any]] = [
            {"rank": rank, "host": self._host(rank)} | of_worker for rank, of_worker in enumerate(fractions)
        ]
        # The busiest workers come first, because of many workers only some are recorded.
        workers.sort(key=lambda worker: worker["waits"])
        put_event(
            self._job.paths, "time_breakdown", self._job.fence, step=self._step, workers=workers[:_MAX_REPORTED_WORKERS]
        )
