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

Decode = Callable[[dict[str, Any]], dict[str, npt.NDArray]]


def decode_around(
    decode: Decode, rows: dict[str, Any], count: int, fields: dict[str, ArraySpec]
) -> tuple[dict[str, npt.NDArray], list[str | None]]:
    """Decodes rows of which some may be bad.

    Args:
        decode: See `Task.decode`.
        rows: What it gets.
        count: How many rows that is.
        fields: What a decoded row looks like; a row that looks different is bad too.

    Returns:
        The fields, each (count, ...), zeros for a bad row; and for each row why it is bad, or None.
    """
    found = {name: np.zeros((count, *spec.shape), np.dtype(spec.dtype)) for name, spec in fields.items()}
    reasons: list[str | None] = [None] * count
    todo = [(0, count)]
    while todo:
        low, high = todo.pop()
        try:
            part = decode({name: values[low:high] for name, values in rows.items()})
            _compare(part, high - low, fields)
        except Exception as error:
            if high - low == 1:
                reasons[low] = (str(error) or type(error).__name__)[:_LONGEST]
            else:
                todo += [(low, (low + high) // 2), ((low + high) // 2, high)]
            continue
        for name, values in part.items():
            found[name][low:high] = values
    return found, reasons


def _compare(part: dict[str, npt.NDArray], count: int, fields: dict[str, ArraySpec]) -> None:
    """Holds decoded rows against what they should look like.

    Raises:
        ValueError: They look different.
    """
    looks = {name: spec_like(values) for name, values in part.items()}
    if looks != fields or any(len(values) != count for values in part.values()):
        raise ValueError(f"it decodes to {looks}, other rows to {fields}")


def reasons_in(table: pa.Table, positions: npt.NDArray[np.int64]) -> dict[int, str]:
    """The bad rows of a decoded table by their manifest positions, with the reasons; `positions` has those of all rows."""
    if REASON not in table.column_names:
        return {}
    column = table.column(REASON)
    bad = np.flatnonzero(column.is_valid().to_numpy())
    return {int(positions[i]): column[int(i)].as_py() for i in bad} if len(bad) else {}
