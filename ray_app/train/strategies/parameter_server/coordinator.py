"""The coordinator of parameter servers: it hands out units, ends steps, makes checkpoints and restores lost servers.

A unit is one logical worker's share of one step. `UnitScheduler` decides which worker computes which unit. A logical
worker's units are computed one after the other by the worker that it is assigned to, so that reading ahead pays; the
assignment changes only when workers join or leave. How far a logical worker may be ahead of the slowest is bounded: Ho
et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.

The coordinator has no gradients. Its training state is that of the last cut: a moment when every unit before it is done
and none after it has begun, so that all servers together have the state of one step. Checkpoints and snapshots are
cuts, and after the loss of a server all servers return to the last one. `ServedState` is the state of all servers as
one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from ray_app.checkpoint.format import pack, unpack
from ray_app.devices import HOST
from ray_app.errors import NonFiniteError
from ray_app.plan.order import Cursor
from ray_app.reduction.reducer import total_norm
from ray_app.reduction.world import World
from ray_app.runlog.journal import put_event
from ray_app.task import environment
from ray_app.train.checkpointing.persistence import SnapshotSender
from ray_app.train.checkpointing.restore import restore_state
from ray_app.train.checkpointing.step_log import StepLog
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import Phase, SingleProcessMembership
from ray_app.train.state.state import NO_STATE, TrainingState
from ray_app.train.step.step_stats import check_same_metrics, combine_stats, metric_keys
from ray_app.train.strategies.parameter_server.layout import Layout, from_bytes, to_bytes
from ray_app.train.strategies.parameter_server.protocol import (
    CoordinatorReply,
    NotReadyError,
    Servers,
    Unit,
    UnitResult,
    call_all_servers,
)

logger = logging.getLogger(__name__)

_PAUSE_S = 0.5
"""Pause between two checks whether lost servers are back."""


class Coordinator:
    """The coordinator, see the module; its methods may be called from several threads.

    It restores the state when a worker asks for the first time, and that worker gets the errors: Ray does not restart
    an actor if its constructor raises.

    Args:
        job: The run.
        servers: The parameter servers, with any state or none.
        sender: Sends snapshots to the snapshot actors and fetches the newest.
        hooks: Callbacks for fault tests.
    """

    def __init__(
        self, job: Job, servers: Servers, sender: SnapshotSender | None = None, hooks: Hooks = Hooks()
    ) -> None:
        environment.set_up_torch(job.config, HOST)
        self._job = job
        self._plan = job.plan
        self._synchronous = job.config.train.staleness == 0
        self._state = TrainingState(job.config, job.task, HOST, job.total_steps)
        self._served = ServedState(job, servers, self._state)
        put_event(job.paths, "partitioned", job.fence, servers=self._served.layout.describe())
        self._membership = _Membership(self._plan.logical_workers, lambda: False)
        self._sender = sender or SnapshotSender([])
        self._make_step_log = partial(StepLog, job, self._state, self._membership, self._sender, HOST, hooks)
        self._step_log = self._make_step_log()
        self._lock = threading.Condition()
        self._error: Exception | None = None
        self._paused = self._stopping = self._over = False
        self._broken = self._halfway = True
        self._end = self._workers = self._saved_step = 0
        self._units = UnitScheduler(self._plan.logical_workers, self._state.step, job.config.train.staleness)
        self._lost_s: float | None = None

    def ask(
        self, worker: str, done: UnitResult | None, broken_era: int | None, wait_s: float | None
    ) -> CoordinatorReply:
        """Takes a worker's result and returns its next unit.

        Args:
            worker: The worker that asks; it computes no other unit any more.
            done: Its last result.
            broken_era: The era in which a call of it met a lost server.
            wait_s: Limit in seconds of the wait for a unit; None if the worker leaves and takes no further unit.

        Raises:
            RayAppError: The run has to end.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            try:
                return self._answer(worker, done, broken_era, wait_s)
            except NotReadyError:
                self._broken = self._halfway = True
                self._lock.wait(min(wait_s or 0.0, _PAUSE_S))
                return CoordinatorReply(waiting=True, step=self._units.complete)
            except Exception as error:
                self._error = error
                self._lock.notify_all()
                raise

    def update_workers(self, live: set[str], paused: bool, stopping: bool) -> None:
        """Takes over the status of the workers; called several times a second.

        Args:
            live: The live workers, also those that are to leave; the others are lost.
            paused: Whether to wait for more workers.
            stopping: Whether the run is to stop, with a checkpoint.
        """
        with self._lock:
            lost = set(self._units.workers) - live
            for worker in lost:
                self._units.lose(worker)
            if lost:
                self._lost_s = time.time()
                self._note_workers()
            self._stopping = self._stopping or stopping
            self._paused = paused and not self._stopping
            self._lock.notify_all()

    @property
    def is_waiting(self) -> bool:
        """Whether the coordinator waits for the storage, or for the transfer of a whole state to or from the servers.

        Every worker that asks waits then, too. The property can be read while `ask` and `update_workers` wait.
        """
        return self._membership.is_waiting

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._membership.is_waiting = True
        try:
            yield
        finally:
            self._membership.is_waiting = False

    def _answer(
        self, worker: str, done: UnitResult | None, broken_era: int | None, wait_s: float | None
    ) -> CoordinatorReply:
        until_s = time.monotonic() + (wait_s or 0.0)
        self._broken = self._broken or broken_era == self._served.era
        if self._broken:
            self._restore_servers()
        if done is not None:
            self._finish(done)
        if wait_s is None:
            self._units.lose(worker)
            self._lock.notify_all()
        while True:
            if self._stopping and not self._over:
                self._stop()
            is_idle = wait_s is None or self._over or self._paused
            step_and_worker = None if is_idle else self._units.take(worker, self._end)
            self._note_workers()
            remaining_s = until_s - time.monotonic()
            if step_and_worker is not None or self._over or self._error is not None or remaining_s <= 0:
                break
            self._lock.wait(remaining_s)
        unit = Unit(self._served.era, *step_and_worker) if step_and_worker is not None else None
        rank = self._units.workers.index(worker) if worker in self._units.workers else 0
        assigned = self._units.assigned_to(worker)
        return CoordinatorReply(
            unit, assigned, rank, self._units.complete, self._membership.newest, self._paused, self._over
        )

    def _finish(self, done: UnitResult) -> None:
        unit = done.unit
        if unit.era != self._served.era or not self._units.finish(unit.step, unit.logical_worker):
            return
        self._tables.setdefault(unit.step, {})[unit.logical_worker] = done
        if len(self._tables[unit.step]) == self._plan.logical_workers:
            self._end_step(unit.step, self._tables.pop(unit.step))
            self._lock.notify_all()

    def _end_step(self, step: int, table: dict[int, UnitResult]) -> None:
        """Ends a step, after every unit of it is done: `table` has the result of each logical worker."""
        cursor, unit_results = Cursor.at(step, self._plan.steps_per_epoch), [table[v] for v in sorted(table)]
        stats, planned = [unit_result.stats for unit_result in unit_results], self._plan.global_rows(cursor.step)
        check_same_metrics(metric_keys(stats))
        result = combine_stats(stats)
        result.check_rows(cursor, planned)
        result = result.rescale_to_weight(planned)
        if self._synchronous:
            result = result._replace(
                grad_norm=self._apply(cursor, step, planned / result.weight if result.weight else 0.0)
            )
        num_workers = max(1, self._workers)
        wait_s = sum(unit_result.wait_s for unit_result in unit_results) / num_workers
        self._step_log.record_step(cursor, step + 1, result, unit_results[0].lr, wait_s, num_workers)
        if step + 1 == self._end:
            self._cut()

    def _apply(self, cursor: Cursor, step: int, correction: float) -> float:
        """Makes the servers update their parameters by the rescaled sum of a step's gradients; returns its norm.

        Args:
            correction: Factor for the sum; 0 leaves the parameters as they are.
        """
        norm = self._served.norm(step, correction)
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"Epoch {cursor.epoch}, step {cursor.step} of the epoch: the sum of finite gradients is not finite. The"
                " optimizer made no update. Lower the learning rate, or set train.grad_clip_norm."
            )
        self._served.move(step, norm, correction)
        return norm

    def _next_cut(self) -> int:
        job, step = self._job, self._units.complete + 1
        while step < job.last_step and not (job.is_checkpoint_due(step) or job.is_snapshot_due(step)):
            step += 1
        return step

    def _stop(self) -> None:
        """Ends the run at the next step that can be a cut."""
        self._end = min(self._end, self._units.begun)
        if self._units.complete == self._end:
            self._cut()

    def _cut(self) -> None:
        """Fetches the servers' state, makes the snapshot and the checkpoint that are due, and ends the run if due."""
        job, step = self._job, self._units.complete
        if step > self._state.step:
            with self._waiting():
                self._served.fetch()
            if job.is_snapshot_due(step):
                self._step_log.snapshot()
        if step > self._saved_step and (self._stopping or job.is_checkpoint_due(step)):
            self._saved_step = step
            self._step_log.checkpoint(
                Cursor.at(step, self._plan.steps_per_epoch), "cadence" if job.is_checkpoint_due(step) else "extra"
            )
        if self._stopping or step >= job.last_step:
            self._step_log.wait_for_commit()
            with self._waiting():
                self._step_log.close()
            self._over = True
        self._end = self._next_cut()

    def _restore(self) -> None:
        """Restores the coordinator's state.

        Raises:
            NotReadyError: The storage does not answer; the next call tries again.
        """
        try:
            with self._waiting():
                restore_state(self._job, self._state, self._step_log, self._sender, HOST, World(0, 1, 1))
        except OSError as error:
            logger.warning("The state to continue from cannot be read, trying again: %s", error)
            raise NotReadyError from error
        self._saved_step = self._state.step

    def _begin_era(self, eras: list[int]) -> None:
        """Sends the state of the last cut to the servers and continues from there; `eras` are the servers' eras."""
        with self._waiting():
            self._served.begin_era(eras)
        self._broken = self._halfway = False
        with self._waiting():
            self._step_log.begin_generation(World(0, 1, self._plan.logical_workers), self._served.era)
        self._units = UnitScheduler(self._plan.logical_workers, self._state.step, self._job.config.train.staleness)
        self._tables: dict[int, dict[int, UnitResult]] = {}
        self._over = self._over or self._state.step >= self._job.last_step
        self._end = self._next_cut()

    def _restore_servers(self) -> None:
        """Checks that all servers have the state of the present era; if not, all return to the last cut."""
        if self._state.step == NO_STATE:
            self._restore()
        eras = self._served.eras()
        self._broken = False
        if eras == [self._served.era] * len(eras) and not self._halfway:
            return
        # Era 0 is that before the first one, so no server was lost.
        if self._served.era:
            step, self._lost_s = self._units.complete, time.time()
            put_event(self._job.paths, "server_lost", self._job.fence, step=step, back_to=self._state.step)
            logger.warning("A parameter server was lost after step %d; all return to step %d", step, self._state.step)
            with self._waiting():
                self._step_log.close()
            self._step_log = self._make_step_log()
            self._workers = 0
        self._begin_era(eras)

    def _note_workers(self) -> None:
        """Records the number of workers if it has changed."""
        before, self._workers = self._workers, len(self._units.workers)
        if self._workers in (0, before):
            return
        details = {"generation": self._served.era, "workers": self._workers, "step": self._units.complete}
        lost = {"lost_s": self._lost_s} if self._lost_s is not None else {}
        put_event(self._job.paths, "formed", self._job.fence, **details, **lost)
        self._lost_s = None


