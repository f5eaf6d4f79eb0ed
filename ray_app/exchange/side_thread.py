"""Work that a thread does beside the one that computes: what `SideStream` is to a device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue


class SideThread:
    """A thread that does what it is given, in this order; there is none before it is given something.

    It is a daemon, which a process does not wait for at its end: it may wait for a peer.
    """

    def __init__(self) -> None:
        self._todo: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._given, self._thread = list[Future[None]](), threading.Thread(target=_run, args=(self._todo,), name="exchange", daemon=True)

    def do(self, work: Callable[[], None]) -> None:
        """Gives it something to do."""
        if self._thread.ident is None:
            self._thread.start()
        self._given.append(Future())
        self._todo.put((work, self._given[-1]))

    def join(self) -> None:
        """Waits until all is done.

        Raises:
            Exception: What was raised first.
        """
        given, self._given = self._given, []
        for each in given:
            each.result()

    def close(self) -> None:
        """Lets it end, and waits for nothing: what it waits for itself ends with the process group."""
        self._todo.put(None)


def _run(todo: SimpleQueue[tuple[Callable[[], None], Future[None]] | None]) -> None:
    while (given := todo.get()) is not None:
        work, done = given
        try:
            work()
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        del given, work, done  # they hold the memory of a bucket
