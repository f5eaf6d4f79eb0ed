"""Reader of CSV files. Their columns are named by a header line or by the option `column_names`.

`CsvFormat` describes the layout of the files. The functions after it recognize the delimiter, check the header line,
and find quotes that are not closed. `Csv` reads the files twice: the first pass finds the type of each column and the
classes, the second one converts the values.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from ray_app.errors import DataError
from ray_app.ingest.options import FormatTraits, IngestOptions
from ray_app.ingest.readers import base
from ray_app.ingest.readers.base import list_text_files
from ray_app.ingest.readers.csv_columns import (
    ColumnScan,
    ValueNotation,
    choose_type,
    convert_values,
    find_too_large,
    types_of,
)
from ray_app.storage.data_files import File, parser_errors
from ray_app.storage.text_files import open_text

SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a vertical bar"}
"""Delimiters that are recognized without the option `delimiter`, and their names for messages."""
_NUMBER = re.compile(r"\s*[+-]?(\d+[.,]?\d*|[.,]\d+)([eE][+-]?\d+)?\s*")
"""A number with a decimal point or a decimal comma."""
_HEAD_BYTES, _HEAD_ROWS = 1 << 20, 20
"""Maximum bytes and rows at the beginning of a file from which its layout is recognized."""
_MAX_VALUE_CHARS = 1 << 30
"""Maximum characters of a value; the default of the csv module is 131,072."""
csv.field_size_limit(_MAX_VALUE_CHARS)
_MAX_VALUE_CHARS_SHOWN = 40
"""Characters of a value that a message repeats."""
_MAX_NAMES = 20
"""Maximum number of names in a command of a message."""
_LINE_BYTES = 1 << 20
"""Characters of a line that are read together, where lines are left out or decoded."""
_MAX_LISTED = 5
"""Maximum number of names in a message."""


@dataclass(frozen=True)
class CsvFormat:
    """The layout of all files of a data set; without names of columns the header line of each file has them.

    `nulls` are further spellings of a missing value; for the others see `IngestOptions`.
    """

    delimiter: str = ","
    column_names: tuple[str, ...] | None = None
    encoding: str = "utf-8"
    notation: ValueNotation = ValueNotation()
    nulls: tuple[str, ...] = ()
    comment: str | None = None
    skip_lines: int = 0

    @classmethod
    def of(cls, options: IngestOptions) -> CsvFormat:
        """Returns the layout that the options state, with a comma where they do not name a delimiter."""
        return cls(
            # A shell passes a tab as these two characters.
            (options.delimiter or ",").replace(r"\t", "\t"),
            tuple(options.column_names) if options.column_names else None,
            options.encoding,
            ValueNotation.of(options),
            tuple([options.null] if isinstance(options.null, str) else options.null or ()),
            options.comment,
            options.skip_lines,
        )

    def has_header(self, file: File) -> bool:
        """Returns whether the first line of a file is a header line: always, or if it has just `column_names`."""
        return self.column_names is None or parse_first_rows(self.read_head(file), self.delimiter)[:1] == [
            list(self.column_names)
        ]

    def advice(self, has_header: bool) -> str:
        """Returns the part of an error message that says which layout is allowed and what to do."""
        first = "one header line (row 1)" if has_header else "no header line"
        delimiter = DELIMITERS.get(self.delimiter, repr(self.delimiter))
        return (
            f"Expected {self.encoding.upper()} text with {first} and the same number of values, separated by"
            f" {delimiter}, in every row. Correct the file, or name another delimiter or encoding."
        )

    @contextmanager
    def open(self, file: File) -> Iterator[IO[bytes]]:
        """Opens a file as UTF-8 text without skipped lines and comments."""
        if self.encoding == "utf-8" and not self.comment and not self.skip_lines:
            with open_text(file) as stream:
                yield stream
            return
        with file.open_unpacked() as stream:
            yield io.BufferedReader(_PlainLines(stream, self, file), _LINE_BYTES)

    def read_head(self, file: File) -> str:
        """Returns the first MiB of a file; bytes that are not UTF-8 become U+FFFD."""
        with parser_errors(file, "The file is damaged; make it again."), self.open(file) as stream:
            return stream.read(_HEAD_BYTES).decode("utf-8-sig", "replace")


class _PlainLines(io.RawIOBase):
    """The lines of a stream as UTF-8, without the first `skip_lines` and those that begin with `comment`."""

    def __init__(self, stream: IO[bytes], layout: CsvFormat, file: File) -> None:
        encoding = "utf-8-sig" if layout.encoding == "utf-8" else layout.encoding
        self._text = io.TextIOWrapper(stream, encoding, newline="")
        self._layout, self._file = layout, file
        self._rest = b""

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Copies the next bytes; returns their number, 0 at the end."""
        if not self._rest:
            try:
                self._rest = next(self._blocks, "").encode()
            except UnicodeError as error:
                raise DataError(
                    f"{self._file}: it is not {self._layout.encoding}: {error}. Name another encoding, one of utf-8,"
                    " latin-1, cp1252 and utf-16."
                ) from error
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    @cached_property
    def _blocks(self) -> Iterator[str]:
        return self._read_blocks()

    def _read_blocks(self) -> Iterator[str]:
        """Yields text of bounded length; a long line comes in parts, so that memory stays bounded."""
        number = 0
        is_new, is_left_out = True, False
        while part := self._text.readline(_LINE_BYTES):
            if is_new:
                number += 1
                is_comment = bool(self._layout.comment) and part.startswith(str(self._layout.comment))
                is_left_out = number <= self._layout.skip_lines or is_comment
            is_new = part.endswith(("\n", "\r"))
            if not is_left_out:
                yield part


