"""Authenticated connections: the handshake with the secret, frames, and limits."""

from __future__ import annotations

import errno
import hmac
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from ray_app import channel
from ray_app.channel import (
    MAX_FRAME_BYTES,
    FrameReader,
    Listener,
    UnprovenServerError,
    connect,
    pack_frame,
    receive_frame,
)
from tests.support.waiting import is_closed, wait_until

WAIT_S = 20.0


class Echo:
    """A listener that sends each frame back on its connection."""

    def __init__(self) -> None:
        self.accepted = list[socket.socket]()
        self.listener = Listener(self.start)
        self.address = self.listener.listen("127.0.0.1")

    def start(self, connection: socket.socket) -> None:
        self.accepted.append(connection)
        threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError):
            while True:
                connection.sendall(pack_frame(receive_frame(connection)))

    def connect(self) -> socket.socket:
        return connect(self.address, self.listener.secret, WAIT_S)

    def answers(self) -> bool:
        """Returns whether a client with the secret is served."""
        with self.connect() as connection:
            connection.sendall(pack_frame(b"here"))
            return receive_frame(connection) == b"here"


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.listener.close()


def test_frames_are_reassembled_from_any_parts(echo: Echo) -> None:
    frames = [b"", b"a", b"b" * 100_000]
    stream = b"".join(map(pack_frame, frames))
    for size in (1, 7, 8, 9, len(stream)):
        reader = FrameReader()
        parts = [stream[i : i + size] for i in range(0, len(stream) if size > 1 else 100, size)]
        frames_read = [frame for part in parts for frame in reader.feed(part)]
        assert frames_read == (frames if size > 1 else frames[:2])
    with echo.connect() as connection:
        for frame in frames:
            connection.sendall(pack_frame(frame))
            assert receive_frame(connection) == frame


def test_a_frame_sent_with_the_proof_is_not_lost(echo: Echo) -> None:
    with socket.create_connection(echo.address, timeout=WAIT_S) as connection:
        connection.sendall(b"n" * 32)
        nonce = channel.receive_bytes(connection, 64)[:32]
        proof = hmac.digest(echo.listener.secret.encode(), b"ray_app client:" + b"n" * 32 + nonce, "sha256")
        connection.sendall(proof + pack_frame(b"first"))
        assert receive_frame(connection) == b"first"


@pytest.mark.parametrize(
    "sent",
    [b"0" * 32, b"", b"short", b"GET / HTTP/1.1\r\nHost: parameters\r\n\r\n", b"\xff" * 64],
    ids=["a number", "nothing", "less than a number", "a browser", "bytes"],
)
def test_a_client_without_the_secret_is_disconnected_and_not_served(echo: Echo, sent: bytes) -> None:
    with socket.create_connection(echo.address, timeout=WAIT_S) as connection:
        connection.sendall(sent + pack_frame(b"serve me"))
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        with suppress(OSError):
            # Whoever sends a number gets a number and a proof that it cannot use.
            channel.receive_bytes(connection, 64)
            assert connection.recv(1) == b"", "the connection was answered"
    assert echo.accepted == []
    assert echo.answers()


@pytest.mark.parametrize("secret", ["another", "", None], ids=["another secret", "no secret", "an echo"])
def test_neither_end_accepts_one_that_does_not_know_the_secret(echo: Echo, secret: str | None) -> None:
    """The third sends back what it gets, so it has the proof of the client."""
    server = Listener(lambda connection: None, secret) if secret is not None else None
    with socket.create_server(("127.0.0.1", 0)) as mirror, ExitStack() as stack:
        if server is None:
            threading.Thread(target=_send_back, args=(mirror,), daemon=True).start()
        else:
            stack.callback(server.close)
        address = mirror.getsockname() if server is None else server.listen("127.0.0.1")
        with pytest.raises(UnprovenServerError):
            connect(address, echo.listener.secret, WAIT_S)
    with pytest.raises(UnprovenServerError):
        connect(echo.address, secret or "", WAIT_S)
    assert echo.accepted == []


def _send_back(mirror: socket.socket) -> None:
    connection, _ = mirror.accept()
    with connection, suppress(OSError):
        while data := connection.recv(64):
            connection.sendall(data + data)


def test_a_large_frame_in_small_parts_is_read_in_linear_time() -> None:
    """Counts the bytes that are copied, which a timed test could not."""
    reader, frame = FrameReader(), pack_frame(b"a" * (1 << 20))
    sizes = []
    for start in range(0, len(frame), 1 << 10):
        rest = reader.rest
        frames = reader.feed(frame[start : start + (1 << 10)])
        assert reader.rest is rest, "what was received before is copied"
        sizes += [len(f) for f in frames]
    assert sizes == [1 << 20]


def test_a_frame_that_is_too_long_is_refused_before_memory_is_allocated(echo: Echo) -> None:
    length = (MAX_FRAME_BYTES + 1).to_bytes(8, "little")
    with echo.connect() as good, echo.connect() as bad:
        bad.sendall(length)
        assert bad.recv(1) == b"", "the connection stays open"
        good.sendall(pack_frame(b"here"))
        assert receive_frame(good) == b"here"
    with pytest.raises(ValueError, match=f"a frame of {MAX_FRAME_BYTES + 1} bytes; at most {MAX_FRAME_BYTES}"):
        FrameReader().feed(length)
    left, right = socket.socketpair()
    with left, right:
        left.sendall((1 << 63).to_bytes(8, "little"))
        with pytest.raises(ValueError, match="a frame of"):
            receive_frame(right)
        left.close()
        with pytest.raises(ConnectionResetError, match="the other end has closed"):
            receive_frame(right)


