"""Footers that would make the Parquet library abort this process are refused: a process of its own looks at them first.

The process serves all data sets that are opened at about the same time, as its start takes a fifth of a second, and ends itself when
nothing comes for some seconds (`footer_trial.py`).
"""

from __future__ import annotations

import atexit
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ray_app.data.dataset.files import Place
from ray_app.errors import DataError


class _Trial:
    """The process, started when it is needed; threads take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def first_fatal(self, tails: Sequence[bytes]) -> tuple[int, str] | None:
        """Which footer the process does not survive, and what the process says then; None if it survives all.

        A process may also be ended from outside, so a footer is fatal only if two processes die of it.

        Raises:
            RuntimeError: The process cannot look at footers.
        """
        survived, suspect = 0, -1
        with self._lock:
            while survived < len(tails):
                count, process = self._look_at(tails[survived:])
                survived += count
                if survived == len(tails):
                    break
                assert process.stderr is not None
                message, code = process.stderr.read().decode(errors="replace"), process.wait()
                if code > 0:
                    raise RuntimeError(f"The process that looks at Parquet footers first ended with exit code {code}: {message}")
                # With exit code 0 it ended itself in the moment before, because nothing came.
                if code and suspect == survived:
                    return survived, message
                suspect = survived if code else suspect
        return None

    def close(self) -> None:
        """Ends the process."""
        with self._lock, suppress(BrokenPipeError):
            if self._process is not None:
                self._process.communicate()

    def _look_at(self, tails: Sequence[bytes]) -> tuple[int, subprocess.Popen[bytes]]:
        """How many footers, from the first one on, the process survives."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            for tail in tails:
                process.stdin.write(struct.pack("<q", len(tail)) + tail)
            process.stdin.flush()
        return len(process.stdout.read(len(tails))), process

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-P", str(Path(__file__).with_name("footer_trial.py"))]
            # The packages of this process, wherever they are: those of a user and of PYTHONPATH, too.
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe)
        return self._process


_trial = _Trial()
atexit.register(_trial.close)


def check_footers(files: Sequence[Place], tails: Sequence[bytes]) -> None:
    """Refuses footers that the Parquet library does not survive.

    Args:
        files: Parquet files.
        tails: The end of each, from its footer on.

    Raises:
        DataError: There is one: its columns are encrypted, or it contradicts itself.
    """
    fatal = _trial.first_fatal(tails)
    if fatal is None:
        return
    place, message = fatal
    reason = message.rpartition("what():")[2].strip().rstrip(".") or "the Parquet library aborts"
    if "decrypt" in reason.lower():
        raise DataError(f"{files[place]} has encrypted columns, so it cannot be read ({reason}). Write it again without encryption.")
    raise DataError(f"{files[place]} has a footer that contradicts itself, so it cannot be read ({reason}). Write it again.")