def parse_first_rows(head: str, delimiter: str) -> list[list[str]]:
    """Returns the first complete, not empty rows, at most `_HEAD_ROWS`; none if `csv` cannot parse them."""
    reader = csv.reader(io.StringIO(head, newline=""), delimiter=delimiter)
    try:
        rows = [row for row in itertools.islice(reader, _HEAD_ROWS + 1) if row]
    except csv.Error:
        return []
    # The last row may be incomplete if the file is longer than its head. A head of `_HEAD_BYTES` has at least a quarter
    # as many characters, since UTF-8 takes at most four bytes for each.
    return rows[:-1] if len(head) > _HEAD_BYTES // 4 or len(rows) > _HEAD_ROWS else rows


def recognize_delimiter(file: File, layout: CsvFormat) -> str:
    """Returns the delimiter of a file, from its first rows.

    With two or more `column_names` it is the first one that gives the first row as many values. Otherwise it is a
    comma, if that divides all rows into the same number of values, two or more; or if no delimiter does that and a
    comma divides the first row. Otherwise it is the delimiter that gives the first row most values.
    """
    head = layout.read_head(file)
    marks = [mark for mark in DELIMITERS if mark != layout.notation.decimal]
    widths = {delimiter: [len(row) for row in parse_first_rows(head, delimiter)] or [1] for delimiter in marks}
    num_columns = len(layout.column_names or ())
    if num_columns > 1 and (fits := [mark for mark, width in widths.items() if width[0] == num_columns]):
        return fits[0]
    even = {delimiter: width[0] for delimiter, width in widths.items() if len(set(width)) == 1 and width[0] > 1}
    if "," in even or (not even and widths.get(",", [1])[0] > 1):
        return ","
    # A delimiter that gives all rows the same number of values comes before one that does not.
    candidates = even or {delimiter: width[0] for delimiter, width in widths.items()}
    return max(candidates, key=candidates.__getitem__)


def check_header(file: str, names: list[str]) -> str | None:
    """Returns a note for the user if the names in a header line may be the values of a row.

    Raises DataError if numbers among them do not look like a numbering, or a name is there twice.
    """
    numbers = [name for name in names if _NUMBER.fullmatch(name)]
    if numbers and not _is_numbering(numbers):
        raise DataError(
            f"{file}: the first line holds numbers ({base.format_items(numbers)}) where the names of the columns are"
            f" expected. If the file has no header line, give its {len(names)} names:"
            f" --column_names '{_example_names(len(names))}'; if these are the names, give just them:"
            f" --column_names '{json.dumps(names[:_MAX_NAMES])}'."
        )
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        columns_of = {name: [i for i, other in enumerate(names, 1) if other == name] for name in repeated}
        listed = ", ".join(
            f"{name!r} (columns {base.format_items(columns)})"
            for name, columns in itertools.islice(columns_of.items(), _MAX_LISTED)
        )
        more = f" and {len(repeated) - _MAX_LISTED} more names" if len(repeated) > _MAX_LISTED else ""
        raise DataError(
            f"{file}: two columns of one name: {listed}{more}. Give each column its own name in the header line."
        )
    if numbers:
        return (
            f"the names of columns in {file} are numbers ({base.format_items(numbers)}). If they are values of a first"
            " row, since the file has no header line, give --column_names."
        )
    return None


def _example_names(count: int) -> str:
    more = ", ..." if count > _MAX_NAMES else ""
    return f"[{', '.join(f'column_{i}' for i in range(1, min(count, _MAX_NAMES) + 1))}{more}]"


