"""Axes: where ticks stand and how numbers are written. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_TIMES_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200]
_DAY_S = 86400


def ticks(low: float, high: float, most: int) -> list[float]:
    """At most about `most` round numbers from `low` to `high`."""
    if high <= low:
        return [low]
    raw = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def whole_ticks(low: float, high: float, most: int) -> list[float]:
    """The same, whole numbers only."""
    found = sorted({float(round(tick)) for tick in ticks(low, high, most)})
    return [tick for tick in found if low <= tick <= high]


def time_ticks(low: float, high: float, most: int) -> list[float]:
    """The same for seconds: whole minutes, hours and days where the span is long."""
    raw = (high - low) / max(1, most)
    if raw < 1:
        return ticks(low, high, most)
    step: float = next((t for t in _TIMES_S if t >= raw), 0) or _DAY_S * math.ceil(raw / _DAY_S)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten, with 2 and 5 times these where there is room."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = max(1, math.ceil(len(powers) / most))
    parts = (1, 2, 5) if 3 * len(powers) <= most + 2 else (1,)
    found = [m * 10.0**p for p in powers if p % every == 0 for m in parts]
    return [tick for tick in found if low * 0.999 <= tick <= high * 1.001]


def number(value: float) -> str:
    """A number as short as it can be read: `0.0012`, `350`, `12k`, `3.5M`, `1e-06`."""
    size = abs(value)
    if not math.isfinite(value) or size == 0:
        return "0" if size == 0 else str(value)
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scale = 1e3 if letter == "k" else limit
            return f"{value / scale:.4g}{letter}"
    if size < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def seconds(value: float) -> str:
    """A duration: `0 s`, `250 ms`, `42 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    if value < 0:
        return f"-{seconds(-value)}"
    if 0 < value < 1:
        return f"{value * 1e3:.{0 if value >= 0.01 else 1}f} ms"
    if value < 60:
        return f"{value:.3g} s" if value < 10 else f"{value:.0f} s"
    for size, name, inner, inner_name in ((_DAY_S, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if value >= size:
            whole, rest = divmod(round(value / inner) * inner, size)
            return f"{whole:.0f} {name}" + (f" {rest / inner:.0f} {inner_name}" if rest else "")
    raise AssertionError


@dataclass(frozen=True)
class Scale:
    """From values to pixels.

    Args:
        low: Value at `start`.
        high: Value at `end`.
        start: Pixels.
        end: Pixels.
        log: Whether equal distances are equal ratios.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Pixels of a value."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        at = math.log(max(value, self.low)) if self.log else value
        return self.start + (at - low) / ((high - low) or 1.0) * (self.end - self.start)


@dataclass(frozen=True)
class Axis:
    """How one direction of a chart is labelled.

    Args:
        name: What it shows, with its unit.
        place: Chooses the ticks between two values, at most so many.
        text: Writes one.
    """

    name: str
    place: Callable[[float, float, int], list[float]] = ticks
    text: Callable[[float], str] = number


STEPS = Axis("step", whole_ticks, lambda step: f"{step:,.0f}")
TIME = Axis("running time", time_ticks, seconds)
