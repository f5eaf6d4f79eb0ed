"""Conversion of Arrow columns of other programs to the application's types.

Lists of numbers of one shape become array columns, lists of any length stay lists if the user allows them, and all else
becomes plain columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ray_app.data.arrays import Array, is_list, is_numbers, number_type, to_list_array
from ray_app.errors import DataError
from ray_app.task.ragged import Ragged

ANY = -1
"""Stands for the length of lists that may have any length."""

Shape = tuple[int, ...]
"""Shape of the lists in a column; the first length may be `ANY`."""


def first_shape(column: pa.ChunkedArray | pa.Array) -> Shape | None:
    """Returns the shape of the first list that does not begin with a missing or empty one; None without one."""
    depth, kind = 0, column.type
    while is_list(kind):
        depth, kind = depth + 1, kind.value_type
    for value in column:
        if value.is_valid:
            shape: list[int] = []
            item: Any = value.as_py()
            while isinstance(item, list):
                shape.append(len(item))
                item = item[0] if item else None
            if 0 not in shape and len(shape) == depth:
                return tuple(shape)
    return None


def ragged_shape(column: pa.ChunkedArray | pa.Array) -> Shape | None:
    """Returns `ANY` and the shape of the first inner list that is not empty; None without inner lists or numbers."""
    if not is_numbers(column.type):
        return None
    inner = pc.list_flatten(column)
    shape = first_shape(inner) if is_list(inner.type) else ()
    return None if shape is None else (ANY, *shape)


def explain_misfit(name: str, shape: Shape) -> str:
    """Returns the reason to refuse a row with a value that is not of this shape."""
    if shape == (ANY,):
        return f"{name!r} is no list of numbers, or lacks one"
    if shape[0] == ANY:
        return (
            f"{name!r} is no list of lists of shape {list(shape[1:])}, as the first that is not empty, or lacks a"
            " number"
        )
    return (
        f"{name!r} is no list of shape {list(shape)}, as the first that is not empty; where lists may have any length,"
        " name the column in ragged"
    )


def check_ragged(where: object, ragged: list[str], schema: pa.Schema) -> None:
    """Raises DataError if a column of the option `ragged` is not kept or does not hold lists."""
    lists = [column.name for column in schema if is_list(column.type)]
    allowed = (
        f"those of lists are {lists}. Name some of these." if lists else "none of them holds lists. Leave ragged out."
    )
    for name in ragged:
        if name not in schema.names:
            raise DataError(
                f"{where}: ragged names {name!r}, but the columns that are kept are {schema.names}; {allowed}"
            )
        if name not in lists:
            raise DataError(f"{where}: ragged names {name!r}, which holds {schema.field(name).type}; {allowed}")


def has_shape(column: pa.Array, shape: Shape) -> pa.Array:
    """Returns for each row of a list column whether it has this shape, with no number missing: booleans (rows,)."""
    rows = len(column)
    good = np.ones(rows, np.bool_)
    owner, values = np.arange(rows), column
    for length in shape:
        if not is_list(values.type):
            return pa.array(np.zeros(rows, np.bool_))
        lengths = pc.fill_null(pc.list_value_length(values), -1).to_numpy(zero_copy_only=False)
        good[owner[lengths < 0 if length == ANY else lengths != length]] = False
        owner, values = np.repeat(owner, np.maximum(lengths, 0)), pc.list_flatten(values)
    if is_list(values.type):
        return pa.array(np.zeros(rows, np.bool_))
    good[owner[values.is_null().to_numpy(zero_copy_only=False)]] = False
    return pa.array(good)


def to_numbers(column: pa.Array, shape: Shape) -> Array | pa.Array:
    """Returns a list column of one shape as an array (rows, *shape), or as lists if they may have any length."""
    kind, values = number_type(column.type), column
    assert kind is not None
    for _ in shape:
        values = pc.list_flatten(values)
    numbers = np.asarray(values.to_numpy(zero_copy_only=False)).astype(np.dtype(kind.to_pandas_dtype()), copy=False)
    if shape[0] != ANY:
        return numbers.reshape(len(column), *shape)
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    return to_list_array(
        Ragged(numbers.reshape(shape), np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]))
    )


def to_plain(column: pa.Array) -> pa.Array:
    """Returns a column without dictionaries and extension types, with text and bytes in their usual types."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return to_plain(column.storage)
    if pa.types.is_dictionary(kind):
        return to_plain(column.dictionary_decode())
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return column.cast(pa.string())
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return column.cast(pa.binary())
    return column
