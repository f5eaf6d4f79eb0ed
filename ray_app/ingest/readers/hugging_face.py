"""Reader of data sets that Hugging Face `datasets` has stored, without that library.

It reads `save_to_disk` folders, and .arrow and .parquet files. `Form` and the functions after it decide which columns
can be kept, and check and convert each value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ray_app.data.arrays import (
    MAX_DECIMAL_DIGITS,
    is_bytes,
    is_exact_decimal,
    is_list,
    is_number,
    is_numbers,
    is_text,
)
from ray_app.data.dataset import index_columns
from ray_app.errors import ConfigError, DataError
from ray_app.ingest.options import FormatTraits
from ray_app.ingest.readers import base
from ray_app.ingest.readers.image_files import NOT_AN_IMAGE
from ray_app.storage.data_files import (
    File,
    files_in,
    find_file,
    is_folder,
    open_parquet,
    parser_errors,
    refuse_table_log,
)
from ray_app.storage.files import Location, read_json

_UNWRAPPED = (pa.UuidType, pa.JsonType)
"""Extension types that are stored as bytes or text and are read as such."""


@dataclass(frozen=True)
class Form:
    """The form that every row of a split is converted to; a label of text has its values as classes."""

    schema: pa.Schema
    shapes: dict[str, base.Shape]
    label: str | None
    classes: tuple[str, ...] | None
    check: bool
    has_named_numbers: bool = False
    """Whether the option `classes` names the numbers of the label."""

    @property
    def has_text_label(self) -> bool:
        """Whether the label's column holds text, or categories of text."""
        return self.label is not None and _is_label_text(self.schema.field(self.label).type)

    @property
    def has_label_lists(self) -> bool:
        """Whether the label is lists of classes, which become the column `target`."""
        is_list_column = self.label is not None and is_list(self.schema.field(self.label).type)
        return is_list_column and self.label not in self.shapes

    def name_of(self, column: str) -> str:
        """Returns the name under which a column is stored."""
        return column if column != self.label else "target" if self.has_label_lists else "label"


def _is_image(kind: pa.DataType) -> bool:
    """Returns whether `datasets` stores images (and sounds) as this type: bytes and their source path."""
    return bool(pa.types.is_struct(kind)) and {field.name for field in kind} == {"bytes", "path"}


def value_type(kind: pa.DataType) -> pa.DataType:
    """Returns the type of the values of a column, inside a dictionary (pandas' categories) or an extension type."""
    if pa.types.is_dictionary(kind):
        return value_type(kind.value_type)
    return value_type(kind.storage_type) if isinstance(kind, _UNWRAPPED) else kind


def _is_label_text(kind: pa.DataType) -> bool:
    """Returns whether the classes of a label of this type have the names that are its values, or in its lists."""
    return is_text(value_type(kind)) or base.is_text_list(kind)


def _is_integer_list(kind: pa.DataType) -> bool:
    return is_list(kind) and bool(pa.types.is_integer(kind.value_type))


def explain_unusable(kind: pa.DataType, is_label: bool, has_class_names: bool = False) -> str | None:
    """Returns the reason why a column of this type cannot be kept; None if it can."""
    value = value_type(kind)
    is_label_list = is_label and (base.is_text_list(kind) or (has_class_names and _is_integer_list(kind)))
    if is_label and not (is_number(value) or is_text(value) or is_label_list or is_numbers(kind)):
        allowed = "a ClassLabel, an integer, text, a truth value, or a list of ClassLabels or text"
        return f"is to be the label, but holds {kind}; a label is {allowed}"
    if is_list(kind):
        advice = "; lists of text can be the label" if base.is_text_list(kind) else ""
        return None if is_label_list or is_numbers(kind) else f"holds lists that are not of numbers ({kind}){advice}"
    if pa.types.is_struct(kind) and not _is_image(kind):
        return "holds objects; allowed are numbers, text, bytes, images and lists of numbers"
    if pa.types.is_null(value):
        return "has no value at all"
    has_bytes = is_bytes(value) or pa.types.is_fixed_size_binary(value)
    has_time = pa.types.is_temporal(value) and not pa.types.is_interval(value)
    is_value = is_number(value) or is_exact_decimal(value) or is_text(value) or has_bytes or has_time
    if _is_image(kind) or is_value:
        return None
    allowed = "allowed are numbers, text, bytes, times, images and lists of numbers"
    if pa.types.is_decimal(value):
        allowed = f"float64 represents decimals of at most {MAX_DECIMAL_DIGITS} digits"
    return f"holds {kind}; {allowed}"


