"""What is in a data set: its summary, statistics of the values of each column, and notes about columns of text.

`ColumnStatistics` measures a stream of tables; `merge_statistics` merges the results of several streams.

`TextColumns` and `make_notes` name the value and the row that made a column text which holds mostly numbers: a single
`?` makes a column of a CSV file text, and tasks that take numbers then leave the column out.

`PartSummary.table` has a row of text for each column, which the terminal and notebooks show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ray_app.data.arrays import from_column, is_bytes, is_list, is_text, read_as_float, spec_of_field
from ray_app.ingest.readers.csv_columns import NULLS, number_pattern
from ray_app.task.ragged import Ragged

MAX_VALUES = 100
"""Number of different values of a column that are counted; of a column with more only examples are kept."""
MAX_VALUE_CHARS = 200
"""Length of a value that is counted; of a column with a longer one only examples are kept."""
_MAX_EXAMPLES = 3
_MAX_VALUE_CHARS = 40
"""Characters of a value that a message repeats."""
_ROW_ID = "row_id"

Statistics = dict[str, Any]
"""Statistics of a column, plain JSON; an entry that a type does not have is absent.

`minimum` and `maximum` are of all finite numbers or dates (as ISO 8601). `not_finite` counts numbers that are NaN or
infinite. `lengths` has the least and the greatest length of lists and bytes. `values` has the rows by value of text,
integers and booleans; None for more than `MAX_VALUES` different ones or a long one, of which `examples` has some.
"""


class ColumnStatistics:
    """Measures the columns of a stream of tables of one schema."""

    def __init__(self) -> None:
        self.columns: dict[str, Statistics] = {}
        self.rows = 0

    def add(self, table: pa.Table) -> None:
        """Adds rows."""
        self.rows += table.num_rows
        for column in table.schema:
            before = self.columns.get(column.name)
            is_counted = column.name != _ROW_ID and (before is None or before.get("values", {}) is not None)
            measured = _measure(column, table[column.name], is_counted)
            self.columns[column.name] = measured if before is None else _merge(before, measured)


def merge_statistics(parts: Sequence[Mapping[str, Statistics]]) -> dict[str, Statistics]:
    """Returns the statistics of all rows of several streams, by column."""
    merged: dict[str, Statistics] = {}
    for part in parts:
        for name, statistics in part.items():
            merged[name] = _merge(merged[name], statistics) if name in merged else statistics
    return merged


def find_empty_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Returns whether each value of a column of text is empty, which tasks take for a missing value: (rows,)."""
    return pc.fill_null(pc.equal(pc.binary_length(column), 0), False)


def count_missing(column: pa.ChunkedArray) -> int:
    """Returns the number of missing values of a column, among which those of text that are empty count."""
    empty = pc.sum(find_empty_texts(column)).as_py() or 0 if is_text(column.type) else 0
    return int(column.null_count + empty)


def _measure(field: pa.Field, column: pa.ChunkedArray, is_counted: bool) -> Statistics:
    """Returns the statistics of the values that are not missing; text is counted if `is_counted`.

    Args:
        column: The values, (rows,).
    """
    spec = spec_of_field(field)
    if spec is None:
        if is_text(column.type):
            column = column.filter(pc.invert(find_empty_texts(column)))
        return _measure_plain(column.drop_null(), is_counted)
    if 0 in spec.shape:
        return {}
    values = from_column(column, spec)
    if isinstance(values, Ragged):
        return _range_of_numbers(values.values) | _range_of_lengths(values.lengths)
    return _range_of_numbers(values)


def _measure_plain(column: pa.ChunkedArray, is_counted: bool) -> Statistics:
    """Returns the statistics of values of a type of Arrow, (rows,), none of which is missing."""
    kind = column.type
    if pa.types.is_decimal(kind):
        return _measure_plain(read_as_float(column), is_counted)
    statistics: Statistics = {}
    if is_list(kind):
        statistics = _range_of_lengths(pc.list_value_length(column).to_numpy())
        while is_list(column.type):
            column = pc.list_flatten(column).drop_null()
    elif is_bytes(kind):
        statistics = _range_of_lengths(pc.binary_length(column).to_numpy())
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        statistics |= _range_of_numbers(column.to_numpy())
    elif pa.types.is_temporal(kind) and len(column):
        statistics |= _range_of_times(column)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or is_text(kind):
        statistics |= _count_values(column) if is_counted else {"values": None, "examples": []}
    return statistics


