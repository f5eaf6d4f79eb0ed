"""Connections that the drill cuts, without Ray: no packet gets through, and dropped packets count as evidence."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ray_app.drill.faults import Evidence
from ray_app.drill.network import CutConnections, TcpConnection, half_open, open_connections, partition
from ray_app.drill.scenario import Scenario
from ray_app.runlog.journal import put_event
from ray_app.runlog.lease import LeaseHolder
from tests.support.drill_scenarios import SUMMARY, evidence_of_dead_process, make_result, scenario_context
from tests.support.waiting import wait_until


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other = server.accept()[0]
        for end in (one, other):
            end.settimeout(30)
        with other:
            yield one, other


def connection_of(end: socket.socket) -> TcpConnection:
    return next(
        connection
        for connection in open_connections()
        if (connection.local, connection.remote) == (end.getsockname(), end.getpeername())
    )


def has_nothing(end: socket.socket) -> bool:
    end.settimeout(0.2)
    try:
        return not end.recv(1)
    except TimeoutError:
        return True
    finally:
        end.settimeout(30)


def test_a_cut_connection_is_silent_in_both_directions_until_restored(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    one, other = ends
    connection = connection_of(one)
    with connection.socket:
        assert connection.dropped_packets == 0
        connection.cut()
        other.sendall(b"to it")
        wait_until(lambda: connection.dropped_packets > 0)
        assert has_nothing(one)
        one.sendall(b"the last that gets through, unheard ")
        assert other.recv(100)
        one.sendall(b"and")
        wait_until(lambda: connection.dropped_packets > 3)
        for _ in range(5):
            one.sendall(b" more")
        while not has_nothing(other):
            pass
        one.sendall(b" of it")
        assert has_nothing(other), "data got through the cut connection"
        connection.restore()
        assert one.recv(5) == b"to it"
        assert other.recv(100).endswith(b"of it")


@pytest.mark.parametrize("restores", [True, False])
def test_a_rank_is_partitioned_from_peers_and_from_the_rendezvous(
    tmp_path: Path, ends: tuple[socket.socket, socket.socket], restores: bool
) -> None:
    """Both ends of the connection are in this process."""
    one, other = ends
    evidence = Evidence(str(tmp_path))
    victim, peer = (CutConnections(evidence, 4, 1, [0], restores, restores) for _ in range(2))
    with (
        socket.create_server(("127.0.0.1", 0)) as rendezvous,
        socket.create_connection(rendezvous.getsockname()) as rendezvous_socket,
    ):
        evidence.put("listening", address=rendezvous.getsockname())
        for step in (3, 4):
            peer(0, step)
            victim(1, step)
        entry = evidence.get("cut")
        assert entry is not None
        assert entry["step"] == 4
        assert entry["rendezvous_connections"] == restores
        address_pair = "{}:{} - {}:{}".format(*one.getsockname(), *one.getpeername())
        assert address_pair in entry["connections"]
        other.sendall(b"x")
        if not restores:
            assert evidence.wait(["silent"], 30)
            assert any((evidence.get("silent") or {})["dropped_packets"])
            return
        accepted = rendezvous.accept()[0]
        with accepted:
            accepted.sendall(b"orders")
            assert has_nothing(one)
            assert has_nothing(rendezvous_socket)
            victim.forming("forming", 1, 4)
            assert not evidence.has("continued"), "the victim reported that the others continued without it"
            peer.forming("data", 0, 4)
            peer.forming("forming", 0, 4)
            assert evidence.wait(["continued", "restored"], 30)
            assert sum((evidence.get("restored") or {})["dropped_packets"]) >= 2
            rendezvous_socket.settimeout(30)
            assert (one.recv(1), rendezvous_socket.recv(6)) == (b"x", b"orders")


def test_a_partition_without_dropped_packets_is_not_confirmed(tmp_path: Path) -> None:
    scenario = partition(scenario_context(tmp_path))
    assert isinstance(scenario, Scenario)
    evidence = {
        "cut": {"connections": ["a", "b"], "rendezvous_connections": 1, "process": evidence_of_dead_process()},
        "continued": {"workers": 1},
        "restored": {"dropped_packets": [3, 1]},
    }
    run = make_result(tmp_path / "run", evidence, [])
    assert scenario.confirm(run) == []
    assert scenario.confirm(replace(run, evidence=evidence | {"restored": {"dropped_packets": [0, 0]}})) == [
        "no packet was dropped"
    ]
    assert scenario.confirm(replace(run, evidence=evidence | {"continued": {"workers": 2}})) == [
        "the others continued with 2 workers"
    ]
    lone = {"connections": ["a"], "rendezvous_connections": 1, "process": asdict(LeaseHolder.here())}
    assert scenario.confirm(
        replace(run, evidence=evidence | {"cut": lone}, summary=SUMMARY | {"world_sizes": [[0, 2], [9, 1]]})
    ) == ["no connection to another worker was cut", "the worker still lives but has not rejoined"]


def test_a_half_open_connection_is_confirmed_by_a_stalled_step(tmp_path: Path) -> None:
    scenario = half_open(scenario_context(tmp_path))
    assert isinstance(scenario, Scenario)
    step = scenario.steps[0]
    evidence = {"cut": {"connections": ["a"], "rendezvous_connections": 0}, "silent": {"dropped_packets": [1]}}
    run = make_result(tmp_path / "run", evidence, [])
    assert scenario.confirm(run) == ["the run has no record of a stalled step", f"no generation formed at step {step}"]
    put_event(run.paths, "stacks", 1, rank=0, step=step, doing="reduction", stacks="")
    put_event(run.paths, "formed", 1, generation=2, workers=2, step=step)
    assert scenario.confirm(run) == []
    assert half_open(scenario_context(tmp_path, 1)) == "a single worker has no connection to another"
    no_group = scenario_context(tmp_path, train__strategy="parameter_server")
    assert partition(no_group) == "workers of parameter servers have no connections to each other"
