"""A worker that was frozen and given up is told to end when it wakes: the real heartbeats and rendezvous, a real
SIGSTOP, no Ray.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ray_app.channel import connect, pack_frame
from ray_app.cluster.rendezvous import client
from ray_app.cluster.rendezvous.members import Member
from ray_app.cluster.rendezvous.rendezvous import Rendezvous
from ray_app.cluster.rendezvous.server import ConnectionServer, encode
from ray_app.runlog.paths import RunPaths
from ray_app.train.membership import Flags, Heartbeat
from tests.support.waiting import until

SILENCE_S, HERE = 5.0, "127.0.0.1"


def _live(door: tuple[Any, str], root: Path) -> None:
    """A worker's process: it gives signs of life until it is told to end."""
    context = SimpleNamespace(get_actor_id=lambda: "a", get_node_id=lambda: "node")
    util = SimpleNamespace(get_node_ip_address=lambda: HERE)
    client.ray = SimpleNamespace(get=lambda found, **_: found, get_runtime_context=lambda: context, util=util)  # type: ignore[attr-defined]
    rendezvous = SimpleNamespace(address_and_secret=SimpleNamespace(remote=lambda: door))
    made = client.RendezvousClient(rendezvous, 4, torch.device("cpu"), "gloo", RunPaths(root), 1, True)
    made._closed.wait()


class _Meeting:
    """The rendezvous, with a clock that a test moves, and what listens to the worker, in a thread."""

    def __init__(self) -> None:
        self.now_s, self.beats = 1000.0, 0
        self.rendezvous = Rendezvous(SILENCE_S, None, lambda: self.now_s)
        self.lines, self.loop = ConnectionServer(self.rendezvous), asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.door = self.do(self.lines.listen(HERE)), self.lines.secret

    def do(self, what: Coroutine[Any, Any, Any]) -> Any:
        """Does something in the rendezvous' thread."""
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(60)

    async def look(self) -> None:
        """The rendezvous looks who is silent."""
        self.rendezvous.check_liveness(self.now_s)

    def member(self) -> Member | None:
        """The worker, as the rendezvous knows it."""
        return self.rendezvous._members.get("a")

    def close(self) -> None:
        """Ends the thread."""
        self.loop.call_soon_threadsafe(self.lines.close)
        self.loop.call_soon_threadsafe(self.loop.stop)


@pytest.fixture
def meeting() -> Iterator[_Meeting]:
    made = _Meeting()
    yield made
    made.close()


@pytest.fixture
def worker(meeting: _Meeting, tmp_path: Path) -> Iterator[Any]:
    made = multiprocessing.get_context("forkserver").Process(
        target=_live, args=(meeting.door, tmp_path / "run"), daemon=True
    )
    made.start()
    until(lambda: meeting.member() is not None, "no heartbeat")
    yield made
    made.kill()


def _freeze(worker: Any) -> None:
    os.kill(worker.pid, signal.SIGSTOP)
    until(
        lambda: Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "it was not stopped"
    )


def test_who_was_given_up_while_it_was_frozen_ends_when_it_wakes(meeting: _Meeting, worker: Any) -> None:
    _freeze(worker)
    meeting.now_s += SILENCE_S + 1
    meeting.do(meeting.look())
    assert set(meeting.rendezvous._lost) == {"a"}, "it is silent"
    meeting.do(meeting.rendezvous.evict({"a"}))
    os.kill(worker.pid, signal.SIGCONT)
    worker.join(60)
    assert worker.exitcode == 1, "it goes on"


def test_what_changes_for_all_is_said_at_once_however_rare_signs_of_life_are(meeting: _Meeting, worker: Any) -> None:
    """Each is due every 1,000 s; the worker of a generation that breaks is told so, and ends since its process is given
    up.
    """
    meeting.do(meeting.rendezvous.set_expected(1_000_000))
    member = meeting.member()
    until(lambda: member.period_s == 1000, "it was not told when the next is due")
    heartbeat_s = member.heartbeat_s
    meeting.now_s += 500
    meeting.do(meeting.look())
    assert meeting.rendezvous._lost == {}, "its next sign of life is not due yet"
    member.exit = True
    meeting.do(meeting.rendezvous.raise_flags(Flags.STOP))
    worker.join(60)
    assert (worker.exitcode, member.heartbeat_s) == (1, heartbeat_s), "it was told with an answer, not at once"


def test_the_end_of_a_process_is_known_at_once(meeting: _Meeting, worker: Any) -> None:
    worker.kill()
    until(lambda: set(meeting.rendezvous._lost) == {"a"}, "nobody noticed")
    assert meeting.lines.connections == {}


def test_who_does_not_know_the_secret_is_not_heard(meeting: _Meeting) -> None:
    with socket.create_connection(meeting.door[0], timeout=60) as line:
        line.sendall(b"s" * 32 + pack_frame(encode(Heartbeat("b", "node", HERE, 1))))
        with suppress(ConnectionResetError):
            assert line.recv(1) == b""
    assert meeting.rendezvous._members.get("b") is None


@pytest.mark.parametrize("sent", [b"no JSON", b"[1, 2]", b"{}"])
def test_a_connection_without_heartbeats_is_closed_and_others_stay(meeting: _Meeting, worker: Any, sent: bytes) -> None:
    with connect(*meeting.door, 60) as line:
        line.sendall(pack_frame(sent))
        with suppress(ConnectionResetError):
            assert line.recv(1) == b""
    assert [member.heartbeat.worker for member in meeting.rendezvous._members] == ["a"]
    assert set(meeting.lines.connections) == {"a"}
    assert worker.is_alive()
