"""Reader of CSV files, with a header line or with names that are given.

How a CSV file is laid out: its delimiter, its header line, and quotes that are not closed.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property, partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from ray_app.errors import DataError
from ray_app.ingest.readers import base
from ray_app.ingest.readers.base import list_text_files, open_text, sort_classes
from ray_app.storage.data_files import DataLocation, File, parser_errors

DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a vertical bar"}
"""What may stand between values without being named, and what it is called."""
_NUMBER = re.compile(r"\s*[+-]?(\d+[.,]?\d*|[.,]\d+)([eE][+-]?\d+)?\s*")
_HEAD_BYTES, _HEAD_ROWS = 1 << 20, 20
_MAX_FIELD = 1 << 30
_MAX_SAID = 5
"""Names that a message repeats."""


@dataclass(frozen=True)
class CsvFormat:
    """The layout of all files of a data set.

    Args:
        delimiter: One character.
        column_names: Names of the columns of files without a header line; None: the first line has them.
    """

    delimiter: str
    column_names: tuple[str, ...] | None = None

    def has_header(self, file: File) -> bool:
        """Whether the first line of a file holds the names: without names always, with them where it holds just
        these.
        """
        return self.column_names is None or parse_first_rows(read_head(file), self.delimiter)[:1] == [
            list(self.column_names)
        ]

    def advice(self, has_header: bool) -> str:
        """What a file of this format has, and what to do with one that has something else."""
        first = "one header line (row 1)" if has_header else "no header line"
        delimiter = DELIMITERS.get(self.delimiter, repr(self.delimiter))
        return (
            f"Expected UTF-8 text with {first} and the same number of values, separated by {delimiter}, in every row."
            f" Correct the file, or"
            " name another delimiter."
        )


def name_delimiter(delimiter: str) -> str:
    r"""The delimiter that an option names: `\t`, as a command line passes it on, is a tab."""
    return "\t" if delimiter == r"\t" else delimiter


def read_head(file: File) -> str:
    """The first MiB of a file.

    Raises:
        DataError: The file is damaged or in another encoding.
    """
    with parser_errors(file, "The file is damaged; make it again."), open_text(file) as stream:
        return stream.read(_HEAD_BYTES).decode("utf-8-sig", "replace")


def parse_first_rows(head: str, delimiter: str) -> list[list[str]]:
    """The first rows in the beginning of a file, at most 20; none where quotes or the length of a value let none be
    read.
    """
    rows = csv.reader(io.StringIO(head, newline=""), delimiter=delimiter)
    try:
        found = [row for row in itertools.islice(rows, _HEAD_ROWS + 1) if row]
    except csv.Error:
        return []
    # The last row may be cut off where there is more of the file.
    return found[:-1] if len(head) > _HEAD_BYTES // 4 or len(found) > _HEAD_ROWS else found


def recognise_delimiter(file: File, column_names: list[str] | None) -> str:
    """The delimiter of a file: a comma unless its first rows have more than one value only with another one.

    Args:
        file: The file.
        column_names: Names of its columns, where it has no header line.
    """
    head = read_head(file)
    widths = {delimiter: [len(row) for row in parse_first_rows(head, delimiter)] or [1] for delimiter in DELIMITERS}
    if (
        column_names
        and len(column_names) > 1
        and (fits := [mark for mark, width in widths.items() if width[0] == len(column_names)])
    ):
        return fits[0]
    even = {delimiter: width[0] for delimiter, width in widths.items() if len(set(width)) == 1 and width[0] > 1}
    if "," in even or (not even and widths[","][0] > 1):
        return ","
    # Without a delimiter that gives all rows as many values, what separates the names of the header line.
    candidates = even or {delimiter: width[0] for delimiter, width in widths.items()}
    return max(candidates, key=candidates.__getitem__)


def check_header(file: str, names: list[str]) -> str | None:
    """Refuses a header line of values or with a name twice; returns a note where it may be one of values.

    Args:
        file: Its file, for messages.
        names: What it holds.

    Raises:
        DataError: With the names that are at fault.
    """
    numbers = [name for name in names if _NUMBER.fullmatch(name)]
    if numbers and not _is_numbering(numbers):
        raise DataError(
            f"{file}: the first line holds numbers ({base.format_items(numbers)}) where the names of the columns are"
            f" expected. If the file has no"
            f" header line, give its {len(names)} names by column_names; if these are the names, give just them."
        )
    twice = {name: count for name, count in Counter(names).items() if count > 1}
    if twice:
        places = {name: [i for i, other in enumerate(names, 1) if other == name] for name in twice}
        said = ", ".join(
            f"{name!r} (columns {base.format_items(at)})" for name, at in itertools.islice(places.items(), _MAX_SAID)
        )
        more = f" and {len(twice) - _MAX_SAID} more names" if len(twice) > _MAX_SAID else ""
        raise DataError(
            f"{file}: two columns of one name: {said}{more}. Give each column its own name in the header line."
        )
    if numbers:
        return (
            f"the names of columns in {file} are numbers ({base.format_items(numbers)}). If they are values of a first"
            " row, since the file has no header line, give column_names."
        )
    return None


def _is_numbering(numbers: list[str]) -> bool:
    """Whether three or more numbers count on by one step, as years or the numbers of columns do."""
    if len(numbers) < 3 or not all(number.strip().isdecimal() for number in numbers):
        return False
    values = [int(number) for number in numbers]
    return len({after - before for before, after in itertools.pairwise(values)}) == 1 and values[1] > values[0]


def check_same_header(first: tuple[str, list[str]], other: tuple[str, list[str]]) -> None:
    """Refuses a file whose header line differs from that of the first file.

    Raises:
        DataError: With what differs.
    """
    (path, names), (other_path, other_names) = first, other
    if names == other_names:
        return
    missing, more = (
        [name for name in names if name not in other_names],
        [name for name in other_names if name not in names],
    )
    differs = [f"lacks {base.format_items(missing)}"] * bool(missing) + [f"has also {base.format_items(more)}"] * bool(
        more
    )
    said = " and ".join(differs) or "has the columns in another order"
    raise DataError(
        f"{other_path}: columns {base.format_items(other_names)}, but the first file, {path}, has"
        f" {base.format_items(names)}: it {said}. Give all files one header."
    )


def find_open_quote(file: File, delimiter: str) -> str | None:
    """What is wrong with the quotes of a file; None where each that opens a value closes it.

    pyarrow takes all that follows a quote which is not closed, line ends and delimiters too, for one value.
    """
    csv.field_size_limit(_MAX_FIELD)
    with parser_errors(file, "The file is damaged; make it again."), open_text(file) as stream:
        text = io.TextIOWrapper(stream, "utf-8-sig", "replace", newline="")
        rows = csv.reader(text, delimiter=delimiter, strict=True)
        begins = 1
        try:
            for _ in rows:
                begins = rows.line_num + 1
        except csv.Error as error:
            known = "end of data" in str(error) or "expected after" in str(error)
            return f"in line {begins} a quote opens a value and is not closed before the end of it" if known else None
    return None


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

    path: DataLocation
    label: str | None
    skip: bool
    piece_bytes: int
    delimiter: str | None = None
    column_names: list[str] | None = None

    def files(self) -> list[File]:
        """The files, sorted by name."""
        return list_text_files(self.path, SUFFIXES, "CSV")

    def parts(self, run: base.Run) -> list[base.Part]:
        """One part; a first pass over the files finds the narrowest type that holds each column, and the classes."""
        groups = base.group_files(self.files(), self.piece_bytes)
        facts = list(run(partial(_learn, self._format, self.label, self.skip), groups))
        names, notes = self._check_headers(facts)
        if not any(f.rows for f in facts):
            raise DataError(
                f"{self.path}: no rows, only a header line with the names {base.format_items(names)}. Give a file with"
                " rows."
            )
        kinds = {
            name: next(kind for kind in KINDS if all(kind in f.kinds.get(name, KINDS) for f in facts)) for name in names
        }
        classes = None
        if self.label and not (pa.types.is_integer(kinds[self.label]) or pa.types.is_floating(kinds[self.label])):
            found = set().union(*(f.labels for f in facts))
            classes = sort_classes(f"{self.path}: label column {self.label!r}", found, self.skip)
            kinds[self.label] = pa.string()
        tables = partial(_tables, self._format, self.label, self.skip, kinds, classes)
        pieces = [base.InputSplit(f.rows, partial(tables, some)) for f, some in zip(facts, groups, strict=True)]
        return [base.Part("", pieces, classes, notes=tuple(notes))]

    @cached_property
    def _format(self) -> CsvFormat:
        names = tuple(self.column_names) if self.column_names else None
        if self.delimiter:
            return CsvFormat(name_delimiter(self.delimiter), names)
        return CsvFormat(recognise_delimiter(self.files()[0], self.column_names), names)

    def _check_headers(self, facts: list[_Facts]) -> tuple[list[str], list[str]]:
        """The columns, which all files have, and notes about how they were understood."""
        path, names = facts[0].headers[0]
        notes = []
        if self._format.delimiter != "," and not self.delimiter:
            notes.append(
                f"{DELIMITERS[self._format.delimiter]} was recognised as the delimiter of {path}. The option delimiter"
                f" names another one."
            )
        if not self.column_names and (note := check_header(path, names)):
            notes.append(note)
        for f in facts:
            for header in f.headers:
                check_same_header((path, names), header)
        if self.label and self.label not in names:
            raise DataError(
                f"{path}: no label column {self.label!r}; the columns are {base.format_items(names, 50)}. Name one of"
                " them."
            )
        if self.label and self.label != "label" and "label" in names:
            raise DataError(
                f"{path}: {self.label!r} is to become 'label', but {base.format_items(names, 50)} has another column"
                " 'label'. Rename that one."
            )
        return names, notes


@dataclass
class _Facts:
    """What the first pass learned of a piece: rows, each file's header, the types that hold a column, the label's
    values.
    """

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
        if (has_line_ends or any("\n" in row.text for row in bad)) and (fault := find_open_quote(file, form.delimiter)):
            raise DataError(f"{file}: {fault}. Close it, or write a quote that is part of a value twice.")
        facts.rows += len(bad)
    return facts


def _refuse_zero_bytes(file: File, name: str, values: pa.Array, numbers: list[int]) -> None:
    if pc.any(found := pc.match_substring(values, "\0")).as_py():
        row = numbers[pc.index(found, True).as_py()]
        raise DataError(
            f"{file}: row {row} has a zero byte in the column {name!r}. Text has none: correct the row, or save the"
            f" file as UTF-8."
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
            yield base.make_table(
                [f"{file.name}:{number}" for number in numbers], _converted_block(file, block, label, kinds, classes)
            )
        for invalid in bad:
            refuse(
                f"{file.name}:{invalid.number}",
                f"{invalid.actual_columns} values where {invalid.expected_columns} are expected",
            )


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
    """The blocks of `_string_blocks`, each with the numbers of its rows; the first line that is not empty has the
    number 1.
    """
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
    """The file in blocks of about `BLOCK_BYTES`, the first without rows, every column as a string; errors name the row,
    by one thread.

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
    read = arrow_csv.ReadOptions(
        use_threads=False, block_size=base.BLOCK_BYTES, column_names=None if has_header else form.column_names
    )
    convert = arrow_csv.ConvertOptions(default_column_type=pa.string())
    parse = arrow_csv.ParseOptions(
        delimiter=form.delimiter, newlines_in_values=True, invalid_row_handler=None if bad is None else keep
    )
    try:
        with parser_errors(file, form.advice(has_header)), open_text(file) as stream:
            reader = arrow_csv.open_csv(stream, read, parse, convert)
            names = reader.schema.names  # decoded here, where it is known of which file they are
            yield pa.RecordBatch.from_arrays([pa.array([], pa.string()) for _ in names], schema=reader.schema)
            yield from reader
    except DataError as error:
        if isinstance(error.__cause__, pa.ArrowInvalid) and (fault := find_open_quote(file, form.delimiter)):
            raise DataError(f"{file}: {fault}. Close it, or write a quote that is part of a value twice.") from error
        raise


def _converted(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """CSV strings as `kind`; outside string columns, space around a value goes and a spelling of "missing" becomes
    null.
    """
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
