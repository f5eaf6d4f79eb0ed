"""What SIGINT and SIGTERM do to a run: while it goes on they ask it to stop, before that they end the command in order.

How long a run that is to end is waited for, and what it waits for then.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from ray_app.train.membership import Phase, RendezvousStatus


@contextmanager
def stopping_at_signals(interrupted: threading.Event) -> Iterator[None]:
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
def ending_at_sigterm() -> Iterator[None]:
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


STOP_S, END_S = 15.0, 60.0


class Bounds:
    """Says when it is no use to wait any longer for workers that are to end, or for the controller after they have.

    A worker that computes, writes a checkpoint or exchanges gradients is not given up here: the step watchdog looks
    after it.

    Args:
        total_steps: Steps of the run.
    """

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._step, self._reason, self._since_s = -1, "", 0.0

    def look(self, now_s: float, seen: RendezvousStatus | None, phases: Collection[Phase] | None) -> str | None:
        """Takes how the run is now.

        Args:
            now_s: When that is, by any clock that does not jump.
            seen: What the rendezvous says; None: it does not answer.
            phases: What the workers do, if the run is to stop.

        Returns:
            Why nothing more is waited for; None while something is.
        """
        reason, limit_s = self._waits_for(seen, phases)
        step = seen.step if seen is not None else self._step
        if reason != self._reason or step != self._step:
            self._reason, self._step, self._since_s = reason, step, now_s
        return f"{reason} for {limit_s:g} s" if reason and now_s - self._since_s >= limit_s else None

    def _waits_for(self, seen: RendezvousStatus | None, phases: Collection[Phase] | None) -> tuple[str, float]:
        if phases is None:
            is_done = seen is not None and seen.step >= self._total_steps and not seen.live and not seen.leaving
            return (
                "all steps are done, all workers have left, and Ray Train's controller has not ended" if is_done else ""
            ), END_S
        if seen is None:
            return "the rendezvous has not answered", STOP_S
        if "data" in phases:
            return "a worker has waited for data", STOP_S
        if not seen.live and not seen.leaving:
            return "there has been no worker, and the controller has not ended", STOP_S
        if not phases:
            return "the workers have formed no group", STOP_S
        return "", STOP_S
