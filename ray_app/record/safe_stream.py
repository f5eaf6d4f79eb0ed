"""Text streams that never raise: a full disk, a closed pipe or an encoding does not end a process that has work to do."""

from __future__ import annotations

import logging
import select
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

logger = logging.getLogger(__name__)

_FLUSH_S, _LOOK_S = 2.0, 0.1


class SafeStream:
    """A text stream that drops what cannot be written, and remembers and logs the first failure.

    Characters that the encoding lacks are written as escapes. A reader of a non-blocking pipe that is behind gets two seconds.

    Args:
        stream: The stream that is written to.
        name: What the stream is called in the warning.

    Attributes:
        failure: The first failure; None if there was none.
    """

    def __init__(self, stream: Any, name: str) -> None:
        self._stream, self._name = stream, name
        self.failure: Exception | None = None

    def write(self, text: str) -> int:
        """See `TextIOBase.write`."""
        self._attempt(lambda: self._write(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """See `IOBase.writelines`."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """See `IOBase.flush`."""
        self._attempt(self._stream.flush)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError as error:
            self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            try:
                work()
            except BlockingIOError:
                self._flush_slowly()
        except Exception as error:
            if self.failure is None:
                self.failure = error
                logger.warning("Nothing can be written to %s, the work goes on: %s: %s", self._name, type(error).__name__, error)

    def _flush_slowly(self) -> None:
        """Waits for the reader of a non-blocking pipe; what the buffers hold is written as soon as there is room.

        Raises:
            BlockingIOError: The reader takes nothing.
        """
        deadline_s = time.monotonic() + (_FLUSH_S if self.failure is None else 0.0)
        while True:
            try:
                return self._stream.flush()
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise
                select.select([], [self._stream], [], _LOOK_S)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def make_standard_streams_safe() -> None:
    """From now on nothing that this process writes to its standard output and standard error raises."""
    for name, called in (("stdout", "standard output"), ("stderr", "standard error")):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, SafeStream):
            setattr(sys, name, SafeStream(stream, called))
