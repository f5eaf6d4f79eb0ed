"""Reader of data sets that Hugging Face `datasets` has stored, without that library.

It reads `save_to_disk` folders, and .arrow, .feather and .parquet files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ray_app.data.dataset import index_columns
from ray_app.data.plain_columns import is_image, plain_schema, to_plain
from ray_app.errors import DataError
from ray_app.ingest.options import FormatTraits, IngestOptions
from ray_app.ingest.readers import sources
from ray_app.ingest.readers.converter import (
    Form,
    Shape,
    first_shape,
    is_label_text,
    label_texts,
    learn_classes,
    make_form,
    ragged_shape,
)
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

SUFFIXES = (".arrow", ".feather", ".parquet")
_SAVE_AGAIN = "The file is not as save_to_disk writes it; save the data set again."
_NUMBERED = re.compile(r"-(\d{5})-of-(\d{5}).*$")
_NUMBER = re.compile(r"([-_.]\d+)+$")
_SPLIT = re.compile(rf"(?:^|[-_.])({'|'.join(sources.SPLITS)})(?=[-_.]|$)", re.IGNORECASE)
_MAX_BATCH_ROWS, _LABEL_ROWS = 1 << 16, 100_000
_NO_SPLITS = ("", "part", "data", "file", "shard", "chunk")
_FILE_MAGIC = b"ARROW1"
"""Beginning of Arrow's file format, which pandas (Feather) and Polars write; `datasets` writes the stream format."""
_ENDS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")
"""Marks at the end of an Arrow stream; the second one was written until Arrow 0.15."""


class HuggingFace(sources.SourceReader):
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

    def parts(self, run: sources.Run) -> list[sources.Part]:
        """Returns one part for each split, with the split's name; a single part has no name."""
        parts = []
        for split, form in self._forms(run).items():
            files = self._splits[split]
            input_splits = self.input_splits(files, partial(_tables, form))
            name = split if len(self._splits) > 1 else ""
            index = index_columns(form.schema)
            parts.append(sources.Part(name, input_splits, form.classes, notes=form.notes, index_columns=index))
        return parts

    @cached_property
    def _splits(self) -> dict[str, list[File]]:
        with parser_errors(self.path / "dataset_dict.json", _SAVE_AGAIN):
            saved = read_json(self.path / "dataset_dict.json") if is_folder(self.path) else None
            if saved is not None:
                if foreign := [split for split in saved["splits"] if not _is_plain(split)]:
                    raise DataError(
                        f"{self.path}: dataset_dict.json names the split {foreign[0]!r}, but there is no such folder."
                        " Save the data set again."
                    )
                return {split: _list_saved_files(self.path / split) for split in saved["splits"]}
        if find_file(self.path / "state.json"):
            return {"": _list_saved_files(self.path)}
        single = find_file(self.path)
        if not single and is_folder(self.path):
            refuse_table_log(self.path)
        files = [single] if single else files_in(self.path) if is_folder(self.path) else []
        splits = group_by_split(self.path, [file for file in files if file.location.name.endswith(SUFFIXES)])
        if not splits:
            raise DataError(
                f"{self.path}: nothing of Hugging Face datasets; expected a folder of save_to_disk (state.json or"
                " dataset_dict.json), or a folder with .arrow, .feather or .parquet files, or one of them. Save it with"
                " dataset.save_to_disk(DIR)."
            )
        if not single:
            need_all_numbers(self.path, files)
        return splits

    def _forms(self, run: sources.Run) -> dict[str, Form]:
        """Returns the form of each split; a label of text takes a pass over its column to find the classes."""
        forms = {split: self._form(files) for split, files in self._splits.items()}
        learn = partial(_label_values, next(iter(forms.values())).label or "")
        return learn_classes(self, run, learn, "label column", forms, self._splits)

    def _form(self, files: list[File]) -> Form:
        """Returns the form of a split by its first file, with the shapes of the first lists that are not empty."""
        file = files[0]
        stored = _schema(file)
        schema = plain_schema(stored)
        _refuse_repeated(file, schema.names)
        reader = replace(self, options=_name_fields(self.options, schema.names))
        label = self.options.label or self.default_label(schema.names)
        feature = _features(file, stored).get(label or "", {})
        # A list of classes (multi-label) has its names in the feature of its items.
        names = feature.get("names") or (feature.get("feature") or {}).get("names")
        images = frozenset(column.name for column in stored if is_image(column.type))
        find_shapes = partial(_shapes, files, self.options.ragged or [])
        return make_form(reader, file, schema, label, "column", find_shapes, names, images)


