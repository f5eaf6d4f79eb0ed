"""Bad rows: rows that cannot be decoded, and rows that have a missing value.

Decoding locates the rows that fail by bisection. With `data.on_bad_row: skip` a bad row becomes zeros in the decoded
table, and its reason goes into the column `REASON`. A missing value in a stored row never becomes a number, so a row
that has one is bad before it is decoded. Arrow and Ray Data end at the first error and do not name its row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ray_app.data.arrays import ArraySpec, is_list, spec_of_values
from ray_app.task.fields import OptionalColumn
from ray_app.task.ragged import Arrays, Field, Ragged, concat_fields
from ray_app.task.user_code import bisect_rows, row_error_reason

REASON = "__reason__"
"""Column of decoded tables with the reason why a row could not be decoded; null for a good row.

Tables have it only if bad rows are skipped.
"""
KEYS = "__keys__"
"""Entry in the rows for a task that decodes differently in every epoch: the keys of the rows, int64, shape (rows,)."""
_MAX_REASON_CHARS = 500

Decode = Callable[[dict[str, Any]], Arrays]


def decode_all(decode: Decode, rows: dict[str, Any], count: int, fields: dict[str, ArraySpec]) -> dict[str, Field]:
    """Decodes rows to fields, each (count, ...); raises ValueError if they are other than `fields`."""
    decoded = decode(rows)
    actual = {name: (len(values), spec_of_values(values)) for name, values in decoded.items()}
    expected = {name: (count, spec) for name, spec in fields.items()}
    if actual != expected:
        raise ValueError(f"the row decodes to {actual}, other rows to {expected}")
    return {name: decoded[name] for name in fields}


def decode_good_rows(
    decode: Decode, rows: dict[str, Any], count: int, fields: dict[str, ArraySpec]
) -> tuple[dict[str, Field], list[str | None]]:
    """Decodes rows, locates the bad ones among them by bisection and makes them zeros; see `decode_all`.

    Returns the fields, and for each row the reason why it is bad, or None. Raises ImportError where no row can be
    decoded.
    """
    if not count:
        return {name: zero_row(spec)[:0] for name, spec in fields.items()}, []
    reasons: list[str | None] = [None] * count
    parts = []
    for low, high, part in bisect_rows(
        count, lambda low, high: decode_all(decode, {n: rows[n][low:high] for n in rows}, high - low, fields)
    ):
        if isinstance(part, ImportError):
            raise part
        if isinstance(part, Exception):
            reasons[low] = row_error_reason(part)[:_MAX_REASON_CHARS]
            parts.append({name: zero_row(spec) for name, spec in fields.items()})
        elif high - low == count:
            return part, reasons
        else:
            parts.append(part)
    return {name: concat_fields([part[name] for part in parts]) for name in fields}, reasons


def insert_bad_rows(
    decoded: dict[str, Field], reasons: list[str | None], bad: dict[int, str], fields: dict[str, ArraySpec]
) -> tuple[dict[str, Field], list[str | None]]:
    """Inserts rows that were left out of decoding as zeros; returns what `decode_good_rows` does for all rows."""
    order = np.full(len(reasons) + len(bad), -1)
    order[usable_mask(len(order), bad)] = np.arange(len(reasons))
    # The index -1 is that of the row of zeros at the end.
    whole = {name: concat_fields([decoded[name], zero_row(spec)])[order] for name, spec in fields.items()}
    return whole, [
        bad[row][:_MAX_REASON_CHARS] if index < 0 else reasons[index] for row, index in enumerate(order.tolist())
    ]


def zero_row(spec: ArraySpec) -> Field:
    """Returns a field with one row of zeros, or with one row of length 0 where rows have different lengths."""
    if spec.padding is not None:
        return Ragged(np.empty((0, *spec.shape), spec.dtype), np.zeros(2, np.int64), *spec.padding)
    return np.zeros((1, *spec.shape), np.dtype(spec.dtype))


def read_reasons(table: pa.Table, positions: npt.NDArray[np.int64]) -> dict[int, str]:
    """Returns the reasons of the bad rows of a decoded table by their manifest positions, shape (rows,)."""
    if REASON not in table.column_names:
        return {}
    column = table.column(REASON)
    bad = np.flatnonzero(column.is_valid().to_numpy())
    return {int(positions[i]): column[int(i)].as_py() for i in bad} if len(bad) else {}


_REASON = "column {!r} has {}; fill it or drop the row before training"
_NO_VALUE, _MISSING_INSIDE = "no value", "a missing value inside a list"


def find_missing_values(table: pa.Table, columns: Iterable[str] = ()) -> dict[int, str]:
    """Returns the reason for each row with a missing value, also inside a list or an object, by its index.

    Columns of the type `OptionalColumn` are left out.
    """
    reasons: dict[int, str] = {}
    optional = {name for name in columns if isinstance(name, OptionalColumn)}
    table = table.drop_columns([name for name in table.column_names if name in optional]) if optional else table
    for name, column in zip(table.column_names, table.columns, strict=True):
        first = 0
        for chunk in column.chunks:
            if _has_missing(chunk):
                has_value = chunk.is_valid().to_numpy(zero_copy_only=False)
                for row in np.flatnonzero(_missing_mask(chunk)).tolist():
                    is_inside = has_value[row] and pa.types.is_nested(chunk.type)
                    reason = _REASON.format(name, _MISSING_INSIDE if is_inside else _NO_VALUE)
                    reasons.setdefault(first + row, reason)
            first += len(chunk)
    return reasons


def usable_mask(count: int, reasons: dict[int, str]) -> npt.NDArray[np.bool_]:
    """Returns a mask of the rows that have no reason against them, shape (count,)."""
    usable = np.ones(count, np.bool_)
    usable[list(reasons)] = False
    return usable


def _has_missing(values: pa.Array) -> bool:
    """Returns whether any row has a missing value, by the null counts of the arrays where they suffice."""
    kind = values.type
    if values.null_count:
        return True
    if pa.types.is_struct(kind):
        return any(_has_missing(values.field(i)) for i in range(kind.num_fields))
    if is_list(kind):
        return _has_missing(values.flatten())
    if pa.types.is_dictionary(kind):
        return bool(values.dictionary.null_count) and bool(values.dictionary_decode().null_count)
    return pa.types.is_nested(kind) and bool(_missing_mask(values).any())


def _missing_mask(values: pa.Array) -> npt.NDArray[np.bool_]:
    """Returns a mask of the rows that have a missing value, shape (rows,)."""
    kind = values.type
    mask: npt.NDArray[np.bool_] = ~values.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_struct(kind):
        for i in range(kind.num_fields):
            mask |= _missing_mask(values.field(i))
    elif is_list(kind):
        # `flatten` gives the items of the lists that are present: a missing list has none.
        rows = np.flatnonzero(~mask)
        items = _missing_mask(values.flatten())
        lengths = pc.list_value_length(values.drop_null()).to_numpy(zero_copy_only=False)
        mask[np.repeat(rows, lengths)[items]] = True
    elif pa.types.is_dictionary(kind):
        mask |= ~values.dictionary_decode().is_valid().to_numpy(zero_copy_only=False)
    elif pa.types.is_nested(kind):
        mask |= np.array([_has_none(value) for value in values.to_pylist()], np.bool_)
    return mask


def _has_none(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_none, value.values()))
    return any(map(_has_none, value)) if isinstance(value, list | tuple) else value is None
