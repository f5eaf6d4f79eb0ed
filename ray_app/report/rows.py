"""How many rows each logical worker used, and which rows were skipped because they cannot be decoded."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ray_app.record.files import names, read_all
from ray_app.record.paths import RunPaths

_MOST_SHOWN = 20


@dataclass(frozen=True)
class Share:
    """What one logical worker used.

    Args:
        logical_worker: Which.
        rows: Rows of all recorded steps.
        part: Of those of the one that used most.
    """

    logical_worker: int
    rows: int
    part: float


@dataclass(frozen=True)
class Shares:
    """What the logical workers used.

    Args:
        shown: The first of them.
        logical_workers: How many there are.
        least: Fewest rows of one.
        most: Most rows of one.
    """

    shown: list[Share]
    logical_workers: int
    least: int
    most: int


def shares(used: list[int]) -> Shares | None:
    """The rows of every logical worker; None if there is only one, or no step."""
    if len(used) < 2:
        return None
    most = max(used)
    shown = [Share(v, rows, rows / most if most else 0.0) for v, rows in enumerate(used[:_MOST_SHOWN])]
    return Shares(shown, len(used), min(used), most)


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be decoded.

    Args:
        position: In the manifest.
        path: Its file.
        row_group: Number of the row group in the file.
        row: Number of the row in the row group.
        reason: Why.
    """

    position: int
    path: str
    row_group: int
    row: int
    reason: str


@dataclass(frozen=True)
class ReportedBadRows:
    """The rows that a run met and cannot decode.

    Args:
        first: The first of them by position.
        distinct: How many they are.
    """

    first: list[BadRow]
    distinct: int


def read_bad_rows(paths: RunPaths) -> ReportedBadRows:
    """Reads the list that a run keeps of them.

    Raises:
        OSError: The storage does not answer.
    """
    found = sorted(names(paths.bad_rows))
    first = read_all(paths.bad_rows / name for name in found[:_MOST_SHOWN])
    return ReportedBadRows([BadRow(**json.loads(data)) for data in first], len(found))