def _name_fields(options: IngestOptions, names: list[str]) -> IngestOptions:
    """Returns the options with the fields of a column of objects, `a.b`, in place of its name `a`."""

    def expand(chosen: list[str] | None) -> list[str] | None:
        fields = {name: [field for field in names if field.startswith(f"{name}.")] for name in chosen or ()}
        return chosen and [field for name in chosen for field in ([name] if name in names else fields[name] or [name])]

    return replace(options, columns=expand(options.columns), drop=expand(options.drop))


def _is_plain(name: str) -> bool:
    """Whether a name is that of a file or a folder in a folder, and leads nowhere else."""
    return PurePosixPath(name).name == name not in ("", "..")


def _list_saved_files(folder: Location) -> list[File]:
    """Returns the files of a folder of `Dataset.save_to_disk`, in their order."""
    with parser_errors(folder / "state.json", _SAVE_AGAIN):
        state = read_json(folder / "state.json")
        if state is None:
            raise DataError(f"{folder}: no state.json; the folder of save_to_disk is not complete. Save it again.")
        if state.get("_indices_data_files"):
            raise DataError(
                f"{folder}: the rows are selected by an index, as older versions of datasets wrote it; load the data"
                " set and call save_to_disk again."
            )
        names = [entry["filename"] for entry in state["_data_files"]]
        files = [find_file(folder / name) if _is_plain(name) else None for name in names]
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
                f"{folder}: the files {name}-... are numbered more than once, so rows would be repeated. Remove the"
                " older ones."
            )
        [(total, numbers)] = totals.items()
        if missing := sorted(set(range(total)) - set(numbers)):
            lost = f"{name}-{missing[0]:05d}-of-{total:05d}"
            raise DataError(f"{folder}: {lost} is missing; {len(numbers)} of {total} files exist. Copy it again.")


def group_by_split(root: object, files: list[File], suffix: str = ".") -> dict[str, list[File]]:
    """Returns the files by the splits in their names; all under "" where these have no usual split, or the same one.

    Args:
        suffix: What the last part of a name begins with, which does not count.
    """
    stems = {file: _NUMBER.sub("", _NUMBERED.sub("", file.name.rpartition(suffix)[0] or file.name)) for file in files}
    if not any(_SPLIT.search(stem) for stem in stems.values()):
        return {"": files} if files else {}
    splits: dict[str, list[File]] = {}
    for file, stem in stems.items():
        split = _split_of(stem)
        if split.isdecimal() or split.lower() in _NO_SPLITS:
            raise DataError(
                f"{root}: {file.name} does not name its split, as the other files do (train, test or similar). Rename"
                " it, or move it elsewhere."
            )
        splits.setdefault(split, []).append(file)
    return splits if len(splits) > 1 else {"": files}


def _split_of(stem: str) -> str:
    """Returns the split in a stem: `train` of `mnist-train`, `train_sft` of `chat-train_sft`, `other` of `a-other`."""
    usual = list(_SPLIT.finditer(stem))
    return stem[usual[-1].start(1) :] if usual else stem.rpartition("-")[2]


def _schema(file: File) -> pa.Schema:
    with _open_batches(file) as (schema, _):
        return schema


@contextmanager
def _open_batches(
    file: File, columns: list[str] | None = None, batch_rows: int | None = None
) -> Iterator[tuple[pa.Schema, Iterator[Any]]]:
    """Opens a file and gives its schema and record batches; batches of Parquet have about `BLOCK_BYTES` by default."""
    with parser_errors(file, "The file is damaged or has another format; save it again."):
        if file.location.name.endswith(".parquet"):
            parquet_file = open_parquet(file.location)
            schema, names = _select_columns(file, parquet_file.schema_arrow, columns)
            rows = batch_rows or _rows_of_block(parquet_file.metadata)
            yield schema, parquet_file.iter_batches(rows, columns=names, use_threads=False)
        else:
            is_local = isinstance(file.location, Path)
            source = pa.memory_map(str(file.location)) if is_local else pa.PythonFile(file.open(), "r")
            is_stream = source.read(len(_FILE_MAGIC)) != _FILE_MAGIC
            source.seek(0)
            reader = pa.ipc.open_stream(source) if is_stream else pa.ipc.open_file(source)
            schema, names = _select_columns(file, reader.schema, columns)
            batches = (
                _read_to_end(reader, source) if is_stream else map(reader.get_batch, range(reader.num_record_batches))
            )
            yield schema, (batch.select(names) for batch in batches)