def _range_of_numbers(values: np.ndarray[Any, Any]) -> Statistics:
    """Returns the range of all finite numbers of an array of any shape, and the number of the others."""
    if values.dtype.kind == "b":
        values = values.astype(np.uint8)
    if values.dtype.kind == "f":
        finite = values[np.isfinite(values)]
        others = {"not_finite": int(values.size - finite.size)}
    else:
        finite, others = values, {}
    if not finite.size:
        return others
    return {"minimum": finite.min().item(), "maximum": finite.max().item()} | others


def _range_of_times(column: pa.ChunkedArray) -> Statistics:
    """Returns the range of dates or times, which are compared in UTC; none of what Python does not represent."""
    kind = column.type
    try:
        if pa.types.is_timestamp(kind) and kind.tz:
            column = column.cast(pa.timestamp(kind.unit, "UTC"))
        low, high = (value.isoformat() for value in pc.min_max(column).as_py().values())
    except (pa.ArrowException, AttributeError, OverflowError, ValueError):
        return {}
    return {"minimum": low, "maximum": high}


def _range_of_lengths(lengths: np.ndarray[Any, Any]) -> Statistics:
    return {"lengths": [int(lengths.min()), int(lengths.max())]} if len(lengths) else {}


def _count_values(column: pa.ChunkedArray) -> Statistics:
    """Returns the rows by value as text, and the first values; too many or too long ones are not counted."""
    counted = pc.value_counts(column)
    examples = [str(value.as_py())[:MAX_VALUE_CHARS] for value in counted.field("values")[:_MAX_EXAMPLES]]
    if len(counted) > MAX_VALUES:
        return {"values": None, "examples": examples}
    values = {str(entry["values"]): entry["counts"] for entry in counted.to_pylist()}
    is_short = all(len(value) <= MAX_VALUE_CHARS for value in values)
    return {"values": values if is_short else None, "examples": examples}


def _merge(first: Statistics, second: Statistics) -> Statistics:
    """Returns the statistics of the rows of both; numbers and dates are compared as they are."""
    merged = {**second, **first}
    for key, choose in (("minimum", min), ("maximum", max)):
        if key in first and key in second:
            merged[key] = choose(first[key], second[key])
    if "lengths" in first and "lengths" in second:
        low, high = zip(first["lengths"], second["lengths"], strict=True)
        merged["lengths"] = [min(low), max(high)]
    if "not_finite" in first and "not_finite" in second:
        merged["not_finite"] = first["not_finite"] + second["not_finite"]
    if "values" in merged:
        counts = [part["values"] for part in (first, second) if "values" in part]
        total: Counter[str] | None = None if None in counts else sum(map(Counter, counts), Counter())
        merged["values"] = None if total is None or len(total) > MAX_VALUES else dict(total)
        examples = dict.fromkeys([*first.get("examples", []), *second.get("examples", [])])
        merged["examples"] = list(examples)[:_MAX_EXAMPLES]
    return merged


CONVERT = "convert it to numbers, text, bytes or lists of numbers"
NO_VALUE = "the column has no value in any row"
HEADER = ("column", "type", "use", "missing", "values")
"""Heads of the table of columns."""
_MAX_SHOWN = 6
_USES = {
    _ROW_ID: "id of the row",
    "label": "label",
    "target": "target",
    "boxes": "boxes",
    "labels": "labels of boxes",
    "mask": "mask",
    "image": "image",
}
"""What the ready-made tasks take a column of this name for."""
_USES_OF_TYPES = {
    **dict.fromkeys(("bytes", "binary"), "image or other bytes"),
    **dict.fromkeys(("text", "string"), "text or category"),
    **dict.fromkeys(("list", "large_list"), "tokens or other lists"),
    **dict.fromkeys(("timestamp", "date32", "date64"), "date or time"),
}
"""What they take a column of this type for; all others are features."""


