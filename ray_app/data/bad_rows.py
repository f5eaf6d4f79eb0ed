"""Decoding in spite of rows that cannot be decoded: they are found by halving, and put as zeros with the reason beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_app.data.columns import ArraySpec, spec_like

REASON = "__reason__"
"""Column of decoded tables that says why a row could not be decoded; null where it could. Only where bad rows are skipped."""
_LONGEST = 500

Rows = dict[str, npt.NDArray]
Decode = Callable[[dict[str, Any]], Rows]


def decode_into(decode: Decode, rows: dict[str, Any], into: Rows) -> None:
    """Decodes rows.

    Args:
        decode: See `Task.decode`.
        rows: What it gets.
        into: Where each field goes, (rows, ...).

    Raises:
        ValueError: They decode to something else.
        Exception: What `decode` raises.
    """
    part = decode(rows)
    if part.keys() != into.keys() or any(_looks(part[name]) != _looks(values) for name, values in into.items()):
        found, expected = ({name: _looks(values) for name, values in side.items()} for side in (part, into))
        raise ValueError(f"it decodes to {found}, other rows to {expected}")
    for name, values in part.items():
        into[name][:] = values


def decode_around(decode: Decode, rows: dict[str, Any], count: int, into: Rows) -> list[str | None]:
    """Decodes rows of which some may be bad, which become zeros; see `decode_into`.

    Args:
        decode: See `Task.decode`.
        rows: What it gets.
        count: How many rows that is.
        into: Where each field goes, (count, ...).

    Returns:
        For each row why it is bad, or None.

    Raises:
        ImportError: This process cannot decode any row.
    """
    reasons: list[str | None] = [None] * count
    todo = [(0, count)]
    while todo:
        low, high = todo.pop()
        places = {name: values[low:high] for name, values in into.items()}
        try:
            decode_into(decode, {name: values[low:high] for name, values in rows.items()}, places)
        except ImportError:
            raise
        except Exception as error:
            if high - low > 1:
                todo += [(low, (low + high) // 2), ((low + high) // 2, high)]
                continue
            reasons[low] = (str(error) or type(error).__name__)[:_LONGEST]
            for values in places.values():
                values[:] = np.zeros((), values.dtype)
    return reasons


def _looks(values: npt.NDArray) -> tuple[int, ArraySpec]:
    return len(values), spec_like(values)


def reasons_in(table: pa.Table, positions: npt.NDArray[np.int64]) -> dict[int, str]:
    """The bad rows of a decoded table by their manifest positions, with the reasons; `positions` has those of all rows."""
    if REASON not in table.column_names:
        return {}
    column = table.column(REASON)
    bad = np.flatnonzero(column.is_valid().to_numpy())
    return {int(positions[i]): column[int(i)].as_py() for i in bad} if len(bad) else {}
