"""The messages between workers, parameter servers and their coordinator, and the connections to the servers.

Gradients, parameters and state travel over connections of their own: a call of a Ray actor with half a megabyte goes
through Ray's object store, and takes ten times the CPU of a call over one of these, see `ray_app.channel`. A message
is a frame of JSON, followed by the raw bytes of the arrays in it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ray_app.channel import Listener, pack_frame, receive_bytes, receive_frame, receive_into
from ray_app.runlog.journal import StepRecord
from ray_app.train.step.step_stats import ReplicaStats
from ray_app.train.strategies.parameter_server.layout import Bytes

_ARRAY, _BYTES = "__array__", "__bytes__"
_MAX_RAW_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
"""Maximum bytes of arrays and bytes in a message: the memory of this machine."""


def send(connection: socket.socket, values: Any) -> None:
    """Sends values that JSON supports, bytes, and NumPy arrays of bytes.

    Raises:
        OSError: The other end is gone.
    """
    raw: list[Any] = []

    def describe(value: Any) -> dict[str, int]:
        if not isinstance(value, bytes | np.ndarray):
            raise TypeError(f"{type(value).__name__} cannot be sent to or from a parameter server; please report this.")
        raw.append(value)
        return {_BYTES: len(value)} if isinstance(value, bytes) else {_ARRAY: value.nbytes}

    connection.sendall(pack_frame(json.dumps(values, default=describe).encode()))
    for value in raw:
        connection.sendall(value)


def receive(connection: socket.socket) -> Any:
    """Returns the values of a `send`, with tuples as lists, and with writable arrays.

    Raises:
        OSError: The other end is gone.
        ValueError: The received data is not a message.
    """
    remaining_bytes = _MAX_RAW_BYTES

    # JSON calls this in the order of the text, which is the order of the raw data after it.
    def read_raw(part: dict[str, Any]) -> Any:
        nonlocal remaining_bytes
        if part.keys() not in ({_ARRAY}, {_BYTES}):
            return part
        [size] = part.values()
        if not isinstance(size, int) or not 0 <= size <= remaining_bytes:
            raise ValueError(f"{size} bytes in a message that may have only {remaining_bytes} more")
        remaining_bytes -= size
        if _BYTES in part:
            return receive_bytes(connection, size)
        array = np.empty(size, np.uint8)
        receive_into(connection, array.data)
        return array

    return json.loads(receive_frame(connection), object_hook=read_raw)


def start_server(answer: Callable[[Any], Any]) -> Listener:
    """Returns a listener that serves each connection in a thread of its own.

    Args:
        answer: Returns the reply to a message.
    """

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError):
            while True:
                send(connection, answer(receive(connection)))

    def start(connection: socket.socket) -> None:
        threading.Thread(target=serve, args=(connection,), name="connection", daemon=True).start()

    return Listener(start)


@dataclass(frozen=True)
class Unit:
    """One logical worker's share of one step.

    Args:
        era: Era of the unit: the time between two restores of all servers.
        step: Number of the step, from 0 over the run.
        logical_worker: Number of the logical worker.
    """

    era: int
    step: int
    logical_worker: int


@dataclass(frozen=True)
class UnitResult:
    """The result of a unit, after its gradient has arrived at all servers.

    Args:
        unit: The unit.
        stats: Statistics of the logical worker for the step.
        lr: Learning rate for the gradient.
        wait_s: Seconds that the worker waited for data.
    """

    unit: Unit
    stats: ReplicaStats
    lr: float
    wait_s: float


@dataclass(frozen=True)
class CoordinatorReply:
    """The coordinator's reply to a worker.

    Args:
        unit: The next unit for the worker; None: it asks again.
        assigned: The logical workers that are assigned to the worker.
        rank: The worker's number among the present workers.
        step: Finished steps of the run.
        record: Record of the newest finished step.
        waiting: Whether the run waits for servers or for more workers.
        over: Whether the run has ended.
    """

    unit: Unit | None = None
    assigned: tuple[int, ...] = ()
    rank: int = 0
    step: int = 0
    record: StepRecord | None = None
    waiting: bool = False
    over: bool = False


Pulled = tuple[int, Bytes, Bytes]
"""Number of steps of which a server has every gradient, its parameters, and the buffers if it keeps them."""
Pushed = tuple[float, Pulled | None]
"""The learning rate for a gradient, and in asynchronous training the parameters, see `ParameterServer.push`."""


class NotReadyError(Exception):
    """Raised when a server or its state is lost, or the state to continue from cannot be read now."""


class Servers(Protocol):
    """The link to all parameter servers."""

    def call(self, method: str, arguments: list[tuple[Any, ...]]) -> list[Any] | None:
        """Calls a method of every server, each with its own arguments.

        Returns:
            The replies of the servers; None if a server is lost.
        """


def call_all_servers(servers: Servers, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    """Calls a method of every server and returns the replies.

    Raises:
        NotReadyError: A server is lost, or is not in the era of the call, and so returns None.
    """
    replies = servers.call(method, arguments)
    if replies is None or any(reply is None for reply in replies):
        raise NotReadyError
    return replies
