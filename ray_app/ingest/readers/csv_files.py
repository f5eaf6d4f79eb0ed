"""Reader of CSV files with a header line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from ray_app.data.dataset.files import File, Place, files_in, find, is_folder, parsing
from ray_app.errors import DataError
from ray_app.ingest.readers import base
from ray_app.ingest.readers.class_names import sorted_classes

NULLS = pa.array(csv.ConvertOptions().null_values)
KINDS = (pa.int64(), pa.uint64(), pa.float64(), pa.bool_(), pa.string())
"""Types of CSV columns, the narrowest first."""


@dataclass(frozen=True)
class Csv:
    """One CSV file or a folder of them.

    Args:
        path: The file or folder.
        label: Column that becomes `label`.
        skip: Whether rows of a wrong number of values may be left out.
        piece_bytes: Most bytes of files that one task reads.
    """

    path: Place
    label: str | None
    skip: bool
    piece_bytes: int

    def files(self) -> list[File]:
        """The files, sorted by name."""
        return text_files(self.path, (".csv", ".csv.gz"), "CSV")

    def parts(self, run: base.Run) -> list[base.Part]:
        """One part; a first pass over the files finds the narrowest type that holds each column, and the classes."""
        groups = base.file_groups(self.files(), self.piece_bytes)
        facts = list(run(partial(_learn, self.label, self.skip), groups))
        names = self._check_headers(facts)
        kinds = {name: next(kind for kind in KINDS if all(kind in f.kinds.get(name, KINDS) for f in facts)) for name in names}
        classes = None
        if self.label and any(f.rows for f in facts) and not pa.types.is_integer(kinds[self.label]):
            classes = self._classes(kinds[self.label], set().union(*(f.labels for f in facts)))
            kinds[self.label] = pa.string()
        tables = partial(_tables, self.label, self.skip, kinds, classes)
        return [base.Part("", [base.Piece(f.rows, partial(tables, some)) for f, some in zip(facts, groups, strict=True)], classes)]

    def _check_headers(self, facts: list[_Facts]) -> list[str]:
        """The columns, which all files have."""
        path, names = facts[0].headers[0]
        if len(set(names)) < len(names):
            raise DataError(f"{path}: two columns of one name in {names}. Give each column its own name.")
        for other, found in (header for f in facts for header in f.headers):
            if found != names:
                raise DataError(f"{other}: columns {found}, but the first file has {names}. Give all files one header.")
        if self.label and self.label not in names:
            raise DataError(f"{path}: no label column {self.label!r}; the columns are {names}. Name one of them.")
        if self.label and self.label != "label" and "label" in names:
            raise DataError(f"{path}: {self.label!r} is to become 'label', but {names} has another column 'label'. Rename that one.")
        return names

    def _classes(self, kind: pa.DataType, found: set[str]) -> tuple[str, ...]:
        if pa.types.is_floating(kind):
            raise DataError(
                f"{self.path}: label column {self.label!r} holds numbers that are not integers; allowed are integers or strings. "
                f"For regression leave `label` out and rename {self.label!r} to 'target'."
            )
        return sorted_classes(f"{self.path}: label column {self.label!r}", found, self.skip)


@dataclass
class _Facts:
    """What the first pass learned of a piece: rows, each file's header, the types that hold a column, the label's values."""

    rows: int = 0
    headers: list[tuple[str, list[str]]] = field(default_factory=list)
    kinds: dict[str, list[pa.DataType]] = field(default_factory=dict)
    labels: set[str] = field(default_factory=set)


def _learn(label: str | None, skip: bool, files: list[File]) -> _Facts:
    facts = _Facts()
    for file in files:
        bad: list[Any] = []
        for block in _string_blocks(file, bad if skip else None):
            names = block.schema.names
            if not facts.headers or facts.headers[-1][0] != str(file):
                facts.headers.append((str(file), list(names)))
            facts.rows += block.num_rows
            if len(set(names)) < len(names):
                continue  # refused when all headers are known
            for name in names:
                facts.kinds[name] = [kind for kind in facts.kinds.get(name, KINDS) if _fits(block[name], kind)]
            if label in names:
                facts.labels.update(pc.unique(block[label]).to_pylist())
        facts.rows += len(bad)
    return facts


def _tables(
    label: str | None, skip: bool, kinds: dict[str, pa.DataType], classes: tuple[str, ...] | None, files: list[File], refuse: base.Refuse
) -> Iterator[pa.Table]:
    for file in files:
        bad: list[Any] = []
        row = 2  # the header is row 1
        for block in _string_blocks(file, bad if skip else None):
            wrong = {invalid.number for invalid in bad}
            numbers: list[int] = []
            while len(numbers) < block.num_rows:
                if row not in wrong:
                    numbers.append(row)
                row += 1
            yield base.table([f"{file.name}:{number}" for number in numbers], _converted_block(file, block, label, kinds, classes))
        for invalid in bad:
            refuse(f"{file.name}:{invalid.number}", f"{invalid.actual_columns} values where {invalid.expected_columns} are expected")


def _converted_block(
    file: File, block: pa.RecordBatch, label: str | None, kinds: dict[str, pa.DataType], classes: tuple[str, ...] | None
) -> dict[str, pa.Array]:
    try:
        columns = {name: _converted(block[name], kind) for name, kind in kinds.items()}
    except (pa.ArrowInvalid, KeyError) as error:
        raise DataError(f"{file}: {error}. The file changed while it was read: start again.") from error
    columns = {"label" if name == label else name: values for name, values in columns.items()}
    if classes is not None:
        columns["label"] = pc.index_in(columns["label"], pa.array(classes)).cast(pa.int64())
    return columns


def text_files(path: Place, suffixes: tuple[str, ...], kind: str) -> list[File]:
    """One text file, or those in a folder, sorted by name.

    Raises:
        DataError: There is none.
    """
    allowed = " and ".join(suffixes)
    if found := find(path):
        files = [found]
    elif is_folder(path):
        files = files_in(path)
    else:
        raise DataError(f"{path}: no such file or folder; expected one {kind} file ({allowed}) or a folder of them.")
    files = [file for file in files if file.place.name.endswith(suffixes)]
    if not files:
        raise DataError(f"{path}: no {kind} file; allowed are {allowed}. Rename the file or give another input.")
    return files


def _string_blocks(file: File, bad: list[Any] | None) -> Iterator[pa.RecordBatch]:
    """The file in blocks of about `BLOCK_BYTES`, the first without rows, every column as a string; errors name the row, by one thread.

    Args:
        file: What to read.
        bad: Takes rows of a wrong number of values, before the block that follows them; None: they are refused.
    """

    def keep(row: Any) -> str:
        assert bad is not None
        bad.append(row)
        return "skip"

    read = csv.ReadOptions(use_threads=False, block_size=base.BLOCK_BYTES)
    convert = csv.ConvertOptions(default_column_type=pa.string())
    parse = csv.ParseOptions(newlines_in_values=True, invalid_row_handler=None if bad is None else keep)
    advice = "Expected UTF-8 text with one header line and the same number of comma-separated values in every row (row 1 is the header)."
    with parsing(file, f"{advice} Correct the file."), file.open_unpacked() as stream:
        reader = csv.open_csv(stream, read, parse, convert)
        names = reader.schema.names  # decoded here, where it is known of which file they are
        yield pa.RecordBatch.from_arrays([pa.array([], pa.string()) for _ in names], schema=reader.schema)
        yield from reader


def _converted(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """CSV strings as `kind`; outside string columns, space around a value goes and a spelling of "missing" becomes null."""
    if pa.types.is_string(kind):
        return values
    trimmed = pc.utf8_trim_whitespace(values)
    return pc.if_else(pc.is_in(trimmed, NULLS), None, trimmed).cast(kind)


def _fits(values: pa.Array, kind: pa.DataType) -> bool:
    try:
        _converted(values, kind)
    except pa.ArrowInvalid:
        return False
    return not pa.types.is_floating(kind) or _are_exact(values)


def _are_exact(values: pa.Array) -> bool:
    """Whether whole numbers that may not fit into 64 bits, such as long identifiers, are the same as float64."""
    candidates = pc.and_not(pc.greater_equal(pc.binary_length(values), 19), pc.match_substring(values, "."))
    long = values.filter(candidates)
    whole = long.filter(pc.match_substring_regex(long, r"^\s*[+-]?\d+\s*$")).to_pylist()
    return all(Decimal(float(value)) == Decimal(value.strip()) for value in whole)