def _is_numbering(numbers: list[str]) -> bool:
    """Returns whether these are three or more whole numbers that ascend by a constant step, such as years."""
    if len(numbers) < 3 or not all(number.strip().isdecimal() for number in numbers):
        return False
    values = [int(number) for number in numbers]
    return len({after - before for before, after in itertools.pairwise(values)}) == 1 and values[1] > values[0]


def check_same_header(first: tuple[str, list[str]], other: tuple[str, list[str]]) -> None:
    """Raises DataError unless a file has the same header line as the first one, each given as path and names."""
    (path, names), (other_path, other_names) = first, other
    if names == other_names:
        return
    missing = [name for name in names if name not in other_names]
    extra = [name for name in other_names if name not in names]
    differences = [f"lacks {base.format_items(missing)}"] if missing else []
    differences += [f"has also {base.format_items(extra)}"] if extra else []
    difference = " and ".join(differences) or "has the columns in another order"
    raise DataError(
        f"{other_path}: columns {base.format_items(other_names)}, but the first file, {path}, has"
        f" {base.format_items(names)}: it {difference}. Give all files one header."
    )


def find_open_quote(file: File, layout: CsvFormat) -> str | None:
    """Returns a description of the first quote that opens a value and is not closed; None if there is none.

    pyarrow does not find it: it takes all that follows an open quote, line ends and delimiters too, for one value.
    """
    with parser_errors(file, "The file is damaged; make it again."), layout.open(file) as stream:
        text = io.TextIOWrapper(stream, "utf-8-sig", "replace", newline="")
        rows = csv.reader(text, delimiter=layout.delimiter, strict=True)
        first_line = 1
        try:
            for _ in rows:
                first_line = rows.line_num + 1
        except csv.Error as error:
            # These are parts of the messages "unexpected end of data" and "',' expected after '"'" of the csv module.
            if "end of data" in str(error) or "expected after" in str(error):
                return f"in line {first_line} a quote opens a value and is not closed at the end of the value"
    return None


class Csv(base.SourceReader):
    """One CSV file or a folder of them."""

    traits = FormatTraits(
        leaves_out_columns=True,
        options=frozenset(
            {
                *("label", "delimiter", "column_names", "tokenizer", "columns", "classes", "targets"),
                *("encoding", "decimal", "thousands", "date_format", "null", "comment", "skip_lines"),
            }
        ),
    )

    def files(self) -> list[File]:
        """Returns the files, sorted by name."""
        return list_text_files(self.path, SUFFIXES, "CSV")

    def parts(self, run: base.Run) -> list[base.Part]:
        """Returns the one data set; a first pass over the files finds the classes and the type of each column."""
        label = self.options.label
        groups = base.group_files(self.files(), self.options.split_bytes)
        facts = list(run(partial(_scan_files, self._format, label, self.skips), groups))
        names, notes = self._check_headers(facts)
        if not any(f.rows for f in facts):
            raise DataError(
                f"{self.path}: no rows, only a header line with the names {base.format_items(names)}. Give a file with"
                " rows."
            )
        kinds, type_notes = self._choose_types(names, facts)
        notes += type_notes
        classes = None
        if label and not (pa.types.is_integer(kinds[label]) or pa.types.is_floating(kinds[label])):
            labels = {value or "" for f in facts for value in f.labels}
            first_missing = next((f.first_missing_label for f in facts if f.first_missing_label), None)
            classes = self.order_classes(f"{self.path}: label column {label!r}", labels, first_missing)
            kinds[label] = pa.string()
        tables = partial(_read_tables, self._format, label, self.skips, kinds, classes)
        splits = [base.InputSplit(f.rows, partial(tables, files)) for f, files in zip(facts, groups, strict=True)]
        return [base.Part("", splits, classes, notes=tuple(notes))]

    @cached_property
    def _format(self) -> CsvFormat:
        layout = CsvFormat.of(self.options)
        if self.options.delimiter:
            return layout
        return replace(layout, delimiter=recognize_delimiter(self.files()[0], layout))

    def _choose_types(self, names: list[str], facts: list[_CsvFacts]) -> tuple[dict[str, pa.DataType], list[str]]:
        """Returns the type of each column, and notes for the user on columns that are text for a reason."""
        kinds, notes = dict.fromkeys(names, pa.string()), []
        # Labels are names if `classes` states these, and values that are left out are not judged.
        named = [self.options.label] if self.options.classes else []
        for name in names:
            if name not in (*named, *(self.options.drop or ())):
                scans = [f.columns[name] for f in facts if name in f.columns]
                kinds[name], note = choose_type(self.path, name, scans)
                notes += [note] if note else []
        return kinds, notes

    def _check_headers(self, facts: list[_CsvFacts]) -> tuple[list[str], list[str]]:
        """Returns the names of the columns, and notes for the user on how the files were interpreted."""
        path, names = facts[0].headers[0]
        notes = []
        if self._format.delimiter != "," and not self.options.delimiter:
            notes.append(
                f"{DELIMITERS[self._format.delimiter]} was recognized as the delimiter of {path}. The option delimiter"
                " names another one."
            )
        if not self.options.column_names and (note := check_header(path, names)):
            notes.append(note)
        for f in facts:
            for header in f.headers:
                check_same_header((path, names), header)
        return self.kept_columns(path, names, self.options.label, "column", "Rename that one."), notes


