"""The workers that the rendezvous knows, counted by kind.

Whether a generation can form depends on questions about all workers ("does a worker that stays have the training
state?"), which are asked at every heartbeat. They are answered from the counts of the kinds, of which there are few, so
a heartbeat costs the same however many workers there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ray_app.train.membership import GenerationInfo, Heartbeat, Phase


class Kind(NamedTuple):
    """The properties of a member on which the forming of a generation depends.

    Args:
        leaving: Whether it has to leave.
        current: Whether it is in the newest generation.
        waits: Whether it waits for the next generation.
        has_state: Whether it has a training state.
        phase: What it is doing.
    """

    leaving: bool
    current: bool
    waits: bool
    has_state: bool
    phase: Phase


@dataclass(eq=False)
class Member:
    """A worker as the rendezvous knows it.

    Args:
        heartbeat: Its newest heartbeat.
        heartbeat_s: When the newest heartbeat came, in seconds of the rendezvous' clock.
        waiting_since_s: Since when it waits for a generation; None while it does not wait.
        ticket: `Heartbeat.waits` of its newest wait.
        formed: The generation that ended this wait.
        period_s: The longest heartbeat period that was sent to it since its newest heartbeat.
        dump: Whether it is to record its stacks.
        exit: Whether it is to end its process.
        kind: The kind under which it is counted; None before it is counted.
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
    """The known workers and their counts by kind. A caller that changes a member calls `recount` for it.

    Attributes:
        number: The number of the newest generation; 0 before the first.
        leaving: Ids of the nodes that are about to go away, and of workers that have to leave nodes that stay.
        waiting: The members that wait for a generation by id, the longest-waiting first.
    """

    def __init__(self) -> None:
        self.number = 0
        self.leaving = frozenset[str]()
        self.waiting: dict[str, Member] = {}
        self._members: dict[str, Member] = {}
        self._counts: Counter[Kind] = Counter()

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def get(self, worker: str) -> Member | None:
        """Returns the member with this id; None if there is none."""
        return self._members.get(worker)

    def add(self, heartbeat: Heartbeat) -> Member:
        """Returns the member that sent a heartbeat, which becomes a member if it is not one yet."""
        return self._members.setdefault(heartbeat.worker, Member(heartbeat))

    def pop(self, worker: str) -> Member | None:
        """Removes and returns the member with this id; returns None if there is none."""
        member = self._members.pop(worker, None)
        if member is not None:
            self.waiting.pop(worker, None)
            self._count(member, None)
        return member

    def recount(self, member: Member) -> None:
        """Counts a member under its present kind, and updates whether it waits."""
        heartbeat, waits = member.heartbeat, member.waiting_since_s is not None
        kind = Kind(
            leaving=self.is_leaving(member),
            current=heartbeat.generation == self.number > 0,
            waits=waits,
            has_state=heartbeat.step >= 0,
            phase=heartbeat.phase,
        )
        if kind == member.kind:
            return
        if not waits:
            self.waiting.pop(heartbeat.worker, None)
        elif heartbeat.worker not in self.waiting:
            self.waiting[heartbeat.worker] = member
        self._count(member, kind)

    def is_leaving(self, member: Member) -> bool:
        """Returns whether a member has to leave."""
        return member.heartbeat.node in self.leaving or member.heartbeat.worker in self.leaving

    def update(self, number: int | None = None, leaving: frozenset[str] | None = None) -> None:
        """Changes the newest generation or the ids that have to leave, and counts all members again."""
        self.number = self.number if number is None else number
        self.leaving = self.leaving if leaving is None else leaving
        for member in self:
            self.recount(member)

    def _count(self, member: Member, kind: Kind | None) -> None:
        if member.kind is not None:
            self._counts[member.kind] -= 1
            if not self._counts[member.kind]:
                del self._counts[member.kind]
        if kind is not None:
            self._counts[kind] += 1
        member.kind = kind

    def count(self, predicate: Callable[[Kind], bool]) -> int:
        """Returns the number of members of the kinds that satisfy a predicate."""
        return sum(number for kind, number in self._counts.items() if predicate(kind))

    def any(self, predicate: Callable[[Kind], bool]) -> bool:
        """Returns whether there is a member of a kind that satisfies a predicate."""
        return any(map(predicate, self._counts))

    def leaving_members(self) -> list[Member]:
        """Returns the members that have to leave."""
        return [m for m in self if self.is_leaving(m)]

    def stepping_members(self) -> list[Member]:
        """Returns the members that are in the newest generation and do not wait for the next."""
        return [m for m in self if m.heartbeat.generation == self.number > 0 and m.waiting_since_s is None]
