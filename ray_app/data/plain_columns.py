"""Columns as other tools write them, as columns of the types that the application reads.

Files that are trained on as they are and files that are ingested go through `to_plain`:

- An extension type is what it is stored as: JSON is text, a UUID bytes. Tensors of one shape, of Arrow and of Ray Data,
  are nested lists of one size; tensors of different shapes are nested lists; `arrow.bool8` is a boolean.
- The fields of a column of objects are columns, `a.b`; an image of Hugging Face `datasets` is the column of its bytes.
- Dictionaries are their values, list views are lists, views and bytes of one size are text and bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ray_app.data.arrays import is_list, spec_of_field
from ray_app.errors import DataError

_EXTENSION, _EXTENSION_METADATA = b"ARROW:extension:name", b"ARROW:extension:metadata"
_TENSORS = ("arrow.fixed_shape_tensor", "ray.data.arrow_tensor", "ray.data.arrow_tensor_v2")
_RAGGED_TENSORS = ("arrow.variable_shape_tensor", "ray.data.arrow_variable_shaped_tensor")


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Returns the columns that `to_plain` makes of a table with this schema."""
    # `Schema.empty_table` knows no tensors with a permutation.
    return to_plain(pa.table([pa.chunked_array([], field.type) for field in schema], schema)).schema


def to_plain(table: pa.Table, objects: Collection[str] = ()) -> pa.Table:
    """Returns a table with columns of the application's types; those of other tools are converted.

    Columns of objects that `objects` names stay as they are.

    Raises:
        DataError: A tensor has other values than its type says.
    """
    if is_plain(table.schema):
        return table
    fields, columns = list[pa.Field](), list[pa.ChunkedArray]()
    for field, column in zip(table.schema, table.columns, strict=True):
        stays = _is_plain(field) or (field.name in objects and _is_object(field))
        for plain_field, plain_column in [(field, column)] if stays else _plain_columns(field, column):
            fields.append(plain_field)
            columns.append(plain_column)
    return pa.table(columns, pa.schema(fields, table.schema.metadata))


def is_plain(schema: pa.Schema) -> bool:
    """Returns whether `to_plain` changes no column of a table with this schema."""
    return all(map(_is_plain, schema))


def is_image(kind: pa.DataType) -> bool:
    """Returns whether `datasets` stores images (and sounds) as this type: bytes and their source path."""
    return bool(pa.types.is_struct(kind)) and {field.name for field in kind} == {"bytes", "path"}


def _is_plain(field: pa.Field) -> bool:
    if pa.types.is_primitive(field.type) and field.metadata is None:
        return True
    is_encoded = spec_of_field(field) is not None
    has_plain_type = not pa.types.is_struct(field.type) and _plain_type(field.type) == field.type
    return is_encoded or (has_plain_type and _extension(field)[0] is None)


