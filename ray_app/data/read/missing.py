"""Missing values in rows as they are stored: they never become numbers, so a row that has one is a bad row."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_REASON = "column {!r} has {}; fill it or drop the row before training"
_WHOLE, _INSIDE = "no value", "a missing value inside its value"


def missing_reasons(table: pa.Table) -> dict[int, str]:
    """The rows of a table that have a missing value in any column, also inside a list or an object, each with the reason."""
    reasons: dict[int, str] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        first = 0
        for chunk in column.chunks:
            if _has_missing(chunk):
                has_value = chunk.is_valid().to_numpy(zero_copy_only=False)
                for row in np.flatnonzero(_missing_mask(chunk)).tolist():
                    reason = _REASON.format(name, _INSIDE if has_value[row] and pa.types.is_nested(_storage_type(chunk)) else _WHOLE)
                    reasons.setdefault(first + row, reason)
            first += len(chunk)
    return reasons


def usable_rows(count: int, reasons: dict[int, str]) -> npt.NDArray[np.bool_]:
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
