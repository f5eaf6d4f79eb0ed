"""What is known of a data set's columns before anything is read: names, types, ranges."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ColumnFacts:
    """One column.

    Args:
        kind: `number`, `integer`, `text`, `bytes` (one binary value per row), `array` (fixed shape), `list` (of numbers, of any
            length), or `other`.
        dtype: NumPy dtype of numbers and arrays.
        shape: Shape of one row of an array.
        minimum: Least value of a column of numbers, or of lists of them, if the files say.
        maximum: Greatest value, likewise.
        nulls: Missing values, if the files say.
        group_span: Values from the least to the greatest in a row group of a column of integers, on an average over the rows, if the
            files say.
    """

    kind: Literal["number", "integer", "text", "bytes", "array", "list", "other"]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    nulls: int | None = None
    group_span: float | None = None


@dataclass(frozen=True)
class DataFacts:
    """A data set as its files describe it.

    Args:
        path: Where it is, for messages.
        num_rows: Number of rows.
        columns: Facts of every column by name.
        classes: Names of the classes of the label column, if the ingest recorded them.
        count: Reads a column of integers, and returns how many rows have each of its values.
        index_columns: Columns that number the rows and are no data of theirs: the index of a pandas table, and columns without a name.
    """

    path: str
    num_rows: int
    columns: dict[str, ColumnFacts]
    classes: tuple[str, ...] | None = None
    count: Callable[[str], dict[int, int]] | None = None
    index_columns: tuple[str, ...] = ()


def similar_names(names: Iterable[str]) -> list[list[str]]:
    """Names that differ in upper and lower case, blanks or the form of a character (Unicode NFKC) alone, each group in its order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        form = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
        groups.setdefault(unicodedata.normalize("NFKC", form), []).append(name)
    return [group for group in groups.values() if len(group) > 1]
