"""What is kept of the footers of Parquet files, rows of the row groups and ranges of the columns; the footers are let go at once.

An ingest puts it beside its shards: a data set is then opened without reading any footer of a file that was not changed since.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ray_app.data.dataset.arrays import is_number, is_numbers, spec_of
from ray_app.data.dataset.files import CONNECTIONS, Place, fragment_of, parsing, reading, relative
from ray_app.data.dataset.footer_check import check_footers
from ray_app.errors import DataError
from ray_app.plan.manifest import Manifest
from ray_app.record.files import Location, put_atomic

KEPT = "_footers.arrow"
"""File in a data set with what is known of its files, see `Footers`. Without it, or where it is damaged, their footers are read."""
_DISK_THREADS = 8
_FILES_AT_ONCE = 64
_TAIL_BYTES = 64 << 10
_SCHEMA = b"ray_app.schema"
_NUMBERS = (int, float, bool)
_LEAST, _MOST, _NULLS, _SPANS = range(4)
_Kept = tuple[list[int], npt.NDArray[np.float64]]
"""Of a file: rows of its row groups, and for each column of numbers four of them, see `Footers`."""


@dataclass(frozen=True)
class Range:
    """Of a column of numbers, as far as the files say: least and greatest value, missing values, and how many values are from the least to
    the greatest in a row group, on an average over the rows.
    """

    least: float | None = None
    most: float | None = None
    nulls: int | None = None
    group_span: float | None = None


@dataclass(frozen=True)
class Footers:
    """What is kept of the footers of a data set.

    Args:
        schema: The columns of all files.
        table: A row for each file: `path`, `version` (see `_version`), `rows` of its row groups, and for each column of numbers
            `range.NAME`: least and greatest value, missing values, and the sum over the rows of how many values are from the least to the
            greatest in their row group, which is NaN where one does not say.
    """

    schema: pa.Schema
    table: pa.Table

    @property
    def manifest(self) -> Manifest:
        """Its row groups."""
        return Manifest.from_files(zip(_paths(self), self.table["rows"].to_pylist(), strict=True))

    def range_of(self, field: pa.Field) -> Range:
        """What is known of a column."""
        name = _leaf(field)
        if name is None:
            return Range()
        found = self.table[f"range.{name}"].combine_chunks().flatten().to_numpy().reshape(-1, 4)
        nulls, spans = int(found[:, _NULLS].sum()), float(found[:, _SPANS].sum())
        if math.isnan(spans) or not np.isfinite(found[:, _LEAST]).any():
            return Range(nulls=nulls)
        rows = int(self.table["rows"].combine_chunks().flatten().to_numpy().sum())
        return Range(float(found[:, _LEAST].min()), float(found[:, _MOST].max()), nulls, spans / rows)

    def put(self, folder: Location) -> None:
        """Writes it beside the files."""
        described = self.table.replace_schema_metadata({_SCHEMA: self.schema.serialize().to_pybytes()})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, described.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as file:
            file.write_table(described)
        put_atomic(folder / KEPT, sink.getvalue().to_pybytes())


def kept_footers(root: Place) -> Footers | None:
    """What is kept beside the files of a data set, if it is there and whole.

    Raises:
        StorageError: The bucket does not answer.
    """
    with reading(root):
        try:
            data = (root / KEPT).read_bytes()
        except FileNotFoundError:
            return None
    try:
        table = pa.ipc.open_file(data).read_all()
        table.validate(full=True)
        schema = pa.ipc.read_schema(pa.py_buffer(table.schema.metadata[_SCHEMA]))
    except (pa.ArrowException, OSError, KeyError, TypeError):
        return None
    return Footers(schema, table.replace_schema_metadata()) if table.schema.equals(_kept_schema(schema)) else None


def read_footers(root: Place, files: Sequence[Place], kept: Footers | None = None, trusted: bool = False) -> Footers:
    """What is to be kept of the footers of files, many of which are read at a time.

    Args:
        root: The folder that they are in.
        files: The files, as they were listed; at least one.
        kept: What is known already: footers of files that were not changed since are not read.
        trusted: Whether the application itself has just written the files.

    Raises:
        DataError: One is not Parquet, or they have different columns.
        StorageError: The disk or the bucket fails.
    """
    paths, versions = [relative(file, root) for file in files], [_version(file) for file in files]
    now = dict(zip(paths, versions, strict=True))
    known = list(zip(_paths(kept), kept.table["version"].to_pylist(), strict=True)) if kept is not None else []
    place = {path: i for i, (path, version) in enumerate(known) if now.get(path) == version}
    if kept is not None and place:
        if list(place) == paths:
            return kept
        columns = _Columns(kept.schema, next(file for file, path in zip(files, paths, strict=True) if path in place))
    else:
        columns, kept = _Columns(_schema_of(files[0]), files[0]), None
    if repeated := sorted(name for name, times in Counter(columns.schema.names).items() if times > 1):
        raise DataError(
            f"{files[0]} has several columns of the name {repeated[0]!r}; a name stands for one column. Rename or drop one, and write the"
            " file again."
        )
    unread = [i for i, path in enumerate(paths) if path not in place]
    threads = _DISK_THREADS if isinstance(root, Path) else CONNECTIONS
    size = min(_FILES_AT_ONCE, max(1, len(unread) // (4 * threads)))
    some = [[files[i] for i in unread[low : low + size]] for low in range(0, len(unread), size)]
    with ThreadPoolExecutor(threads) as pool:
        read = [one for found in pool.map(partial(_read, columns, trusted), some) for one in found]
    table = _table(columns, [paths[i] for i in unread], [versions[i] for i in unread], read)
    if kept is None:
        return Footers(columns.schema, table)
    place |= {paths[i]: kept.table.num_rows + n for n, i in enumerate(unread)}
    return Footers(columns.schema, pa.concat_tables([kept.table, table]).take([place[path] for path in paths]).combine_chunks())


class _Columns:
    """The columns that all files of a data set have.

    Args:
        schema: The columns.
        named: A file that has them, for messages.
    """

    def __init__(self, schema: pa.Schema, named: Place) -> None:
        self.schema, self._named = schema, named
        self.leaves = _leaves(schema)
        self._last: tuple[Any, list[int | None]] | None = None

    def places(self, file: Place, footer: pq.FileMetaData, schema: Callable[[], pa.Schema]) -> list[int | None]:
        """Where in its row groups a file has the columns of numbers; `schema` gives its columns, which takes a while.

        Raises:
            DataError: It has other columns.
        """
        group = footer.row_group(0) if footer.num_row_groups else None
        stored = [group.column(i) for i in range(footer.num_columns)] if group else []
        layout = footer.metadata, [(column.path_in_schema, column.physical_type) for column in stored]
        if self._last is not None and layout == self._last[0]:
            return self._last[1]
        if schema().remove_metadata() != self.schema.remove_metadata():
            raise DataError(
                f"{file} has other columns than {self._named}; a data set has one schema. Move the files apart or ingest again."
            )
        there = {path: i for i, (path, _) in enumerate(layout[1])}
        found = [there.get(name) for name in self.leaves]
        if stored and b"ARROW:schema" in (footer.metadata or {}):  # the types of the columns, to the last detail
            self._last = layout, found
        return found


def _leaves(schema: pa.Schema) -> list[str]:
    return list(dict.fromkeys(name for name in map(_leaf, schema) if name is not None))


def _leaf(field: pa.Field) -> str | None:
    """What Parquet calls the numbers of a column, if it has a range."""
    kind = field.type
    if spec_of(field) is not None:
        return None
    if is_number(kind):
        return str(field.name)
    return f"{field.name}.list.element" if is_numbers(kind) else None


def _read(columns: _Columns, trusted: bool, files: list[Place]) -> list[_Kept]:
    found, tails = [], list[bytes]()
    for file in files:
        with _as_parquet(file):
            tails.append(_tail(file))
    if not trusted:
        check_footers(files, tails)
    for file, tail in zip(files, tails, strict=True):
        with _as_parquet(file):
            opened = pq.ParquetFile(pa.BufferReader(tail))
            footer = opened.metadata
            # A footer that is asked for its schema itself refers to itself from then on, and stays in memory.
            found.append(_kept_of(footer, columns.places(file, footer, partial(getattr, opened, "schema_arrow"))))
    return found


def _schema_of(file: Place) -> pa.Schema:
    with _as_parquet(file):
        return pq.ParquetFile(pa.BufferReader(_tail(file))).schema_arrow


def _as_parquet(file: Place) -> Any:
    return parsing(file, "It cannot be read as Parquet; remove it or ingest the data again.")


def _tail(file: Place) -> bytes:
    """The end of a Parquet file, from its footer on; in a bucket one request asks for the size and one fetches it."""
    if not isinstance(file, Path):
        with fragment_of(file).open() as stream:
            return _tail_of(stream.size(), stream.read_at)
    opened = os.open(file, os.O_RDONLY)
    try:
        return _tail_of(os.fstat(opened).st_size, lambda count, at: os.pread(opened, count, at))
    finally:
        os.close(opened)


def _tail_of(size: int, read: Callable[[int, int], bytes]) -> bytes:
    begin = max(0, size - _TAIL_BYTES)
    tail = read(size - begin, begin)
    footer = 8 + int.from_bytes(tail[-8:-4], "little")
    if footer > size:
        return tail
    return tail[-footer:] if footer <= len(tail) else read(footer, size - footer)


def _version(file: Place) -> str:
    """What changes with the content of a file: size and time on a disk, in a bucket the ETag or the like that was listed."""
    if not isinstance(file, Path):
        return file.etag
    stat = file.stat()
    return f"{stat.st_size}-{stat.st_mtime_ns}"


def _kept_of(footer: pq.FileMetaData, places: list[int | None]) -> _Kept:
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    rows = [group.num_rows for group in groups]
    filled = [(group, held) for group, held in zip(groups, rows, strict=True) if held]
    return rows, np.array([_range(filled, place) for place in places], np.float64)


def _range(groups: list[tuple[pq.RowGroupMetaData, int]], place: int | None) -> tuple[float, float, int, float]:
    """The four numbers of a column in a file, from row groups and their rows."""
    low, high, nulls, spans = math.inf, -math.inf, 0, 0.0
    for group, rows in groups:
        statistics: Any = group.column(place).statistics if place is not None else None
        if statistics is not None:
            nulls += statistics.null_count or 0
            if not statistics.num_values and statistics.null_count:  # empty lists, or missing values, are of no range
                continue
        least: Any = statistics.min if statistics is not None and statistics.has_min_max else None
        if type(least) not in _NUMBERS:  # of half precision pyarrow gives the bytes
            spans = math.nan
            continue
        most: Any = statistics.max
        low, high = low if low < least else float(least), high if high > most else float(most)
        spans += (float(most) - float(least) + 1) * rows
    return low, high, nulls, spans


def _kept_schema(schema: pa.Schema) -> pa.Schema:
    ranges = [pa.field(f"range.{name}", pa.list_(pa.float64(), 4)) for name in _leaves(schema)]
    return pa.schema([("path", pa.binary()), ("version", pa.string()), ("rows", pa.list_(pa.int64())), *ranges])


def _table(columns: _Columns, paths: list[str], versions: list[str], read: list[_Kept]) -> pa.Table:
    ranges = np.array([found for _, found in read]).reshape(len(read), len(columns.leaves), 4)
    four = [pa.FixedSizeListArray.from_arrays(np.ascontiguousarray(ranges[:, i]).reshape(-1), 4) for i in range(len(columns.leaves))]
    rows = pa.array([rows for rows, _ in read], pa.list_(pa.int64()))
    named = pa.array(list(map(os.fsencode, paths)), pa.binary())
    return pa.Table.from_arrays([named, pa.array(versions, pa.string()), rows, *four], schema=_kept_schema(columns.schema))


def _paths(footers: Footers) -> list[str]:
    return list(map(os.fsdecode, footers.table["path"].to_pylist()))
