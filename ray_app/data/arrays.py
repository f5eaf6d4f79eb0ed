"""Conversion of arrays to Arrow columns with one binary value per row, and back.

A value has a fixed or variable size; dtype and shape are in the metadata of the field. Parquet and the object store
then move bytes instead of lists of numbers: reading a row of 784 bytes costs one copy, not 784 conversions.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ray_app.task.ragged import Field, Ragged, concat_ragged

Array = npt.NDArray[np.generic]
_MAX_NAMED = 5
"""Columns that a message names."""


@dataclass(frozen=True)
class ArraySpec:
    """The array that one row of a column holds.

    Args:
        dtype: NumPy name.
        shape: Shape without the row axis, and without the first axis of a row where rows have different lengths.
        padding: Where rows have different lengths: the fill value, and what padded lengths are a multiple of.
        length: Mean length of the rows that were probed, where rows have different lengths.
    """

    dtype: str
    shape: tuple[int, ...]
    padding: tuple[float, int] | None = None
    length: float = field(default=1, compare=False)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; the mean, where rows have different lengths."""
        return round(np.dtype(self.dtype).itemsize * int(np.prod(self.shape, dtype=np.int64)) * self.length)


def spec_of_values(values: Field) -> ArraySpec:
    """Returns the specification of one row of `values`."""
    if isinstance(values, Ragged):
        mean = float(values.lengths.mean()) if len(values) else 1.0
        return ArraySpec(
            values.values.dtype.str, tuple(map(int, values.values.shape[1:])), (values.fill, values.multiple), mean
        )
    return ArraySpec(values.dtype.str, tuple(int(n) for n in values.shape[1:]))


def to_column(name: str, values: Field) -> tuple[pa.Field, pa.Array]:
    """Returns `values` as an Arrow field and column, without copying them where they are contiguous."""
    spec = spec_of_values(values)
    if isinstance(values, Ragged):
        compact = values.compact()
        item_bytes = compact.values.dtype.itemsize * int(np.prod(spec.shape, dtype=np.int64))
        buffers = [
            None,
            pa.py_buffer(compact.offsets * item_bytes),
            pa.py_buffer(np.ascontiguousarray(compact.values).reshape(-1).view(np.uint8)),
        ]
        data = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(compact), buffers)
        metadata = {"ray_app.array": json.dumps({"dtype": spec.dtype, "shape": spec.shape, "padding": spec.padding})}
        return pa.field(name, data.type, nullable=False, metadata=metadata), data
    values = np.ascontiguousarray(values)
    data = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(spec.row_bytes), len(values), [None, pa.py_buffer(values.reshape(-1).view(np.uint8))]
    )
    metadata = {"ray_app.array": json.dumps({"dtype": spec.dtype, "shape": spec.shape})}
    return pa.field(name, data.type, nullable=False, metadata=metadata), data


def spec_of_field(field: pa.Field) -> ArraySpec | None:
    """Returns the specification of the arrays in a column, or None for a plain column."""
    raw = (field.metadata or {}).get(b"ray_app.array")
    if raw is None:
        return None
    stored = json.loads(raw)
    padding = stored.get("padding")
    return ArraySpec(stored["dtype"], tuple(stored["shape"]), (padding[0], padding[1]) if padding else None)


def describe_other_columns(schema: pa.Schema, reference: pa.Schema) -> str:
    """Returns the first columns that differ from those of other rows, for a message; "" for the same ones."""
    one, two = ({field.name: (_type_name(field), meaning_of(field)) for field in one} for one in (schema, reference))
    if schema.names == reference.names and one == two:
        return ""
    others = [f"{name!r} is missing" for name in two if name not in one]
    others += [f"{name!r} is missing in the others" for name in one if name not in two]
    for name in [name for name in one if one[name] != two.get(name, one[name])]:
        (kind, _), (other, _) = one[name], two[name]
        others.append(f"{name!r} is {kind}, not {other}" if kind != other else f"{name!r} has the numbers of other ids")
    return ", ".join(others[:_MAX_NAMED]) or f"their order is {schema.names}, not {reference.names}"


def meaning_of(field: pa.Field) -> dict[bytes, bytes]:
    """Returns what the application has written into the metadata of a column, such as the shape of its arrays."""
    return {key: value for key, value in (field.metadata or {}).items() if key.startswith(b"ray_app.")}


def _type_name(field: pa.Field) -> str:
    """Returns the type of a column in words, with all that reading needs."""
    spec = spec_of_field(field)
    text = (
        f"{np.dtype(spec.dtype).name} {spec.shape}{' of any length' * bool(spec.padding)}" if spec else str(field.type)
    )
    return text if field.nullable else f"{text} without missing values"


IDS = b"ray_app.ids"
"""Key in the metadata of a column of numbers of ids: their count and digest, as JSON; see `ray_app.ingest.ids`."""


def digest_of_ids(field: pa.Field) -> str:
    """Returns the digest of the ids that the numbers of a column stand for, "" for numbers that are no ids."""
    raw = (field.metadata or {}).get(IDS)
    return "" if raw is None else str(json.loads(raw)["digest"])


