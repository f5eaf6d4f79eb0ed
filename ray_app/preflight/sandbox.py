"""The sandbox of `check_task`: processes in which a task may change generators and globals without side effects.

This module, as a script, is the server that forks them. It reads lines with the numbers of calls to run concurrently,
and answers each line with a line of exit statuses. The function and the arguments of a call are in `<number>.call`; its
process writes the result to `<number>.result` and its output to `<number>.out`.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from select import select
from time import monotonic
from typing import Any

import numpy as np
from ray import cloudpickle

from ray_app.errors import RayAppError, TaskError
from ray_app.task.user_code import describe_error, format_calls

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
"""The folder that contains the package `ray_app`."""
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
                [sys.executable, "-m", "ray_app.preflight.sandbox", str(self._folder)],
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
        ending = f"did not end within {limit_s:g} s"
        if status is not None:
            ending = f"ended by {f'signal {signal.Signals(-status).name}' if status < 0 else f'exit status {status}'}"
        return CallResult(None, TaskError(f"The process of the check {ending}", output), output, 0.0)

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


_TRUNCATE_INTERVAL_S, MAX_OUTPUT_BYTES = 0.1, 1 << 20


def run_call(path: Path) -> None:
    """Runs one call and writes its result to the file beside it.

    An error that is not a `RayAppError` is stored as text, because its class may not be picklable.
    """
    output = os.open(path.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    threading.Thread(target=_truncate_output, daemon=True).start()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Workers of a run have generators in different states, too.
    random.seed()
    np.random.seed()
    value: Any = None
    start_s = time.monotonic()
    error: RayAppError | None = None
    try:
        function, arguments = pickle.loads(path.read_bytes())
        value = function(*arguments)
    except RayAppError as app_error:
        error = app_error
    except BaseException as other:
        error = TaskError(describe_error(other), format_calls(other))
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(pickle.dumps((value, error, time.monotonic() - start_s)))
    temporary.rename(path.with_suffix(".result"))


def _truncate_output() -> None:
    """Truncates long output now and then: only its end is shown, and it must not fill the disk."""
    while True:
        time.sleep(_TRUNCATE_INTERVAL_S)
        if os.fstat(1).st_size > MAX_OUTPUT_BYTES:
            os.ftruncate(1, 0)


def main() -> None:
    """Runs calls until standard input ends, as the server of a `Sandbox`."""
    # They are imported once for all calls. A process that only starts a server does without them.
    import torchmetrics  # noqa: F401

    from ray_app.train import loop  # noqa: F401

    folder = Path(sys.argv[1])
    sys.path[:] = pickle.loads((folder / "path").read_bytes())
    for line in sys.stdin:
        children = []
        for number in line.split():
            child = os.fork()
            if not child:
                try:
                    run_call(folder / f"{number}.call")
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(0)
            children.append(child)
        print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children), flush=True)


if __name__ == "__main__":
    main()