@dataclass
class _CsvFacts:
    """What the first pass finds in the files of an input split, such as the types that all values fit."""

    rows: int = 0
    headers: list[tuple[str, list[str]]] = field(default_factory=list)
    columns: dict[str, ColumnScan] = field(default_factory=dict)
    labels: set[str] = field(default_factory=set)
    first_missing_label: str | None = None


def _scan_files(csv_format: CsvFormat, label: str | None, skip: bool, files: list[File]) -> _CsvFacts:
    """Returns the facts of an input split; this is the first pass."""
    facts = _CsvFacts()
    for file in files:
        bad_rows: list[Any] = []
        has_line_ends = False
        for numbers, block in _numbered_blocks(file, csv_format, bad_rows if skip else None):
            names = block.schema.names
            if not facts.headers or facts.headers[-1][0] != str(file):
                facts.headers.append((str(file), list(names)))
            facts.rows += block.num_rows
            base.ROWS_READ.add(block.num_rows)
            # `_check_headers` refuses repeated names once all headers are known.
            if len(set(names)) < len(names):
                continue
            for name in names:
                scan = facts.columns.setdefault(name, ColumnScan(types_of(csv_format.notation)))
                scan.add(block[name], file.name, numbers, csv_format.notation)
                if pa.types.is_string(scan.types[0]):
                    _check_zero_bytes(file, name, block[name], numbers)
                    has_line_ends |= bool(pc.any(pc.match_substring(block[name], "\n")).as_py())
            if label in names:
                labels = set(pc.unique(block[label]).to_pylist())
                facts.labels |= labels
                if labels & {None, ""} and not facts.first_missing_label:
                    row = pc.index(pc.fill_null(pc.equal(block[label], ""), True), True).as_py()
                    facts.first_missing_label = f"{file.name}:{numbers[row]}"
        # The search for an open quote reads the file once more, so only a value with a line end, which an open quote
        # causes, makes it necessary.
        may_have_open_quote = has_line_ends or any("\n" in row.text for row in bad_rows)
        if may_have_open_quote and (fault := find_open_quote(file, csv_format)):
            raise DataError(f"{file}: {fault}. Close it, or write a quote that is part of a value twice.")
        facts.rows += len(bad_rows)
    return facts


def _check_zero_bytes(file: File, name: str, values: pa.Array, numbers: list[int]) -> None:
    """Refuses zero bytes in the values of a text column, which are a sign of another encoding such as UTF-16."""
    if pc.any(has_zero := pc.match_substring(values, "\0")).as_py():
        row = numbers[pc.index(has_zero, True).as_py()]
        raise DataError(
            f"{file}: row {row} has a zero byte in the column {name!r}. Text has none: correct the row, or save the"
            " file as UTF-8."
        )


def _read_tables(
    csv_format: CsvFormat,
    label: str | None,
    skip: bool,
    kinds: dict[str, pa.DataType],
    classes: tuple[str, ...] | None,
    files: list[File],
    refuse: base.Refuse,
) -> Iterator[pa.Table]:
    """Yields the tables of an input split; this is the second pass."""
    for file in files:
        bad_rows: list[Any] = []
        name = file.name
        for numbers, block in _numbered_blocks(file, csv_format, bad_rows if skip else None):
            table = base.make_table(
                [f"{name}:{number}" for number in numbers],
                _convert_block(file, block, label, kinds, classes, csv_format),
            )
            yield _without_too_large(table, block, label, refuse)
        for invalid in bad_rows:
            refuse(
                f"{file.name}:{invalid.number}",
                f"{invalid.actual_columns} values where {invalid.expected_columns} are expected",
            )