def is_text(kind: pa.DataType) -> bool:
    """Returns whether values are text, in any of Arrow's layouts, also as a dictionary (categories of pandas)."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


MAX_DECIMAL_DIGITS = 15
"""A float64 represents each decimal number of so many digits, so that it can be written with the same digits again."""


def is_exact_decimal(kind: pa.DataType) -> bool:
    """Returns whether values are decimals that float64 represents with all their digits."""
    return bool(pa.types.is_decimal(kind) and kind.precision <= MAX_DECIMAL_DIGITS)


_UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}


def is_read_as_float(kind: pa.DataType) -> bool:
    """Returns whether values are read as float64: decimals, and the seconds of durations and of times of the day."""
    return bool(pa.types.is_decimal(kind) or pa.types.is_duration(kind) or pa.types.is_time(kind))


def read_as_float(column: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    """Returns the values of a type of `is_read_as_float`; of a decimal of many digits the nearest number."""
    if pa.types.is_decimal(column.type):
        # Arrow's cast of decimals to float64 rounds twice: 729.0500000000 becomes 729.0500000000001.
        return column.cast(pa.string()).cast(pa.float64())
    stored = column.cast(pa.int32()).cast(pa.int64()) if pa.types.is_time32(column.type) else column.cast(pa.int64())
    return pc.divide(stored.cast(pa.float64(), safe=False), _UNITS[column.type.unit])


def is_number(kind: pa.DataType) -> bool:
    """Returns whether values are integers, floating-point numbers or booleans."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def is_bytes(kind: pa.DataType) -> bool:
    """Returns whether values are bytes of any length, in any of Arrow's layouts."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def from_column(column: pa.ChunkedArray | pa.Array, spec: ArraySpec) -> Field:
    """Returns the rows of an encoded column as an array (rows, ...) or `Ragged`; a view of a single chunk."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    if spec.padding is not None:
        parts = [_ragged(chunk, spec) for chunk in chunks if len(chunk)]
        return concat_ragged(
            parts or [Ragged(np.empty((0, *spec.shape), spec.dtype), np.zeros(1, np.int64), *spec.padding)]
        )
    return fixed_array(column, spec)


def fixed_array(column: pa.ChunkedArray | pa.Array, spec: ArraySpec) -> Array:
    """Returns the rows of one size of an encoded column as an array (rows, ...); a view of a single chunk."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    arrays, size = list[Array](), spec.row_bytes
    for chunk in filter(len, chunks):
        arrays.append(np.frombuffer(chunk.buffers()[1], np.uint8, len(chunk) * size, chunk.offset * size))
    flat = arrays[0] if len(arrays) == 1 else np.concatenate([*arrays, np.empty(0, np.uint8)])
    return flat.view(spec.dtype).reshape(len(column), *spec.shape)


def ragged_lists(column: pa.ChunkedArray) -> Ragged | None:
    """Returns lists of numbers, or of rows of one size, as `Ragged`; None for others or missing values."""
    kind = column.type
    if not is_ragged_list(kind) or column.null_count:
        return None
    flat = column.combine_chunks()
    flat = flat.chunk(0) if isinstance(flat, pa.ChunkedArray) else flat
    offsets = np.asarray(flat.offsets).astype(np.int64)
    inner, shape = flat.values, tuple[int, ...]()
    while is_list(inner.type):
        if inner.null_count:
            return None
        if pa.types.is_fixed_size_list(inner.type):
            size, inner = inner.type.list_size, inner.flatten()
        else:
            sizes = np.unique(np.diff(np.asarray(inner.offsets)))
            if len(sizes) > 1:
                return None
            size, inner = (int(sizes[0]) if len(sizes) else 0), inner.flatten()
        shape += (size,)
    if inner.null_count or not is_number(inner.type):
        return None
    return Ragged(inner.to_numpy(zero_copy_only=False).reshape(len(flat.values), *shape), offsets)


def spec_of_list_type(kind: pa.DataType) -> ArraySpec | None:
    """Returns the specification of a row of (nested) lists of one size; None if the lists do not hold numbers."""
    shape = []
    while pa.types.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    if not shape or not is_number(kind):
        return None
    return ArraySpec(np.dtype(kind.to_pandas_dtype()).str, tuple(shape))


def fixed_lists(column: pa.ChunkedArray) -> Array | None:
    """Returns lists of one size as one array (rows, ...); None if they do not hold numbers or have missing values."""
    spec = spec_of_list_type(column.type)
    if spec is None or column.null_count:
        return None
    flat = column.combine_chunks()
    flat = pa.concat_arrays(flat.chunks) if isinstance(flat, pa.ChunkedArray) else flat
    for _ in spec.shape:
        flat = flat.flatten()
    if flat.null_count:
        return None
    return np.asarray(flat.to_numpy(zero_copy_only=False)).reshape(len(column), *spec.shape)


def to_list_array(rows: Ragged) -> pa.LargeListArray:
    """Returns ragged rows as a column of lists of numbers, or of lists of rows of one size; `ragged_lists` reads it."""
    compact = rows.compact()
    inner = pa.array(compact.values.reshape(-1))
    for size in reversed(compact.row_shape):
        inner = pa.FixedSizeListArray.from_arrays(inner, size)
    return pa.LargeListArray.from_arrays(compact.offsets, inner)


def is_numbers(kind: pa.DataType) -> bool:
    """Returns whether a column's values are (nested) lists of numbers or booleans."""
    return is_list(kind) and number_type(kind) is not None


