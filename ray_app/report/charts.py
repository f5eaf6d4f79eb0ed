"""Charts as SVG: line charts and timelines of a run, without scripts and fonts.

The colors are CSS variables of the page, and each chart has an `aria-label` for screen readers. The module has pure
functions, in this order: axes (ticks and number formats), curves from step records (thinning, smoothing, rates, and a
clock without the pauses between two starts), and drawing. Coordinates are pixels of the `viewBox`, which the page
scales as a whole; for phones a chart is drawn again with a smaller width. A plotting library is not used, since the
page is one file that works without scripts, follows the colors of the reader's system, and needs no other import.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape

from ray_app.runlog.history import Numbers, column
from ray_app.runlog.journal import Event, StepRecord

_TIMES_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200]
_DAY_S = 86400


def ticks(low: float, high: float, max_count: int) -> list[float]:
    """Returns about `max_count` round numbers from `low` to `high`, rarely more."""
    if high <= low:
        return [low]
    spacing = (high - low) / max(1, max_count)
    power = 10.0 ** math.floor(math.log10(spacing))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= spacing * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def whole_ticks(low: float, high: float, max_count: int) -> list[float]:
    """Returns ticks as `ticks` does, but whole numbers only."""
    values = sorted({float(round(tick)) for tick in ticks(low, high, max_count)})
    return [tick for tick in values if low <= tick <= high]


def time_ticks(low: float, high: float, max_count: int) -> list[float]:
    """Returns ticks in seconds as `ticks` does, at whole minutes, hours or days if the span is long."""
    spacing = (high - low) / max(1, max_count)
    if spacing < 1:
        return ticks(low, high, max_count)
    step: float = next((t for t in _TIMES_S if t >= spacing), 0) or _DAY_S * math.ceil(spacing / _DAY_S)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_ticks(low: float, high: float, max_count: int) -> list[float]:
    """Returns powers of ten as ticks, with 2 and 5 times these if `max_count` allows it."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, math.ceil(len(powers) / max_count))
    parts = (1, 2, 5) if 3 * len(powers) <= max_count + 2 else (1,)
    values = [m * 10.0**p for p in powers if p % every == 0 for m in parts]
    return [tick for tick in values if low * 0.999 <= tick <= high * 1.001]


def number(value: float) -> str:
    """Returns a number as a short text: `0.0012`, `350`, `12k`, `3.5M`, `1e-06`."""
    if not math.isfinite(value) or value == 0:
        return "0" if value == 0 else str(value)
    # The unit is that of the rounded number, so that 999,999 is 1M and not 1000k.
    size = float(f"{abs(value):.4g}")
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scale = 1e3 if letter == "k" else limit
            return f"{value / scale:.4g}{letter}"
    if size < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def seconds(value: float) -> str:
    """Returns a duration as a text: `0 s`, `250 ms`, `42 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    if value < 0:
        return f"-{seconds(-value)}"
    if 0 < value < 0.9995:
        return f"{value * 1e3:.{0 if value >= 0.01 else 1}f} ms"
    if value < 59.5:
        return f"{value:.3g} s" if value < 10 else f"{value:.0f} s"
    value = round(value)
    for size, name, inner, inner_name in ((_DAY_S, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if value >= size:
            whole, rest = divmod(round(value / inner) * inner, size)
            return f"{whole:.0f} {name}" + (f" {rest / inner:.0f} {inner_name}" if rest else "")
    raise AssertionError


@dataclass(frozen=True)
class Scale:
    """A linear or logarithmic map from the values `low` to `high` to the pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Returns the pixel coordinate of a value."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        position = math.log(max(value, self.low)) if self.log else value
        return self.start + (position - low) / ((high - low) or 1.0) * (self.end - self.start)


@dataclass(frozen=True)
class Axis:
    """The labels of one axis; `make_ticks` returns ticks between two values, up to a maximum number."""

    name: str
    make_ticks: Callable[[float, float, int], list[float]] = ticks
    text: Callable[[float], str] = number


STEPS = Axis("step", whole_ticks, lambda step: f"{step:,.0f}")
TIME = Axis("running time", time_ticks, seconds)


MAX_POINTS = 1000
"""Maximum number of points of a curve in a chart."""

_LOG_FROM = 50.0

Point = tuple[float, float]


def finite_points(x: npt.ArrayLike, y: npt.ArrayLike) -> Numbers:
    """Returns the points that are neither NaN nor infinite, of shape (points, 2)."""
    points = np.column_stack([x, y]).astype(np.float64)
    return points[np.isfinite(points).all(1)]


