"""Handlers of signals around what must not be left half-way, or puts its own in place."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
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
def handler_kept(number: signal.Signals) -> Iterator[None]:
    """Puts the handler that a signal has now back at the end, if both are in the main thread; no other may do so."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(number)
    try:
        yield
    finally:
        if is_main and before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(number, before)
