"""The rendezvous decides which workers form the next generation, and carries messages between the driver and workers.

A generation is a set of workers that step together. A new one forms whenever the set changes: a worker died or fell
silent, has to leave its node, or has just started. A worker with the training state keeps it in memory and waits here
for the next generation; no process restarts.

This module contains the decisions. They run in one thread, by a clock that is passed in, and no method waits for
anything. `cluster/rendezvous/server.py` puts them into a small Ray actor, which may itself be killed: every heartbeat
carries all that the rendezvous has to know about its worker, so a new instance knows all workers after one heartbeat
period. A heartbeat costs the same whatever the number of workers (`cluster/rendezvous/members.py`), and the period
grows with that number. Changes that cannot wait for the next heartbeat are pushed to all workers at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from ray_app.cluster.rendezvous.members import Kind, Member, Members
from ray_app.runlog.journal import StepRecord
from ray_app.train.membership import (
    HEARTBEAT_S,
    Flags,
    GenerationInfo,
    Heartbeat,
    HeartbeatReply,
    RendezvousStatus,
    StepWatchdog,
)

logger = logging.getLogger(__name__)

_COALESCE_S = 2.0
"""Seconds that a joining worker waits for other joining workers, so that one reform admits all of them."""
HEARTBEATS_PER_S = 1000
"""Heartbeats per second that all workers together are asked to send."""


class Rendezvous:
    """Forms generations from heartbeats.

    Args:
        silence_s: Seconds without a heartbeat, from when it was due, after which a worker is declared lost.
        step_timeout_s: Seconds without a finished step after which the workers that stall the group are ended; None: a
            multiple of the median step.
        clock: Returns the time in seconds.
        first_generation: The lowest number of a generation that this instance forms; no earlier instance has used it.
        heartbeats_per_s: See `HEARTBEATS_PER_S`.
        min_workers: A generation has at least so many workers. Fewer keep their state and wait.

    Attributes:
        on_change: Called when something changed that all workers are to know at once, see `reply_for`.
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
        # The workers that are silent, with the time at which they were declared lost. They may come back.
        self._lost: dict[str, float] = {}
        # The workers that have left or were evicted. If they come back they are told to exit.
        self._evicted: set[str] = set()
        # Whether the newest generation is broken, so that its members must leave it at once.
        self._is_broken = False
        self._expected = 0
        self._waiting_reason: str | None = None
        self._is_run_over = False
        self._flags = Flags(0)
        self._record: StepRecord | None = None
        self._recorded = 0
        self._started_s = self._clock()
        self._last_broadcast: object = None
        self.on_change: Callable[[], None] = lambda: None

    # Methods for workers.

    def handle_heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """Updates a worker, forms a generation if that has become possible, and returns the reply to the worker."""
        if heartbeat.worker in self._evicted:
            return HeartbeatReply(exit=True)
        before = self._members.get(heartbeat.worker)
        if before is not None and heartbeat.moves > before.heartbeat.moves:
            self._watchdog.moves()
        if heartbeat.generation > (before.heartbeat.generation if before is not None else 0):
            # With parameter servers a worker starts without a generation, and its start takes longer than a step.
            self._watchdog.begin(self._watchdog.step)
        member = self._update_member(heartbeat)
        self._record = heartbeat.record or self._record
        self._recorded = max(self._recorded, heartbeat.recorded)
        if heartbeat.generation == self._members.number:
            self._watchdog.finished(heartbeat.step, heartbeat.record)
        elif heartbeat.generation > self._members.number:
            # This instance has replaced one that died, which formed that generation.
            self._members.update(number=heartbeat.generation)
        if heartbeat.waits and heartbeat.waits != member.ticket:
            self._start_wait(member, heartbeat)
        self._broadcast_changes()
        return self._reply(member, heartbeat)

    def reply_for(self, worker: str) -> HeartbeatReply:
        """Returns the reply that is pushed to a worker between two of its heartbeats."""
        member = self._members.get(worker)
        if member is None:
            return HeartbeatReply(exit=worker in self._evicted)
        return self._reply(member, member.heartbeat)

    def _reply(self, member: Member, heartbeat: Heartbeat) -> HeartbeatReply:
        number = self._members.number
        is_current, waits = heartbeat.generation == number > 0, member.waiting_since_s is not None
        is_stale = 0 < heartbeat.generation < number and not heartbeat.waits
        flags = self._flags
        if is_current and self._wants_reform():
            flags |= Flags.REFORM
        leave = self._members.is_leaving(member) and member not in self._leavers_ahead()
        if leave and not is_state_staying(self._members):
            flags |= Flags.SAVE
        # The other workers record their stacks first: they show what they wait for.
        exits = member.exit and not any(other.dump for other in self._members if other is not member)
        # The reporting rank keeps the shortest period: its heartbeats carry the run's newest step.
        period_s = self._period_s if heartbeat.record is None else HEARTBEAT_S
        member.period_s = max(member.period_s, period_s)
        reply = HeartbeatReply(
            generation=heartbeat.generation,
            flags=flags,
            abort=is_stale or (is_current and self._is_broken),
            leave=leave,
            dump=member.dump,
            exit=exits,
            recorded=self._recorded,
            waits=waits,
            formed=None if waits or not heartbeat.waits else member.formed,
            period_s=period_s,
        )
        member.dump = False
        return reply

    @property
    def _period_s(self) -> float:
        return max(HEARTBEAT_S, max(len(self._members), self._expected) / self._heartbeats_per_s)

    def _broadcast_changes(self) -> None:
        """Calls `on_change` if what all workers are told differs from what they were told last."""
        broadcast = (
            self._members.number,
            self._is_broken,
            self._flags,
            self._members.leaving,
            self._wants_reform(),
            is_state_staying(self._members),
        )
        if broadcast != self._last_broadcast:
            self._last_broadcast = broadcast
            self.on_change()

    def _start_wait(self, member: Member, heartbeat: Heartbeat) -> None:
        """Notes that a worker waits for the next generation from now on."""
        member.ticket, member.formed = heartbeat.waits, None
        was_stepping = member.kind is not None and is_stepping(member.kind)
        if was_stepping and (heartbeat.lost or heartbeat.generation < self._members.number):
            # The other workers of the generation would wait for this one in their next collective.
            self._is_broken = True
        if heartbeat.generation == 0:
            logger.info("Worker %s on %s joins the rendezvous.", heartbeat.worker, heartbeat.host)
        member.waiting_since_s = self._clock()
        self._members.recount(member)
        self._try_form()

    async def leave(self, heartbeat: Heartbeat, over: bool = False) -> None:
        """Removes a worker that ends in order.

        Args:
            heartbeat: Its last heartbeat.
            over: Whether the run has ended with it: a worker that joins later must not wait for others.
        """
        self.handle_heartbeat(replace(heartbeat, waits=0))
        self._members.pop(heartbeat.worker)
        self._evicted.add(heartbeat.worker)
        self._is_run_over = self._is_run_over or over
        self._try_form()
        self._broadcast_changes()

    # Methods for the driver and the controller.

    async def raise_flags(self, flags: int) -> None:
        """Adds flags to the replies to all workers."""
        self._flags |= Flags(flags)
        self._broadcast_changes()

    async def set_expected(self, workers: int, waiting: str | None = None, over: bool = False) -> None:
        """Sets the number of workers that the next generation waits for.

        Args:
            workers: That number.
            waiting: Why no generation may form now; None if one may.
            over: Whether a worker has ended in order, and the run with it.
        """
        self._expected, self._waiting_reason = workers, waiting
        self._is_run_over = self._is_run_over or over
        self._try_form()
        self._broadcast_changes()

    async def pause_watchdog(self) -> None:
        """Restarts the time of the step watchdog.

        A component that all workers wait for, such as a coordinator that waits for the storage, calls this again and
        again meanwhile.
        """
        self._watchdog.moves()

    async def drain(self, leaving: set[str]) -> None:
        """Sets which workers have to leave, by the ids of their nodes or their own ids."""
        if leaving != self._members.leaving:
            self._members.update(leaving=frozenset(leaving))
        self._try_form()
        self._broadcast_changes()

    async def evict(self, workers: set[str]) -> None:
        """Removes workers for good: if they ever come back, they are told to exit."""
        for worker in workers:
            self.on_disconnect(worker, "the controller has evicted it")
            self._lost.pop(worker, None)
            self._evicted.add(worker)

    async def status(self) -> RendezvousStatus:
        """Returns the state of the group for the controller and the console."""
        leaving = {m.heartbeat.worker for m in self._members.leaving_members()} if self._members.leaving else set()
        live = {m.heartbeat.worker for m in self._members} - leaving
        is_short = self._members.number > 0 and len(live) < self._min_workers and not self._is_run_over
        shortage = f"{len(live)} of at least {self._min_workers} workers; waiting for others" if is_short else None
        return RendezvousStatus(
            live=live,
            leaving=leaving,
            silent={worker: self._clock() - since_s for worker, since_s in self._lost.items()},
            stepping=self._members.count(is_stepping),
            step=max(0, self._watchdog.step),
            record=self._record,
            waiting=self._waiting_reason or shortage,
            stopping=bool(self._flags & Flags.STOP),
            limit_s=self._watchdog.limit_s,
        )

    async def workers(self) -> list[Heartbeat]:
        """Returns the newest heartbeat of each worker of the current generation, by rank."""
        return sorted((m.heartbeat for m in self._members.stepping_members()), key=lambda heartbeat: heartbeat.rank)

    # How generations form.

    def _update_member(self, heartbeat: Heartbeat) -> Member:
        member = self._members.add(heartbeat)
        if member.waiting_since_s is None and heartbeat.generation < member.heartbeat.generation:
            # The heartbeat was sent before its worker heard that its generation has formed.
            heartbeat = replace(heartbeat, generation=member.heartbeat.generation, rank=member.heartbeat.rank)
        member.heartbeat, member.heartbeat_s = heartbeat, self._clock()
        member.period_s = 0.0
        self._members.recount(member)
        self._lost.pop(heartbeat.worker, None)
        return member

    def on_disconnect(self, worker: str, reason: str = "its connection has ended") -> None:
        """Declares a worker lost, which breaks its generation; a worker that is only cut off may come back."""
        member = self._members.pop(worker)
        if member is None:
            return
        logger.info("Worker %s on %s is lost: %s.", worker, member.heartbeat.host, reason)
        self._lost[worker] = self._clock()
        if member.heartbeat.generation == self._members.number:
            self._is_broken = True
        self._try_form()
        self._broadcast_changes()

    def _leavers_ahead(self) -> list[Member]:
        return [] if self._is_paused() else leavers_ahead(self._members)

    def _is_paused(self) -> bool:
        """Returns whether no generation may form now."""
        return self._waiting_reason is not None and not self._flags & Flags.STOP

    def _wants_reform(self) -> bool:
        """Returns whether the current generation should end at its next step boundary."""
        if self._is_broken or self._is_paused() or self._members.any(lambda k: k.leaving and k.current):
            return True
        oldest = next((m for m in self._members.waiting.values() if m.kind is not None and not m.kind.leaving), None)
        if oldest is None or oldest.waiting_since_s is None:
            return False
        return (
            self._members.count(lambda k: not k.leaving) >= self._expected
            or self._clock() - oldest.waiting_since_s > _COALESCE_S
        )

    def _try_form(self) -> None:
        if not self._members.waiting or self._is_paused() or not have_all_returned(self._members, self._is_broken):
            return
        ahead = self._leavers_ahead()
        ready = self._members.count(lambda k: k.waits and not k.leaving) + len(ahead)
        # By then a new instance of the rendezvous has had a heartbeat of every live worker.
        knows_all = self._clock() - self._started_s > self._silence_s + self._period_s
        is_complete = self._is_run_over or ready >= self._expected > 0
        has_incumbents = ahead or self._members.any(lambda k: k.current and not k.leaving)
        if not ready or (not is_complete and not (has_incumbents and knows_all)):
            return
        if ready < self._min_workers and not (self._is_run_over or self._flags & Flags.STOP):
            return
        has_state = ahead or self._members.any(lambda k: k.has_state and k.waits and not k.leaving)
        if not has_state and self._members.any(lambda k: k.has_state or is_stepping(k)):
            # A worker that has the state, or may have it by now, either saves it before it leaves or comes back.
            return
        staying = [m for m in self._members.waiting.values() if m.kind is not None and not m.kind.leaving]
        self._form(staying + ahead)

    def _form(self, ready: list[Member]) -> None:
        ready = sort_by_rank(ready)
        number = max(self._members.number + 1, self._first_generation)
        step = max(m.heartbeat.step for m in ready)
        self._is_broken = False
        self._watchdog.begin(step)
        first, hosts = ready[0].heartbeat, tuple(m.heartbeat.host for m in ready)
        for rank, member in enumerate(ready):
            member.heartbeat = replace(member.heartbeat, generation=number, rank=rank)
            member.waiting_since_s = None
            member.formed = GenerationInfo(number, rank, len(ready), first.host, first.port, hosts)
        self._members.update(number=number)
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
        if not self._members.any(lambda k: is_stepping(k) and k.phase != "done"):
            return
        if self._members.any(lambda k: is_stepping(k) and k.phase == "saving"):
            self._watchdog.moves()
            return
        stalls = self._watchdog.times(now)
        if not stalls:
            return
        stepping = self._members.stepping_members()
        # Workers in these phases wait for the others; a worker in another phase stalls the group.
        culprits = [m for m in stepping if m.heartbeat.phase not in ("forming", "exchange", "done")]
        for member in stepping:
            member.dump = True
        if culprits or stalls > 1:
            for member in culprits or stepping:
                member.exit = True
                logger.info(
                    "Worker %s (rank %d on %s) is evicted: no step has finished for %.0f s, and it is in phase %s.",
                    member.heartbeat.worker,
                    member.heartbeat.rank,
                    member.heartbeat.host,
                    self._watchdog.limit_s,
                    member.heartbeat.phase,
                )
        else:
            # All workers wait for each other: a collective is stuck, which a new generation resolves.
            self._is_broken = True
        self.on_change()


