"""Connections to parameter servers: what travels, who is let in, what an end means."""

from __future__ import annotations

import json
import math
import os
import pickle
import socket
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from ray_app import channel
from ray_app.channel import Listener, connect, pack_frame
from ray_app.errors import DataError
from ray_app.train.job import Job
from ray_app.train.strategies.parameter_server.actors import RayServers, ServerActor
from ray_app.train.strategies.parameter_server.protocol import receive, send, start_server
from tests.support.local_world import make_job, write_images
from tests.support.waiting import until

WAIT_S = 20.0


@pytest.fixture
def echo() -> tuple[Listener, tuple[str, int]]:
    listener = start_server(lambda came: came)
    return listener, listener.listen("127.0.0.1")


def test_what_is_sent_arrives(echo: tuple[Listener, tuple[str, int]]) -> None:
    listener, address = echo
    files = {"model.safetensors": b"\x00\n\xff", "training.pt": b""}
    values = [
        "push",
        3,
        None,
        True,
        0.1,
        math.inf,
        -0.0,
        files,
        np.arange(5, dtype=np.uint8),
        [1, [np.empty(0, np.uint8), b"after"]],
    ]
    with connect(address, listener.secret, WAIT_S) as line:
        send(line, values)
        came = receive(line)
    for sent, arrived in ((values[8], came[8]), (values[9][1][0], came[9][1][0])):
        assert arrived.dtype == np.uint8
        assert arrived.tobytes() == sent.tobytes()
        assert arrived.flags.writeable
    assert [*came[:8], came[9][1][1]] == [*values[:8], b"after"]
    assert math.copysign(1, came[6]) == -1
    with pytest.raises(TypeError, match="set cannot be sent"):
        send(line, [{1}])


def test_more_than_the_kernel_holds_travels_both_ways_at_once(echo: tuple[Listener, tuple[str, int]]) -> None:
    """Several times what socket buffers take, on several connections side by side."""
    listener, address = echo
    found: dict[int, bool] = {}

    def ask(number: int) -> None:
        data = np.full(30_000_000, number, np.uint8)
        with connect(address, listener.secret, WAIT_S) as line:
            for _ in range(2):
                send(line, [data])
                [came] = receive(line)
                found[number] = bool((came == number).all()) and came.size == data.size

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for each in asking:
        each.start()
    for each in asking:
        each.join(WAIT_S)
    assert found == dict.fromkeys(range(3), True)


@pytest.mark.parametrize(
    "shown",
    ["0" * 32, "", "GET / HTTP/1.1\r\nHost: parameters\r\n\r\n"],
    ids=["another secret", "nothing", "a browser"],
)
def test_who_does_not_know_the_secret_is_not_heard(shown: str) -> None:
    heard: list[Any] = []
    listener = start_server(heard.append)
    with socket.create_connection(listener.listen("127.0.0.1"), timeout=WAIT_S) as line:
        line.sendall(shown.encode())
        with suppress(OSError):  # it may have hung up already
            line.shutdown(socket.SHUT_WR)
        with suppress(OSError):
            assert line.recv(1) == b"", "it was answered"
    assert heard == []


def test_strangers_keep_nobody_out(monkeypatch: pytest.MonkeyPatch, echo: tuple[Listener, tuple[str, int]]) -> None:
    """They have some seconds in all to show the secret, however little they say at a time, and only so many are
    listened to.
    """
    monkeypatch.setattr(channel, "_HANDSHAKE_S", 0.3)
    monkeypatch.setattr(channel, "_MAX_UNAUTHENTICATED", 2)
    listener, address = echo
    strangers = [socket.create_connection(address, timeout=WAIT_S) for _ in range(4)]
    until(lambda: any(is_closed(each) for each in strangers), "nobody was sent away", WAIT_S)
    said: list[int] = []

    def are_gone() -> bool:
        said.append(len(said))
        for each in strangers:
            with suppress(OSError):
                each.send(b"0")
        return not listener._handshakes

    until(are_gone, "they are heard out", WAIT_S)
    assert len(said) < 32, "they were heard until they had shown as much as the secret has"
    monkeypatch.setattr(channel, "_HANDSHAKE_S", WAIT_S)
    with connect(address, listener.secret, WAIT_S) as line:
        send(line, ["a worker"])
        assert receive(line) == ["a worker"]
    for each in strangers:
        each.close()


