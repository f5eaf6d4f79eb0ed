"""Compares two files of `benchmarks/all.py`: which ratios have changed by more than the machine's noise.

The noise of a table is the spread of its null, in which the base is measured against itself, in both files. A table
without a null has the largest noise of its file.

python benchmarks/compare.py before.json after.json     # exit code 1 if a ratio has risen
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import NULL


@dataclass(frozen=True)
class Ratios:
    """The ratios of a side to its base.

    Args:
        middle: The median over the rounds.
        noise: The largest distance of a ratio of the null from 1.
    """

    middle: float
    noise: float


def read_ratios(path: Path) -> dict[tuple[str, str], Ratios]:
    """Returns the ratios by title and side, the later ones where a title was measured twice."""
    ratios, tables = {}, [json.loads(line) for line in path.read_text().splitlines()]
    noises = [_noise(table) for table in tables]
    largest = max(filter(None, noises), default=0.0)
    for table, noise in zip(tables, noises, strict=True):
        time = _time(table)
        for side, values in table["ratios"].items():
            if side != table["base"] and not side.endswith(f" {NULL}"):
                ratios[table["title"], side] = Ratios(median(values[time]), largest if noise is None else noise)
    return ratios


def _time(table: dict[str, Any]) -> str:
    """Returns the time that is compared: that of the CPUs, unless it was too short to be measured."""
    return "cpu" if all(ratio > 0 for values in table["ratios"].values() for ratio in values["cpu"]) else "wall"


def _noise(table: dict[str, Any]) -> float | None:
    """Returns the largest distance of the ratios of a table's null from 1; None without a null."""
    nulls = [values[_time(table)] for side, values in table["ratios"].items() if side.endswith(f" {NULL}")]
    return max(abs(ratio - 1) for ratio in nulls[0]) if nulls else None


def change(before: Ratios, after: Ratios) -> str:
    """Returns `higher` or `lower` for a change beyond the noise of both measurements, else `same`."""
    limit = 1 + max(before.noise, after.noise)
    quotient = after.middle / before.middle
    return "higher" if quotient > limit else "lower" if quotient < 1 / limit else "same"


def main() -> None:
    """Prints a line for each ratio that both files have; the exit code is 1 if one has risen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args()
    before, after = read_ratios(options.before), read_ratios(options.after)
    changes = {key: change(before[key], ratios) for key, ratios in after.items() if key in before}
    for (title, side), direction in changes.items():
        old, new = before[title, side], after[title, side]
        noise = max(old.noise, new.noise)
        print(f"{direction:<8}{old.middle:>8.3f} -> {new.middle:.3f}  (noise {noise:.0%})  {side}: {title}")
    for title, side in sorted(before.keys() ^ after.keys()):
        print(f"one file {side}: {title}")
    sys.exit(int("higher" in changes.values()))


if __name__ == "__main__":
    main()