def number_type(kind: pa.DataType) -> pa.DataType | None:
    """Returns the type of the numbers in (nested) lists; None where the lists hold something else."""
    while is_list(kind):
        kind = kind.value_type
    return kind if is_number(kind) else None


def is_list(kind: pa.DataType) -> bool:
    """Returns whether values are lists, of any length or of one size."""
    return is_ragged_list(kind) or bool(pa.types.is_fixed_size_list(kind))


def is_ragged_list(kind: pa.DataType) -> bool:
    """Returns whether values are lists of any length, such as tokens or boxes."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _ragged(chunk: pa.Array, spec: ArraySpec) -> Ragged:
    assert spec.padding is not None
    _, offsets, data = chunk.buffers()
    item_bytes = np.dtype(spec.dtype).itemsize * int(np.prod(spec.shape, dtype=np.int64))
    ends = np.frombuffer(offsets, np.int64, len(chunk) + 1, chunk.offset * 8) // item_bytes
    raw = np.frombuffer(data if data is not None else b"", np.uint8, int(ends[-1]) * item_bytes)
    return Ragged(raw.view(spec.dtype).reshape(-1, *spec.shape), ends, *spec.padding)


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Raises MemoryError where the kernel refuses memory, which is no error of files, as an OSError would be."""
    try:
        yield
    except OSError as error:
        raise MemoryError(str(error)) from error


class _GrowingRagged:
    """A ragged field that is filled row after row, in memory that grows without a copy.

    `ndarray.resize` copies arrays of some megabytes: NumPy advises the kernel to use huge pages for a part of them, and
    `mremap` does not move memory if its parts have different advice.
    """

    def __init__(self, spec: ArraySpec, rows: int) -> None:
        self._spec, self._rows = spec, 0
        self._dtype = np.dtype(spec.dtype)
        self._value_items = int(np.prod(spec.shape, dtype=np.int64))
        with _memory_errors():
            self._memory = mmap.mmap(-1, self._bytes(int(rows * spec.length)), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._offsets = np.zeros(rows + 1, np.int64)

    def add(self, rows: Ragged) -> None:
        """Copies the next rows."""
        compact, used = rows.compact(), int(self._offsets[self._rows])
        end = used + len(compact.values)
        if self._bytes(end) > len(self._memory):
            with _memory_errors():
                self._memory.resize(max(self._bytes(end), len(self._memory) * 9 // 8))
        self._values(end)[used:] = compact.values
        self._offsets[self._rows + 1 : self._rows + 1 + len(compact)] = compact.offsets[1:] + used
        self._rows += len(compact)

    def all(self) -> Ragged:
        """Returns all rows; no row can be added afterwards."""
        assert self._spec.padding is not None
        length = int(self._offsets[self._rows])
        self._memory.resize(self._bytes(length))
        return Ragged(self._values(length), self._offsets[: self._rows + 1], *self._spec.padding)

    def _bytes(self, length: int) -> int:
        """Returns the size of this many values; an anonymous mapping has at least one byte."""
        return max(1, length * self._value_items * self._dtype.itemsize)

    def _values(self, length: int) -> npt.NDArray:
        """Returns a view of the first values; the memory cannot be resized while a view exists."""
        items = np.frombuffer(self._memory, self._dtype, length * self._value_items)
        return items.reshape(length, *self._spec.shape)


class Columns:
    """Collects the fields of decoded rows from tables as they arrive.

    Each table is copied and can then be freed, so that all rows are in memory only once.
    """

    def __init__(self, fields: dict[str, ArraySpec], rows: int) -> None:
        self._fields, self._done = fields, 0
        self._fixed = {
            name: np.empty((rows, *s.shape), np.dtype(s.dtype)) for name, s in fields.items() if s.padding is None
        }
        self._ragged = {name: _GrowingRagged(s, rows) for name, s in fields.items() if s.padding is not None}

    def add(self, table: pa.Table) -> None:
        """Copies the next rows."""
        for name, spec in self._fields.items():
            values = from_column(table.column(name), spec)
            if isinstance(values, Ragged):
                self._ragged[name].add(values)
            else:
                self._fixed[name][self._done : self._done + len(values)] = values
        self._done += table.num_rows

    def all(self) -> dict[str, Field]:
        """Returns the fields in the order of the specification."""
        return {name: self._ragged[name].all() if name in self._ragged else self._fixed[name] for name in self._fields}
