"""How a CSV file is laid out: its delimiter, its header line, and quotes that are not closed."""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections import Counter
from dataclasses import dataclass

from ray_app.data.dataset.files import File, parsing
from ray_app.errors import DataError
from ray_app.ingest.readers import base
from ray_app.ingest.readers.text_files import open_text

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
        """Whether the first line of a file holds the names: without names always, with them where it holds just these."""
        return self.column_names is None or first_rows(read_head(file), self.delimiter)[:1] == [list(self.column_names)]

    def advice(self, has_header: bool) -> str:
        """What a file of this format has, and what to do with one that has something else."""
        first = "one header line (row 1)" if has_header else "no header line"
        delimiter = DELIMITERS.get(self.delimiter, repr(self.delimiter))
        return (
            f"Expected UTF-8 text with {first} and the same number of values, separated by {delimiter}, in every row. Correct the file, or"
            " name another delimiter."
        )


def named_delimiter(delimiter: str) -> str:
    r"""The delimiter that an option names: `\t`, as a command line passes it on, is a tab."""
    return "\t" if delimiter == r"\t" else delimiter


def read_head(file: File) -> str:
    """The first MiB of a file.

    Raises:
        DataError: The file is damaged or in another encoding.
    """
    with parsing(file, "The file is damaged; make it again."), open_text(file) as stream:
        return stream.read(_HEAD_BYTES).decode("utf-8-sig", "replace")


def first_rows(head: str, delimiter: str) -> list[list[str]]:
    """The first rows in the beginning of a file, at most 20; none where quotes or the length of a value let none be read."""
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
    widths = {delimiter: [len(row) for row in first_rows(head, delimiter)] or [1] for delimiter in DELIMITERS}
    if column_names and len(column_names) > 1 and (fits := [mark for mark, width in widths.items() if width[0] == len(column_names)]):
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
            f"{file}: the first line holds numbers ({base.listed(numbers)}) where the names of the columns are expected. If the file has no"
            f" header line, give its {len(names)} names by column_names; if these are the names, give just them."
        )
    twice = {name: count for name, count in Counter(names).items() if count > 1}
    if twice:
        places = {name: [i for i, other in enumerate(names, 1) if other == name] for name in twice}
        said = ", ".join(f"{name!r} (columns {base.listed(at)})" for name, at in itertools.islice(places.items(), _MAX_SAID))
        more = f" and {len(twice) - _MAX_SAID} more names" if len(twice) > _MAX_SAID else ""
        raise DataError(f"{file}: two columns of one name: {said}{more}. Give each column its own name in the header line.")
    if numbers:
        return (
            f"the names of columns in {file} are numbers ({base.listed(numbers)}). If they are values of a first row, since the file has no"
            " header line, give column_names."
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
    missing, more = [name for name in names if name not in other_names], [name for name in other_names if name not in names]
    differs = [f"lacks {base.listed(missing)}"] * bool(missing) + [f"has also {base.listed(more)}"] * bool(more)
    said = " and ".join(differs) or "has the columns in another order"
    raise DataError(
        f"{other_path}: columns {base.listed(other_names)}, but the first file, {path}, has {base.listed(names)}: it {said}. Give all files"
        " one header."
    )


def open_quote(file: File, delimiter: str) -> str | None:
    """What is wrong with the quotes of a file; None where each that opens a value closes it.

    pyarrow takes all that follows a quote which is not closed, line ends and delimiters too, for one value.
    """
    csv.field_size_limit(_MAX_FIELD)
    with parsing(file, "The file is damaged; make it again."), open_text(file) as stream:
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