def is_stepping(kind: Kind) -> bool:
    """Returns whether members of this kind are in the newest generation and do not wait for the next."""
    return kind.current and not kind.waits


def is_state_staying(members: Members) -> bool:
    """Returns whether a member that has the training state stays."""
    return members.any(lambda k: k.has_state and not k.leaving)


def leavers_ahead(members: Members) -> list[Member]:
    """Returns the waiting members that have to leave and have finished a step that no staying member has.

    They take part in the next generation, so that the staying members get this step from them.
    """
    if not members.any(lambda k: k.leaving and k.waits and k.has_state) or not is_state_staying(members):
        return []
    newest = max(m.heartbeat.step for m in members if not members.is_leaving(m))
    return [m for m in members.waiting.values() if members.is_leaving(m) and m.heartbeat.step > newest]


def have_all_returned(members: Members, is_broken: bool) -> bool:
    """Returns whether all members of the newest generation wait for the next.

    Args:
        members: All known members.
        is_broken: Whether the generation is broken. Then the members that have to leave must have returned, too, since
            their step may be the newest.
    """
    return not members.any(
        lambda k: k.current and not k.waits and (not k.leaving or (is_broken and k.phase not in ("saving", "done")))
    )


def sort_by_rank(ready: list[Member]) -> list[Member]:
    """Returns members in the order of their new ranks.

    Members with the training state come before those without, incumbents keep their order, and members on one host
    follow each other.
    """
    ordered = sorted(
        ready,
        key=lambda m: (m.heartbeat.step < 0, m.heartbeat.rank if m.heartbeat.generation else 0, m.waiting_since_s),
    )
    host_order = {host: index for index, host in enumerate(dict.fromkeys(m.heartbeat.host for m in ordered))}
    # The sort is stable, so the first member stays the first.
    return sorted(ordered, key=lambda m: host_order[m.heartbeat.host])