def thin_points(points: npt.ArrayLike, max_points: int = MAX_POINTS) -> list[Point]:
    """Returns at most `max_points` of the points, in their order.

    The points are divided into `max_points` / 4 sections of equally many points; of each section the first, the last,
    the lowest and the highest point stay. So a single outlier among a million steps stays visible.
    """
    array = np.asarray(points, np.float64).reshape(-1, 2)
    if len(array) > max_points:
        sections, kept = max(1, max_points // 4), set[int]()
        for number in range(sections):
            low, high = number * len(array) // sections, (number + 1) * len(array) // sections
            y = array[low:high, 1]
            kept |= {low, high - 1, low + int(y.argmin()), low + int(y.argmax())}
        array = array[sorted(kept)]
    return [(x, y) for x, y in array.tolist()]


def smooth_points(points: Numbers, max_points: int = 120) -> list[Point]:
    """Returns the means of `max_points` sections of equally many points; empty with fewer than two points for each."""
    if len(points) < 2 * max_points:
        return []
    means = np.array([section.mean(0) for section in np.array_split(points, max_points)])
    means[0, 0], means[-1, 0] = points[0, 0], points[-1, 0]
    return [(x, y) for x, y in means.tolist()]


@dataclass(frozen=True)
class Pause:
    """An interval in which no driver worked on the run, before the start with this number (from 2).

    `at_s` is in seconds of the run's clock.
    """

    at_s: float
    seconds: float
    number: int


class Clock:
    """The run's clock: seconds since the first start, without the pauses from the last record of a start to the next.

    The times of the driver's starts and of all records are in seconds since 1970 (UTC).
    """

    def __init__(self, starts_s: Sequence[float], records_s: npt.ArrayLike) -> None:
        record_times = np.sort(np.asarray(records_s, np.float64))
        starts = sorted(starts_s) or record_times[:1].tolist() or [0.0]
        self._starts, self._cut = starts, [starts[0]]
        self.pauses: list[Pause] = []
        for number, start in enumerate(starts[1:], 2):
            before = int(np.searchsorted(record_times, start - 1e-6, side="right"))
            pause_s = start - max(float(record_times[before - 1]) if before else start, starts[number - 2])
            self._cut.append(self._cut[-1] + pause_s)
            self.pauses.append(Pause(start - self._cut[-1], pause_s, number))
        self.end_s = max(self.at(float(record_times[-1])), 0.001) if len(record_times) else 0.001

    def at(self, time_s: float) -> float:
        """Returns the seconds from the first start to a time, without pauses."""
        return time_s - self._cut[max(0, bisect_right(self._starts, time_s) - 1)]

    def at_all(self, times_s: Numbers) -> Numbers:
        """Returns the seconds from the first start to some times, see `at`."""
        starts = np.searchsorted(self._starts, times_s, side="right") - 1
        return times_s - np.array(self._cut)[np.maximum(0, starts)]


def sizes_over_time(records: Sequence[StepRecord], clock: Clock) -> list[Point]:
    """Returns the workers by the run's clock, as corners of a step curve; 0 in longer gaps without a step."""
    corners: list[Point] = [(0.0, 0.0)]
    if not records:
        return []
    workers, finished_s = column(records, "workers"), clock.at_all(column(records, "time_s"))
    end_s = np.concatenate([[0.0], finished_s[:-1]])
    began_s = np.maximum(end_s, finished_s - column(records, "step_ms") / 1e3)
    has_gap = began_s - end_s > clock.end_s / 300
    for row in np.flatnonzero(has_gap | (np.diff(workers, prepend=0) != 0)):
        corners += [(float(end_s[row]), 0.0)] if has_gap[row] else []
        corners.append((float(began_s[row]), float(workers[row])))
    return [*corners, (float(finished_s[-1]), 0.0)]


def rows_per_second_over_time(records: Sequence[StepRecord], clock: Clock, max_bins: int = 160) -> list[Point]:
    """Returns the rows per second at the middle of equal intervals; a clock may have been set back."""
    if len(records) < 2:
        return []
    times_s = clock.at_all(column(records, "time_s"))
    low, high = float(times_s.min()), float(times_s.max())
    bins = min(max_bins, max(1, len(records) // 8))
    width_s = (high - low) / bins
    if width_s <= 0:
        return []
    at = np.minimum(bins - 1, ((times_s[1:] - low) / width_s).astype(np.int64))
    rows = np.bincount(at, column(records, "rows")[1:], bins).tolist()
    return [(low + (i + 0.5) * width_s, count / width_s) for i, count in enumerate(rows)]


def start_events(events: Iterable[Event]) -> list[Event]:
    """Returns the events of the driver's starts."""
    return [event for event in events if event.kind == "started"]


def spans_powers(values: Sequence[float]) -> bool:
    """Returns whether values need a logarithmic axis: all are positive, and max / min is at least 50."""
    return min(values, default=0.0) > 0 and max(values) / min(values) >= _LOG_FROM


def sparkline(values: npt.ArrayLike, marks: str, width: int = 40) -> str:
    """Returns a curve of characters for means of values, or of their logarithms if they span powers."""
    usable = np.asarray(values, np.float64)
    usable = usable[np.isfinite(usable)]
    width = min(width, len(usable))
    means = [float(usable[i * len(usable) // width : (i + 1) * len(usable) // width].mean()) for i in range(width)]
    means = [math.log(mean) for mean in means] if spans_powers(means) else means
    low, span = min(means, default=0.0), (max(means, default=0.0) - min(means, default=0.0)) or 1.0
    return "".join(marks[round((mean - low) / span * (len(marks) - 1))] for mean in means)


Tone = Literal["blue", "orange", "green", "red", "purple", "gray"]
_TOP, _RIGHT, _BOTTOM = 10, 14, 32
_MAX_HOVER_COLUMNS, _MAX_DOTS = 80, 200
_LANE, _NEAR = 24, 3.0


@dataclass(frozen=True)
class Line:
    """A curve of a chart.

    Args:
        kind: `line`; `faint` for a curve behind another one; `steps` for a filled step curve; `dots` for single points.
    """

    name: str
    tone: Tone
    points: Sequence[Point]
    kind: Literal["line", "faint", "steps", "dots"] = "line"


@dataclass(frozen=True)
class Mark:
    """The mark of an event in a chart; `until` is the end of an event that has a duration."""

    at: float
    tone: Tone
    text: str
    shape: Literal["cross", "diamond", "up", "bar", "hollow"] = "bar"
    until: float | None = None


@dataclass(frozen=True)
class Lane:
    """One row of a timeline."""

    name: str
    marks: Sequence[Mark]


@dataclass(frozen=True)
class Frame:
    """The common properties of charts that stand below each other.

    Args:
        width: Width of the drawing in pixels.
        left: Width of the margin with the labels in pixels.
        span: Range of the x axis; by default that of the curves.
    """

    width: int = 420
    left: int = 48
    span: tuple[float, float] | None = None
    x: Axis = STEPS
    pauses: Sequence[Pause] = field(default=())


def line_chart(
    lines: Sequence[Line],
    y: Axis,
    frame: Frame,
    *,
    height: int = 190,
    log: bool = False,
    from_zero: bool = False,
    marks: Sequence[Mark] = (),
) -> Markup:
    """Draws curves, one at least with points, each above those before; a mark is a vertical line with a shape."""
    points = [point for line in lines for point in line.points]
    span = frame.span or (min(x for x, _ in points), max(x for x, _ in points))
    low, high = min(v for _, v in points), max(v for _, v in points)
    low, high = _add_margin(0.0 if from_zero else low, high, log, bool(marks), from_zero)
    top, bottom = _TOP + (10 if marks else 0), height - _BOTTOM
    across = Scale(*span, frame.left, frame.width - _RIGHT)
    up = Scale(low, high, bottom, top, log)
    tick_values = log_ticks(low, high, 6) if log else y.make_ticks(low, high, max(3, (bottom - top) // 26))
    parts = [_grid_line(up(tick), y.text(tick), frame) for tick in tick_values]
    parts += [*_x_axis(frame, across, top, bottom), *(_pause(pause, across, top, bottom) for pause in frame.pauses)]
    parts += [_curve(line, across, up, bottom) for line in lines]
    parts += [_mark_across(mark, across(mark.at), top, bottom) for mark in marks]
    parts += _hover_columns(lines, frame, y, (across, top, bottom))
    description = "; ".join(
        f"{ln.name} from {y.text(ln.points[0][1])} to {y.text(ln.points[-1][1])}" for ln in lines if ln.points
    )
    return _drawing(f"{y.name} by {frame.x.name}: {description}", frame.width, height, parts)


def timeline(lanes: Sequence[Lane], frame: Frame) -> Markup:
    """Draws events over the frame's span of time, one lane for each kind."""
    assert frame.span is not None
    height = _TOP + _LANE * len(lanes) + _BOTTOM
    across = Scale(*frame.span, frame.left, frame.width - _RIGHT)
    bottom = height - _BOTTOM
    parts = _x_axis(frame, across, _TOP, bottom)
    parts += [_pause(pause, across, _TOP, bottom) for pause in frame.pauses]
    for number, lane in enumerate(lanes):
        middle = _TOP + _LANE * (number + 0.5)
        parts.append(_tag("line", x1=frame.left, x2=frame.width - _RIGHT, y1=middle, y2=middle, class_="grid"))
        parts.append(_tag("text", lane.name, x=frame.left - 8, y=middle + 4, text_anchor="end"))
        parts += [_shape(mark, across, middle) for mark in _merge_close_marks(lane.marks, across)]
    description = ", ".join(f"{len(lane.marks)} {lane.name}" for lane in lanes)
    return _drawing(f"Timeline: {description}", frame.width, height, parts)


def _add_margin(low: float, high: float, log: bool, has_marks: bool, from_zero: bool) -> tuple[float, float]:
    """Returns a range around the values with a margin, so that no curve touches the border."""
    if log:
        return (low / 1.15, high * 1.15) if high > low else (low / 2, high * 2)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low if from_zero else low - margin, high + margin * (2 if has_marks else 1)


def _x_axis(frame: Frame, across: Scale, top: float, bottom: float) -> list[Markup]:
    tick_values = frame.x.make_ticks(across.low, across.high, max(3, int(across.end - across.start) // 70))
    parts = [_tag("line", x1=frame.left, x2=frame.width - _RIGHT, y1=bottom, y2=bottom, class_="axis")]
    next_free_x = frame.left - 20.0
    for tick in tick_values:
        at, text = across(tick), frame.x.text(tick)
        parts.append(_tag("line", x1=at, x2=at, y1=top, y2=bottom, class_="grid"))
        half = len(text) * 3.1
        middle = min(max(at, frame.left - 3 + half), frame.width - 2 - half)
        if middle - half < next_free_x:
            continue
        parts.append(_tag("text", text, x=middle, y=bottom + 15, text_anchor="middle"))
        next_free_x = middle + half + 6
    return [*parts, _tag("text", frame.x.name, x=frame.width - _RIGHT, y=bottom + 28, text_anchor="end", class_="name")]


def _grid_line(at: float, text: str, frame: Frame) -> Markup:
    line = _tag("line", x1=frame.left, x2=frame.width - _RIGHT, y1=at, y2=at, class_="grid")
    return line + _tag("text", text, x=frame.left - 6, y=at + 4, text_anchor="end")


def _pause(pause: Pause, across: Scale, top: float, bottom: float) -> Markup:
    at = across(pause.at_s)
    title = _tag("title", f"start {pause.number} of the driver, after {seconds(pause.seconds)} without one")
    return _tag("g", _tag("line", x1=at, x2=at, y1=top, y2=bottom) + title, class_="pause")


def _curve(line: Line, across: Scale, up: Scale, bottom: float) -> Markup:
    points = [(across(x), up(y)) for x, y in thin_points(line.points)]
    if not points:
        return Markup()
    if line.kind == "steps":
        corners = [f"M{points[0][0]:.1f} {points[0][1]:.1f}", *(f"H{x:.1f}V{y:.1f}" for x, y in points[1:])]
        path = "".join(corners)
        area = f"{path}V{bottom:.1f}H{points[0][0]:.1f}Z"
        return _tag("path", d=area, class_=f"area {line.tone}") + _tag("path", d=path, class_=f"curve {line.tone}")
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    drawn = _tag("path", d=path, class_=f"{'faint' if line.kind == 'faint' else 'curve'} {line.tone}")
    if (line.kind == "dots" and len(points) <= _MAX_DOTS) or len(points) == 1:
        drawn += Markup().join(
            _tag("circle", cx=x, cy=y, r=3 if len(points) < 60 else 2, class_=f"dot {line.tone}") for x, y in points
        )
    return drawn


def _hover_columns(lines: Sequence[Line], frame: Frame, y: Axis, area: tuple[Scale, float, float]) -> list[Markup]:
    """Returns invisible columns that show a vertical line and the values at the pointer's position."""
    across, top, bottom = area
    visible_lines = [line for line in lines if line.points]
    longest = max(visible_lines, key=lambda line: len(line.points))
    number = min(_MAX_HOVER_COLUMNS, max(1, len(longest.points)))
    width = (across.end - across.start) / number
    parts = []
    for index in range(number):
        at = across.start + (index + 0.5) * width
        x = across.low + (at - across.start) / ((across.end - across.start) or 1) * (across.high - across.low)
        values = [(line.name, _nearest(line, x)) for line in visible_lines]
        nearest_x = values[visible_lines.index(longest)][1][0] if longest.kind != "steps" else x
        hover_lines = [
            f"{frame.x.name} {frame.x.text(nearest_x)}",
            *(f"{name}: {y.text(value)}" for name, (_, value) in values),
        ]
        cross = _tag("line", x1=across(nearest_x), x2=across(nearest_x), y1=top, y2=bottom)
        box = _tag("rect", x=at - width / 2, y=top, width=width, height=bottom - top)
        parts.append(_tag("g", box + cross + _tag("title", "\n".join(hover_lines)), class_="hover"))
    return parts


def _nearest(line: Line, x: float) -> Point:
    """Returns the point of a line at x: of a step curve the last one before x, otherwise the nearest one."""
    after = bisect_left(line.points, (x, float("-inf")))
    around = line.points[max(0, after - 1) : after + 1]
    return around[0] if line.kind == "steps" else min(around, key=lambda point: abs(point[0] - x))


def _mark_across(mark: Mark, x: float, top: float, bottom: float) -> Markup:
    line = _tag("line", x1=x, x2=x, y1=top, y2=bottom)
    return _tag("g", line + _symbol(mark.shape, x, top - 6) + _tag("title", mark.text), class_=f"mark {mark.tone}")


def _shape(mark: Mark, across: Scale, middle: float) -> Markup:
    x = across(mark.at)
    if mark.shape in ("bar", "hollow"):
        end = across(mark.until) if mark.until is not None else x
        width = max(3.0, end - x)
        drawn = _tag(
            "rect", x=min(x, across.end - width), y=middle - 7, width=width, height=14, rx=1.5, class_=mark.shape
        )
    else:
        drawn = _symbol(mark.shape, x, middle)
    return _tag("g", drawn + _tag("title", mark.text), class_=f"mark {mark.tone}")


def _symbol(shape: str, x: float, y: float) -> Markup:
    r, wide = 4.5, 5.5
    corners = {
        "cross": f"M{x - r:.1f} {y - r:.1f}l{2 * r} {2 * r}m0 {-2 * r}l{-2 * r} {2 * r}",
        "diamond": f"M{x:.1f} {y - wide:.1f}l{wide} {wide}l{-wide} {wide}l{-wide} {-wide}Z",
        "up": f"M{x:.1f} {y - r:.1f}l{r} {2 * r}h{-2 * r}Z",
    }
    return _tag("path", d=corners.get(shape, corners["diamond"]), class_=shape)


def _merge_close_marks(marks: Sequence[Mark], across: Scale) -> list[Mark]:
    """Returns marks that do not overlap: one mark replaces similar marks within three pixels and has their number."""
    groups: list[list[Mark]] = []
    for mark in marks:
        last = groups[-1][0] if groups else None
        if last and (last.tone, last.shape) == (mark.tone, mark.shape) and across(mark.at) - across(last.at) < _NEAR:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return [_merge_marks(group) for group in groups]


def _merge_marks(group: list[Mark]) -> Mark:
    first, last = group[0], group[-1]
    if len(group) == 1:
        return first
    return Mark(first.at, first.tone, f"{len(group)} here, the first: {first.text}", first.shape, last.until)


def _drawing(description: str, width: int, height: int, parts: Sequence[Markup]) -> Markup:
    return _tag("svg", Markup().join(parts), viewBox=f"0 0 {width} {height}", role="img", aria_label=description)


def _tag(name: str, content: str | Markup = "", **attributes: Any) -> Markup:
    """Returns an element; text is escaped, `Markup` is not; `text_anchor` becomes `text-anchor`, `class_` `class`."""
    parts = []
    for key, value in attributes.items():
        text = f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value
        parts.append(f' {key.rstrip("_").replace("_", "-")}="{escape(text)}"')
    return Markup(f"<{name}{''.join(parts)}>{escape(content)}</{name}>")
