"""Who steps together, as the loop sees it; `cluster.rendezvous.client` is a Ray Train worker's,
`SingleProcessMembership` that of a process alone.

What workers, the rendezvous, the driver and the controller say to each other.

The membership of a process that trains alone.

When a generation stands still: no step is finished for much longer than steps take.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntFlag
from statistics import median
from typing import Any, Literal, Protocol

from ray_app.reduction.base import World
from ray_app.runlog.journal import StepRecord

HEARTBEAT_S = 0.25
"""Seconds between two signs of life of a worker, of few; of many see `HeartbeatReply.period_s`."""

Phase = Literal["starting", "waiting", "forming", "data", "compute", "exchange", "saving", "evaluate", "done"]
"""What a worker is doing. Who is `forming` or in `exchange` waits for the others, so whoever is elsewhere holds all up;
who is `saving` waits for the storage, which ending a worker would not make faster.
"""


class Flags(IntFlag):
    """What all workers agree on in a step's exchange and act upon after that same step."""

    STOP = 1
    """Make a checkpoint and end."""
    REFORM = 2
    """Leave this generation and form the next."""
    SAVE = 4
    """Make a checkpoint, because everyone has to leave."""


@dataclass(frozen=True)
class Heartbeat:
    """A worker's sign of life.

    Args:
        worker: The Ray actor id of the worker.
        node: Id of its node.
        host: Address of its node.
        port: Where its store listens.
        pid: Id of its process there.
        generation: The generation that it steps in; 0 before the first.
        rank: Its rank there.
        step: Its finished steps, -1 without a state.
        phase: What it is doing.
        record: Rank 0: its newest finished step.
        recorded: Rank 0: the last step whose record is on storage.
        moves: How often it has moved on besides finishing steps.
        waits: Which of its waits for a generation this is, from 1; 0: it does not wait.
        lost: Whether its last generation broke, so that the others must be called.
    """

    worker: str
    node: str
    host: str
    port: int
    pid: int = 0
    generation: int = 0
    rank: int = 0
    step: int = -1
    phase: Phase = "starting"
    record: StepRecord | None = None
    recorded: int = 0
    moves: int = 0
    waits: int = 0
    lost: bool = False


@dataclass(frozen=True)
class HeartbeatReply:
    """The answer to a heartbeat; said unasked, too, when it changes for all.

    Args:
        generation: The one that the worker was in when it asked; `REFORM` and `abort` are meant for that one only.
        flags: To bring into the next exchange.
        abort: Whether the worker must give up its generation at once, also in mid-exchange.
        leave: Whether it must end when its generation does.
        dump: Whether it should record the stacks of its threads.
        exit: Whether it must end its process now; nobody counts on it any more.
        recorded: The last step whose record is on storage.
        waits: Whether it was known to wait for the next generation; what it was told before may not hold while it does.
        formed: The generation that it waited for.
        period_s: Seconds after which the next sign of life is due.
    """

    generation: int = 0
    flags: Flags = Flags(0)
    abort: bool = False
    leave: bool = False
    dump: bool = False
    exit: bool = False
    recorded: int = 0
    waits: bool = False
    formed: GenerationInfo | None = None
    period_s: float = HEARTBEAT_S


@dataclass(frozen=True)
class GenerationInfo:
    """A generation, as one of its workers sees it.

    Args:
        number: Which; they only grow.
        rank: Of this worker.
        size: How many workers.
        host: Address of rank 0.
        port: Where rank 0's store listens.
        hosts: The host of every rank; those on one host follow each other.
    """

    number: int
    rank: int
    size: int
    host: str
    port: int
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class RendezvousStatus:
    """How things are, for the controller and the console.

    Args:
        live: Ids of the workers that give signs of life and are to stay.
        leaving: Ids of those that are to leave their nodes, and have not yet.
        silent: Ids of those that stopped giving them, with the seconds since the last.
        stepping: Workers of the current generation.
        step: Finished steps.
        record: The newest finished step.
        waiting: Why no generation may form, if so.
        stopping: Whether the driver asked to stop.
        limit_s: Seconds without a finished step that are a standstill.
    """

    live: set[str]
    leaving: set[str]
    silent: dict[str, float]
    stepping: int
    step: int
    record: StepRecord | None
    waiting: str | None
    stopping: bool
    limit_s: float


