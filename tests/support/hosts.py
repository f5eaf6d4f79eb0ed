"""Several hosts on one machine: network namespaces on a bridge, each with its own raylet and a link that can be cut."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest

from ray_app.process import temporary_folder

_RAY = str(Path(sys.executable).parent / "ray")
_NET = "10.213.77"
_PORT = 26379
_UP_S = 60.0


def unsupported_reason() -> str | None:
    """Returns why network namespaces cannot be created here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    done = subprocess.run(["ip", "netns", "add", "rayapp-probe"], check=False, capture_output=True, text=True)
    if done.returncode:
        return f"network namespaces are not allowed here: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", "rayapp-probe"], check=True)
    return None


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def skip_unless_supported() -> None:
    """Skips the test, with the reason, where network namespaces cannot be made."""
    if (reason := unsupported_reason()) is not None:
        print(reason)
        pytest.skip(reason)


class Namespaces:
    """Hosts on one bridge, with the addresses 10.213.77.11, 10.213.77.12 ...

    Args:
        count: Number of hosts.
    """

    def __init__(self, count: int) -> None:
        self._names = [f"rayapp-h{i}" for i in range(1, count + 1)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self._clean()
        _run("ip", "link", "add", "rayapp-br", "type", "bridge")
        _run("ip", "addr", "add", f"{_NET}.1/24", "dev", "rayapp-br")
        _run("ip", "link", "set", "rayapp-br", "up")
        for i, name in enumerate(self._names, 1):
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", f"rayapp-v{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "link", "set", f"rayapp-v{i}", "master", "rayapp-br", "up")
            _run("ip", "-n", name, "addr", "add", f"{_NET}.{10 + i}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def popen(
        self, host: int, command: list[str], environment: dict[str, str], output: IO[str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a command on a host, counted from 1, with a folder for Ray of its own; `close` ends it."""
        # Two raylets that start at the same time in one folder take the same names of sockets.
        folder = temporary_folder() / "ray"
        folder.mkdir(exist_ok=True)
        mount = f'mount -t tmpfs none {folder} && exec "$@"'
        command = ["ip", "netns", "exec", self._names[host - 1], "sh", "-c", mount, "sh", *command]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        self._processes.append(process)
        return process

    def address_of(self, host: int) -> str:
        """Returns the address of a host."""
        return f"{_NET}.{10 + host}"

    def process_count(self, host: int) -> int:
        """Returns the number of processes on a host."""
        return len(_run("ip", "netns", "pids", self._names[host - 1]).split())

    def close(self) -> None:
        """Ends the processes of this cluster, and removes the network."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        self._clean()

    def _clean(self) -> None:
        for name in self._names:
            pids = subprocess.run(
                ["ip", "netns", "pids", name], check=False, capture_output=True, text=True
            ).stdout.split()
            for pid in pids:
                subprocess.run(["kill", "-9", pid], check=False)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", "rayapp-br"], check=False, capture_output=True)


class Hosts(Namespaces):
    """A head node without CPUs in the namespace of the test, and hosts with CPUs.

    Args:
        cpus: Logical CPUs of each host.
    """

    def __init__(self, cpus: list[int]) -> None:
        super().__init__(len(cpus))
        self.address = f"{_NET}.1:{_PORT}"
        self._environment = {
            **os.environ,
            "RAY_AUTH_MODE": "disabled",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "2000",
            "RAY_health_check_failure_threshold": "3",
        }
        head = ["--head", f"--port={_PORT}", f"--node-ip-address={_NET}.1", "--num-cpus=0", "--include-dashboard=false"]
        self._start([], head)
        for i, (name, count) in enumerate(zip(self._names, cpus, strict=True), 1):
            host = [f"--address={self.address}", f"--node-ip-address={_NET}.{10 + i}", f"--num-cpus={count}"]
            self._start(["ip", "netns", "exec", name], host)

    def _start(self, prefix: list[str], options: list[str]) -> None:
        command = [
            *prefix,
            _RAY,
            "start",
            "--block",
            "--object-store-memory=200000000",
            "--disable-usage-stats",
            *options,
        ]
        self._processes.append(
            subprocess.Popen(command, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        )
        deadline_s = time.monotonic() + _UP_S
        while self._alive() < len(self._processes):
            assert time.monotonic() < deadline_s, f"{command} does not come up"
            time.sleep(0.5)

    def _alive(self) -> int:
        """Returns the number of nodes that the head reports as alive; 0 until the head answers."""
        script = (
            "import ray; ray.init(address='%s', log_to_driver=False, logging_level='ERROR'); print(sum(n['Alive'] for n"
            " in ray.nodes()))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script % self.address],
            check=False,
            env=self._environment,
            capture_output=True,
            text=True,
        )
        return int(done.stdout.strip() or 0)

    def environment(self) -> dict[str, str]:
        """Returns the environment of a driver on this cluster."""
        return {**self._environment, "RAY_ADDRESS": self.address}

    def disconnect(self, host: int) -> None:
        """Takes a host's link down."""
        _run("ip", "link", "set", f"rayapp-v{host}", "down")

    def reconnect(self, host: int) -> None:
        """Brings a host's link up again."""
        _run("ip", "link", "set", f"rayapp-v{host}", "up")

    def is_reachable(self, host: int) -> bool:
        """Returns whether the host reaches the head."""
        command = [
            "ip",
            "netns",
            "exec",
            self._names[host - 1],
            sys.executable,
            "-c",
            f"import socket; socket.create_connection(('{_NET}.1', {_PORT}), 2)",
        ]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
