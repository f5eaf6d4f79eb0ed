"""Repeated attempts of a call that may fail for a while.

A loop that repeats something after an error in another way says in a comment why. Threads that work at intervals anyway
(heartbeats, renewals of a lease, trackers, the evaluator) have no such comment: their next turn is the next attempt.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Retry:
    """When a call that failed is repeated; without `attempts` and `deadline_s` it is repeated until it succeeds.

    Args:
        first_pause_s: Seconds of the pause after the first failure.
        factor: Factor from one pause to the next; 1 for equal pauses.
        max_pause_s: Maximum seconds of a pause.
        jitter: Maximum fraction of a pause that is left out at random, so that processes do not stay synchronized.
        attempts: Maximum number of attempts; None: no limit.
        deadline_s: Seconds since the beginning of the first attempt after which no failed attempt is repeated; None: no
            limit.
    """

    first_pause_s: float
    factor: float = 2.0
    max_pause_s: float = math.inf
    jitter: float = 0.0
    attempts: int | None = None
    deadline_s: float | None = None

    def pause_s(self, failures: int) -> float:
        """Returns the seconds to pause after this number of failures in a row, at least one."""
        # Floating-point powers overflow above 2**1023.
        pause_s = min(self.max_pause_s, self.first_pause_s * self.factor ** min(failures - 1, 64))
        return pause_s * random.uniform(1.0 - self.jitter, 1.0)

    def call(
        self,
        work: Callable[[], T],
        errors: type[Exception] | tuple[type[Exception], ...],
        description: str,
        on_error: Callable[[Exception], object] | None = None,
    ) -> T:
        """Returns the result of `work`, which is called until it succeeds. Each failure is logged as a warning.

        Args:
            work: The call; a repetition after a failure must do no harm.
            errors: Errors after which another attempt may succeed.
            description: The call as the subject of the log line.
            on_error: Called after each failure, before it is logged. What it raises ends the attempts.

        Raises:
            Exception: The error of the last attempt, or an error that is not one of `errors`.
        """
        start_s = time.monotonic()
        for number in itertools.count(1):
            try:
                return work()
            except errors as error:
                if on_error is not None:
                    on_error(error)
                is_late = self.deadline_s is not None and time.monotonic() - start_s > self.deadline_s
                pause_s = None if is_late or number == self.attempts else self.pause_s(number)
                attempt = f"attempt {number}" if self.attempts is None else f"attempt {number} of {self.attempts}"
                outlook = "" if pause_s is None else f", next try in {pause_s:.1f} s"
                logger.warning("%s: %s failed%s: %s: %s", description, attempt, outlook, type(error).__name__, error)
                if pause_s is None:
                    raise
            time.sleep(pause_s)
        raise AssertionError("unreachable")
