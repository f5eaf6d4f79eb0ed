"""Types of the columns of CSV files: what the first pass finds in their values, and the conversion of the second one.

`ValueNotation` is how numbers and dates are written. A column gets the first type that all of its values fit.
`ColumnScan` collects the types of the values of some files, and the first value of each kind that a number would not
represent as it is written. `choose_type` decides.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from ray_app.errors import DataError
from ray_app.ingest.options import IngestOptions

NULLS = tuple(arrow_csv.ConvertOptions().null_values)
"""Spellings of a missing value, as pyarrow has them."""
TYPES = (pa.int64(), pa.uint64(), pa.float64(), pa.bool_(), pa.string())
"""Types of CSV columns other than dates, see `types_of`."""
_BLANKS = " \u00a0\u202f"
"""Blanks that separate groups of digits: that of the keyboard, and those without a line break, as Excel writes them."""
_GROUP_MARKS = (",", ".", " ", "'", "_")


@dataclass(frozen=True)
class ValueNotation:
    """The notation of numbers and dates in all files of a data set; see `IngestOptions` for the options."""

    decimal: str = "."
    thousands: str | None = None
    date_format: str | None = None

    @classmethod
    def of(cls, options: IngestOptions) -> ValueNotation:
        """Returns the notation that the options state."""
        return cls(options.decimal, options.thousands, options.date_format)

    @property
    def is_plain(self) -> bool:
        """Whether numbers are written as Arrow reads them."""
        return self.decimal == "." and self.thousands is None

    @property
    def group_mark(self) -> str:
        """A regular expression of the mark between groups of digits; "" without one."""
        return f"[{_BLANKS}]" if self.thousands == " " else re.escape(self.thousands or "")

    @property
    def number(self) -> str:
        """A regular expression of a number in this notation."""
        mark, decimal = self.group_mark, re.escape(self.decimal)
        groups = rf"\d{{1,3}}({mark}\d{{3}})+|" if mark else ""
        infinity = "([iI][nN][fF]([iI][nN][iI][tT][yY])?)"
        return rf"^[+-]?({groups}\d+)({decimal}\d*)?([eE][+-]?\d+)?$|^[+-]?({infinity}|{decimal}\d+([eE][+-]?\d+)?)$"

    def to_plain(self, values: pa.Array) -> pa.Array:
        """Returns texts with the numbers in the notation of Arrow; raises ArrowInvalid for others that are not null."""
        if self.is_plain:
            return values
        if pc.any(pc.invert(pc.match_substring_regex(values, self.number))).as_py():
            raise pa.ArrowInvalid("a value is not a number in this notation")
        values = pc.replace_substring_regex(values, self.group_mark, "") if self.thousands else values
        return pc.replace_substring(values, self.decimal, ".")

    @property
    def date_type(self) -> pa.DataType:
        """The type of columns of dates."""
        return pa.timestamp("us", "UTC" if "%z" in (self.date_format or "") else None)

    def has_date(self, text: str) -> bool:
        """Returns whether a text is a date of the format."""
        try:
            return self.date_format is not None and bool(datetime.strptime(text, self.date_format))
        except ValueError:
            return False

    def to_dates(self, values: pa.Array) -> pa.Array:
        """Returns texts as dates; raises ArrowInvalid for others that are not null."""
        # Arrow's own function takes 31.02. for a day in March. Python's is slow, and dates are mostly repeated.
        encoded = values.dictionary_encode()
        try:
            dates = [datetime.strptime(text, str(self.date_format)) for text in encoded.dictionary.to_pylist()]
        except ValueError as error:
            raise pa.ArrowInvalid(str(error)) from error
        return pa.array(dates, self.date_type).take(encoded.indices)

    def find_options(self, value: str) -> list[str]:
        """Returns the options of a command line, each of which makes a value a number; those that are set stay."""
        options: dict[str | None, str] = {}
        for decimal in (".", ",") if self.is_plain else (self.decimal,):
            marks = (None, *(mark for mark in _GROUP_MARKS if mark != decimal))
            for thousands in marks if self.thousands is None else (self.thousands,):
                if re.match(ValueNotation(decimal, thousands).number, value):
                    names = [f"--decimal {decimal}"] if decimal != self.decimal else []
                    names += [f"--thousands {shlex.quote(thousands)}"] if thousands and not self.thousands else []
                    # Where the mark between groups suffices, the decimal mark does not matter.
                    options.setdefault(thousands, " ".join(names))
                    break
        return [option for option in options.values() if option]


_DATE = re.compile(r"(\d{1,2})([./-])(\d{1,2})\2\d{4}(?P<time>[ T]\d{1,2}:\d\d(?P<seconds>:\d\d)?)?")


def find_date_formats(value: str) -> list[str]:
    """Returns the formats of `strptime` by which a text is a date such as 31.12.2020 or 12/31/2020; [] for others."""
    parts = _DATE.fullmatch(value)
    if not parts:
        return []
    mark, time = parts[2], ""
    if parts["time"]:
        time = f"{parts['time'][0]}%H:%M{':%S' if parts['seconds'] else ''}"
    formats = [f"%d{mark}%m{mark}%Y{time}", *([] if mark == "." else [f"%m{mark}%d{mark}%Y{time}"])]
    return [date_format for date_format in formats if ValueNotation(date_format=date_format).has_date(value)]


_MAX_VALUE_CHARS = 40
"""Characters of a value that a message repeats."""
_MIN_ROUNDED_CHARS = 16
"""Digits of the smallest integer that float64 does not represent, 2**53 + 1."""
_MIN_WIDE_CHARS = 19
"""Digits of the smallest integer that does not fit into 64 bits, 2**63."""
_ZERO, _NINE = b"09"
_INFINITY = r"(?i)^\s*[+-]?inf(inity)?\s*$"


@dataclass
class ColumnScan:
    """The types that all values of a column fit, and the first values that a number does not represent.

    `zeros` is a number with leading zeros, `rounded` an integer that float64 would round, and `no_date` what is not of
    the format of the dates before it; each has the id of its row, too.
    """

    types: list[pa.DataType]
    has_dates: bool = False
    no_date: tuple[str, str] | None = None
    zeros: tuple[str, str] | None = None
    rounded: tuple[str, str] | None = None

    def add(self, values: pa.Array, file: str, numbers: Sequence[int], notation: ValueNotation) -> None:
        """Adds values, strings of shape (rows,), of the rows with these numbers in a file."""
        types = [kind for kind in self.types if _fits(values, kind, notation)]
        if notation.date_format and notation.date_type in types:
            is_missing = pc.is_in(pc.utf8_trim_whitespace(values), pa.array([*NULLS, None]))
            self.has_dates |= pc.index(is_missing, False).as_py() >= 0
        elif notation.date_format and notation.date_type in self.types:
            self._find_no_date(values, file, numbers, notation)
        self.types = types
        # Other types, such as dates of digits, may come before that of a number, and fit none of the later values.
        if not any(map(_is_number, self.types)):
            return
        self.zeros = self.zeros or _first_value(_find_leading_zeros(values, notation), values, file, numbers)
        self.rounded = self.rounded or _first_value(_find_rounded(values, notation), values, file, numbers)

    def _find_no_date(self, values: pa.Array, file: str, numbers: Sequence[int], notation: ValueNotation) -> None:
        """Stores the first value that is no date, where a date precedes it."""
        for number, value in zip(numbers, values.to_pylist(), strict=True):
            text = (value or "").strip()
            if text in NULLS:
                continue
            if not notation.has_date(text):
                self.no_date = (f"{file}:{number}", text[:_MAX_VALUE_CHARS]) if self.has_dates else None
                return
            self.has_dates = True


def types_of(notation: ValueNotation) -> list[pa.DataType]:
    """Returns the types of columns in a notation; a column gets the first one that all of its values fit."""
    return [*([notation.date_type] if notation.date_format else []), *TYPES]


def choose_type(where: object, name: str, scans: Sequence[ColumnScan]) -> tuple[pa.DataType, str | None]:
    """Returns the type of a column, and a note for the user where numbers with leading zeros make it text.

    Raises DataError for a column of float64 with an integer that would be rounded.
    """
    has_dates = any(scan.has_dates for scan in scans)
    kind = next(
        kind
        for kind in scans[0].types
        if all(kind in scan.types for scan in scans) and (has_dates or not pa.types.is_timestamp(kind))
    )
    no_date = next((scan.no_date for scan in scans if scan.no_date), None)
    if pa.types.is_string(kind) and no_date:
        row_id, value = no_date
        return kind, (
            f"column {name!r} is text: {value!r} in {row_id} is not of the form that --date_format states, and values"
            f" before it are. Correct it, or leave it empty, if the column is to hold dates."
        )
    if not _is_number(kind):
        return kind, None
    if zeros := next((scan.zeros for scan in scans if scan.zeros), None):
        row_id, value = zeros
        return pa.string(), (
            f"column {name!r} is text, since a number does not keep leading zeros; the first such value is {value!r} in"
            f" {row_id}. Write the values without these zeros if the column is to hold numbers."
        )
    rounded = next((scan.rounded for scan in scans if scan.rounded), None)
    if rounded and pa.types.is_floating(kind):
        row_id, value = rounded
        raise DataError(
            f"{where}: row {row_id}: column {name!r} holds {value}, which float64 would round (integers are kept within"
            f" 64 bits, where all values of the column are integers). Correct it, write a value of the column as text,"
            f" such as id-{value}, or leave the column out."
        )
    return kind, None


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _first_value(mask: pa.Array, values: pa.Array, file: str, numbers: Sequence[int]) -> tuple[str, str] | None:
    """Returns the id of the first row of a mask, and its value; None if there is none."""
    row = pc.index(mask, True).as_py()
    return None if row < 0 else (f"{file}:{numbers[row]}", values[row].as_py().strip()[:_MAX_VALUE_CHARS])


def _find_leading_zeros(values: pa.Array, notation: ValueNotation) -> pa.Array:
    """Returns whether each value is a number with a zero before another digit, such as 007; 0 and 0.5 are none.

    0x1F, which Arrow takes for a number, counts as well.
    """
    candidates = pa.array(_may_have_leading_zeros(values, notation))
    pattern = rf"^\s*[+-]?0{notation.group_mark and notation.group_mark + '?'}[\dxX]"
    return _match_candidates(values, candidates, pattern)


def _match_candidates(values: pa.Array, candidates: pa.Array, pattern: str) -> pa.Array:
    """Returns whether each value is a candidate and matches a regular expression, which others are not compared with.

    A regular expression takes ten times as long as the choice of the candidates.
    """
    if not pc.any(candidates).as_py():
        return candidates
    matches = pc.fill_null(pc.match_substring_regex(values.filter(candidates), pattern), False)
    return pc.replace_with_mask(candidates, candidates, matches)


def _may_have_leading_zeros(values: pa.Array, notation: ValueNotation) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Returns whether the first two bytes of each value allow leading zeros: booleans (rows,)."""
    _, offset_bytes, content_bytes = values.buffers()
    if not len(values) or content_bytes is None or not content_bytes.size:
        return np.zeros(len(values), np.bool_)
    offsets = np.frombuffer(offset_bytes, np.int32, len(values) + 1, 4 * values.offset)
    content = np.frombuffer(content_bytes, np.uint8)
    first = content[np.minimum(offsets[:-1], len(content) - 1)]
    is_candidate = first == _ZERO
    if is_candidate.any():
        second = content[np.minimum(offsets[:-1] + 1, len(content) - 1)]
        # A zero with a decimal point is by far the most frequent one.
        is_candidate &= second != ord(notation.decimal)
    # Signs and blanks may precede the zero.
    is_candidate |= (first < _ZERO) | (first > _NINE)
    return is_candidate & (np.diff(offsets) > 1)


