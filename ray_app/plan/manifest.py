"""The manifest of a data set, the facts about its columns, and the columns that are in the names of its folders.

- `Manifest` is the table of Parquet row groups that a run trains on, with a digest. The identity of a row is its
  position in the manifest; an id column of the data is provenance only.
- `DataFacts` says what is known about the columns before any row is read: names, types, ranges.
- Partition columns are in the names of folders (`key=value`), as Hive, Spark, pandas and Arrow write them.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import PurePosixPath
from typing import Any, Literal
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from ray_app.errors import DataError


@dataclass(frozen=True)
class ColumnFacts:
    """The facts about one column.

    Args:
        kind: `number`, `integer`, `text`, `bytes` (one binary value per row), `array` (fixed shape), `list` (of
            numbers, of any length), or `other`.
        dtype: NumPy dtype of numbers and arrays.
        shape: Shape of one row of an array.
        minimum: Smallest value of a column of numbers, or of lists of numbers, if the files contain it.
        maximum: Largest value of such a column, if the files contain it.
        nulls: Number of missing values, if the files contain it.
        group_span: For a column of integers, `maximum - minimum + 1` of a row group, averaged over the row groups with
            their rows as weights, if the files contain these values.
        ids: Digest of the ids that the numbers of a column stand for, see `ray_app.ingest.ids`; "" for other columns.
    """

    kind: Literal["number", "integer", "text", "bytes", "array", "list", "other"]
    dtype: str = ""
    shape: tuple[int, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    nulls: int | None = None
    group_span: float | None = None
    ids: str = ""

    @property
    def is_date(self) -> bool:
        """Whether it holds dates or timestamps, of which tables use parts."""
        return self.kind == "other" and self.dtype.startswith(("timestamp", "date"))


@dataclass(frozen=True)
class DataFacts:
    """The facts about a data set, as its files describe it.

    Args:
        path: The path of the data set, for messages.
        num_rows: The number of rows.
        columns: The facts about every column by name.
        classes: Names of the classes of the label column, if the ingest recorded them.
        count: Reads a column of integers and returns how many rows have each of its values.
        index_columns: Columns that number the rows and are not data: the index of a pandas table, and columns without a
            name.
        read: Reads columns and yields the rows of each row group by column, as `Task.decode` gets them.
    """

    path: str
    num_rows: int
    columns: dict[str, ColumnFacts]
    classes: tuple[str, ...] | None = None
    count: Callable[[str], dict[int, int]] | None = None
    index_columns: tuple[str, ...] = ()
    read: Callable[[list[str]], Iterator[dict[str, Any]]] | None = field(default=None, compare=False)


def class_columns(names: Collection[str]) -> tuple[str, ...]:
    """Returns the columns of a data set with class names that hold numbers of classes.

    These are `label`, or without it `labels` of boxes, the image `mask`, and `target` with an entry for each class.
    """
    return ("label",) if "label" in names else tuple(name for name in ("labels", "mask", "target") if name in names)


def find_similar_names(names: Iterable[str]) -> list[list[str]]:
    """Returns groups of names that differ in case, blanks or the form of a character (Unicode NFKC) only.

    The names of a group keep their order.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        form = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
        groups.setdefault(unicodedata.normalize("NFKC", form), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


PartitionType = Literal["int64", "double", "string"]
PartitionValue = int | float | str | None
_MISSING = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)


def parse_partitions(path: str) -> dict[str, str | None]:
    """Returns the keys and values in the folders of a path, None for a missing value; refuses a key twice."""
    if "=" not in path:
        return {}
    values: dict[str, str | None] = {}
    for folder in path.split("/")[:-1]:
        key, separator, value = folder.partition("=")
        if not separator or not key:
            continue
        name = unquote(key)
        if name in values:
            raise DataError(
                f"{path} has two folders of the column {name!r}; a file has one value per column. Rename one of them."
            )
        values[name] = None if value in ("", _MISSING) else unquote(value)
    return values


def parse_partition_value(text: str | None, kind: PartitionType) -> PartitionValue:
    """Returns the value of a partition column that a text stands for."""
    if text is None or kind == "string":
        return text
    return int(text) if kind == "int64" else float(text)


def _infer_type(values: Iterable[str | None]) -> PartitionType:
    """Returns the narrowest type that can represent all values of a column."""
    texts = [value for value in values if value is not None]
    if texts and all(map(_INTEGER.fullmatch, texts)):
        # Integers of more than 64 bits are treated as names: as floats, two of them could become one value.
        return "int64" if all(-(2**63) <= int(value) < 2**63 for value in texts) else "string"
    if texts and all(_NUMBER.fullmatch(value) and math.isfinite(float(value)) for value in texts):
        return "double"
    return "string"


