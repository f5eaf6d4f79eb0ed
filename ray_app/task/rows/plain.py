"""Columns as a task gets them that decodes nothing itself, or whose configuration says how."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ray_app.task.rows.ragged import Field, Ragged

_OF_LISTS = {np.dtype(kind): np.int64 for kind in ("i1", "i2", "u1", "u2", "u4", "u8", "?")} | {
    np.dtype(kind): np.float32 for kind in ("f2", "f8")
}
"""What numbers in lists become that embeddings, or layers, do not take."""


def plain(values: Any) -> Field:
    """A column of numbers, arrays or lists as read, in types that models are made of.

    Returns:
        Fractions as float32; integers and truth values as int64, (rows,) or ragged, and arrays of them as they are.

    Raises:
        ValueError: It holds something else, or an integer above 2^63 - 1.
    """
    array = values.values if isinstance(values, Ragged) else np.asarray(values)
    if array.dtype.kind not in "fiub":
        raise ValueError("a column holds no numbers, or a missing value; write Task.decode")
    if array.dtype.kind == "f":
        array = np.asarray(array, np.float32)
    elif isinstance(values, Ragged) or array.ndim == 1:
        array = _as_int64(array)
    return replace(values, values=array) if isinstance(values, Ragged) else array


def of_kind(values: Any, kind: str) -> Field:
    """A column as read in types that layers take, and what stays as small as it was.

    Args:
        values: The column.
        kind: What it holds (`ColumnFacts.kind`): numbers become float32, integers int64, lists `Ragged` with integers of 32 or 64 bits or
            fractions of 32; of arrays only fractions of 64 bits become others.

    Raises:
        ValueError: Something in it is missing, or an integer is above 2^63 - 1.
    """
    if kind == "list":
        if isinstance(values, np.ndarray) and values.dtype == np.int64:  # stands in for a target that was not read
            values = Ragged.of(values, np.int64)
        if not isinstance(values, Ragged):
            raise ValueError("a list holds no numbers, or a missing value")
        wanted = _OF_LISTS.get(values.values.dtype)
        if wanted is None:
            return values
        return replace(values, values=_as_int64(values.values) if wanted is np.int64 else values.values.astype(wanted))
    found = np.asarray(values)
    if found.dtype == object:
        raise ValueError("an array has a missing value")
    of_one = {"number": np.float32, "integer": np.int64}.get(kind, np.float32 if found.dtype == np.float64 else None)
    if of_one is np.int64:
        return _as_int64(found)
    return found.astype(of_one, copy=False) if of_one else found


def need_finite(name: str, values: Any) -> None:
    """Refuses fractions that are NaN or infinite.

    Args:
        name: What they are called in a message.
        values: Numbers of any kind, (rows, ...) or ragged.

    Raises:
        ValueError: One is.
    """
    numbers = values.values if isinstance(values, Ragged) else values
    if numbers.dtype.kind == "f" and numbers.size and not np.isfinite(numbers).all():
        raise ValueError(f"{name} is NaN or infinite; correct the value or drop the row")


def _as_int64(values: npt.NDArray) -> npt.NDArray[np.int64]:
    if values.dtype == np.uint64 and values.size and (most := int(values.max())) > np.iinfo(np.int64).max:
        raise ValueError(f"{most} is above 2^63 - 1, the greatest integer that models take; keep such numbers as text, or as fractions")
    return values.astype(np.int64, copy=False)