def is_closed(line: socket.socket) -> bool:
    line.setblocking(False)
    try:
        return line.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_a_listener_outlives_a_lack_of_threads(
    monkeypatch: pytest.MonkeyPatch, echo: tuple[Listener, tuple[str, int]]
) -> None:
    listener, address = echo
    start, refused = threading.Thread.start, list[str]()

    def refuse_once(thread: threading.Thread) -> None:
        if thread.name == "connection" and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    with connect(address, listener.secret, WAIT_S) as line, pytest.raises(OSError, match=r"gone|reset|Broken"):
        receive(line)
    with connect(address, listener.secret, WAIT_S) as line:
        send(line, ["welcome"])
        assert receive(line) == ["welcome"]
    assert refused == ["connection"]


def test_an_answer_may_wait_until_another_one_is_read(echo: tuple[Listener, tuple[str, int]]) -> None:
    """The kernel does not take a full buffer for a dead connection: no end of it has a limit on how long that
    may be.
    """
    listener, address = echo
    with connect(address, listener.secret, WAIT_S) as line:
        assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
        assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def test_who_sends_something_else_is_hung_up_on_and_others_are_not(echo: tuple[Listener, tuple[str, int]]) -> None:
    listener, address = echo
    with connect(address, listener.secret, WAIT_S) as good, connect(address, listener.secret, WAIT_S) as bad:
        payload = pickle.dumps(SimpleNamespace())
        bad.sendall(pack_frame(payload))
        with pytest.raises(OSError, match=r"gone|reset"):
            receive(bad)
        send(good, ["still here"])
        assert receive(good) == ["still here"]


@pytest.mark.parametrize("size", [-1, 1 << 60, "4", None], ids=str)
def test_a_length_that_cannot_be_is_refused_before_memory_is_taken_for_it(
    echo: tuple[Listener, tuple[str, int]], size: Any
) -> None:
    listener, address = echo
    with connect(address, listener.secret, WAIT_S) as line:
        line.sendall(pack_frame(json.dumps([{"__array__": size}]).encode()))
        with pytest.raises(OSError, match=r"gone|reset"):
            receive(line)


class Handle:
    """A server in this process, as the handle of an actor that can be started again."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.start()

    def start(self) -> None:
        self.server = ServerActor(self._job.config, self._job.total_steps)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self.server, name))


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Handle]:
    monkeypatch.setattr(ray, "get", lambda answer, timeout=None: answer)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    data = write_images(tmp_path / "data", [[8]])
    job = make_job(tmp_path, data, logical_workers=2, batch=4, train__strategy="parameter_server", train__servers=2)
    return [Handle(job), Handle(job)]


def test_a_server_that_ended_is_lost_and_the_next_call_finds_the_one_in_its_place(handles: list[Handle]) -> None:
    servers = RayServers(tuple(handles))
    assert servers.call("era", [(), ()]) == [0, 0]
    servers._lines[1].shutdown(socket.SHUT_RDWR)  # as the kernel does when a process ends
    handles[1].start()
    handles[1].server._era = 7
    assert servers.call("era", [(), ()]) is None
    assert servers._lines == []
    assert servers.call("era", [(), ()]) == [0, 7]
    assert pickle.loads(pickle.dumps(RayServers(("a", "b")))).handles == ("a", "b")


def test_what_goes_wrong_in_a_server_is_raised_where_it_was_called(handles: list[Handle]) -> None:
    servers = RayServers(tuple(handles))

    def fails(*_: Any) -> None:
        raise DataError("the optimizer of a user does not like this")

    handles[0].server.norms = fails  # type: ignore[method-assign]
    with pytest.raises(DataError, match="does not like this"):
        servers.call("norms", [(0, 0, []), (0, 0, [])])
    with pytest.raises(DataError, match="does not like this"):
        servers.call("norms", [(0, 0, []), (0, 0, [])])
    assert servers.call("era", [(), ()]) == [0, 0], "answers are mixed up after a failure"


def test_nothing_but_what_servers_are_asked_for_can_be_called(handles: list[Handle]) -> None:
    assert RayServers(tuple(handles)).call("__reduce__", [(), ()]) is None


def test_a_server_in_the_middle_of_a_call_is_not_well(handles: list[Handle]) -> None:
    """The coordinator ends servers that neither die nor answer."""
    server, begun, go_on = handles[0].server, threading.Event(), threading.Event()

    def slow() -> int:
        begun.set()
        assert go_on.wait(WAIT_S)
        return os.getpid()

    server.era = slow  # type: ignore[method-assign]
    asking = threading.Thread(target=RayServers((handles[0],)).call, args=("era", [()]))
    asking.start()
    assert begun.wait(WAIT_S)
    looking = threading.Thread(target=server.well)
    looking.start()
    looking.join(0.2)
    assert looking.is_alive()
    go_on.set()
    looking.join(WAIT_S)
    asking.join(WAIT_S)
    assert not looking.is_alive()
    assert not asking.is_alive()
