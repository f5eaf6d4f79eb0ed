"""Sources of an ingest: the interface of their readers, input splits and tables, and what several readers need.

Every table has a column `row_id` (string), which says where the row comes from. No reader holds more than about
`BLOCK_BYTES` of rows in memory.
"""

from __future__ import annotations

import math
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import Any, ClassVar, TypeVar

import numpy as np
import pyarrow as pa

from ray_app.data.arrays import (
    Array,
    to_column,
)
from ray_app.errors import ConfigError, DataError
from ray_app.ingest.options import FormatTraits, IngestOptions
from ray_app.storage.data_files import (
    File,
    files_in,
    find_file,
    is_folder,
)
from ray_app.storage.files import Location, to_location
from ray_app.task.images import decode_image

BLOCK_BYTES = 16 << 20
FILES_BYTES = 4 << 20
"""Bytes of the files that become one table; several such tables and their copies are in memory."""
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval"), "eval"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""The data set by the word that names it in files, folders and arrays."""
T = TypeVar("T")


class RowCounter:
    """Numbers of rows that several threads add to: those that were read, and those of finished tasks of before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.read = self.stored = 0

    def add(self, rows: int, stored: int = 0) -> None:
        """Adds rows that were read, and those that an interrupted ingest has read."""
        with self._lock:
            self.read += rows
            self.stored += stored


ROWS_READ = RowCounter()
"""The rows of sources that this process has read, for the progress."""

Refuse = Callable[[str, str], None]
"""Takes the id of a row that cannot be used and why; raises DataError where that is not allowed."""

Run = Callable[[Callable[[Any], Any], Sequence[Any]], Generator[Any, None, None]]
"""Calls a function with every item, several at a time, and gives the results in the order of the items.