class _Membership(SingleProcessMembership):
    """The membership of the coordinator; all workers wait while the coordinator does."""

    is_waiting = False
    """Whether the coordinator waits for the storage, or for the transfer of a whole state to or from the servers."""

    def enter(self, phase: Phase) -> None:
        """Notes whether the coordinator waits for the storage, see `Membership.enter`."""
        self.is_waiting = phase == "saving"


class UnitScheduler:
    """Assigns logical workers to workers and hands out their units in order.

    Args:
        logical_workers: L.
        first: The first step, counted from 0.
        staleness: Steps that a logical worker may be ahead of the slowest.
    """

    def __init__(self, logical_workers: int, first: int, staleness: int) -> None:
        self._staleness = staleness
        self._next = [first] * logical_workers
        self._num_behind = logical_workers
        """Logical workers that have not done the unit of step `complete`."""
        self._worker_of: list[str | None] = [None] * logical_workers
        self._assigned: dict[str, set[int]] = {}
        self._running: dict[int, str] = {}
        """The worker that computes a unit of a logical worker, by logical worker."""
        self._running_of: dict[str, int] = {}
        """The logical worker that a worker computes a unit of, by worker."""
        self._is_balanced = True
        self.complete = first
        """Number of steps of which every unit is done."""
        self.begun = first
        """Number of steps of which a unit was handed out; a worker may have sent its gradient before it was lost."""
        self.workers: list[str] = []
        """The workers that have asked for a unit and were not lost since."""

    def take(self, worker: str, end: int) -> tuple[int, int] | None:
        """Returns the next unit for a worker, which computes no other unit any more.

        Args:
            worker: The worker.
            end: The first step that must not begin yet.

        Returns:
            Step and logical worker; None if the worker has to wait.
        """
        self._end_unit(worker)
        if worker not in self._assigned:
            self.workers.append(worker)
            self._assigned[worker] = set()
            self._is_balanced = False
        if not self._is_balanced:
            self._claim(worker)
        end = min(end, self.complete + self._staleness + 1)
        ready = [(self._next[v], v) for v in self._assigned[worker] if self._next[v] < end]
        if not ready:
            return None
        step, logical_worker = min(ready)
        self._running[logical_worker] = worker
        self._running_of[worker] = logical_worker
        self.begun = max(self.begun, step + 1)
        return step, logical_worker

    def finish(self, step: int, logical_worker: int) -> bool:
        """Notes that a unit is done; returns whether that is new."""
        if self._next[logical_worker] != step:
            return False
        self._next[logical_worker] += 1
        if step == self.complete:
            self._num_behind -= 1
            if not self._num_behind:
                self.complete = min(self._next)
                self._num_behind = self._next.count(self.complete)
        if (worker := self._running.get(logical_worker)) is not None:
            self._end_unit(worker)
        return True

    def assigned_to(self, worker: str) -> tuple[int, ...]:
        """Returns the logical workers that are assigned to a worker."""
        return tuple(sorted(self._assigned.get(worker, ())))

    def lose(self, worker: str) -> None:
        """Removes a worker that left or was lost, and frees its logical workers for the others."""
        self._end_unit(worker)
        if worker in self._assigned:
            self.workers.remove(worker)
            self._is_balanced = False
            for v in self._assigned.pop(worker):
                self._worker_of[v] = None

    def _end_unit(self, worker: str) -> None:
        """Notes that a worker computes no unit any more."""
        if worker in self._running_of:
            del self._running[self._running_of.pop(worker)]

    def _claim(self, worker: str) -> None:
        """Assigns a fair share of the free logical workers to a worker, and others of workers with at least two more.

        After all workers have claimed, their numbers of logical workers differ by at most one.
        """
        assigned, max_assigned = self._assigned[worker], -(-len(self._worker_of) // len(self.workers))
        for v, present in enumerate(self._worker_of):
            if present is None and len(assigned) < max_assigned:
                self._assign(v, worker)
        for v, present in reversed(list(enumerate(self._worker_of))):
            if present in (None, worker) or v in self._running:
                continue
            if len(self._assigned[present]) - len(assigned) >= 2:
                self._assigned[present].discard(v)
                self._assign(v, worker)
        counts = [len(logical_workers) for logical_workers in self._assigned.values()]
        self._is_balanced = sum(counts) == len(self._worker_of) and max(counts) - min(counts) < 2

    def _assign(self, v: int, worker: str) -> None:
        self._worker_of[v] = worker
        self._assigned[worker].add(v)


class ServedState:
    """The state of all parameter servers as one; every method raises `NotReadyError` if a server is lost.

    Args:
        job: The run.
        servers: The parameter servers, with any state or none.
        state: The coordinator's training state, which is fetched from the servers and sent to them.
    """

    def __init__(self, job: Job, servers: Servers, state: TrainingState) -> None:
        self._servers, self._state = servers, state
        self._clips = job.config.train.grad_clip_norm is not None
        self.layout = Layout(state.model, state.optimizer, job.config.train.servers)
        self.era = 0

    def eras(self) -> list[int]:
        """Returns the era of each server; 0 for a server without a state."""
        return call_all_servers(self._servers, "era", [()] * len(self.layout.parts))

    def norm(self, step: int, factor: float) -> float:
        """Returns the norm of a step's gradient, times a factor.

        If gradients are clipped, the norm is bit-identical to that of `ddp`: that of a variable on several servers is
        computed from its whole gradient.
        """
        incomplete = self.layout.incomplete() if self._clips else [[] for _ in self.layout.parts]
        answers = call_all_servers(self._servers, "norms", [(self.era, step, numbers) for numbers in incomplete])
        norms = [norm for server_norms, _ in answers for norm in server_norms]
        norms += self.layout.norms_of_joined([data for _, data in answers]) if self._clips else []
        return total_norm(norms, factor)

    def move(self, step: int, norm: float, factor: float) -> None:
        """Makes the servers update their parameters by a step's gradient, after `norm`.

        Args:
            step: Number of the step, from 0 over the run.
            norm: The result of `norm` for this factor.
            factor: Factor for the gradient; 0 leaves the parameters as they are.
        """
        self._call("apply", step, norm, factor)

    def fetch(self) -> None:
        """Loads the state of the servers into the coordinator's state."""
        parts = self._call("state")
        for buffer, value in zip(self.layout.buffers, from_bytes(parts[0][1], self.layout.buffers), strict=True):
            buffer.copy_(value)
        self._state.load(self.layout.merge([unpack(files) for files, _ in parts], self._state.snapshot()))

    def begin_era(self, eras: list[int]) -> None:
        """Begins a new era by sending the coordinator's state to all servers.

        Args:
            eras: The present eras of the servers.
        """
        # The time makes the era higher than that of a coordinator that died together with all servers.
        era = max(self.era, *eras, time.time_ns() // 1_000_000) + 1
        buffers, no_buffers = to_bytes(self.layout.buffers), np.empty(0, np.uint8)
        parts = self.layout.split(self._state.snapshot())
        arguments = [(era, pack(part), no_buffers if number else buffers) for number, part in enumerate(parts)]
        if self._servers.call("load", arguments) is None:
            raise NotReadyError
        self.era = era

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return call_all_servers(self._servers, method, [(self.era, *arguments)] * len(self.layout.parts))
