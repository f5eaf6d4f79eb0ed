"""Reader of WebDataset tar files: successive members with the same name up to its first dot form one row.

Members are read in place and never extracted. The library `webdataset` is not used: it has neither the checks
and limits of this reader nor its refusals of single rows with a reason.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import PurePosixPath
from typing import Any, Self, cast

import numpy as np
import pyarrow as pa

from ray_app.data.arrays import Array
from ray_app.errors import DataError
from ray_app.ingest.options import FormatTraits
from ray_app.ingest.readers import base
from ray_app.ingest.readers.base import match_files
from ray_app.ingest.readers.image_files import NOT_AN_IMAGE
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
_KINDS = {"str": pa.string(), "bool": pa.bool_(), "int": pa.int64(), "float": pa.float64()}
"""Type of a column by that of the values of a key of a .json."""
_TYPES = {bytes: pa.binary(), int: pa.int64(), str: pa.string()}

Members = dict[str, bytes]
"""The members of a row by their extension in lower case."""


class WebDataset(base.SourceReader):
    """Tar files; the label is a key of each row's .json (option `label`), or the member .cls, if there is one.

    `json.KEY` among the option `columns` is a value of the .json, which becomes the column KEY.
    """

    traits = FormatTraits(options=frozenset({"label", "classes", "columns", "check", "tokenizer"}))

    def files(self) -> list[File]:
        """Returns the files, sorted, or in the order of the braces."""
        return self._files

    def parts(self, run: base.Run) -> list[base.Part]:
        """Returns one part; its columns are those of the members of the first row.

        Values of the .json, and a label of text, take a pass over all files to find their types and the classes.
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
                f"{self.pattern}: json.{repeated[0]} among columns, and a member or the label, become one column"
                f" {repeated[0]!r}. Leave one of them out."
            )
        first_label = self._first_label(label) if label else None
        if label and isinstance(first_label, str) and label not in keys:
            keys = [*keys, label]
        kinds = self._learn_kinds(keys, run) if keys else {}
        classes = None
        if label and isinstance(first_label, str):
            classes = self.order_classes(f"{self.pattern}: label key {label!r}", kinds[label].texts)
        elif label:
            kind = pa.bool_() if isinstance(first_label, bool) else pa.int64()
            classes = self.classes_of_type(f"{self.pattern}: label key {label!r}", kind)
        form = _WebDatasetForm(
            members,
            columns is None,
            label,
            None if classes is None else {name: number for number, name in enumerate(classes)},
            {key: kinds[key].type for key in self._keys},
            columns is None or "json" in columns,
            self.options.check,
        )
        return [base.Part("", self.input_splits(self._files, partial(_tables, form)), classes)]

    def _first_label(self, label: str) -> Any:
        """Returns the first label of a row; None if no row has one."""
        rows = (row for file in self._files for _, row in _rows(file, lambda extension: extension == "json"))
        values = (_json_values(row.get("json", b"{}"), [label]).get(label) for row in rows)
        return next((value for value in values if value is not None), None)

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

    def _learn_kinds(self, keys: list[str], run: base.Run) -> dict[str, _Values]:
        """Returns the type of the values of each key, and their texts if the key is the label."""
        groups = base.group_files(self._files, self.options.split_bytes)
        facts = list(run(partial(_learn_values, keys, self.options.label), groups))
        result = {}
        for key in keys:
            kinds = {kind for f in facts for kind in f[key].kinds}
            remedy = "Correct them." if key == self.options.label else f"Leave json.{key} out of columns."
            if not kinds:
                raise DataError(f"{self.pattern}: no .json has a value of {key!r}. {remedy}")
            # Integers and fractions together are fractions.
            if kinds == {"int", "float"}:
                kinds = {"float"}
            if len(kinds) > 1 or not kinds <= _KINDS.keys():
                raise DataError(
                    f"{self.pattern}: the values of {key!r} in the .json files are of the types {sorted(kinds)};"
                    f" allowed is one of {sorted(_KINDS)}. {remedy}"
                )
            result[key] = _Values(kinds, set[str]().union(*(f[key].texts for f in facts)))
        return result

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
            usable, advice = sorted(available), "Make the files with some of these."
            if usable:
                advice = f"Leave them out by naming the columns to keep: --columns '[{', '.join(usable)}]'."
            raise DataError(
                f"{where} has the members {base.format_items(unknown)}, of which no column is made; allowed are"
                f" .{', .'.join(IMAGES)}, .cls, .json, .txt and .npy. {advice}"
            )
        columns = [_column(name) for name in first]
        if len(set(columns)) < len(columns):
            raise DataError(
                f"{where} has the members {sorted(first)}, of which two would be the same column. Write each thing"
                f" once."
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


@dataclass
class _Values:
    """The names of the types of a key's values, and the texts of the label."""

    kinds: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)

    @property
    def type(self) -> pa.DataType:
        """The type of the column, where all values have one type."""
        (kind,) = self.kinds
        return _KINDS[kind]


