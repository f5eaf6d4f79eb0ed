"""The scenario `stranger`: a process without any secret attacks every port of the workers and of the rendezvous.

It is what another user of a machine, or another host of the network, can do: hold connections, send garbage, endless
frames, pickles and what it received, write into the stores at which process groups meet, and into files. Started by
root, the process becomes an unprivileged user. Meanwhile a worker is killed, so that a generation forms, too; not with
parameter servers, where none forms.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import cycle, islice, takewhile
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ray_app.drill.faults import MAX_WAIT_S, Evidence, Kill, address_of_actor
from ray_app.drill.scenario import Scenario, ScenarioContext, ScenarioResult, unmet
from ray_app.driver.run import Faults
from ray_app.process import temporary_folder
from ray_app.train.job import Hooks, Job
from ray_app.train.strategies.parameter_server.actors import server_names

_ATTACK_S = 10.0
_CONNECT_S = 1.0
_SILENT = 40
"""Connections to each port that are held open until the end."""
_MAX_NAMED = 5
_MAX_NEW_THREADS = 100
_MAX_NEW_BYTES = 512 * 2**20
_UNPRIVILEGED = 65534
"""The user and the group that Linux gives to files without an owner; no account has rights by them."""


@dataclass
class BesetByStranger:
    """Lets a stranger attack the ports of each rank for some seconds, from a step on; a `Hooks.after_step`.

    Args:
        run: Directory of the run, if it is on a disk. No file in it may be writable for the stranger.
        first: Step at which the attack begins.
        last: Step after which each rank waits for the end of the attack, and writes the evidence `stranger-RANK`.
    """

    evidence: Evidence
    run: str | None
    first: int
    last: int
    _process: subprocess.Popen[bytes] | None = None
    _folder: str = ""
    _before: dict[str, int] = field(default_factory=dict)

    def __call__(self, rank: int, step: int) -> None:
        """See `Hooks.after_step`."""
        if step == self.first and self._process is None:
            self._begin(rank)
        if step >= self.last and self._process is not None:
            output, errors = self._process.communicate(timeout=MAX_WAIT_S)
            facts = {"error": errors.decode()[-2000:]} if self._process.returncode else json.loads(output)
            grown = {f"new_{name}": value - self._before[name] for name, value in _size_of_process().items()}
            executed = bool(list(Path(self._folder).iterdir()))
            self.evidence.put(f"stranger-{rank}", rank=rank, step=self.first, executed=executed, **grown, **facts)
            self._process = None

    def _begin(self, rank: int) -> None:
        self.evidence.wait(["listening"], MAX_WAIT_S)
        addresses = {
            (str(entry.laddr.ip), int(entry.laddr.port))
            for entry in psutil.Process().net_connections("tcp")
            if entry.status == psutil.CONN_LISTEN
        } | {(host, port) for host, port in (self.evidence.get("listening") or {})["addresses"]}
        self._before, self._folder = _size_of_process(), tempfile.mkdtemp()
        folders = [folder for folder in (self.run, str(temporary_folder())) if folder is not None]
        plan = {"seconds": _ATTACK_S, "marker": f"{self._folder}/executed", "folders": folders}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(plan | {"addresses": sorted(addresses)})],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )


def _size_of_process() -> dict[str, int]:
    process = psutil.Process()
    return {"threads": process.num_threads(), "bytes": process.memory_info().rss}


def stranger(context: ScenarioContext) -> Scenario | str:
    """A process without secrets attacks all ports of the run; a worker that others can go on without is killed."""
    has_servers = context.config.train.strategy_traits.has_servers
    if context.workers < 2 and not has_servers:
        return "a single worker has no port to attack"
    first, last = context.choose_step(), context.total_steps - max(3, context.total_steps // 10)
    run = str(context.paths.root) if isinstance(context.paths.root, Path) else None
    attack = BesetByStranger(context.evidence, run, first, last)
    kills = [] if has_servers else [Kill(context.evidence, ["killed-0"], first + 2, [context.workers - 1])]
    names = [f"stranger-{rank}" for rank in range(1 if has_servers else context.workers - 1)]

    def observe(job: Job) -> None:
        if not context.evidence.has("listening"):
            servers = server_names(job.paths, job.fence, job.config.train.servers) if has_servers else []
            addresses = [address_of_actor(name) for name in (job.rendezvous, *servers)]
            context.evidence.put("listening", addresses=addresses)

    def confirm(run: ScenarioResult) -> list[str]:
        attacks = [run.evidence[name] for name in names]
        if errors := [entry["error"] for entry in attacks if "error" in entry]:
            return errors
        return unmet(
            (all(entry["connections"] > _SILENT for entry in attacks), "the stranger reached too few ports"),
            (not any(entry["executed"] for entry in attacks), "a worker executed the stranger's code"),
            *((not entry["writable"], f"other users can write to {entry['writable']}") for entry in attacks),
            (all(e["new_threads"] < _MAX_NEW_THREADS for e in attacks), "the stranger's connections hold threads"),
            (all(e["new_bytes"] < _MAX_NEW_BYTES for e in attacks), "the stranger's connections hold memory"),
        )

    after_step = context.delayed(first, attack, *kills, min_s=_ATTACK_S / 2)
    expected = ["listening", *(name for kill in kills for name in kill.names), *names]
    return Scenario([first], expected, confirm, Faults(train=Hooks(after_step=after_step)), observe)


# --- the stranger's process


class _Execute:
    """What creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.open, (self._path, os.O_CREAT)


