"""Footers that would make the Parquet library abort this process are refused: a process of its own looks at them first.

The process serves all data sets that are opened at about the same time, as its start takes a fifth of a second, and ends itself when
nothing comes for some seconds (`footer_trial.py`).
"""

from __future__ import annotations

import atexit
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

    def survivors(self, tails: Sequence[bytes]) -> tuple[int, str]:
        """How many footers, from the first one on, the process survives, and what it says where it does not survive all."""
        with self._lock:
            while True:
                process = self._started()
                assert process.stdin is not None
                assert process.stdout is not None
                assert process.stderr is not None
                with suppress(BrokenPipeError):
                    for tail in tails:
                        process.stdin.write(struct.pack("<q", len(tail)) + tail)
                    process.stdin.flush()
                survived = len(process.stdout.read(len(tails)))
                if survived == len(tails):
                    return survived, ""
                said = process.stderr.read().decode(errors="replace")
                # With exit code 0 it has ended itself in the moment before, because nothing came.
                if process.wait() != 0 or survived:
                    return survived, said

    def close(self) -> None:
        """Ends the process."""
        with self._lock, suppress(BrokenPipeError):
            if self._process is not None:
                self._process.communicate()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-I", str(Path(__file__).with_name("footer_trial.py"))]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
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
    survived, said = _trial.survivors(tails)
    if survived == len(files):
        return
    reason = said.rpartition("what():")[2].strip().rstrip(".") or "the Parquet library aborts"
    if "decrypt" in reason.lower():
        raise DataError(f"{files[survived]} has encrypted columns, so it cannot be read ({reason}). Write it again without encryption.")
    raise DataError(f"{files[survived]} has a footer that contradicts itself, so it cannot be read ({reason}). Write it again.")
