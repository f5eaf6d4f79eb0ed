"""A bound for whatever the main thread does, also where it waits in a library."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_AGAIN_S = 60.0
"""Seconds after which ending what took too long has taken too long itself."""


class LimitExceededError(Exception):
    """Something took longer than it may."""


class _Late(BaseException):
    """Raised wherever the main thread is. No `Exception`: who tries again after those would do so for ever."""


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Bounds what the main thread does in this context; in another thread there is no bound.

    Args:
        seconds: How long it may take.
        what: What takes so long, as the subject of a sentence.

    Raises:
        LimitExceededError: It took longer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise _Late

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    except _Late as error:
        raise LimitExceededError(f"{what} did not end within {seconds:g} s (drill.limit_s bounds scenarios).") from error
    finally:
        signal.signal(signal.SIGALRM, before)