def convert_table(form: Form, file: File, table: pa.Table, ids: Any, refuse: base.Refuse) -> pa.Table:
    """Returns a table converted to a form, without the rows that cannot be used."""
    if missing := [name for name in form.schema.names if name not in table.column_names]:
        raise DataError(
            f"{file}: no column {missing[0]!r} as in the first file; the columns are {table.column_names}. Save it"
            f" again."
        )
    columns = {
        column.name: base.to_plain(_cast_empty(table[column.name].combine_chunks(), column.type))
        for column in form.schema
    }
    for name in form.shapes:
        if not is_numbers(kind := columns[name].type):
            raise DataError(
                f"{file}: column {name!r} holds {kind}, and lists of numbers in the first file. Save it again."
            )
    faults: dict[int, str] = {}
    for name, column in columns.items():
        if _is_image(column.type):
            columns[name] = pc.struct_field(column, "bytes")
            faults |= _bad_images(name, columns[name], form.check, faults)
        elif name in form.shapes:
            fits = base.has_shape(column, form.shapes[name]).to_numpy(zero_copy_only=False)
            reason = base.explain_misfit(name, form.shapes[name])
            faults = {int(i): reason for i in np.flatnonzero(~fits)} | faults
        elif name == form.label and form.classes is not None:
            columns[name], wrong = _convert_label(form, file, column)
            faults = wrong | faults
    for i, reason in sorted(faults.items()):
        refuse(str(ids[i]), reason)
    good = np.ones(len(ids), np.bool_)
    good[list(faults)] = False
    kept = {form.name_of(name): _keep_rows(form, name, column, good) for name, column in columns.items()}
    return base.make_table(ids[good].tolist(), kept)


