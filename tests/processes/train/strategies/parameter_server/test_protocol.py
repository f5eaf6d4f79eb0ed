"""Connections to parameter servers: the values they carry, authentication, and lost connections."""

from __future__ import annotations

import json
import math
import os
import pickle
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from ray_app.channel import Listener, connect, pack_frame
from ray_app.errors import DataError
from ray_app.train.job import Job
from ray_app.train.strategies.parameter_server import actors
from ray_app.train.strategies.parameter_server.actors import RayServers, ServerActor
from ray_app.train.strategies.parameter_server.protocol import receive, send, start_server
from tests.support.local_world import make_job, write_images

WAIT_S = 20.0


@pytest.fixture
def echo() -> tuple[Listener, tuple[str, int]]:
    listener = start_server(lambda values: values)
    return listener, listener.listen("127.0.0.1")


def test_values_arrive_as_they_were_sent(echo: tuple[Listener, tuple[str, int]]) -> None:
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
    with connect(address, listener.secret, WAIT_S) as connection:
        send(connection, values)
        received = receive(connection)
    for sent, arrived in ((values[8], received[8]), (values[9][1][0], received[9][1][0])):
        assert arrived.dtype == np.uint8
        assert arrived.tobytes() == sent.tobytes()
        assert arrived.flags.writeable
    assert [*received[:8], received[9][1][1]] == [*values[:8], b"after"]
    assert math.copysign(1, received[6]) == -1
    with pytest.raises(TypeError, match="set cannot be sent"):
        send(connection, [{1}])


def test_messages_larger_than_socket_buffers_travel_both_ways_at_once(echo: tuple[Listener, tuple[str, int]]) -> None:
    """Each message is several times the size of a socket buffer, on several concurrent connections."""
    listener, address = echo
    is_intact: dict[int, bool] = {}

    def send_and_check(number: int) -> None:
        data = np.full(30_000_000, number, np.uint8)
        with connect(address, listener.secret, WAIT_S) as connection:
            for _ in range(2):
                send(connection, [data])
                [received] = receive(connection)
                is_intact[number] = bool((received == number).all()) and received.size == data.size

    threads = [threading.Thread(target=send_and_check, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert is_intact == dict.fromkeys(range(3), True)


def test_a_client_that_sends_another_format_is_disconnected_alone(echo: tuple[Listener, tuple[str, int]]) -> None:
    listener, address = echo
    with connect(address, listener.secret, WAIT_S) as good, connect(address, listener.secret, WAIT_S) as bad:
        payload = pickle.dumps(SimpleNamespace())
        bad.sendall(pack_frame(payload))
        with pytest.raises(OSError, match=r"closed|reset"):
            receive(bad)
        send(good, ["still here"])
        assert receive(good) == ["still here"]


@pytest.mark.parametrize("size", [-1, 1 << 60, "4", None], ids=str)
def test_an_impossible_array_size_is_refused_before_memory_is_allocated(
    echo: tuple[Listener, tuple[str, int]], size: Any
) -> None:
    listener, address = echo
    with connect(address, listener.secret, WAIT_S) as connection:
        connection.sendall(pack_frame(json.dumps([{"__array__": size}]).encode()))
        with pytest.raises(OSError, match=r"closed|reset"):
            receive(connection)


class Handle:
    """The handle of a server actor that runs in this process and can be started again."""

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


def test_a_server_that_ended_is_lost_and_the_next_call_reaches_its_successor(
    handles: list[Handle], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, connections = RayServers(tuple(handles)), list[socket.socket]()

    def connect_and_record(*arguments: Any) -> socket.socket:
        connections.append(connect(*arguments))
        return connections[-1]

    monkeypatch.setattr(actors, "connect", connect_and_record)
    assert servers.call("era", [(), ()]) == [0, 0]
    # The kernel does this when a process ends.
    connections[1].shutdown(socket.SHUT_RDWR)
    handles[1].start()
    handles[1].server.era = lambda: 7
    assert servers.call("era", [(), ()]) is None
    assert [connection.fileno() for connection in connections] == [-1, -1]
    assert servers.call("era", [(), ()]) == [0, 7]
    assert pickle.loads(pickle.dumps(RayServers(("a", "b")))).handles == ("a", "b")


def test_an_error_in_a_server_is_raised_in_the_caller(handles: list[Handle]) -> None:
    servers = RayServers(tuple(handles))

    def fail(*_: Any) -> None:
        raise DataError("the optimizer of a user does not like this")

    handles[0].server.norms = fail
    for _ in range(2):
        with pytest.raises(DataError, match="does not like this"):
            servers.call("norms", [(0, 0, []), (0, 0, [])])
    assert servers.call("era", [(), ()]) == [0, 0], "answers are mixed up after a failure"


def test_only_the_methods_of_the_protocol_can_be_called(handles: list[Handle]) -> None:
    assert RayServers(tuple(handles)).call("__reduce__", [(), ()]) is None


def test_the_health_check_of_a_server_waits_for_a_running_call(handles: list[Handle]) -> None:
    """The coordinator ends servers that neither die nor answer."""
    server = handles[0].server
    call_started = threading.Event()
    may_finish = threading.Event()

    def wait_in_call() -> int:
        call_started.set()
        assert may_finish.wait(WAIT_S)
        return os.getpid()

    server.era = wait_in_call
    caller = threading.Thread(target=RayServers((handles[0],)).call, args=("era", [()]))
    caller.start()
    assert call_started.wait(WAIT_S)
    health_check = threading.Thread(target=server.well)
    health_check.start()
    health_check.join(0.2)
    assert health_check.is_alive()
    may_finish.set()
    health_check.join(WAIT_S)
    caller.join(WAIT_S)
    assert not health_check.is_alive()
    assert not caller.is_alive()
