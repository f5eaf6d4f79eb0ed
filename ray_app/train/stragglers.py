"""Straggler detection from the times that every worker reports with each step, and load balancing between workers.

The times of all ranks are part of the step statistics, so all ranks detect the same stragglers without another
collective. Steps are examined in windows. A worker is a straggler if the others have waited for it, long enough, in
several windows in a row; a worker that stalled a single step is reported, too. With load balancing logical workers move
from slow workers to fast ones, and the result stays bit-identical. Medians, thresholds and pauses that double prevent
moves because of noise.

`StepTimer` (`train/step/step_stats.py`) measures the times. `StragglerDetector` computes the stragglers.
`StragglerReporter` writes events: which worker is slow and why, how logical workers moved, and where each worker's time
went.
"""

from __future__ import annotations

import os
import platform
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from ray_app.plan.assignment import blocks_by_speed
from ray_app.reduction.messages import gather
from ray_app.reduction.world import World
from ray_app.runlog.journal import put_event
from ray_app.task.environment import device_label
from ray_app.train.job import Job
from ray_app.train.step.step_stats import TimeBreakdown, TimeValues

Seconds = npt.NDArray[np.float64]
"""An array of seconds. In the shapes that this module gives, W is the number of ranks."""
Cause = Literal["compute", "data", "other"]
_CAUSES: tuple[Cause, ...] = ("compute", "data", "other")

_STEP_S_INDEX = TimeBreakdown._fields.index("step_s")
_WARM_UP_STEPS = 3
"""Steps that are ignored at the beginning of a generation and after each move of logical workers."""
_MIN_WINDOW_STEPS = 10
_MIN_WINDOW_S = 0.2
"""A window ends with the first step after which it has both this duration and `_MIN_WINDOW_STEPS` steps."""
_SLOW_RATIO = 1.3
"""Time relative to the other workers above which a worker becomes a straggler."""
_RECOVERED_RATIO = 1.15
"""Time relative to the other workers below which a straggler has recovered."""
_MIN_LOST_FRACTION = 0.1
"""Fraction of each step that all workers must lose because of a worker for it to become a straggler.

Below half of this fraction a straggler has recovered.
"""
_WINDOWS_IN_A_ROW = 3
"""Windows in a row in which the conditions must hold for a worker to become a straggler or to recover."""
_DATA_WINDOWS = 8
"""Windows over which the waits for data are averaged."""
_MIN_STALL_S = 1.0
_STALL_STEPS = 5.0
"""Minimum duration of a stall, as a multiple of the median duration of a step; it is also at least `_MIN_STALL_S`."""
_MAX_STALLS = 10
"""Maximum number of stalls that are reported in a generation."""
_MAX_PREDICTED_FRACTION = 0.9
"""Logical workers move if the slowest rank's predicted computing time is below this fraction of the present time."""
_MAX_STEP_FRACTION = 0.98
"""A move is undone if the duration of a step after it is above this fraction of the duration before."""
_MOVE_WINDOWS = 2
"""Windows in a row that must predict a gain before a move, and windows after a move over which it is measured."""
_MAX_PAUSE_WINDOWS = 64
"""Maximum of the pause before a move, in windows; the pause doubles with each move of a generation."""
_MANY_VALUES = 32
"""Number of values above which one value does not matter for their median."""
_EPSILON = 1e-12
"""Lower bound of divisors."""
_MAX_REPORTED_WORKERS = 64
"""Maximum number of workers in an event `time_breakdown`."""


@dataclass(frozen=True)
class Straggler:
    """A worker for which the others wait.

    Args:
        rank: Rank of the worker.
        cause: `compute` if the worker computes for longer than others, `data` if it waits for its data, `other` for
            anything else; see `TimeBreakdown`.
        slowdown: The worker's time as a multiple of that of the other workers.
        lost: Fraction of each step that all workers lose because of this one; for a stall the seconds.
        event: `straggler_detected` if the worker has been slow for several windows, `straggler_recovered` if it no
            longer is, `stalled` if it stalled a single step.
    """

    rank: int
    cause: Cause
    slowdown: float
    lost: float
    event: Literal["straggler_detected", "straggler_recovered", "stalled"]


