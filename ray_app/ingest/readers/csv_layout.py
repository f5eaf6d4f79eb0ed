"""Layout of CSV files: `CsvFormat`, and the functions that recognize it and check the header line.

Recognized are the delimiter, the quote, and lines above the header line.
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
from dataclasses import dataclass
from typing import IO, Any

from ray_app.errors import DataError
from ray_app.ingest.options import IngestOptions
from ray_app.ingest.readers import sources
from ray_app.storage.data_files import File, parser_errors
from ray_app.storage.text_files import open_text

DELIMITERS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a vertical bar"}
"""Delimiters that are recognized without the option `delimiter`, and their names for messages."""
_NUMBER = re.compile(r"\s*[+-]?(\d+[.,]?\d*|[.,]\d+)([eE][+-]?\d+)?\s*")
"""A number with a decimal point or a decimal comma."""
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}")
_HEAD_BYTES, _HEAD_ROWS = 1 << 20, 20
"""Maximum bytes and rows at the beginning of a file from which its layout is recognized."""
_MAX_VALUE_CHARS = 1 << 30
"""Maximum characters of a value; the default of the csv module is 131,072."""
csv.field_size_limit(_MAX_VALUE_CHARS)
_MAX_NAMES = 20
"""Maximum number of names in a command of a message."""
_BLOCK_CHARS = 1 << 16
"""Characters of another encoding that are converted together."""
_MAX_LISTED = 5
"""Maximum number of names in a message."""


@dataclass(frozen=True)
class CsvFormat:
    """The layout of all files of a data set; without names of columns the header line of each file has them.

    `nulls` are further spellings of a missing value, and `preface_lines` is the number of lines above the header line;
    for the others see `IngestOptions`.
    """

    delimiter: str = ","
    quote: str = '"'
    column_names: tuple[str, ...] | None = None
    encoding: str = "utf-8"
    decimal: str = "."
    nulls: tuple[str, ...] = ()
    preface_lines: int = 0

    @classmethod
    def of(cls, options: IngestOptions) -> CsvFormat:
        """Returns the layout that the options state, with a comma where they do not name a delimiter."""
        return cls(
            # A shell passes a tab as these two characters.
            (options.delimiter or ",").replace(r"\t", "\t"),
            '"',
            tuple(options.column_names) if options.column_names else None,
            options.encoding,
            options.decimal or ".",
            tuple([options.null] if isinstance(options.null, str) else options.null or ()),
        )

    def has_header(self, file: File) -> bool:
        """Returns whether the first line of a file is a header line: always, or if it has just `column_names`."""
        return self.column_names is None or parse_first_rows(self.read_head(file), self.delimiter, self.quote)[:1] == [
            list(self.column_names)
        ]

    def advice(self, has_header: bool) -> str:
        """Returns the part of an error message that says which layout is allowed and what to do."""
        first = "one header line (row 1)" if has_header else "no header line"
        delimiter = DELIMITERS.get(self.delimiter, repr(self.delimiter))
        return (
            f"Expected {self.encoding.upper()} text with {first} and the same number of values, separated by"
            f" {delimiter}, in every row. Correct the file, remove lines above the header, or set another delimiter or"
            " encoding, such as --encoding cp1252 for files of Windows."
        )

    @contextmanager
    def open(self, file: File) -> Iterator[IO[bytes]]:
        """Opens a file as UTF-8 text without the lines above the header line."""
        with file.open_unpacked() if self.encoding != "utf-8" else open_text(file) as stream:
            text: Any = stream if self.encoding == "utf-8" else io.BufferedReader(_Transcoded(stream, self, file))
            for _ in range(self.preface_lines):
                text.readline(_HEAD_BYTES)
            yield text

    def read_head(self, file: File) -> str:
        """Returns the first MiB of a file; bytes that are not UTF-8 become U+FFFD."""
        with parser_errors(file, "The file is damaged; write it again."), self.open(file) as stream:
            return stream.read(_HEAD_BYTES).decode("utf-8-sig", "replace")


class _Transcoded(io.RawIOBase):
    """A stream of another encoding as UTF-8."""

    def __init__(self, stream: IO[bytes], layout: CsvFormat, file: File) -> None:
        self._text = io.TextIOWrapper(stream, layout.encoding, newline="")
        self._file = file
        self._rest = b""

    def readable(self) -> bool:
        """Returns True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Copies the next bytes; returns their number, 0 at the end."""
        if not self._rest:
            try:
                self._rest = self._text.read(_BLOCK_CHARS).encode()
            except UnicodeError as error:
                raise DataError(
                    f"{self._file} is not {self._text.encoding}: {error}. Name another encoding, one of utf-8, latin-1,"
                    " cp1252 and utf-16."
                ) from error
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def parse_first_rows(head: str, delimiter: str, quote: str = '"') -> list[list[str]]:
    """Returns the first complete, not empty rows, at most `_HEAD_ROWS`; none if `csv` cannot parse them."""
    reader = csv.reader(io.StringIO(head, newline=""), delimiter=delimiter, quotechar=quote)
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
    marks = [mark for mark in DELIMITERS if mark != layout.decimal]
    widths = {mark: [len(row) for row in parse_first_rows(head, mark, layout.quote)] or [1] for mark in marks}
    num_columns = len(layout.column_names or ())
    if num_columns > 1 and (fits := [mark for mark, width in widths.items() if width[0] == num_columns]):
        return fits[0]
    even = {delimiter: width[0] for delimiter, width in widths.items() if len(set(width)) == 1 and width[0] > 1}
    if "," in even or (not even and widths.get(",", [1])[0] > 1):
        return ","
    # A delimiter that gives all rows the same number of values comes before one that does not.
    candidates = even or {delimiter: width[0] for delimiter, width in widths.items()}
    return max(candidates, key=candidates.__getitem__)


def recognize_decimal(file: File, layout: CsvFormat) -> str:
    """Returns the decimal mark of a file.

    It is a comma, where that does not divide values, if numbers of the first rows have one, and none has a point. 1,234
    may be a thousand.
    """
    rows = parse_first_rows(layout.read_head(file), layout.delimiter, layout.quote)
    values = [value.strip() for row in rows for value in row]
    numbers = [value for value in values if _NUMBER.fullmatch(value) and ("," in value or "." in value)]
    is_point = any("." in value for value in numbers) or all(map(_THOUSANDS.fullmatch, numbers))
    return "." if is_point or layout.delimiter == "," else ","


def recognize_quote(file: File, layout: CsvFormat) -> str:
    """Returns the quote of a file.

    It is `'` if all names of the header are within such quotes, or values of all first rows and none within `"`.
    """
    header, *rows = [line for line in layout.read_head(file).splitlines() if line.strip()][: _HEAD_ROWS + 1] or [""]
    value, delimiters = r"\s*'([^']|'')*'\s*", re.escape(layout.delimiter + "".join(DELIMITERS))
    if re.fullmatch(rf"{value}([{delimiters}]{value})*", header):
        return "'"
    quoted = re.compile(rf"(^|[{delimiters}]){value}(?=$|[{delimiters}])")
    is_single = bool(rows) and all(map(quoted.search, rows)) and not any('"' in row for row in rows)
    return "'" if is_single else '"'


def count_preface_lines(file: File, layout: CsvFormat) -> int:
    """Returns the number of lines above the header line of a file: comments that begin with `#`, and titles.

    A comment has another number of values than the line after the comments, and a title has one value, where all lines
    after it agree in having more.
    """
    lines = layout.read_head(file).splitlines(keepends=True)
    marks = {*DELIMITERS, layout.delimiter}
    comments = sum(1 for _ in itertools.takewhile(lambda line: line.lstrip().startswith("#"), lines))

    def widths(first: int, end: int | None = None) -> list[set[int]]:
        text = "".join(lines[first:end])
        return [{len(row) for row in parse_first_rows(text, mark, layout.quote)} for mark in marks]

    widest = [max(max(width, default=0) for width in widths(i, i + 1)) for i in (comments - 1, comments)]
    if comments == len(lines) or (comments and widest[0] == widest[1]):
        comments = max(0, comments - 1)
    # The header line of an index without a name begins with a delimiter, and spreadsheets end a title with several.
    any_mark = re.escape("".join(marks))
    has_one = re.compile(rf"[^{any_mark}]*([{any_mark}]{{2,}})?\s*").fullmatch
    titles = sum(1 for _ in itertools.takewhile(has_one, lines[comments:]))
    below = comments + titles
    is_title = below < len(lines) - 1 and any(len(width) == 1 and max(width) > 1 for width in widths(below))
    preface = comments + titles * is_title
    return preface if any(line.strip() for line in lines[:preface]) else 0


def check_header(file: str, names: list[str]) -> str | None:
    """Returns a note for the user if the names in a header line may be the values of a row.

    Raises DataError if numbers among them do not look like a numbering, or a name is there twice.
    """
    numbers = [name for name in names if _NUMBER.fullmatch(name)]
    if numbers and not _is_numbering(numbers):
        examples = [f"column_{i}" for i in range(1, min(len(names), _MAX_NAMES) + 1)]
        examples += ["..."] if len(names) > _MAX_NAMES else []
        raise DataError(
            f"{file}: the first line holds numbers ({sources.format_items(numbers)}) instead of column names. If the"
            f" file has no header line, set its {len(names)} names: --column_names '[{', '.join(examples)}]'; if"
            f" these are the names, set exactly them: --column_names '{json.dumps(names[:_MAX_NAMES])}'."
        )
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        columns_of = {name: [i for i, other in enumerate(names, 1) if other == name] for name in repeated}
        listed = ", ".join(
            f"{name!r} (columns {sources.format_items(columns)})"
            for name, columns in itertools.islice(columns_of.items(), _MAX_LISTED)
        )
        more = f" and {len(repeated) - _MAX_LISTED} more names" if len(repeated) > _MAX_LISTED else ""
        raise DataError(
            f"{file}: two columns with the same name: {listed}{more}. Give each column its own name in the header line."
        )
    if numbers:
        return (
            f"the names of columns in {file} are numbers ({sources.format_items(numbers)}). If they are the first row"
            " of values, because the file has no header line, set --column_names."
        )
    return None


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
    differences = [f"lacks {sources.format_items(missing)}"] if missing else []
    differences += [f"also has {sources.format_items(extra)}"] if extra else []
    difference = " and ".join(differences) or "has the columns in another order"
    raise DataError(
        f"{other_path}: columns {sources.format_items(other_names)}, but the first file, {path}, has"
        f" {sources.format_items(names)}. The file {difference}. All files need the same header."
    )


def find_open_quote(file: File, layout: CsvFormat) -> str | None:
    """Returns a description of the first quote that opens a value and is not closed; None if there is none.

    pyarrow does not find it: it takes all that follows an open quote, line ends and delimiters too, for one value.
    """
    with parser_errors(file, "The file is damaged; write it again."), layout.open(file) as stream:
        text = io.TextIOWrapper(stream, "utf-8-sig", "replace", newline="")
        rows = csv.reader(text, delimiter=layout.delimiter, quotechar=layout.quote, strict=True)
        first_line = 1
        try:
            for _ in rows:
                first_line = rows.line_num + 1
        except csv.Error as error:
            # These are parts of the messages "unexpected end of data" and "',' expected after '"'" of the csv module.
            if "end of data" in str(error) or "expected after" in str(error):
                return f"in line {first_line}, a quote opens a value but is not closed at its end"
    return None
