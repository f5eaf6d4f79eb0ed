"""What the controller decides: pure functions of its state, in the table `TRANSITIONS` at the end.

In each iteration of its control loop `ElasticController` builds a `ControllerState`, and acts on the decision that
`decide` returns. A run is given up where a decision is charged: `FailureBudget` raises once a budget is spent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from ray_app.config.config import Config
from ray_app.errors import RayAppError
from ray_app.runlog.journal import StepRecord
from ray_app.train.membership import Heartbeat

_GRACE_S = 2.0
"""Seconds for which a worker must have been declared lost before it is dropped.

Ray usually notices a lost worker sooner, and its error says more about the cause.
"""
_MIN_SPEEDUP = 1.1
"""A straggler is evicted without a replacement only if a step becomes shorter by this factor."""


@dataclass(frozen=True)
class WorkerState:
    """A worker of the worker group.

    Args:
        worker: Its actor id.
        node: Id of its node.
        is_running: Whether it trains. A worker that does not has failed, has left, or is done.
        error: The error with which it failed.
        lost_for_s: Seconds since the rendezvous declared it lost; 0 if it is not lost.
    """

    worker: str
    node: str
    is_running: bool = True
    error: BaseException | None = None
    lost_for_s: float = 0.0


@dataclass(frozen=True)
class SlowWorker:
    """A straggler.

    Args:
        heartbeat: Its newest heartbeat.
        slowdown: Its time divided by that of the other workers.
        slow_s: Seconds for which it has been slow.
        is_replaceable: Whether nodes other than its own have capacity for another worker.
    """

    heartbeat: Heartbeat
    slowdown: float
    slow_s: float
    is_replaceable: bool


@dataclass(frozen=True)
class ControllerState:
    """All that a decision depends on.

    Args:
        config: The configuration of the run.
        has_worker_group: Whether there is a worker group.
        workers: Its workers; empty if all of them were declared lost.
        possible: Number of workers and standby workers for which the nodes that stay have capacity, with the workers
            that train or are pending. It is 0 while a worker has failed, since the capacity then changes.
        pending: Number of pending workers.
        ready: Number of pending workers that are ready to join.
        has_waited: Whether a ready worker has waited long enough for the other pending workers.
        since_change_s: Seconds since the number of workers last became as large as it should be.
        can_start: Whether workers may start; they may not for a while after failed starts.
        is_stopping: Whether the driver has asked to stop the run.
        draining_nodes: Ids of the nodes that are about to go away.
        evicted: Actor ids of the stragglers that were evicted.
        slow: The stragglers that have been slow for `scaling.evict_straggler_after_s` and were not evicted.
    """

    config: Config
    has_worker_group: bool
    workers: tuple[WorkerState, ...] = ()
    possible: int = 0
    pending: int = 0
    ready: int = 0
    has_waited: bool = False
    since_change_s: float = 0.0
    can_start: bool = True
    is_stopping: bool = False
    draining_nodes: frozenset[str] = frozenset()
    evicted: frozenset[str] = frozenset()
    slow: tuple[SlowWorker, ...] = ()

    @property
    def errors(self) -> dict[int, BaseException]:
        """The error of each worker that failed, by its position in `workers`."""
        return {index: w.error for index, w in enumerate(self.workers) if w.error is not None}

    @property
    def drained(self) -> frozenset[str]:
        """The workers that have exited because their nodes go away. To Ray they look as if the run were over."""
        return frozenset(w.worker for w in self._without_error() if w.node in self.draining_nodes)

    @property
    def exited_stragglers(self) -> frozenset[str]:
        """The stragglers that have exited because they were evicted. To Ray they look as if the run were over."""
        return frozenset(w.worker for w in self._without_error() if w.worker in self.evicted) - self.drained

    @property
    def ended(self) -> frozenset[str]:
        """The workers that failed, were drained or were evicted."""
        return frozenset(w.worker for w in self.workers if w.error is not None) | self.drained | self.exited_stragglers

    @property
    def is_run_over(self) -> bool:
        """Whether a worker has ended because the run has."""
        return any(w.worker not in self.ended for w in self._without_error())

    def _without_error(self) -> list[WorkerState]:
        return [w for w in self.workers if not w.is_running and w.error is None]


@dataclass(frozen=True)
class StopWaiting:
    """Ends the run, which has no worker group."""


@dataclass(frozen=True)
class Start:
    """Starts a worker group with this many workers; `may_grow`: more can train, and join when they are ready."""

    workers: int
    may_grow: bool


@dataclass(frozen=True)
class Wait:
    """Waits for capacity without a worker group."""

    reason: str


@dataclass(frozen=True)
class Restart:
    """Ends the worker group after all of its workers have ended; `errors` are charged as a failure."""

    errors: dict[int, BaseException]


@dataclass(frozen=True)
class Drop:
    """Removes workers from the group; the others go on.

    Args:
        workers: Their actor ids.
        reason: For the log.
        errors: The errors that are charged as a failure, by the positions of the workers.
        preempted: Number of workers that are charged as a preemption.
    """

    workers: frozenset[str]
    reason: str
    errors: dict[int, BaseException] = field(default_factory=dict)
    preempted: int = 0


@dataclass(frozen=True)
class Finish:
    """Lets Ray's controller end the run, which has done all steps."""