def _describe_type(facts: Mapping[str, Any]) -> str:
    """Returns the type of a column, of an ingest or of `ColumnFacts`."""
    kind = facts["type"]
    if kind == "array":
        return f"{facts['dtype']} {tuple(facts['shape'])}"
    return f"lists of {facts['dtype']}" if kind == "list" else facts["dtype"] or kind


def _describe_use(name: str, facts: Mapping[str, Any], index_columns: Collection[str]) -> str:
    """Returns what the ready-made tasks take a column for, or the reason why none can use it."""
    if facts.get("unusable"):
        return f"not usable: {facts['unusable']}"
    if name in index_columns:
        return "none, unless named"
    kind = facts["dtype"] if facts["type"] == "other" else facts["type"]
    kind = kind.partition("<")[0].partition("[")[0]
    return _USES.get(name) or _USES_OF_TYPES.get(kind, "feature")


def _describe_counts(counts: Mapping[str, int]) -> str:
    """Returns the number of rows of each class, in the order of the classes, or of the first ones."""
    entries = [f"{_format_value(name)} {rows:,}" for name, rows in list(counts.items())[:_MAX_SHOWN]]
    if len(counts) > _MAX_SHOWN:
        entries.append(f"... ({len(counts):,} classes of {min(counts.values()):,} to {max(counts.values()):,} rows)")
    return ", ".join(entries)


def _describe_values(statistics: Statistics) -> str:
    """Returns the range, the lengths or the most frequent values of a column."""
    parts = []
    if "lengths" in statistics:
        low, high = statistics["lengths"]
        parts.append(f"length {low:,}" if low == high else f"length {low:,} to {high:,}")
    if "minimum" in statistics:
        low, high = (_number_text(statistics[key]) for key in ("minimum", "maximum"))
        parts.append(low if low == high else f"{low} to {high}")
    elif statistics.get("values"):
        counted = Counter[str](statistics["values"])
        # Where no value is repeated, numbers of rows say nothing.
        is_unique = max(counted.values()) == 1
        entries = [
            _format_value(value) if is_unique else f"{_format_value(value)} {rows:,}"
            for value, rows in counted.most_common(_MAX_SHOWN)
        ]
        parts.extend([*entries, f"... ({len(counted)} different)"] if len(counted) > _MAX_SHOWN else entries)
    elif statistics.get("examples"):
        limit = f"more than {MAX_VALUES} different, or long"
        parts.extend([*map(_format_value, statistics["examples"]), f"... ({limit})"])
    return ", ".join(parts)


def _shorten(value: str) -> str:
    """Returns a value for a table: the beginning of a long one, with escapes for what cannot be printed."""
    text = value if len(value) <= _MAX_VALUE_CHARS else value[: _MAX_VALUE_CHARS - 3] + "..."
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _format_value(value: str) -> str:
    """Returns a value for a list; one with a comma or with blanks at its ends is in quotes."""
    text = _shorten(value)
    return f"'{text}'" if "," in text or text != text.strip() or not text else text


def _number_text(value: Any) -> str:
    """Returns a number with six digits, an integer with all, and a date as it is."""
    return f"{value:g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True)
