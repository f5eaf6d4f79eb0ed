"""Lines of the table that nothing looks at yet, with the reason, so that it says what it does not show."""

from __future__ import annotations

from benchmarks.gpu_lines import Found, Line, NotYetError
from benchmarks.gpu_workers import Bench

UNWRITTEN = "its measurement is not written"
NO_CAPTURE = "capturing a micro-batch as a CUDA graph does not exist"


def missing(name: str, bar: str, why: str = UNWRITTEN, gpus: int = 1) -> Line:
    """A line that says why it says nothing."""

    def look(bench: Bench) -> Found:
        del bench
        raise NotYetError(why)

    return Line(name, look, 1, bar, gpus)


LINES = [
    missing("bits: capture", "equal", NO_CAPTURE),
    missing("small step: captured / eager", "at least 2 times as fast below 5 ms", NO_CAPTURE),
    missing("NCCL: SIGKILL to the next step", "2 s", gpus=2),
    missing("NCCL: overlap of the exchange in a profile", "", gpus=2),
]
