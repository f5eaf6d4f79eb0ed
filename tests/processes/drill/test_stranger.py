"""The stranger of the drill does harm where a server lets it, and its scenario fails if it did."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ray_app.drill import stranger as module
from ray_app.drill.stranger import stranger
from tests.support.drill_scenarios import evidence_of_dead_process, make_result, scenario_context
from tests.support.users import ROOT_ONLY

ATTACKED = {"connections": 200, "executed": False, "writable": [], "new_threads": 0, "new_bytes": 0}


def attack(tmp_path: Path, *ports: int, seconds: float = 2.0, folder: Path | None = None) -> dict[str, Any]:
    plan = {"seconds": seconds, "marker": str(tmp_path / "executed"), "folders": [str(folder)] if folder else []}
    plan["addresses"] = [("127.0.0.1", port) for port in ports]
    command = [sys.executable, "-m", module.__name__, json.dumps(plan)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def unpickle_frames(server: socket.socket) -> None:
    """Serves as a careless worker would: each connection sends a length of four bytes and a pickle."""
    while True:
        try:
            connection = server.accept()[0]
        except OSError:
            return
        with connection:
            connection.settimeout(0.2)
            try:
                length = int.from_bytes(connection.recv(4), "big")
                pickle.loads(connection.recv(min(length, 10_000)))
            except Exception as error:
                print("not executed:", type(error).__name__)


@pytest.mark.rest
def test_the_stranger_executes_code_in_a_server_that_unpickles(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=unpickle_frames, args=(server,), daemon=True).start()
        counts = attack(tmp_path, server.getsockname()[1], seconds=20.0)
        server.shutdown(socket.SHUT_RDWR)
    assert (tmp_path / "executed").exists()
    assert counts["bytes"] > 0


@pytest.mark.rest
def test_the_stranger_replaces_the_values_of_an_open_store(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    store.set("generation-1/0", "an address")
    counts = attack(tmp_path, store.port)
    assert store.get("generation-1/0") != b"an address"
    assert counts["keys"] > 0
    assert counts["uid"] == (module._UNPRIVILEGED if os.getuid() == 0 else os.getuid())


@pytest.mark.rest
@ROOT_ONLY
def test_the_stranger_finds_what_other_users_may_write_to(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for file, mode in (("closed", 0o644), ("open", 0o666)):
            (folder / file).touch()
            (folder / file).chmod(mode)
        assert attack(tmp_path, seconds=0.0, folder=folder)["writable"] == [f"{folder}/open"]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, None),
        ({"connections": 3}, "reached too few ports"),
        ({"executed": True}, "executed the stranger's code"),
        ({"writable": ["/runs/a/config.yaml"]}, "can write to ['/runs/a/config.yaml']"),
        ({"new_threads": 200}, "hold threads"),
        ({"new_bytes": 2**30}, "hold memory"),
        ({"error": "no such host"}, "no such host"),
    ],
)
def test_a_scenario_in_which_the_stranger_did_harm_has_failed(
    tmp_path: Path, fields: dict[str, Any], problem: str | None
) -> None:
    scenario = stranger(scenario_context(tmp_path))
    assert not isinstance(scenario, str)
    evidence = {"killed-0": evidence_of_dead_process(), "stranger-0": ATTACKED | fields}
    problems = scenario.confirm(make_result(tmp_path / "run", evidence, []))
    assert len(problems) == (problem is not None)
    assert problem is None or problem in problems[0]
    assert stranger(scenario_context(tmp_path / "one", workers=1)) == "a single worker has no port to attack"
    servers = stranger(scenario_context(tmp_path / "one", workers=1, train__strategy="parameter_server"))
    assert not isinstance(servers, str)
    assert servers.expected == ["listening", "stranger-0"]