def _find_rounded(values: pa.Array, notation: ValueNotation, min_chars: int = _MIN_ROUNDED_CHARS) -> pa.Array:
    """Returns whether each value of `min_chars` or more is an integer that float64 does not represent exactly."""
    is_long = pc.fill_null(pc.greater_equal(pc.binary_length(values), min_chars), False)
    candidates = pc.and_not(is_long, pc.fill_null(pc.match_substring(values, notation.decimal), False))
    if not pc.any(candidates).as_py():
        return candidates
    mark = notation.group_mark
    integers = _match_candidates(values, candidates, rf"^\s*[+-]?\d(\d{'|' + mark if mark else ''})*\s*$")
    if not pc.any(integers).as_py():
        return integers
    texts = pc.utf8_trim_whitespace(values.filter(integers))
    texts = pc.replace_substring_regex(texts, mark, "") if mark else texts
    try:
        exact = texts.cast(pa.int64()).to_numpy()
        # 2**63 as float64 is beyond int64; the result of its conversion differs from every integer that gives it.
        with np.errstate(invalid="ignore"):
            is_rounded = exact.astype(np.float64).astype(np.int64) != exact
        is_rounded |= exact == np.iinfo(np.int64).max
    except pa.ArrowInvalid:
        is_rounded = np.array([Decimal(float(text)) != Decimal(text) for text in texts.to_pylist()])
    return pc.replace_with_mask(integers, integers, pa.array(is_rounded))