def test_a_frame_that_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_FRAME_BYTES", 10)
    assert pack_frame(b"0123456789")
    with pytest.raises(ValueError, match="a frame of 11 bytes; at most 10"):
        pack_frame(b"0123456789a")


def test_a_slow_handshake_times_out_although_the_client_sends_bytes(
    monkeypatch: pytest.MonkeyPatch, echo: Echo
) -> None:
    monkeypatch.setattr(channel, "_HANDSHAKE_S", 0.3)
    sent = 0
    began_s = time.monotonic()
    with socket.create_connection(echo.address, timeout=WAIT_S) as slow:
        while not is_closed(slow):
            assert time.monotonic() - began_s < WAIT_S
            slow.setblocking(True)
            with suppress(OSError):
                slow.send(b"n")
                sent += 1
            time.sleep(0.05)
    assert sent < 64
    assert echo.accepted == []


def test_a_half_open_connection_times_out_and_blocks_no_client(monkeypatch: pytest.MonkeyPatch, echo: Echo) -> None:
    """The client sends nothing, like a client on a lost host."""
    monkeypatch.setattr(channel, "_HANDSHAKE_S", 0.3)
    with socket.create_connection(echo.address, timeout=WAIT_S) as silent:
        assert echo.answers()
        wait_until(lambda: is_closed(silent), "the connection stays open", WAIT_S)


def test_authenticated_connections_use_tcp_keep_alive(echo: Echo) -> None:
    """The kernel detects a lost host; neither end limits how long the other is silent, since it may be busy."""
    with echo.connect() as connection:
        wait_until(lambda: bool(echo.accepted), "the connection was not accepted", WAIT_S)
        for end in (connection, echo.accepted[0]):
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        assert echo.accepted[0].gettimeout() is None


def test_the_oldest_of_too_many_handshakes_is_closed(monkeypatch: pytest.MonkeyPatch, echo: Echo) -> None:
    monkeypatch.setattr(channel, "_MAX_UNAUTHENTICATED", 3)
    with ExitStack() as stack:
        strangers = list[socket.socket]()
        for _ in range(5):
            strangers.append(stack.enter_context(begin_handshake(echo)))
        wait_until(lambda: is_closed(strangers[1]), "the second connection stays open", WAIT_S)
        assert [is_closed(stranger) for stranger in strangers] == [True, True, False, False, False]
        assert echo.answers(), "clients without the secret block a worker"
        assert is_closed(strangers[2])


def begin_handshake(echo: Echo) -> socket.socket:
    """Returns a connection of a client that does not send its proof."""
    connection = socket.create_connection(echo.address, timeout=WAIT_S)
    connection.sendall(b"n" * 32)
    channel.receive_bytes(connection, 64)
    return connection


def test_many_concurrent_clients_are_served(echo: Echo) -> None:
    with ExitStack() as stack:
        connections = [stack.enter_context(echo.connect()) for _ in range(600)]
        for connection in connections:
            connection.sendall(pack_frame(b"here"))
        assert all(receive_frame(connection) == b"here" for connection in connections)


def test_the_listener_survives_a_lack_of_file_descriptors(monkeypatch: pytest.MonkeyPatch, echo: Echo) -> None:
    monkeypatch.setattr(channel, "_ACCEPT_PAUSE_S", 0.05)
    accept = socket.socket.accept
    refusals = [OSError(errno.EMFILE, os.strerror(errno.EMFILE)), OSError(errno.ENFILE, os.strerror(errno.ENFILE))]

    def refuse_twice(server: socket.socket) -> Any:
        if refusals:
            raise refusals.pop()
        return accept(server)

    with begin_handshake(echo) as stranger:
        monkeypatch.setattr(socket.socket, "accept", refuse_twice)
        assert echo.answers(), "a waiting connection must be accepted later"
        assert refusals == []
        assert is_closed(stranger), "an unauthenticated connection keeps a descriptor that a worker needs"


def test_a_listener_raises_the_limit_of_file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = list[Any]()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda name, limit: limits.append((name, limit)))
    Echo().listener.close()
    assert limits == [(resource.RLIMIT_NOFILE, (4096, 4096))]


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), OSError("reset")])
def test_a_connection_that_cannot_be_served_is_closed(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    start, refused = Echo.start, list[socket.socket]()

    def refuse_once(echo: Echo, connection: socket.socket) -> None:
        if not refused:
            refused.append(connection)
            raise error
        start(echo, connection)

    monkeypatch.setattr(Echo, "start", refuse_once)
    echo = Echo()
    with echo.connect() as connection:
        assert connection.recv(1) == b""
    assert echo.answers()
    echo.listener.close()


def test_a_closed_listener_accepts_no_client_and_keeps_connections_open(echo: Echo) -> None:
    with echo.connect() as connection, socket.create_connection(echo.address, timeout=WAIT_S) as stranger:
        connection.sendall(pack_frame(b"here"))
        assert receive_frame(connection) == b"here"
        echo.listener.close()
        wait_until(lambda: is_closed(stranger), "the handshake continues", WAIT_S)
        with pytest.raises(OSError, match="refused"):
            wait_until(
                lambda: socket.create_connection(echo.address, timeout=WAIT_S).close(),
                "still listening",
                WAIT_S,
            )
        connection.sendall(pack_frame(b"still"))
        assert receive_frame(connection) == b"still"