def _learn_values(keys: list[str], label: str | None, files: list[File]) -> dict[str, _Values]:
    """Returns the types of the values of keys in files; rows that cannot be used, which reading refuses, have none."""
    facts = {key: _Values() for key in keys}
    for file in files:
        for _, members in _rows(file, lambda extension: extension == "json"):
            for key, value in _json_values(members.get("json", b"{}"), keys).items():
                facts[key].kinds.add(type(value).__name__)
                if key == label and isinstance(value, str):
                    with suppress(ValueError):
                        facts[key].texts.add(_checked(key, value, pa.string()))
    return facts


def _json_values(data: bytes, keys: list[str]) -> dict[str, Any]:
    """Returns those of the keys that have a value in a .json; none if it is no object."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return {key: content[key] for key in keys if content.get(key) is not None} if isinstance(content, dict) else {}


@dataclass(frozen=True)
class _WebDatasetForm:
    """The form that every row must have; see `WebDataset`.

    Args:
        members: Extensions of the needed members, with dtype and shape of arrays.
        keeps_all: Whether a row with other members is refused.
        class_numbers: The number of each class of a label with named classes.
        keys: Type of each key of the .json that becomes a column.
        keeps_json: Whether the .json itself is a column.
    """

    members: dict[str, tuple[np.dtype, tuple[int, ...]] | None]
    keeps_all: bool
    label: str | None
    class_numbers: dict[str, int] | None
    keys: dict[str, pa.DataType]
    keeps_json: bool
    check: bool

    @property
    def columns(self) -> set[str | None]:
        """The names of the columns of the members."""
        return {_column(name) for name in self.members}

    def is_kept(self, extension: str) -> bool:
        """Returns whether a member is compared with those of the first row."""
        return self.keeps_all or _column(extension) in self.columns


def _tables(form: _WebDatasetForm, files: list[File], refuse: base.Refuse) -> Iterator[pa.Table]:
    rows = (row for file in files for row in _usable(form, file, refuse))
    for block in base.batch_rows(rows, lambda row: row[2]):
        columns: dict[str, Any] = {}
        for name in block[0][1]:
            values = [row[1][name] for row in block]
            kind = form.keys.get(name) or _TYPES.get(type(values[0]))
            columns[name] = np.stack(values) if isinstance(values[0], np.ndarray) else pa.array(values, kind)
        yield base.make_table([row[0] for row in block], columns)


def _usable(form: _WebDatasetForm, file: File, refuse: base.Refuse) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yields id, values by column, and bytes of every row that can be used."""
    for key, members in _rows(file, form.is_kept):
        row_id = f"{file.name}:{key}"
        try:
            values = _values(form, members)
        except (ValueError, RecursionError) as error:
            refuse(row_id, str(error))
        else:
            yield row_id, values, sum(map(len, members.values()))


