"""Compares two files of `benchmarks/all.py`: which ratios have changed by more than the machine's noise.

The noise of a table is the spread of its null, in which the base is measured against itself, in both files.

python benchmarks/compare.py before.json after.json     # exit code 1 if a ratio has risen
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

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
    """Returns the ratios of CPU time by title and side, the later ones where a title was measured twice."""
    ratios = {}
    for line in path.read_text().splitlines():
        table = json.loads(line)
        null = table["ratios"][f"{table['base']} {NULL}"]["cpu"]
        noise = max(abs(ratio - 1) for ratio in null)
        for side, values in table["ratios"].items():
            if side != table["base"] and not side.endswith(f" {NULL}"):
                ratios[table["title"], side] = Ratios(median(values["cpu"]), noise)
    return ratios


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