class StragglerDetector:
    """Detects the stragglers of a generation and proposes moves of logical workers.

    Args:
        world: The workers of the generation.
        balances: Whether to propose moves of logical workers to ranks that complete them sooner.

    Attributes:
        proposed_assignment: The proposed assignment, the logical workers of each rank; None to keep the present one.
        slow: The present stragglers by rank.
        imbalance: Time of the busiest worker in a step relative to the mean of all; None before the first window.
    """

    def __init__(self, world: World, balances: bool) -> None:
        self._balances = balances
        self.slow: dict[int, Straggler] = {}
        self.imbalance: float | None = None
        self._stalls = self._moves = 0
        # The assignment before the last move and the duration of a step with it; None once that duration has been
        # compared with the one after the move.
        self._before_move: tuple[tuple[range, ...], float] | None = None
        # Seconds of each rank by cause and, in the last row, those of the steps, shape (4, W).
        self._totals = np.zeros((4, world.size))
        self.begin(world)

    def begin(self, world: World) -> None:
        """Restarts the windows with the assignment of `world`, after logical workers have moved."""
        self._blocks = [world.assigned_to(rank) for rank in range(world.size)]
        self._block_sizes = np.array([len(block) for block in self._blocks], dtype=np.float64)
        self.proposed_assignment: tuple[range, ...] | None = None
        self._warm_up_left = _WARM_UP_STEPS
        self._window = list[list[TimeValues]]()
        self._window_s = 0.0
        self._data_waits: deque[Seconds] = deque(maxlen=_DATA_WINDOWS)
        self._windows_in_a_row = dict.fromkeys(range(world.size), 0)
        self._better_windows = 0
        self._num_windows = 0
        # The median duration of a step in each window since the last move.
        self._step_s: list[float] = []

    def add(self, times: Sequence[TimeValues]) -> list[Straggler] | None:
        """Adds the times of a step, and examines the window if the step completes it.

        Args:
            times: Time of every logical worker's rank, see `TimeBreakdown`.

        Returns:
            The events of the window that this step completes, perhaps none; None if it completes no window.
        """
        if self._warm_up_left:
            self._warm_up_left -= 1
            return None
        # All logical workers of a rank have the rank's times.
        self._window.append([times[block.start] for block in self._blocks])
        self._window_s += times[0][_STEP_S_INDEX]
        if len(self._window) < _MIN_WINDOW_STEPS or self._window_s < _MIN_WINDOW_S:
            return None
        compute, data, other, step = np.moveaxis(np.array(self._window), 2, 0)
        self._window, self._window_s = [], 0.0
        return self._examine(np.stack([compute * self._block_sizes, data, other]), step[:, 0])

    def _examine(self, seconds: Seconds, step: Seconds) -> list[Straggler]:
        """Examines a window of steps; returns its events.

        Args:
            seconds: Time of each rank by cause and step, shape (3, steps, W).
            step: Duration of each step, shape (steps,).
        """
        step_s, usual_s = float(np.median(step)), np.median(seconds, 1)
        # Waits for data are rare and long, so a median would miss them. Their mean over the recent windows is used
        # instead, without each rank's worst window, which may be a single stall.
        self._data_waits.append(seconds[1].mean(0))
        usual_s[1] = (np.sum(self._data_waits, 0) - np.max(self._data_waits, 0)) / max(1, len(self._data_waits) - 1)
        busy_s = usual_s.sum(0)
        logical_worker_s = usual_s[0] / self._block_sizes
        self.imbalance = float(busy_s.max() / max(_EPSILON, busy_s.mean()))
        self._totals += np.vstack([seconds.sum(1), np.full(len(logical_worker_s), step.sum())])
        # `_detect_stall` skips the stragglers of earlier windows, so it comes before this window changes them.
        events = [*self._detect_stall(seconds, step_s), *self._detect_stragglers(usual_s, logical_worker_s, step_s)]
        if self._balances:
            self._consider_move(logical_worker_s, step_s)
        return events

    def _detect_stall(self, seconds: Seconds, step_s: float) -> list[Straggler]:
        """Returns the worst stall of a window, that is, a step in which one worker was far behind all others.

        The list is empty if the window has no stall, if that worker is a straggler already, or if `_MAX_STALLS` stalls
        have been reported.

        Args:
            seconds: Time of each rank by cause and step, shape (3, steps, W).
            step_s: Median duration of a step.
        """
        busy_s = seconds.sum(0)
        # The times of the two slowest ranks in each step.
        second, first = np.partition(busy_s, -2, 1)[:, -2:].T
        worst_step = int((first - second).argmax())
        rank, lost_s = int(busy_s[worst_step].argmax()), float(first[worst_step] - second[worst_step])
        if lost_s < max(_MIN_STALL_S, _STALL_STEPS * step_s) or self._stalls == _MAX_STALLS or rank in self.slow:
            return []
        self._stalls += 1
        cause = _CAUSES[int(seconds[:, worst_step, rank].argmax())]
        return [Straggler(rank, cause, float(first[worst_step] / second[worst_step]), lost_s, "stalled")]

    def _detect_stragglers(self, usual_s: Seconds, logical_worker_s: Seconds, step_s: float) -> list[Straggler]:
        """Returns the workers that have become stragglers, and the stragglers that have recovered.

        Args:
            usual_s: Usual time of each rank in a step by cause, shape (3, W).
            logical_worker_s: Computing time of each rank for one logical worker, shape (W,).
            step_s: Median duration of a step.
        """
        busy_s, events = usual_s.sum(0), list[Straggler]()
        lost_s = busy_s - median_of_others(busy_s)
        # The cause of a rank is that for which it differs most from the others.
        causes = np.argmax([cause_s - median_of_others(cause_s) for cause_s in usual_s], 0)
        # Computing is compared per logical worker, since ranks may run different numbers of them.
        ratios = np.where(
            causes == 0,
            logical_worker_s / np.maximum(_EPSILON, median_of_others(logical_worker_s)),
            busy_s / np.maximum(_EPSILON, median_of_others(busy_s)),
        )
        lost_fractions = lost_s / max(_EPSILON, step_s)
        for rank, (ratio, lost) in enumerate(zip(ratios.tolist(), lost_fractions.tolist(), strict=True)):
            straggler = self.slow.get(rank)
            is_changing = (
                ratio < _RECOVERED_RATIO or lost < _MIN_LOST_FRACTION / 2
                if straggler
                else ratio > _SLOW_RATIO and lost > _MIN_LOST_FRACTION
            )
            self._windows_in_a_row[rank] = self._windows_in_a_row[rank] + 1 if is_changing else 0
            cause = straggler.cause if straggler else _CAUSES[causes[rank]]
            present = Straggler(rank, cause, ratio, max(0.0, lost), "straggler_detected")
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
        """Proposes a move of logical workers if two windows predict a gain.

        If the last move has brought no gain, it proposes to undo that move, and no other move in this generation.
        """
        self._num_windows += 1
        self._step_s.append(step_s)
        if self._before_move is not None and self._num_windows == _MOVE_WINDOWS:
            previous_assignment, previous_step_s = self._before_move
            self._before_move = None
            if float(np.median(self._step_s)) > _MAX_STEP_FRACTION * previous_step_s:
                self.proposed_assignment, self._balances = previous_assignment, False
                return
        proposed = blocks_by_speed(logical_worker_s.tolist(), self._blocks[-1].stop)
        sizes = np.array([len(block) for block in proposed])
        predicted_s, present_s = (sizes * logical_worker_s).max(), (self._block_sizes * logical_worker_s).max()
        is_better = predicted_s < _MAX_PREDICTED_FRACTION * present_s
        self._better_windows = self._better_windows + 1 if is_better else 0
        pause_windows = min(_MAX_PAUSE_WINDOWS, 1 << self._moves)
        if self._better_windows >= _MOVE_WINDOWS and self._num_windows >= pause_windows:
            self._before_move = tuple(self._blocks), float(np.median(self._step_s[-_MOVE_WINDOWS:]))
            self._moves += 1
            self.proposed_assignment = proposed

    def time_fractions(self) -> list[dict[str, float]]:
        """Returns for each rank the fractions of the time of all completed windows of the generation, by cause.

        The rest is `waits`, the waiting for other workers. The list is empty if no window was completed.
        """
        *by_cause, step_s = self._totals
        if not step_s.any():
            return []
        fractions = (np.stack(by_cause) / step_s).T.round(4)
        workers = [dict(zip(_CAUSES, by_worker.tolist(), strict=True)) for by_worker in fractions]
        return [worker | {"waits": round(max(0.0, 1 - sum(worker.values())), 4)} for worker in workers]


