"""The workers that the rendezvous knows: their states, and how many of them have each profile.

Whether a generation can form depends on questions about all workers ("does a worker that stays have the training
state?"), which are asked at every heartbeat. They are answered from the number of workers with each profile. There are
few profiles, so the cost of a heartbeat does not depend on the number of workers.
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
    REMOVED = auto()
    """The controller has removed it for good."""
    EXITED = auto()
    """It has reported its exit."""


_ENDINGS = [MemberState.LOST, MemberState.EXITED]
MEMBER_TRANSITIONS = {
    # A worker of parameter servers steps without a generation.
    MemberState.CONNECTED: [MemberState.WAITING, MemberState.STEPPING, *_ENDINGS],
    MemberState.WAITING: [MemberState.STEPPING, *_ENDINGS],
    MemberState.STEPPING: [MemberState.WAITING, MemberState.STALE, *_ENDINGS],
    MemberState.STALE: [MemberState.WAITING, *_ENDINGS],
    # A heartbeat that comes later shows the state; a worker that waits asks for a generation again.
    MemberState.LOST: [MemberState.CONNECTED, MemberState.STEPPING, MemberState.STALE, MemberState.REMOVED],
    MemberState.REMOVED: [],
    MemberState.EXITED: [],
}
"""The states that may follow each state; docs/architecture.md says what triggers them."""


class MemberProfile(NamedTuple):
    """The properties of a member on which the forming of a generation depends.

    Args:
        state: Its state.
        is_draining: Whether it has to exit at the next step boundary.
        in_newest_generation: Whether it is in the newest generation, or was in it last and waits for the next one.
        has_state: Whether it has a training state.
        phase: The phase of its newest heartbeat.
    """

    state: MemberState
    is_draining: bool
    in_newest_generation: bool
    has_state: bool
    phase: Phase

    @property
    def is_stepping(self) -> bool:
        """Whether it is in the newest generation and does not wait for the next."""
        return self.state is MemberState.STEPPING

    @property
    def is_ready(self) -> bool:
        """Whether it waits for the next generation and is not draining."""
        return self.state is MemberState.WAITING and not self.is_draining


_NOT_COUNTED = MemberProfile(MemberState.LOST, False, False, False, "done")
"""The profile of a member before it is counted and after it is removed; no counted member is lost."""


@dataclass(eq=False)
class Member:
    """A worker as the rendezvous knows it.

    Args:
        heartbeat: The newest heartbeat of the worker, with the generation and the rank that the rendezvous has given to
            the worker since.
        heartbeat_s: When the newest heartbeat arrived, in seconds of the rendezvous's clock.
        waiting_since_s: Since when the worker waits for a generation; None while it does not wait.
        wait_number: The number of the worker's newest wait, see `Heartbeat.wait_number`.
        formed: The generation that ended this wait; None while the worker waits.
        period_s: The longest heartbeat period that was sent to the worker since its newest heartbeat.
        dump: Whether the next reply asks the worker to record its stacks.
        exit: Whether replies ask the worker to end its process.
        profile: The profile with which the member is counted.
    """

    heartbeat: Heartbeat
    heartbeat_s: float = 0.0
    waiting_since_s: float | None = None
    wait_number: int = 0
    formed: GenerationInfo | None = None
    period_s: float = 0.0
    dump: bool = False
    exit: bool = False
    profile: MemberProfile = _NOT_COUNTED


class Members:
    """The members, by worker id, and the number of members with each profile.

    The caller calls `recount` for each member that it changes, or `update` after it has changed several.

    Attributes:
        newest_generation: The number of the newest generation; 0 before the first generation.
        draining: Ids of the nodes that are about to go away, and of workers that have to exit on nodes that stay.
        waiting: The members that wait for a generation, by worker id, the longest-waiting first.
    """

    def __init__(self) -> None:
        self.newest_generation = 0
        self.draining = frozenset[str]()
        self.waiting: dict[str, Member] = {}
        self._members: dict[str, Member] = {}
        self._counts: Counter[MemberProfile] = Counter()

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
            self.change_profile(member, _NOT_COUNTED)
        return member

    def recount(self, member: Member) -> None:
        """Counts a member with its present profile, and updates `waiting`."""
        heartbeat = member.heartbeat
        in_newest = heartbeat.generation == self.newest_generation > 0
        if member.waiting_since_s is not None:
            state = MemberState.WAITING
        elif not heartbeat.generation:
            state = MemberState.CONNECTED
        else:
            is_stale = heartbeat.generation < self.newest_generation
            state = MemberState.STALE if is_stale else MemberState.STEPPING
        is_draining = heartbeat.node in self.draining or heartbeat.worker in self.draining
        profile = MemberProfile(state, is_draining, in_newest, _has_state(heartbeat), heartbeat.phase)
        if profile == member.profile:
            return
        if state is not MemberState.WAITING:
            self.waiting.pop(heartbeat.worker, None)
        elif heartbeat.worker not in self.waiting:
            self.waiting[heartbeat.worker] = member
        self.change_profile(member, profile)

    def update(self, newest_generation: int | None = None, draining: frozenset[str] | None = None) -> None:
        """Sets attributes by their names, and counts all members again, since their profiles depend on these."""
        self.newest_generation = self.newest_generation if newest_generation is None else newest_generation
        self.draining = self.draining if draining is None else draining
        for member in self:
            self.recount(member)

    def change_profile(self, member: Member, profile: MemberProfile) -> None:
        """Counts a member with another profile."""
        if member.profile is not _NOT_COUNTED:
            self._counts[member.profile] -= 1
            # `any` looks at the keys, so a profile without members must not be among them.
            if not self._counts[member.profile]:
                del self._counts[member.profile]
        if profile is not _NOT_COUNTED:
            self._counts[profile] += 1
        member.profile = profile

    def count(self, predicate: Callable[[MemberProfile], bool]) -> int:
        """Returns the number of members with profiles that satisfy a predicate."""
        return sum(number for profile, number in self._counts.items() if predicate(profile))

    def any(self, predicate: Callable[[MemberProfile], bool]) -> bool:
        """Returns whether at least one member has a profile that satisfies a predicate."""
        return any(map(predicate, self._counts))

    def select(self, predicate: Callable[[MemberProfile], bool]) -> list[Member]:
        """Returns the members with profiles that satisfy a predicate."""
        return [m for m in self if predicate(m.profile)]


def _has_state(heartbeat: Heartbeat) -> bool:
    """Returns whether the worker that sent a heartbeat has a training state."""
    return heartbeat.step >= 0
