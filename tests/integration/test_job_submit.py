"""`ray job submit` to a real head node with token authentication, as a user of a cluster does it."""

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
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RAY = Path(sys.executable).parent / "ray"
_START_S, _JOB_S = 90, 240


@dataclass(frozen=True)
class Head:
    """A head node: the address of its jobs and the environment of its users."""

    url: str
    environment: dict[str, str]
    token: str

    def jobs(self, token: str) -> list[dict[str, Any]]:
        request = urllib.request.Request(f"{self.url}/api/jobs/", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for made in sockets:
            made.bind(("127.0.0.1", 0))
        return [int(made.getsockname()[1]) for made in sockets]


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    token = secrets.token_hex(32)
    (tmp_path / "token").write_text(token)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    environment["PATH"] = f"{RAY.parent}{os.pathsep}{environment['PATH']}"
    dashboard, *others = free_ports(6)
    names = ("dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent", "metrics-export", "ray-client-server")
    ports = [f"--{name}-port={port}" for name, port in zip(names, others, strict=True)]
    # Ray replaces 127.0.0.1 by the machine's outer address, but no other address of the loopback.
    node = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # sockets lie there, so its path must be short
    command = [str(RAY), "start", "--head", "--block", "--port=0", f"--node-ip-address={node}", "--num-cpus=6"]
    command += ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", *ports]
    command += ["--object-store-memory=200000000", "--disable-usage-stats", f"--temp-dir={folder}"]
    log = tmp_path / "head.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for_start(process, log)
        yield Head(f"http://127.0.0.1:{dashboard}", environment, token)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # `ray stop` would end every Ray of the machine
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_start(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while "Ray runtime started" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def test_a_submitted_job_trains(head: Head, digits: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    for name in ("ray_app", "jobs", "conf"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [str(RAY), "job", "submit", "--address", head.url, "--working-dir", str(project), "--", "python", "jobs/train.py"]
    command += ["--config", "conf/digits.yaml", f"--data.path={digits / 'train'}", f"--data.eval_path={digits / 'eval'}"]
    command += [f"--run.storage_path={tmp_path / 'runs'}", "--run.name=job", "--train.epochs=4", "--checkpoint.every_epochs=2"]
    done = subprocess.run(command, env=head.environment, capture_output=True, text=True, timeout=_JOB_S, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    [job] = head.jobs(head.token)
    assert (job["status"], job["driver_exit_code"]) == ("SUCCEEDED", 0)
    assert f"Starting run job in {tmp_path / 'runs' / 'job'}\n" in done.stdout
    progress = [line for line in done.stdout.splitlines() if line.startswith("epoch ")]
    assert progress
    assert all("2 of 2 workers" in line and "\x1b" not in line and "\r" not in line for line in progress)

    summary = json.loads((tmp_path / "runs" / "job" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["steps"] == 4 * 23
    assert summary["world_sizes"] == [[0, 2]]
    assert summary["mlflow_run_id"]
    assert summary["params_digest"] in done.stdout
    with pytest.raises(urllib.error.HTTPError, match=r"40[13]"):
        head.jobs("another token")
