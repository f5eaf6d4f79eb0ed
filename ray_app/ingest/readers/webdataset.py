"""Reader of WebDataset tar files: successive members with the same name up to its first dot form one row.

Members are read in place and never extracted. The library `webdataset` is not used: it has neither the checks
and limits of this reader nor its refusals of single rows with a reason.
"""

from __future__ import annotations

import io
import itertools
import json
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import PurePosixPath
from typing import Any, Self, cast

import numpy as np
import pyarrow as pa

from ray_app.data.arrays import Array, is_list
from ray_app.errors import DataError
from ray_app.ingest.options import FormatTraits
from ray_app.ingest.readers import sources
from ray_app.ingest.readers.converter import Form, Shape
from ray_app.ingest.readers.json_lines import JsonBlock, learn_json, make_json_form, parse_json, select_keys
from ray_app.ingest.readers.sources import match_files
from ray_app.storage.data_files import File, parser_errors, printable_name

SUFFIXES = (".tar", ".tar.gz", ".tgz")
MAX_ROW_BYTES = 512 << 20
"""Limit of the uncompressed bytes of all members of a row."""
MAX_HEADER_BYTES = 1 << 20
"""Limit of an extended header of a member (pax, or a long name of GNU), which `tarfile` reads as a whole."""
IMAGES = ("jpg", "jpeg", "png", "webp", "gif")
_EXTENDED_HEADERS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_KEY = "json."
_TYPES = {"cls": pa.int64(), "json": pa.string(), "txt": pa.string()}
"""Type of the column of a member by the end of its name; others are images or arrays."""

Members = dict[str, bytes]
"""The members of a row by their extension in lower case."""