def _rows_of_block(footer: pq.FileMetaData) -> int:
    """Returns how many rows of a file have about `BLOCK_BYTES` before compression, at most `_MAX_BATCH_ROWS`."""
    num_bytes = sum(footer.row_group(i).total_byte_size for i in range(footer.num_row_groups))
    return max(1, min(_MAX_BATCH_ROWS, sources.BLOCK_BYTES * footer.num_rows // max(1, num_bytes)))


def _select_columns(file: File, schema: pa.Schema, columns: list[str] | None) -> tuple[pa.Schema, list[str]]:
    """Returns the schema of a file with only some columns, and their names."""
    _refuse_repeated(file, schema.names)
    # `a.b` is a field of a column of objects.
    taken = None if columns is None else {*columns, *(name.partition(".")[0] for name in columns)}
    names = [name for name in schema.names if taken is None or name in taken]
    return pa.schema([schema.field(name) for name in names], schema.metadata), names


def _refuse_repeated(file: File, names: list[str]) -> None:
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(
            f"{file}: two columns with the same name: {sources.format_items(repeated)}. Give each column its own name"
            " and save the file again."
        )


def _read(file: File, columns: list[str], batch_rows: int | None = None) -> Iterator[pa.Table]:
    """Yields some columns of a file by `to_plain`, where it has them, in tables of about `BLOCK_BYTES`.

    The first table has no rows.
    """
    with _open_batches(file, columns, batch_rows) as (schema, batches):
        yield plain_schema(schema).empty_table()
        for batch in batches:
            # Without the check a damaged batch can refer to memory outside itself.
            batch.validate(full=True)
            step = max(1, sources.BLOCK_BYTES * len(batch) // max(1, batch.nbytes))
            for start in range(0, len(batch), step):
                yield to_plain(pa.Table.from_batches([batch.slice(start, step)]))


def _label_values(label: str, files: list[File]) -> set[str]:
    """Returns the distinct labels of text in files, with "" for rows without a label."""
    values: set[str] = set()
    for file in files:
        for table in _read(file, [label], _LABEL_ROWS):
            # A file without the column is refused when its rows are read.
            column = table[label] if label in table.column_names else pa.chunked_array([pa.nulls(0)])
            if is_label_text(column.type):
                values |= label_texts(column)
    return values


def _read_to_end(reader: pa.RecordBatchStreamReader, source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    """Yields the batches of a stream and checks its end, as the reader accepts a stream that was cut off."""
    end = source.tell()
    for batch in reader:
        yield batch
        end = source.tell()
    source.seek(end)
    if source.read(8) not in _ENDS:
        raise pa.ArrowInvalid("the file was cut off after one of its record batches")


def _features(file: File, schema: pa.Schema) -> dict[str, Any]:
    """Returns the features by name that `datasets` has stored in the file or in `dataset_info.json`."""
    metadata = (schema.metadata or {}).get(b"huggingface")
    info_file = file.location.parent / "dataset_info.json"
    with parser_errors(file if metadata else info_file, "The description of the columns is damaged; save it again."):
        info = json.loads(metadata)["info"] if metadata else read_json(info_file) or {}
        features = {
            name: feature for name, feature in (info.get("features") or {}).items() if isinstance(feature, dict)
        }
        for feature in features.values():
            if not all(isinstance(name, str) for name in feature.get("names") or ()):
                raise ValueError(f"names of classes {feature['names']!r}")
        return features


def _shapes(files: list[File], ragged: list[str], lists: list[str]) -> dict[str, Shape]:
    """Returns the shape of the first value that is not empty in each column of lists."""
    shapes: dict[str, Shape] = {}
    for table in (table for file in files for table in _read(file, lists)):
        if len(shapes) == len(lists):
            break
        for name in lists:
            shape_of = ragged_shape if name in ragged else first_shape
            if name not in shapes and name in table.column_names and (shape := shape_of(table[name])):
                shapes[name] = shape
    return shapes


def _tables(form: Form, files: list[File], refuse: sources.Refuse) -> Iterator[pa.Table]:
    for file in files:
        row, name = 0, file.name
        for table in _read(file, form.schema.names):
            numbers = pa.array(np.arange(row, row + len(table)))
            ids = pc.binary_join_element_wise(name, numbers.cast(pa.string()), ":")
            row += len(table)
            if len(table):
                yield from form.convert(file, table, ids, refuse)
