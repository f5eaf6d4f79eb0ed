"""What workers, the rendezvous, the driver and the controller say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import Literal

from ray_app.record.progress.segments import StepRecord

BEAT_S = 0.25
"""Seconds between two signs of life of a worker, of few; of many see `Orders.period_s`."""

Phase = Literal["starting", "waiting", "forming", "data", "compute", "exchange", "saving", "evaluate", "done"]
"""What a worker is doing. Who is `forming` or in `exchange` waits for the others, so whoever is elsewhere holds all up; who is `saving`
waits for the storage, which ending a worker would not make faster."""


class Flags(IntFlag):
    """What all workers agree on in a step's exchange and act upon after that same step."""

    STOP = 1
    """Make a checkpoint and end."""
    REFORM = 2
    """Leave this generation and form the next."""
    SAVE = 4
    """Make a checkpoint, because everyone has to leave."""


@dataclass(frozen=True)
class Beat:
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
class Orders:
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
    formed: Formed | None = None
    period_s: float = BEAT_S


@dataclass(frozen=True)
class Formed:
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
class Status:
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
