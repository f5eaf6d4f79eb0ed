"""Processes for a trial: what a task does to a process, its generators and its globals, it does not do to the one that
asked.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from select import select
from time import monotonic
from typing import Any

from ray import cloudpickle

from ray_app.errors import RayAppError, TaskError
from ray_app.preflight import sandbox_server

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_OUTPUT_LINES = 15


@dataclass(frozen=True)
class CallResult:
    """What became of a call.

    Args:
        value: What it returned.
        error: What it raised, or how its process ended.
        said: The end of what it printed.
    """

    value: Any
    error: RayAppError | None
    said: str


class Sandbox:
    """Runs functions in processes of their own. Torch is imported once for all of them.

    Args:
        folder: For their files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._made = folder, 0
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "path").write_bytes(pickle.dumps([str(_PACKAGE_ROOT), *sys.path]))
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        }
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._log = folder / "serve.out"
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                [sys.executable, "-m", sandbox_server.__name__, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def run(self, calls: list[tuple[Callable[..., Any], tuple[Any, ...]]], limit_s: float) -> list[CallResult]:
        """Runs all of them at the same time.

        Args:
            calls: Functions with their arguments, which any process can import, or a class of a notebook's that goes
                along.
            limit_s: Seconds after which those that go on are ended, and all processes with them.
        """
        numbers = range(self._made, self._made + len(calls))
        self._made += len(calls)
        for number, call in zip(numbers, calls, strict=True):
            self._file(number, "call").write_bytes(cloudpickle.dumps(call))
        statuses = self._statuses(numbers, limit_s)
        return [self._ended(number, status, limit_s) for number, status in zip(numbers, statuses, strict=True)]

    def _statuses(self, numbers: range, limit_s: float) -> list[int | None]:
        """How each process ended, by its exit status; None: it has not."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        deadline_s, answer = monotonic() + limit_s, b""
        try:
            self._server.stdin.write(f"{' '.join(map(str, numbers))}\n".encode())
            self._server.stdin.flush()
            while not answer.endswith(b"\n"):
                if not select([self._server.stdout], [], [], max(0.0, deadline_s - monotonic()))[0]:
                    self.close()
                    return [None] * len(numbers)
                part = os.read(self._server.stdout.fileno(), 4096)
                if not part:
                    break
                answer += part
        except BrokenPipeError:
            pass
        return [int(word) for word in answer.split()] or [-signal.SIGKILL] * len(numbers)

    def _ended(self, number: int, status: int | None, limit_s: float) -> CallResult:
        out, result = self._file(number, "out"), self._file(number, "result")
        said = "\n".join((out if out.exists() else self._log).read_text(errors="replace").splitlines()[-_OUTPUT_LINES:])
        if result.exists():
            value, error = pickle.loads(result.read_bytes())
            return CallResult(value, error, said)
        how = f"did not end within {limit_s:g} s" if status is None else f"ended by {_describe_status(status)}"
        return CallResult(None, TaskError(f"Its process {how}", said), said)

    def _file(self, number: int, kind: str) -> Path:
        return self._folder / f"{number}.{kind}"

    def close(self) -> None:
        """Ends all processes."""
        if self._server.poll() is None:
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        for pipe in (self._server.stdin, self._server.stdout):
            if pipe is not None:
                pipe.close()


def _describe_status(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
