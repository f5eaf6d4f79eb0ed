"""When a generation stands still: no step is finished for much longer than steps take."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from ray_app.record.progress.segments import StepRecord

_LEAST_S, _MEDIAN_STEPS, _FIRST_STEP_FACTOR = 60.0, 50, 5


class Standstill:
    """How the present generation gets on.

    Args:
        step_timeout_s: Seconds without a finished step that are a standstill; None: a multiple of the median step.
        clock: Tells the seconds.

    Attributes:
        step: The newest finished step; -1 before the first.
    """

    def __init__(self, step_timeout_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._given_s, self._clock = step_timeout_s, clock
        self._step_s: deque[float] = deque(maxlen=101)
        self.begin(-1)

    def begin(self, step: int) -> None:
        """A generation begins with a step; its first one may take longer than others."""
        self.step, self._stepped, self._times = step, False, 0
        self.moves()

    def moves(self) -> None:
        """Something goes on, or all wait for the storage."""
        self._moved_s = self._clock()

    def finished(self, step: int, record: StepRecord | None) -> None:
        """A step is finished, perhaps not for the first time."""
        if step > self.step:
            self._stepped = self.step >= 0
            self.step, self._times = step, 0
            self.moves()
        if record is not None:
            self._step_s.append(record.step_ms / 1e3)

    @property
    def limit_s(self) -> float:
        """Seconds without a finished step that are a standstill."""
        limit = self._given_s
        if limit is None:
            limit = max(_LEAST_S, _MEDIAN_STEPS * median(self._step_s)) if self._step_s else 10 * _LEAST_S
        return limit * (1 if self._stepped else _FIRST_STEP_FACTOR)

    def times(self, now: float) -> int:
        """How many times it stands still at this step, if it does just now, which begins the time anew; 0 if it does not."""
        if now - self._moved_s < self.limit_s:
            return 0
        self._moved_s = now
        self._times += 1
        return self._times
