"""Types of the columns of CSV files: what the first pass finds in their values, and the conversion of the second one.

`decimal` is the decimal mark of numbers. A column gets the first type that all of its values fit. `ColumnScan` collects
the types of the values of some files, and the first value of each kind that a number would not represent as it is
written. `choose_type` decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from ray_app.errors import DataError
from ray_app.plan.manifest import Int64

NULLS = tuple(arrow_csv.ConvertOptions().null_values)
"""Spellings of a missing value, as pyarrow has them."""
TYPES = (pa.int64(), pa.uint64(), pa.float64(), pa.bool_(), pa.string())
"""Types of CSV columns; a column gets the first one that all of its values fit."""


def number_pattern(decimal: str) -> str:
    """Returns a regular expression of a number with this decimal mark."""
    mark, infinity = re.escape(decimal), "([iI][nN][fF]([iI][nN][iI][tT][yY])?)"
    return rf"^[+-]?\d+({mark}\d*)?([eE][+-]?\d+)?$|^[+-]?({infinity}|{mark}\d+([eE][+-]?\d+)?)$"


def _to_plain(values: pa.Array, decimal: str) -> pa.Array:
    """Returns texts with the numbers as Arrow reads them; raises ArrowInvalid for others that are not null."""
    if decimal == ".":
        return values
    if pc.any(pc.invert(pc.match_substring_regex(values, number_pattern(decimal)))).as_py():
        raise pa.ArrowInvalid("a value is not a number with this decimal mark")
    return pc.replace_substring(values, decimal, ".")


_MAX_VALUE_CHARS = 40
"""Characters of a value that a message repeats."""
_PROBED_ROWS = 100
"""Values of a block that are tried before the others."""
_MIN_ROUNDED_CHARS = 16
"""Digits of the smallest integer that float64 does not represent, 2**53 + 1."""
_MIN_WIDE_CHARS = 19
"""Digits of the smallest integer that does not fit into 64 bits, 2**63."""
_ZERO, _NINE, _PLUS, _MINUS = b"09+-"
_INFINITY = r"(?i)^\s*[+-]?inf(inity)?\s*$"


@dataclass
class ColumnScan:
    """The types that all values of a column fit, and the first values that a number does not represent.

    `zeros` is a number with leading zeros, and `rounded` an integer that float64 would round; each has the id of its
    row, too.
    """

    types: list[pa.DataType] = field(default_factory=lambda: list(TYPES))
    zeros: tuple[str, str] | None = None
    rounded: tuple[str, str] | None = None

    def add(self, values: pa.Array, file: str, numbers: Int64, decimal: str) -> None:
        """Adds values, strings of shape (rows,), of the rows with these numbers in a file."""
        self.types = [kind for kind in self.types if _fits(values, kind, decimal)]
        if any(map(_is_number, self.types)):
            # Such as 007, and 0x1F, which Arrow takes for a number; 0 and 0.5 have none.
            zeros = _match_candidates(values, pa.array(may_have_leading_zeros(values, decimal)), r"^\s*[+-]?0[\dxX]")
            self.zeros = self.zeros or _first_value(zeros, values, file, numbers)
            self.rounded = self.rounded or _first_value(_find_rounded(values, decimal), values, file, numbers)


def choose_type(where: object, name: str, scans: Sequence[ColumnScan]) -> tuple[pa.DataType, str | None]:
    """Returns the type of a column, and a note for the user where numbers with leading zeros make it text.

    Raises DataError for a column of float64 with an integer that would be rounded.
    """
    kind = next(kind for kind in TYPES if all(kind in scan.types for scan in scans))
    if not _is_number(kind):
        return kind, None
    if zeros := next((scan.zeros for scan in scans if scan.zeros), None):
        row_id, value = zeros
        return pa.string(), (
            f"column {name!r} is text, since a number does not keep leading zeros; the first such value is {value!r} in"
            f" {row_id}. If the column contains numbers, write the values without these zeros."
        )
    rounded = next((scan.rounded for scan in scans if scan.rounded), None)
    if rounded and pa.types.is_floating(kind):
        row_id, value = rounded
        raise DataError(
            f"{where}: row {row_id}: column {name!r} holds {value}, which float64 would round (64-bit integers are"
            " exact only if all values of the column are integers). Correct it, write one value of the column as text,"
            f" such as id-{value}, or leave the column out."
        )
    return kind, None


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _first_value(mask: pa.Array, values: pa.Array, file: str, numbers: Int64) -> tuple[str, str] | None:
    """Returns the id of the first row of a mask, and its value; None if there is none."""
    row = pc.index(mask, True).as_py()
    return None if row < 0 else (f"{file}:{numbers[row]}", values[row].as_py().strip()[:_MAX_VALUE_CHARS])


def _match_candidates(values: pa.Array, candidates: pa.Array, pattern: str) -> pa.Array:
    """Returns whether each value is a candidate and matches a regular expression, which others are not compared with.

    A regular expression takes ten times as long as the choice of the candidates.
    """
    if not pc.any(candidates).as_py():
        return candidates
    matches = pc.fill_null(pc.match_substring_regex(values.filter(candidates), pattern), False)
    return pc.replace_with_mask(candidates, candidates, matches)


def may_have_leading_zeros(values: pa.Array, decimal: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Returns whether the first two bytes of each value, behind a sign, allow leading zeros: booleans (rows,)."""
    _, offset_bytes, content_bytes = values.buffers()
    if not len(values) or content_bytes is None or not content_bytes.size:
        return np.zeros(len(values), np.bool_)
    offsets = np.frombuffer(offset_bytes, np.int32, len(values) + 1, 4 * values.offset)
    content = np.frombuffer(content_bytes, np.uint8)
    starts, last = offsets[:-1], len(content) - 1
    first = content[np.minimum(starts, last)]
    is_signed = (first == _MINUS) | (first == _PLUS)
    starts = starts + is_signed
    first = content[np.minimum(starts, last)]
    is_candidate = first == _ZERO
    if is_candidate.any():
        second = content[np.minimum(starts + 1, last)]
        # A zero with a decimal point is by far the most frequent one.
        is_candidate &= second != ord(decimal)
    # Blanks may precede the zero.
    is_candidate |= (first < _ZERO) | (first > _NINE)
    return is_candidate & (offsets[1:] - starts > 1)


