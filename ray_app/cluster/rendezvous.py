"""The rendezvous decides which workers form the next generation, and passes words between driver and workers.

A generation is a set of workers that step together. A new one forms whenever the set changes: somebody died, fell silent, is asked to
leave its node, or has just started. Whoever holds the training state keeps it and comes back here; nobody is restarted.

It is a small actor (`cluster.rendezvous_actor`), which may itself be killed: members tell it who they are with every heartbeat, so a new
instance knows them after a moment. Here is what it decides, in one thread and by a clock that is given; no method waits for anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from ray_app.record.progress.segments import StepRecord
from ray_app.train.group.messages import Beat, Flags, Formed, Orders, Status
from ray_app.train.group.standstill import Standstill

_COALESCE_S = 2.0  # a newcomer waits this long for other newcomers


@dataclass
class _Member:
    beat: Beat
    seen_s: float
    joined_s: float | None = None  # since when it waits for a generation
    formed: Future[Formed] | None = None
    dump: bool = False
    exit: bool = False


class Rendezvous:
    """See the module.

    Args:
        silence_s: Seconds without a heartbeat after which a worker counts as lost.
        step_timeout_s: Seconds without a finished step after which the workers that hold it up are ended; None: a multiple of the
            median step.
        clock: Tells the seconds.
        first: The least number of a generation that this instance forms: none that an instance before it has given.
    """

    def __init__(self, silence_s: float, step_timeout_s: float | None, clock: Callable[[], float] = time.monotonic, first: int = 1) -> None:
        self._silence_s, self._clock, self._standstill = silence_s, clock, Standstill(step_timeout_s, clock)
        self._members: dict[str, _Member] = {}
        self._lost: dict[str, float] = {}
        self._gone: set[str] = set()
        self._number, self._first = 0, first
        self._urgent = False
        self._expected = 0
        self._draining: set[str] = set()
        self._waiting: str | None = None
        self._over = False
        self._flags = Flags(0)
        self._record: StepRecord | None = None
        self._recorded = 0
        self._began_s = self._clock()

    # What workers call.

    def answer(self, beat: Beat) -> Orders:
        """A worker's sign of life, and what it is told."""
        if beat.worker in self._gone:
            return Orders(exit=True)
        known = self._members.get(beat.worker)
        if known is not None and beat.moves > known.beat.moves:
            self._standstill.moves()
        if beat.generation > (known.beat.generation if known is not None else 0):
            self._standstill.begin(self._standstill.step)  # it begins unasked, which takes longer than a step
        member = self._know(beat)
        self._record = beat.record or self._record
        self._recorded = max(self._recorded, beat.recorded)
        if beat.generation == self._number:
            self._standstill.finished(beat.step, beat.record)
        elif beat.generation > self._number:  # this instance is new
            self._number = beat.generation
        stale = 0 < beat.generation < self._number and member.joined_s is None
        current = beat.generation == self._number > 0
        flags = self._flags
        if current and self._wants_reform():
            flags |= Flags.REFORM
        leave = beat.node in self._draining and member not in self._stayers()
        if leave and not any(_has_state(m) for m in self._stayers()):
            flags |= Flags.SAVE
        exits = member.exit and not any(other.dump for other in self._members.values() if other is not member)  # who show what they do now
        aborts, waits = stale or (current and self._urgent), member.joined_s is not None
        orders = Orders(beat.generation, flags, aborts, leave, member.dump, exits, self._recorded, waits)
        member.dump = False
        return orders

    def enter(self, beat: Beat, lost: bool) -> Future[Formed]:
        """A worker waits for the next generation, which the future will have.

        Args:
            beat: Who waits.
            lost: Whether its last generation broke, so that the others must be called.
        """
        member = self._know(beat)
        self._number = max(self._number, beat.generation)
        if member.joined_s is None and member.beat.generation == self._number > 0 and (lost or beat.generation < self._number):
            self._urgent = True  # the others of this generation wait for it
        member.joined_s = self._clock()
        member.formed = Future()
        self._try_form()
        return member.formed

    async def leave(self, worker: str, over: bool = False) -> None:
        """A worker ends as it should.

        Args:
            worker: Which.
            over: Whether the run has ended with it: who joins later must not wait for others.
        """
        self._members.pop(worker, None)
        self._gone.add(worker)
        self._over = self._over or over
        self._try_form()

    # What the driver and the controller call.

    async def raise_flags(self, flags: int) -> None:
        """The driver has something to say to all workers."""
        self._flags |= Flags(flags)

    async def expect(self, workers: int, waiting: str | None = None) -> None:
        """How many workers there are to be now; with a reason to wait no generation forms."""
        self._expected, self._waiting = workers, waiting
        self._try_form()

    async def excuse(self) -> None:
        """All workers wait for somebody who waits for the storage, which is no standstill; said again and again meanwhile."""
        self._standstill.moves()

    async def drain(self, nodes: set[str]) -> None:
        """Workers on these nodes have to leave."""
        self._draining = set(nodes)
        self._try_form()

    async def dismiss(self, workers: set[str]) -> None:
        """These workers are not counted on any more; if they ever come back, they are told to end."""
        for worker in workers:
            self.lose(worker)
            self._lost.pop(worker, None)
            self._gone.add(worker)

    async def status(self) -> Status:
        """How things are."""
        leaving = {m.beat.worker for m in self._leavers()}
        lost = {worker: self._clock() - since for worker, since in self._lost.items()}
        step, stops = max(0, self._standstill.step), bool(self._flags & Flags.STOP)
        here, stepping, limit_s = set(self._members) - leaving, len(self._stepping()), self._standstill.limit_s
        return Status(here, leaving, lost, stepping, step, self._record, self._waiting, stops, limit_s)

    async def workers(self) -> list[Beat]:
        """The newest sign of life of every worker of the current generation, by rank."""
        return sorted((m.beat for m in self._stepping()), key=lambda beat: beat.rank)

    # How generations form.

    def _know(self, beat: Beat) -> _Member:
        member = self._members.setdefault(beat.worker, _Member(beat, 0.0))
        if member.joined_s is None and beat.generation < member.beat.generation:  # it has not heard yet that its generation has formed
            beat = replace(beat, generation=member.beat.generation, rank=member.beat.rank)
        member.beat, member.seen_s = beat, self._clock()
        self._lost.pop(beat.worker, None)
        return member

    def lose(self, worker: str) -> None:
        """A worker is not there any more, as far as is known."""
        member = self._members.pop(worker, None)
        if member is None:
            return
        self._lost[worker] = self._clock()
        if member.formed is not None and not member.formed.done():
            member.formed.set_exception(ConnectionError("no sign of life; join again"))
        if member.beat.generation == self._number:
            self._urgent = True
        self._try_form()

    def _stayers(self) -> list[_Member]:
        """Those whose nodes stay, and who comes back from a broken generation with a step that none of these has finished."""
        if not self._draining:
            return list(self._members.values())
        staying = [m for m in self._members.values() if m.beat.node not in self._draining]
        newest = max((m.beat.step for m in staying), default=-1)
        if newest < 0 or self._is_held():
            return staying
        return staying + [m for m in self._leavers() if m.joined_s is not None and m.beat.step > newest]

    def _leavers(self) -> list[_Member]:
        return [m for m in self._members.values() if m.beat.node in self._draining]

    def _incumbents(self) -> list[_Member]:
        """Those who stay and were in the last generation."""
        return [m for m in self._stayers() if m.beat.generation == self._number > 0]

    def _is_complete(self) -> bool:
        """Whether all of the last generation are back; of one that broke those on draining nodes, too, whose step may be the newest."""
        leavers = self._leavers() if self._urgent else []
        on_the_way = [m for m in leavers if m.beat.generation == self._number > 0 and m.beat.phase not in ("saving", "done")]
        return all(m.joined_s is not None for m in [*self._incumbents(), *on_the_way])

    def _stepping(self) -> list[_Member]:
        """Those who are in the current generation."""
        return [m for m in self._members.values() if m.beat.generation == self._number > 0 and m.joined_s is None]

    def _is_held(self) -> bool:
        return self._waiting is not None and not self._flags & Flags.STOP

    def _wants_reform(self) -> bool:
        """Whether the current generation should end at its next step boundary."""
        if self._urgent or self._is_held():
            return True
        if any(m.beat.generation == self._number for m in self._leavers()):
            return True
        newcomers = [m for m in self._stayers() if m.joined_s is not None]
        if not newcomers:
            return False
        oldest = min(m.joined_s for m in newcomers if m.joined_s is not None)
        return len(self._stayers()) >= self._expected or self._clock() - oldest > _COALESCE_S

    def _try_form(self) -> None:
        stayers = self._stayers()
        ready = [m for m in stayers if m.joined_s is not None]
        if not ready or self._is_held() or not self._is_complete():
            return
        settled = self._clock() - self._began_s > self._silence_s  # this instance has heard of everybody
        complete = self._over or len(ready) >= self._expected > 0
        if not complete and not (self._incumbents() and settled):
            return
        if any(map(_has_state, self._members.values())) and not any(map(_has_state, ready)):
            return  # who has the state saves it before it leaves, or comes back
        ready.sort(key=lambda m: (m.beat.step < 0, m.beat.rank if m.beat.generation else 0, m.joined_s))
        hosts = list(dict.fromkeys(m.beat.host for m in ready))
        ready.sort(key=lambda m: hosts.index(m.beat.host))  # the first stays the first
        self._number = max(self._number + 1, self._first)
        self._urgent = False
        self._standstill.begin(max(m.beat.step for m in ready))
        first, hosts = ready[0].beat, [m.beat.host for m in ready]
        for rank, member in enumerate(ready):
            assert member.formed is not None
            member.beat = replace(member.beat, generation=self._number, rank=rank)
            member.joined_s = None
            if not member.formed.done():
                member.formed.set_result(Formed(self._number, rank, len(ready), first.host, first.port, tuple(hosts)))

    # Silence and standstill.

    def look(self, now: float) -> None:
        """Finds out who is silent, and whether nothing moves; called a few times a second."""
        for worker in [w for w, m in self._members.items() if now - m.seen_s > self._silence_s]:
            self.lose(worker)
        self._look_for_standstill(now)
        self._try_form()

    def _look_for_standstill(self, now: float) -> None:
        stepping = self._stepping()
        if not stepping or all(m.beat.phase == "done" for m in stepping):
            return
        if any(m.beat.phase == "saving" for m in stepping):
            self._standstill.moves()
            return
        times = self._standstill.times(now)
        if not times:
            return
        culprits = [m for m in stepping if m.beat.phase not in ("forming", "exchange", "done")]
        for member in stepping:
            member.dump = True
        if culprits or times > 1:
            for member in culprits or stepping:
                member.exit = True
        else:
            self._urgent = True  # all wait for each other: a collective is stuck


def _has_state(member: _Member) -> bool:
    return member.beat.step >= 0
