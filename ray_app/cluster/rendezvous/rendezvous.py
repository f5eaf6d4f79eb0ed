"""The rendezvous decides which workers form the next generation, and carries messages between the driver and workers.

A generation is a set of workers that step together. A new one forms whenever the set changes: a worker has died, has
fallen silent, is draining, or has just started. A worker with the training state keeps it in memory while it
waits for the next generation; no process restarts.

This module contains the decisions. They run in one thread, by a clock that is passed in, and no method blocks.
`cluster/rendezvous/actor.py` puts them into a small Ray actor, which may itself be killed: every heartbeat carries all
that the rendezvous has to know about its worker, so a new instance knows all workers after one heartbeat period.

The cost of a heartbeat does not depend on the number of workers (`cluster/rendezvous/members.py`), and the heartbeat
period grows with that number. Changes that cannot wait for the next heartbeat are pushed to all workers at once.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from ray_app.cluster.rendezvous.members import Member, Members, MemberState
from ray_app.runlog.journal import StepRecord
from ray_app.train.membership import (
    HEARTBEAT_S,
    KEY_BYTES,
    Flags,
    GenerationInfo,
    Heartbeat,
    HeartbeatReply,
    RendezvousStatus,
    StepWatchdog,
)

logger = logging.getLogger(__name__)

_COALESCE_S = 2.0
"""Seconds that a joining worker waits for other joining workers, so that one new generation admits all of them."""
HEARTBEATS_PER_S = 1000
"""Maximum number of heartbeats per second that the workers are asked to send, all of them together."""


class GenerationState(Enum):
    """The state of the newest generation; docs/architecture.md has a table with what triggers the transitions."""

    GATHERING = "gathering"
    """Workers wait for the next one, and one of `FORMING_CONDITIONS` does not hold yet."""
    PAUSED = "paused"
    """The controller gives a reason why no next one may form."""
    FORMING = "forming"
    """It has formed; its workers open their process group."""
    STEPPING = "stepping"
    """Its workers run steps."""
    BROKEN = "broken"
    """A worker of it was lost, or its collectives are stuck; its workers leave it at once."""
    OVER = "over"
    """The run has ended, or the driver has asked to stop it."""


class Rendezvous:
    """Forms generations from heartbeats.

    Args:
        silence_s: Seconds without a heartbeat after which a worker is declared lost. A worker with a longer heartbeat
            period than `HEARTBEAT_S` may be silent for longer, by the difference.
        step_timeout_s: Seconds without a finished step after which the workers that stall the group are ended; None for
            a multiple of the median duration of a step, see `StepWatchdog`.
        clock: Returns the time in seconds.
        first_generation: The lowest number of a generation that this instance forms; no earlier instance has used it.
        heartbeats_per_s: See `HEARTBEATS_PER_S`.
        min_workers: The minimum number of workers of a generation. Fewer workers keep their state and wait.

    Attributes:
        on_change: Called after a change that all workers have to know at once; it pushes `reply_for` to each of them.
    """

    def __init__(
        self,
        silence_s: float,
        step_timeout_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        first_generation: int = 1,
        heartbeats_per_s: float = HEARTBEATS_PER_S,
        min_workers: int = 1,
    ) -> None:
        self._silence_s = silence_s
        self._clock = clock
        self._first_generation = first_generation
        self._heartbeats_per_s = heartbeats_per_s
        self._min_workers = min_workers
        self._watchdog = StepWatchdog(step_timeout_s, clock)
        self._members = Members()
        # The lost workers, with the time at which each was declared lost. A lost worker may come back.
        self._lost: dict[str, float] = {}
        # The workers that have exited or were removed. If one of them sends a heartbeat, the reply tells it to exit.
        self._ended = set[str]()
        # Whether the newest generation is broken, so that its members must leave it at once.
        self._is_broken = False
        # Whether no member of the newest generation has got beyond its forming, and none is lost; and the number of
        # generations in a row that broke in this state.
        self._is_forming = False
        self._failed_forms = 0
        # The number of workers that the next generation waits for; 0 before the controller has set it.
        self._expected = 0
        # Why no generation may form now; None if one may.
        self._wait_reason: str | None = None
        # Whether the run has ended, so that a joining worker must not wait for others.
        self._is_run_over = False
        # The flags that the driver has raised.
        self._flags = Flags(0)
        # The record of the newest finished step, and the last step with its record on storage.
        self._newest_record: StepRecord | None = None
        self._stored_step = 0
        self._started_s = self._clock()
        # What the workers knew at the last call of `on_change`, see `_broadcast_changes`.
        self._last_broadcast: object = None
        self.on_change: Callable[[], None] = lambda: None

    # Methods for workers.

    def handle_heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """Updates a worker, forms a generation if that has become possible, and returns the reply to the worker."""
        if heartbeat.worker in self._ended:
            return HeartbeatReply(exit=True)
        existing = self._members.get(heartbeat.worker)
        if existing is not None and heartbeat.progress_reports > existing.heartbeat.progress_reports:
            self._watchdog.restart_limit()
        known_generation = existing.heartbeat.generation if existing is not None else 0
        if heartbeat.generation > known_generation and heartbeat.generation >= self._members.newest_generation:
            # The worker steps in a generation that this instance has not recorded for it: the worker uses parameter
            # servers and needs no process group, an earlier instance formed the generation, or the worker was declared
            # lost and is back. Its next step may be a first one, for which the watchdog has a longer limit.
            self._watchdog.begin(self._watchdog.step)
        member = self._update_member(heartbeat)
        self._newest_record = heartbeat.record or self._newest_record
        self._stored_step = max(self._stored_step, heartbeat.stored_step)
        if heartbeat.generation == self._members.newest_generation:
            self._watchdog.note_step(heartbeat.step, heartbeat.record)
            self._is_forming &= heartbeat.phase in ("waiting", "forming")
            # The worker has left the generation in the middle, and comes back or ends.
            self._is_broken |= heartbeat.was_broken and not heartbeat.wait_number
        elif heartbeat.generation > self._members.newest_generation:
            # An earlier instance formed that generation, or the worker uses parameter servers.
            self._members.update(newest_generation=heartbeat.generation)
        if heartbeat.wait_number and heartbeat.wait_number != member.wait_number:
            self._start_wait(member, heartbeat)
        self._broadcast_changes()
        return self._reply(member, heartbeat)

    def _update_member(self, heartbeat: Heartbeat) -> Member:
        """Stores a heartbeat and returns the member that sent it; a new or a lost worker becomes a member."""
        member = self._members.add(heartbeat)
        if member.waiting_since_s is None and heartbeat.generation < member.heartbeat.generation:
            # The worker sent the heartbeat before it received the generation that has formed with it.
            heartbeat = replace(heartbeat, generation=member.heartbeat.generation, rank=member.heartbeat.rank)
        member.heartbeat, member.heartbeat_s = heartbeat, self._clock()
        member.period_s = 0.0
        self._members.recount(member)
        self._lost.pop(heartbeat.worker, None)
        return member

    def reply_for(self, worker: str) -> HeartbeatReply:
        """Returns the reply that is pushed to a worker between two of its heartbeats.

        It is an empty reply for a lost worker, and one that tells a worker that has exited or was removed to exit.
        """
        member = self._members.get(worker)
        if member is None:
            return HeartbeatReply(exit=worker in self._ended)
        return self._reply(member, member.heartbeat)

    def _reply(self, member: Member, heartbeat: Heartbeat) -> HeartbeatReply:
        """Returns the reply to a heartbeat of a member, and clears the request for the member's stacks."""
        newest_generation = self._members.newest_generation
        is_current, waits = heartbeat.generation == newest_generation > 0, member.waiting_since_s is not None
        is_stale = 0 < heartbeat.generation < newest_generation and not heartbeat.wait_number
        flags = self._flags
        if is_current and self._wants_reform():
            flags |= Flags.REFORM
        drain = member.profile.is_draining and member not in self._draining_ahead()
        # Without a checkpoint the state would be lost, since all members that have it are draining.
        if drain and not is_state_staying(self._members):
            flags |= Flags.SAVE
        # This member exits only after all others were asked for their stacks, which show what they wait for.
        exits = member.exit and not any(other.dump for other in self._members if other is not member)
        # Rank 0, which sends records, keeps the shortest period: its heartbeats carry the run's newest step.
        period_s = self._period_s if heartbeat.record is None else HEARTBEAT_S
        member.period_s = max(member.period_s, period_s)
        reply = HeartbeatReply(
            generation=heartbeat.generation,
            flags=flags,
            abort=is_stale or (is_current and self._is_broken),
            drain=drain,
            dump=member.dump,
            exit=exits,
            stored_step=self._stored_step,
            is_for_waiting=waits,
            formed=member.formed if heartbeat.wait_number else None,
            period_s=period_s,
        )
        member.dump = False
        return reply

    @property
    def _period_s(self) -> float:
        """The heartbeat period in seconds, at which all workers together send at most `heartbeats_per_s`."""
        return max(HEARTBEAT_S, max(len(self._members), self._expected) / self._heartbeats_per_s)

    def _broadcast_changes(self) -> None:
        """Calls `on_change` if the part of the replies that concerns all workers has changed since the last call."""
        broadcast = (
            self._members.newest_generation,
            self._is_broken,
            self._flags,
            self._members.draining,
            self._wants_reform(),
            is_state_staying(self._members),
        )
        if broadcast != self._last_broadcast:
            self._last_broadcast = broadcast
            self.on_change()

    def _start_wait(self, member: Member, heartbeat: Heartbeat) -> None:
        """Notes that a worker waits for the next generation from now on, which may complete that generation."""
        member.wait_number, member.formed = heartbeat.wait_number, None
        if member.profile.is_stepping and (
            heartbeat.was_broken or heartbeat.generation < self._members.newest_generation
        ):
            # The worker left the newest generation in the middle of a step, or never entered it. The other workers
            # would wait for it in their next collective.
            self._is_broken = True
        if heartbeat.generation == 0:
            logger.info("Worker %s on %s joins the rendezvous.", heartbeat.worker, heartbeat.host)
        member.waiting_since_s = self._clock()
        self._members.recount(member)
        self._try_form()

    def report_exit(self, heartbeat: Heartbeat, over: bool = False) -> None:
        """Takes the last heartbeat of a worker that exits by itself.

        Args:
            heartbeat: The worker's last heartbeat.
            over: Whether the worker has ended because the run has; a worker that joins later must not wait for others.
        """
        self.handle_heartbeat(replace(heartbeat, wait_number=0))
        member = self._members.pop(heartbeat.worker)
        # A generation may have formed with the worker, of which the worker does not know yet. The other members would
        # wait for it while their process group forms.
        if member is not None and heartbeat.generation < member.heartbeat.generation == self._members.newest_generation:
            self._is_broken = True
        self._is_forming = False
        self._ended.add(heartbeat.worker)
        self._is_run_over = self._is_run_over or over
        self._try_form()
        self._broadcast_changes()

    def on_disconnect(self, worker: str, reason: str = "its connection has ended") -> None:
        """Declares a worker lost, which breaks the newest generation if the worker is in it.

        A worker that was only cut off becomes a member again with its next heartbeat.
        """
        member = self._members.pop(worker)
        if member is None:
            return
        logger.info("Worker %s on %s is lost: %s.", worker, member.heartbeat.host, reason)
        self._lost[worker] = self._clock()
        self._is_forming = False
        if member.heartbeat.generation == self._members.newest_generation:
            self._is_broken = True
        self._try_form()
        self._broadcast_changes()

    # Methods for the driver and the controller.

    def raise_flags(self, flags: int) -> None:
        """Raises flags for good: every reply to every worker carries them from now on."""
        self._flags |= Flags(flags)
        self._broadcast_changes()

    def set_expected(self, workers: int, wait_reason: str | None = None, over: bool = False) -> None:
        """Sets the number of workers that the next generation waits for.

        Args:
            workers: The number of workers.
            wait_reason: Why no generation may form now; None if one may.
            over: Whether a worker has ended because the run has.
        """
        self._expected, self._wait_reason = workers, wait_reason
        self._is_run_over = self._is_run_over or over
        self._try_form()
        self._broadcast_changes()

    def pause_watchdog(self) -> None:
        """Restarts the time limit of the step watchdog.

        It pauses the watchdog if it is called repeatedly, as it is while all workers wait for a coordinator of
        parameter servers that waits for the storage.
        """
        self._watchdog.restart_limit()

    def drain(self, draining: set[str]) -> None:
        """Sets which workers have to exit at the next step boundary, and replaces the earlier set.

        Args:
            draining: Ids of nodes, all workers of which are draining, and ids of workers.
        """
        if draining != self._members.draining:
            self._members.update(draining=frozenset(draining))
        self._try_form()
        self._broadcast_changes()

    def remove(self, workers: set[str]) -> None:
        """Removes workers for good: the reply to a heartbeat that one of them still sends tells it to exit."""
        for worker in workers:
            self.on_disconnect(worker, "the controller has removed it")
            self._lost.pop(worker, None)
            self._ended.add(worker)

    def status(self) -> RendezvousStatus:
        """Returns the state of the members for the controller and the console."""
        live = {m.heartbeat.worker for m in self._members.select(lambda p: not p.is_draining)}
        is_short = self._members.newest_generation > 0 and len(live) < self._min_workers and not self._is_run_over
        shortage = f"{len(live)} of at least {self._min_workers} workers; waiting for others" if is_short else None
        return RendezvousStatus(
            live=live,
            draining={m.heartbeat.worker for m in self._members.select(lambda p: p.is_draining)},
            lost_for_s={worker: self._clock() - since_s for worker, since_s in self._lost.items()},
            stepping=self._members.count(lambda p: p.is_stepping),
            step=max(0, self._watchdog.step),
            record=self._newest_record,
            wait_reason=self._wait_reason or shortage,
            stopping=bool(self._flags & Flags.STOP),
            limit_s=self._watchdog.limit_s,
        )

    def workers(self) -> list[Heartbeat]:
        """Returns the newest heartbeat of each worker of the current generation, by rank."""
        stepping = self._members.select(lambda p: p.is_stepping)
        return sorted((m.heartbeat for m in stepping), key=lambda heartbeat: heartbeat.rank)

    # How generations form.

    def _draining_ahead(self) -> list[Member]:
        """Returns the draining members that take part in one more generation, see `draining_ahead`."""
        return [] if self._is_paused() else draining_ahead(self._members)

    def _is_paused(self) -> bool:
        """Returns whether the controller gives a reason to wait, which has no effect once the run stops."""
        return self._wait_reason is not None and not self._flags & Flags.STOP

    def _wants_reform(self) -> bool:
        """Returns whether the current generation should end at its next step boundary."""
        if (
            self._is_broken
            or self._is_paused()
            or self._members.any(lambda p: p.is_draining and p.in_newest_generation)
        ):
            return True
        oldest = next((m for m in self._members.waiting.values() if not m.profile.is_draining), None)
        if oldest is None or oldest.waiting_since_s is None:
            return False
        return (
            self._members.count(lambda p: not p.is_draining) >= self._expected
            or self._clock() - oldest.waiting_since_s > _COALESCE_S
        )

    @property
    def generation_state(self) -> GenerationState:
        """The state of the newest generation."""
        if self._is_paused():
            return GenerationState.PAUSED
        if self._is_broken:
            return GenerationState.BROKEN
        if self._members.any(lambda p: p.is_stepping and p.phase == "forming"):
            return GenerationState.FORMING
        if self._members.any(lambda p: p.is_stepping):
            return GenerationState.STEPPING
        is_over = self._is_run_over or self._flags & Flags.STOP
        return GenerationState.OVER if is_over else GenerationState.GATHERING

    def _try_form(self) -> None:
        """Forms the next generation if all `FORMING_CONDITIONS` hold."""
        if all(holds(self) for holds in FORMING_CONDITIONS):
            staying = [m for m in self._members.waiting.values() if m.profile.is_ready]
            self._form(staying + self._draining_ahead())

    def is_awaited(self) -> bool:
        """Returns whether a worker waits and the controller gives no reason against a generation."""
        return bool(self._members.waiting) and self.generation_state is not GenerationState.PAUSED

    def have_all_returned(self) -> bool:
        """Returns whether every member that the next generation needs has left the newest one.

        If the newest generation is broken, the draining members must have left it, too, since one of them may have
        finished a step that no staying member has; a member that already saves or is done does not come back.
        Otherwise all members finished the same step, and the draining ones do not count.
        """
        is_broken = self._is_broken
        return not self._members.any(
            lambda p: p.is_stepping and (not p.is_draining or (is_broken and p.phase not in ("saving", "done")))
        )

    def are_enough_ready(self) -> bool:
        """Returns whether as many workers wait as are expected, or fewer may continue without the others."""
        num_ready = self._num_ready()
        if self._is_run_over or num_ready >= self._expected > 0:
            return num_ready > 0
        # Members of the newest generation continue without the other expected workers, which join later. Before this
        # time an instance that has replaced another one may not have received a heartbeat of every live worker.
        knows_all_workers = self._clock() - self._started_s > self._silence_s + self._period_s
        has_incumbents = self._members.any(lambda p: p.in_newest_generation and not p.is_draining)
        return num_ready > 0 and knows_all_workers and (has_incumbents or bool(self._draining_ahead()))

    def has_min_workers(self) -> bool:
        """Returns whether the minimum number of workers wait, or the run ends."""
        return self._num_ready() >= self._min_workers or self._is_run_over or bool(self._flags & Flags.STOP)

    def is_state_ready(self) -> bool:
        """Returns whether a waiting worker has the training state, or no member has or may have it.

        A worker that is not ready saves the state before it exits, or it comes back; a generation without it would
        repeat steps. A worker that steps may have a state by now.
        """
        if self._draining_ahead() or self._members.any(lambda p: p.has_state and p.is_ready):
            return True
        return not self._members.any(lambda p: p.has_state or p.is_stepping)

    def _num_ready(self) -> int:
        return self._members.count(lambda p: p.is_ready) + len(self._draining_ahead())

    def _form(self, ready: list[Member]) -> None:
        """Forms the next generation of these members; the replies to them carry it."""
        ready = sort_by_rank(ready)
        number = max(self._members.newest_generation + 1, self._first_generation)
        step = max(m.heartbeat.step for m in ready)
        self._failed_forms = self._failed_forms + 1 if self._is_forming and self._is_broken else 0
        self._is_broken, self._is_forming = False, True
        self._watchdog.begin(step)
        first, hosts = ready[0].heartbeat, tuple(m.heartbeat.host for m in ready)
        key, uses_gloo = secrets.token_hex(KEY_BYTES), any(m.heartbeat.uses_gloo for m in ready)
        for rank, member in enumerate(ready):
            member.heartbeat = replace(member.heartbeat, generation=number, rank=rank)
            member.waiting_since_s = None
            member.formed = GenerationInfo(
                number, rank, len(ready), first.host, first.port, hosts, key, uses_gloo, self._failed_forms
            )
        self._members.update(newest_generation=number)
        logger.info("Generation %d has formed with %d workers at step %d.", number, len(ready), max(0, step))

    # Silent workers and the step watchdog.

    def check_liveness(self, now: float) -> None:
        """Declares silent workers lost and checks the step watchdog; called a few times a second."""
        silent = [
            m for m in self._members if now - m.heartbeat_s > self._silence_s + max(0.0, m.period_s - HEARTBEAT_S)
        ]
        for member in silent:
            self.on_disconnect(member.heartbeat.worker, f"no heartbeat for {now - member.heartbeat_s:.1f} s")
        self._check_watchdog(now)
        self._try_form()
        self._broadcast_changes()

    def _check_watchdog(self, now: float) -> None:
        """Ends the members that stall the newest generation, or breaks the generation if all wait for each other.

        If all still wait for each other at the next stall of the same step, all of them are ended.
        """
        if not self._members.any(lambda p: p.is_stepping and p.phase != "done"):
            return
        if self._members.any(lambda p: p.is_stepping and p.phase == "saving"):
            # The others wait for this member, which waits for the storage.
            self._watchdog.restart_limit()
            return
        stall_count = self._watchdog.count_stalls(now)
        if not stall_count:
            return
        stepping = self._members.select(lambda p: p.is_stepping)
        # Members in these phases wait for the others; a member in another phase stalls the group. Of several that
        # compute all but one may wait, too: a process can queue only so many kernels while NCCL waits for a peer.
        stalling = [m for m in stepping if m.heartbeat.phase not in ("forming", "reduction", "done")]
        computing = [m for m in stalling if m.heartbeat.phase == "compute"]
        if len(computing) > 1 and stall_count == 1:
            stalling = [m for m in stalling if m not in computing]
        for member in stepping:
            member.dump = True
        if stalling or stall_count > 1:
            for member in stalling or stepping:
                member.exit = True
                logger.info(
                    "Worker %s (rank %d on %s) is ordered to exit: no step has finished for %.0f s; its phase is %s.",
                    member.heartbeat.worker,
                    member.heartbeat.rank,
                    member.heartbeat.host,
                    self._watchdog.limit_s,
                    member.heartbeat.phase,
                )
        else:
            # All members wait for each other: a collective is stuck, which a new generation resolves.
            self._is_broken = True
        # `_broadcast_changes` does not compare the requests for stacks and exits, which concern single members.
        self.on_change()


