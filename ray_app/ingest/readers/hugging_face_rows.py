"""Rows of Hugging Face `datasets` as ours: which of their columns can be kept, and how each value is checked and converted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ray_app.data.dataset.arrays import is_bytes, is_number, is_text
from ray_app.data.dataset.files import File
from ray_app.errors import DataError
from ray_app.ingest.readers import base, nested
from ray_app.ingest.readers.image_folders import NOT_AN_IMAGE

_UNWRAPPED = (pa.UuidType, pa.JsonType)
"""Extension types whose values are those of their storage: bytes and text."""


@dataclass(frozen=True)
class Form:
    """What every row of a split is converted to.

    Args:
        schema: Columns to keep, in the first file's types.
        shapes: Of the columns of lists.
        label: The label's column.
        classes: Names of the classes, which are the values themselves where the label's column holds text.
        check: Whether images are decoded.
    """

    schema: pa.Schema
    shapes: dict[str, nested.Shape]
    label: str | None
    classes: tuple[str, ...] | None
    check: bool

    @property
    def has_text_label(self) -> bool:
        """Whether the label's column holds text, or categories that are text."""
        return self.label is not None and is_text(value_type(self.schema.field(self.label).type))


def _is_image(kind: pa.DataType) -> bool:
    """Whether this is how `datasets` stores images (and sounds): bytes and the path that they came from."""
    return bool(pa.types.is_struct(kind)) and {field.name for field in kind} == {"bytes", "path"}


def value_type(kind: pa.DataType) -> pa.DataType:
    """The type of the values of a column, which a dictionary (pandas' categories) or an extension type may stand around."""
    if pa.types.is_dictionary(kind):
        return value_type(kind.value_type)
    return value_type(kind.storage_type) if isinstance(kind, _UNWRAPPED) else kind


def unusable(kind: pa.DataType, is_label: bool) -> str | None:
    """Why a column of this type cannot be kept."""
    value = value_type(kind)
    if is_label and not (is_number(value) or is_text(value)):
        return f"is to be the label, but holds {kind}; a label is a ClassLabel, an integer, text or a truth value"
    if nested.is_list(kind):
        return f"holds lists that are not of numbers ({kind})" if nested.number_type(kind) is None else None
    if pa.types.is_struct(kind) and not _is_image(kind):
        return "holds objects; allowed are numbers, text, bytes, images and lists of numbers"
    if pa.types.is_null(value):
        return "has no value at all"
    has_bytes = is_bytes(value) or pa.types.is_fixed_size_binary(value)
    has_time = pa.types.is_temporal(value) and not pa.types.is_interval(value)
    if _is_image(kind) or is_number(value) or is_text(value) or has_bytes or has_time:
        return None
    return f"holds {kind}; allowed are numbers, text, bytes, times, images and lists of numbers"


def check_unique(file: File, names: list[str]) -> None:
    """Refuses a file with two columns of one name.

    Raises:
        DataError: With these names.
    """
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{file}: two columns of one name: {base.listed(twice)}. Give each column its own name and save the file again.")


def label_values(label: str, table: pa.Table) -> set[str]:
    """The different values of a label's column of text; "" for rows without one."""
    values = nested.plain(table[label].combine_chunks())
    return {value or "" for value in values.unique().to_pylist()} if is_text(values.type) else set()


def converted(form: Form, file: File, table: pa.Table, ids: Any, refuse: base.Refuse) -> pa.Table:
    """A table with the columns as ours, without the rows that cannot be used."""
    if missing := [name for name in form.schema.names if name not in table.column_names]:
        raise DataError(f"{file}: no column {missing[0]!r} as in the first file; the columns are {table.column_names}. Save it again.")
    columns = {column.name: nested.plain(_typed(table[column.name].combine_chunks(), column.type)) for column in form.schema}
    for name in form.shapes:
        if not nested.is_list(kind := columns[name].type) or nested.number_type(kind) is None:
            raise DataError(f"{file}: column {name!r} holds {kind}, and lists of numbers in the first file. Save it again.")
    faults: dict[int, str] = {}
    for name, column in columns.items():
        if _is_image(column.type):
            columns[name] = pc.struct_field(column, "bytes")
            faults |= _bad_images(name, columns[name], form.check, faults)
        elif name in form.shapes:
            fits = nested.of_shape(column, form.shapes[name]).to_numpy(zero_copy_only=False)
            reason = nested.misfit(name, form.shapes[name])
            faults |= {int(i): reason for i in np.flatnonzero(~fits) if int(i) not in faults}
        elif form.has_text_label and name == form.label:
            if not is_text(column.type):
                raise DataError(f"{file}: column {name!r} holds {column.type}, and text in the first file. Save it again.")
            columns[name] = pc.index_in(column, pa.array(form.classes, pa.string())).cast(pa.int64())
        elif name == form.label and form.classes:
            if not pa.types.is_integer(column.type):
                raise DataError(f"{file}: column {name!r} holds {column.type}, but its classes have names. Save it again.")
            columns[name] = pc.if_else(pc.less(column, 0), None, column)  # -1 is how `datasets` writes that there is none
            faults |= {i: reason for i, reason in _beyond(columns[name], len(form.classes or ())).items() if i not in faults}
    for i, reason in sorted(faults.items()):
        refuse(str(ids[i]), reason)
    good = np.ones(len(ids), np.bool_)
    good[list(faults)] = False
    chosen = {"label" if name == form.label else name: _filtered(column, good, form.shapes.get(name)) for name, column in columns.items()}
    return base.table(ids[good].tolist(), chosen)


def _typed(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column without any value, which has no type, or lists without one, as those of the first file; another column as it is."""
    inner = column.type
    while nested.is_list(inner):
        inner = inner.value_type
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), kind)
    return column.cast(kind) if pa.types.is_null(inner) and nested.is_list(kind) else column


def _beyond(labels: pa.Array, classes: int) -> dict[int, str]:
    """Which labels are none of the classes, by row; 0 classes: any number is one."""
    beyond = pc.fill_null(pc.greater_equal(labels, classes), False).to_numpy(zero_copy_only=False) if classes else ()
    return {int(i): f"label {labels[int(i)]}; the {classes} classes allow 0 to {classes - 1}" for i in np.flatnonzero(beyond)}


def _bad_images(name: str, images: pa.Array, check: bool, known: dict[int, str]) -> dict[int, str]:
    """Why images cannot be used, by row."""
    found = {}
    for i, image in enumerate(images):
        if i in known:
            continue
        if not image.is_valid:
            found[i] = f"{name!r} has no bytes, only a path; load the data set and save it with embedded files"
        elif check and (reason := base.undecodable(image.as_py())):
            found[i] = NOT_AN_IMAGE.format(reason)
    return found


def _filtered(column: pa.Array, good: np.ndarray, shape: nested.Shape | None) -> Any:
    rows = column.filter(pa.array(good))
    return rows if shape is None else nested.of_numbers(rows, shape)
