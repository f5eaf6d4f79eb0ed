"""Authenticated TCP connections within a run: handshake, frames, limits, time-outs and file descriptors.

The rendezvous, the parameter servers and the first machine of `ray-app launch` listen here; their messages are their
own. First both ends prove that they know the secret of the listener, which a client gets only through a call of Ray
(in `launch` it is Ray's token): each sends a random number, and an HMAC of both numbers with the secret, which is never
sent itself. From then on both ends send frames, a length and that many bytes. Nothing that arrives is unpickled.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import resource
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 << 20
"""Maximum length of a frame; a longer one is not a message of this application."""
_LENGTH = struct.Struct("<Q")
_NONCE_BYTES = _PROOF_BYTES = 32
_HANDSHAKE_S = 10.0
"""Seconds from the acceptance of a connection until the client must have sent its proof."""
_MAX_UNAUTHENTICATED = _BACKLOG = 4096
"""Maximum number of connections in the handshake at a time, and of those that wait to be accepted.

All workers connect at once when the rendezvous has been restarted.
"""
_MAX_FILES_FRACTION = 0.25
"""Maximum part of the file descriptors of the process that connections in the handshake may take."""
_ACCEPT_PAUSE_S = 1.0
"""Pause after a connection could not be accepted, as when too many files are open."""
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))
"""The kernel probes the other host after 10 s of silence, every 5 s, and closes the connection after 3 lost probes."""


class UnprovenServerError(ConnectionError):
    """The server does not know the secret: it is another program, or one with another secret."""


def connect(address: tuple[str, int], secret: str, timeout_s: float) -> socket.socket:
    """Returns an authenticated connection to a `Listener`.

    Args:
        address: Address of the listener.
        secret: Secret of the listener.
        timeout_s: Limit in seconds of each operation on the connection.

    Raises:
        OSError: No server answers.
        UnprovenServerError: A server answers that does not know the secret.
    """
    connection = socket.create_connection(address, timeout=timeout_s)
    try:
        _tune(connection)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(nonce)
        server_nonce = receive_bytes(connection, _NONCE_BYTES)
        proof = receive_bytes(connection, _PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(secret, "server", nonce, server_nonce)):
            raise UnprovenServerError(f"the program at {address[0]}:{address[1]} does not know the secret")
        connection.sendall(_proof(secret, "client", nonce, server_nonce))
    except BaseException:
        connection.close()
        raise
    return connection


def _proof(secret: str, role: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Returns the proof of one end; it depends on the role, so that no end can send back the proof of the other."""
    return hmac.digest(secret.encode(), f"ray_app {role}:".encode() + client_nonce + server_nonce, "sha256")


def _tune(connection: socket.socket) -> None:
    """Sends without delay, and closes the connection when the other host does not answer any more."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def pack_frame(data: bytes) -> bytes:
    """Returns the data as a frame.

    Raises:
        ValueError: The data is longer than `MAX_FRAME_BYTES`.
    """
    _check_length(len(data))
    return _LENGTH.pack(len(data)) + data


def receive_frame(connection: socket.socket) -> bytes:
    """Waits for a frame on a blocking connection and returns its data.

    Raises:
        OSError: The other end is gone.
        ValueError: The frame is too long.
    """
    [length] = _LENGTH.unpack(receive_bytes(connection, _LENGTH.size))
    _check_length(length)
    return receive_bytes(connection, length)


def receive_bytes(connection: socket.socket, size: int) -> bytes:
    """Waits for a number of bytes and returns them, see `receive_into`."""
    data = bytearray(size)
    receive_into(connection, memoryview(data))
    return bytes(data)


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fills a buffer with received bytes.

    Raises:
        OSError: The other end is gone.
    """
    while buffer:
        num_bytes = connection.recv_into(buffer)
        if not num_bytes:
            raise ConnectionResetError("the other end has closed")
        buffer = buffer[num_bytes:]


def _check_length(length: int) -> None:
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")