class SingleProcessMembership:
    """The membership of the only worker, see `Membership`.

    Args:
        logical_workers: L, all of which it plays.
        stops: Tells whether to stop.
    """

    recovers = False

    def __init__(self, logical_workers: int, stops: Callable[[], bool]) -> None:
        self._logical_workers, self._stops = logical_workers, stops
        self._recorded = 0
        self.newest: StepRecord | None = None
        """The newest finished step."""

    @contextmanager
    def generation(self, step: int, lost: bool) -> Iterator[tuple[World, GenerationInfo]]:
        """See `Membership.generation`; there is one."""
        del step, lost
        yield World(0, 1, self._logical_workers), GenerationInfo(1, 0, 1, "", 0)

    def flags(self) -> Flags:
        """See `Membership.flags`."""
        return Flags.STOP if self._stops() else Flags(0)

    def is_leaving(self) -> bool:
        """See `Membership.is_leaving`."""
        return False

    def enter(self, phase: Phase) -> None:
        """See `Membership.enter`; nobody asks."""

    def moved(self) -> None:
        """See `Membership.moved`; nobody waits."""

    def report(self, step: int, record: StepRecord | None, recorded: int) -> None:
        """See `Membership.report`."""
        del step
        self.newest, self._recorded = record or self.newest, recorded

    def recorded(self) -> int:
        """See `Membership.recorded`."""
        return self._recorded


class LeavingError(Exception):
    """This worker has to leave while it waits for a generation."""


class Membership(Protocol):
    """What the loop needs to know about the other workers."""

    recovers: bool
    """Whether a lost peer leads to another generation; otherwise the group is started again from outside."""

    def generation(self, step: int, lost: bool) -> Any:
        """A context that yields the `World` of a new generation and what formed it, and leaves its process group at the
        end.

        Args:
            step: Finished steps of this worker, -1 without a state.
            lost: Whether the last generation broke.
        """
        ...

    def flags(self) -> Flags:
        """What is to be said to all workers in the next exchange."""
        ...

    def is_leaving(self) -> bool:
        """Whether this worker has to end when its generation does."""
        ...

    def enter(self, phase: Phase) -> None:
        """Says what this worker is doing now."""
        ...

    def moved(self) -> None:
        """Says that this worker moves on, although no step is finished."""
        ...

    def report(self, step: int, record: StepRecord | None, recorded: int) -> None:
        """Says how far this worker is; returns at once.

        Args:
            step: Its finished steps.
            record: Rank 0: the newest of them.
            recorded: Rank 0: the last step whose record is on storage.
        """
        ...

    def recorded(self) -> int:
        """The last step whose record is on storage, as far as is known here."""
        ...


_LEAST_S, _MEDIAN_STEPS, _FIRST_STEP_FACTOR = 60.0, 50, 5


class StepWatchdog:
    """How the present generation gets on.

    Args:
        step_timeout_s: Seconds without a finished step that are a standstill; None: a multiple of the median step.
        clock: Tells the seconds.

    Attributes:
        step: The newest finished step; -1 before the first.
    """

    def __init__(self, step_timeout_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._given_s, self._clock = step_timeout_s, clock
        self._step_s: deque[float] = deque(maxlen=101)
        self.begin(-1)

    def begin(self, step: int) -> None:
        """A generation begins with a step; its first one may take longer than others."""
        self.step, self._stepped, self._times = step, False, 0
        self.moves()

    def moves(self) -> None:
        """Something goes on, or all wait for the storage."""
        self._moved_s = self._clock()

    def finished(self, step: int, record: StepRecord | None) -> None:
        """A step is finished, perhaps not for the first time."""
        if step > self.step:
            self._stepped = self.step >= 0
            self.step, self._times = step, 0
            self.moves()
        if record is not None:
            self._step_s.append(record.step_ms / 1e3)

    @property
    def limit_s(self) -> float:
        """Seconds without a finished step that are a standstill."""
        limit = self._given_s
        if limit is None:
            limit = max(_LEAST_S, _MEDIAN_STEPS * median(self._step_s)) if self._step_s else 10 * _LEAST_S
        return limit * (1 if self._stepped else _FIRST_STEP_FACTOR)

    def times(self, now: float) -> int:
        """How many times it stands still at this step, if it does just now, which begins the time anew; 0 if it does
        not.
        """
        if now - self._moved_s < self.limit_s:
            return 0
        self._moved_s = now
        self._times += 1
        return self._times