def _attack(seconds: float, marker: str, addresses: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Attacks the addresses in turn until the time is over; returns how often it reached something."""
    pickled, counts = pickle.dumps(_Execute(marker)), {"connections": 0, "bytes": 0, "keys": 0}
    until_s = time.monotonic() + seconds
    with ExitStack() as silent:
        # A port that accepts nothing takes a second for each attempt: it is attacked once in each turn.
        for address in addresses:
            with suppress(OSError):
                for _ in range(_SILENT):
                    silent.enter_context(socket.create_connection(address, _CONNECT_S))
                    counts["connections"] += 1
        for address in takewhile(lambda _: time.monotonic() < until_s, cycle(addresses)):
            counts["keys"] += _write_into_store(address, pickled)
            for message in takewhile(lambda _: time.monotonic() < until_s, _make_messages(pickled)):
                # A closed connection is what a stranger should meet.
                with suppress(OSError), socket.create_connection(address, _CONNECT_S) as connection:
                    counts["connections"] += 1
                    connection.settimeout(0.05)
                    connection.sendall(message)
                    counts["bytes"] += len(message)
                    connection.sendall(connection.recv(4096))
    return counts


def _make_messages(pickled: bytes) -> Iterator[bytes]:
    yield os.urandom(4096)
    yield b"GET / HTTP/1.1\r\n\r\n"
    yield b"\xff" * 64
    for length in (len(pickled), 2**31 - 1, 2**40):
        for size in (4, 8):
            for order in ("big", "little"):
                with suppress(OverflowError):
                    yield length.to_bytes(size, order) + pickled


def _write_into_store(address: tuple[str, int], value: bytes) -> int:
    """Replaces all values of a store of torch; returns how many, 0 if there is no store at the address."""
    try:
        store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S))
        keys = store.list_keys()
        for key in keys:
            store.set(key, value.decode("latin-1"))
    except (RuntimeError, OSError):
        return 0
    return len(keys)


def _find_writable(folders: Sequence[str]) -> list[str]:
    """Returns the first paths of each folder that this process may write to."""
    writable: list[str] = []
    for folder in folders:
        paths = (f"{parent}/{name}" for parent, _, names in os.walk(folder) for name in ("", *names))
        writable += islice((path for path in paths if os.access(path, os.W_OK)), _MAX_NAMED)
    return writable


def _main(plan: dict[str, Any]) -> None:
    if is_root := os.getuid() == 0:
        os.setgroups([])
        os.setgid(_UNPRIVILEGED)
        os.setuid(_UNPRIVILEGED)
    addresses = [(host, port) for host, port in plan["addresses"]]
    counts = _attack(plan["seconds"], plan["marker"], addresses)
    # Without the rights of root this process may write to all files of the user.
    writable = _find_writable(plan["folders"]) if is_root else []
    hosts = sorted({host for host, _ in addresses})
    print(json.dumps({"uid": os.getuid(), "writable": writable, "hosts": hosts, **counts}))


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
