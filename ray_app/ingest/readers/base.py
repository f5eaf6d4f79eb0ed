"""What the readers of raw data share: the shape of a reader, how its input is cut for tasks, how its tables are made.

Every table has a column `row_id` (string): where the row came from. No reader holds more than about `BLOCK_BYTES` of
rows.

Names of many files at once: a folder, a pattern with braces or `*`, or a single file.

Class names out of the values of a label column.

Files of text lines that readers share: which files are read, and the refusal of encodings that are not UTF-8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import IO, Any, Protocol, TypeVar, cast

import numpy as np
import pyarrow as pa

from ray_app.data.arrays import Array, to_column
from ray_app.errors import DataError
from ray_app.storage.data_files import (
    HEAD_BYTES,
    DataLocation,
    File,
    files_in,
    find_file,
    is_folder,
    locate_data,
    name_foreign_file,
)
from ray_app.task.images import decode_image

BLOCK_BYTES = 16 << 20
T = TypeVar("T")

Refuse = Callable[[str, str], None]
"""Takes the id of a row that cannot be used and why; raises DataError where that is not allowed."""

Run = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]
"""Calls a function with every item, several at a time, and gives the results in the order of the items."""


@dataclass(frozen=True)
class InputSplit:
    """What one task reads. How a source is cut into pieces depends on the source and the options only, so the result
    does, too.

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
    pieces: list[InputSplit]
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


def group_items(items: Iterable[T], size: Callable[[T], int], most: Limits) -> list[list[T]]:
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


def format_items(items: Sequence[object], most: int = 10) -> str:
    """Items for a message: the first ones, and how many there are where that is not all."""
    if len(items) <= most:
        return str(list(items))
    return f"{str(list(items[:most]))[:-1]}, ...] ({len(items)} in all)"


def group_files(files: Iterable[File], most_bytes: int) -> list[list[File]]:
    """Cuts files into runs of at most so many bytes, each of at least one file."""
    return group_items(files, lambda file: file.size, Limits(1 << 62, most_bytes))


def make_table(row_ids: Sequence[str], columns: dict[str, Array | pa.Array]) -> pa.Table:
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


def make_image_table(rows: list[tuple[str, bytes, int | None]]) -> pa.Table:
    """Rows of (id, encoded image, label) with the columns `image` and `label`."""
    ids, images, labels = zip(*rows, strict=True)
    return make_table(ids, {"image": pa.array(images, pa.binary()), "label": pa.array(labels, pa.int64())})


def batch_rows(rows: Iterable[T], size: Callable[[T], int]) -> Iterator[list[T]]:
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


def explain_undecodable(encoded: bytes) -> str | None:
    """Why training could not decode this as one still image; None where it can."""
    if not encoded:
        return "the file is empty"
    try:
        image = decode_image(encoded)
    except ValueError as error:
        return str(error)
    return None if image.ndim == 3 else f"it has {len(image)} frames"


_BRACES = re.compile(r"\{([^{}]*)\}")
MAX_NAMES = 1_000_000
"""Names that a pattern may stand for; more are a slip, and would fill the memory."""


def expand_braces(pattern: str) -> list[str]:
    """A pattern with braces as the names that it stands for: `x{08..11}` and `x{a,b}`, also several of them.

    Raises:
        DataError: They are more than `MAX_NAMES`.
    """
    found = _BRACES.search(pattern)
    if found is None:
        return [pattern]
    span = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", found[1])
    choices = found[1].split(",")
    if span and int(span[2]) - int(span[1]) >= MAX_NAMES:
        raise DataError(
            f"{pattern}: {found[0]} stands for more than {MAX_NAMES} names, which are allowed. Correct the pattern."
        )
    if span:
        choices = [f"{number:0{len(span[1])}d}" for number in range(int(span[1]), int(span[2]) + 1)]
    return [
        name for choice in choices for name in expand_braces(pattern[: found.start()] + choice + pattern[found.end() :])
    ]


def match_files(pattern: str, is_one: Callable[[str], bool], kind: str) -> list[File]:
    """The files of a folder or of a pattern, sorted by name, or in the order of its braces; or the one file.

    Args:
        pattern: A folder, a file, or either with `*` in its last part, or with `{000..012}` or `{a,b}`.
        is_one: Whether a file of a folder is one of them, by its name.
        kind: What they are, for messages.

    Raises:
        DataError: There is none, or a name that is spelled out is neither file nor folder.
    """
    found = [file for name in expand_braces(pattern) for file in _of_name(name, is_one, kind)]
    if not found:
        raise DataError(
            f"{pattern}: no {kind}; expected a folder with such files, one of them, or a pattern such as"
            f" DIR/train-{{000..012}} or"
            " DIR/train-* (in quotes)."
        )
    return found


def _of_name(name: str, is_one: Callable[[str], bool], kind: str) -> list[File]:
    place = locate_data(name)
    if "*" in place.name:
        folder = place.parent
        return (
            [file for file in files_in(folder) if fnmatchcase(file.location.name, place.name)]
            if is_folder(folder)
            else []
        )
    if is_folder(place):
        return [file for file in files_in(place) if is_one(file.location.name)]
    if file := find_file(place):
        return [file]
    raise DataError(f"{name}: no such file or folder; expected {kind}s. Correct the name or the pattern.")


MAX_CLASSES = 100_000


def sort_classes(where: str, found: set[str], skip: bool) -> tuple[str, ...]:
    """The class names in sorted order.

    Args:
        where: The column, for messages.
        found: The values; "" stands for a row without one.
        skip: Whether rows without a value may be left out.

    Raises:
        DataError: Rows have no value, or there are too many different ones.
    """
    if ("" in found and not skip) or len(found) > MAX_CLASSES:
        wrong = f"more than {MAX_CLASSES} different strings" if len(found) > MAX_CLASSES else "rows without a value"
        raise DataError(f"{where} has {wrong}. Name another column or correct these rows.")
    return tuple(sorted(found - {""}))


_BYTE_ORDER_MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def list_text_files(path: DataLocation, suffixes: tuple[str, ...], kind: str) -> list[File]:
    """One text file, or those in a folder, sorted by name.

    Raises:
        DataError: There is none.
    """
    allowed = " and ".join(suffixes)
    if file := find_file(path):
        files = [file]
    elif is_folder(path):
        files = files_in(path)
    else:
        raise DataError(f"{path}: no such file or folder; expected one {kind} file ({allowed}) or a folder of them.")
    files = [file for file in files if file.location.name.endswith(suffixes)]
    if not files:
        raise DataError(f"{path}: no {kind} file; allowed are {allowed}. Rename the file or give another input.")
    return files


@contextmanager
def open_text(file: File) -> Iterator[IO[bytes]]:
    """Opens a file, unpacked, for reading UTF-8 from it.

    Raises:
        DataError: Its first bytes say that it is of another encoding.
    """
    with file.open_unpacked() as stream:
        head: bytes = cast(Any, stream).peek(HEAD_BYTES)[:HEAD_BYTES]
        if head and (foreign := name_foreign_file(head)):
            raise DataError(f"{file}: it is {foreign}.")
        # UTF-16 without a mark has a zero byte in each pair of bytes of a Latin letter.
        encoding = next(
            (name for mark, name in _BYTE_ORDER_MARKS.items() if head.startswith(mark)),
            "UTF-16" if 0 in head[:2] else "",
        )
        if encoding:
            raise DataError(
                f"{file}: it is {encoding}, and not UTF-8 (as Excel's 'Unicode text' is). Save it as UTF-8."
            )
        yield stream
