"""The lines of `benchmarks/gpu.py`: each a check or a measurement of its own, with seconds of its own; what one does
harms no other.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any, Literal

from benchmarks.gpu_workers import Bench

_LINES_OF_TRACEBACK = 10

Status = Literal["passed", "failed", "measured", "not yet", "left out"]


class NotYetError(Exception):
    """What a line would look at does not exist; the message says why."""


class OverTimeError(Exception):
    """A line took longer than it may."""


@dataclass(frozen=True)
class Found:
    """What a line found.

    Args:
        said: In words, with units.
        passed: Whether a check passed; None: it was a measurement.
        figures: For the JSON file.
    """

    said: str
    passed: bool | None = None
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Args:
        name: What is looked at.
        look: Does it.
        limit_s: Seconds after which it is ended.
        bar: What is asked of the figure, in words.
        gpus: How many it needs; 1 needs none in a dry run.
        stops: Whether all that follows would fail for the same reason, and is left out if it fails.
    """

    name: str
    look: Callable[[Bench], Found]
    limit_s: float
    bar: str = ""
    gpus: int = 1
    stops: bool = False


@dataclass(frozen=True)
class Result:
    """What became of a line.

    Args:
        name, bar: Those of the line.
        status: Whether it is a check that passed or failed, a measurement, or nothing, and why.
        said: What was found, or why nothing was.
        seconds: How long it took.
        figures: See `Found`.
        trace: The last lines of the traceback of a line that raised.
    """

    name: str
    bar: str
    status: Status
    said: str
    seconds: float
    figures: dict[str, Any]
    trace: str = ""

    def row(self) -> str:
        """A row of the table, in Markdown."""
        return f"| {self.name} | {self.status} | {self.said} | {self.bar} | {self.seconds:.0f} |"


HEAD = "| what | | found | bar | s |\n|---|---|---|---|---|"


def look_at(lines: Sequence[Line], bench: Bench, total_s: float, tell: Callable[[Result], None]) -> None:
    """Takes one line after the other; `tell` gets what became of each, whatever that is.

    Args:
        lines: In their order.
        bench: What they look at.
        total_s: Seconds for all of them; lines for which nothing is left are left out.
        tell: Called after each.
    """
    end_s, stopped_by = time.monotonic() + total_s, ""
    for line in lines:
        began_s = time.monotonic()
        if stopped_by:
            tell(Result(line.name, line.bar, "left out", f"{stopped_by} failed", 0.0, {}))
            continue
        status, said, figures, trace = _outcome(line, bench, min(line.limit_s, end_s - began_s))
        tell(
            Result(
                line.name,
                line.bar,
                status,
                " ".join(said.split()).replace("|", "/"),
                time.monotonic() - began_s,
                figures,
                trace,
            )
        )
        if line.stops and status == "failed":
            stopped_by = line.name


def _outcome(line: Line, bench: Bench, limit_s: float) -> tuple[Status, str, dict[str, Any], str]:
    if limit_s <= 0:
        return "left out", "no time was left", {}, ""
    if line.gpus > max(1, bench.gpus):
        return "left out", f"needs {line.gpus} GPUs, there {'is' if bench.gpus == 1 else 'are'} {bench.gpus}", {}, ""
    try:
        with limited(limit_s):
            found = line.look(bench)
    except NotYetError as error:
        return "not yet", str(error), {}, ""
    except OverTimeError as error:
        is_own = limit_s >= line.limit_s
        return (
            ("failed", str(error), {}, _traceback())
            if is_own
            else ("left out", "no time was left to finish it", {}, "")
        )
    except Exception as error:
        return "failed", f"{type(error).__name__}: {_last(str(error))}", {}, _traceback()
    return "measured" if found.passed is None else "passed" if found.passed else "failed", found.said, found.figures, ""


def _traceback() -> str:
    """The last lines of the traceback that is handled; that of a worker stands at the end, as the message."""
    return "\n".join(traceback.format_exc().rstrip().splitlines()[-_LINES_OF_TRACEBACK:])


def _last(text: str) -> str:
    """The end of a long message: that of a traceback says most."""
    return text if len(text) <= 300 else f"... {text[-300:]}"


@contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Raises `OverTimeError` in the block if it takes longer; for the main thread."""

    def over(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise OverTimeError(f"ended after {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def as_json(machine: dict[str, Any], results: Sequence[Result]) -> dict[str, Any]:
    """What goes into the file: the machine, and its lines."""
    return {"machine": machine, "lines": [asdict(result) for result in results]}
