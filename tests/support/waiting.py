"""Waiting for what happens in other threads and processes: looked at again and again, with a deadline, never slept
through.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(true: Callable[[], Any], what: str = "it did not come true", limit_s: float = 180.0) -> None:
    """Waits until something is true; `what` is said if it is not in time."""
    deadline_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline_s, f"{what} within {limit_s:g} s"
        time.sleep(0.02)
