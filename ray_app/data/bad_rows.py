"""Decoding in spite of rows that cannot be decoded: they are found by halving, and put as zeros with the reason beside
them.

Missing values in rows as they are stored: they never become numbers, so a row that has one is a bad row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ray_app.data.arrays import ArraySpec, spec_of_values
from ray_app.task.ragged import Arrays, Field, Ragged, concat_fields
from ray_app.task.user_code import row_error_reason

REASON = "__reason__"
"""Column of decoded tables that says why a row could not be decoded; null where it could. Only where bad rows are
skipped.
"""
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
    found = {name: (len(values), spec_of_values(values)) for name, values in decoded.items()}
    expected = {name: (count, spec) for name, spec in fields.items()}
    if found != expected:
        raise ValueError(f"it decodes to {found}, other rows to {expected}")
    return {name: decoded[name] for name in fields}


def decode_good_rows(
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
                reasons[low] = row_error_reason(error)[:_LONGEST]
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
    return {name: concat_fields([part[name] for part in parts]) for name in fields}, reasons


def insert_bad_rows(
    decoded: dict[str, Field], reasons: list[str | None], bad: dict[int, str], fields: dict[str, ArraySpec]
) -> tuple[dict[str, Field], list[str | None]]:
    """Puts rows that were left out of decoding back into their places, as zeros.

    Args:
        decoded: The fields of the other rows, in their order.
        reasons: For each of these, why it is bad, or None.
        bad: The reasons of the rows to put back, by their place.
        fields: What a decoded row looks like.

    Returns:
        As `decode_good_rows`.
    """
    parts, whole, low = list[dict[str, Field]](), list(reasons), 0
    for before, place in enumerate(sorted(bad)):
        whole.insert(place, bad[place][:_LONGEST])
        high = place - before
        parts += [
            {name: values[low:high] for name, values in decoded.items()},
            {name: _empty(spec) for name, spec in fields.items()},
        ]
        low = high
    parts.append({name: values[low:] for name, values in decoded.items()})
    return {name: concat_fields([part[name] for part in parts]) for name in fields}, whole


def _empty(spec: ArraySpec) -> Field:
    """One row of zeros, or of no length."""
    if spec.padding is not None:
        return Ragged(np.empty((0, *spec.shape), spec.dtype), np.zeros(2, np.int64), *spec.padding)
    return np.zeros((1, *spec.shape), np.dtype(spec.dtype))


def read_reasons(table: pa.Table, positions: npt.NDArray[np.int64]) -> dict[int, str]:
    """The bad rows of a decoded table by their manifest positions, with the reasons; `positions` has those of
    all rows.
    """
    if REASON not in table.column_names:
        return {}
    column = table.column(REASON)
    bad = np.flatnonzero(column.is_valid().to_numpy())
    return {int(positions[i]): column[int(i)].as_py() for i in bad} if len(bad) else {}


_REASON = "column {!r} has {}; fill it or drop the row before training"
_WHOLE, _INSIDE = "no value", "a missing value inside its value"


def find_missing_values(table: pa.Table) -> dict[int, str]:
    """The rows of a table that have a missing value in any column, also inside a list or an object, each with the
    reason.
    """
    reasons: dict[int, str] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        first = 0
        for chunk in column.chunks:
            if _has_missing(chunk):
                has_value = chunk.is_valid().to_numpy(zero_copy_only=False)
                for row in np.flatnonzero(_missing_mask(chunk)).tolist():
                    reason = _REASON.format(
                        name, _INSIDE if has_value[row] and pa.types.is_nested(_storage_type(chunk)) else _WHOLE
                    )
                    reasons.setdefault(first + row, reason)
            first += len(chunk)
    return reasons


def usable_mask(count: int, reasons: dict[int, str]) -> npt.NDArray[np.bool_]:
    """Which of some rows have no reason against them, shape (count,)."""
    usable = np.ones(count, np.bool_)
    usable[list(reasons)] = False
    return usable


def _storage_type(values: pa.Array) -> pa.DataType:
    return values.type.storage_type if isinstance(values.type, pa.BaseExtensionType) else values.type


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _has_missing(values: pa.Array) -> bool:
    """Whether any row has a missing value; does not look at each where the array itself says that none is missing."""
    kind = values.type
    if values.null_count:
        return True
    if isinstance(kind, pa.BaseExtensionType):
        return _has_missing(values.storage)
    if pa.types.is_struct(kind):
        return any(_has_missing(values.field(i)) for i in range(kind.num_fields))
    if _is_list(kind):
        return _has_missing(values.flatten())
    if pa.types.is_dictionary(kind):
        return bool(values.dictionary.null_count) and bool(values.dictionary_decode().null_count)
    return pa.types.is_nested(kind) and bool(_missing_mask(values).any())


def _missing_mask(values: pa.Array) -> npt.NDArray[np.bool_]:
    """Which rows have a missing value, shape (rows,)."""
    kind = values.type
    mask: npt.NDArray[np.bool_] = ~values.is_valid().to_numpy(zero_copy_only=False)
    if isinstance(kind, pa.BaseExtensionType):
        mask |= _missing_mask(values.storage)
    elif pa.types.is_struct(kind):
        for i in range(kind.num_fields):
            mask |= _missing_mask(values.field(i))
    elif _is_list(kind):
        # A list that is missing itself has no items.
        rows = np.flatnonzero(~mask)
        items = _missing_mask(values.flatten())
        lengths = pc.list_value_length(values.drop_null()).to_numpy(zero_copy_only=False)
        mask[np.repeat(rows, lengths)[items]] = True
    elif pa.types.is_dictionary(kind):
        mask |= ~values.dictionary_decode().is_valid().to_numpy(zero_copy_only=False)
    elif pa.types.is_nested(kind):
        mask |= np.array([_holds_none(value) for value in values.to_pylist()], np.bool_)
    return mask


def _holds_none(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_none, value.values()))
    return any(map(_holds_none, value)) if isinstance(value, list | tuple) else value is None
