"""The manifest: the table of Parquet row groups that a run trains on, with a digest.

A row's identity is its position in the manifest; an id column of the data is provenance only.

What is known of a data set's columns before anything is read: names, types, ranges.

Columns that are in the names of folders: `key=value`, as Hive, Spark, pandas and Arrow write them.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import PurePosixPath
from typing import Literal
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from ray_app.errors import DataError


@dataclass(frozen=True)
class ColumnFacts:
    """One column.

    Args: kind: `number`, `integer`, `text`, `bytes` (one binary value per row), `array` (fixed shape), `list` (of
        numbers, of any
            length), or `other`.
        dtype: NumPy dtype of numbers and arrays.
        shape: Shape of one row of an array.
        minimum: Least value of a column of numbers, or of lists of them, if the files say.
        maximum: Greatest value, likewise.
        nulls: Missing values, if the files say.
        group_span: Values from the least to the greatest in a row group of a column of integers, on an average over the
            rows, if the files say.
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

    Args: path: Where it is, for messages. num_rows: Number of rows. columns: Facts of every column by name. classes:
        Names of the classes of the label column, if the ingest recorded them. count: Reads a column of integers, and
        returns how many rows have each of its values. index_columns: Columns that number the rows and are no data of
        theirs: the index of a pandas table, and columns without a name.
    """

    path: str
    num_rows: int
    columns: dict[str, ColumnFacts]
    classes: tuple[str, ...] | None = None
    count: Callable[[str], dict[int, int]] | None = None
    index_columns: tuple[str, ...] = ()


def find_similar_names(names: Iterable[str]) -> list[list[str]]:
    """Names that differ in upper and lower case, blanks or the form of a character (Unicode NFKC) alone, each group in
    its order.
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
    """The keys and values in the folders of a file's path, relative to its data set; None is a missing value.

    Raises:
        DataError: A key stands in the path twice.
    """
    if "=" not in path:
        return {}
    found: dict[str, str | None] = {}
    for folder in path.split("/")[:-1]:
        key, separator, value = folder.partition("=")
        if not separator or not key:
            continue
        name = unquote(key)
        if name in found:
            raise DataError(
                f"{path} has two folders of the column {name!r}; a column has one value for a file. Rename one of them."
            )
        found[name] = None if value in ("", _MISSING) else unquote(value)
    return found


def infer_partition_types(paths: Sequence[str]) -> dict[str, PartitionType]:
    """The partition columns of a data set, in the order of its folders, each in the narrowest type that holds all its
    values.

    Args:
        paths: All files, relative to the data set.

    Raises:
        DataError: The files have different keys.
    """
    values: dict[str, set[str | None]] = {}
    keys: tuple[str, ...] | None = None
    folder_before = None
    for path in paths:
        folder = path.rpartition("/")[0]
        if folder == folder_before:
            continue
        folder_before, found = folder, parse_partitions(path)
        if keys is None:
            keys = tuple(found)
        elif set(keys) != set(found):
            raise DataError(
                f"{paths[0]} has the partition columns {', '.join(keys) or 'none'}, {path} has"
                f" {', '.join(found) or 'none'}; all files of a"
                " data set have the same. Move the files apart, or into folders key=value of the same keys."
            )
        for key, value in found.items():
            values.setdefault(key, set()).add(value)
    return {key: _infer_type(some) for key, some in values.items()}


def parse_partition_value(text: str | None, kind: PartitionType) -> PartitionValue:
    """A value of a partition column."""
    if text is None or kind == "string":
        return text
    return int(text) if kind == "int64" else float(text)


