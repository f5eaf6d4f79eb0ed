"""The console of rich for texts, and the output of user code in workers and evaluators, as files of the run.

The files are `output/<start>-<process>.out` and `.err`. The output also goes to its former destination. A thread copies
the first megabyte to the storage, about once a second and at the end; no print waits for it, and an outage of the
storage costs nothing but the copy. Output that C code writes to the file descriptors is not copied.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from ray_app.errors import escape_controls
from ray_app.process import SafeStream
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact_value
from ray_app.storage.files import Location, poll_interval_s, put_atomic

_MAX_CHARS = 1 << 20
_COLORS = re.compile(r"\x1b\[[\d;]*m")


class Output:
    """Copies the output of this process until it is closed.

    Args:
        process_name: A name for the process, unique in a start.
        context: Returns the text in brackets before every line, such as the step.
    """

    def __init__(self, paths: RunPaths, fence: int, process_name: str, context: Callable[[], str]) -> None:
        self._before = sys.stdout, sys.stderr
        self._copies = [
            _OutputCopy(paths.output(fence, process_name, kind), context, _destination(descriptor))
            for descriptor, kind in enumerate(("out", "err"), 1)
        ]
        titles = "standard output", "standard error"
        self._tees = [_Tee(*args) for args in zip(self._before, titles, self._copies, strict=True)]
        sys.stdout, sys.stderr = self._tees
        self._lock = threading.Lock()
        self._closed, self._interval_s = threading.Event(), 2 * poll_interval_s(paths.root)
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Restores the streams and copies the rest."""
        for name, tee, before in zip(("stdout", "stderr"), self._tees, self._before, strict=True):
            # User code may have replaced the stream by another one, which may write to this one.
            if getattr(sys, name) is tee:
                setattr(sys, name, before)
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closed.wait(self._interval_s)
            self.copy()

    def copy(self) -> None:
        """Copies the output so far."""
        with self._lock:
            for copy in self._copies:
                # Any error is ignored: the next call tries again, and the run does not need the copy.
                with suppress(Exception):
                    copy.put()


@contextmanager
def copied_output(paths: RunPaths, fence: int, process_name: str, context: Callable[[], str]) -> Iterator[None]:
    """Copies the output of this process during the block, see `Output`."""
    output = Output(paths, fence, process_name, context)
    try:
        yield
    finally:
        output.close()


class _OutputCopy:
    """The beginning of a stream's output, and its copy in a file."""

    def __init__(self, file: Location, context: Callable[[], str], destination: str) -> None:
        self._file = file
        self._context = context
        self._destination = destination
        self._parts: list[str] = []
        self._chars, self._copied = 0, 0
        self._is_at_start = True

    def add(self, text: str) -> None:
        if self._chars > _MAX_CHARS or not text:
            return
        prefix = f"[{self._context()}] "
        part = text[:_MAX_CHARS]
        part = (prefix if self._is_at_start else "") + part[:-1].replace("\n", f"\n{prefix}") + part[-1:]
        self._is_at_start = text.endswith("\n")
        # The count comes second: `put`, in another thread, takes it for the size of what the parts contain.
        self._parts.append(part)
        self._chars += len(part)

    def put(self) -> None:
        """Writes the whole file again if there is more output than before."""
        chars = self._chars
        if chars == self._copied:
            return
        text = "".join(self._parts)
        if chars > _MAX_CHARS:
            text = text[:_MAX_CHARS].rpartition("\n")[0] + f"\n... further output is only in {self._destination}\n"
        put_atomic(self._file, redact_value(text).encode(errors="replace"))
        self._copied = chars


class _Tee(SafeStream):
    """A stream that also passes its text to a copy."""

    def __init__(self, stream: Any, name: str, copy: _OutputCopy) -> None:
        super().__init__(stream, name)
        self._copy = copy

    def write(self, text: str) -> int:
        """See `TextIOBase.write`."""
        super().write(text)
        with suppress(Exception):
            self._copy.add(text)
        return len(text)


def _destination(descriptor: int) -> str:
    """Returns the file that a descriptor writes to; Ray redirects the output of its workers to its log."""
    with suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return "Ray's own log"


_MAX_LINES = 20


class NewLines:
    """Reads the new output of the processes of a start, for a console; only for runs on a disk."""

    def __init__(self, paths: RunPaths, fence: int) -> None:
        self._folder, self._start = paths.outputs, f"{fence:04d}-"
        self._offsets: dict[str, int] = {}

    def poll(self) -> list[str]:
        """Returns the lines since the last call, up to twenty, and one that counts the others."""
        if not isinstance(self._folder, Path) or not self._folder.is_dir():
            return []
        lines: list[str] = []
        files = [
            file
            for file in sorted(self._folder.glob(f"{self._start}*.out"))
            if file.stat().st_size > self._offsets.get(file.name, 0)
        ]
        for file in files:
            data = file.read_bytes()[self._offsets.get(file.name, 0) :]
            # A line that has no end yet is left for the next call.
            complete = data[: data.rfind(b"\n") + 1]
            self._offsets[file.name] = self._offsets.get(file.name, 0) + len(complete)
            lines += without_colors(complete.decode(errors="replace")).splitlines()
        more = len(lines) - _MAX_LINES
        return [*lines[:_MAX_LINES], f"... {more:,} more lines in {self._folder}"] if more > 0 else lines


class TextConsole(Console):
    """A console that writes control characters of texts as escapes; only rich itself colors and moves the cursor."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """See `Console.render`, which all output passes, that of nested and live displays included."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=escape_controls(segment.text))


def without_colors(text: str) -> str:
    """Returns the output of a program without its colors, and with a line for each state of a progress bar."""
    return _COLORS.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
