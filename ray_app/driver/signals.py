"""SIGINT and SIGTERM: a running run stops at its next step boundary; before a run, they end the command."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_at_signals(interrupted: threading.Event) -> Iterator[None]:
    """Turns SIGINT and SIGTERM into a stop at the next step boundary; a second SIGINT raises `KeyboardInterrupt`.

    To be entered after `ray.init`, which puts a handler of its own in place, and left when the run is closed: a run
    that is claimed says how it ended, also if the signal comes before its workers are there or while its record is
    being closed.
    """

    def stop(number: int, _: Any) -> None:
        if interrupted.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        interrupted.set()

    with _handled((signal.SIGINT, signal.SIGTERM), stop):
        yield


@contextmanager
def interrupt_at_sigterm() -> Iterator[None]:
    """Lets SIGTERM raise `KeyboardInterrupt`, as SIGINT does; also after `ray.init`, whose own handler raises
    `SystemExit(SIGTERM)`.
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
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