def _is_object(field: pa.Field) -> bool:
    is_struct = pa.types.is_struct(field.type) and not is_image(field.type)
    return bool(is_struct) and _extension(field)[0] is None


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Returns the type to which values are cast; those of extension types and of objects are converted otherwise."""
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    if not (is_list(kind) or _is_view(kind)):
        return kind
    item = _plain_type(kind.value_type)
    return pa.large_list(item) if _is_view(kind) or item != kind.value_type else kind


def _is_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _extension(field: pa.Field) -> tuple[str | None, bytes]:
    """Returns the name and the metadata of an extension type, also of one that this process does not know."""
    if isinstance(field.type, pa.BaseExtensionType):
        serialize = getattr(field.type, "__arrow_ext_serialize__", bytes)
        return str(field.type.extension_name), serialize()
    metadata = field.metadata or {}
    name = metadata.get(_EXTENSION)
    return None if name is None else name.decode(), metadata.get(_EXTENSION_METADATA, b"")


def _plain_columns(field: pa.Field, column: pa.ChunkedArray) -> Iterator[tuple[pa.Field, pa.ChunkedArray]]:
    """Yields the columns that are made of one, each with its field."""
    kind, (extension, metadata) = field.type, _extension(field)
    if isinstance(kind, pa.BaseExtensionType):
        column = pa.chunked_array([chunk.storage for chunk in column.chunks], kind.storage_type)
    if extension in _TENSORS:
        shape, permutation = _shape_of_tensors(field, metadata)
        column = _map(column, lambda rows: _to_fixed_lists(field.name, rows, shape, permutation))
    elif extension in _RAGGED_TENSORS:
        axes = _axes_of_tensors(field, column.type, metadata)
        column = _map(column, lambda rows: _to_nested_lists(rows, axes))
    elif extension == "arrow.bool8":
        column = column.cast(pa.bool_())
    elif is_image(column.type):
        images = pc.struct_field(column, "bytes")
        # Where all images are paths, their bytes have no type.
        column = images.cast(pa.binary()) if pa.types.is_null(images.type) else images
    elif pa.types.is_struct(column.type):
        stored = pa.field(field.name, column.type)
        for inner, values in zip(stored.flatten(), column.flatten(), strict=True):
            yield from [(inner, values)] if _is_plain(inner) else _plain_columns(inner, values)
        return
    if _plain_type(column.type) != column.type:
        column = _map(column, _to_plain_type)
    kept = {key: value for key, value in (field.metadata or {}).items() if not key.startswith(b"ARROW:extension")}
    yield pa.field(field.name, column.type, field.nullable, kept or None), column


def _map(column: pa.ChunkedArray, convert: Callable[[pa.Array], pa.Array]) -> pa.ChunkedArray:
    """Returns the column with each of its chunks, at least one, converted."""
    return pa.chunked_array([convert(chunk) for chunk in column.chunks or [pa.nulls(0, column.type)]])


def _to_plain_type(rows: pa.Array) -> pa.Array:
    """Returns values with their type by `_plain_type`."""
    if is_list(rows.type) or _is_view(rows.type):
        # Arrow 25 casts list views to damaged lists.
        lengths = pc.fill_null(pc.list_value_length(rows), 0).to_numpy(zero_copy_only=False)
        return _make_lists(lengths, _to_plain_type(pc.list_flatten(rows)), rows.is_null())
    if pa.types.is_dictionary(rows.type):
        # Arrow decodes no dictionary of string views, as the categories of Polars are.
        values = _to_plain_type(rows.dictionary)
        return pa.DictionaryArray.from_arrays(rows.indices, values).dictionary_decode()
    return rows.cast(_plain_type(rows.type))


def _make_lists(lengths: npt.NDArray[np.int64], values: pa.Array, mask: pa.Array | None) -> pa.LargeListArray:
    offsets = pa.array(np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]))
    return pa.LargeListArray.from_arrays(offsets, values, mask=mask)


def _shape_of_tensors(field: pa.Field, metadata: bytes) -> tuple[list[int], list[int] | None]:
    """Returns the shape of tensors as they are stored, and the order of their axes, None if that is the order."""
    if isinstance(field.type, pa.FixedShapeTensorType):
        return list(field.type.shape), field.type.permutation
    return list(_parse(field, metadata)), None


def _axes_of_tensors(field: pa.Field, storage: pa.DataType, metadata: bytes) -> int:
    """Returns the number of axes of tensors of different shapes."""
    shape = storage.field("shape").type
    return int(shape.list_size if pa.types.is_fixed_size_list(shape) else _parse(field, metadata))


def _parse(field: pa.Field, metadata: bytes) -> Any:
    try:
        return json.loads(metadata)
    except ValueError as error:
        # Some versions of Ray Data pickled it, and nothing is unpickled.
        raise DataError(
            f"column {field.name!r} holds tensors without their shape as JSON. Write the column again with Ray 2.55 or"
            " later, or as lists of numbers."
        ) from error


def _to_fixed_lists(name: str, rows: pa.Array, shape: list[int], permutation: list[int] | None) -> pa.Array:
    """Returns tensors of one shape as nested lists of one size."""
    size = prod(shape)
    try:
        rows = rows.cast(pa.list_(rows.type.value_type, size))
    except pa.ArrowInvalid as error:
        raise DataError(f"column {name!r} holds tensors of shape {shape}: {error}. Write the column again.") from error
    values = rows.values.slice(rows.offset * size, len(rows) * size)
    if permutation and permutation != sorted(permutation):
        stored = values.to_numpy(zero_copy_only=False).reshape(len(rows), *shape)
        values = pa.array(stored.transpose(0, *(axis + 1 for axis in permutation)).reshape(-1))
        shape = [shape[axis] for axis in permutation]
    for length in reversed(shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, length)
    return pa.FixedSizeListArray.from_arrays(values, shape[0], mask=rows.is_null())


def _to_nested_lists(rows: pa.StructArray, axes: int) -> pa.Array:
    """Returns tensors of different shapes as lists, of lists if they have several axes."""
    is_valid = rows.is_valid()
    present = rows.filter(is_valid)
    shapes = np.zeros((len(rows), axes), np.int64)
    stored_shapes = pc.list_flatten(present.field("shape")).to_numpy(zero_copy_only=False)
    shapes[is_valid.to_numpy(zero_copy_only=False)] = stored_shapes.reshape(-1, axes)
    values = pc.list_flatten(present.field("data"))
    for axis in reversed(range(axes)):
        lengths = np.repeat(shapes[:, axis], shapes[:, :axis].prod(axis=1))
        values = _make_lists(lengths, values, None if axis else rows.is_null())
    return values
