"""The sandbox of `check_task`: processes in which a task may change generators and globals without side effects."""

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
    """The result of a call in the sandbox.

    Args:
        value: The value that the function returned.
        error: The error that it raised, or a description of how its process ended.
        output: The last lines of its output.
    """

    value: Any
    error: RayAppError | None
    output: str


class Sandbox:
    """Runs functions in separate processes, forked from one server that has imported torch.

    Args:
        folder: Folder for the files of the calls.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_calls = 0
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
        """Runs all calls concurrently and returns their results.

        Args:
            calls: Functions with their arguments. They are pickled by cloudpickle, so classes of a notebook work.
            limit_s: Seconds after which all processes are killed, also the server.
        """
        numbers = range(self._num_calls, self._num_calls + len(calls))
        self._num_calls += len(calls)
        for number, call in zip(numbers, calls, strict=True):
            self._file(number, "call").write_bytes(cloudpickle.dumps(call))
        statuses = self._wait_for(numbers, limit_s)
        return [self._collect(number, status, limit_s) for number, status in zip(numbers, statuses, strict=True)]

    def _wait_for(self, numbers: range, limit_s: float) -> list[int | None]:
        """Returns the exit status of each process, or None for each if they did not end in time."""
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

    def _collect(self, number: int, status: int | None, limit_s: float) -> CallResult:
        """Returns the result of a call from its files, or an error if its process wrote none."""
        out, result = self._file(number, "out"), self._file(number, "result")
        output = "\n".join(
            (out if out.exists() else self._log).read_text(errors="replace").splitlines()[-_OUTPUT_LINES:]
        )
        if result.exists():
            value, error = pickle.loads(result.read_bytes())
            return CallResult(value, error, output)
        how = f"did not end within {limit_s:g} s" if status is None else f"ended by {_describe_status(status)}"
        return CallResult(None, TaskError(f"Its process {how}", output), output)

    def _file(self, number: int, kind: str) -> Path:
        return self._folder / f"{number}.{kind}"

    def close(self) -> None:
        """Kills the server and all of its processes."""
        if self._server.poll() is None:
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        for pipe in (self._server.stdin, self._server.stdout):
            if pipe is not None:
                pipe.close()


def _describe_status(status: int) -> str:
    """Returns an exit status, or the signal that ended a process, as text."""
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