def _infer_type(values: Iterable[str | None]) -> PartitionType:
    known = [value for value in values if value is not None]
    if known and all(map(_INTEGER.fullmatch, known)):
        # Digits beyond 64 bits are names: as a fraction two of them could become one.
        return "int64" if all(-(2**63) <= int(value) < 2**63 for value in known) else "string"
    if known and all(_NUMBER.fullmatch(value) and math.isfinite(float(value)) for value in known):
        return "double"
    return "string"


Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Manifest:
    """Row groups in a fixed order: by relative path, then by index in the file.

    Args:
        paths: File of each distinct Parquet file, relative to the data set's root, sorted.
        file_of: For each row group, the index of its file in `paths`, shape (row groups,).
        index_in_file: For each row group, its index in its file, shape (row groups,).
        rows: For each row group, its number of rows, shape (row groups,).
    """

    paths: tuple[str, ...]
    file_of: Int64
    index_in_file: Int64
    rows: Int64

    @classmethod
    def from_files(cls, files: Iterable[tuple[str, list[int]]]) -> Manifest:
        """Builds the manifest from (relative path, rows of each row group) in any order; empty row groups stay in."""
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
        """Number of row groups."""
        return len(self.rows)

    @cached_property
    def num_rows(self) -> int:
        """Number of rows in all row groups."""
        return int(self.rows.sum())

    @cached_property
    def first_row(self) -> Int64:
        """For each row group, the manifest position of its first row, shape (row groups,)."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.rows)[:-1]]) if len(self.rows) else self.rows

    def place_of(self, position: int) -> tuple[str, int, int]:
        """Where the row at a manifest position is: path of its file, index of its row group there, and of the row in
        that.
        """
        group = int(np.searchsorted(self.first_row, position, side="right")) - 1
        return (
            self.paths[int(self.file_of[group])],
            int(self.index_in_file[group]),
            position - int(self.first_row[group]),
        )

    def named(self, positions: Sequence[int], most: int = 12) -> str:
        """Some rows by their files, for people: `3 rows: part-0.parquet, row group 2, rows 3, 17, 20`."""
        groups: dict[tuple[str, int], list[str]] = {}
        for path, row_group, row in map(self.place_of, positions[:most]):
            groups.setdefault((path, row_group), []).append(str(row))
        places = [
            f"{path}, row group {group}, row{'s' * (len(rows) > 1)} {', '.join(rows)}"
            for (path, group), rows in groups.items()
        ]
        more = f"; and {len(positions) - most} more" if len(positions) > most else ""
        return f"{len(positions)} row{'s' * (len(positions) != 1)}: {'; '.join(places)}{more}"

    @cached_property
    def partitions(self) -> dict[str, PartitionType]:
        """The columns that are in the names of folders (`key=value`), with their types.

        Raises:
            DataError: The files have different keys.
        """
        return infer_partition_types(self.paths)

    @cached_property
    def path_hash(self) -> UInt64:
        """For each file, 64 bits of its relative path's BLAKE2b hash, shape (files,)."""
        return np.array(
            [int.from_bytes(hashlib.blake2b(p.encode(), digest_size=8).digest(), "little") for p in self.paths],
            dtype=np.uint64,
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the paths, indices and row counts; two data sets with equal digests have equal plans."""
        sha = hashlib.sha256(json.dumps(self.paths).encode())
        for column in (self.file_of, self.index_in_file, self.rows):
            sha.update(column.astype("<i8").tobytes())
        return sha.hexdigest()

    def to_json(self) -> str:
        """The manifest as JSON, one entry a file."""
        pairs = zip(self.file_of.tolist(), self.rows.tolist(), strict=True)
        groups = {file: [rows for _, rows in items] for file, items in groupby(pairs, key=lambda pair: pair[0])}
        files = [{"path": path, "rows": groups.get(i, [])} for i, path in enumerate(self.paths)]
        return json.dumps({"digest": self.digest, "num_rows": self.num_rows, "files": files})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Reads what `to_json` wrote.

        Raises:
            DataError: It is damaged, or a path leads out of the data set.
        """
        try:
            stored = json.loads(text)
            files = [
                (str(entry["path"]), [operator.index(rows) for rows in entry["rows"]]) for entry in stored["files"]
            ]
            made = cls.from_files(files)
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise DataError(
                f"manifest.json is damaged ({type(error).__name__}: {error}); restore it from a backup."
            ) from error
        for path, _ in files:
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                raise DataError(
                    f"manifest.json names {path!r}, which leads out of the data set; restore it from a backup."
                )
        if made.digest != stored.get("digest"):
            raise DataError("manifest.json is damaged: its digest is not that of its files; restore it from a backup.")
        return made
