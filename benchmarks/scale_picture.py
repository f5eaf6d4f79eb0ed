"""The picture of `benchmarks/scale.py`: measurements by the number of workers, both axes by powers of ten."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

_LINES = {
    "rendezvous, % of a core": "#1f5fa8",
    "forming, s of CPU": "#b4541a",
    "table of a step, ms of a rank": "#2f7d4f",
    "record, ms of rank 0 per step": "#7a4a9a",
    "plan of an epoch, ms of a rank": "#6a6a2a",
}
_WIDTH, _HEIGHT = 860, 440
_LEFT, _RIGHT = 70, 250
_TOP, _BOTTOM = 24, 56
_STYLE = """
  text { font-family: system-ui, sans-serif; font-size: 13px; fill: #1a2a3a }
  .axis { stroke: #c4ccd4; stroke-width: 1 }
  .small { font-size: 12px; fill: #4a5a6a }
"""


def draw(figures_by_size: Mapping[int, Mapping[str, float]]) -> str:
    """Returns the picture as SVG."""
    low = math.floor(math.log10(min(figures[name] for figures in figures_by_size.values() for name in _LINES)))
    high = math.ceil(math.log10(max(figures[name] for figures in figures_by_size.values() for name in _LINES)))
    first, last = math.log10(min(figures_by_size)), math.log10(max(figures_by_size))

    def x(workers: float) -> float:
        return _LEFT + (math.log10(workers) - first) / max(last - first, 1e-9) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (high - math.log10(value)) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        "<title>What a run costs by the number of its workers</title>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
    ]
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts += [f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>']
        parts += [f'<text class="small" x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>']
    for workers in figures_by_size:
        at = x(workers)
        parts += [f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>']
        parts += [
            f'<text class="small" x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{workers:,}</text>'
        ]
    parts += [f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}" y="{_HEIGHT - 10}" text-anchor="middle">workers</text>']
    ends = []
    for name, colour in _LINES.items():
        points = " ".join(f"{x(workers):.1f},{y(figures[name]):.1f}" for workers, figures in figures_by_size.items())
        parts += [f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>']
        ends.append((y(figures_by_size[max(figures_by_size)][name]), name, colour))
    label_y = -math.inf
    for at, name, colour in sorted(ends):
        # Labels must not overlap.
        label_y = max(at, label_y + 18)
        parts += [
            f'<text x="{_WIDTH - _RIGHT + 10}" y="{label_y + 4:.1f}" style="fill: {colour}">{escape(name)}</text>'
        ]
    return "\n".join([*parts, "</svg>", ""])
