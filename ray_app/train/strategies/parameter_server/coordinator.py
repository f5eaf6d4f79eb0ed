"""The coordinator of parameter servers: hands out units, ends steps, makes checkpoints and mends what is lost.

It holds no gradient. Its training state is that of the last cut: a moment when every unit before it is done and none
after it is begun, so that all servers together hold the state of one step. Checkpoints and snapshots are cuts, and a
lost server takes all back to the last one.

Who does what with parameter servers: pure bookkeeping of units, a unit being one logical worker's share of one step.

A logical worker's steps are done one after the other, by the worker that holds it, so that reading ahead pays. Its
holder changes only when workers come and go. How far it may be ahead of the slowest is bounded: Ho et al., "More
Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013.

What all parameter servers hold together, as one: moved step by step, taken over whole, and given to them anew in
another era.
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
import torch

from ray_app.checkpoint.format import pack, unpack
from ray_app.errors import DataError, NonFiniteError
from ray_app.plan.order import Cursor
from ray_app.reduction.base import World
from ray_app.runlog.journal import put_event
from ray_app.task import device
from ray_app.train.checkpointing.restore import restore_state
from ray_app.train.checkpointing.snapshots import SnapshotSender
from ray_app.train.checkpointing.step_log import StepLog
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import Phase, SingleProcessMembership
from ray_app.train.state.state import NO_STATE, TrainingState
from ray_app.train.step.step import total_norm
from ray_app.train.step.step_stats import check_same_metrics, combine_stats
from ray_app.train.strategies.parameter_server.layout import Layout, from_bytes, to_bytes
from ray_app.train.strategies.parameter_server.protocol import (
    CoordinatorReply,
    NotReadyError,
    Servers,
    Unit,
    UnitResult,
    call_all_servers,
)


class UnitScheduler:
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
        """Takes a fair share of what nobody holds, and takes over from who holds two more; nothing, once all hold as
        many or one more.
        """
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


class ServedState:
    """See the module. Every method raises `NotReadyError` if a server is lost.

    Args:
        job: The run.
        servers: The parameter servers, whatever they hold.
        state: The state that is taken over from them and given to them.
    """

    def __init__(self, job: Job, servers: Servers, state: TrainingState) -> None:
        self._servers, self._state = servers, state
        self._clips = job.config.train.grad_clip_norm is not None
        self.layout = Layout(state.model, state.optimizer, job.config.train)
        self.era = 0

    def eras(self) -> list[int]:
        """In which era each server is; 0 for one that holds nothing."""
        return call_all_servers(self._servers, "era", [()] * len(self.layout.parts))

    def norm(self, step: int, factor: float) -> float:
        """The norm of a step's gradient, times a factor. If it decides how far parameters move, its bits are those of
        `ddp`.
        """
        asked = self.layout.incomplete() if self._clips else [[] for _ in self.layout.parts]
        answers = call_all_servers(self._servers, "norms", [(self.era, step, some) for some in asked])
        norms = [n for some, _ in answers for n in some]
        norms += self.layout.norms_of_joined([data for _, data in answers]) if self._clips else []
        return total_norm(norms, factor)

    def move(self, step: int, norm: float, factor: float) -> None:
        """Lets the servers move their parameters by the gradient that `norm` looked at, times the factor; 0: they go on
        without.
        """
        self._call("apply", step, norm, factor)

    def take_over(self) -> None:
        """Makes what they hold the state here."""
        held = self._call("state")
        for buffer, value in zip(self.layout.buffers, from_bytes(held[0][1], self.layout.buffers), strict=True):
            buffer.copy_(value)
        self._state.load(self.layout.merge([unpack(files) for files, _ in held], self._state.snapshot()))

    def give(self, eras: list[int]) -> None:
        """Begins an era, in which the servers, whose eras those are, hold the state here."""
        era = (
            max(self.era, *eras, time.time_ns() // 1_000_000) + 1
        )  # never one of a coordinator that died with all servers
        buffers, none = to_bytes(self.layout.buffers), np.empty(0, np.uint8)
        parts = self.layout.split(self._state.snapshot())
        sent = [(era, pack(part), none if place else buffers) for place, part in enumerate(parts)]
        if self._servers.call("load", sent) is None:
            raise NotReadyError
        self.era = era

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        return call_all_servers(self._servers, method, [(self.era, *arguments)] * len(self.layout.parts))


logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
_PAUSE_S = 0.5  # between two looks at servers that are lost


class _Membership(SingleProcessMembership):
    """That of the coordinator, whose workers all wait while it does."""

    is_held_up = False
    """Whether it waits for the storage, or for all state on its way to or from the servers."""

    def enter(self, phase: Phase) -> None:
        """See `Membership.enter`."""
        self.is_held_up = phase == "saving"


class Coordinator:
    """See the module. Its methods may be called from several threads.

    It begins when a worker asks for the first time, which is told what goes wrong: an actor whose constructor raises is
    not started again.

    Args:
        job: The run.
        servers: The parameter servers, whatever they hold.
        sender: Where snapshots go and come from.
        hooks: For fault tests.
    """

    def __init__(
        self, job: Job, servers: Servers, sender: SnapshotSender | None = None, hooks: Hooks = Hooks()
    ) -> None:
        device.set_up_torch(job.config, CPU)
        self._job, self._plan, self._synchronous = job, job.plan, job.config.train.staleness == 0
        self._state = TrainingState(job.config, job.task, CPU, job.total_steps)
        self._served = ServedState(job, servers, self._state)
        put_event(job.paths, "partitioned", job.fence, servers=self._served.layout.held())
        self._membership = _Membership(self._plan.logical_workers, lambda: False)
        self._sender = sender or SnapshotSender([])
        self._make_recorder = partial(StepLog, job, self._state, self._membership, self._sender, CPU, hooks)
        self._recorder = self._make_recorder()
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
        """What a worker is to do next.

        Args:
            worker: Who asks; it works at nothing else any more.
            done: What it has done.
            broken_era: The era in which it found a server lost.
            wait_s: Most seconds to wait until there is something to do; None: it leaves, and takes on nothing more.

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

    def keep(self, live: set[str], paused: bool, stopping: bool) -> None:
        """Says how things are with the workers; called a few times a second.

        Args:
            live: Workers that are there, also those that are to leave; the others are lost.
            paused: Whether to wait for more of them.
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
    def is_held_up(self) -> bool:
        """Whether it, and with it every worker that asks, waits for the storage, or for all state on its way to or from
        the servers.

        Known also while `ask` and `keep` wait for that.
        """
        return self._membership.is_held_up

    @contextmanager
    def _held_up(self) -> Iterator[None]:
        self._membership.is_held_up = True
        try:
            yield
        finally:
            self._membership.is_held_up = False

    def _answer(
        self, worker: str, done: UnitResult | None, broken_era: int | None, wait_s: float | None
    ) -> CoordinatorReply:
        until_s = time.monotonic() + (wait_s or 0.0)
        self._broken = self._broken or broken_era == self._served.era
        if self._broken:
            self._mend()
        if done is not None:
            self._finish(done)
        if wait_s is None:
            self._units.lose(worker)
            self._lock.notify_all()
        while True:
            if self._stopping and not self._over:
                self._stop()
            found = None if wait_s is None or self._over or self._paused else self._units.take(worker, self._end)
            self._note_workers()
            left_s = until_s - time.monotonic()
            if found is not None or self._over or self._error is not None or left_s <= 0:
                break
            self._lock.wait(left_s)
        unit = Unit(self._served.era, *found) if found is not None else None
        rank = self._units.workers.index(worker) if worker in self._units.workers else 0
        held = self._units.held_by(worker)
        return CoordinatorReply(
            unit, held, rank, self._units.complete, self._membership.newest, self._paused, self._over
        )

    # Steps.

    def _finish(self, done: UnitResult) -> None:
        unit = done.unit
        if unit.era != self._served.era or not self._units.finish(unit.step, unit.logical_worker):
            return
        self._tables.setdefault(unit.step, {})[unit.logical_worker] = done
        if len(self._tables[unit.step]) == self._plan.logical_workers:
            self._end_step(unit.step, self._tables.pop(unit.step))
            self._lock.notify_all()

    def _end_step(self, step: int, table: dict[int, UnitResult]) -> None:
        """Every unit of a step is done."""
        cursor, parts = Cursor.at(step, self._plan.steps_per_epoch), [table[v] for v in sorted(table)]
        lines, planned = [part.row for part in parts], self._plan.global_rows(cursor.step)
        check_same_metrics(tuple(sorted(row.metrics)) for row in lines if row.rows)
        result = combine_stats(lines)
        if sum(result.rows) != planned:
            raise DataError(
                f"Step {cursor} consumed {sum(result.rows)} rows, {planned} were planned; please report this."
            )
        result = result.over_weight(planned)
        if self._synchronous:
            result = result._replace(
                grad_norm=self._apply(cursor, step, planned / result.weight if result.weight else 0.0)
            )
        wait_s = sum(part.wait_s for part in parts) / max(1, self._workers)
        self._recorder.record_step(cursor, step + 1, result, parts[0].lr, wait_s, max(1, self._workers))
        if step + 1 == self._end:
            self._cut()

    def _apply(self, cursor: Cursor, step: int, correction: float) -> float:
        """Lets the servers move their parameters by the corrected sum of a step's gradients; 0: nothing moves. Returns
        its norm.
        """
        norm = self._served.norm(step, correction)
        if not math.isfinite(norm):
            raise NonFiniteError(
                f"Epoch {cursor.epoch}, step {cursor.step} of the epoch: the sum of finite gradients is not finite. The"
                f" optimizer did not"
                " move. Lower the learning rate, or set train.grad_clip_norm."
            )
        self._served.move(step, norm, correction)
        return norm

    # Cuts.

    def _next_cut(self) -> int:
        job, step = self._job, self._units.complete + 1
        while step < job.total_steps and not (job.is_checkpoint_due(step) or job.is_snapshot_due(step)):
            step += 1
        return step

    def _stop(self) -> None:
        """Ends the run at the next step that can be a cut."""
        self._end = min(self._end, self._units.begun)
        if self._units.complete == self._end:
            self._cut()

    def _cut(self) -> None:
        """Takes over the state that the servers hold, keeps it if that is due, and ends the run if that is due."""
        job, step = self._job, self._units.complete
        if step > self._state.step:
            with self._held_up():
                self._served.take_over()
            if job.is_snapshot_due(step):
                self._recorder.snapshot()
        if step > self._saved_step and (self._stopping or job.is_checkpoint_due(step)):
            self._saved_step = step
            self._recorder.checkpoint(
                Cursor.at(step, self._plan.steps_per_epoch), "cadence" if job.is_checkpoint_due(step) else "extra"
            )
        if self._stopping or step >= job.total_steps:
            self._recorder.check()
            with self._held_up():
                self._recorder.close()
            self._over = True
        self._end = self._next_cut()

    # Losses.

    def _restore(self) -> None:
        """Finds the state to go on from; if the storage does not answer, it is looked for again."""
        try:
            with self._held_up():
                restore_state(self._job, self._state, self._recorder, self._sender, CPU)
        except OSError as error:
            logger.warning("The state to go on from cannot be read, will try again: %s", error)
            raise NotReadyError from error
        self._saved_step = self._state.step

    def _begin_era(self, eras: list[int]) -> None:
        """Gives the servers, whose eras these are, the state of the last cut, and goes on from there."""
        with self._held_up():
            self._served.give(eras)
        self._broken = self._halfway = False
        with self._held_up():
            self._recorder.align(World(0, 1, self._plan.logical_workers), self._served.era)
        self._units = UnitScheduler(self._plan.logical_workers, self._state.step, self._job.config.train.staleness)
        self._tables: dict[int, dict[int, UnitResult]] = {}
        self._over = self._over or self._state.step >= self._job.total_steps
        self._end = self._next_cut()

    def _mend(self) -> None:
        """Looks whether all servers hold what they should; if not, all go back to the last cut."""
        if self._state.step == NO_STATE:
            self._restore()
        eras = self._served.eras()
        self._broken = False
        if eras == [self._served.era] * len(eras) and not self._halfway:
            return
        if self._served.era:  # else this is the first
            step, self._lost_s = self._units.complete, time.time()
            put_event(self._job.paths, "server_lost", self._job.fence, step=step, back_to=self._state.step)
            logger.warning("A parameter server was lost after step %d; all go back to step %d", step, self._state.step)
            with self._held_up():
                self._recorder.close()
            self._recorder = self._make_recorder()
            self._workers = 0
        self._begin_era(eras)

    def _note_workers(self) -> None:
        """Records how many workers there are, when that has changed."""
        before, self._workers = self._workers, len(self._units.workers)
        if self._workers in (0, before):
            return
        details = {"generation": self._served.era, "workers": self._workers, "step": self._units.complete}
        lost = {"lost_s": self._lost_s} if self._lost_s is not None else {}
        put_event(self._job.paths, "formed", self._job.fence, **details, **lost)
        self._lost_s = None
