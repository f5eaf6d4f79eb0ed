"""Times by which rows are divided: by an ingest (`IngestOptions.split_by`), and into folds (`data.fold_by_time`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ray_app.data.arrays import is_text
from ray_app.errors import DataError
from ray_app.task.user_code import bisect_rows

_OFFSET = r"([zZ]|[+-]\d\d:?\d\d)$"
"""End of a time of ISO 8601 that names its offset from UTC, such as Z or +01:00; dates alone do not match."""

ALLOWED_TIMES = "dates, times (as text in ISO 8601, such as 2026-01-31), and numbers"


def to_times(column: pa.ChunkedArray, name: str) -> npt.NDArray[Any]:
    """Returns times of text as microseconds, in UTC unless they name an offset, and other values as their numbers.

    Raises DataError for a column of another type, which it calls `name`; the result is of shape (rows,).
    """
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.asarray(column.to_numpy())
    try:
        if is_text(kind):
            return _parse_times(column)
        whole = column.cast(pa.int32()) if pa.types.is_date32(kind) else column
        return np.asarray(whole.cast(pa.int64()).to_numpy())
    except pa.ArrowException as error:
        raise DataError(f"{name} is a column of {kind}: {error}. Allowed are {ALLOWED_TIMES}.") from error


def _parse_times(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Returns texts of ISO 8601 as microseconds; raises ArrowInvalid for another text."""
    has_offset = pc.match_substring_regex(column, _OFFSET)
    times = np.empty(len(column), np.int64)
    for mask, zone in ((has_offset, "UTC"), (pc.invert(has_offset), None)):
        of_form = column.filter(mask).cast(pa.timestamp("us", zone))
        times[mask.to_numpy()] = of_form.cast(pa.int64()).to_numpy()
    return times


def find_no_times(column: pa.ChunkedArray) -> Iterator[tuple[int, str]]:
    """Yields the rows of a column of text that hold no time of ISO 8601, and their values, in their order."""
    # Arrow does not say which value it is.
    for low, _, times in bisect_rows(len(column), lambda low, high: _parse_times(column.slice(low, high - low))):
        if isinstance(times, Exception):
            yield low, str(column[low].as_py())


def merge_counts(
    parts: Sequence[tuple[npt.NDArray[Any], npt.NDArray[np.int64]]],
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Returns the different values of all parts, sorted, and the number of rows of each."""
    # An empty array would change the type of the others.
    parts = [part for part in parts if len(part[0])] or list(parts[:1])
    different, indices = np.unique(np.concatenate([values for values, _ in parts]), return_inverse=True)
    total = np.zeros(len(different), np.int64)
    np.add.at(total, indices, np.concatenate([counts for _, counts in parts]))
    return different, total


def find_first_eval_time(
    counts: Sequence[tuple[npt.NDArray[Any], npt.NDArray[np.int64]]], name: str, fraction: float
) -> int | float:
    """Returns the least value of the column `name` of the rows that go to `eval`, nearest to the wanted fraction.

    Args:
        counts: The different values and their rows, of each input split.
    """
    times, rows = merge_counts(counts)
    if not len(times):
        raise DataError(
            f"split_by {name!r} has no value in any row that is a date, a time or a number. Name another"
            " column, or ingest without --on_bad_row skip to see the first such row."
        )
    if len(times) < 2:
        raise DataError(
            f"split_by {name!r} has the same value in all rows, and such rows stay together. Name another column."
        )
    return times[find_cut(rows, fraction * rows.sum())].item()


def find_cut(rows: npt.NDArray[np.int64], later_rows: float) -> int:
    """Returns the value, by its index, from which on the rows of all values are nearest to a wanted number.

    It is never the first one, so that rows are left before it.

    Args:
        rows: The number of rows of each value, in ascending order, of at least two.
    """
    later = np.cumsum(rows[::-1])[::-1][1:]
    return 1 + int(np.argmin(np.abs(later - later_rows)))