def _find_rounded(values: pa.Array, decimal: str, min_chars: int = _MIN_ROUNDED_CHARS) -> pa.Array:
    """Returns whether each value of `min_chars` or more is an integer that float64 does not represent exactly."""
    is_long = pc.fill_null(pc.greater_equal(pc.binary_length(values), min_chars), False)
    candidates = pc.and_not(is_long, pc.fill_null(pc.match_substring(values, decimal), False))
    if not pc.any(candidates).as_py():
        return candidates
    integers = _match_candidates(values, candidates, r"^\s*[+-]?\d+\s*$")
    if not pc.any(integers).as_py():
        return integers
    texts = pc.utf8_trim_whitespace(values.filter(integers))
    try:
        exact = texts.cast(pa.int64()).to_numpy()
        # 2**63 as float64 is beyond int64; the result of its conversion differs from every integer that gives it.
        with np.errstate(invalid="ignore"):
            is_rounded = exact.astype(np.float64).astype(np.int64) != exact
        is_rounded |= exact == np.iinfo(np.int64).max
    except pa.ArrowInvalid:
        is_rounded = np.array([Decimal(float(text)) != Decimal(text) for text in texts.to_pylist()])
    return pc.replace_with_mask(integers, integers, pa.array(is_rounded))


def convert_values(values: pa.Array, kind: pa.DataType, decimal: str) -> pa.Array:
    """Returns strings as values of a type; except for text they are trimmed, and `NULLS` become null."""
    if pa.types.is_string(kind):
        return values
    if _is_number(kind) and decimal == ".":
        # Most columns have neither blanks nor missing values; to look for these takes several times as long.
        with suppress(pa.ArrowInvalid):
            numbers = values.cast(kind)
            if pa.types.is_integer(kind) or not np.isnan(numbers.to_numpy(zero_copy_only=False)).any():
                return numbers
    trimmed = pc.utf8_trim_whitespace(values)
    present = pc.if_else(pc.is_in(trimmed, pa.array(NULLS)), None, trimmed)
    return (present if pa.types.is_boolean(kind) else _to_plain(present, decimal)).cast(kind)


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


def _fits(values: pa.Array, kind: pa.DataType, decimal: str) -> bool:
    """Returns whether the type can represent all values, whole numbers beyond 64 bits without rounding."""
    try:
        # Arrow makes an error of every value that does not fit, which takes 50 times as long as a number.
        for some in (values[:_PROBED_ROWS], values):
            convert_values(some, kind, decimal)
    except pa.ArrowInvalid:
        return False
    if pa.types.is_boolean(kind):
        # Arrow takes 0 and 1 for booleans, too; beside true and false they are another kind of value.
        return not pc.any(pc.is_in(pc.utf8_trim_whitespace(values), pa.array(["0", "1"]))).as_py()
    # Whole numbers that do not fit into 64 bits are often identifiers, which must not be rounded: they become text.
    return not pa.types.is_floating(kind) or not pc.any(_find_rounded(values, decimal, _MIN_WIDE_CHARS)).as_py()
