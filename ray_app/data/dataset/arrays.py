"""Fixed-shape arrays as Arrow columns: one fixed-size binary value per row, its dtype and shape in the field's metadata.

Parquet and the object store then move bytes, not lists of numbers: reading 784 bytes a row costs a copy, not 784 values.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class ArraySpec:
    """What one row of a column holds: `dtype` (NumPy name) and `shape` (without the row axis)."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return int(np.dtype(self.dtype).itemsize * np.prod(self.shape, dtype=np.int64))


def spec_like(values: Array) -> ArraySpec:
    """What one row of `values`, an array of shape (rows, ...), holds."""
    return ArraySpec(values.dtype.str, tuple(int(n) for n in values.shape[1:]))


def to_column(name: str, values: Array) -> tuple[pa.Field, pa.Array]:
    """Returns the field and the column of `values`, an array of shape (rows, ...), without copying it where it is contiguous."""
    values = np.ascontiguousarray(values)
    spec = spec_like(values)
    data = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(spec.row_bytes), len(values), [None, pa.py_buffer(values.reshape(-1).view(np.uint8))]
    )
    metadata = {"ray_app.array": json.dumps({"dtype": spec.dtype, "shape": spec.shape})}
    return pa.field(name, data.type, nullable=False, metadata=metadata), data


def spec_of(field: pa.Field) -> ArraySpec | None:
    """The array that a field holds, or None for a plain column."""
    raw = (field.metadata or {}).get(b"ray_app.array")
    if raw is None:
        return None
    found = json.loads(raw)
    return ArraySpec(found["dtype"], tuple(found["shape"]))


def is_text(kind: pa.DataType) -> bool:
    """Whether values are text, in any of Arrow's layouts."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def from_column(column: pa.ChunkedArray | pa.Array, spec: ArraySpec) -> Array:
    """The rows of an encoded column as one array of shape (rows, ...); a view of the column where it is one chunk."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    arrays = [
        np.frombuffer(chunk.buffers()[1], dtype=np.uint8, offset=chunk.offset * spec.row_bytes, count=len(chunk) * spec.row_bytes)
        for chunk in chunks
        if len(chunk)
    ]
    flat = arrays[0] if len(arrays) == 1 else np.concatenate([*arrays, np.empty(0, np.uint8)])
    return flat.view(spec.dtype).reshape(-1, *spec.shape)