Users that may stop before the last result close it.
"""


@dataclass(frozen=True)
class InputSplit:
    """A part of a source that one task reads.

    The cut of a source into input splits depends on the source and the options only, and so does the result.

    Args:
        rows: Number of rows, including refused ones; None where only reading tells.
        tables: Yields tables of one schema in the source's order; pickled to the task.
    """

    rows: int | None
    tables: Callable[[Refuse], Iterator[pa.Table]]


@dataclass(frozen=True)
class Part:
    """One data set of a source.

    Args:
        name: Sub-folder of the output, or "" for the output folder itself.
        classes: Name of each class by its index in `label`; None where labels have no names.
        skipped_files: Files of the input that are not data of this format and are left out: the name and the reason.
        keeps_order: Whether the rows are mixed in the source already, and keep their order.
    """

    name: str
    input_splits: list[InputSplit]
    classes: tuple[str, ...] | None = None
    skipped_files: tuple[tuple[str, str], ...] = ()
    keeps_order: bool = False
    notes: tuple[str, ...] = ()
    index_columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class SourceReader(ABC):
    """The reader of one raw format; `pattern` is the option `input`: a file, a folder or a pattern of names."""

    traits: ClassVar[FormatTraits] = FormatTraits()

    pattern: str
    options: IngestOptions

    @abstractmethod
    def files(self) -> Iterable[File]:
        """Returns every file that is read, in a fixed order; raises DataError where the input is missing or empty."""

    @abstractmethod
    def parts(self, run: Run) -> list[Part]:
        """Returns the data sets of the source; may read the input once, by `run`, to learn its types and classes."""

    @cached_property
    def path(self) -> Location:
        """The file or folder."""
        return to_location(self.pattern)

    @property
    def skips(self) -> bool:
        """Whether rows that cannot be used are left out; otherwise they are errors."""
        return self.options.on_bad_row == "skip"

    def held_out(self, parts: list[str]) -> float:
        """Returns the fraction of the training rows that goes to `eval`, 0 for none, for a source with these parts."""
        if self.options.eval_fraction is not None:
            return self.options.eval_fraction
        has_eval = "eval" in parts and not self.traits.divides_rows
        return 0.0 if parts == [""] or has_eval else self.traits.eval_fraction

    def input_splits(self, files: Iterable[File], tables: Callable[..., Iterator[pa.Table]]) -> list[InputSplit]:
        """Returns the input splits of files; `tables` is called with the files of one and a `Refuse`."""
        return [InputSplit(None, partial(tables, group)) for group in group_files(files, self.options.split_bytes)]

    def kept_columns(
        self, where: object, names: list[str], label: str | None, kind: str, remedy: str = "Leave it out by --columns."
    ) -> list[str]:
        """Returns those of the source's columns that are kept: of `columns`, `targets` and the label, or all.

        Raises DataError if a named column is missing, or another column than the label has the name `label`. The
        message says `where`, calls a column by its `kind` and gives a `remedy`.
        """
        if label in (self.options.targets or ()):
            raise DataError(
                f"{where}: {label!r} is one of targets {self.options.targets}and also the label. Remove it from"
                " targets, or rename it in the source."
            )
        columns, dropped = self.options.kept_columns, frozenset(self.options.drop or ())
        others = [name for name in names if name != label]
        may_be_all = bool(label) or not dropped
        check_dropped(f"{where}: ", self.options.drop or [], others, may_be_all, kind)
        named = [*(self.options.columns or []), *(self.options.targets or []), *([label] if label else [])]
        if missing := [name for name in named if name not in names]:
            raise DataError(
                f"{where}: no {kind} {missing[0]!r}; the {kind}s are {format_items(names, 50)}. Name one of them."
            )
        kept = [
            name for name in names if name == label or (name not in dropped and (columns is None or name in columns))
        ]
        if label not in (None, "label") and "label" in kept:
            raise DataError(
                f"{where}: {label!r} becomes 'label', but there is another {kind} 'label' in {format_items(names, 50)}."
                f" {remedy}"
            )
        return kept

    def columns_to_drop(self) -> list[str] | None:
        """Returns those of the option `drop` that the tables of the reader have."""
        return None if self.traits.leaves_out_columns else self.options.drop

    def default_label(self, names: Container[str]) -> str | None:
        """Returns `label` if it is among the columns, neither to be left out nor to be renamed; otherwise None."""
        is_other = "label" in (self.options.drop or ()) or "label" in self.options.rename
        return "label" if "label" in names and not is_other else None

    def classes_of_type(self, where: str, kind: pa.DataType) -> tuple[str, ...] | None:
        """Returns the names of the classes of a label of numbers or booleans; None for numbers without `classes`.

        Raises ConfigError if the option `classes` names others than those of booleans.
        """
        is_boolean = bool(pa.types.is_boolean(kind))
        if self.options.classes is None:
            return BOOLEAN_CLASSES if is_boolean else None
        if is_boolean and sorted(self.options.classes) != sorted(BOOLEAN_CLASSES):
            raise ConfigError(
                f"{where} holds {kind}, and classes is {self.options.classes}; allowed are {list(BOOLEAN_CLASSES)}, in"
                " either order."
            )
        return tuple(self.options.classes)

    def order_classes(self, where: str, values: set[str], first_missing: str | None = None) -> tuple[str, ...]:
        """Returns the names of the classes of a label: the option `classes`, or the sorted values of the label.

        "" among the values stands for a row without a value; `first_missing` is the id of the first one, if it is
        known. Raises DataError for a value that is not among `classes`, and see `sort_classes`; where rows may be
        skipped, those rows are refused later.
        """
        classes = self.options.classes
        if classes is None:
            first = f" (the first is {first_missing})" if first_missing else ""
            remedy = f"{first}. Correct these rows, skip them with --on_bad_row skip, or name another column."
            return sort_classes(where, values, self.skips, remedy)
        others = sorted(values - {"", *classes})
        if others and not self.skips:
            raise DataError(
                f"{where} has the values {format_items(others)}, but classes has only {format_items(classes)}. Add"
                " them, or skip these rows with --on_bad_row skip."
            )
        return tuple(classes)


def check_dropped(where: str, dropped: list[str], names: list[str], may_be_all: bool, kind: str = "column") -> None:
    """Raises ConfigError for a name of the option `drop` that no column has, and for all columns unless they may be."""
    if absent := [name for name in dropped if name not in names]:
        raise ConfigError(f"{where}drop names {absent[0]!r}; the {kind}s are {format_items(names, 50)}. Name these.")
    if not may_be_all and set(names) <= set(dropped):
        raise ConfigError(f"{where}drop names all {kind}s, {format_items(names)}; keep at least one.")


BOOLEAN_CLASSES = ("false", "true")
"""Names of the classes of a label of booleans, which are numbered as Arrow numbers booleans."""


def group_items(items: Iterable[T], size: Callable[[T], int], max_rows: float, max_bytes: int) -> list[list[T]]:
    """Groups successive items within limits, which a single item may exceed."""
    groups: list[list[T]] = []
    num_bytes = 0
    for item in items:
        if not groups or len(groups[-1]) >= max_rows or num_bytes + size(item) > max_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(item)
        num_bytes += size(item)
    return groups


def format_items(items: Sequence[object], max_items: int = 10) -> str:
    """Returns items for a message: the first ones, and the number of all where there are more."""
    if len(items) <= max_items:
        return str(list(items))
    return f"{str(list(items[:max_items]))[:-1]}, ...] ({len(items)} in all)"


def group_files(files: Iterable[File], max_bytes: int) -> list[list[File]]:
    """Groups successive files of at most `max_bytes` bytes together; a single file may be larger."""
    return group_items(files, lambda file: file.size, math.inf, max_bytes)


def make_table(row_ids: Sequence[str] | pa.Array, columns: dict[str, Array | pa.Array]) -> pa.Table:
    """Returns a table of columns, in which arrays of more than one dimension become fixed-shape array columns."""
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


def batch_rows(rows: Iterable[T], size: Callable[[T], int], max_bytes: int = BLOCK_BYTES) -> Iterator[list[T]]:
    """Yields rows in lists of about `max_bytes` bytes."""
    block: list[T] = []
    num_bytes = 0
    for row in rows:
        block.append(row)
        num_bytes += size(row)
        if num_bytes >= max_bytes:
            yield block
            block, num_bytes = [], 0
    if block:
        yield block


def explain_undecodable(encoded: bytes) -> str | None:
    """Returns the reason why training could not decode this as one still image; None where it can."""
    if not encoded:
        return "the file is empty"
    try:
        image = decode_image(encoded)
    except ValueError as error:
        return str(error)
    return None if image.ndim == 3 else f"the file has {len(image)} frames"


_BRACES = re.compile(r"\{([^{}]*)\}")
MAX_NAMES = 1_000_000
"""Maximum number of names that a pattern may stand for; more are a mistake, and would fill the memory."""


def expand_braces(pattern: str) -> list[str]:
    """Returns the names, at most `MAX_NAMES`, that a pattern stands for: `x{08..11}` and `x{a,b}`."""
    braces = _BRACES.search(pattern)
    if braces is None:
        return [pattern]
    span = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", braces[1])
    choices = braces[1].split(",")
    if span and int(span[2]) - int(span[1]) >= MAX_NAMES:
        raise DataError(
            f"{pattern}: {braces[0]} stands for more than the allowed {MAX_NAMES} names. Correct the pattern."
        )
    if span:
        choices = [f"{number:0{len(span[1])}d}" for number in range(int(span[1]), int(span[2]) + 1)]
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    return [name for choice in choices for name in expand_braces(before + choice + after)]


def match_files(pattern: str, is_one: Callable[[str], bool], kind: str) -> list[File]:
    """Returns the files of a folder or a pattern, sorted by name or in the order of the braces; or the one file.

    Args:
        pattern: A folder, a file, or either with `*` in its last part, or with `{000..012}` or `{a,b}`.
        is_one: Returns whether a file of a folder belongs to the source, by its name.
    """
    files = [file for name in expand_braces(pattern) for file in _match_name(name, is_one, kind)]
    if not files:
        raise DataError(
            f"{pattern}: no {kind}; expected a folder with such files, one of them, or a pattern such as"
            f" DIR/train-{{000..012}} or DIR/train-* (in quotes)."
        )
    return files


def _match_name(name: str, is_one: Callable[[str], bool], kind: str) -> list[File]:
    path = to_location(name)
    if "*" in path.name:
        folder = path.parent
        return [f for f in files_in(folder) if fnmatchcase(f.location.name, path.name)] if is_folder(folder) else []
    if is_folder(path):
        return [file for file in files_in(path) if is_one(file.location.name)]
    if file := find_file(path):
        return [file]
    raise DataError(f"{name}: no such file or folder; expected {kind}s. Correct the name or the pattern.")


MAX_CLASSES = 100_000


def sort_classes(
    where: str, values: set[str], skip: bool, remedy: str = ". Name another column or correct these rows."
) -> tuple[str, ...]:
    """Returns the class names in sorted order; "" among the values stands for a row without a value.

    Raises DataError if there are too many, or, unless these may be skipped, rows without a value; the message then
    ends with `remedy`.
    """
    if len(values) > MAX_CLASSES:
        raise DataError(
            f"{where} has more than {MAX_CLASSES} different strings. Name another column or correct these rows."
        )
    if "" in values and not skip:
        raise DataError(f"{where} has rows without a value{remedy}")
    return tuple(sorted(values - {""}))


def list_text_files(path: Location, suffixes: tuple[str, ...], kind: str) -> list[File]:
    """Returns one text file, or those in a folder, sorted by name; raises DataError if there is none."""
    allowed = " and ".join(suffixes)
    if file := find_file(path):
        files = [file]
    elif is_folder(path):
        files = files_in(path)
    else:
        raise DataError(f"{path}: no such file or folder; expected one {kind} file ({allowed}) or a folder of them.")
    files = [file for file in files if file.location.name.endswith(suffixes)]
    if not files:
        raise DataError(f"{path}: no {kind} file; allowed are {allowed}. Rename the file or set another input.")
    return files