def convert_values(values: pa.Array, kind: pa.DataType, notation: ValueNotation) -> pa.Array:
    """Returns strings as values of a type; except for text they are trimmed, and `NULLS` become null."""
    if pa.types.is_string(kind):
        return values
    trimmed = pc.utf8_trim_whitespace(values)
    present = pc.if_else(pc.is_in(trimmed, pa.array(NULLS)), None, trimmed)
    if pa.types.is_timestamp(kind):
        return notation.to_dates(present)
    return (present if pa.types.is_boolean(kind) else notation.to_plain(present)).cast(kind)


def find_too_large(texts: pa.Array, numbers: pa.Array) -> pa.Array:
    """Returns whether each text is a number beyond float64, which Arrow makes infinite, such as 1e400.

    Args:
        texts: The values as they are written, (rows,).
        numbers: The same as float64.
    """
    is_infinite = pc.fill_null(pc.is_inf(numbers), False)
    if not pc.any(is_infinite).as_py():
        return is_infinite
    return pc.and_not(is_infinite, pc.fill_null(pc.match_substring_regex(texts, _INFINITY), False))


def _fits(values: pa.Array, kind: pa.DataType, notation: ValueNotation) -> bool:
    """Returns whether the type can represent all values, whole numbers beyond 64 bits without rounding."""
    try:
        convert_values(values, kind, notation)
    except pa.ArrowInvalid:
        return False
    if pa.types.is_boolean(kind):
        # Arrow takes 0 and 1 for booleans, too; beside true and false they are another kind of value.
        return not pc.any(pc.is_in(pc.utf8_trim_whitespace(values), pa.array(["0", "1"]))).as_py()
    # Whole numbers that do not fit into 64 bits are often identifiers, which must not be rounded: they become text.
    return not pa.types.is_floating(kind) or not pc.any(_find_rounded(values, notation, _MIN_WIDE_CHARS)).as_py()
