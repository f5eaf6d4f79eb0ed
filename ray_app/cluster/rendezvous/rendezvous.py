"""The rendezvous decides which workers form the next generation, and passes words between driver and workers.

A generation is a set of workers that step together. A new one forms whenever the set changes: somebody died, fell
silent, is asked to leave its node, or has just started. Whoever holds the training state keeps it and comes back here;
nobody is restarted.

It is a small actor (`cluster.rendezvous.actor`), which may itself be killed: members tell it who they are with every
heartbeat, so a new instance knows them after a moment. Here is what it decides, in one thread and by a clock that is
given; no method waits for anything. A heartbeat costs the same whatever the number of workers
(`cluster.rendezvous.members`), and the more there are the rarer are those of each; what cannot wait for the next one is
told at once.

What the members are told apart by when a generation forms: who is back, who has the state, and in which order they
rank.
"""

from __future__ import annotations

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


def steps_now(kind: Kind) -> bool:
    """Whether such a member is in the newest generation and has not come back from it."""
    return kind.current and not kind.waits


def state_stays(members: Members) -> bool:
    """Whether somebody who has the training state stays."""
    return members.any(lambda k: k.has_state and not k.leaving)


def brought(members: Members) -> list[Member]:
    """Those who have to leave and come back from a broken generation with a step that nobody has finished who stays."""
    if not members.any(lambda k: k.leaving and k.waits and k.has_state) or not state_stays(members):
        return []
    newest = max(m.beat.step for m in members if not members.leaves(m))
    return [m for m in members.waiting.values() if members.leaves(m) and m.beat.step > newest]


def is_complete(members: Members, broken: bool) -> bool:
    """Whether all of the last generation are back.

    Args:
        members: All that are known.
        broken: Whether it broke: then those who have to leave, too, since their step may be the newest.
    """
    return not members.any(
        lambda k: k.current and not k.waits and (not k.leaving or (broken and k.phase not in ("saving", "done")))
    )


def ranked(ready: list[Member]) -> list[Member]:
    """By rank: who has the state before who has none, incumbents as they were, those of one host together."""
    ordered = sorted(ready, key=lambda m: (m.beat.step < 0, m.beat.rank if m.beat.generation else 0, m.joined_s))
    places = {host: place for place, host in enumerate(dict.fromkeys(m.beat.host for m in ordered))}
    return sorted(ordered, key=lambda m: places[m.beat.host])  # the first stays the first


_COALESCE_S = 2.0  # a newcomer waits this long for other newcomers
BEATS_PER_S = 1000
"""Signs of life that all workers together are asked for."""