FORMING_CONDITIONS = (
    Rendezvous.is_awaited,
    Rendezvous.have_all_returned,
    Rendezvous.are_enough_ready,
    Rendezvous.has_min_workers,
    Rendezvous.is_state_ready,
)
"""A generation forms when all of these hold; docs/architecture.md explains them in the same order."""


def is_state_staying(members: Members) -> bool:
    """Returns whether at least one member with the training state is not draining."""
    return members.any(lambda p: p.has_state and not p.is_draining)


def draining_ahead(members: Members) -> list[Member]:
    """Returns the waiting draining members that have finished a step that no staying member has finished.

    They take part in the next generation, so that the staying members receive the state after this step from them.
    There are none if no staying member has a state; the draining members then save theirs.
    """
    if not members.any(lambda p: p.is_draining and p.state is MemberState.WAITING and p.has_state):
        return []
    if not is_state_staying(members):
        return []
    newest = max(m.heartbeat.step for m in members.select(lambda p: not p.is_draining))
    return [m for m in members.waiting.values() if m.profile.is_draining and m.heartbeat.step > newest]


def sort_by_rank(ready: list[Member]) -> list[Member]:
    """Returns members in the order of their new ranks.

    Members with the training state come first, in the order of their last ranks. Then the members are grouped by host,
    in the order in which the hosts first occur, so that the ranks on one host are consecutive. A member without a state
    may therefore come before one with a state, but rank 0 has the state if any member has it.
    """
    ordered = sorted(
        ready,
        key=lambda m: (m.heartbeat.step < 0, m.heartbeat.rank if m.heartbeat.generation else 0, m.waiting_since_s),
    )
    host_order = {host: index for index, host in enumerate(dict.fromkeys(m.heartbeat.host for m in ordered))}
    # The sort is stable, so the first member, which has the state if any has, stays the first and becomes rank 0.
    return sorted(ordered, key=lambda m: host_order[m.heartbeat.host])