class PartSummary:
    """One data set: a folder of shards and the content of its `_dataset.json`.

    Args:
        classes: Class names by label, or None.
        class_counts: Rows by class name (by label where classes have no names), or None without labels.
        columns: By name: type, shape of one row, dtype, missing values.
        statistics: By name: ranges, lengths and the most frequent values; see `Statistics`.
        index_columns: Columns that number the rows, which no task uses unless it names them.
        shards: File name, rows, row groups and bytes of each shard.
        skipped_files: Number of files of the input that are not data; `_refused.jsonl` lists them with reasons.
        refused: Number of rows that were left out; `_refused.jsonl` lists them with reasons.
        notes: Notes for the user on how the source was interpreted, such as which value made a column text.
        is_sample: Whether these are only the first rows.
    """

    path: str
    rows: int
    classes: list[str] | None
    class_counts: dict[str, int] | None
    columns: dict[str, dict[str, Any]]
    shards: list[dict[str, Any]]
    statistics: dict[str, Statistics] = field(default_factory=dict)
    index_columns: list[str] = field(default_factory=list)
    skipped_files: int = 0
    refused: int = 0
    notes: list[str] = field(default_factory=list)
    is_sample: bool = False

    def table(self) -> list[tuple[str, ...]]:
        """Returns a row of `HEADER` for each column: name, type, what tasks take it for, missing values, values."""
        rows: list[tuple[str, ...]] = []
        for name, facts in self.columns.items():
            measured = self.statistics.get(name, {})
            missing = [f"{facts['nulls']:,}"] if facts["nulls"] or not measured.get("not_finite") else []
            if measured.get("not_finite"):
                missing.append(f"{measured['not_finite']:,} NaN or infinite")
            counts = self.class_counts if name == ("labels" if "boxes" in self.columns else "label") else None
            values = _describe_counts(counts) if counts else _describe_values(measured)
            has_values = not self.rows or facts["nulls"] < self.rows
            use = _describe_use(name, facts, self.index_columns) if has_values else f"not usable: {NO_VALUE}"
            rows.append((_shorten(name), _describe_type(facts), use, ", ".join(missing), values))
        return rows

    def __str__(self) -> str:
        shards = f" in {_count(len(self.shards), 'shard')}" if self.shards else ""
        listed = "an ingest lists them in _refused.jsonl" if self.is_sample else "_refused.jsonl names them"
        return (
            f"{self.path}: {'first ' if self.is_sample else ''}{_count(self.rows, 'row')}{shards}"
            + (f", {_count(len(self.class_counts), 'class')}" if self.class_counts else "")
            + (f", {_count(self.skipped_files, 'other file')} left out" if self.skipped_files else "")
            + (f", {_count(self.refused, 'row')} refused" if self.refused else "")
            + (f" ({listed}, with reasons)" if self.skipped_files or self.refused else "")
        )


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


@dataclass(frozen=True)
class DatasetSummary:
    """The data sets that `ingest` made or reused: "" alone, `train`, `eval`, `test`, or those of the source.

    Args:
        reused: Whether nothing was written: they were there before, or were only read.
    """

    path: str
    parts: dict[str, PartSummary]
    reused: bool

    def _repr_html_(self) -> str:
        """Returns the tables of columns, for notebooks."""
        lines = []
        for part in self.parts.values():
            cells = [f"<tr>{''.join(f'<th>{name}</th>' for name in HEADER)}</tr>"]
            cells += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in part.table()]
            lines.append(f"<p>{escape(str(part))}</p><table>{''.join(cells)}</table>")
        return "".join(lines)

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(part.rows for part in self.parts.values())


_HEXADECIMAL = r"^[+-]?0[xX][0-9a-fA-F]+$"
_WRITTEN = r"^\s*[$€£]?\s?[+-]?(\d{1,3}([., '’_\x{a0}\x{202f}]\d{3})+([.,]\d+)?|\d+([.,]\d+)?)\s?[%$€£]?\s*$"
"""Numbers as people and spreadsheets write them.

They may have a decimal comma, groups of three digits, or a sign of a currency or of per cent.
"""
_TRUTH = r"(?i)^\s*(true|false)\s*$"

Counts = dict[str, Any]
"""Counts of a column of text.

`values` counts the values that are not missing. Of these, `numbers` counts numbers with the source's decimal mark,
`zeros` those with leading zeros, `written` counts numbers that are written in another way, and `truth` counts truth
values. `first` has the id and the value of the first row that does not fit each kind.
"""


