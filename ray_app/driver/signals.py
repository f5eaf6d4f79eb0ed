"""Handlers of SIGINT and SIGTERM: a training run stops at its next step boundary, and any other command ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_at_signals(interrupted: threading.Event) -> Iterator[None]:
    """Turns SIGINT and SIGTERM into a stop at the next step boundary; a second SIGINT raises `KeyboardInterrupt`.

    The context is entered after `ray.init`, which installs its own handler, and left when the run is closed. So a
    claimed run records how it ended, also if the signal comes before its workers start or while its record is closed.
    """

    def stop(number: int, _: Any) -> None:
        if interrupted.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        interrupted.set()

    with _handled((signal.SIGINT, signal.SIGTERM), stop):
        yield


@contextmanager
def interrupt_at_sigterm() -> Iterator[None]:
    """Has SIGTERM raise `KeyboardInterrupt`, as SIGINT does, also after `ray.init`, which installs a
    handler that raises `SystemExit(SIGTERM)`.
    """
    with _handled((signal.SIGTERM,), signal.default_int_handler):
        try:
            yield
        except SystemExit as error:
            if error.code != signal.SIGTERM:
                raise
            raise KeyboardInterrupt from error


@contextmanager
def _handled(numbers: tuple[signal.Signals, ...], handler: Callable[[int, Any], Any]) -> Iterator[None]:
    """Installs a handler for some signals; does nothing outside of the main thread, where Python allows none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