def _values(form: _WebDatasetForm, members: Members) -> dict[str, Any]:
    """Returns the values of a row by column, in the same order for all rows."""
    if {_column(name) for name in members} != form.columns or len(members) > len(form.members):
        raise ValueError(
            f"the members are {sorted(members)}, of the first row {sorted(form.members)}; all rows need the same"
        )
    by_column = {_column(name): (name, data) for name, data in members.items()}
    values = {}
    for name, expected in form.members.items():
        column = cast(str, _column(name))
        values[column] = _value(*by_column[column], expected, form.check)
    content = json.loads(values["json"]) if form.label or form.keys else {}
    for key, kind in form.keys.items():
        values[key] = _checked(key, content.get(key), kind)
    if form.label:
        values["label"] = content.get(form.label)
    label = values.get("label", 0)
    if isinstance(label, float) and label.is_integer():
        values["label"] = label = int(label)
    if form.class_numbers is not None:
        # The names of numbers and truth values are those of JSON; a list or an object is not a class.
        text = label if isinstance(label, str) else json.dumps(label) if isinstance(label, int) else ""
        if (class_number := form.class_numbers.get(text)) is None:
            raise ValueError(f"label {label!r}; expected one of {base.format_items([*form.class_numbers])}")
        values["label"] = label = class_number
    if type(label) is not int or not -(2**63) <= label < 2**63:
        raise ValueError(f"label {label!r}; expected an integer of 64 bits")
    if not form.keeps_json:
        values.pop("json", None)
    return values


def _checked(key: str, value: Any, kind: pa.DataType) -> Any:
    """Returns the value of a key of a .json; raises ValueError for one that the type cannot represent exactly."""
    try:
        if isinstance(value, float) and not math.isfinite(value):
            raise OverflowError
        pa.scalar(value, kind)
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        # JSON may have half of a character, or thousands of digits.
        raise ValueError(f"{key} is {value!a:.60}, which the type {kind} of the column does not represent") from error
    return value


def _value(extension: str, data: bytes, expected: tuple[np.dtype, tuple[int, ...]] | None, check: bool) -> Any:
    """Returns the value of a member; `expected` is dtype and shape of an array."""
    kind = extension.rpartition(".")[2]
    if kind in IMAGES:
        if check and (reason := base.explain_undecodable(data)):
            raise ValueError(NOT_AN_IMAGE.format(reason))
        return data
    if kind == "npy":
        array = _array(data)
        if (array.dtype, array.shape) != expected:
            raise ValueError(f".{extension} is {array.dtype} {array.shape}, in the first row {expected}")
        return array
    content = data.decode()
    if kind == "cls":
        try:
            return int(content)
        except ValueError as error:
            raise ValueError(
                f".cls holds {content[:40]!r}; expected an integer. Write a label of text to a .json, and name its key"
                " by --label"
            ) from error
    if kind == "json" and not isinstance(json.loads(content), dict):
        raise ValueError(".json is no object")
    return content


def _array(data: bytes) -> Array:
    """Returns the array of a .npy file; refuses objects, because reading them would run code."""
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except Exception as error:
        # NumPy parses the header as Python, so the error may be of any kind.
        raise ValueError(f".npy cannot be read: {error}") from error
    if not isinstance(array, np.ndarray) or not array.ndim or array.dtype.kind not in "biuf":
        raise ValueError(".npy holds no array of numbers")
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
        "The file is damaged or no tar file; make it again (only .tar.gz and .tgz are unpacked, others must be plain"
        " tar)."
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
                        f"{file}: the row {key!r} has more than {MAX_ROW_BYTES} bytes, which are allowed. Make it"
                        f" smaller."
                    )
                if extension in row:
                    raise DataError(
                        f"{file}: two members {key}.{extension}; each row has one name of its own. Write the file"
                        f" again."
                    )
                row[extension] = read()
            yield key, row
        _read_end(archive)


def _read_end(archive: tarfile.TarFile) -> None:
    """Reads the zeros that end the archive; only at the end of the file gzip compares its checksum."""
    while rest := cast(Any, archive.fileobj).read(1 << 20):
        if rest.strip(b"\0"):
            raise tarfile.ReadError("there is more behind the end of the archive")


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
            raise tarfile.ReadError(f"{error} where the next member or the end of the archive is expected") from error
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
                " (no link, no '..', no absolute path). Do not trust this file; make it again."
            )
        stem, dot, extension = path.name.partition(".")
        # Hidden files and members without an extension belong to no row.
        if not stem or not dot:
            continue
        content = archive.extractfile(member)
        assert content is not None
        yield printable_name(str(path.parent / stem)), printable_name(extension.lower()), member.size, content.read
