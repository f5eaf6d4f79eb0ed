"""The server process of the sandbox: it imports torch once, and forks a process for every call.

It reads lines with the numbers of calls to run concurrently. The function and the arguments of a call are in
`<number>.call`; its process writes the result to `<number>.result` and its output to `<number>.out`. The server answers
each line with a line of exit statuses.
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
        if os.fstat(1).st_size > _MAX_OUTPUT_BYTES:
            os.ftruncate(1, 0)


def main() -> None:
    """Runs calls until standard input ends."""
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
