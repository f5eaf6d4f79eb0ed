"""How the numbers and dates in text files are written: decimal mark, groups of digits, format of dates."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from ray_app.ingest.options import IngestOptions

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
        return rf"^[+-]?({groups}\d+)({decimal}\d*)?([eE][+-]?\d+)?$|^[+-]?{decimal}\d+([eE][+-]?\d+)?$"

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
