"""What the code of a task prints in other processes, in the run's directory: `output/<start>-<who>.out` and `.err`.

It goes where it went before, too. A thread copies the first megabyte to the storage, about once a second and at the
end; no print waits for it, and a storage that is away costs nothing but the copy. What C code writes by itself is not
seen here.

Text streams that never raise: a full disk, a closed pipe or an encoding does not end a process that has work to do.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ray_app.process import SafeStream
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact
from ray_app.storage.files import Location, poll_interval_s, put_atomic

_MOST_CHARS = 1 << 20


class Output:
    """Copies what this process prints from now on, until it is closed.

    Args:
        paths: The run.
        fence: Number of the driver's start.
        who: Who prints; no two processes of a start have the same.
        where: What stands before every line in brackets, such as the step.
    """

    def __init__(self, paths: RunPaths, fence: int, who: str, where: Callable[[], str]) -> None:
        self._before = sys.stdout, sys.stderr
        kinds = enumerate(("out", "err"), 1)
        self._kept = [_Kept(paths.output(fence, who, kind), where, _goes_to(number)) for number, kind in kinds]
        self._tees = [
            _Tee(stream, name, kept)
            for stream, name, kept in zip(self._before, ("standard output", "standard error"), self._kept, strict=True)
        ]
        sys.stdout, sys.stderr = self._tees
        self._lock = threading.Lock()
        self._closed, self._look_s = threading.Event(), 2 * poll_interval_s(paths.root)
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Copies the rest."""
        for name, tee, before in zip(("stdout", "stderr"), self._tees, self._before, strict=True):
            if getattr(sys, name) is tee:  # or somebody has put another in its place, which may need it
                setattr(sys, name, before)
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closed.wait(self._look_s)
            self.copy()

    def copy(self) -> None:
        """Copies what is there now."""
        with self._lock:
            for kept in self._kept:
                with suppress(Exception):  # whatever it is, it is tried again with the next, and a run goes on without
                    kept.put()


@contextmanager
def copied_output(paths: RunPaths, fence: int, who: str, where: Callable[[], str]) -> Iterator[None]:
    """The time in which output is copied, see `Output`."""
    output = Output(paths, fence, who, where)
    try:
        yield
    finally:
        output.close()


class _Kept:
    """The beginning of what was printed."""

    def __init__(self, place: Location, where: Callable[[], str], goes_to: str) -> None:
        self._place, self._where, self._goes_to = place, where, goes_to
        self._parts: list[str] = []
        self._chars, self._copied = 0, 0
        self._is_at_start = True

    def add(self, text: str) -> None:
        if self._chars > _MOST_CHARS or not text:
            return
        before = f"[{self._where()}] "
        shown = text[:_MOST_CHARS]
        shown = (before if self._is_at_start else "") + shown[:-1].replace("\n", f"\n{before}") + shown[-1:]
        self._is_at_start = text.endswith("\n")
        self._chars += len(shown)
        self._parts.append(shown)

    def put(self) -> None:
        """Writes all of it anew, if it is more than before.

        Raises:
            OSError: The storage does not take it.
        """
        chars = self._chars
        if chars == self._copied:
            return
        text = "".join(self._parts)
        if chars > _MOST_CHARS:
            text = text[:_MOST_CHARS].rpartition("\n")[0] + f"\n... what follows is in {self._goes_to} alone\n"
        put_atomic(self._place, redact(text).encode(errors="replace"))
        self._copied = chars


class _Tee(SafeStream):
    """A stream that keeps what is written to it."""

    def __init__(self, stream: Any, name: str, kept: _Kept) -> None:
        super().__init__(stream, name)
        self._kept = kept

    def write(self, text: str) -> int:
        """See `TextIOBase.write`."""
        super().write(text)
        with suppress(Exception):
            self._kept.add(text)
        return len(text)


def _goes_to(descriptor: int) -> str:
    """The file that a process's output goes to by itself: Ray redirects that of its workers."""
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return "Ray's own log"


_MOST_LINES = 20


class NewLines:
    """What the processes of a start have printed since the last look, for a console; of a run on a disk.

    Args:
        paths: The run.
        fence: Number of the driver's start.
    """

    def __init__(self, paths: RunPaths, fence: int) -> None:
        self._folder, self._start = paths.outputs, f"{fence:04d}-"
        self._read: dict[str, int] = {}

    def look(self) -> list[str]:
        """At most twenty lines; the last one says how many there are besides.

        Raises:
            OSError: The storage does not answer.
        """
        if not isinstance(self._folder, Path) or not self._folder.is_dir():
            return []
        found: list[str] = []
        files = [
            file
            for file in sorted(self._folder.glob(f"{self._start}*.out"))
            if file.stat().st_size > self._read.get(file.name, 0)
        ]
        for file in files:
            data = file.read_bytes()[self._read.get(file.name, 0) :]
            whole = data[: data.rfind(b"\n") + 1]
            self._read[file.name] = self._read.get(file.name, 0) + len(whole)
            found += whole.decode(errors="replace").splitlines()
        more = len(found) - _MOST_LINES
        return [*found[:_MOST_LINES], f"... {more:,} more lines in {self._folder}"] if more > 0 else found
