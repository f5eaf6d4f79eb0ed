"""The lines of `benchmarks/gpu.py`: independent checks and measurements, each with a time limit."""

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
    """The subject of a line does not exist; the message gives the reason."""


class OverTimeError(Exception):
    """A line exceeded its time limit."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a line.

    Args:
        text: Message with the values and their units.
        passed: Whether a check passed; None: it was a measurement.
        figures: Values for the JSON file.
    """

    text: str
    passed: bool | None = None
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Args:
        name: Name of the check or measurement.
        look: Function that runs it.
        limit_s: Seconds after which it is ended.
        bar: Requirement on the value, as text.
        gpus: Number of GPUs that it needs; 1 needs none in a dry run.
        stops: Whether all later lines are left out if it fails, since they would fail for the same reason.
    """

    name: str
    look: Callable[[Bench], Outcome]
    limit_s: float
    bar: str = ""
    gpus: int = 1
    stops: bool = False


@dataclass(frozen=True)
class Result:
    """The result of a line in the table.

    Args:
        name, bar: Name and bar of the line.
        status: Whether it is a check that passed or failed, a measurement, or neither.
        text: Message of the outcome, or the reason why there is none.
        seconds: Duration of the line.
        figures: See `Outcome`.
        trace: The last lines of the traceback of a line that raised.
    """

    name: str
    bar: str
    status: Status
    text: str
    seconds: float
    figures: dict[str, Any]
    trace: str = ""

    def row(self) -> str:
        """Returns the row of the table, in Markdown."""
        return f"| {self.name} | {self.status} | {self.text} | {self.bar} | {self.seconds:.0f} |"


HEAD = "| what | | found | bar | s |\n|---|---|---|---|---|"


def look_at(lines: Sequence[Line], bench: Bench, total_s: float, tell: Callable[[Result], None]) -> None:
    """Runs one line after the other, also after failures.

    Args:
        lines: The lines in their order.
        bench: Device, data and processes for the lines.
        total_s: Seconds for all of them; lines for which no time remains are left out.
        tell: Called with the result of each line.
    """
    end_s, stopped_by = time.monotonic() + total_s, ""
    for line in lines:
        began_s = time.monotonic()
        if stopped_by:
            tell(Result(line.name, line.bar, "left out", f"{stopped_by} failed", 0.0, {}))
            continue
        status, text, figures, trace = _run_line(line, bench, min(line.limit_s, end_s - began_s))
        tell(
            Result(
                line.name,
                line.bar,
                status,
                " ".join(text.split()).replace("|", "/"),
                time.monotonic() - began_s,
                figures,
                trace,
            )
        )
        if line.stops and status == "failed":
            stopped_by = line.name


def _run_line(line: Line, bench: Bench, limit_s: float) -> tuple[Status, str, dict[str, Any], str]:
    if limit_s <= 0:
        return "left out", "no time was left", {}, ""
    if line.gpus > max(1, bench.gpus):
        return "left out", f"needs {line.gpus} GPUs, there {'is' if bench.gpus == 1 else 'are'} {bench.gpus}", {}, ""
    try:
        with limited(limit_s):
            outcome = line.look(bench)
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
    return (
        "measured" if outcome.passed is None else "passed" if outcome.passed else "failed",
        outcome.text,
        outcome.figures,
        "",
    )


def _traceback() -> str:
    """Returns the last lines of the current traceback; the traceback of a worker is at its end, in the message."""
    return "\n".join(traceback.format_exc().rstrip().splitlines()[-_LINES_OF_TRACEBACK:])


def _last(text: str) -> str:
    """Returns the end of a long message, which is the informative part of a traceback."""
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
    """Returns the content of the JSON file: the machine, and the lines."""
    return {"machine": machine, "lines": [asdict(result) for result in results]}
