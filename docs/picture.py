"""Draws `docs/architecture.svg` from the code: every package of `ray_app` in its layer, with an arrow for each import.

An arrow from A to C is left out where arrows lead from A to B and from B to C. The layers come from the first contract
in `pyproject.toml`, the sentences from the docstrings of the packages. `make picture` runs this program.
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
_WIDTH = 1000
_BOX, _HEIGHT = 164, 64
_ROW, _GAP = 108, 32
_TOP = 20
_STYLE = """
  rect { fill: #fff; stroke: #4a5a6a; stroke-width: 1.2 }
  path { fill: none; stroke: #8a9aaa; stroke-width: 1.2; marker-end: url(#tip) }
  text { font-family: system-ui, sans-serif; text-anchor: middle; fill: #1a2a3a }
  .name { font-size: 15px; font-weight: 600 }
  .says { font-size: 11px; fill: #4a5a6a }
"""


def layers() -> list[list[str]]:
    """Returns the packages of each layer, from the top."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    [contract] = [c for c in tool["importlinter"]["contracts"] if c["type"] == "layers"]
    rows = [[name for name in layer.split(" | ") if (ROOT / "ray_app" / name).is_dir()] for layer in contract["layers"]]
    return [row for row in rows if row]


def imports(packages: list[str]) -> list[tuple[str, str]]:
    """Returns the pairs of importing and imported package, without those that follow from other pairs.

    Args:
        packages: All packages, each above those that it imports.
    """
    graph = grimp.build_graph("ray_app", cache_dir=None)
    direct = {
        package: {
            other
            for other in packages
            if other != package
            and graph.direct_import_exists(importer=f"ray_app.{package}", imported=f"ray_app.{other}", as_packages=True)
        }
        for package in packages
    }
    reachable: dict[str, set[str]] = {}
    for package in reversed(packages):
        reachable[package] = direct[package].union(*(reachable[other] for other in direct[package]))
    return [
        (a, b) for a in packages for b in packages if b in direct[a] and not any(b in reachable[c] for c in direct[a])
    ]


def sentence(package: str) -> str:
    """Returns the first clause of a package's docstring."""
    text = ast.get_docstring(ast.parse((ROOT / "ray_app" / package / "__init__.py").read_text())) or ""
    return re.split(r"[:;,.](?:\s|$)", text.replace("`", ""))[0]


def svg() -> str:
    """Returns the text of the SVG file."""
    rows = layers()
    positions = {name: (_left(len(row), column), y) for y, row in enumerate(rows) for column, name in enumerate(row)}
    arrows = imports([name for row in rows for name in row])
    lines = [f'<path d="{_curve(rows, positions, arrows, arrow)}"/>' for arrow in arrows]
    boxes = [_box(name, x, _TOP + y * _ROW) for name, (x, y) in positions.items()]
    height = 2 * _TOP + _ROW * (len(rows) - 1) + _HEIGHT
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img"'
            f' aria-labelledby="title">',
            '<title id="title">The packages of ray_app by layer; an arrow leads from a package to one that it imports'
            "</title>",
            f"<style>{_STYLE}</style>",
            f'<defs>{tip}<path d="M0 0 8 4 0 8z" style="fill: #8a9aaa; stroke: none; marker-end:'
            f' none"/></marker></defs>',
            f'<rect width="{_WIDTH}" height="{height}" style="fill: #f6f8fa; stroke: none"/>',
            *lines,
            *boxes,
            "</svg>\n",
        ]
    )


def _left(count: int, column: int) -> float:
    """Returns the left edge of a box in a row of `count` boxes."""
    return (_WIDTH - count * _BOX - (count - 1) * _GAP) / 2 + column * (_BOX + _GAP)


def _box(package: str, x: float, y: float) -> str:
    lines = textwrap.wrap(sentence(package), 26)[:3]
    text = "".join(
        f'<text class="says" x="{x + _BOX / 2:g}" y="{y + 34 + 12 * i:g}">{escape(s)}</text>'
        for i, s in enumerate(lines)
    )
    name = f'<text class="name" x="{x + _BOX / 2:g}" y="{y + 18:g}">{package}</text>'
    return f'<rect x="{x:g}" y="{y:g}" width="{_BOX}" height="{_HEIGHT}" rx="6"/>{name}{text}'


def _curve(
    rows: list[list[str]],
    positions: dict[str, tuple[float, int]],
    arrows: list[tuple[str, str]],
    arrow: tuple[str, str],
) -> str:
    """Returns the path from the bottom of a box to the top of another; it crosses the rows between them in gaps."""
    upper, lower = arrow
    (x, top), (end, bottom) = positions[upper], positions[lower]
    x += _port([b for a, b in arrows if a == upper], lower, positions)
    end += _port([a for a, b in arrows if b == lower], upper, positions)
    points = [(x, _TOP + top * _ROW + _HEIGHT)]
    for y in range(top + 1, bottom):
        count = len(rows[y])
        gaps = [_left(count, column) - _GAP / 2 for column in range(count + 1)]
        straight = x + (end - x) * (y - top) / (bottom - top)
        through = min(gaps, key=lambda gap: (abs(gap - straight), gap)) + 4 * (arrows.index(arrow) % 7 - 3)
        points += [(through, _TOP + y * _ROW - 6), (through, _TOP + y * _ROW + _HEIGHT + 6)]
    points.append((end, _TOP + bottom * _ROW))
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(points):
        bend = (y1 - y0) / 2
        path += f" C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1:.1f}"
    return path


def _port(others: list[str], other: str, positions: dict[str, tuple[float, int]]) -> float:
    """Returns the offset of a line on a side of its box; lines have the order of the boxes at their other ends."""
    return _BOX * (sorted(others, key=lambda package: positions[package]).index(other) + 1) / (len(others) + 1)


if __name__ == "__main__":
    PICTURE.write_text(svg())
