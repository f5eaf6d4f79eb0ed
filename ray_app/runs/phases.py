"""What the start of a run spends its time on."""

from __future__ import annotations

import time


class Phases:
    """Seconds of each phase, one after the other.

    Args:
        since_s: When the first began, seconds since 1970; None: that is not known, and it is left out.
    """

    def __init__(self, since_s: float | None) -> None:
        self.seconds: dict[str, float] = {}
        self._since_s = since_s

    def end(self, phase: str) -> None:
        """A phase ends, and the next begins."""
        now = time.time()
        if self._since_s is not None:
            self.seconds[phase] = now - self._since_s
        self._since_s = now
