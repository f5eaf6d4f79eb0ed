"""The messages between workers, parameter servers and their coordinator, and the connections to the servers.

Gradients, parameters and state travel over connections of their own: a call of a Ray actor with half a megabyte goes
through Ray's object store, and takes ten times the CPU of a call over one of these. A client shows a secret first,
which it gets only by a call of Ray; received data is never unpickled.
"""

from __future__ import annotations

import hmac
import json
import logging
import resource
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ray_app.runlog.journal import StepRecord
from ray_app.train.step.step_stats import ReplicaStats
from ray_app.train.strategies.parameter_server.layout import Bytes

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")
_SECRET_BYTES = 32
_INTRODUCTION_S, _PAUSE_S = 10.0, 1.0
_MAX_UNKNOWN_CLIENTS = 256
"""Connections at a time that have not shown the secret yet."""
_ARRAY, _BYTES = "__array__", "__bytes__"
_IDLE_S = 10
"""TCP keep-alive: seconds of silence before the kernel probes the other host."""
_AGAIN_S = 5
"""TCP keep-alive: seconds between two probes."""
_TRIES = 3
"""TCP keep-alive: number of probes without an answer after which the connection is closed."""


def connect(address: tuple[str, int], secret: str, timeout_s: float) -> socket.socket:
    """Returns a connection to a `Listener`.

    Args:
        address: Address of the listener.
        secret: Secret of the listener.
        timeout_s: Limit in seconds of each operation on the connection.

    Raises:
        OSError: No server answers.
    """
    line = socket.create_connection(address, timeout=timeout_s)
    _tune(line)
    line.sendall(secret.encode())
    return line


def _tune(line: socket.socket) -> None:
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _IDLE_S),
        (socket.TCP_KEEPINTVL, _AGAIN_S),
        (socket.TCP_KEEPCNT, _TRIES),
    ):
        line.setsockopt(socket.IPPROTO_TCP, option, value)
    # TCP_USER_TIMEOUT is not set: it would end a connection while the other end is busy with something else.


def send(line: socket.socket, values: Any) -> None:
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

    text = json.dumps(values, default=describe).encode()
    line.sendall(_LENGTH.pack(len(text)) + text)
    for value in raw:
        line.sendall(value)


def receive(line: socket.socket) -> Any:
    """Returns the values of a `send`, with tuples as lists, and with writable arrays.

    Raises:
        OSError: The other end is gone.
        ValueError: The received data is not a message.
    """

    # JSON calls this in the order of the text, which is the order of the raw data after it.
    def read_raw(part: dict[str, Any]) -> Any:
        if part.keys() == {_ARRAY}:
            array = np.empty(part[_ARRAY], np.uint8)
            _fill(line, array.data)
            return array
        return _read(line, part[_BYTES]) if part.keys() == {_BYTES} else part

    [length] = _LENGTH.unpack(_read(line, _LENGTH.size))
    return json.loads(_read(line, length), object_hook=read_raw)


def _read(line: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _fill(line, memoryview(data))
    return bytes(data)


def _fill(line: socket.socket, remaining: memoryview) -> None:
    while remaining:
        num_bytes = line.recv_into(remaining)
        if not num_bytes:
            raise ConnectionResetError("the other end is gone")
        remaining = remaining[num_bytes:]


def _receive_secret(line: socket.socket) -> bytes:
    """Returns what a client sends as the secret, within a limit of time for all of it."""
    received, until_s = b"", time.monotonic() + _INTRODUCTION_S
    while len(received) < _SECRET_BYTES:
        line.settimeout(max(0.001, until_s - time.monotonic()))
        part = line.recv(_SECRET_BYTES - len(received))
        if not part:
            break
        received += part
    return received


class Listener:
    """Accepts the connections to a server and serves each in a thread of its own.

    Args:
        answer: Returns the reply to a message.

    Attributes:
        secret: The secret that clients have to show.
    """

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self._answer, self.secret = answer, secrets.token_hex(_SECRET_BYTES // 2)
        self._door: socket.socket | None = None
        self._unknown_clients = 0
        self._count_lock = threading.Lock()

    def listen(self, host: str) -> tuple[str, int]:
        """Starts to listen, if it does not yet; returns host and port."""
        if self._door is None:
            # Each connection needs a file descriptor.
            with suppress(OSError, ValueError):
                limits = resource.getrlimit(resource.RLIMIT_NOFILE)
                resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
            self._door = socket.create_server((host, 0), backlog=socket.SOMAXCONN)
            threading.Thread(target=self._accept, args=(self._door,), name="listener", daemon=True).start()
        host, port = self._door.getsockname()[:2]
        return host, port

    def _accept(self, door: socket.socket) -> None:
        while True:
            try:
                line, _ = door.accept()
            # Too many files are open.
            except OSError as error:
                logger.warning("A connection cannot be taken: %s", error)
                time.sleep(_PAUSE_S)
                continue
            with self._count_lock:
                self._unknown_clients += 1
                is_accepted = self._unknown_clients <= _MAX_UNKNOWN_CLIENTS
            try:
                if is_accepted:
                    threading.Thread(target=self._serve, args=(line,), name="connection", daemon=True).start()
                    continue
            # Too many threads run.
            except RuntimeError as error:
                logger.warning("A connection cannot be served: %s", error)
            self._end_introduction()
            line.close()

    def _end_introduction(self) -> None:
        """Counts one unknown client less."""
        with self._count_lock:
            self._unknown_clients -= 1

    def _serve(self, line: socket.socket) -> None:
        with line, suppress(OSError, ValueError):
            try:
                secret = _receive_secret(line)
            finally:
                self._end_introduction()
            if not hmac.compare_digest(secret, self.secret.encode()):
                return
            line.settimeout(None)
            _tune(line)
            while True:
                send(line, self._answer(receive(line)))


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
        ...


def call_all_servers(servers: Servers, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    """Calls a method of every server and returns the replies.

    Raises:
        NotReadyError: A server is lost, or is not in the era of the call, and so returns None.
    """
    replies = servers.call(method, arguments)
    if replies is None or any(reply is None for reply in replies):
        raise NotReadyError
    return replies
