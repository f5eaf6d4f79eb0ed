"""Decoding in spite of rows that cannot be decoded: they are found by halving, and put as zeros with the reason beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_app.data.dataset.arrays import ArraySpec, spec_like
from ray_app.task.own_code import refusal
from ray_app.task.rows.ragged import Arrays, Field, Ragged, joined

REASON = "__reason__"
"""Column of decoded tables that says why a row could not be decoded; null where it could. Only where bad rows are skipped."""
KEYS = "__keys__"
"""Beside the columns of rows that are decoded another way in every epoch: their keys, int64, shape (rows,)."""
_LONGEST = 500

Decode = Callable[[dict[str, Any]], Arrays]


def decode_all(decode: Decode, rows: dict[str, Any], count: int, fields: dict[str, ArraySpec]) -> dict[str, Field]:
    """Decodes rows.

    Args:
        decode: See `Task.decode`.
        rows: What it gets.
        count: How many rows that is.
        fields: What a decoded row looks like.

    Returns:
        Each field, (count, ...).

    Raises:
        ValueError: They decode to something else.
        Exception: What `decode` raises.
    """
    decoded = decode(rows)
    found = {name: (len(values), spec_like(values)) for name, values in decoded.items()}
    expected = {name: (count, spec) for name, spec in fields.items()}
    if found != expected:
        raise ValueError(f"it decodes to {found}, other rows to {expected}")
    return {name: decoded[name] for name in fields}


def decode_around(
    decode: Decode, rows: dict[str, Any], count: int, fields: dict[str, ArraySpec]
) -> tuple[dict[str, Field], list[str | None]]:
    """Decodes rows of which some may be bad, which become zeros; see `decode_all`.

    Returns:
        Each field, (count, ...), and for each row why it is bad, or None.

    Raises:
        ImportError: This process cannot decode any row.
    """
    if not count:
        return {name: _empty(spec)[:0] for name, spec in fields.items()}, []
    reasons: list[str | None] = [None] * count
    good: dict[int, dict[str, Field]] = {}
    todo = [(0, count)]
    while todo:
        low, high = todo.pop()
        try:
            part = decode_all(decode, {name: values[low:high] for name, values in rows.items()}, high - low, fields)
        except ImportError:
            raise
        except Exception as error:
            if high - low > 1:
                todo += [(low, (low + high) // 2), ((low + high) // 2, high)]
            else:
                reasons[low] = refusal(error)[:_LONGEST]
            continue
        if high - low == count:
            return part, reasons
        good[low] = part
    parts = []
    for low in range(count):
        if reasons[low] is not None:
            parts.append({name: _empty(spec) for name, spec in fields.items()})
        elif low in good:
            parts.append(good[low])
    return {name: joined([part[name] for part in parts]) for name in fields}, reasons


def with_bad_rows(
    decoded: dict[str, Field], reasons: list[str | None], bad: dict[int, str], fields: dict[str, ArraySpec]
) -> tuple[dict[str, Field], list[str | None]]:
    """Puts rows that were left out of decoding back into their places, as zeros.

    Args:
        decoded: The fields of the other rows, in their order.
        reasons: For each of these, why it is bad, or None.
        bad: The reasons of the rows to put back, by their place.
        fields: What a decoded row looks like.

    Returns:
        As `decode_around`.
    """
    parts, whole, low = list[dict[str, Field]](), list(reasons), 0
    for before, place in enumerate(sorted(bad)):
        whole.insert(place, bad[place][:_LONGEST])
        high = place - before
        parts += [{name: values[low:high] for name, values in decoded.items()}, {name: _empty(spec) for name, spec in fields.items()}]
        low = high
    parts.append({name: values[low:] for name, values in decoded.items()})
    return {name: joined([part[name] for part in parts]) for name in fields}, whole


def _empty(spec: ArraySpec) -> Field:
    """One row of zeros, or of no length."""
    if spec.padding is not None:
        return Ragged(np.empty((0, *spec.shape), spec.dtype), np.zeros(2, np.int64), *spec.padding)
    return np.zeros((1, *spec.shape), np.dtype(spec.dtype))


def reasons_in(table: pa.Table, positions: npt.NDArray[np.int64]) -> dict[int, str]:
    """The bad rows of a decoded table by their manifest positions, with the reasons; `positions` has those of all rows."""
    if REASON not in table.column_names:
        return {}
    column = table.column(REASON)
    bad = np.flatnonzero(column.is_valid().to_numpy())
    return {int(positions[i]): column[int(i)].as_py() for i in bad} if len(bad) else {}