class FrameReader:
    """Cuts the bytes of a connection that does not block into frames; `rest` has those of the incomplete one."""

    def __init__(self) -> None:
        self.rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Takes the next received bytes and returns the data of the frames that are complete now.

        Raises:
            ValueError: A frame is too long; the connection is of no use any more.
        """
        self.rest += data
        frames, start = [], 0
        while len(self.rest) - start >= _LENGTH.size:
            [length] = _LENGTH.unpack_from(self.rest, start)
            _check_length(length)
            end = start + _LENGTH.size + length
            if len(self.rest) < end:
                break
            frames.append(bytes(self.rest[start + _LENGTH.size : end]))
            start = end
        del self.rest[:start]
        return frames


@dataclass(frozen=True)
class _Handshake:
    """The handshake of a connection: what was received so far, the number of this end, and the timer of its end."""

    received: bytearray
    nonce: bytes
    timer: asyncio.TimerHandle


class Listener:
    """Accepts connections in an event loop, and hands over each that proves in time that it knows the secret.

    A client that sends something else or is too slow is disconnected. If too many connections are in the handshake, or
    file descriptors run out, the oldest is closed: a client of this application answers at once, so the old ones are of
    others. There are callbacks and no tasks, which would double the costs of a connection.

    Args:
        on_connect: Takes over an authenticated, blocking connection; called in the event loop.
        secret: The secret that both ends have to know; None for a new one.

    Attributes:
        secret: This secret.
    """

    def __init__(self, on_connect: Callable[[socket.socket], object], secret: str | None = None) -> None:
        self.secret = secrets.token_hex(16) if secret is None else secret
        self._on_connect = on_connect
        self._server: socket.socket | None = None
        # By connection; the oldest is first.
        self._handshakes: dict[socket.socket, _Handshake] = {}

    def listen(self, host: str, loop: asyncio.AbstractEventLoop | None = None, port: int = 0) -> tuple[str, int]:
        """Starts to listen on a port of a host, unless it does already; returns host and port.

        Args:
            host: Address of this host.
            loop: The event loop; None: one in a thread of its own.
            port: The port; 0 for a free one.

        Raises:
            OSError: The port is taken.
        """
        if self._server is None:
            # Each connection needs a file descriptor, and the default limit may be lower than the number of workers.
            with suppress(OSError, ValueError):
                limits = resource.getrlimit(resource.RLIMIT_NOFILE)
                resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            server = socket.create_server((host, port), family=family, backlog=_BACKLOG)
            server.setblocking(False)
            if loop is None:
                loop = asyncio.new_event_loop()
                threading.Thread(target=loop.run_forever, name="listener", daemon=True).start()
            self._server, self._loop = server, loop
            loop.call_soon_threadsafe(loop.add_reader, server, self._accept, server)
        address: tuple[str, int] = self._server.getsockname()[:2]
        return address

    def close(self) -> None:
        """Stops listening; connections that were handed over stay open."""
        if self._server is not None:
            self._loop.call_soon_threadsafe(self._close, self._server)
            self._server = None

    def _close(self, server: socket.socket) -> None:
        self._loop.remove_reader(server)
        server.close()
        for connection in list(self._handshakes):
            self._end_handshake(connection).close()

    def _accept(self, server: socket.socket) -> None:
        try:
            connection, _ = server.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        # Too many files are open. Connections that wait in the backlog are accepted later.
        except OSError as error:
            logger.warning("A connection could not be accepted, trying again: %s", error)
            if not self._close_oldest(0):
                self._loop.remove_reader(server)
                self._loop.call_later(_ACCEPT_PAUSE_S, self._loop.add_reader, server, self._accept, server)
            return
        connection.setblocking(False)
        timer = self._loop.call_later(_HANDSHAKE_S, self._receive_proof, connection, True)
        self._handshakes[connection] = _Handshake(bytearray(), secrets.token_bytes(_NONCE_BYTES), timer)
        self._loop.add_reader(connection, self._receive_proof, connection)
        max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._close_oldest(min(_MAX_UNAUTHENTICATED, int(_MAX_FILES_FRACTION * max_files)))

    def _close_oldest(self, max_handshakes: int) -> bool:
        """Closes the oldest connection in the handshake if there are more than a maximum; returns whether it did."""
        if len(self._handshakes) <= max_handshakes:
            return False
        self._end_handshake(next(iter(self._handshakes))).close()
        return True

    def _receive_proof(self, connection: socket.socket, is_late: bool = False) -> None:
        """Receives more of a client's number and proof; hands the connection over, or closes it if they are wrong."""
        received, nonce = self._handshakes[connection].received, self._handshakes[connection].nonce
        is_answered = len(received) >= _NONCE_BYTES
        try:
            data = b"" if is_late else connection.recv(_NONCE_BYTES + _PROOF_BYTES - len(received))
            received += data
            client_nonce = bytes(received[:_NONCE_BYTES])
            if len(received) >= _NONCE_BYTES and not is_answered:
                # So few bytes always fit into the buffer of a new connection.
                connection.send(nonce + _proof(self.secret, "server", client_nonce, nonce))
        except BlockingIOError:
            return
        except OSError:
            data, client_nonce = b"", b""
        if data and len(received) < _NONCE_BYTES + _PROOF_BYTES:
            return
        self._end_handshake(connection)
        if not hmac.compare_digest(received[_NONCE_BYTES:], _proof(self.secret, "client", client_nonce, nonce)):
            connection.close()
            return
        connection.setblocking(True)
        try:
            _tune(connection)
            self._on_connect(connection)
        # The connection may be gone by now, or too many threads may run to serve it.
        except (OSError, RuntimeError) as error:
            logger.warning("A connection cannot be served: %s", error)
            connection.close()

    def _end_handshake(self, connection: socket.socket) -> socket.socket:
        """Ends the handshake of a connection and returns the connection."""
        self._loop.remove_reader(connection)
        self._handshakes.pop(connection).timer.cancel()
        return connection
