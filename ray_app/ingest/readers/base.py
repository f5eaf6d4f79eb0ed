"""What the readers of raw data share: the shape of a reader, how its input is cut for tasks, how its tables are made.

Every table has a column `row_id` (string): where the row came from. No reader holds more than about `BLOCK_BYTES` of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from ray_app.data.dataset.arrays import Array, to_column
from ray_app.data.dataset.files import File
from ray_app.task.rows.images import pixels_of

BLOCK_BYTES = 16 << 20
T = TypeVar("T")

Refuse = Callable[[str, str], None]
"""Takes the id of a row that cannot be used and why; raises DataError where that is not allowed."""

Run = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]
"""Calls a function with every item, several at a time, and gives the results in the order of the items."""


@dataclass(frozen=True)
class Piece:
    """What one task reads. How a source is cut into pieces depends on the source and the options only, so the result does, too.

    Args:
        rows: How many rows it has, refused ones counted; None where only reading tells.
        tables: Starts reading: tables of one schema, in the source's order. Pickled to the task.
    """

    rows: int | None
    tables: Callable[[Refuse], Iterator[pa.Table]]


@dataclass(frozen=True)
class Part:
    """One data set of a source.

    Args:
        name: Sub-folder of the output, or "" for the output folder itself.
        pieces: Its rows, in order.
        classes: Name of each class by its index in `label`; None where labels have no names.
        skipped_files: Files of the input that are not data of this format and are left out: each by its name, and why.
        keeps_order: Whether the rows are mixed as they come, and so stay.
        notes: What the user should know of how the source was understood, a sentence or two each.
        index_columns: Columns that number the rows, by their names in the source.
    """

    name: str
    pieces: list[Piece]
    classes: tuple[str, ...] | None = None
    skipped_files: tuple[tuple[str, str], ...] = ()
    keeps_order: bool = False
    notes: tuple[str, ...] = ()
    index_columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Limits:
    """How big a piece may be; a single file may be bigger.

    Args:
        rows: Most rows.
        bytes: Most bytes of input.
    """

    rows: int
    bytes: int


class Reader(Protocol):
    """One raw format."""

    def files(self) -> Iterable[File]:
        """Every file that is read, in a fixed order; raises DataError where the input is missing or empty."""

    def parts(self, run: Run) -> list[Part]:
        """The data sets of the source; may read the input once, by `run`, to learn its types and classes."""


def groups(items: Iterable[T], size: Callable[[T], int], most: Limits) -> list[list[T]]:
    """Cuts items into runs within the limits, each of at least one item."""
    found: list[list[T]] = []
    num_bytes = 0
    for item in items:
        if not found or len(found[-1]) >= most.rows or num_bytes + size(item) > most.bytes:
            found.append([])
            num_bytes = 0
        found[-1].append(item)
        num_bytes += size(item)
    return found


def listed(items: Sequence[object], most: int = 10) -> str:
    """Items for a message: the first ones, and how many there are where that is not all."""
    if len(items) <= most:
        return str(list(items))
    return f"{str(list(items[:most]))[:-1]}, ...] ({len(items)} in all)"


def file_groups(files: Iterable[File], most_bytes: int) -> list[list[File]]:
    """Cuts files into runs of at most so many bytes, each of at least one file."""
    return groups(files, lambda file: file.size, Limits(1 << 62, most_bytes))


def table(row_ids: Sequence[str], columns: dict[str, Array | pa.Array]) -> pa.Table:
    """Arrays of more than one dimension become fixed-shape array columns, the rest plain ones."""
    fields, arrays = [pa.field("row_id", pa.string(), nullable=False)], [pa.array(row_ids, pa.string())]
    for name, values in columns.items():
        if isinstance(values, np.ndarray) and values.ndim > 1:
            field, array = to_column(name, values)
        else:
            array = pa.array(values) if isinstance(values, np.ndarray) else values
            field = pa.field(name, array.type)
        fields.append(field)
        arrays.append(array)
    return pa.table(arrays, pa.schema(fields))


def image_table(rows: list[tuple[str, bytes, int | None]]) -> pa.Table:
    """Rows of (id, encoded image, label) with the columns `image` and `label`."""
    ids, images, labels = zip(*rows, strict=True)
    return table(ids, {"image": pa.array(images, pa.binary()), "label": pa.array(labels, pa.int64())})


def in_blocks(rows: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Rows in lists of about `BLOCK_BYTES` bytes."""
    block: list[T] = []
    num_bytes = 0
    for row in rows:
        block.append(row)
        num_bytes += size(row)
        if num_bytes >= BLOCK_BYTES:
            yield block
            block, num_bytes = [], 0
    if block:
        yield block


def undecodable(encoded: bytes) -> str | None:
    """Why training could not decode this as one still image; None where it can."""
    if not encoded:
        return "the file is empty"
    try:
        image = pixels_of(encoded)
    except ValueError as error:
        return str(error)
    return None if image.ndim == 3 else f"it has {len(image)} frames"
