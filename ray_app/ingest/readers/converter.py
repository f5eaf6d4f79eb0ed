"""The conversion of Arrow tables to the columns of a data set, with one rule for each kind of column.

A reader makes tables of its source and a `Form` of what a first pass or the first rows show (`make_form`).
`Form.convert` gives each row that form or refuses it with a reason: lists of numbers of one shape become array columns,
lists of any length stay lists if the user allows them, a label of text becomes the indices of its classes, lists of
classes become the array `target`, and images are decoded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ray_app.data.arrays import (
    MAX_DECIMAL_DIGITS,
    Array,
    is_bytes,
    is_list,
    is_number,
    is_numbers,
    is_text,
    number_type,
    read_as_float,
    to_list_array,
)
from ray_app.data.plain_columns import to_plain
from ray_app.errors import ConfigError, DataError
from ray_app.ingest.readers import sources
from ray_app.ingest.readers.image_files import NOT_AN_IMAGE
from ray_app.storage.data_files import File
from ray_app.task.ragged import Ragged

ANY = -1
"""Stands for the length of lists that may have any length."""

Shape = tuple[int, ...]
"""Shape of the lists in a column; the first length may be `ANY`."""


@dataclass(frozen=True)
class Form:
    """The form that every row is converted to; a label of text has its values as classes.

    Args:
        schema: The columns that are kept, with types by `plain_schema`.
        shapes: Shape of the lists of each column of lists, but not of a label of lists of classes.
        images: Columns of encoded images, which are decoded once if `check` says so.
        has_named_numbers: Whether the option `classes` names the numbers of the label.
    """

    schema: pa.Schema
    shapes: dict[str, Shape]
    label: str | None
    classes: tuple[str, ...] | None
    has_named_numbers: bool = False
    images: frozenset[str] = frozenset()
    check: bool = True

    @property
    def has_text_label(self) -> bool:
        """Whether the classes are learned from the values of the label, or from those in its lists."""
        return self.label is not None and is_label_text(self.schema.field(self.label).type)

    @property
    def has_label_lists(self) -> bool:
        """Whether the label is lists of classes, which become the column `target`."""
        is_list_column = self.label is not None and is_list(self.schema.field(self.label).type)
        return is_list_column and self.label not in self.shapes

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of a part of such rows."""
        if not self.has_label_lists:
            return ()
        order = sources.format_items(self.classes or ())
        return (
            f"the lists of {self.label!r} became the array `target`: 1 for each class in the list, 0 for other classes;"
            f" {order}",
        )

    def name_of(self, column: str) -> str:
        """Returns the name under which a column is stored."""
        return column if column != self.label else "target" if self.has_label_lists else "label"

    def convert(
        self, file: File, table: pa.Table, ids: Sequence[str] | pa.Array, refuse: sources.Refuse
    ) -> Iterator[pa.Table]:
        """Yields the rows of a table in this form, and refuses those that cannot be used; `ids` has their ids."""
        columns = self._read_columns(file, to_plain(table))
        faults: dict[int, str] = {}
        for name, column in columns.items():
            columns[name], wrong = self._find_faults(file, name, column, faults)
            faults = wrong | faults
        for i, reason in sorted(faults.items()):
            refuse(str(ids[i]), reason)
        good = np.ones(len(ids), np.bool_)
        good[list(faults)] = False
        kept = {name: column.filter(pa.array(good)) for name, column in columns.items()}
        kept_ids = pa.array(ids, pa.string()).filter(pa.array(good))
        # The arrays of lists of classes are as wide as there are classes.
        step = sources.BLOCK_BYTES // (4 * len(self.classes or ()) + 1) if self.has_label_lists else len(kept_ids)
        for start in range(0, max(len(kept_ids), 1), max(1, step)):
            values = {self.name_of(name): self._store(name, kept[name].slice(start, max(1, step))) for name in kept}
            yield sources.make_table(kept_ids[start : start + max(1, step)], values)

    def _read_columns(self, file: File, table: pa.Table) -> dict[str, pa.Array]:
        """Returns the columns of the form; raises DataError for one that lacks or holds no lists of numbers."""
        if missing := [name for name in self.schema.names if name not in table.column_names]:
            raise DataError(
                f"{file}: no column {missing[0]!r} as in the first file; the columns are {table.column_names}. Save it"
                f" again."
            )
        columns = {field.name: _cast_empty(table[field.name].combine_chunks(), field.type) for field in self.schema}
        for name in self.shapes:
            if not is_numbers(kind := columns[name].type):
                raise self._other_type(file, name, kind, "lists of numbers")
        return columns

    @staticmethod
    def _other_type(file: File, name: str | None, kind: pa.DataType, first: object) -> DataError:
        return DataError(f"{file}: column {name!r} holds {kind}, but {first} in the first file. Save it again.")

    def _find_faults(
        self, file: File, name: str, column: pa.Array, skipped: dict[int, str]
    ) -> tuple[pa.Array, dict[int, str]]:
        """Returns a column as it is stored before rows are left out, and the reason for each row to be left out."""
        if name in self.images:
            return column, _find_bad_images(name, column, self.check, skipped)
        if name in self.shapes:
            fits = has_shape(column, self.shapes[name]).to_numpy(zero_copy_only=False)
            return column, dict.fromkeys(np.flatnonzero(~fits).tolist(), explain_misfit(name, self.shapes[name]))
        if pa.types.is_decimal(column.type):
            return read_as_float(column), _find_long_decimals(name, column)
        column = column.cast(_STORED.get(column.type, column.type))
        if name != self.label or self.classes is None:
            return column, {}
        return self._convert_label(file, column)

    def _convert_label(self, file: File, column: pa.Array) -> tuple[pa.Array, dict[int, str]]:
        """Returns the indices of a label with named classes, or its lists, and the reason for each wrong row."""
        name, classes = self.label, self.classes or ()
        if self.has_label_lists:
            first = self.schema.field(name or "").type
            if is_text_list(column.type) != is_text_list(first) or not is_list(column.type):
                raise self._other_type(file, name, column.type, first)
            if is_text_list(column.type):
                column = column.cast(pa.list_(pa.string()))
            return column, dict.fromkeys(np.flatnonzero(~has_labels(column, classes)).tolist(), NOT_IN_CLASSES)
        if self.has_text_label or self.has_named_numbers:
            if self.has_text_label and not is_text(column.type):
                raise self._other_type(file, name, column.type, "text")
            return to_class_indices(column, classes), {}
        if not (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
            raise DataError(f"{file}: column {name!r} holds {column.type}, but its classes have names. Save it again.")
        numbers = column.cast(pa.int64()) if pa.types.is_boolean(column.type) else column
        # `datasets` writes a missing label as -1.
        labels = pc.if_else(pc.less(numbers, 0), None, numbers)
        too_large = pc.fill_null(pc.greater_equal(labels, len(classes)), False).to_numpy(zero_copy_only=False)
        allowed = f"the {len(classes)} classes allow 0 to {len(classes) - 1}"
        return labels, {int(i): f"label {labels[int(i)]}; {allowed}" for i in np.flatnonzero(too_large)}

    def _store(self, name: str, rows: pa.Array) -> Any:
        """Returns the values of good rows as they are stored."""
        if name == self.label and self.has_label_lists:
            classes = self.classes or ()
            targets = np.zeros((len(rows), len(classes)), np.float32)
            targets[_labels_of_lists(rows, classes)] = 1
            return targets
        if name not in self.shapes:
            return rows
        values = to_numbers(rows, self.shapes[name])
        is_single = isinstance(values, np.ndarray) and values.shape[1:] == (1,)
        if name != self.label or self.classes is None or not is_single:
            return values
        return to_class_indices(pa.array(values[:, 0]), self.classes)


_STORED = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
"""The types under which text and bytes are stored."""


def make_form(
    reader: sources.SourceReader,
    where: object,
    schema: pa.Schema,
    label: str | None,
    noun: str,
    find_shapes: Callable[[list[str]], dict[str, Shape]],
    names: Sequence[str] | None = None,
    images: frozenset[str] = frozenset(),
) -> Form:
    """Returns the form of the rows of a source; the classes of a label of text are still to be learned.

    Args:
        schema: All columns, with types by `plain_schema`.
        noun: What the source calls a column, for messages.
        find_shapes: Returns the shapes of these columns of lists, of those that have a value.
        names: The names of the classes, if the source says them.
        images: The columns of encoded images.

    Raises:
        DataError: A column cannot be kept, or the label is no label.
        ConfigError: The options name something else than the source has.
    """
    options = reader.options
    kept = pa.schema(
        [schema.field(name) for name in reader.kept_columns(where, schema.names, label, noun)], schema.metadata
    )
    for column in kept:
        if reason := _explain_unusable(column.type, column.name == label, bool(names)):
            raise DataError(f"{where}: {noun} {column.name!r} {reason}. Name the columns to keep without it.")
    check_ragged(where, options.ragged or [], kept, label)
    is_class_list = names or (label and is_text_list(kept.field(label).type))
    lists = [column.name for column in kept if is_list(column.type) and not (column.name == label and is_class_list)]
    shapes = find_shapes(lists)
    if missing := [name for name in lists if name not in shapes]:
        raise DataError(f"{where}: {noun} {missing[0]!r} has no value at all. Name the columns to keep without it.")
    if label and shapes.get(label, (1,)) != (1,):
        raise DataError(
            f"{where}: the label {label!r} has lists of shape {list(shapes[label])}; allowed are one number, a"
            " ClassLabel, text or a truth value, and lists of ClassLabels or text for several labels. Lists of 0"
            " and 1 are targets: name no label, and rename the column (--rename label=target)."
        )
    if names and options.classes not in (None, list(names)):
        raise ConfigError(
            f"{where}: label {noun} {label!r} has the classes {sources.format_items(names)}, and classes is"
            f" {options.classes}. Leave classes out."
        )
    has_named_numbers = bool(options.classes) and not names
    form = Form(kept, shapes, label, tuple(names) if names else None, has_named_numbers, images, options.check)
    if form.has_label_lists and "target" in set(kept.names) - {label}:
        raise DataError(
            f"{where}: the lists of {label!r} become the column 'target', but there is another column 'target'. Drop it"
            " with --drop, or rename it in the source."
        )
    if label and not names and not form.has_text_label:
        classes = reader.classes_of_type(f"{where}: label {noun} {label!r}", kept.field(label).type)
        return replace(form, classes=classes)
    return form


def _explain_unusable(kind: pa.DataType, is_label: bool, has_class_names: bool) -> str | None:
    """Returns the reason why a column of this type cannot be kept; None if it can."""
    if pa.types.is_null(kind):
        return "has no value at all"
    is_integer_list = is_list(kind) and bool(pa.types.is_integer(kind.value_type))
    is_label_list = is_label and (is_text_list(kind) or (has_class_names and is_integer_list))
    if is_list(kind):
        advice = "; lists of text can be the label (--label)" if is_text_list(kind) else ""
        is_allowed = is_label_list or is_numbers(kind)
        return None if is_allowed else f"holds lists that are not of numbers, or all empty ({kind}){advice}"
    if pa.types.is_struct(kind):
        return (
            "holds objects; allowed are numbers, text, truth values and lists of numbers; --flatten true allows objects"
        )
    if is_label and not (is_number(kind) or is_text(kind)):
        allowed = "a ClassLabel, an integer, text, a truth value, or a list of ClassLabels or text"
        return f"is the label, but holds {kind}; a label must be {allowed}"
    is_time = pa.types.is_temporal(kind) and not pa.types.is_interval(kind)
    if is_number(kind) or pa.types.is_decimal(kind) or is_text(kind) or is_bytes(kind) or is_time:
        return None
    return f"holds {kind}; allowed are numbers, text, bytes, times, images and lists of numbers"


def learn_classes(
    reader: sources.SourceReader,
    run: sources.Run,
    learn: Callable[[list[File]], set[str]],
    noun: str,
    forms: dict[str, Form],
    splits: Mapping[str, list[File]],
) -> dict[str, Form]:
    """Returns the forms of the splits, those of a label of text with its classes, which are the same in all splits.

    Args:
        learn: Returns the distinct labels in some files, with "" for a row without one.
        noun: What the source calls the label, for messages.
        forms: The form of each split.
        splits: The files of each split.
    """
    with_text = [split for split, form in forms.items() if form.has_text_label]
    if not with_text:
        return forms
    label = next(iter(forms.values())).label
    if others := sorted(forms.keys() - set(with_text)):
        raise DataError(
            f"{reader.pattern}: the label {label!r} is text in {with_text}, but not in {others}. Write it in one type."
        )
    groups = [group for files in splits.values() for group in sources.group_files(files, reader.options.split_bytes)]
    classes = reader.order_classes(f"{reader.pattern}: {noun} {label!r}", set[str]().union(*run(learn, groups)))
    return {split: replace(form, classes=classes) for split, form in forms.items()}


def _cast_empty(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Returns a column (of lists) without any value with the type of the first file; others unchanged."""
    inner = column.type
    while is_list(inner):
        inner = inner.value_type
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), kind)
    return column.cast(kind) if pa.types.is_null(inner) and is_list(kind) else column


def _find_bad_images(name: str, images: pa.Array, check: bool, skipped: dict[int, str]) -> dict[int, str]:
    """Returns the reason for each row with an image that cannot be used, without the rows in `skipped`."""
    reasons = {}
    for i, image in enumerate(images):
        if i in skipped:
            continue
        if not image.is_valid:
            reasons[i] = f"{name!r} has no bytes, only a path; load the data set and save it with embedded files"
        elif check and (reason := sources.explain_undecodable(image.as_py())):
            reasons[i] = NOT_AN_IMAGE.format(reason)
    return reasons


def _find_long_decimals(name: str, column: pa.Array) -> dict[int, str]:
    """Returns the reason for each row with a decimal of more digits than float64 represents."""
    if column.type.precision <= MAX_DECIMAL_DIGITS:
        return {}
    digits = pc.utf8_trim(pc.replace_substring_regex(column.cast(pa.string()), "[-.]", ""), "0")
    too_long = pc.fill_null(pc.greater(pc.utf8_length(digits), MAX_DECIMAL_DIGITS), False)
    return {
        int(i): f"{name!r} holds {column[int(i)]}; float64 represents decimals of at most {MAX_DECIMAL_DIGITS} digits"
        for i in np.flatnonzero(too_long.to_numpy(zero_copy_only=False))
    }


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
        return f"{name!r} is not a list of numbers, or lacks one"
    if shape[0] == ANY:
        return (
            f"{name!r} is not a list of lists of shape {list(shape[1:])}, as the first non-empty one, or lacks a number"
        )
    return (
        f"{name!r} is not a list of shape {list(shape)}, as the first non-empty one; for lists of any length, name the"
        " column in --ragged"
    )


def check_ragged(where: object, ragged: list[str], schema: pa.Schema, label: str | None) -> None:
    """Raises DataError if a column of the option `ragged` is not kept, is the label or does not hold lists."""
    lists = [column.name for column in schema if is_list(column.type) and column.name != label]
    allowed = f"columns of lists are {lists}. Name some of these." if lists else "none has lists. Leave ragged out."
    for name in ragged:
        if name not in schema.names:
            raise DataError(
                f"{where}: ragged names {name!r}, but the columns that are kept are {schema.names}; {allowed}"
            )
        if name not in lists:
            named = f"the label {name!r}" if name == label else f"{name!r}, which holds {schema.field(name).type}"
            raise DataError(f"{where}: ragged names {named}; {allowed}")


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


def is_text_list(kind: pa.DataType) -> bool:
    """Returns whether values are lists of text, which as the label name all classes of a row."""
    return is_list(kind) and is_text(kind.value_type)


def is_label_text(kind: pa.DataType) -> bool:
    """Returns whether the classes of a label of this type have the names that are its values, or in its lists."""
    return is_text(kind) or is_text_list(kind)


def label_texts(column: pa.Array | pa.ChunkedArray) -> set[str]:
    """Returns the distinct texts of a label, or of lists of them, with "" for a row or an item without a value."""
    missing = {""} if column.null_count else set()
    if is_list(column.type):
        return missing | label_texts(pc.list_flatten(column))
    return missing | set(pc.unique(column).drop_null().to_pylist())


def has_labels(lists: pa.Array, classes: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Returns for each row of a column of lists whether it has a list, of names or indices of classes only."""
    good: npt.NDArray[np.bool_] = lists.is_valid().to_numpy(zero_copy_only=False)
    owners, indices = _labels_of_lists(lists, classes)
    good[owners[indices < 0]] = False
    return good


def _labels_of_lists(lists: pa.Array, classes: Sequence[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns for each item of the lists its row, and the index of its class, -1 for an item that is not a class."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    items = pc.list_flatten(lists)
    class_values = pa.array(classes, pa.string())
    if not is_text(items.type):
        items, class_values = items.cast(pa.int64(), safe=False), pa.array(range(len(classes)), pa.int64())
    indices = pc.fill_null(pc.index_in(items, class_values, skip_nulls=True), -1)
    return np.repeat(np.arange(len(lists)), lengths), indices.to_numpy().astype(np.int64)


def to_class_indices(labels: pa.Array, classes: Sequence[str]) -> pa.Array:
    """Returns the indices of labels in `classes`, null for others: int64.

    The name of a number is its text, of a whole float without a fraction: `-1` for -1 and for -1.0.
    """
    if pa.types.is_floating(labels.type):
        whole = pc.and_(pc.equal(pc.floor(labels), labels), pc.less(pc.abs(labels), 2.0**53))
        integers = pc.if_else(whole, labels, None).cast(pa.int64())
        labels = pc.coalesce(integers.cast(pa.string()), labels.cast(pa.string()))
    return pc.index_in(labels.cast(pa.string()), pa.array(classes, pa.string())).cast(pa.int64())


NOT_IN_CLASSES = "not a list of labels, or a list with an unknown class"
"""The reason to refuse a row for which `has_labels` is false."""
