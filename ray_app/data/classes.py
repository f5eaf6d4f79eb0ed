"""The names of classes in the files of a data set: labels of several files, or data sets, agree by name.

An ingest writes the names into the metadata of every Parquet file. A file that numbers the same names in another way
is read with the numbers of the data set (`ReadRules.class_maps`).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ray_app.data.arrays import from_column, is_ragged_list, spec_of_field, to_column
from ray_app.plan.manifest import class_columns

_KEY = b"ray_app.classes"
"""Entry of the metadata of a Parquet file with the names of its classes, as a list of JSON."""


def with_classes(schema: pa.Schema, classes: Sequence[str] | None) -> pa.Schema:
    """Returns a schema of a file with the names of its classes, and without other metadata."""
    return schema.with_metadata({_KEY: json.dumps(list(classes))} if classes else None)


def stored_classes(metadata: dict[bytes, bytes] | None) -> str:
    """Returns the names of the classes in the metadata of a file, as JSON; "" if it has none."""
    return (metadata or {}).get(_KEY, b"").decode(errors="replace")


def renumber(names: Sequence[str], classes: Sequence[str], columns: Collection[str]) -> tuple[int, ...] | None:
    """Returns the number in `classes` of each name; None if labels in these columns cannot get these numbers.

    Masks are images, and a target with an entry for each class has one length.
    """
    number_of = {name: number for number, name in enumerate(classes)}
    if not number_of.keys() >= set(names):
        return None
    numbers = tuple(number_of[name] for name in names)
    labelled = class_columns(columns)
    is_fixed = "mask" in labelled or ("target" in labelled and len(names) < len(classes))
    return None if is_fixed and not is_unchanged(numbers) else numbers


def is_unchanged(numbers: Sequence[int]) -> bool:
    """Returns whether a renumbering leaves all numbers as they are."""
    return list(numbers) == list(range(len(numbers)))


def map_classes(table: pa.Table, numbers: tuple[int, ...], all_columns: Sequence[str]) -> pa.Table:
    """Returns a table with other numbers of classes; values that number no class, such as -1, stay.

    Args:
        table: Some columns of a file.
        numbers: The new number by the old one.
        all_columns: The names of all columns of the file.
    """
    for name in class_columns(all_columns):
        if name in table.column_names:
            index = table.column_names.index(name)
            table = table.set_column(index, *_map_column(table.schema.field(index), table.column(index), numbers))
    return table


def _map_column(field: pa.Field, column: pa.ChunkedArray, numbers: tuple[int, ...]) -> tuple[pa.Field, pa.Array]:
    """Returns a column of labels, of lists of labels, or of arrays with an entry for each class."""
    if spec := spec_of_field(field):
        values = np.asarray(from_column(column, spec))
        mapped = np.empty_like(values)
        mapped[:, list(numbers)] = values
        return to_column(field.name, mapped)
    column = column.combine_chunks()
    if is_ragged_list(field.type):
        ends = np.cumsum(pc.list_value_length(column).to_numpy())
        offsets = pa.array(np.concatenate([np.zeros(1, np.int64), ends]), column.offsets.type)
        values = _map_numbers(pc.list_flatten(column), numbers)
        return field, type(column).from_arrays(offsets, values, type=field.type)
    return field, _map_numbers(column, numbers)


def _map_numbers(labels: pa.Array, numbers: tuple[int, ...]) -> pa.Array:
    missing: npt.NDArray[np.bool_] = labels.is_null().to_numpy(zero_copy_only=False)
    values = pc.fill_null(labels, 0).to_numpy().astype(np.int64)
    is_class = (values >= 0) & (values < len(numbers))
    mapped = np.where(is_class, np.array(numbers)[np.where(is_class, values, 0)], values)
    return pa.array(mapped, labels.type, mask=missing)
