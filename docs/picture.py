"""Draws `docs/architecture.svg` from the code: every room (folder) of `ray_app` by its layer, an arrow where one
imports from another.

Of the imports only those are drawn that no longer way says already: where A imports B and C, and B imports C, the arrow
from A to C is left out. Layers come from the first contract in `pyproject.toml`, sentences from the rooms' docstrings.
`make picture` runs it.
"""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib
from html import escape
from itertools import pairwise
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "architecture.svg"
_WIDTH, _BOX, _HEIGHT, _ROW, _TOP, _GAP = 1000, 164, 64, 108, 20, 32
_STYLE = """
  rect { fill: #fff; stroke: #4a5a6a; stroke-width: 1.2 }
  path { fill: none; stroke: #8a9aaa; stroke-width: 1.2; marker-end: url(#tip) }
  text { font-family: system-ui, sans-serif; text-anchor: middle; fill: #1a2a3a }
  .name { font-size: 15px; font-weight: 600 }
  .says { font-size: 11px; fill: #4a5a6a }
"""


def layers() -> list[list[str]]:
    """The rooms of each layer, from the top."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    [contract] = [c for c in tool["importlinter"]["contracts"] if c["type"] == "layers"]
    found = [
        [room for room in layer.split(" | ") if (ROOT / "ray_app" / room).is_dir()] for layer in contract["layers"]
    ]
    return [rooms for rooms in found if rooms]


def imports(rooms: list[str]) -> list[tuple[str, str]]:
    """Who imports from whom, without what follows from other imports."""
    graph = grimp.build_graph("ray_app", cache_dir=None)
    found = {
        room: {
            other
            for other in rooms
            if other != room
            and graph.direct_import_exists(importer=f"ray_app.{room}", imported=f"ray_app.{other}", as_packages=True)
        }
        for room in rooms
    }
    reached: dict[str, set[str]] = {}
    for room in reversed(rooms):  # from the bottom
        reached[room] = found[room].union(*(reached[other] for other in found[room]))
    return [(a, b) for a in rooms for b in rooms if b in found[a] and not any(b in reached[c] for c in found[a])]


def sentence(room: str) -> str:
    """The beginning of what a room says of itself."""
    text = ast.get_docstring(ast.parse((ROOT / "ray_app" / room / "__init__.py").read_text())) or ""
    return re.split(r"[:;,.](?:\s|$)", text.replace("`", ""))[0]


def svg() -> str:
    """The picture."""
    rows = layers()
    place = {room: (_left(len(row), at), y) for y, row in enumerate(rows) for at, room in enumerate(row)}
    arrows = imports([room for row in rows for room in row])
    lines = [f'<path d="{_way(rows, place, arrows, arrow)}"/>' for arrow in arrows]
    boxes = [_box(room, x, _TOP + y * _ROW) for room, (x, y) in place.items()]
    height = 2 * _TOP + _ROW * (len(rows) - 1) + _HEIGHT
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img"'
            f' aria-labelledby="title">',
            '<title id="title">The rooms of ray_app by layer; an arrow leads from a room to one that it imports'
            " from</title>",
            f"<style>{_STYLE}</style>",
            f'<defs>{tip}<path d="M0 0 8 4 0 8z" style="fill: #8a9aaa; stroke: none; marker-end:'
            f' none"/></marker></defs>',
            f'<rect width="{_WIDTH}" height="{height}" style="fill: #f6f8fa; stroke: none"/>',
            *lines,
            *boxes,
            "</svg>\n",
        ]
    )


def _left(count: int, at: int) -> float:
    """Where a box begins in a row of so many."""
    return (_WIDTH - count * _BOX - (count - 1) * _GAP) / 2 + at * (_BOX + _GAP)


def _box(room: str, x: float, y: float) -> str:
    said = textwrap.wrap(sentence(room), 26)[:3]
    text = "".join(
        f'<text class="says" x="{x + _BOX / 2:g}" y="{y + 34 + 12 * i:g}">{escape(s)}</text>'
        for i, s in enumerate(said)
    )
    name = f'<text class="name" x="{x + _BOX / 2:g}" y="{y + 18:g}">{room}</text>'
    return f'<rect x="{x:g}" y="{y:g}" width="{_BOX}" height="{_HEIGHT}" rx="6"/>{name}{text}'


def _way(
    rows: list[list[str]], place: dict[str, tuple[float, int]], arrows: list[tuple[str, str]], arrow: tuple[str, str]
) -> str:
    """A line from the bottom of a box to the top of another, which passes the rows between them where there is room."""
    upper, lower = arrow
    (x, top), (end, bottom) = place[upper], place[lower]
    x += _port([b for a, b in arrows if a == upper], lower, place)
    end += _port([a for a, b in arrows if b == lower], upper, place)
    points = [(x, _TOP + top * _ROW + _HEIGHT)]
    for y in range(top + 1, bottom):
        count = len(rows[y])
        free = [_left(count, at) - _GAP / 2 for at in range(count + 1)]
        straight = x + (end - x) * (y - top) / (bottom - top)
        through = min(free, key=lambda gap: (abs(gap - straight), gap)) + 4 * (arrows.index(arrow) % 7 - 3)
        points += [(through, _TOP + y * _ROW - 6), (through, _TOP + y * _ROW + _HEIGHT + 6)]
    points.append((end, _TOP + bottom * _ROW))
    way = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        bend = (y1 - y0) / 2
        way += f" C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1:.1f}"
    return way


def _port(others: list[str], other: str, place: dict[str, tuple[float, int]]) -> float:
    """Where on a side of a box one of its lines is, so that they lie as the boxes at their other ends."""
    return _BOX * (sorted(others, key=lambda room: place[room]).index(other) + 1) / (len(others) + 1)


if __name__ == "__main__":
    PICTURE.write_text(svg())
