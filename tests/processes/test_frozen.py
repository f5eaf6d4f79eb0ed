"""A worker that was frozen and given up is told to end when it wakes: the real heartbeats and rendezvous, a real SIGSTOP, no Ray."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ray_app.cluster import membership
from ray_app.cluster.rendezvous import Rendezvous
from ray_app.record.paths import RunPaths
from tests.support.waiting import until

SILENCE_S, HERE = 5.0, "127.0.0.1"


class _Remote:
    """An actor's handle whose calls go through a pipe and are answered at once."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            with self._lock:
                self._pipe.send((name, arguments))
                return self._pipe.recv()

        return SimpleNamespace(remote=remote)


def _live(pipe: Connection, root: Path) -> None:
    """A worker's process: it gives signs of life until it is told to end."""
    context = SimpleNamespace(get_actor_id=lambda: "a", get_node_id=lambda: "node")
    util = SimpleNamespace(get_node_ip_address=lambda: HERE)
    membership.ray = SimpleNamespace(get=lambda found: found, get_runtime_context=lambda: context, util=util)  # type: ignore[attr-defined]
    made = membership.RayMembership(_Remote(pipe), 4, torch.device("cpu"), "gloo", RunPaths(root), 1, True)
    made._closed.wait()


class _Meeting:
    """The rendezvous, with a clock that a test moves, and what listens to the worker."""

    def __init__(self, pipe: Connection, line: socket.socket) -> None:
        self.now_s, self.beats = 1000.0, 0
        self.rendezvous = Rendezvous(SILENCE_S, None, lambda: self.now_s)
        self._answers: dict[str, Callable[..., Any]] = {"beat": self._beat, "lifeline": line.getsockname}
        threading.Thread(target=self._serve, args=(pipe,), daemon=True).start()

    def _beat(self, beat: Any) -> Any:
        self.beats += 1
        return self.rendezvous.answer(beat)

    def _serve(self, pipe: Connection) -> None:
        try:
            while True:
                name, arguments = pipe.recv()
                pipe.send(self._answers[name](*arguments))
        except (EOFError, OSError):
            return


@pytest.fixture
def line() -> Iterator[socket.socket]:
    with socket.create_server((HERE, 0)) as made:
        yield made


def test_who_was_given_up_while_it_was_frozen_ends_when_it_wakes(line: socket.socket, tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    worker = context.Process(target=_live, args=(theirs, tmp_path / "run"), daemon=True)
    worker.start()
    theirs.close()
    meeting = _Meeting(ours, line)
    try:
        until(lambda: meeting.beats > 1, "no sign of life")
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        until(lambda: Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "it was not stopped")
        meeting.now_s += SILENCE_S + 1
        meeting.rendezvous.look(meeting.now_s)
        assert set(meeting.rendezvous._lost) == {"a"}, "it is silent"
        _run(meeting.rendezvous.dismiss({"a"}))
        os.kill(worker.pid, signal.SIGCONT)
        worker.join(60)
        assert worker.exitcode == 1, "it goes on"
    finally:
        worker.kill()


def _run(coroutine: Any) -> None:
    """Lets something that waits for nothing happen."""
    with pytest.raises(StopIteration):
        coroutine.send(None)
