"""The sandbox of `check_task`: processes in which a task may change generators and globals without side effects.

`ray_app/preflight/sandbox_server.py` is the other side: the server that forks them, and the files of a call.
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

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
"""The folder that contains the package `ray_app`."""
# The module is not imported here, because it imports torchmetrics, which a start does without.
_SERVER = "ray_app.preflight.sandbox_server"
_OUTPUT_LINES = 15
"""Maximum number of lines of output in a result."""


@dataclass(frozen=True)
class CallResult:
    """The result of a call in the sandbox.

    Args:
        value: The value that the function returned; None if there is an error.
        error: The error that it raised, or one that says how its process ended; None if it returned.
        output: The last lines of its output, or of the server's if the process has not started.
        seconds: Duration of the call; 0 if its process did not end by itself.
    """

    value: Any
    error: RayAppError | None
    output: str
    seconds: float


Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function with its arguments."""


class Sandbox:
    """Runs functions in separate processes, which are forked from one server that has imported torch.

    Args:
        folder: Folder for the files of the calls; it is created.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_calls = 0
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "path").write_bytes(pickle.dumps([str(_PACKAGE_ROOT), *sys.path]))
        self._server_log = folder / "serve.out"
        self._server = self._start_server()

    def _start_server(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        }
        # All processes are on this machine. By default gloo resolves its hostname, which fails on some machines.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with self._server_log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", _SERVER, str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                # `close` kills the process group that this makes: the server and all processes that it has forked.
                start_new_session=True,
            )

    def run(self, calls: list[Call], limit_s: float) -> list[CallResult]:
        """Runs all calls concurrently and returns their results.

        Args:
            calls: Functions with their arguments. They are pickled by cloudpickle, so classes of a notebook work.
            limit_s: Seconds after which all processes are killed, also the server, so that nothing can be run any more.
        """
        # Calls that did not end in time were killed with their server.
        if self._server.poll() is not None:
            self.close()
            self._server = self._start_server()
        numbers = range(self._num_calls, self._num_calls + len(calls))
        self._num_calls += len(calls)
        for number, call in zip(numbers, calls, strict=True):
            self._path(number, "call").write_bytes(cloudpickle.dumps(call))
        statuses = self._wait_for(numbers, limit_s)
        return [self._collect(number, status, limit_s) for number, status in zip(numbers, statuses, strict=True)]

    def _wait_for(self, numbers: range, limit_s: float) -> list[int | None]:
        """Sends the numbers of calls to the server, and returns the exit status of each process.

        The server answers with one line after all processes have ended. If that takes longer than `limit_s`, each
        status is None. If the server ends without an answer, each is that of a process that was killed.
        """
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
        # A server that ends while it answers leaves an incomplete line.
        return [int(word) for word in answer.split()] if answer.endswith(b"\n") else [-signal.SIGKILL] * len(numbers)

    def _collect(self, number: int, status: int | None, limit_s: float) -> CallResult:
        """Returns the result of a call from its files, or an error if its process wrote none."""
        out, result = self._path(number, "out"), self._path(number, "result")
        log = out if out.exists() else self._server_log
        output = "\n".join(log.read_text(errors="replace").splitlines()[-_OUTPUT_LINES:])
        if result.exists():
            value, error, seconds = pickle.loads(result.read_bytes())
            return CallResult(value, error, output, seconds)
        ending = f"did not end within {limit_s:g} s" if status is None else f"ended by {_describe_status(status)}"
        return CallResult(None, TaskError(f"Its process {ending}", output), output, 0.0)

    def _path(self, number: int, kind: str) -> Path:
        """Returns the path of a file of a call: `call`, `result` or `out`."""
        return self._folder / f"{number}.{kind}"

    def close(self) -> None:
        """Kills the server and the processes that it has forked; may be called more than once."""
        if self._server.poll() is None:
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        for pipe in (self._server.stdin, self._server.stdout):
            if pipe is not None:
                pipe.close()


def _describe_status(status: int) -> str:
    """Returns the exit status of a process, or the signal that ended it if the status is negative, as text."""
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