@dataclass(frozen=True)
class ReadRules:
    """What is added to the rows of a file, or changed in them, when they are read.

    Args:
        partitions: Type of each partition column.
        class_maps: For a file that numbers the classes in another way than the data set: the number in the data set by
            the number in the file.
        kept: See `Manifest.kept`.
    """

    partitions: Mapping[str, PartitionType] = field(default_factory=dict)
    class_maps: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    kept: Mapping[tuple[str, int], npt.NDArray[np.uint8]] = field(default_factory=dict)

    def kept_rows(self, path: str, index: int, first: int, rows: int) -> npt.NDArray[np.bool_] | None:
        """Returns a mask, (rows,), of the rows from `first` on of a row group that are read; None for all of them."""
        bits = self.kept.get((path, index))
        if bits is None:
            return None
        # With `count` NumPy returns uninitialized memory for no bits.
        kept = np.unpackbits(bits)[first : first + rows].view(np.bool_)
        return np.pad(kept, (0, rows - len(kept)))

    def stored_row(self, path: str, index: int, row: int) -> int:
        """Returns the number in its row group of a row that is the `row`-th one to be read, for messages."""
        bits = self.kept.get((path, index))
        return row if bits is None else int(np.flatnonzero(np.unpackbits(bits))[row])


Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Manifest:
    """The row groups of a data set in a fixed order: by relative path, then by index in the file.

    Args:
        paths: Path of each Parquet file, relative to the data set's root, sorted. Of several data sets it begins with
            the index of its own, as in `1/part-00000.parquet`.
        file_of: For each row group, the index of its file in `paths`, shape (row groups,).
        index_in_file: For each row group, its index in its file, shape (row groups,).
        rows: For each row group, its number of rows, shape (row groups,).
        selection: Digest of the rows that are kept, "" for all rows.
        class_maps: See `ReadRules`; empty in a manifest that a run has stored.
        kept: The rows of a row group, by file and index in it, that are not left out: a bit for each, without the zeros
            at the end. Row groups of which all rows are kept are missing, as is all of it in a stored manifest.
    """

    paths: tuple[str, ...]
    file_of: Int64
    index_in_file: Int64
    rows: Int64
    selection: str = ""
    class_maps: Mapping[str, tuple[int, ...]] = field(default_factory=dict, compare=False)
    kept: Mapping[tuple[str, int], npt.NDArray[np.uint8]] = field(default_factory=dict, compare=False)

    @classmethod
    def from_files(cls, files: Iterable[tuple[str, list[int]]]) -> Manifest:
        """Returns the manifest of files in any order, as (relative path, rows of each row group, also empty ones)."""
        ordered = sorted(files)
        counts = [len(groups) for _, groups in ordered]
        return cls(
            paths=tuple(path for path, _ in ordered),
            file_of=np.repeat(np.arange(len(ordered), dtype=np.int64), counts),
            index_in_file=np.concatenate([np.arange(n, dtype=np.int64) for n in counts] or [np.empty(0, np.int64)]),
            rows=np.array([rows for _, groups in ordered for rows in groups], dtype=np.int64),
        )

    @property
    def num_row_groups(self) -> int:
        """The number of row groups."""
        return len(self.rows)

    @cached_property
    def num_rows(self) -> int:
        """The number of rows in all row groups."""
        return int(self.rows.sum())

    @cached_property
    def first_row(self) -> Int64:
        """For each row group, the manifest position of its first row, shape (row groups,)."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.rows)[:-1]]) if len(self.rows) else self.rows

    def thin_out(self, max_rows: int | None) -> Manifest:
        """Returns the manifest of at most `max_rows` rows: of each row group the first ones, in equal proportion."""
        if max_rows is None or max_rows >= self.num_rows:
            return self
        ends = [0, *(end * max_rows // self.num_rows for end in np.cumsum(self.rows).tolist())]
        return replace(self, rows=np.array([end - start for start, end in pairwise(ends)], dtype=np.int64))

    def select(self, chosen: npt.NDArray[np.bool_]) -> Manifest:
        """Returns the manifest of the rows of a mask, (rows,), of a whole data set, in which they count from 0 on."""
        rows, kept = np.empty_like(self.rows), {}
        for group, (first, count) in enumerate(zip(self.first_row.tolist(), self.rows.tolist(), strict=True)):
            mask = chosen[first : first + count]
            rows[group] = np.count_nonzero(mask)
            if rows[group] < count:
                key = self.paths[int(self.file_of[group])], int(self.index_in_file[group])
                kept[key] = np.trim_zeros(np.packbits(mask), "b")
        selection = hashlib.sha256(np.packbits(chosen).tobytes()).hexdigest()
        return replace(self, rows=rows, selection=selection, kept=kept)

    def locate(self, position: int) -> tuple[str, int, int]:
        """Returns the file path, the index of the row group and the row in it of a manifest position."""
        group = int(np.searchsorted(self.first_row, position, side="right")) - 1
        path, row = self.paths[int(self.file_of[group])], position - int(self.first_row[group])
        index = int(self.index_in_file[group])
        return path, index, self.rules.stored_row(path, index, row)

    def describe_rows(self, positions: Sequence[int], max_rows: int = 12) -> str:
        """Returns a text that names rows by their files: `2 rows: part-0.parquet, row group 2, rows 3, 17`."""
        groups: dict[tuple[str, int], list[str]] = {}
        for path, row_group, row in map(self.locate, positions[:max_rows]):
            groups.setdefault((path, row_group), []).append(str(row))
        parts = [
            f"{path}, row group {group}, row{'s' * (len(rows) > 1)} {', '.join(rows)}"
            for (path, group), rows in groups.items()
        ]
        more = f"; and {len(positions) - max_rows} more" if len(positions) > max_rows else ""
        return f"{len(positions)} row{'s' * (len(positions) != 1)}: {'; '.join(parts)}{more}"

    @cached_property
    def partitions(self) -> dict[str, PartitionType]:
        """The columns in the names of folders (`key=value`), in their order, with their types.

        A type is the narrowest one that can represent all values of the column. Raises DataError for different keys.
        """
        values: dict[str, set[str | None]] = {}
        keys: tuple[str, ...] | None = None
        folder_before = None
        for path in self.paths:
            folder = path.rpartition("/")[0]
            if folder == folder_before:
                continue
            folder_before = folder
            partitions = parse_partitions(path)
            if keys is None:
                keys = tuple(partitions)
            elif set(keys) != set(partitions):
                raise DataError(
                    f"{self.paths[0]} has the partition columns {', '.join(keys) or 'none'}, but {path} has"
                    f" {', '.join(partitions) or 'none'}; all files of a data set need the same. Move the files into"
                    " separate data sets, or into folders key=value with the same keys."
                )
            for key, value in partitions.items():
                values.setdefault(key, set()).add(value)
        return {key: _infer_type(texts) for key, texts in values.items()}

    @property
    def rules(self) -> ReadRules:
        """What is added to the rows of its files, or changed in them, when they are read."""
        return ReadRules(self.partitions, self.class_maps, self.kept)

    @cached_property
    def path_hash(self) -> UInt64:
        """The first 64 bits of the BLAKE2b hash of each file's relative path, shape (files,)."""
        return np.array(
            [int.from_bytes(hashlib.blake2b(p.encode(), digest_size=8).digest(), "little") for p in self.paths],
            dtype=np.uint64,
        )

    @cached_property
    def digest(self) -> str:
        """The SHA-256 over paths, indices, row counts and selection; equal digests mean equal plans."""
        sha = hashlib.sha256(json.dumps(self.paths).encode() + self.selection.encode())
        for column in (self.file_of, self.index_in_file, self.rows):
            sha.update(column.astype("<i8").tobytes())
        return sha.hexdigest()

    def to_json(self) -> str:
        """Returns the manifest as JSON, with one entry for each file."""
        pairs = zip(self.file_of.tolist(), self.rows.tolist(), strict=True)
        groups = {file: [rows for _, rows in items] for file, items in groupby(pairs, key=lambda pair: pair[0])}
        files = [{"path": path, "rows": groups.get(i, [])} for i, path in enumerate(self.paths)]
        selection = {"selection": self.selection} if self.selection else {}
        return json.dumps({"digest": self.digest, "num_rows": self.num_rows, **selection, "files": files})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Returns the manifest of `to_json`; raises DataError for damaged text, or a path outside the data set."""
        try:
            stored = json.loads(text)
            files = [
                (str(entry["path"]), [operator.index(rows) for rows in entry["rows"]]) for entry in stored["files"]
            ]
            manifest = replace(cls.from_files(files), selection=str(stored.get("selection", "")))
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise DataError(
                f"manifest.json is damaged ({type(error).__name__}: {error}); restore it from a backup."
            ) from error
        for path, _ in files:
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                raise DataError(
                    f"manifest.json names {path!r}, which leads out of the data set; restore it from a backup."
                )
        if manifest.digest != stored.get("digest"):
            raise DataError("manifest.json is damaged: its digest does not match its files; restore it from a backup.")
        return manifest
