"""Which server holds which part of which variable: a pure function of shapes, so that everyone computes it alike.

As TensorFlow's `MinSizePartitioner`: a variable is split along its first dimension into at most one part per server, none of them smaller
than a given size. The parts then go to servers, the largest first, each to the one that holds least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, prod

from torch import Tensor

_ALIGNED = 64
"""Parts are multiples of so many values, so that vector instructions treat each value as they would in the whole variable."""


@dataclass(frozen=True, order=True)
class Strip:
    """Rows [low, high) along the first dimension of a variable; one without dimensions is one row."""

    variable: int
    low: int
    high: int

    def of(self, value: Tensor) -> Tensor:
        """This part of a tensor that has the variable's shape, sharing its memory."""
        return value[self.low : self.high] if value.ndim else value


def strips_of(variable: int, shape: Sequence[int], item_bytes: int, most: int, min_bytes: int) -> list[Strip]:
    """Splits a variable.

    Args:
        variable: Its number.
        shape: Its shape.
        item_bytes: Bytes of one value.
        most: Most parts.
        min_bytes: Fewest bytes of a part, unless the whole has fewer.
    """
    rows, row = (shape[0], prod(shape[1:])) if shape else (1, 1)
    aligned = _ALIGNED // gcd(_ALIGNED, max(1, row))
    count = max(1, min(most, rows * row * item_bytes // min_bytes, rows // aligned))
    ends = [rows * i // count // aligned * aligned for i in range(count)] + [rows]
    return [Strip(variable, low, high) for low, high in pairwise(ends)]


def partition(shapes: Sequence[Sequence[int]], item_bytes: int, servers: int, min_bytes: int) -> list[list[Strip]]:
    """Deals the parts of all variables to servers.

    Args:
        shapes: Of the variables.
        item_bytes: Bytes of one value.
        servers: How many.
        min_bytes: See `strips_of`.

    Returns:
        What each server holds, in the order of variables and rows; nothing for servers that are too many.
    """
    weight = {p: strip_bytes(p, shapes, item_bytes) for i, s in enumerate(shapes) for p in strips_of(i, s, item_bytes, servers, min_bytes)}
    held: list[list[Strip]] = [[] for _ in range(servers)]
    load = [0] * servers
    for strip in sorted(weight, key=lambda p: (-weight[p], p)):
        least = load.index(min(load))
        held[least].append(strip)
        load[least] += weight[strip]
    return [sorted(strips) for strips in held]


def strip_bytes(strip: Strip, shapes: Sequence[Sequence[int]], item_bytes: int) -> int:
    """Bytes of a part."""
    return (strip.high - strip.low) * prod(shapes[strip.variable][1:]) * item_bytes
