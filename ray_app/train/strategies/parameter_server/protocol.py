"""Connections to parameter servers, over which gradients, parameters and state travel.

A call of a Ray actor with half a megabyte goes through its object store, and takes ten times the CPU of a call over one
of these. Who connects shows a secret first, which only Ray's own calls tell; nothing that comes is unpickled.

What workers, parameter servers and their coordinator say to each other.
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
_MOST_STRANGERS = 256
"""Connections at a time that have not shown the secret yet."""
_ARRAY, _BYTES = "__array__", "__bytes__"
_IDLE_S, _AGAIN_S, _TRIES = 10, 5, 3
"""After so much silence the kernel asks whether the other host is still there, so often and so many times."""


def connect(address: tuple[str, int], secret: str, timeout_s: float) -> socket.socket:
    """A connection to a `Listener`.

    Args:
        address: Where it listens.
        secret: What it wants to be shown.
        timeout_s: Most seconds that anything on this connection may take.

    Raises:
        OSError: Nobody answers.
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
    # no TCP_USER_TIMEOUT: it would end who waits while the other end has something else to read first


def send(line: socket.socket, values: Any) -> None:
    """Sends what JSON knows, bytes, and NumPy arrays of bytes.

    Raises:
        OSError: The other end is gone.
    """
    raw: list[Any] = []

    def noted(value: Any) -> dict[str, int]:
        if not isinstance(value, bytes | np.ndarray):
            raise TypeError(f"{type(value).__name__} cannot be sent to or from a parameter server; please report this.")
        raw.append(value)
        return {_BYTES: len(value)} if isinstance(value, bytes) else {_ARRAY: value.nbytes}

    text = json.dumps(values, default=noted).encode()
    line.sendall(_LENGTH.pack(len(text)) + text)
    for value in raw:
        line.sendall(value)


def receive(line: socket.socket) -> Any:
    """Receives what `send` was given; tuples have become lists, arrays are of this process and may be written to.

    Raises:
        OSError: The other end is gone.
        ValueError: That was no message.
    """

    def found(part: dict[str, Any]) -> Any:  # in the order in which they were noted
        if part.keys() == {_ARRAY}:
            array = np.empty(part[_ARRAY], np.uint8)
            _fill(line, array.data)
            return array
        return _read(line, part[_BYTES]) if part.keys() == {_BYTES} else part

    [length] = _LENGTH.unpack(_read(line, _LENGTH.size))
    return json.loads(_read(line, length), object_hook=found)


def _read(line: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _fill(line, memoryview(data))
    return bytes(data)


def _fill(line: socket.socket, left: memoryview) -> None:
    while left:
        got = line.recv_into(left)
        if not got:
            raise ConnectionResetError("the other end is gone")
        left = left[got:]


def _introduction(line: socket.socket) -> bytes:
    """What who connects shows, within some seconds in all."""
    shown, until_s = b"", time.monotonic() + _INTRODUCTION_S
    while len(shown) < _SECRET_BYTES:
        line.settimeout(max(0.001, until_s - time.monotonic()))
        part = line.recv(_SECRET_BYTES - len(shown))
        if not part:
            break
        shown += part
    return shown


class Listener:
    """A server's end of all connections, each with a thread of its own.

    Args:
        answer: Makes the answer to what came.

    Attributes:
        secret: What who connects has to show.
    """

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self._answer, self.secret = answer, secrets.token_hex(_SECRET_BYTES // 2)
        self._door: socket.socket | None = None
        self._strangers, self._counting = 0, threading.Lock()

    def listen(self, host: str) -> tuple[str, int]:
        """Begins to listen, if it does not yet, and returns where."""
        if self._door is None:
            with suppress(OSError, ValueError):  # a descriptor for each connection
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
            except OSError as error:  # too many files are open
                logger.warning("A connection cannot be taken: %s", error)
                time.sleep(_PAUSE_S)
                continue
            with self._counting:
                self._strangers += 1
                is_welcome = self._strangers <= _MOST_STRANGERS
            try:
                if is_welcome:
                    threading.Thread(target=self._serve, args=(line,), name="connection", daemon=True).start()
                    continue
            except RuntimeError as error:  # too many threads
                logger.warning("A connection cannot be served: %s", error)
            self._known()
            line.close()

    def _known(self) -> None:
        with self._counting:
            self._strangers -= 1

    def _serve(self, line: socket.socket) -> None:
        with line, suppress(OSError, ValueError):
            try:
                shown = _introduction(line)
            finally:
                self._known()
            if not hmac.compare_digest(shown, self.secret.encode()):
                return
            line.settimeout(None)
            _tune(line)
            while True:
                send(line, self._answer(receive(line)))


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
class UnitResult:
    """A unit whose gradient is on all servers.

    Args:
        unit: Which.
        row: What it has to say about the step.
        lr: Learning rate that it was used with.
        wait_s: Seconds that it waited for data.
    """

    unit: Unit
    row: ReplicaStats
    lr: float
    wait_s: float


@dataclass(frozen=True)
class CoordinatorReply:
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


def call_all_servers(servers: Servers, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    """Calls a method of every server that returns something.

    Raises:
        NotReadyError: A server is lost, or is not in the era that it was asked for.
    """
    answers = servers.call(method, arguments)
    if answers is None or any(answer is None for answer in answers):
        raise NotReadyError
    return answers