def median_of_others(values: Seconds) -> Seconds:
    """Returns for each value the median of the others; for many values the median of all."""
    if len(values) > _MANY_VALUES:
        return np.full(len(values), np.median(values))
    return np.array([np.median(np.delete(values, i)) for i in range(len(values))])


class StragglerReporter:
    """Runs the `StragglerDetector` of a generation and writes its events.

    It does nothing for a single worker, nor with a strategy with which workers wait for each other while they compute.

    Args:
        job: The run.
        world: The workers of the generation.
        device: Device on which this worker computes.

    Attributes:
        proposed_assignment, imbalance: See `StragglerDetector`; they change at the end of a window.
        slow: Time of each straggler as a multiple of that of the other workers, by rank as text, as JSON needs it.
    """

    def __init__(self, job: Job, world: World, device: torch.device) -> None:
        self._job = job
        self._world = world
        self._device = device
        self._detector = (
            StragglerDetector(world, job.config.scaling.load_balancing == "speed")
            if world.size > 1 and job.config.train.strategy_traits.detects_stragglers
            else None
        )
        self.proposed_assignment: tuple[range, ...] | None = None
        self.imbalance: float | None = None
        self.slow: dict[str, float] = {}
        self._step = 0

    def add(self, step: int, times: Sequence[TimeValues]) -> None:
        """Adds the times of a finished step; a collective if that leads to events.

        Args:
            step: Number of finished steps of the run.
            times: Time of every logical worker's rank, see `TimeBreakdown`.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        if self._detector is None:
            return
        self._step, detector = step, self._detector
        if (events := detector.add(times)) is None:
            return
        self.proposed_assignment, self.imbalance = detector.proposed_assignment, detector.imbalance
        self.slow = {str(rank): round(straggler.slowdown, 2) for rank, straggler in detector.slow.items()}
        if events:
            self._record(events)

    def _record(self, events: list[Straggler]) -> None:
        """Writes events, each with the process and device of the straggler; a collective."""
        workers = gather(
            {"name": platform.node(), "pid": os.getpid(), "device": device_label(self._device)}, self._world
        )
        if self._world.rank == 0:
            for straggler in events:
                details: dict[str, Any] = {
                    "rank": straggler.rank,
                    "cause": straggler.cause,
                    "times": straggler.slowdown,
                    "lost": straggler.lost,
                    "host": self._host(straggler.rank),
                }
                details |= workers[straggler.rank]
                put_event(self._job.paths, straggler.event, self._job.fence, step=self._step, **details)

    def _host(self, rank: int) -> str:
        return self._world.hosts[rank] if self._world.hosts else ""

    def begin(self, world: World) -> None:
        """Writes the event `rebalanced` after logical workers have moved, and restarts the windows."""
        assert self._detector is not None
        if world.rank == 0:
            before, after = ([len(w.assigned_to(rank)) for rank in range(w.size)] for w in (self._world, world))
            put_event(self._job.paths, "rebalanced", self._job.fence, step=self._step, before=before, after=after)
        self._world, self.proposed_assignment = world, None
        self._detector.begin(world)

    def end(self) -> None:
        """Writes the event `time_breakdown`: where each worker's time went in the generation."""
        if self._detector is None or self._world.rank or not (fractions := self._detector.time_fractions()):
            return
        workers: list[dict[str, Any]] = [
            {"rank": rank, "host": self._host(rank)} | by_cause for rank, by_cause in enumerate(fractions)
        ]
        # The busiest workers come first, because the event has at most `_MAX_REPORTED_WORKERS` workers.
        workers.sort(key=lambda worker: worker["waits"])
        put_event(
            self._job.paths, "time_breakdown", self._job.fence, step=self._step, workers=workers[:_MAX_REPORTED_WORKERS]
        )
