"""The members of a rendezvous, counted by kind, so that what is asked at every sign of life costs the same however many
there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ray_app.train.membership import GenerationInfo, Heartbeat, Phase


class Kind(NamedTuple):
    """What matters of a member when it is decided who forms a generation.

    Args:
        leaving: Whether it has to leave.
        current: Whether it is in the newest generation.
        waits: Whether it waits for the next one.
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
    """A worker.

    Args:
        beat: Its newest sign of life.
        seen_s: When that came.
        joined_s: Since when it waits for a generation; None: it does not.
        ticket: `Heartbeat.waits` of its newest wait.
        formed: The generation that ended it.
        period_s: Most seconds after which it was told since to give the next one.
        dump: Whether it is to record its stacks.
        exit: Whether it is to end.
        kind: As what it is counted.
    """

    beat: Heartbeat
    seen_s: float = 0.0
    joined_s: float | None = None
    ticket: int = 0
    formed: GenerationInfo | None = None
    period_s: float = 0.0
    dump: bool = False
    exit: bool = False
    kind: Kind | None = None


class Members:
    """See the module. Whoever changes a member says so with `changed`.

    Attributes:
        number: The newest generation.
        leaving: Ids of the nodes that go away, and of the workers that have to leave although theirs stay.
        waiting: Who waits, the longest first.
    """

    def __init__(self) -> None:
        self.number, self.leaving = 0, frozenset[str]()
        self.waiting: dict[str, Member] = {}
        self._members: dict[str, Member] = {}
        self._counts: Counter[Kind] = Counter()

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def __len__(self) -> int:
        return len(self._members)

    def get(self, worker: str) -> Member | None:
        """A member, if it is one."""
        return self._members.get(worker)

    def add(self, beat: Heartbeat) -> Member:
        """The member of a sign of life, new or not."""
        return self._members.setdefault(beat.worker, Member(beat))

    def pop(self, worker: str) -> Member | None:
        """Forgets a member."""
        member = self._members.pop(worker, None)
        if member is not None:
            self.waiting.pop(worker, None)
            self._count(member, None)
        return member

    def changed(self, member: Member) -> None:
        """Counts a member as what it is now."""
        beat, waits = member.beat, member.joined_s is not None
        kind = Kind(self.leaves(member), beat.generation == self.number > 0, waits, _has_state(beat), beat.phase)
        if kind == member.kind:
            return
        if not waits:
            self.waiting.pop(beat.worker, None)
        elif beat.worker not in self.waiting:
            self.waiting[beat.worker] = member
        self._count(member, kind)

    def leaves(self, member: Member) -> bool:
        """Whether a member has to leave."""
        return member.beat.node in self.leaving or member.beat.worker in self.leaving

    def now(self, number: int | None = None, leaving: frozenset[str] | None = None) -> None:
        """The newest generation or those who have to leave are others from now on: all are counted again."""
        self.number = self.number if number is None else number
        self.leaving = self.leaving if leaving is None else leaving
        for member in self:
            self.changed(member)

    def _count(self, member: Member, kind: Kind | None) -> None:
        if member.kind is not None:
            self._counts[member.kind] -= 1
            if not self._counts[member.kind]:
                del self._counts[member.kind]
        if kind is not None:
            self._counts[kind] += 1
        member.kind = kind

    def count(self, test: Callable[[Kind], bool]) -> int:
        """How many are of the kinds for which a test holds."""
        return sum(number for kind, number in self._counts.items() if test(kind))

    def any(self, test: Callable[[Kind], bool]) -> bool:
        """Whether there is one of a kind for which a test holds."""
        return any(map(test, self._counts))

    def leavers(self) -> list[Member]:
        """Those who have to leave."""
        return [m for m in self if self.leaves(m)]

    def stepping(self) -> list[Member]:
        """Those who are in the newest generation."""
        return [m for m in self if m.beat.generation == self.number > 0 and m.joined_s is None]


def _has_state(beat: Heartbeat) -> bool:
    return beat.step >= 0
