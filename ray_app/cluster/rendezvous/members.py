"""The workers that the rendezvous knows: their states, and how many of them there are of each kind.

Whether a generation can form depends on questions about all workers ("does a worker that stays have the training
state?"), which are asked at every heartbeat. They are answered from the number of workers of each kind. There are few
kinds, so the cost of a heartbeat does not depend on the number of workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import NamedTuple

from ray_app.train.membership import GenerationInfo, Heartbeat, Phase


class MemberState(IntEnum):
    """The state of a worker at the rendezvous; docs/architecture.md has a table of them. Any member may be draining."""

    CONNECTED = auto()
    """It has been in no generation yet."""
    WAITING = auto()
    """It waits for a generation."""
    STEPPING = auto()
    """It is in the newest generation."""
    STALE = auto()
    """It is in an older generation."""
    LOST = auto()
    """Its connection has closed, or its heartbeats are missing."""
    EVICTED = auto()
    """The controller has dropped it."""
    LEFT = auto()
    """It has ended as planned."""


_ENDINGS = [MemberState.LOST, MemberState.LEFT]
MEMBER_TRANSITIONS = {
    # A worker of parameter servers steps without a generation.
    MemberState.CONNECTED: [MemberState.WAITING, MemberState.STEPPING, *_ENDINGS],
    MemberState.WAITING: [MemberState.STEPPING, *_ENDINGS],
    MemberState.STEPPING: [MemberState.WAITING, MemberState.STALE, *_ENDINGS],
    MemberState.STALE: [MemberState.WAITING, *_ENDINGS],
    # A heartbeat that comes later shows the state; a worker that waits asks for a generation again.
    MemberState.LOST: [MemberState.CONNECTED, MemberState.STEPPING, MemberState.STALE, MemberState.EVICTED],
    MemberState.EVICTED: [],
    MemberState.LEFT: [],
}
"""The states that may follow each state; docs/architecture.md says what triggers them."""


class Kind(NamedTuple):
    """The properties of a member on which the forming of a generation depends.

    Args:
        state: Its state.
        draining: Whether it has to leave.
        current: Whether it is in the newest generation, or was in it last and waits for the next one.
        has_state: Whether it has a training state.
        phase: The phase of its newest heartbeat.
    """

    state: MemberState
    draining: bool
    current: bool
    has_state: bool
    phase: Phase

    @property
    def steps(self) -> bool:
        """Whether it is in the newest generation and does not wait for the next."""
        return self.state is MemberState.STEPPING

    @property
    def stays_waiting(self) -> bool:
        """Whether it waits for the next generation and does not have to leave."""
        return self.state is MemberState.WAITING and not self.draining


@dataclass(eq=False)
class Member:
    """A worker as the rendezvous knows it.

    Args:
        heartbeat: The newest heartbeat of the worker, with the generation and the rank that the rendezvous has given to
            the worker since.
        heartbeat_s: When the newest heartbeat arrived, in seconds of the rendezvous's clock.
        waiting_since_s: Since when the worker waits for a generation; None while it does not wait.
        ticket: The number of the worker's newest wait, see `Heartbeat.wait_number`.
        formed: The generation that ended this wait; None while the worker waits.
        period_s: The longest heartbeat period that was sent to the worker since its newest heartbeat.
        dump: Whether the next reply asks the worker to record its stacks.
        exit: Whether replies ask the worker to end its process.
        kind: The kind under which the member is counted; None if it is not counted.
    """

    heartbeat: Heartbeat
    heartbeat_s: float = 0.0
    waiting_since_s: float | None = None
    ticket: int = 0
    formed: GenerationInfo | None = None
    period_s: float = 0.0
    dump: bool = False
    exit: bool = False
    kind: Kind | None = None


class Members:
    """The members, by worker id, and the number of members of each kind.

    The caller calls `recount` for each member that it changes, or `update` after it has changed several.

    Attributes:
        newest_generation: The number of the newest generation; 0 before the first generation.
        leaving: Ids of the nodes that are about to go away, and of workers that have to leave nodes that stay.
        waiting: The members that wait for a generation, by worker id, the longest-waiting first.
    """

    def __init__(self) -> None:
        self.newest_generation = 0
        self.leaving = frozenset[str]()
        self.waiting: dict[str, Member] = {}
        self._members: dict[str, Member] = {}
        self._counts: Counter[Kind] = Counter()

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def get(self, worker: str) -> Member | None:
        """Returns the member of a worker id; None if there is none."""
        return self._members.get(worker)

    def add(self, heartbeat: Heartbeat) -> Member:
        """Returns the member of the worker that sent a heartbeat, and adds it if the worker is not a member yet."""
        return self._members.setdefault(heartbeat.worker, Member(heartbeat))

    def pop(self, worker: str) -> Member | None:
        """Removes and returns the member of a worker id; returns None if there is none."""
        member = self._members.pop(worker, None)
        if member is not None:
            self.waiting.pop(worker, None)
            self._change_kind(member, None)
        return member

    def recount(self, member: Member) -> None:
        """Counts a member under its present kind, and updates `waiting`."""
        heartbeat = member.heartbeat
        current = heartbeat.generation == self.newest_generation > 0
        if member.waiting_since_s is not None:
            state = MemberState.WAITING
        elif not heartbeat.generation:
            state = MemberState.CONNECTED
        else:
            is_stale = heartbeat.generation < self.newest_generation
            state = MemberState.STALE if is_stale else MemberState.STEPPING
        kind = Kind(state, self.is_leaving(member), current, _has_state(heartbeat), heartbeat.phase)
        if kind == member.kind:
            return
        if state is not MemberState.WAITING:
            self.waiting.pop(heartbeat.worker, None)
        elif heartbeat.worker not in self.waiting:
            self.waiting[heartbeat.worker] = member
        self._change_kind(member, kind)

    def is_leaving(self, member: Member) -> bool:
        """Returns whether a member has to leave: its node goes away, or it has to leave a node that stays."""
        return member.heartbeat.node in self.leaving or member.heartbeat.worker in self.leaving

    def update(self, newest_generation: int | None = None, leaving: frozenset[str] | None = None) -> None:
        """Sets the attributes that are given, and counts all members again, since their kinds depend on these."""
        self.newest_generation = self.newest_generation if newest_generation is None else newest_generation
        self.leaving = self.leaving if leaving is None else leaving
        for member in self:
            self.recount(member)

    def _change_kind(self, member: Member, kind: Kind | None) -> None:
        """Counts a member under another kind, or under no kind if `kind` is None."""
        if member.kind is not None:
            self._counts[member.kind] -= 1
            # `any` looks at the keys, so a kind without members must not be among them.
            if not self._counts[member.kind]:
                del self._counts[member.kind]
        if kind is not None:
            self._counts[kind] += 1
        member.kind = kind

    def count(self, predicate: Callable[[Kind], bool]) -> int:
        """Returns the number of members of the kinds that satisfy a predicate."""
        return sum(number for kind, number in self._counts.items() if predicate(kind))

    def any(self, predicate: Callable[[Kind], bool]) -> bool:
        """Returns whether at least one member is of a kind that satisfies a predicate."""
        return any(map(predicate, self._counts))

    def leaving_members(self) -> list[Member]:
        """Returns the members that have to leave."""
        return [m for m in self if self.is_leaving(m)]

    def stepping_members(self) -> list[Member]:
        """Returns the members that are in the newest generation and do not wait for the next."""
        return [m for m in self if m.heartbeat.generation == self.newest_generation > 0 and m.waiting_since_s is None]


def _has_state(heartbeat: Heartbeat) -> bool:
    """Returns whether the worker that sent a heartbeat has a training state."""
    return heartbeat.step >= 0