class WebDataset(sources.SourceReader):
    """Tar files; the label is a key of each row's .json (option `label`), or the member .cls, if there is one.

    `json.KEY` among the option `columns` is a value of the .json, which becomes the column KEY.
    """

    traits = FormatTraits(options=frozenset({"label", "classes", "columns", "check", "tokenizer"}))

    def files(self) -> list[File]:
        """Returns the files, sorted, or in the order of the braces."""
        return self._files

    def parts(self, run: sources.Run) -> list[sources.Part]:
        """Returns one part; its columns are those of the members of the first row.

        Values of the .json, also a label, take a pass over all files to find their types and the classes.
        """
        first = self._first(self._is_kept)
        if first is None:
            raise DataError(
                f"{self.pattern}: no member in these tar files; expected members such as 0001.jpg and 0001.cls."
            )
        label, columns = self.options.label, self.options.columns
        members = self._expected_members(first)
        keys, columns_taken = self._keys, {_column(name) for name in members} | ({"label"} if label else set())
        if repeated := [key for key in keys if key in columns_taken]:
            raise DataError(
                f"{self.pattern}: json.{repeated[0]} in columns, and a member or the label, become the same column"
                f" {repeated[0]!r}. Leave one of the two out."
            )
        json_form = self._json_form(run) if keys or label else Form(pa.schema([]), {}, None, None)
        fields, names = list[pa.Field](), list[str]()
        images: set[str] = set()
        shapes: dict[str, Shape] = dict(json_form.shapes)
        for extension, array in members.items():
            column, kind = cast(str, _column(extension)), extension.rpartition(".")[2]
            if kind == "json" and columns is not None and "json" not in columns:
                continue
            stored = f".{column}"
            if array:
                shapes[stored] = array[1]
            elif kind in IMAGES:
                images.add(stored)
            fields.append(pa.field(stored, _array_type(*array) if array else _TYPES.get(kind, pa.binary())))
            names.append(column)
        # A key that is a column and the label, too, is there twice.
        fields += [json_form.schema.field(key).with_name(f".{key}" if key == label else key) for key in keys]
        fields += [json_form.schema.field(label)] if label else []
        names += [*keys, *([json_form.name_of(label)] if label else [])]
        schema, check = pa.schema(fields), self.options.check
        rows = replace(json_form, schema=schema, shapes=shapes, images=frozenset(images), check=check)
        form = _WebDatasetForm(members, columns is None, json_form.schema, rows, names)
        splits = self.input_splits(self._files, partial(_tables, form))
        return [sources.Part("", splits, json_form.classes, notes=json_form.notes)]

    def _json_form(self, run: sources.Run) -> Form:
        """Returns the form of the keys of the .json that become columns, by the rules of JSON lines."""
        options = replace(self.options, columns=self._keys, drop=None)
        blocks = partial(_json_blocks, [*self._keys, *filter(None, [options.label])])
        groups = sources.group_files(self._files, options.split_bytes)
        facts = list(run(partial(learn_json, options, blocks), groups))
        return make_json_form(replace(self, options=options), facts, blocks)

    @property
    def _keys(self) -> list[str]:
        """The keys of the .json that become columns."""
        return [name.removeprefix(_KEY) for name in self.options.columns or [] if name.startswith(_KEY)]

    @property
    def _member_columns(self) -> list[str] | None:
        """The columns of members that are kept; None for all."""
        if self.options.columns is None:
            return None
        return [name for name in self.options.columns if not name.startswith(_KEY)]

    def _expected_members(self, first: Members) -> dict[str, tuple[np.dtype, tuple[int, ...]] | None]:
        """Returns the extensions of the first row's members, with dtype and shape of each .npy and None for others."""
        where = f"{self.pattern}: the first row"
        available = {column for name in first if (column := _column(name))}
        with_label = available | ({"label"} if self.options.label else set())
        if missing := [name for name in self._member_columns or [] if name not in with_label]:
            usable = sorted({column for name in self._first(lambda _: True) or first if (column := _column(name))})
            raise DataError(
                f"{where} has no member for the column {missing[0]!r}; its columns are {usable}. Name some of these in"
                f" columns."
            )
        unknown = sorted(f".{name}" for name in first if _column(name) is None)
        if unknown:
            usable, advice = sorted(available), "Write the files with some of these."
            if usable:
                advice = f"Name the columns to keep without them: --columns '[{', '.join(usable)}]'."
            raise DataError(
                f"{where} has the members {sources.format_items(unknown)}, which cannot become columns; allowed are"
                f" .{', .'.join(IMAGES)}, .cls, .json, .txt and .npy. {advice}"
            )
        columns = [_column(name) for name in first]
        if len(set(columns)) < len(columns):
            raise DataError(
                f"{where} has the members {sorted(first)}, two of which would become the same column. Keep one of the"
                " two."
            )
        if self._keys and "json" not in first:
            raise DataError(f"{where} has the members {sorted(first)} and no .json, of which columns names keys.")
        if self.options.label and ("json" not in first or "cls" in first):
            raise DataError(
                f"{where} has the members {sorted(first)}; --label {self.options.label!r} is for rows with a .json and"
                f" without a .cls."
            )
        try:
            arrays = {name: _array(value) for name, value in first.items() if name.endswith("npy")}
        except ValueError as error:
            raise DataError(f"{where}: {error}. Save arrays of numbers.") from error
        return {name: (arrays[name].dtype, arrays[name].shape) if name in arrays else None for name in first}

    def _first(self, is_kept: Callable[[str], bool]) -> Members | None:
        """Returns the members of the first row; None if the files have none."""
        return next((row for file in self._files for _, row in _rows(file, is_kept)), None)

    def _is_kept(self, extension: str) -> bool:
        """Returns whether a member is needed: for a column to keep, or for the label."""
        column, columns = _column(extension), self._member_columns
        if columns is None:
            return True
        if self._keys and column == "json":
            return True
        if self.options.label and column in ("json", "label"):
            return column == "json"
        return column == "label" or column in columns

    @cached_property
    def _files(self) -> list[File]:
        return match_files(self.pattern, lambda name: name.endswith(SUFFIXES), "tar file")


def _json_blocks(keys: list[str], files: list[File]) -> Iterator[JsonBlock]:
    """Yields those of the keys that each .json has."""
    for file in files:
        rows = ((key, row["json"]) for key, row in _rows(file, lambda name: name == "json") if "json" in row)
        for block in sources.batch_rows(rows, lambda row: len(row[1])):
            yield JsonBlock(file, [_line(data, keys) for _, data in block], [key for key, _ in block])


