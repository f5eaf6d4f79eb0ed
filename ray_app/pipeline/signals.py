"""What SIGINT and SIGTERM mean while a run goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stopping_at_signals(interrupted: threading.Event) -> Iterator[None]:
    """Turns SIGINT and SIGTERM into a stop at the next step boundary; a second SIGINT raises `KeyboardInterrupt`.

    Does nothing outside the main thread, which alone gets signals. The handlers of before are back at the end, such as those of a
    notebook's kernel.
    """

    def stop(number: int, _: Any) -> None:
        if interrupted.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        interrupted.set()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