@dataclass(frozen=True)
class Evict:
    """Has a straggler leave at the next step boundary."""

    slow: SlowWorker
    reason: str


@dataclass(frozen=True)
class Resize:
    """Lets ready workers join, and starts or cancels pending workers.

    Args:
        workers: Number of workers that should train.
        joining: Number of ready workers that join now.
        pending: Number of workers that should be pending after that: the missing workers and the standby workers.
        reason: The reason for `workers`, which goes to the event.
        wait_reason: Why no generation may form: the workers wait for capacity. None if one may.
    """

    workers: int
    joining: int
    pending: int
    reason: str
    wait_reason: str | None = None


Decision = StopWaiting | Start | Wait | Restart | Drop | Finish | Evict | Resize


class StoppedWaitingError(RayAppError):
    """The driver asked to stop while there were no workers, see `StopWaiting`."""


def _shortage(count: str, state: ControllerState) -> str:
    return f"{count} of at least {state.config.scaling.min_workers} workers; waiting for capacity"


def _start(state: ControllerState) -> Start | None:
    """Starts with the ready workers if they are enough; the other pending workers join later."""
    max_workers, min_workers = choose_size(state, state.possible)[0], state.config.scaling.min_workers
    if state.has_worker_group or max_workers < min_workers:
        return None
    workers = min(state.ready, max_workers) if state.ready >= min_workers else max_workers
    return Start(workers, workers < max_workers)


def _wait(state: ControllerState) -> Wait | None:
    return None if state.has_worker_group else Wait(_shortage(f"nodes for {state.possible}", state))


def _restart(state: ControllerState) -> Restart | None:
    return Restart(state.errors) if state.errors and len(state.ended) == len(state.workers) else None


def _drop_failed(state: ControllerState) -> Drop | None:
    if not state.errors:
        return None
    return Drop(state.ended, "the worker failed, or exited while others failed", state.errors, len(state.drained))


def _drop_drained(state: ControllerState) -> Drop | None:
    if not 0 < len(state.drained) < len(state.workers):
        return None
    return Drop(state.drained, "its node is leaving", preempted=len(state.drained))


def _drop_evicted(state: ControllerState) -> Drop | None:
    exited = state.exited_stragglers
    return Drop(exited, "the worker was a straggler") if 0 < len(exited) < len(state.workers) else None


def _drop_silent(state: ControllerState) -> Drop | None:
    error = ConnectionError(f"no heartbeat for {state.config.failure.heartbeat_timeout_s:g} s")
    silent: dict[int, BaseException] = {
        index: error for index, w in enumerate(state.workers) if w.lost_for_s > _GRACE_S
    }
    return Drop(frozenset(state.workers[index].worker for index in silent), str(error), silent) if silent else None


def _resize(state: ControllerState) -> Resize:
    """Returns how many workers should train and be pending, and how many ready workers join now.

    Ready workers join once all missing workers are ready, or once one of them has waited long enough.
    """
    scaling, current = state.config.scaling, len(state.workers)
    # While no worker may start, only workers that have been started already can join.
    possible = state.possible if state.can_start else min(state.possible, current + state.pending)
    workers, reason = choose_size(state, possible)
    missing = workers - current
    joining = min(state.ready, missing)
    joining = joining if joining == missing or state.has_waited else 0
    standbys = max(0, min(scaling.standby_workers, possible - workers))
    is_short = current < scaling.min_workers and not missing
    return Resize(
        workers, joining, missing - joining + standbys, reason, _shortage(str(current), state) if is_short else None
    )


