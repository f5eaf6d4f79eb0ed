"""What workers, parameter servers and their coordinator say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ray_app.record.progress.segments import StepRecord
from ray_app.train.step.table import Row
from ray_app.train.strategies.parameter_server.layout import Bytes


@dataclass(frozen=True)
class Unit:
    """One logical worker's share of one step.

    Args:
        era: The time between two restores of all servers that it belongs to.
        step: Which, counted from 0 over the run.
        logical_worker: Whose.
    """

    era: int
    step: int
    logical_worker: int


@dataclass(frozen=True)
class Done:
    """A unit whose gradient is on all servers.

    Args:
        unit: Which.
        row: What it has to say about the step.
        lr: Learning rate that it was used with.
        wait_s: Seconds that it waited for data.
    """

    unit: Unit
    row: Row
    lr: float
    wait_s: float


@dataclass(frozen=True)
class Answer:
    """What a worker is to do.

    Args:
        unit: What to do next; None: ask again.
        held: The logical workers that it holds.
        rank: Its place among the workers of now.
        step: Finished steps of the run.
        record: The newest of them.
        waiting: Whether the run waits for servers or for more workers.
        over: Whether the run has ended.
    """

    unit: Unit | None = None
    held: tuple[int, ...] = ()
    rank: int = 0
    step: int = 0
    record: StepRecord | None = None
    waiting: bool = False
    over: bool = False


Pulled = tuple[int, Bytes, Bytes]
"""Steps of which a server has every gradient, its parameters, and the buffers if it keeps them."""
Pushed = tuple[float, Pulled | None]
"""See `ParameterServer.push`."""


class NotReadyError(Exception):
    """A server is gone or has lost what it held, or the state to go on from cannot be read now."""


class Servers(Protocol):
    """All parameter servers."""

    def call(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        """Calls a method of every server, with arguments of its own.

        Returns:
            Their answers; None if a server is lost.
        """
        ...


def call_each(servers: Servers, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    """Calls a method of every server that returns something.

    Raises:
        NotReadyError: A server is lost, or is not in the era that it was asked for.
    """
    answers = servers.call(method, arguments)
    if answers is None or any(answer is None for answer in answers):
        raise NotReadyError
    return answers
