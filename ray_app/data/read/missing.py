"""Missing values in rows as they are stored: they never become numbers, so a row that has one is a bad row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_REASON = "column {!r} has {}; fill it or drop the row before training"
_WHOLE, _INSIDE = "no value", "a missing value inside its value"


def missing_reasons(table: pa.Table) -> dict[int, str]:
    """The rows of a table that have a missing value in any column, also inside a list or an object, each with the reason."""
    found: dict[int, str] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if not any(map(_has_missing, column.chunks)):
            continue
        for row, what in _missing_rows(column):
            found.setdefault(row, _REASON.format(name, what))
    return found


def usable_rows(count: int, reasons: dict[int, str]) -> npt.NDArray[np.bool_]:
    """Which of some rows have no reason against them, shape (count,)."""
    usable = np.ones(count, np.bool_)
    usable[list(reasons)] = False
    return usable


def _has_missing(values: pa.Array) -> bool:
    kind = values.type
    if values.null_count:
        return True
    if isinstance(values, pa.ExtensionArray):
        return _has_missing(values.storage)
    if pa.types.is_struct(kind):
        return any(_has_missing(values.field(i)) for i in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _has_missing(values.flatten())
    if pa.types.is_dictionary(kind):
        return bool(values.dictionary.null_count) and bool(values.dictionary_decode().null_count)
    return pa.types.is_nested(kind) and any(True for _ in _missing_rows(values))


def _missing_rows(column: pa.ChunkedArray | pa.Array) -> Iterator[tuple[int, str]]:
    """The rows that have a missing value; looks at each."""
    is_valid = column.is_valid().to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(~is_valid).tolist():
        yield row, _WHOLE
    kind = column.type.storage_type if isinstance(column.type, pa.ExtensionType) else column.type
    if pa.types.is_nested(kind) or pa.types.is_dictionary(kind):
        for row in np.flatnonzero(is_valid).tolist():
            if _holds_none(column[row].as_py()):
                yield row, _INSIDE if pa.types.is_nested(kind) else _WHOLE


def _holds_none(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_none, value.values()))
    return any(map(_holds_none, value)) if isinstance(value, list | tuple) else value is None
