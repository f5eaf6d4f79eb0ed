"""From step records to curves: thinning, smoothing, rates, and a clock without the pauses between two starts. Pure functions."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from ray_app.record.progress.journal import Event
from ray_app.record.progress.segments import StepRecord

MOST_POINTS = 1000
"""Most points of one curve."""

_LOG_FROM = 50.0

Point = tuple[float, float]


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` of the points, in their order, among them the first, the last, and every stretch's lowest and highest.

    The points are cut into `most` / 4 stretches of equally many points; of each its first, its last, its minimum and its maximum stay. So a
    single outlier among a million steps is still to be seen.
    """
    if len(points) <= most:
        return list(points)
    kept: list[Point] = []
    stretches = max(1, most // 4)
    for number in range(stretches):
        low, high = number * len(points) // stretches, (number + 1) * len(points) // stretches
        chosen = range(low, high)
        ends = {low, high - 1, min(chosen, key=lambda i: points[i][1]), max(chosen, key=lambda i: points[i][1])}
        kept += [points[i] for i in sorted(ends)]
    return kept


class Curve(Sequence[Point]):
    """Points in two columns: of a million steps they take a sixth of the memory of tuples.

    Args:
        x: Where they are.
        y: Their values, as many.
    """

    def __init__(self, x: array[float], y: array[float]) -> None:
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._x)

    def __iter__(self) -> Iterator[Point]:
        return zip(self._x, self._y, strict=True)

    @overload
    def __getitem__(self, index: int) -> Point: ...
    @overload
    def __getitem__(self, index: slice) -> Curve: ...
    def __getitem__(self, index: int | slice) -> Point | Curve:
        if isinstance(index, slice):
            return Curve(self._x[index], self._y[index])
        return self._x[index], self._y[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


def finite(points: Iterable[Point]) -> Curve:
    """The points that are neither NaN nor infinite."""
    x, y = array("d"), array("d")
    for at, value in points:
        if math.isfinite(at) and math.isfinite(value):
            x.append(at)
            y.append(value)
    return Curve(x, y)


def smoothed(points: Sequence[Point], most: int = 120) -> list[Point]:
    """Means over equally long stretches of points, at most `most` of them; empty if there are too few points to smooth."""
    if len(points) < 2 * most:
        return []
    means = []
    for number in range(most):
        some = points[number * len(points) // most : (number + 1) * len(points) // most]
        means.append((sum(x for x, _ in some) / len(some), sum(y for _, y in some) / len(some)))
    return [points[0] if most == 1 else (points[0][0], means[0][1]), *means[1:-1], (points[-1][0], means[-1][1])]


@dataclass(frozen=True)
class Pause:
    """Time in which no driver worked on the run.

    Args:
        at_s: When it was, in seconds of the run's clock.
        seconds: How long it was.
        number: Number of the start that ended it, from 2.
    """

    at_s: float
    seconds: float
    number: int


class Clock:
    """Turns times into seconds since the first start, leaving out the pauses between a start's last sign of life and the next start.

    Args:
        starts_s: When the run was started, seconds since 1970.
        signs_s: When anything was recorded, likewise.
    """

    def __init__(self, starts_s: Sequence[float], signs_s: Iterable[float]) -> None:
        signs = sorted(signs_s)
        starts = sorted(starts_s) or signs[:1] or [0.0]
        self._starts, self._cut = starts, [starts[0]]
        self.pauses: list[Pause] = []
        for number, start in enumerate(starts[1:], 2):
            before = bisect_right(signs, start - 1e-6)
            pause_s = start - max(signs[before - 1] if before else start, starts[number - 2])
            self._cut.append(self._cut[-1] + pause_s)
            self.pauses.append(Pause(start - self._cut[-1], pause_s, number))
        self.end_s = max(self.at(signs[-1]), 0.001) if signs else 0.001

    def at(self, time_s: float) -> float:
        """Seconds since the first start, without pauses."""
        return time_s - self._cut[max(0, bisect_right(self._starts, time_s) - 1)]


def sizes_over_time(records: Sequence[StepRecord], clock: Clock) -> list[Point]:
    """Workers that step, by the run's clock, as corners of a step curve: 0 where nobody steps for longer than a three-hundredth of the run.

    Args:
        records: All steps in the order of time, also those done again.
        clock: The run's.
    """
    corners: list[Point] = [(0.0, 0.0)]
    least_s, end_s, size = clock.end_s / 300, 0.0, 0
    for record in records:
        done_s = clock.at(record.time_s)
        began_s = max(end_s, done_s - record.step_ms / 1e3)
        if began_s - end_s > least_s:
            corners += [(end_s, 0.0), (began_s, float(record.workers))]
        elif record.workers != size:
            corners.append((began_s, float(record.workers)))
        end_s, size = done_s, record.workers
    return [*corners, (end_s, 0.0)] if records else []


def rates(records: Sequence[StepRecord], clock: Clock, most: int = 160) -> list[Point]:
    """Rows per second over equally long times of the run's clock, at most `most` of them, standing at the middle of each.

    Args:
        records: The steps in their order, also of a machine whose clock was set back meanwhile.
        clock: The run's.
        most: How many.
    """
    if len(records) < 2:
        return []
    times = [clock.at(record.time_s) for record in records]
    low, high = min(times), max(times)
    bins = min(most, max(1, len(records) // 8))
    width_s = (high - low) / bins
    if width_s <= 0:
        return []
    rows = [0.0] * bins
    for record, time_s in zip(records[1:], times[1:], strict=True):
        rows[min(bins - 1, int((time_s - low) / width_s))] += sum(record.rows)
    return [(low + (i + 0.5) * width_s, count / width_s) for i, count in enumerate(rows)]


def starts_of(events: Iterable[Event]) -> list[Event]:
    """The driver's starts."""
    return [event for event in events if event.kind == "started"]


def spans_powers(values: Sequence[float]) -> bool:
    """Whether values are better seen on a logarithmic axis: all positive, the largest at least 50 times the smallest."""
    return min(values, default=0.0) > 0 and max(values) / min(values) >= _LOG_FROM


def sparkline(values: Sequence[float], marks: str, width: int = 40) -> str:
    """A curve in characters: means of equally many values, from the lowest mark to the highest, by their logarithm where they span powers;
    empty without finite values.

    Args:
        values: The curve.
        marks: From low to high.
        width: Most characters.
    """
    usable = [value for value in values if math.isfinite(value)]
    width = min(width, len(usable))
    cells = [usable[i * len(usable) // width : (i + 1) * len(usable) // width] for i in range(width)]
    means = [sum(cell) / len(cell) for cell in cells]
    means = [math.log(mean) for mean in means] if spans_powers(means) else means
    low, span = min(means, default=0.0), (max(means, default=0.0) - min(means, default=0.0)) or 1.0
    return "".join(marks[round((mean - low) / span * (len(marks) - 1))] for mean in means)
