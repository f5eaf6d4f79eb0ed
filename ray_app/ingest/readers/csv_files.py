"""Reader of CSV files, with a header line or with names that are given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property, partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from ray_app.data.dataset.files import File, Place, parsing
from ray_app.errors import DataError
from ray_app.ingest.readers import base
from ray_app.ingest.readers.class_names import sorted_classes
from ray_app.ingest.readers.csv_format import (
    DELIMITERS,
    CsvFormat,
    check_header,
    check_same_header,
    named_delimiter,
    open_quote,
    recognise_delimiter,
)
from ray_app.ingest.readers.text_files import open_text, text_files

NULLS = pa.array(arrow_csv.ConvertOptions().null_values)
KINDS = (pa.int64(), pa.uint64(), pa.float64(), pa.bool_(), pa.string())
"""Types of CSV columns, the narrowest first."""
SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")


@dataclass(frozen=True)
class Csv:
    """One CSV file or a folder of them.

    Args:
        path: The file or folder.
        label: Column that becomes `label`.
        skip: Whether rows of a wrong number of values may be left out.
        piece_bytes: Most bytes of files that one task reads.
        delimiter: Character between values; None: recognised by the first rows of the first file.
        column_names: Names of the columns of files without a header line.
    """

    path: Place
    label: str | None
    skip: bool
    piece_bytes: int
    delimiter: str | None = None
    column_names: list[str] | None = None

    def files(self) -> list[File]:
        """The files, sorted by name."""
        return text_files(self.path, SUFFIXES, "CSV")

    def parts(self, run: base.Run) -> list[base.Part]:
        """One part; a first pass over the files finds the narrowest type that holds each column, and the classes."""
        groups = base.file_groups(self.files(), self.piece_bytes)
        facts = list(run(partial(_learn, self._format, self.label, self.skip), groups))
        names, notes = self._check_headers(facts)
        if not any(f.rows for f in facts):
            raise DataError(f"{self.path}: no rows, only a header line with the names {base.listed(names)}. Give a file with rows.")
        kinds = {name: next(kind for kind in KINDS if all(kind in f.kinds.get(name, KINDS) for f in facts)) for name in names}
        classes = None
        if self.label and not (pa.types.is_integer(kinds[self.label]) or pa.types.is_floating(kinds[self.label])):
            found = set().union(*(f.labels for f in facts))
            classes = sorted_classes(f"{self.path}: label column {self.label!r}", found, self.skip)
            kinds[self.label] = pa.string()
        tables = partial(_tables, self._format, self.label, self.skip, kinds, classes)
        pieces = [base.Piece(f.rows, partial(tables, some)) for f, some in zip(facts, groups, strict=True)]
        return [base.Part("", pieces, classes, notes=tuple(notes))]

    @cached_property
    def _format(self) -> CsvFormat:
        names = tuple(self.column_names) if self.column_names else None
        if self.delimiter:
            return CsvFormat(named_delimiter(self.delimiter), names)
        return CsvFormat(recognise_delimiter(self.files()[0], self.column_names), names)

    def _check_headers(self, facts: list[_Facts]) -> tuple[list[str], list[str]]:
        """The columns, which all files have, and notes about how they were understood."""
        path, names = facts[0].headers[0]
        notes = []
        if self._format.delimiter != "," and not self.delimiter:
            notes.append(
                f"{DELIMITERS[self._format.delimiter]} was recognised as the delimiter of {path}. The option delimiter names another one."
            )
        if not self.column_names and (note := check_header(path, names)):
            notes.append(note)
        for f in facts:
            for header in f.headers:
                check_same_header((path, names), header)
        if self.label and self.label not in names:
            raise DataError(f"{path}: no label column {self.label!r}; the columns are {base.listed(names, 50)}. Name one of them.")
        if self.label and self.label != "label" and "label" in names:
            raise DataError(
                f"{path}: {self.label!r} is to become 'label', but {base.listed(names, 50)} has another column 'label'. Rename that one."
            )
        return names, notes


@dataclass
class _Facts:
    """What the first pass learned of a piece: rows, each file's header, the types that hold a column, the label's values."""

    rows: int = 0
    headers: list[tuple[str, list[str]]] = field(default_factory=list)
    kinds: dict[str, list[pa.DataType]] = field(default_factory=dict)
    labels: set[str] = field(default_factory=set)


def _learn(form: CsvFormat, label: str | None, skip: bool, files: list[File]) -> _Facts:
    facts = _Facts()
    for file in files:
        bad: list[Any] = []
        has_line_ends = False
        for numbers, block in _numbered_blocks(file, form, bad if skip else None):
            names = block.schema.names
            if not facts.headers or facts.headers[-1][0] != str(file):
                facts.headers.append((str(file), list(names)))
            facts.rows += block.num_rows
            if len(set(names)) < len(names):
                continue  # refused when all headers are known
            for name in names:
                facts.kinds[name] = [kind for kind in facts.kinds.get(name, KINDS) if _fits(block[name], kind)]
                if pa.types.is_string(facts.kinds[name][0]):
                    _refuse_zero_bytes(file, name, block[name], numbers)
                    has_line_ends |= bool(pc.any(pc.match_substring(block[name], "\n")).as_py())
            if label in names:
                facts.labels.update(pc.unique(block[label]).to_pylist())
        if (has_line_ends or any("\n" in row.text for row in bad)) and (fault := open_quote(file, form.delimiter)):
            raise DataError(f"{file}: {fault}. Close it, or write a quote that is part of a value twice.")
        facts.rows += len(bad)
    return facts


def _refuse_zero_bytes(file: File, name: str, values: pa.Array, numbers: list[int]) -> None:
    if pc.any(found := pc.match_substring(values, "\0")).as_py():
        row = numbers[pc.index(found, True).as_py()]
        raise DataError(
            f"{file}: row {row} has a zero byte in the column {name!r}. Text has none: correct the row, or save the file as UTF-8."
        )


def _tables(
    form: CsvFormat,
    label: str | None,
    skip: bool,
    kinds: dict[str, pa.DataType],
    classes: tuple[str, ...] | None,
    files: list[File],
    refuse: base.Refuse,
) -> Iterator[pa.Table]:
    for file in files:
        bad: list[Any] = []
        for numbers, block in _numbered_blocks(file, form, bad if skip else None):
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


def _numbered_blocks(file: File, form: CsvFormat, bad: list[Any] | None) -> Iterator[tuple[list[int], pa.RecordBatch]]:
    """The blocks of `_string_blocks`, each with the numbers of its rows; the first line that is not empty has the number 1."""
    row = 1 + form.has_header(file)
    for block in _string_blocks(file, form, bad):
        wrong = {invalid.number for invalid in bad or ()}
        numbers: list[int] = []
        while len(numbers) < block.num_rows:
            if row not in wrong:
                numbers.append(row)
            row += 1
        yield numbers, block


def _string_blocks(file: File, form: CsvFormat, bad: list[Any] | None) -> Iterator[pa.RecordBatch]:
    """The file in blocks of about `BLOCK_BYTES`, the first without rows, every column as a string; errors name the row, by one thread.

    Args:
        file: What to read.
        form: Its layout.
        bad: Takes rows of a wrong number of values, before the block that follows them; None: they are refused.
    """

    def keep(row: Any) -> str:
        assert bad is not None
        bad.append(row)
        return "skip"

    has_header = form.has_header(file)
    read = arrow_csv.ReadOptions(use_threads=False, block_size=base.BLOCK_BYTES, column_names=None if has_header else form.column_names)
    convert = arrow_csv.ConvertOptions(default_column_type=pa.string())
    parse = arrow_csv.ParseOptions(delimiter=form.delimiter, newlines_in_values=True, invalid_row_handler=None if bad is None else keep)
    try:
        with parsing(file, form.advice(has_header)), open_text(file) as stream:
            reader = arrow_csv.open_csv(stream, read, parse, convert)
            names = reader.schema.names  # decoded here, where it is known of which file they are
            yield pa.RecordBatch.from_arrays([pa.array([], pa.string()) for _ in names], schema=reader.schema)
            yield from reader
    except DataError as error:
        if isinstance(error.__cause__, pa.ArrowInvalid) and (fault := open_quote(file, form.delimiter)):
            raise DataError(f"{file}: {fault}. Close it, or write a quote that is part of a value twice.") from error
        raise


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