class Rendezvous:
    """See the module.

    Args: silence_s: Seconds without a heartbeat, from when it was due, after which a worker counts as lost.
        step_timeout_s: Seconds without a finished step after which the workers that hold it up are ended; None: a
        multiple of the
            median step.
        clock: Tells the seconds.
        first: The least number of a generation that this instance forms: none that an instance before it has given.
        beats_per_s: See `BEATS_PER_S`.
        least: Fewer workers form no generation: those who are left keep the state and wait.

    Attributes:
        call: Called when something changed that all are to be told at once, see `orders`.
    """

    def __init__(
        self,
        silence_s: float,
        step_timeout_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        first: int = 1,
        beats_per_s: float = BEATS_PER_S,
        least: int = 1,
    ) -> None:
        self._silence_s, self._clock, self._standstill = silence_s, clock, StepWatchdog(step_timeout_s, clock)
        self._members, self._beats_per_s, self._least = Members(), beats_per_s, least
        self._lost: dict[str, float] = {}
        self._gone: set[str] = set()
        self._first = first
        self._urgent = False
        self._expected = 0
        self._waiting: str | None = None
        self._over = False
        self._flags = Flags(0)
        self._record: StepRecord | None = None
        self._recorded = 0
        self._began_s = self._clock()
        self._told: object = None
        self.call: Callable[[], None] = lambda: None

    # What workers call.

    def answer(self, beat: Heartbeat) -> HeartbeatReply:
        """A worker's sign of life, and what it is told."""
        if beat.worker in self._gone:
            return HeartbeatReply(exit=True)
        known = self._members.get(beat.worker)
        if known is not None and beat.moves > known.beat.moves:
            self._standstill.moves()
        if beat.generation > (known.beat.generation if known is not None else 0):
            self._standstill.begin(self._standstill.step)  # it begins unasked, which takes longer than a step
        member = self._know(beat)
        self._record = beat.record or self._record
        self._recorded = max(self._recorded, beat.recorded)
        if beat.generation == self._members.number:
            self._standstill.finished(beat.step, beat.record)
        elif beat.generation > self._members.number:  # this instance is new
            self._members.now(number=beat.generation)
        if beat.waits and beat.waits != member.ticket:
            self._enter(member, beat)
        self._notice()
        return self._orders(member, beat)

    def orders(self, worker: str) -> HeartbeatReply:
        """What a worker is told now, unasked."""
        member = self._members.get(worker)
        return HeartbeatReply(exit=worker in self._gone) if member is None else self._orders(member, member.beat)

    def _orders(self, member: Member, beat: Heartbeat) -> HeartbeatReply:
        number = self._members.number
        current, waits = beat.generation == number > 0, member.joined_s is not None
        stale = 0 < beat.generation < number and not beat.waits
        flags = self._flags
        if current and self._wants_reform():
            flags |= Flags.REFORM
        leave = self._members.leaves(member) and member not in self._brought()
        if leave and not state_stays(self._members):
            flags |= Flags.SAVE
        exits = member.exit and not any(
            other.dump for other in self._members if other is not member
        )  # who show what they do now
        aborts, formed = stale or (current and self._urgent), None if waits or not beat.waits else member.formed
        period_s = self._period_s if beat.record is None else HEARTBEAT_S  # that one tells how far all are
        member.period_s = max(member.period_s, period_s)
        orders = HeartbeatReply(
            beat.generation, flags, aborts, leave, member.dump, exits, self._recorded, waits, formed, period_s
        )
        member.dump = False
        return orders

    @property
    def _period_s(self) -> float:
        return max(HEARTBEAT_S, max(len(self._members), self._expected) / self._beats_per_s)

    def _notice(self) -> None:
        """Calls all if what they are told has changed."""
        told = (
            self._members.number,
            self._urgent,
            self._flags,
            self._members.leaving,
            self._wants_reform(),
            state_stays(self._members),
        )
        if told != self._told:
            self._told = told
            self.call()

    def _enter(self, member: Member, beat: Heartbeat) -> None:
        """A worker waits for the next generation from now on."""
        member.ticket, member.formed = beat.waits, None
        steps = member.kind is not None and steps_now(member.kind)
        if steps and (beat.lost or beat.generation < self._members.number):
            self._urgent = True  # the others of this generation wait for it
        member.joined_s = self._clock()
        self._members.changed(member)
        self._try_form()

    async def leave(self, beat: Heartbeat, over: bool = False) -> None:
        """A worker ends as it should.

        Args:
            beat: Its last sign of life.
            over: Whether the run has ended with it: who joins later must not wait for others.
        """
        self.answer(replace(beat, waits=0))
        self._members.pop(beat.worker)
        self._gone.add(beat.worker)
        self._over = self._over or over
        self._try_form()
        self._notice()

    # What the driver and the controller call.

    async def raise_flags(self, flags: int) -> None:
        """The driver has something to say to all workers."""
        self._flags |= Flags(flags)
        self._notice()

    async def expect(self, workers: int, waiting: str | None = None, over: bool = False) -> None:
        """How many workers there are to be now; with a reason to wait no generation forms.

        Args:
            workers: That many.
            waiting: The reason.
            over: Whether one of them has ended as it should, and the run with it.
        """
        self._expected, self._waiting, self._over = workers, waiting, self._over or over
        self._try_form()
        self._notice()

    async def excuse(self) -> None:
        """All workers wait for somebody who waits for the storage, which is no standstill; said again and again
        meanwhile.
        """
        self._standstill.moves()

    async def drain(self, leaving: set[str]) -> None:
        """Workers on the nodes of these ids, and the workers of these ids, have to leave."""
        if leaving != self._members.leaving:
            self._members.now(leaving=frozenset(leaving))
        self._try_form()
        self._notice()

    async def dismiss(self, workers: set[str]) -> None:
        """These workers are not counted on any more; if they ever come back, they are told to end."""
        for worker in workers:
            self.lose(worker)
            self._lost.pop(worker, None)
            self._gone.add(worker)

    async def status(self) -> RendezvousStatus:
        """How things are."""
        leaving = {m.beat.worker for m in self._members.leavers()} if self._members.leaving else set()
        lost = {worker: self._clock() - since for worker, since in self._lost.items()}
        step, stops = max(0, self._standstill.step), bool(self._flags & Flags.STOP)
        here, stepping, limit_s = (
            {m.beat.worker for m in self._members} - leaving,
            self._members.count(steps_now),
            self._standstill.limit_s,
        )
        short = self._members.number > 0 and len(here) < self._least and not self._over
        waiting = self._waiting or (
            f"{len(here)} of at least {self._least} workers; waiting for others" if short else None
        )
        return RendezvousStatus(here, leaving, lost, stepping, step, self._record, waiting, stops, limit_s)

    async def workers(self) -> list[Heartbeat]:
        """The newest sign of life of every worker of the current generation, by rank."""
        return sorted((m.beat for m in self._members.stepping()), key=lambda beat: beat.rank)

    # How generations form.

    def _know(self, beat: Heartbeat) -> Member:
        member = self._members.add(beat)
        if (
            member.joined_s is None and beat.generation < member.beat.generation
        ):  # it has not heard yet that its generation has formed
            beat = replace(beat, generation=member.beat.generation, rank=member.beat.rank)
        member.beat, member.seen_s, member.period_s = beat, self._clock(), 0.0
        self._members.changed(member)
        self._lost.pop(beat.worker, None)
        return member

    def lose(self, worker: str) -> None:
        """A worker is not there any more, as far as is known."""
        member = self._members.pop(worker)
        if member is None:
            return
        self._lost[worker] = self._clock()
        if member.beat.generation == self._members.number:
            self._urgent = True
        self._try_form()
        self._notice()

    def _brought(self) -> list[Member]:
        return [] if self._is_held() else brought(self._members)

    def _is_held(self) -> bool:
        return self._waiting is not None and not self._flags & Flags.STOP

    def _wants_reform(self) -> bool:
        """Whether the current generation should end at its next step boundary."""
        if self._urgent or self._is_held() or self._members.any(lambda k: k.leaving and k.current):
            return True
        oldest = next((m for m in self._members.waiting.values() if m.kind is not None and not m.kind.leaving), None)
        if oldest is None or oldest.joined_s is None:
            return False
        return (
            self._members.count(lambda k: not k.leaving) >= self._expected
            or self._clock() - oldest.joined_s > _COALESCE_S
        )

    def _try_form(self) -> None:
        if not self._members.waiting or self._is_held() or not is_complete(self._members, self._urgent):
            return
        brought = self._brought()
        ready = self._members.count(lambda k: k.waits and not k.leaving) + len(brought)
        settled = (
            self._clock() - self._began_s > self._silence_s + self._period_s
        )  # this instance has heard of everybody
        complete = self._over or ready >= self._expected > 0
        incumbents = brought or self._members.any(lambda k: k.current and not k.leaving)
        if not ready or (not complete and not (incumbents and settled)):
            return
        if ready < self._least and not (self._over or self._flags & Flags.STOP):
            return  # those who are here keep the state and wait
        has_it = brought or self._members.any(lambda k: k.has_state and k.waits and not k.leaving)
        if not has_it and self._members.any(lambda k: k.has_state or steps_now(k)):
            return  # who has the state, or may by now, saves it before it leaves, or comes back
        staying = [m for m in self._members.waiting.values() if m.kind is not None and not m.kind.leaving]
        self._form(staying + brought)

    def _form(self, ready: list[Member]) -> None:
        ready = ranked(ready)
        number = max(self._members.number + 1, self._first)
        self._urgent = False
        self._standstill.begin(max(m.beat.step for m in ready))
        first, hosts = ready[0].beat, tuple(m.beat.host for m in ready)
        for rank, member in enumerate(ready):
            member.beat = replace(member.beat, generation=number, rank=rank)
            member.joined_s = None
            member.formed = GenerationInfo(number, rank, len(ready), first.host, first.port, hosts)
        self._members.now(number=number)

    # Silence and standstill.

    def look(self, now: float) -> None:
        """Finds out who is silent, and whether nothing moves; called a few times a second."""
        for member in [
            m for m in self._members if now - m.seen_s > self._silence_s + max(0.0, m.period_s - HEARTBEAT_S)
        ]:
            self.lose(member.beat.worker)
        self._look_for_standstill(now)
        self._try_form()
        self._notice()

    def _look_for_standstill(self, now: float) -> None:
        if not self._members.any(lambda k: steps_now(k) and k.phase != "done"):
            return
        if self._members.any(lambda k: steps_now(k) and k.phase == "saving"):
            self._standstill.moves()
            return
        times = self._standstill.times(now)
        if not times:
            return
        stepping = self._members.stepping()
        culprits = [m for m in stepping if m.beat.phase not in ("forming", "exchange", "done")]
        for member in stepping:
            member.dump = True
        if culprits or times > 1:
            for member in culprits or stepping:
                member.exit = True
        else:
            self._urgent = True  # all wait for each other: a collective is stuck
        self.call()
