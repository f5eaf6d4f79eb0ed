"""A worker that was removed while it was frozen exits when it wakes: real rendezvous and SIGSTOP, without Ray."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_app.channel import connect, pack_frame
from ray_app.cluster.rendezvous import client
from ray_app.cluster.rendezvous.server import encode
from ray_app.runlog.paths import RunPaths
from ray_app.testing import make_context
from ray_app.train.membership import Flags, Heartbeat
from tests.support.rendezvous_thread import (
    LOCALHOST,
    SILENCE_S,
    RemoteRendezvous,
    RendezvousThread,
    use_without_ray,
)
from tests.support.waiting import wait_until


def _run_worker(remote: RemoteRendezvous, root: Path) -> None:
    """Runs in a worker's process: sends heartbeats until the rendezvous ends it."""
    with pytest.MonkeyPatch.context() as patch:
        use_without_ray(patch, "a")
        client.RendezvousClient(remote, 4, torch.device("cpu"), "gloo", RunPaths(root), 1)
        threading.Event().wait()


class _TestedThread(RendezvousThread):
    """A rendezvous with a clock that a test advances."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        super().__init__(lambda: self.now_s)

    def check_liveness(self) -> None:
        """Makes the rendezvous check which workers are silent."""
        self.call(self.rendezvous.check_liveness, self.now_s)


@pytest.fixture
def thread() -> Iterator[_TestedThread]:
    thread = _TestedThread()
    yield thread
    thread.close()


@pytest.fixture
def worker(thread: _TestedThread, tmp_path: Path) -> Iterator[Any]:
    process = make_context().Process(target=_run_worker, args=(thread.remote, tmp_path / "run"), daemon=True)
    process.start()
    wait_until(lambda: thread.member("a") is not None, "no heartbeat")
    yield process
    process.kill()


@pytest.mark.parametrize("error", [OSError("no route"), ValueError("a message that nobody expects"), MemoryError()])
def test_heartbeats_continue_after_any_error(
    thread: _TestedThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    errors = [error, error]

    @dataclass(frozen=True)
    class Failing(RemoteRendezvous):
        def address_and_secret(self) -> tuple[tuple[str, int], str]:
            if errors:
                raise errors.pop()
            return super().address_and_secret()

    use_without_ray(monkeypatch, "b")
    remote: Any = Failing(thread.remote.address, thread.remote.secret, thread.remote.calls)
    rendezvous_client = client.RendezvousClient(remote, 4, torch.device("cpu"), "gloo", RunPaths(tmp_path), 1)
    wait_until(lambda: thread.member("b") is not None, "no heartbeat")
    rendezvous_client.close()
    assert errors == []


def _freeze(worker: Any) -> None:
    os.kill(worker.pid, signal.SIGSTOP)
    wait_until(
        lambda: Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T",
        "the process was not stopped",
    )


@pytest.mark.rest
def test_a_worker_removed_while_frozen_exits_when_it_wakes(thread: _TestedThread, worker: Any) -> None:
    _freeze(worker)
    thread.now_s += SILENCE_S + 1
    thread.check_liveness()
    assert thread.lost() == ["a"], "a silent worker is declared lost"
    thread.call(thread.rendezvous.remove, {"a"})
    os.kill(worker.pid, signal.SIGCONT)
    worker.join(60)
    assert worker.exitcode == 1, "the removed worker continues"


@pytest.mark.rest
def test_flags_are_pushed_at_once_between_rare_heartbeats(thread: _TestedThread, worker: Any) -> None:
    """A heartbeat is due every 1,000 s; a flag reaches the worker before, and it exits since it is told to."""
    thread.call(thread.rendezvous.set_expected, 1_000_000)
    member = thread.member("a")
    wait_until(lambda: member.period_s == 1000, "the worker's heartbeat interval was not raised")
    heartbeat_s = member.heartbeat_s
    thread.now_s += 500
    thread.check_liveness()
    assert thread.lost() == [], "the worker is lost although its next heartbeat is not due yet"
    member.exit = True
    thread.call(thread.rendezvous.raise_flags, Flags.STOP)
    worker.join(60)
    assert (worker.exitcode, member.heartbeat_s) == (1, heartbeat_s), (
        "the worker got the flag with the reply to a heartbeat, not at once"
    )


def test_a_killed_process_is_declared_lost_at_once(thread: _TestedThread, worker: Any) -> None:
    worker.kill()
    wait_until(lambda: thread.lost() == ["a"], "the rendezvous did not notice the end of the process")
    assert thread.server.connections == {}


def test_a_connection_without_the_secret_is_ignored(thread: _TestedThread) -> None:
    with socket.create_connection(thread.remote.address, timeout=60) as connection:
        connection.sendall(b"s" * 32 + pack_frame(encode(Heartbeat("b", "node", LOCALHOST, 1))))
        with suppress(ConnectionResetError):
            while connection.recv(64):
                continue
    assert thread.member("b") is None


@pytest.mark.parametrize("sent", [b"no JSON", b"[1, 2]", b"{}"])
def test_a_connection_without_heartbeats_is_closed_and_others_stay(
    thread: _TestedThread, worker: Any, sent: bytes
) -> None:
    with connect(thread.remote.address, thread.remote.secret, 60) as connection:
        connection.sendall(pack_frame(sent))
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert thread.call(thread.rendezvous.status).live == {"a"}
    assert set(thread.server.connections) == {"a"}
    assert worker.is_alive()
