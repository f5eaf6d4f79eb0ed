"""Lines of the table that nothing looks at yet, with the reason, so that it says what it does not show."""

from __future__ import annotations

from benchmarks.gpu_lines import Found, Line, NotYetError
from benchmarks.gpu_workers import Bench

NO_CAPTURE = "capturing a micro-batch as a CUDA graph does not exist"


def missing(name: str, bar: str, why: str) -> Line:
    """A line that says why it says nothing."""

    def look(bench: Bench) -> Found:
        del bench
        raise NotYetError(why)

    return Line(name, look, 1, bar)


LINES = [
    missing("bits: capture", "equal", NO_CAPTURE),
    missing("small step: captured / eager", "at least 2 times as fast below 5 ms", NO_CAPTURE),
]
