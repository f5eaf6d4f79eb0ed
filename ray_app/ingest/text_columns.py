"""Columns of text that hold numbers for the most part: which value in which row made them text.

A single `?` makes a column of a CSV file text, and tasks that take numbers then leave it out.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ray_app.data.dataset.arrays import is_text

_MISSING = pa.array(["", "NA", "N/A", "NaN", "nan", "null", "NULL", "n/a", "#N/A"])
_NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"
_WRITTEN = r"^\s*[$€£]?\s?[+-]?(\d{1,3}([., '’]\d{3})+([.,]\d+)?|\d+([.,]\d+)?)\s?[%$€£]?\s*$"
"""Numbers as people and spreadsheets write them: with a decimal comma, groups of three digits, a sign of a currency or of per cent."""
_TRUTH = r"(?i)^\s*(true|false)\s*$"
_MAX_SAID = 40

Counts = dict[str, Any]
"""Of a column of text: `values` that are not missing, those that are `numbers`, `written` as numbers in another way or `truth` values, and
`first`: the id and the value of the first row that is none of what most are."""


class TextColumns:
    """Counts what is in the columns of text of a stream of tables."""

    def __init__(self) -> None:
        self._counts: dict[str, Counts] = {}

    def add(self, table: pa.Table) -> None:
        """Takes rows, which have their ids in the first column."""
        for column in table.schema:
            if column.name != "row_id" and is_text(column.type):
                self._add(column.name, table["row_id"], pc.utf8_trim_whitespace(table[column.name].cast(pa.string())))

    def description(self) -> dict[str, Counts]:
        """The counts by column, plain JSON."""
        return self._counts

    def _add(self, name: str, row_ids: pa.ChunkedArray, values: pa.ChunkedArray) -> None:
        present = pc.and_(pc.is_valid(values), pc.invert(pc.is_in(values, _MISSING)))
        row_ids, values = row_ids.filter(present), values.filter(present)
        numbers, truth = (pc.match_substring_regex(values, pattern) for pattern in (_NUMBER, _TRUTH))
        written = pc.match_substring_regex(values, _WRITTEN)
        counts = self._counts.setdefault(name, {"values": 0, "numbers": 0, "written": 0, "truth": 0, "first": {}})
        counts["values"] += len(values)
        for kind, found in (("numbers", numbers), ("written", pc.and_not(written, numbers)), ("truth", truth)):
            counts[kind] += pc.sum(found).as_py() or 0
        # What is no number and, where all are written as such, what is no plain one.
        for kind, fits in (("numbers", pc.or_(numbers, written)), ("written", numbers), ("truth", truth)):
            odd = pc.index(fits, False).as_py()
            if odd >= 0:
                counts["first"].setdefault(kind, [row_ids[odd].as_py(), values[odd].as_py()[:_MAX_SAID]])
        if len(values):
            counts["first"].setdefault("any", [row_ids[0].as_py(), values[0].as_py()[:_MAX_SAID]])


def notes_of(described: list[dict[str, Counts]]) -> list[str]:
    """A sentence about each column of text that is made up of numbers or truth values for the most part.

    Args:
        described: What `TextColumns` says of the pieces of a source, in their order.
    """
    notes = []
    for name in dict.fromkeys(name for some in described for name in some):
        parts = [some[name] for some in described if name in some]
        total = {kind: sum(part[kind] for part in parts) for kind in ("values", "numbers", "written", "truth")}
        first: dict[str, list[str]] = {}
        for part in parts:
            first = part["first"] | first
        if note := _note(name, total, first):
            notes.append(note)
    return notes


def _note(name: str, total: dict[str, int], first: dict[str, list[str]]) -> str | None:
    """What is said about one column; None where most of its values are text."""
    values, numbers = total["values"], total["numbers"] + total["written"]
    if not values or 2 * max(numbers, total["truth"]) <= values:
        return None
    if numbers >= total["truth"]:
        kind, odd = "numbers", values - numbers
        cause = "numbers" if odd else "written" if total["written"] else "any"
    else:
        kind, odd, cause = "true or false", values - total["truth"], "truth"
    row_id, value = first.get(cause) or first["any"]
    if cause == "any":
        why = f"all of its {values} values are {kind}, such as {value!r} in {row_id}: they are text in the source, or too long for 64 bits"
        return f"column {name!r} is text, although {why}."
    if cause == "written":
        why = f"{total['written']} of its {values} values are numbers written in another way, the first is {value!r} in {row_id}"
        return f"column {name!r} is text: {why}. Write them with digits and a decimal point alone, as in 1234.5."
    why = f"{odd} of its {values} values are not {kind}, the first is {value!r} in {row_id}"
    return f"column {name!r} is text: {why}. Correct them, or leave them empty where they are missing, if it is to hold {kind}."