def choose_size(state: ControllerState, possible: int) -> tuple[int, str]:
    """Returns how many workers should start or train, which is never fewer than now, and the reason.

    The worker with the most logical workers determines how long a step takes, so the run grows only if that worker then
    runs fewer of them, at most every `scaling.resize_interval_s`, for which a run below `scaling.min_workers` does not
    wait. The controller never shrinks a run: workers on nodes that go away leave or are lost, and the others continue.

    Args:
        state: The state.
        possible: Number of workers for which there is capacity, see `ControllerState`.
    """
    scaling, logical_workers = state.config.scaling, state.config.logical_workers
    current = len(state.workers)
    target = min(possible, scaling.worker_limit)
    if target <= current:
        return current, "no capacity for more" if current < scaling.worker_limit else "as many as configured"
    if current < scaling.min_workers:
        if target < scaling.min_workers:
            return current, "not enough capacity"
        return target, f"below scaling.min_workers = {scaling.min_workers}"
    before, after = ceil(logical_workers / current), ceil(logical_workers / target)
    if after == before:
        text = f"{target} workers would be as slow as {current}: one of them would still run {before} logical workers"
        return current, text
    if state.since_change_s < scaling.resize_interval_s:
        since_s, interval_s = state.since_change_s, scaling.resize_interval_s
        return current, f"the last change was {since_s:.0f} s ago, scaling.resize_interval_s is {interval_s:g}"
    return target, f"a worker would run {after} logical workers instead of {before}"


def _evict(state: ControllerState) -> Evict | None:
    """Evicts the slowest straggler.

    It is evicted if another worker can replace it, or if a step is faster without it. A run evicts at most
    `scaling.max_workers` workers in a start, so that evictions end even if workers are slow wherever they run.
    """
    scaling, workers = state.config.scaling, len(state.workers)
    if not state.slow or len(state.evicted) >= scaling.worker_limit:
        return None
    slowest = max(state.slow, key=lambda slow: slow.slowdown)
    if not state.ready and workers - 1 < max(1, scaling.min_workers):
        # The other workers would be too few to continue before a replacement is ready, and its capacity might be gone
        # by then.
        return None
    effect = "another worker replaces it"
    if not state.ready and not slowest.is_replaceable:
        # With one worker less the largest number of logical workers per worker may grow, and a step takes longer by
        # this factor.
        logical_workers = state.config.logical_workers
        step_growth = ceil(logical_workers / (workers - 1)) / ceil(logical_workers / workers)
        if slowest.slowdown < _MIN_SPEEDUP * step_growth:
            return None
        effect = f"without this worker, a step takes {step_growth / slowest.slowdown:.2f} of the time"
    reason = f"{slowest.slowdown:.1f} times as slow as the others for {slowest.slow_s:.0f} s; {effect}"
    return Evict(slowest, reason)


def slow_workers(record: StepRecord, heartbeats: Sequence[Heartbeat]) -> dict[str, float]:
    """Returns the stragglers of a record by worker id, each with its time divided by that of the other workers.

    The ranks of a record are those of its generation. The record of an earlier generation names no worker.

    Args:
        record: The newest record.
        heartbeats: The newest heartbeats of the workers that step.
    """
    workers = {h.rank: h.worker for h in heartbeats if record.generation.endswith(f".{h.generation}")}
    return {workers[int(rank)]: slowdown for rank, slowdown in record.slow.items() if int(rank) in workers}


class Transition(NamedTuple):
    """A row of the table; `decide` returns the decision in a state, None if the row does not apply."""

    name: str
    decide: Callable[[ControllerState], Decision | None]


TRANSITIONS = (
    # Without a worker group.
    Transition("stop", lambda s: StopWaiting() if s.is_stopping and not s.has_worker_group else None),
    Transition("start", _start),
    Transition("wait", _wait),
    # Workers have ended.
    Transition("restart", _restart),
    Transition("drop failed", _drop_failed),
    Transition("drop drained", _drop_drained),
    Transition("drop evicted", _drop_evicted),
    Transition("drop silent", _drop_silent),
    Transition("finish", lambda s: Finish() if s.workers and not any(w.is_running for w in s.workers) else None),
    # Workers train.
    Transition("evict", _evict),
    Transition("resize", _resize),
)
"""The decisions, by priority: the first row that applies counts, and the last one always does."""


def decide(state: ControllerState) -> Decision:
    """Returns the decision in a state."""
    return next(decision for row in TRANSITIONS if (decision := row.decide(state)) is not None)