def _cast_empty(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Returns a column (of lists) without any value with the type of the first file; others unchanged."""
    inner = column.type
    while is_list(inner):
        inner = inner.value_type
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), kind)
    return column.cast(kind) if pa.types.is_null(inner) and is_list(kind) else column


def _convert_label(form: Form, file: File, column: pa.Array) -> tuple[pa.Array, dict[int, str]]:
    """Returns the indices of a label with named classes, or its lists of text, and the reason for each wrong row."""
    name, classes = form.label, form.classes or ()
    if form.has_label_lists:
        first = form.schema.field(name or "").type
        if base.is_text_list(column.type) != base.is_text_list(first) or not is_list(column.type):
            raise DataError(
                f"{file}: column {name!r} holds {column.type}, and {first} in the first file. Save it again."
            )
        wrong = np.flatnonzero(~base.has_labels(column, classes))
        return column, {int(i): base.NOT_IN_CLASSES for i in wrong}
    if form.has_text_label:
        if not is_text(column.type):
            raise DataError(f"{file}: column {name!r} holds {column.type}, and text in the first file. Save it again.")
        return base.to_class_indices(column, classes), {}
    if form.has_named_numbers:
        return base.to_class_indices(column, classes), {}
    if not (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
        raise DataError(f"{file}: column {name!r} holds {column.type}, but its classes have names. Save it again.")
    numbers = column.cast(pa.int64()) if pa.types.is_boolean(column.type) else column
    # `datasets` writes a missing label as -1.
    labels = pc.if_else(pc.less(numbers, 0), None, numbers)
    return labels, _labels_out_of_range(labels, len(classes))


def _labels_out_of_range(labels: pa.Array, classes: int) -> dict[int, str]:
    """Returns the reason for each row with a label that is not below the number of classes."""
    too_large = pc.fill_null(pc.greater_equal(labels, classes), False).to_numpy(zero_copy_only=False)
    return {
        int(i): f"label {labels[int(i)]}; the {classes} classes allow 0 to {classes - 1}"
        for i in np.flatnonzero(too_large)
    }


def _bad_images(name: str, images: pa.Array, check: bool, skipped: dict[int, str]) -> dict[int, str]:
    """Returns the reason for each row with an image that cannot be used, without the rows in `skipped`."""
    reasons = {}
    for i, image in enumerate(images):
        if i in skipped:
            continue
        if not image.is_valid:
            reasons[i] = f"{name!r} has no bytes, only a path; load the data set and save it with embedded files"
        elif check and (reason := base.explain_undecodable(image.as_py())):
            reasons[i] = NOT_AN_IMAGE.format(reason)
    return reasons


def _keep_rows(form: Form, name: str, column: pa.Array, good: np.ndarray) -> Any:
    """Returns the values of the good rows as they are stored."""
    rows = column.filter(pa.array(good))
    if name == form.label and form.has_label_lists:
        return base.to_multi_hot(rows, form.classes or ())
    if name in form.shapes:
        return base.with_class_indices(base.to_numbers(rows, form.shapes[name]), form.classes, name == form.label)
    return rows


SUFFIXES = (".arrow", ".parquet")
_SAVE_AGAIN = "It is not what save_to_disk writes; save it again."
_NUMBERED = re.compile(r"-(\d{5})-of-(\d{5}).*$")
_NUMBER = re.compile(r"([-_.]\d+)+$")
_SPLIT = re.compile(r"(?:^|[-_.])(train|training|test|testing|validation|valid|val|dev|eval)(?=[-_.]|$)", re.IGNORECASE)
_BATCH_ROWS, _LABEL_ROWS = 1000, 100_000
_NO_SPLITS = ("", "part", "data", "file", "shard", "chunk")
_ENDS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")
"""Marks at the end of an Arrow stream; the second one was written until Arrow 0.15."""


class HuggingFace(base.SourceReader):
    """A folder of one data set with its splits, or one file."""

    traits = FormatTraits(
        leaves_out_columns=True,
        options=frozenset({"label", "classes", "columns", "ragged", "targets", "check", "tokenizer"}),
    )

    def files(self) -> list[File]:
        """Returns the files, split by split, and the files that describe them."""
        rows = [file for files in self._splits.values() for file in files]
        folders = dict.fromkeys(file.location.parent for file in rows)
        descriptions = [find_file(folder / name) for folder in folders for name in ("state.json", "dataset_info.json")]
        return rows + [file for file in descriptions if file]

    def parts(self, run: base.Run) -> list[base.Part]:
        """Returns one part for each split, with the split's name; a single part has no name."""
        parts = []
        for split, form in self._forms(run).items():
            files = self._splits[split]
            input_splits = self.input_splits(files, partial(_tables, form))
            name = split if len(self._splits) > 1 else ""
            notes = (base.explain_multi_hot(str(form.label), form.classes or ()),) if form.has_label_lists else ()
            parts.append(
                base.Part(name, input_splits, form.classes, notes=notes, index_columns=index_columns(form.schema))
            )
        return parts

    @cached_property
    def _splits(self) -> dict[str, list[File]]:
        with parser_errors(self.path / "dataset_dict.json", _SAVE_AGAIN):
            saved = read_json(self.path / "dataset_dict.json") if is_folder(self.path) else None
            if saved is not None:
                return {split: _list_saved_files(self.path / split) for split in saved["splits"]}
        if find_file(self.path / "state.json"):
            return {"": _list_saved_files(self.path)}
        single = find_file(self.path)
        if not single and is_folder(self.path):
            refuse_table_log(self.path)
        files = [single] if single else files_in(self.path) if is_folder(self.path) else []
        splits = _group_by_split(self.path, [file for file in files if file.location.name.endswith(SUFFIXES)])
        if not splits:
            raise DataError(
                f"{self.path}: nothing of Hugging Face datasets; expected a folder of save_to_disk (state.json or"
                " dataset_dict.json), or a folder with .arrow or .parquet files, or one of them. Save it with"
                " dataset.save_to_disk(DIR)."
            )
        if not single:
            need_all_numbers(self.path, files)
        return splits

    def _forms(self, run: base.Run) -> dict[str, Form]:
        """Returns the form of each split; a label of text takes a pass over its column to find the classes."""
        forms = {split: self._form(files) for split, files in self._splits.items()}
        label = next(iter(forms.values())).label
        with_text = [split for split, form in forms.items() if form.has_text_label]
        if not label or not with_text:
            return forms
        if len(with_text) < len(forms):
            others = sorted(forms.keys() - set(with_text))
            raise DataError(
                f"{self.path}: the label {label!r} is text in {with_text}, but not in {others}. Save it in one type."
            )
        groups = [
            group for files in self._splits.values() for group in base.group_files(files, self.options.split_bytes)
        ]
        labels = set[str]().union(*run(partial(_label_values, label), groups))
        classes = self.order_classes(f"{self.path}: label column {label!r}", labels)
        return {split: replace(form, classes=classes) for split, form in forms.items()}

    def _form(self, files: list[File]) -> Form:
        """Returns the form of a split by its first file, with the shapes of the first lists that are not empty."""
        file = files[0]
        schema = _schema(file)
        features = _features(file, schema)
        label = self.options.label or self.default_label(schema.names)
        keep = self.kept_columns(file, schema.names, label, "column")
        feature = features.get(label or "", {})
        # A list of classes (multi-label) has its names in the feature of its items.
        names = feature.get("names") or (feature.get("feature") or {}).get("names")
        for name in keep:
            if reason := explain_unusable(schema.field(name).type, name == label, bool(names)):
                raise DataError(f"{file}: column {name!r} {reason}. Leave it out by naming the columns to keep.")
        kept = pa.schema([schema.field(name) for name in keep], schema.metadata)
        ragged = self.options.ragged or []
        base.check_ragged(file, ragged, kept)
        has_class_lists = names or (label and base.is_text_list(kept.field(label).type))
        lists = [c.name for c in kept if is_list(c.type) and not (c.name == label and has_class_lists)]
        shapes = _shapes(files, lists, ragged)
        if label and shapes.get(label, (1,)) != (1,):
            raise DataError(
                f"{file}: the label {label!r} has lists of shape {list(shapes[label])}; allowed are one number, a"
                " ClassLabel, text or a truth value, and lists of ClassLabels or text for several labels. Lists of 0"
                " and 1 are targets: name no label, and rename the column (--rename label=target)."
            )
        classes = tuple(names) if names else None
        if names and self.options.classes not in (None, list(names)):
            raise ConfigError(
                f"{file}: label column {label!r} has the classes {base.format_items(names)}, and classes is"
                f" {self.options.classes}. Leave classes out."
            )
        if label and not names and not _is_label_text(kind := value_type(kept.field(label).type)):
            classes = self.classes_of_type(f"{file}: label column {label!r}", kind)
        has_named_numbers = bool(self.options.classes) and not names
        form = Form(kept, shapes, label, classes, self.options.check, has_named_numbers)
        if form.has_label_lists:
            base.refuse_second_target(file, label, kept.names)
        return form


def _list_saved_files(folder: Location) -> list[File]:
    """Returns the files of a folder of `Dataset.save_to_disk`, in their order."""
    with parser_errors(folder / "state.json", _SAVE_AGAIN):
        state = read_json(folder / "state.json")
        if state is None:
            raise DataError(f"{folder}: no state.json; the folder of save_to_disk is not complete. Save it again.")
        if state.get("_indices_data_files"):
            raise DataError(
                f"{folder}: its rows are chosen by an index (an older datasets wrote it); load it and save_to_disk it"
                f" again."
            )
        names = [entry["filename"] for entry in state["_data_files"]]
        files = [find_file(folder / name) if PurePosixPath(name).name == name else None for name in names]
        if missing := [name for name, file in zip(names, files, strict=True) if file is None]:
            raise DataError(f"{folder}: state.json names {missing[0]!r}, which is not in this folder. Save it again.")
        return [file for file in files if file]


def need_all_numbers(folder: Location | str, files: list[File]) -> None:
    """Raises DataError unless files numbered as `NAME-00000-of-00003` are complete, each of them once."""
    numbers_of: dict[str, dict[int, list[int]]] = {}
    for file in files:
        if match := _NUMBERED.search(file.name):
            totals = numbers_of.setdefault(file.name[: match.start()], {})
            totals.setdefault(int(match[2]), []).append(int(match[1]))
    for name, totals in numbers_of.items():
        if len(totals) > 1 or any(len(set(numbers)) < len(numbers) for numbers in totals.values()):
            raise DataError(
                f"{folder}: the files {name}-... are numbered more than once, so rows would be doubled. Remove the"
                f" older ones."
            )
        [(total, numbers)] = totals.items()
        if missing := sorted(set(range(total)) - set(numbers)):
            lost = f"{name}-{missing[0]:05d}-of-{total:05d}"
            raise DataError(f"{folder}: {lost} is missing, {len(numbers)} of {total} are there. Copy it again.")


def _group_by_split(root: Location, files: list[File]) -> dict[str, list[File]]:
    """Returns the files by the splits in their names; all under "" where no name has a usual split."""
    stems = {file: _NUMBER.sub("", _NUMBERED.sub("", file.name.rpartition(".")[0])) for file in files}
    if not any(_SPLIT.search(stem) for stem in stems.values()):
        return {"": files} if files else {}
    splits: dict[str, list[File]] = {}
    for file, stem in stems.items():
        split = _split_of(stem)
        if split.isdecimal() or split.lower() in _NO_SPLITS:
            raise DataError(
                f"{root}: {file.name} does not say of which split it is, as the others do (train, test or the like in"
                " their names). Rename it, or move it elsewhere."
            )
        splits.setdefault(split, []).append(file)
    return splits


def _split_of(stem: str) -> str:
    """Returns the split in a stem: `train` of `mnist-train`, `train_sft` of `chat-train_sft`, `other` of `a-other`."""
    usual = list(_SPLIT.finditer(stem))
    return stem[usual[-1].start(1) :] if usual else stem.rpartition("-")[2]


def _schema(file: File) -> pa.Schema:
    with _open_batches(file) as (schema, _):
        return schema


@contextmanager
def _open_batches(
    file: File, columns: list[str] | None = None, batch_rows: int = _BATCH_ROWS
) -> Iterator[tuple[pa.Schema, Iterator[Any]]]:
    """Opens a file and gives its schema and record batches."""
    with parser_errors(file, "The file is damaged or not of Arrow's stream format; save it again."):
        if file.location.name.endswith(".parquet"):
            parquet_file = open_parquet(file.location)
            schema, names = _select_columns(file, parquet_file.schema_arrow, columns)
            yield schema, parquet_file.iter_batches(batch_rows, columns=names, use_threads=False)
        else:
            is_local = isinstance(file.location, Path)
            source = pa.memory_map(str(file.location)) if is_local else pa.PythonFile(file.open(), "r")
            reader = pa.ipc.open_stream(source)
            schema, names = _select_columns(file, reader.schema, columns)
            yield schema, (batch.select(names) for batch in _read_to_end(reader, source))


def _select_columns(file: File, schema: pa.Schema, columns: list[str] | None) -> tuple[pa.Schema, list[str]]:
    """Returns the schema of a file with only some columns, and their names."""
    if repeated := sorted({name for name in schema.names if schema.names.count(name) > 1}):
        raise DataError(
            f"{file}: two columns of one name: {base.format_items(repeated)}. Give each column its own name and save"
            " the file again."
        )
    names = [name for name in schema.names if columns is None or name in columns]
    return pa.schema([schema.field(name) for name in names], schema.metadata), names


def _read(file: File, columns: list[str]) -> Iterator[pa.Table]:
    """Yields some columns of a file, where it has them, in tables of about `BLOCK_BYTES`; the first has no rows."""
    with _open_batches(file, columns) as (schema, batches):
        yield schema.empty_table()
        for batch in batches:
            # Without the check a damaged batch can refer to memory outside itself.
            batch.validate(full=True)
            step = max(1, base.BLOCK_BYTES * len(batch) // max(1, batch.nbytes))
            for start in range(0, len(batch), step):
                yield pa.Table.from_batches([batch.slice(start, step)])


def _label_values(label: str, files: list[File]) -> set[str]:
    """Returns the distinct labels of text in files, with "" for rows without a label."""
    values: set[str] = set()
    for file in files:
        with _open_batches(file, [label], _LABEL_ROWS) as (schema, batches):
            # A file without the column is refused when its rows are read.
            if label not in schema.names:
                continue
            for batch in batches:
                batch.validate(full=True)
                column = base.to_plain(batch[label])
                values |= base.label_texts(column) if _is_label_text(column.type) else set()
    return values


def _read_to_end(reader: pa.RecordBatchStreamReader, source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    """Yields the batches of a stream and checks its end, as the reader accepts a stream that was cut off."""
    end = source.tell()
    for batch in reader:
        yield batch
        end = source.tell()
    source.seek(end)
    if source.read(8) not in _ENDS:
        raise pa.ArrowInvalid("it was cut off behind one of its record batches")


def _features(file: File, schema: pa.Schema) -> dict[str, Any]:
    """Returns the features by name that `datasets` has stored in the file or in `dataset_info.json`."""
    metadata = (schema.metadata or {}).get(b"huggingface")
    info_file = file.location.parent / "dataset_info.json"
    with parser_errors(file if metadata else info_file, "What it says about the columns is damaged; save it again."):
        info = json.loads(metadata)["info"] if metadata else read_json(info_file) or {}
        features = {
            name: feature for name, feature in (info.get("features") or {}).items() if isinstance(feature, dict)
        }
        for feature in features.values():
            if not all(isinstance(name, str) for name in feature.get("names") or ()):
                raise ValueError(f"names of classes {feature['names']!r}")
        return features


def _shapes(files: list[File], lists: list[str], ragged: list[str]) -> dict[str, base.Shape]:
    """Returns the shape of the first value that is not empty in each column of lists."""
    shapes: dict[str, base.Shape] = {}
    for table in (table for file in files for table in _read(file, lists)):
        for name in lists:
            shape_of = base.ragged_shape if name in ragged else base.first_shape
            if name not in shapes and name in table.column_names and (shape := shape_of(table[name])):
                shapes[name] = shape
        if len(shapes) == len(lists):
            return shapes
    missing = next(name for name in lists if name not in shapes)
    raise DataError(f"{files[0]}: column {missing!r} has no value at all. Leave it out by naming the columns to keep.")


def _tables(form: Form, files: list[File], refuse: base.Refuse) -> Iterator[pa.Table]:
    for file in files:
        row, name = 0, file.name
        for table in _read(file, form.schema.names):
            ids = np.array([f"{name}:{i}" for i in range(row, row + len(table))], dtype=object)
            row += len(table)
            if len(table):
                yield convert_table(form, file, table, ids, refuse)
