"""Arrow columns of other programs as ours: lists of numbers of one shape become array columns, the rest plain ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ray_app.data.dataset.arrays import Array

Shape = tuple[int, ...]


def is_list(kind: pa.DataType) -> bool:
    """Whether values are lists of any sort."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def number_type(kind: pa.DataType) -> pa.DataType | None:
    """The type of the numbers in (nested) lists; None where they hold something else."""
    while is_list(kind):
        kind = kind.value_type
    fits = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return kind if fits else None


def first_shape(column: pa.ChunkedArray | pa.Array) -> Shape | None:
    """Shape of the first list in a column that is not missing, empty or begun by an empty one; None where there is none."""
    for value in column:
        if value.is_valid:
            shape: list[int] = []
            item: Any = value.as_py()
            while isinstance(item, list):
                shape.append(len(item))
                item = item[0] if item else None
            if 0 not in shape:
                return tuple(shape)
    return None


def of_shape(column: pa.Array, shape: Shape) -> pa.Array:
    """Whether each row of a list column has this shape, with no number missing: booleans (rows,)."""
    rows = len(column)
    good = np.ones(rows, np.bool_)
    owner, values = np.arange(rows), column
    for length in shape:
        if not is_list(values.type):
            return pa.array(np.zeros(rows, np.bool_))
        lengths = pc.fill_null(pc.list_value_length(values), -1).to_numpy(zero_copy_only=False)
        good[owner[lengths != length]] = False
        owner, values = np.repeat(owner, np.maximum(lengths, 0)), pc.list_flatten(values)
    if is_list(values.type):
        return pa.array(np.zeros(rows, np.bool_))
    good[owner[values.is_null().to_numpy(zero_copy_only=False)]] = False
    return pa.array(good)


def to_array(column: pa.Array, shape: Shape, dtype: np.dtype) -> Array:
    """A list column in which every row has this shape as one array (rows, *shape)."""
    values = column
    for _ in shape:
        values = pc.list_flatten(values)
    return np.asarray(values.to_numpy(zero_copy_only=False)).astype(dtype, copy=False).reshape(len(column), *shape)


def plain(column: pa.Array) -> pa.Array:
    """A column without dictionaries, with text and bytes in their usual types."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return plain(column.dictionary_decode())
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return column.cast(pa.string())
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return column.cast(pa.binary())
    return column