class TextColumns:
    """Counts the numbers, with a decimal mark, and the booleans in the columns of text of a stream of tables."""

    def __init__(self, decimal: str) -> None:
        self._number = f"{number_pattern(decimal)}|{_HEXADECIMAL}"
        self.counts: dict[str, Counts] = {}

    def add(self, table: pa.Table) -> None:
        """Adds rows, which have their ids in the first column."""
        for column in table.schema:
            if column.name != "row_id" and is_text(column.type):
                self._add(column.name, table["row_id"], pc.utf8_trim_whitespace(table[column.name].cast(pa.string())))

    def _add(self, name: str, row_ids: pa.ChunkedArray, values: pa.ChunkedArray) -> None:
        present = pc.and_(pc.is_valid(values), pc.invert(pc.is_in(values, pa.array(NULLS))))
        row_ids, values = row_ids.filter(present), values.filter(present)
        patterns = (self._number, _WRITTEN, _TRUTH, r"^[+-]?0[\dxX]")
        # Each different value is compared once: a regular expression takes several times as long as the look-up.
        encoded = values.combine_chunks().dictionary_encode()
        numbers, written, truth, zeros = (
            pc.match_substring_regex(encoded.dictionary, pattern).take(encoded.indices) for pattern in patterns
        )
        matches_of = {
            "numbers": numbers,
            "zeros": pc.and_(numbers, zeros),
            "written": pc.and_not(written, numbers),
            "truth": truth,
        }
        counts = self.counts.setdefault(name, {"values": 0, **dict.fromkeys(matches_of, 0), "first": {}})
        counts["values"] += len(values)
        for kind, matches in matches_of.items():
            counts[kind] += pc.sum(matches).as_py() or 0
        # "numbers": the first value that is not a number in any notation; "written": the first that is not a plain one.
        for kind, fits in (("numbers", pc.or_(numbers, written)), ("written", numbers), ("truth", truth)):
            row = pc.index(fits, False).as_py()
            if row >= 0:
                counts["first"].setdefault(kind, [row_ids[row].as_py(), values[row].as_py()[:_MAX_VALUE_CHARS]])
        if len(values):
            counts["first"].setdefault("any", [row_ids[0].as_py(), values[0].as_py()[:_MAX_VALUE_CHARS]])


def make_notes(split_counts: list[dict[str, Counts]], decimal: str | None = None) -> list[str]:
    """Returns a sentence about each column of text that consists mostly of numbers or booleans.

    Args:
        split_counts: The counts of each input split.
        decimal: The decimal mark of numbers, if the options of the source name one.
    """
    notes = []
    for name in dict.fromkeys(name for counts in split_counts for name in counts):
        parts = [counts[name] for counts in split_counts if name in counts]
        total = {kind: sum(part[kind] for part in parts) for kind in ("values", "numbers", "zeros", "written", "truth")}
        first: dict[str, list[str]] = {}
        for part in parts:
            first = part["first"] | first
        if note := _note(name, total, first, decimal):
            notes.append(note)
    return notes


def _note(name: str, total: dict[str, int], first: dict[str, list[str]], decimal: str | None) -> str | None:
    """Returns the sentence about one column; None where most of its values are text, or it is text for a reason."""
    values, numbers = total["values"], total["numbers"] + total["written"]
    if values and total["truth"] and total["numbers"] and total["truth"] + total["numbers"] == values:
        row_id, value = first["truth"]
        return (
            f"column {name!r} is text: {total['truth']} of its {values} values are true or false, and the others are"
            f" numbers, the first is {value!r} in {row_id}. Write all values as true and false, or all as numbers."
        )
    # A column of all numbers, some with leading zeros, is text by intention: the reader of CSV files names it.
    is_intended = total["numbers"] == values and total["zeros"] > 0
    if not values or 2 * max(numbers, total["truth"]) <= values or is_intended:
        return None
    is_truth = numbers < total["truth"]
    kind, fitting = ("true or false", total["truth"]) if is_truth else ("numbers", numbers)
    if fitting < values:
        row_id, value = first["truth" if is_truth else "numbers"]
        return (
            f"column {name!r} is text: {values - fitting} of its {values} values are not {kind}, the first is {value!r}"
            f" in {row_id}. If the column contains {kind}, correct them, or leave missing values empty."
        )
    if total["written"] and not is_truth:
        row_id, value = first["written"]
        remedy = "Write them with digits and a decimal point only, as in 1234.5."
        if decimal == ",":
            remedy = "Correct them; numbers have the decimal mark ',' (--decimal)."
        return (
            f"column {name!r} is text: {total['written']} of its {values} values are numbers in another notation, the"
            f" first is {value!r} in {row_id}. {remedy}"
        )
    row_id, value = first["any"]
    return (
        f"column {name!r} is text, although all of its {values} values are {kind}, such as {value!r} in {row_id},"
        f" because they are text in the source{'' if is_truth else ', or too long for 64 bits'}."
    )
