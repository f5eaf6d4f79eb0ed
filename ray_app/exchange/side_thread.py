"""Work that a thread does beside the one that computes: what `SideStream` is to a device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class SideThread:
    """A thread that does what it is given, in this order; there is none before it is given something."""

    def __init__(self) -> None:
        self._thread, self._given = ThreadPoolExecutor(1, "exchange"), list[Future[None]]()

    def do(self, work: Callable[[], None]) -> None:
        """Gives it something to do."""
        self._given.append(self._thread.submit(work))

    def join(self) -> None:
        """Waits until all is done.

        Raises:
            Exception: What was raised first.
        """
        given, self._given = self._given, []
        for each in given:
            each.result()

    def close(self) -> None:
        """Begins nothing more, and waits for nothing: what it waits for ends with the process group."""
        self._thread.shutdown(wait=False, cancel_futures=True)
