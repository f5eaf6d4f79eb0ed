"""What a run changes in the process that it is in, which may be a notebook's, and gives back: signals, environment,
settings.

Imports in bulk: what is imported is no garbage, and to look for some meanwhile takes a fifth of the time.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
_FLUSH_S = 2.0
_LOOK_S = 0.1
_lock = threading.Lock()
_lent: dict[str, list[list[Any]]] = {}
"""What each setting was before each of the times for which it is lent now, by the name of the setting, the earliest
first.
"""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""What `malloc.h` calls the free memory that is kept, and what the system is asked for on its own."""


def keep_freed_memory() -> None:
    """Lets glibc keep up to a gigabyte of freed memory for what is asked for next; for a process that does nothing but
    compute for a run.

    Each step asks for what the one before has freed. What went back to the system in between comes again page by page,
    filled with zeros: up to 9,000 page faults in a step of ResNet-18, a tenth of its time (see `man 3 mallopt`). A
    thread's own memory is kept up to 64 MB. What the environment says of it counts more. glibc cannot be asked to go
    back to its own changing thresholds.
    """
    malloc = ctypes.CDLL(None)
    if not hasattr(malloc, "mallopt") or any(
        name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ
    ):
        return
    malloc.mallopt(_TRIM_THRESHOLD, 1 << 30)
    malloc.mallopt(_MMAP_THRESHOLD, 32 << 20)  # the most that it takes


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Holds an interrupt back to the end; in another thread than the main one there is none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def restore_handler(number: signal.Signals) -> Iterator[None]:
    """Puts the handler that a signal has now back at the end, if both are in the main thread; no other may do so."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(number)
    try:
        yield
    finally:
        if is_main and before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(number, before)


@contextmanager
def set_variables(**settings: str | None) -> Iterator[None]:
    """Sets environment variables, also for processes that are started meanwhile, and puts them back.

    Args:
        settings: Their values; None: what it is.
    """
    with ExitStack() as stack:
        for name, value in settings.items():
            stack.enter_context(restore_setting(name, partial(os.environ.get, name), partial(_set_variable, name)))
            if value is not None:
                os.environ[name] = value
        yield


def _set_variable(name: str, value: str | None) -> None:
    os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextmanager
def restore_setting(name: str, read: Callable[[], T], write: Callable[[T], object]) -> Iterator[None]:
    """Whatever a setting becomes, it is then what it was. Of several times that overlap, as those of two runs, the last
    one puts it back.

    Args:
        name: What the setting is called.
        read: What it is.
        write: Makes it that.
    """
    mine: list[Any] = []
    with _lock:
        mine.append(read())
        _lent.setdefault(name, []).append(mine)
    try:
        yield
    finally:
        with _lock:
            times = _lent[name]
            place = next(i for i, each in enumerate(times) if each is mine)
            if place + 1 < len(times):
                times[place + 1][:] = mine
            else:
                write(mine[0])
            del times[place]


@contextmanager
def without_gc() -> Iterator[None]:
    """Has nobody look for garbage meanwhile."""
    looks = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looks:
            gc.enable()


class SafeStream:
    """A text stream that drops what cannot be written, and remembers and logs the first failure.

    Characters that the encoding lacks are written as escapes. A reader of a non-blocking pipe that is behind gets two
    seconds.

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
                logger.warning(
                    "Nothing can be written to %s, the work goes on: %s: %s", self._name, type(error).__name__, error
                )

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
