"""Charts as SVG: no script, no fonts of their own, colours from the page's CSS variables, and a text for whoever cannot see them.

Coordinates are pixels of the `viewBox`; the page scales the whole, so what goes to a phone is drawn again with a smaller width.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from markupsafe import Markup, escape

from ray_app.report.axes import STEPS, Axis, Scale, log_ticks, seconds
from ray_app.report.series import Pause, Point, thinned

Tone = Literal["blue", "orange", "green", "red", "purple", "grey"]

_TOP, _RIGHT, _BOTTOM = 10, 14, 32
_HOVERED = 80
_LANE, _NEAR = 24, 3.0


@dataclass(frozen=True)
class Line:
    """One curve.

    Args:
        name: What it is, for the legend and the hover text.
        tone: Its colour.
        points: In the order of x, finite.
        kind: `line`; `faint` for what lies behind another; `steps` for a filled step curve; `dots` for few points, connected.
    """

    name: str
    tone: Tone
    points: Sequence[Point]
    kind: Literal["line", "faint", "steps", "dots"] = "line"


@dataclass(frozen=True)
class Mark:
    """Something that happened.

    Args:
        at: Where on the x axis.
        tone: Its colour.
        text: What it was.
        shape: How it looks.
        until: Where it ended, if it took time.
    """

    at: float
    tone: Tone
    text: str
    shape: Literal["cross", "diamond", "up", "bar", "hollow"] = "bar"
    until: float | None = None


@dataclass(frozen=True)
class Lane:
    """One row of a timeline.

    Args:
        name: What it shows.
        marks: In the order of time.
    """

    name: str
    marks: Sequence[Mark]


@dataclass(frozen=True)
class Frame:
    """What charts that stand below each other have in common.

    Args:
        width: Of the drawing.
        left: Room for labels.
        span: From where to where the x axis goes; not given: as far as the curves.
        x: The x axis.
        pauses: Times in which nobody worked on the run.
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
    """Draws curves over a common x axis.

    Args:
        lines: At least one with points; later ones lie above earlier ones.
        y: The y axis.
        frame: The x axis and the size.
        height: Pixels.
        log: Whether the y axis is logarithmic; all values must be positive then.
        from_zero: Whether the y axis begins at 0.
        marks: What happened; a line across the chart with a shape at its top.
    """
    points = [point for line in lines for point in line.points]
    span = frame.span or (min(x for x, _ in points), max(x for x, _ in points))
    low, high = min(v for _, v in points), max(v for _, v in points)
    low, high = _roomy(0.0 if from_zero else low, high, log, bool(marks), from_zero)
    top, bottom = _TOP + (10 if marks else 0), height - _BOTTOM
    across = Scale(*span, frame.left, frame.width - _RIGHT)
    up = Scale(low, high, bottom, top, log)
    places = log_ticks(low, high, 6) if log else y.place(low, high, max(3, (bottom - top) // 26))
    parts = [_grid_line(up(tick), y.text(tick), frame) for tick in places]
    parts += [*_x_axis(frame, across, top, bottom), *(_pause(pause, across, top, bottom) for pause in frame.pauses)]
    parts += [_curve(line, across, up, bottom) for line in lines]
    parts += [_struck(mark, across(mark.at), top, bottom) for mark in marks]
    parts += _hovers(lines, frame, y, (across, top, bottom))
    said = "; ".join(f"{ln.name} from {y.text(ln.points[0][1])} to {y.text(ln.points[-1][1])}" for ln in lines if ln.points)
    return _drawing(f"{y.name} by {frame.x.name}: {said}", frame.width, height, parts)


def timeline(lanes: Sequence[Lane], frame: Frame) -> Markup:
    """Draws what happened, one lane per kind, over the frame's span of time."""
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
        parts += [_shape(mark, across, middle) for mark in _apart(lane.marks, across)]
    said = ", ".join(f"{len(lane.marks)} {lane.name}" for lane in lanes)
    return _drawing(f"Timeline: {said}", frame.width, height, parts)


def _roomy(low: float, high: float, log: bool, has_marks: bool, from_zero: bool) -> tuple[float, float]:
    """Some room around the values, so that nothing touches the border."""
    if log:
        return (low / 1.15, high * 1.15) if high > low else (low / 2, high * 2)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low if from_zero else low - room, high + room * (2 if has_marks else 1)


def _x_axis(frame: Frame, across: Scale, top: float, bottom: float) -> list[Markup]:
    places = frame.x.place(across.low, across.high, max(3, int(across.end - across.start) // 70))
    parts = [_tag("line", x1=frame.left, x2=frame.width - _RIGHT, y1=bottom, y2=bottom, class_="axis")]
    free = frame.left - 20.0
    for tick in places:
        at, text = across(tick), frame.x.text(tick)
        parts.append(_tag("line", x1=at, x2=at, y1=top, y2=bottom, class_="grid"))
        half = len(text) * 3.1
        middle = min(max(at, frame.left - 3 + half), frame.width - 2 - half)
        if middle - half < free:
            continue
        parts.append(_tag("text", text, x=middle, y=bottom + 15, text_anchor="middle"))
        free = middle + half + 6
    return [*parts, _tag("text", frame.x.name, x=frame.width - _RIGHT, y=bottom + 28, text_anchor="end", class_="name")]


def _grid_line(at: float, text: str, frame: Frame) -> Markup:
    line = _tag("line", x1=frame.left, x2=frame.width - _RIGHT, y1=at, y2=at, class_="grid")
    return line + _tag("text", text, x=frame.left - 6, y=at + 4, text_anchor="end")


def _pause(pause: Pause, across: Scale, top: float, bottom: float) -> Markup:
    at = across(pause.at_s)
    title = _tag("title", f"start {pause.number} of the driver, after {seconds(pause.seconds)} without one")
    return _tag("g", _tag("line", x1=at, x2=at, y1=top, y2=bottom) + title, class_="pause")


def _curve(line: Line, across: Scale, up: Scale, bottom: float) -> Markup:
    points = [(across(x), up(y)) for x, y in thinned(line.points)]
    if not points:
        return Markup()
    if line.kind == "steps":
        corners = [f"M{points[0][0]:.1f} {points[0][1]:.1f}", *(f"H{x:.1f}V{y:.1f}" for x, y in points[1:])]
        path = "".join(corners)
        area = f"{path}V{bottom:.1f}H{points[0][0]:.1f}Z"
        return _tag("path", d=area, class_=f"area {line.tone}") + _tag("path", d=path, class_=f"curve {line.tone}")
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    drawn = _tag("path", d=path, class_=f"{'faint' if line.kind == 'faint' else 'curve'} {line.tone}")
    if line.kind == "dots" or len(points) == 1:
        drawn += Markup().join(_tag("circle", cx=x, cy=y, r=3 if len(points) < 60 else 2, class_=f"dot {line.tone}") for x, y in points)
    return drawn


def _hovers(lines: Sequence[Line], frame: Frame, y: Axis, area: tuple[Scale, float, float]) -> list[Markup]:
    """Invisible columns that show a line and the values at that place under the pointer."""
    across, top, bottom = area
    shown = [line for line in lines if line.points]
    longest = max(shown, key=lambda line: len(line.points))
    number = min(_HOVERED, max(1, len(longest.points)))
    width = (across.end - across.start) / number
    parts = []
    for column in range(number):
        at = across.start + (column + 0.5) * width
        x = across.low + (at - across.start) / ((across.end - across.start) or 1) * (across.high - across.low)
        values = [(line.name, _nearest(line, x)) for line in shown]
        where = values[shown.index(longest)][1][0] if longest.kind != "steps" else x
        said = [f"{frame.x.name} {frame.x.text(where)}", *(f"{name}: {y.text(value)}" for name, (_, value) in values)]
        cross = _tag("line", x1=across(where), x2=across(where), y1=top, y2=bottom)
        box = _tag("rect", x=at - width / 2, y=top, width=width, height=bottom - top)
        parts.append(_tag("g", box + cross + _tag("title", "\n".join(said)), class_="hover"))
    return parts


def _nearest(line: Line, x: float) -> Point:
    """The point of a line at x: of a step curve the last before it, otherwise the nearest."""
    after = bisect_left(line.points, (x, float("-inf")))
    around = line.points[max(0, after - 1) : after + 1]
    return around[0] if line.kind == "steps" else min(around, key=lambda point: abs(point[0] - x))


def _struck(mark: Mark, x: float, top: float, bottom: float) -> Markup:
    line = _tag("line", x1=x, x2=x, y1=top, y2=bottom)
    return _tag("g", line + _symbol(mark.shape, x, top - 6) + _tag("title", mark.text), class_=f"mark {mark.tone}")


def _shape(mark: Mark, across: Scale, middle: float) -> Markup:
    x = across(mark.at)
    if mark.shape in ("bar", "hollow"):
        end = across(mark.until) if mark.until is not None else x
        width = max(3.0, end - x)
        drawn = _tag("rect", x=min(x, across.end - width), y=middle - 7, width=width, height=14, rx=1.5, class_=mark.shape)
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


def _apart(marks: Sequence[Mark], across: Scale) -> list[Mark]:
    """Marks that can be told from each other: of one kind within three pixels the first stands for all, and says how many they are."""
    groups: list[list[Mark]] = []
    for mark in marks:
        last = groups[-1][0] if groups else None
        if last and (last.tone, last.shape) == (mark.tone, mark.shape) and across(mark.at) - across(last.at) < _NEAR:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return [_together(group) for group in groups]


def _together(group: list[Mark]) -> Mark:
    first, last = group[0], group[-1]
    if len(group) == 1:
        return first
    return Mark(first.at, first.tone, f"{len(group)} here, the first: {first.text}", first.shape, last.until)


def _drawing(said: str, width: int, height: int, parts: Sequence[Markup]) -> Markup:
    return _tag("svg", Markup().join(parts), viewBox=f"0 0 {width} {height}", role="img", aria_label=said)


def _tag(name: str, content: str | Markup = "", **attributes: Any) -> Markup:
    """One element; content that is no `Markup` is escaped. `class_` is class, `text_anchor` is text-anchor."""
    written = []
    for key, value in attributes.items():
        text = f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value
        written.append(f' {key.rstrip("_").replace("_", "-")}="{escape(text)}"')
    return Markup(f"<{name}{''.join(written)}>{escape(content)}</{name}>")
