"""A head node as an administrator starts it, with dashboard and token authentication, and the requests of its users."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

RAY = Path(sys.executable).parent / "ray"
_START_S = 240


@dataclass(frozen=True)
class Head:
    """A head node: the address of its jobs and the environment of its users."""

    url: str
    environment: dict[str, str]
    token: str
    log: Path

    def ask(self, path: str, token: str | None = None, body: Any = None) -> Any:
        """Sends a request to the REST API as any HTTP client would."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token or self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(
            f"{self.url}{path}", data=data, headers=headers, method="POST" if data else "GET"
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def put(self, path: str, data: bytes) -> None:
        request = urllib.request.Request(
            f"{self.url}{path}", data=data, headers={"Authorization": f"Bearer {self.token}"}, method="PUT"
        )
        urllib.request.urlopen(request, timeout=60).close()

    def job(self, job_id: str) -> dict[str, Any]:
        return self.ask(f"/api/jobs/{job_id}")

    def live_resources_of(self, job_id: str) -> list[str]:
        """Returns the actors and placement groups of a job that still exist."""
        ray_id = self.job(job_id)["job_id"]
        actors = self.ask("/api/v0/actors?limit=1000")["data"]["result"]["result"]
        groups = self.ask("/api/v0/placement_groups?limit=1000&detail=1")["data"]["result"]["result"]
        actor_names = [
            actor["class_name"] for actor in actors if actor["job_id"] == ray_id and actor["state"] != "DEAD"
        ]
        return actor_names + [
            group["placement_group_id"]
            for group in groups
            if group["creator_job_id"] == ray_id and group["state"] != "REMOVED"
        ]

    @contextmanager
    def open_proxy(self) -> Iterator[Proxy]:
        """Opens a proxy of the dashboard with connections that a test can cut."""
        parts = urlsplit(self.url)
        assert parts.port is not None
        proxy = Proxy((str(parts.hostname), parts.port))
        try:
            yield proxy
        finally:
            proxy.close()


class Proxy:
    """Forwards connections to an address until they are cut; later connections are forwarded again."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                near = self._server.accept()[0]
                far = socket.create_connection(self._target)
                self._open += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """Closes all connections without a message of the protocol above TCP."""
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for open_socket in sockets:
            open_socket.bind(("127.0.0.1", 0))
        return [int(open_socket.getsockname()[1]) for open_socket in sockets]


@contextmanager
def start_head(folder: Path, cpus: int, python: Path = Path(sys.executable)) -> Iterator[Head]:
    """Starts a head node; its nodes run the given Python."""
    token = secrets.token_hex(32)
    (folder / "token").write_text(token)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
    dashboard, client, *others = free_ports(6)
    # Ray replaces 127.0.0.1 by the machine's outer address, but no other address of the loopback.
    node = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
    # The folder has Unix sockets, so its path must be short.
    temporary = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    command = [
        str(python),
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        "--port=0",
        f"--node-ip-address={node}",
    ]
    command += [f"--num-cpus={cpus}"]
    command += ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    command += [f"--ray-client-server-port={client}", *_options(others)]
    command += ["--object-store-memory=200000000", "--disable-usage-stats", f"--temp-dir={temporary}"]
    try:
        with _started(command, environment, folder / "head.log"):
            yield Head(f"http://127.0.0.1:{dashboard}", environment, token, folder / "head.log")
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _options(ports: list[int]) -> list[str]:
    names = ("dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent", "metrics-export")
    return [f"--{name}-port={port}" for name, port in zip(names, ports, strict=True)]


@contextmanager
def _started(command: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_for_start(process, log)
        yield
    finally:
        # `ray stop` would end every Ray cluster of the machine.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for_start(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while "Ray runtime started" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