def _without_too_large(table: pa.Table, block: pa.RecordBatch, label: str | None, refuse: base.Refuse) -> pa.Table:
    """Refuses rows with a number that float64 does not represent, and returns the others; `block` has their texts."""
    is_good = np.ones(table.num_rows, np.bool_)
    for column in table.schema:
        if not pa.types.is_floating(column.type):
            continue
        source = label if label and column.name == "label" else column.name
        too_large = find_too_large(block[source], table[column.name].combine_chunks())
        for row in np.flatnonzero(too_large.to_numpy(zero_copy_only=False) & is_good):
            is_good[row] = False
            value = block[source][int(row)].as_py().strip()[:_MAX_VALUE_CHARS_SHOWN]
            refuse(
                table["row_id"][int(row)].as_py(),
                f"{source!r} holds {value}, which is too large for float64 (at most about 1.8e308)",
            )
    return table if is_good.all() else table.filter(pa.array(is_good))


def _convert_block(
    file: File,
    block: pa.RecordBatch,
    label: str | None,
    kinds: dict[str, pa.DataType],
    classes: tuple[str, ...] | None,
    layout: CsvFormat,
) -> dict[str, pa.Array]:
    """Returns the columns of a block with their types, the label by its new name and as indices of `classes`."""
    try:
        columns = {name: convert_values(block[name], kind, layout.notation) for name, kind in kinds.items()}
    except (pa.ArrowInvalid, KeyError) as error:
        raise DataError(f"{file}: {error}. The file changed while it was read: start again.") from error
    columns = {"label" if name == label else name: values for name, values in columns.items()}
    if classes is not None:
        columns["label"] = pc.index_in(columns["label"], pa.array(classes)).cast(pa.int64())
    return columns


def _numbered_blocks(
    file: File, csv_format: CsvFormat, bad_rows: list[Any] | None
) -> Iterator[tuple[list[int], pa.RecordBatch]]:
    """Yields the numbers of the rows of each block of `_string_blocks`, and the block.

    Numbers are those of pyarrow: the first line that is not empty has the number 1, also if it is a header line, and
    rows with a wrong number of values are counted.
    """
    row = 1 + csv_format.has_header(file)
    for block in _string_blocks(file, csv_format, bad_rows):
        bad_numbers = {invalid.number for invalid in bad_rows or ()}
        numbers = list(range(row, row + block.num_rows + len(bad_numbers)))
        if bad_numbers:
            numbers = [number for number in numbers if number not in bad_numbers][: block.num_rows]
        row = numbers[-1] + 1 if numbers else row
        yield numbers, block


def _string_blocks(file: File, csv_format: CsvFormat, bad_rows: list[Any] | None) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a file in blocks of about `BLOCK_BYTES`, with every column as strings.

    The first block has no rows: from it a caller learns the names of the columns of a file that has only a header line.
    Rows with a wrong number of values are appended to `bad_rows`, as pyarrow's `InvalidRow`, before the block that
    follows them is yielded; without `bad_rows` such a row is an error.
    """

    def record_bad_row(row: Any) -> str:
        assert bad_rows is not None
        bad_rows.append(row)
        return "skip"

    has_header = csv_format.has_header(file)
    read = arrow_csv.ReadOptions(
        # With several threads pyarrow does not know the numbers of rows, which errors and bad rows need.
        use_threads=False,
        block_size=base.BLOCK_BYTES,
        column_names=None if has_header else csv_format.column_names,
    )
    convert = arrow_csv.ConvertOptions(default_column_type=pa.string())
    parse = arrow_csv.ParseOptions(
        delimiter=csv_format.delimiter,
        newlines_in_values=True,
        invalid_row_handler=None if bad_rows is None else record_bad_row,
    )
    try:
        with parser_errors(file, csv_format.advice(has_header)), csv_format.open(file) as stream:
            reader = arrow_csv.open_csv(stream, read, parse, convert)
            # pyarrow decodes the names here, so that an error in them is turned into one that names the file.
            names = reader.schema.names
            yield pa.RecordBatch.from_arrays([pa.array([], pa.string()) for _ in names], schema=reader.schema)
            yield from (_without_nulls(block, csv_format.nulls) for block in reader)
    except DataError as error:
        # The error may be a consequence of an open quote far before the row that it names.
        if isinstance(error.__cause__, pa.ArrowInvalid) and (fault := find_open_quote(file, csv_format)):
            raise DataError(f"{file}: {fault}. Close it, or write a quote that is part of a value twice.") from error
        raise


def _without_nulls(block: pa.RecordBatch, nulls: tuple[str, ...]) -> pa.RecordBatch:
    """Returns a block of strings in which further spellings of a missing value are missing."""
    if not nulls:
        return block
    spellings = pa.array(nulls, pa.string())
    columns = [
        pc.if_else(pc.is_in(pc.utf8_trim_whitespace(values), spellings), pa.scalar(None, pa.string()), values)
        for values in block.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=block.schema)