def _line(data: bytes, keys: Sequence[str]) -> bytes:
    """Returns those of the keys that a .json has as an object of JSON in one line; one that is no object unchanged."""
    try:
        return select_keys(data, set(keys))
    except (ValueError, RecursionError, AttributeError):
        return data.replace(b"\n", b" ")


@dataclass(frozen=True)
class _WebDatasetForm:
    """The form that every row must have; see `WebDataset`.

    Args:
        members: Extensions of the needed members, with dtype and shape of arrays.
        keeps_all: Whether a row with other members is refused.
        keys: The keys of the .json that become columns, and the label.
        rows: The form of the columns: members, which begin with a dot there, and keys.
        names: The final names of these columns.
    """

    members: dict[str, tuple[np.dtype, tuple[int, ...]] | None]
    keeps_all: bool
    keys: pa.Schema
    rows: Form
    names: list[str]

    @property
    def columns(self) -> set[str | None]:
        """The names of the columns of the members."""
        return {_column(name) for name in self.members}

    def is_kept(self, extension: str) -> bool:
        """Returns whether a member is compared with those of the first row."""
        return self.keeps_all or _column(extension) in self.columns


def _array_type(dtype: np.dtype, shape: tuple[int, ...]) -> pa.DataType:
    """Returns the type of a column of arrays, lists of one size."""
    kind = pa.from_numpy_dtype(dtype)
    for size in reversed(shape):
        kind = pa.list_(kind, size)
    return kind


def _tables(form: _WebDatasetForm, files: list[File], refuse: sources.Refuse) -> Iterator[pa.Table]:
    for file in files:
        for rows in sources.batch_rows(_usable(form, file, refuse), lambda row: row[2]):
            keys, good = pa.table({}), [*range(len(rows))]
            lines = [_line(row[1][".json"].encode(), form.keys.names) for row in rows] if form.keys.names else []
            block = JsonBlock(file, lines, [row[0] for row in rows])
            if form.keys.names:
                keys, good = parse_json(block, form.keys, refuse)
            if not good:
                continue
            columns = [
                _to_array([rows[index][1][column.name] for index in good], column.type)
                if column.name in rows[0][1]
                else keys[column.name if column.name in keys.column_names else column.name[1:]]
                for column in form.rows.schema
            ]
            table = pa.table(columns, form.rows.schema)
            for converted in form.rows.convert(file, table, [block.ids[index] for index in good], refuse):
                yield converted.rename_columns(["row_id", *form.names])


