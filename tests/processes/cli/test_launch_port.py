"""The port at which the processes of several machines connect, with strangers at both of its ends."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ray_app.channel import connect
from ray_app.cli import launch
from ray_app.cli.launch import Followers, Group, Machines, follow, lead, ray_node, wait
from ray_app.errors import ConfigError, RayAppError
from ray_app.testing import make_context
from tests.support.waiting import wait_until

TOKEN, WAIT_S = "f" * 64, 60.0
LOCALHOST = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((LOCALHOST, 0)) as server:
        return int(server.getsockname()[1])


def say_ready(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.sendall(b"ready\n" * 20)
        connection.recv(1)


def test_a_machine_does_not_join_a_stranger_that_has_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "ray_node", lambda options: pytest.fail("Ray was started"))
    with socket.create_server((LOCALHOST, 0)) as server:
        threading.Thread(target=say_ready, args=(server,), daemon=True).start()
        machines = Machines(LOCALHOST, server.getsockname()[1] - 1, 1, 2)
        with (
            pytest.raises(ConfigError, match="does not have the token of this machine, so this machine does not join"),
            follow(machines, TOKEN, []),
        ):
            pass


def test_a_machine_with_another_token_is_told_so_and_one_with_the_token_gets_the_values_of_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextmanager
    def start_nothing(options: list[str]) -> Iterator[Any]:
        yield lambda: None

    monkeypatch.setattr(launch, "ray_node", start_nothing)
    port = free_port()
    with closing(Followers((LOCALHOST, port), TOKEN)) as followers:
        machines = Machines(LOCALHOST, port - 1, 1, 2)
        with pytest.raises(ConfigError, match="Set the same token on all machines"), follow(machines, "e" * 64, []):
            pass
        assert followers.ranks() == set()
        followers.send("ready")
        first = Group(machines, send=followers.send)
        assert first.broadcast(75) == 75
        with follow(machines, TOKEN, []) as group:
            assert group.broadcast(None) == 75
            first.broadcast({"loss": [0.1, float("inf")]})
            assert group.broadcast(None) == {"loss": [0.1, float("inf")]}
            wait_until(lambda: followers.ranks() == {1})
            followers.close()
            with pytest.raises(RayAppError, match="has ended; see its output there"):
                group.broadcast(None)


def test_the_message_for_a_taken_port_names_the_process() -> None:
    match = r"cannot listen at port \d+ of 127.0.0.1: process \d+ uses it"
    with socket.create_server((LOCALHOST, 0)) as server, pytest.raises(RayAppError, match=match):
        Followers(server.getsockname(), TOKEN)


def let_one_join_among_strangers(folder: Path) -> None:
    """Runs in a process of its own, with a limit of files that the strangers exceed."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    port = free_port()
    with closing(Followers((LOCALHOST, port), TOKEN)) as followers:
        followers.send("ready")
        (folder / "port").with_suffix(".tmp").write_text(str(port))
        (folder / "port").with_suffix(".tmp").rename(folder / "port")
        # The process needs files of its own meanwhile.
        while not (folder / "end").exists():
            with (folder / "port").open() as file:
                file.read()
            threading.Event().wait(0.05)


@pytest.mark.rest
def test_a_burst_of_strangers_keeps_no_machine_out(tmp_path: Path) -> None:
    process = make_context().Process(target=let_one_join_among_strangers, args=(tmp_path,), daemon=True)
    process.start()
    try:
        while not (tmp_path / "port").exists():
            assert process.is_alive()
            process.join(0.05)
        address = (LOCALHOST, int((tmp_path / "port").read_text()))
        with ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(socket.create_connection(address, timeout=WAIT_S))
            with connect(address, TOKEN, WAIT_S) as connection:
                assert connection.recv(6) == b"ready\n"
        (tmp_path / "end").touch()
        process.join(WAIT_S)
        assert process.exitcode == 0
    finally:
        process.kill()


def test_the_first_machine_names_those_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_FORM_S", 0.1)
    machines = Machines(LOCALHOST, free_port(), 0, 3, ("worker 0 (a:1)", "worker 1 (a:2)", "ps 0 (a:3)"), 0, False)
    with pytest.raises(RayAppError, match=r"worker 1 \(a:2\), ps 0 \(a:3\) did not join"), lead(machines, TOKEN, []):
        pass


def test_warnings_of_ray_are_shown(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A program stands for `ray start`."""
    popen = subprocess.Popen
    code = "print('2026 WARNING token authentication is disabled'); print('started'); import sys; sys.exit(3)"
    monkeypatch.setattr(subprocess, "Popen", lambda command, **kw: popen([sys.executable, "-c", code], **kw))
    with ray_node(["--head"]) as check, pytest.raises(RayAppError, match=r"(?s)ended: .*started"):
        wait(lambda: "its end", check)
    assert caplog.messages == ["ray start: 2026 WARNING token authentication is disabled"]
