"""The process that a trial's processes are forked from: it imports what all need, once, and computes nothing itself.

It reads lines with the numbers of calls that are to run at the same time. Each is a process of its own, whose function
and arguments are in `<number>.call`; what becomes of it is put into `<number>.result`, what it prints into
`<number>.out`. A line of exit statuses is the answer.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torchmetrics  # noqa: F401 - as the loop

from ray_app.errors import RayAppError, TaskError
from ray_app.task.user_code import describe_error, format_calls
from ray_app.train import loop  # noqa: F401 - imported once for all

_TRUNCATE_INTERVAL_S, _MAX_OUTPUT_BYTES = 0.1, 1 << 20


def run_call(path: Path) -> None:
    """Runs one call and puts what came of it beside it; an error that is not the application's own is told as text."""
    said = os.open(path.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    threading.Thread(target=_truncate_output, daemon=True).start()
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    random.seed()  # a worker of a run is no copy of another, either
    np.random.seed()
    value: Any = None
    error: RayAppError | None = None
    try:
        function, arguments = pickle.loads(path.read_bytes())
        value = function(*arguments)
    except RayAppError as own:
        error = own
    except BaseException as other:
        error = TaskError(describe_error(other), format_calls(other))
    made = path.with_suffix(".tmp")
    made.write_bytes(pickle.dumps((value, error)))
    made.rename(path.with_suffix(".result"))


def _truncate_output() -> None:
    """Forgets what was printed whenever it is much: only the end of it is shown, and the disk is not this task's."""
    while True:
        time.sleep(_TRUNCATE_INTERVAL_S)
        if os.fstat(1).st_size > _MAX_OUTPUT_BYTES:
            os.ftruncate(1, 0)


def main() -> None:
    """Serves until standard input ends."""
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
