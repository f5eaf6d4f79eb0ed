"""How the numbers and dates in text files are written: decimal mark, groups of digits, format of dates."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

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

    @classmethod
    def of(cls, options: IngestOptions) -> ValueNotation:
        """Returns the notation that the options state."""
        return cls(options.decimal, options.thousands)

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