def _to_array(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Returns the values of members as a column; arrays have the same dtype and shape."""
    if not is_list(kind):
        return pa.array(values, kind)
    array = pa.array(np.stack(values).reshape(-1))
    for size in reversed(values[0].shape):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def _usable(form: _WebDatasetForm, file: File, refuse: sources.Refuse) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yields key, values of members by column, and bytes of every row that has the members of the form."""
    for key, members in _rows(file, form.is_kept):
        try:
            values = _values(form, members)
        except (ValueError, RecursionError) as error:
            refuse(f"{file.name}:{key}", str(error))
        else:
            yield key, values, sum(map(len, members.values()))


def _values(form: _WebDatasetForm, members: Members) -> dict[str, Any]:
    """Returns the values of the members of a row by column, with a dot before its name."""
    if {_column(name) for name in members} != form.columns or len(members) > len(form.members):
        raise ValueError(
            f"the members are {sorted(members)}, but {sorted(form.members)} in the first row; all rows need the same"
        )
    by_column = {_column(name): (name, data) for name, data in members.items()}
    columns = {_column(name): array for name, array in form.members.items()}
    return {f".{column}": _value(*by_column[column], array) for column, array in columns.items()}


def _value(extension: str, data: bytes, expected: tuple[np.dtype, tuple[int, ...]] | None) -> Any:
    """Returns the value of a member; `expected` is dtype and shape of an array."""
    kind = extension.rpartition(".")[2]
    if kind in IMAGES:
        return data
    if kind == "npy":
        array = _array(data)
        if (array.dtype, array.shape) != expected:
            raise ValueError(f".{extension} is {array.dtype} {array.shape}, in the first row {expected}")
        return array
    content = data.decode()
    if kind == "cls":
        try:
            label = int(content)
        except ValueError as error:
            raise ValueError(
                f".cls holds {content[:40]!r}; expected an integer. Write a label of text to a .json, and name its key"
                " with --label"
            ) from error
        if not -(2**63) <= label < 2**63:
            raise ValueError(f"label {label}; expected an integer of 64 bits")
        return label
    if kind == "json" and not isinstance(json.loads(content), dict):
        raise ValueError(".json is not an object")
    return content


def _array(data: bytes) -> Array:
    """Returns the array of a .npy file; refuses objects, because reading them would run code."""
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:
        # NumPy parses the header as Python, so the error may be of any kind.
        raise ValueError(f".npy cannot be read: {error}") from error
    if not isinstance(array, np.ndarray) or not array.ndim or array.dtype.kind not in "biuf" or not array.size:
        raise ValueError(".npy does not hold an array of numbers")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _column(extension: str) -> str | None:
    """Returns the name of the column that a member becomes, by its extension; None for an unknown extension."""
    name, _, last = extension.rpartition(".")
    if last in IMAGES:
        return name or "image"
    if last == "npy":
        return name or "array"
    return {"cls": "label", "json": "json", "txt": "text"}.get(extension)


def _rows(file: File, is_kept: Callable[[str], bool] = lambda extension: True) -> Iterator[tuple[str, Members]]:
    """Yields the name, up to the first dot, and the members of each row; others than `is_kept` are not read."""
    advice = (
        "The file is damaged or not a tar file; write it again (only .tar.gz and .tgz are unpacked, other files must be"
        " plain tar)."
    )
    with (
        parser_errors(file, advice),
        file.open_unpacked() as stream,
        tarfile.open(fileobj=cast(Any, stream), mode="r|", tarinfo=_Header) as archive,
    ):
        for key, group in itertools.groupby(_members(file, archive), key=lambda member: member[0]):
            row: Members = {}
            free_bytes = MAX_ROW_BYTES
            for _, extension, size, read in group:
                if not is_kept(extension):
                    continue
                free_bytes -= size
                if free_bytes < 0:
                    raise DataError(
                        f"{file}: the row {key!r} has more than the allowed {MAX_ROW_BYTES} bytes. Make it smaller."
                    )
                if extension in row:
                    raise DataError(
                        f"{file}: two members {key}.{extension}; each row needs its own name. Write the file again."
                    )
                row[extension] = read()
            yield key, row
        # Zeros end the archive; only at the end of the file gzip compares its checksum.
        while rest := cast(Any, archive.fileobj).read(1 << 20):
            if rest.strip(b"\0"):
                raise tarfile.ReadError("there is data after the end of the archive")


class _Header(tarfile.TarInfo):
    """The header of a member, with stricter checks than `tarfile` has.

    It does not take a missing or damaged header for the end of the archive, and it limits the size of extended headers.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            header = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            # A block of zeros is the end of the archive.
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise
            raise tarfile.ReadError(f"{error} instead of the next member or the end of the archive") from error
        if header.type in _EXTENDED_HEADERS and header.size > MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a pax or long-name header of {header.size} bytes; allowed are {MAX_HEADER_BYTES}")
        return header


def _members(file: File, archive: tarfile.TarFile) -> Iterator[tuple[str, str, int, Callable[[], bytes]]]:
    """Yields row, extension and size of each member, and a function that reads its content."""
    for member in archive:
        if member.isdir():
            continue
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or not member.isfile():
            raise DataError(
                f"{file}: the member {member.name!r} is refused: allowed are plain files below the archive's own root"
                " (no link, no '..', no absolute path). Do not trust this file; write it again."
            )
        stem, dot, extension = path.name.partition(".")
        # Hidden files and members without an extension belong to no row.
        if not stem or not dot:
            continue
        content = archive.extractfile(member)
        assert content is not None
        yield printable_name(str(path.parent / stem)), printable_name(extension.lower()), member.size, content.read
