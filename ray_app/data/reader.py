"""Planned reads: what one read task fetches and decodes, and the reading in this process and its threads.

The plan decides which rows are read; a source only fetches them. Every decoded row carries its manifest position, so
that the feed can check on arrival that it received exactly the planned rows.

Parquet gives no access to the middle of a row group. So a `SliceReader` reads a row group that is larger than one read
task once, from its beginning to its end and in slices, in the process that fetches.

A worker that decodes rows in its own process reads in threads (`fetch_in_threads`). `load_all` reads a whole data set
into memory.
"""

from __future__ import annotations

import errno
import logging
import resource
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ray_app.data.arrays import (
    ArraySpec,
    Columns,
    fixed_array,
    fixed_lists,
    from_column,
    is_bytes,
    is_read_as_float,
    is_text,
    ragged_lists,
    read_as_float,
    spec_of_field,
    to_column,
)
from ray_app.data.bad_rows import (
    KEYS,
    REASON,
    Decode,
    decode_all,
    decode_good_rows,
    find_missing_values,
    insert_bad_rows,
    read_reasons,
    usable_mask,
    zero_row,
)
from ray_app.data.parquet_files import DataFile, OpenFiles
from ray_app.errors import BadRowError, DataError, StorageError
from ray_app.plan.hashing import hash_array
from ray_app.plan.manifest import Manifest, ReadRules
from ray_app.plan.order import Segment
from ray_app.retry import Retry
from ray_app.storage.data_files import Root, locate, to_read_error
from ray_app.storage.files import Location
from ray_app.task.ragged import Field
from ray_app.task.user_code import bisect_rows, row_error_reason

logger = logging.getLogger(__name__)

T = TypeVar("T")
POSITION = "__position__"
"""Column of decoded tables with the manifest positions of the rows."""
MAX_BLOCK_BYTES = 24 << 20
"""Decoded bytes of the rows that are decoded together, and of a block in the object store.

Ray Data's processes take some 15 ms of CPU for a block. Memory of more than 32 MiB is never used again by glibc.
"""


@dataclass(frozen=True)
class Span:
    """Rows [first, first + rows) of a row group of a file.

    Args:
        group_rows: Rows of the whole row group, where it is so large that it is read in slices; otherwise 0.
        key: Key of (seed, epoch), where rows are decoded differently in every epoch.
    """

    path: str
    row_group: int
    first: int
    rows: int
    position: int
    group_rows: int = 0
    key: int | None = None


ReadSpec = tuple[Span, ...]
"""What one read task reads, in order."""
ReadSlice = Callable[[Span], pa.Table]
"""Returns the rows of a span of a large row group as they are stored."""


def count_rows(spec: ReadSpec) -> int:
    """Returns the number of rows of a read task."""
    return sum(span.rows for span in spec)


def describe_spec(spec: ReadSpec, max_spans: int = 6) -> str:
    """Returns the rows of a read task for a message: `part-0.parquet, row group 2, rows 0 to 31`."""
    spans = [
        f"{span.path}, row group {span.row_group}, rows {span.first} to {span.first + span.rows - 1}"
        for span in spec[:max_spans]
    ]
    return "; ".join([*spans, *([f"and {len(spec) - max_spans} more row groups"] if len(spec) > max_spans else [])])


@dataclass(frozen=True)
class Reader:
    """Reads and decodes rows of a data set; small, as it is pickled to every read task.

    Args:
        root: See `ray_app.storage.data_files.Root`.
        decode: Turns stored rows into arrays, see `Task.decode`.
        fields: Specification of a decoded row, see `probe`.
        skips: Whether a row that cannot be decoded becomes zeros, with the reason in the column `REASON`; otherwise it
            is an error.
        keyed: Whether `decode` gets the keys of the rows in `rows[KEYS]`, to decode a row differently in every epoch.
        rules: See `Manifest.rules`.
    """

    root: Root
    columns: list[str]
    decode: Decode
    fields: dict[str, ArraySpec]
    skips: bool = False
    keyed: bool = False
    rules: ReadRules = ReadRules()

    @property
    def schema(self) -> pa.Schema:
        """The columns of the tables that `read` yields."""
        row = {name: zero_row(spec) for name, spec in self.fields.items()} | {POSITION: np.zeros(1, np.int64)}
        return _encode(row, [None] if self.skips else None).schema

    def read(self, spec: ReadSpec, read_slice: ReadSlice | None = None) -> Iterator[pa.Table]:
        """Yields the decoded rows of `spec` in order, a block at a time.

        The tables have an array column per field, the column of positions and, with `skips`, that of reasons. The
        memory of a block is used again for the next one, because fresh memory costs more. Without `read_slice` the
        whole row group is read for each span of a large one. Raises BadRowError for a row that cannot be decoded,
        without `skips`.
        """
        block_rows = rows_per_task(self.fields, MAX_BLOCK_BYTES / 1e6)
        with closing(OpenFiles(self.root, self.rules)) as files:
            # Without shuffling several spans are of one row group.
            read_group = lru_cache(1)(partial(self._read_group, files))
            for span in spec:
                if span.group_rows and read_slice is not None:
                    table = read_slice(span)
                else:
                    table = read_group(span.path, span.row_group).slice(span.first, span.rows)
                yield from self._decode_span(span, table, block_rows)

    def _read_group(self, files: OpenFiles, path: str, row_group: int) -> pa.Table:
        where = locate(self.root, path)
        return read_with_retries(where, lambda: files.get(path).read_row_group(row_group, self.columns))

    def _decode_span(self, span: Span, table: pa.Table, block_rows: int) -> Iterator[pa.Table]:
        """Yields the decoded rows of a span in blocks; a row with a missing value is bad and is not decoded."""
        bad = find_missing_values(table, self.columns)
        if bad and not self.skips:
            raise self._bad_row(span, min(bad), bad[min(bad)])
        usable = usable_mask(span.rows, bad)
        rows = self._to_rows(span, table.filter(pa.array(usable)) if bad else table)
        if span.key is not None:
            hashed = hash_array(span.key, np.arange(span.position, span.position + span.rows)[usable])
            rows = rows | {KEYS: (hashed >> np.uint64(1)).astype(np.int64)}
        done = 0
        for low in range(0, span.rows, block_rows):
            size = min(block_rows, span.rows - low)
            block = replace(span, first=span.first + low, rows=size, position=span.position + low)
            block_bad = {row - low: reason for row, reason in bad.items() if low <= row < low + size}
            count = size - len(block_bad)
            selected = {name: values[done : done + count] for name, values in rows.items()}
            yield self._decode_block(block, {n: _to_list(values) for n, values in selected.items()}, block_bad)
            done += count

    @staticmethod
    def _to_rows(span: Span, table: pa.Table) -> dict[str, Any]:
        """Returns `table_to_rows`, in which columns of bytes stay as they are: each block makes its objects itself."""
        encoded = {f.name for f in table.schema if is_bytes(f.type) and spec_of_field(f) is None}
        try:
            rows = table_to_rows(table.drop_columns(sorted(encoded)))
        except DataError as error:
            raise DataError(f"{span.path}, row group {span.row_group}, {error}") from error
        return {name: table[name] if name in encoded else rows[name] for name in table.column_names}

    def _decode_block(self, span: Span, rows: dict[str, Any], bad: dict[int, str]) -> pa.Table:
        """Returns the decoded rows of a span; `bad` has the reasons of rows that `rows` lacks, by index in the span."""
        reasons: list[str | None] | None = None
        if self.skips:
            decoded, reasons = decode_good_rows(self.decode, rows, span.rows - len(bad), self.fields)
            if bad:
                decoded, reasons = insert_bad_rows(decoded, reasons, bad, self.fields)
        else:
            try:
                decoded = decode_all(self.decode, rows, span.rows, self.fields)
            except Exception as error:
                raise self._locate_error(span, rows, error) from error
        decoded[POSITION] = np.arange(span.position, span.position + span.rows)
        return _encode(decoded, reasons)

    def _locate_error(self, span: Span, rows: dict[str, Any], error: Exception) -> DataError:
        """Returns the error that names the row that cannot be decoded."""
        for row, _, result in bisect_rows(
            span.rows,
            lambda low, high: decode_all(self.decode, {n: rows[n][low:high] for n in rows}, high - low, self.fields),
        ):
            if isinstance(result, Exception):
                return self._bad_row(span, row, row_error_reason(result))
        return DataError(
            f"{span.path}, row group {span.row_group} cannot be decoded as a whole: {row_error_reason(error)}"
        )

    def _bad_row(self, span: Span, row: int, reason: str) -> BadRowError:
        """Returns the error that names a row of a span by its number in the file."""
        stored = self.rules.stored_row(span.path, span.row_group, span.first + row)
        return BadRowError(span.path, span.row_group, stored, reason)


def _to_list(values: Any) -> Any:
    """Returns the values of an Arrow column as a list, and all else as it is."""
    return values.to_pylist() if isinstance(values, pa.ChunkedArray) else values


def _encode(rows: dict[str, Field], reasons: list[str | None] | None) -> pa.Table:
    """Returns decoded rows as a table, with the column `REASON` if bad rows are skipped."""
    encoded = [to_column(name, values) for name, values in rows.items()]
    table = pa.Table.from_arrays([data for _, data in encoded], schema=pa.schema([field for field, _ in encoded]))
    return table if reasons is None else table.append_column(REASON, pa.array(reasons, pa.string()))


def read_span(file: DataFile, span: Span, columns: list[str]) -> pa.Table:
    """Returns the rows of a span as they are stored."""
    return file.read_row_group(span.row_group, columns).slice(span.first, span.rows)


def table_to_rows(table: pa.Table) -> dict[str, Any]:
    """Returns a table as rows for `Task.decode`; raises DataError for values that cannot be read in Python.

    A column of numbers, arrays or lists of one size becomes an array; other lists of numbers become `Ragged`; all else
    becomes a list of bytes or text.
    """
    rows: dict[str, Any] = {}
    for item, column in zip(table.schema, table.columns, strict=True):
        try:
            rows[item.name] = _column_values(item, column)
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise DataError(
                f"column {item.name!r} of type {item.type} cannot be read: {error}. Convert it to numbers, text, bytes"
                f" or lists of numbers."
            ) from error
    return rows


def _column_values(item: pa.Field, column: pa.ChunkedArray) -> Any:
    spec = spec_of_field(item)
    if spec is not None:
        return from_column(column, spec)
    if is_text(item.type) or is_bytes(item.type):
        return column.to_pylist()
    if is_read_as_float(item.type):
        return read_as_float(column).to_numpy()
    if pa.types.is_integer(item.type) and column.null_count and _has_large_integer(column):
        return np.array(column.to_pylist(), object)
    array = fixed_lists(column)
    lists = ragged_lists(column) if array is None else array
    return column.to_numpy() if lists is None else lists


def _has_large_integer(column: pa.ChunkedArray) -> bool:
    """Returns whether float64, to which NumPy converts integers with missing values, may round a value."""
    limits = pc.min_max(column).as_py()
    return any(value is not None and abs(value) > _MAX_EXACT_INTEGER for value in limits.values())


_MAX_EXACT_INTEGER = 1 << 53
_MAX_TASKS_OF_GROUP = 4
"""One task reads all needed rows of a row group of up to so many tasks' rows; a larger row group is read in slices."""


def plan_reads(
    manifest: Manifest, segments: list[Segment], max_rows: int, window_rows: int | None = None
) -> list[ReadSpec]:
    """Packs segments into read tasks of about `max_rows` rows, in their order.

    One task reads all that is needed of a row group. Only row groups of more than `window_rows` (if set) or of several
    times `max_rows` are cut, and read in slices.
    """
    specs: list[list[Span]] = [[]]
    free_rows = max_rows
    for segment in segments:
        group_rows = int(manifest.rows[segment.row_group])
        is_large = group_rows > _MAX_TASKS_OF_GROUP * max_rows or (window_rows is not None and group_rows > window_rows)
        for (span,) in cut_reads(manifest, [segment], max_rows if is_large else segment.rows):
            if span.rows > free_rows and specs[-1]:
                specs.append([])
                free_rows = max_rows
            specs[-1].append(replace(span, group_rows=group_rows) if is_large else span)
            free_rows -= span.rows
    return [tuple(spec) for spec in specs if spec]


def cut_reads(manifest: Manifest, segments: list[Segment], max_rows: int) -> list[ReadSpec]:
    """Cuts segments into read tasks of exactly `max_rows` rows, the last one of fewer, in their order."""
    specs: list[list[Span]] = [[]]
    free_rows = max_rows
    for segment in segments:
        done = 0
        while done < segment.rows:
            if not free_rows:
                specs.append([])
                free_rows = max_rows
            rows = min(free_rows, segment.rows - done)
            specs[-1].append(make_span(manifest, segment.row_group, segment.first + done, rows))
            done += rows
            free_rows -= rows
    return [tuple(spec) for spec in specs if spec]


def plan_all_reads(manifest: Manifest, max_rows: int) -> list[ReadSpec]:
    """Returns the read tasks of the whole data set in manifest order, of about `max_rows` rows each."""
    segments = [Segment(i, 0, int(rows)) for i, rows in enumerate(manifest.rows) if rows]
    return plan_reads(manifest, segments, max_rows)


def make_span(manifest: Manifest, row_group: int, first: int, rows: int) -> Span:
    """Returns rows of a row group, which is named by its number in the manifest, as a span."""
    path = manifest.paths[int(manifest.file_of[row_group])]
    position = int(manifest.first_row[row_group]) + first
    return Span(path, int(manifest.index_in_file[row_group]), first, rows, position)


def rows_per_task(fields: dict[str, ArraySpec], read_task_mb: float) -> int:
    """Returns how many rows of one read task stay within `read_task_mb` decoded megabytes, at least 1."""
    return max(1, int(read_task_mb * 1e6 / max(1, sum(spec.row_bytes for spec in fields.values()))))


Fetch = Callable[[Reader, Sequence[ReadSpec]], Iterator[pa.Table]]
"""Runs read tasks and yields their decoded rows in order, in tables of any size."""


@dataclass(frozen=True)
class RowSource:
    """A data set to be decoded, at most `task_rows` rows of it by one read task."""

    reader: Reader
    manifest: Manifest
    task_rows: int

    @property
    def fields(self) -> dict[str, ArraySpec]:
        """The specification of a decoded row."""
        return self.reader.fields


def check_positions(table: pa.Table, expected: npt.NDArray[np.int64]) -> None:
    """Raises DataError unless a table has exactly the expected rows in the expected order."""
    positions = fixed_array(table.column(POSITION), ArraySpec("<i8", ()))
    if not np.array_equal(positions, expected):
        raise DataError(
            f"A read task delivered {len(positions)} rows from position {positions[:1]} instead of {len(expected)} from"
            f" {expected[:1]}; stopping, because rows would be lost or repeated. Please report this."
        )


def fetch_in_process(reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[pa.Table]:
    """Runs read tasks in this process, one after the other."""
    with closing(SliceReader.of(reader)) as slices:
        for spec in specs:
            yield from reader.read(spec, slices.take)


_BATCH_ROWS = 1024
_BUFFER_BYTES = 4 << 20
"""Bytes of a column that are fetched together."""
_MAX_OPEN = 256
"""Maximum number of open files: a quarter of the usual limit of 1024. A quarter of the limit, where that is lower."""


@dataclass
class _OpenGroup:
    """A row group that is being read, and the number of its next row."""

    file: DataFile
    rows: RowStream
    next_row: int


class SliceReader:
    """Reads large row groups in slices, each from its beginning to its end, once for every reading position."""

    def __init__(self, root: Root, columns: list[str], rules: ReadRules) -> None:
        self._root = root
        self._columns = columns
        self._rules = rules
        self._max_open = min(_MAX_OPEN, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._open: dict[tuple[str, int, int], _OpenGroup] = {}

    @classmethod
    def of(cls, reader: Reader) -> SliceReader:
        """Returns the slice reader of a reader's data set and columns."""
        return cls(reader.root, reader.columns, reader.rules)

    def take(self, span: Span) -> pa.Table:
        """Returns the rows of a span as they are stored; raises DataError if the row group has fewer.

        If they do not continue an earlier slice, it reads the row group from its beginning and skips the rows before.
        """
        group, table = read_with_retries(locate(self._root, span.path), lambda: self._read_slice(span))
        group.next_row += span.rows
        if group.next_row < span.group_rows:
            self._keep_open((span.path, span.row_group, group.next_row), group)
        else:
            group.file.close()
        return table

    def close(self) -> None:
        """Closes all files."""
        while self._open:
            self._open.popitem()[1].file.close()

    def _read_slice(self, span: Span) -> tuple[_OpenGroup, pa.Table]:
        """Returns the row group and the rows; after a failure the next call begins the row group again."""
        group = self._open.pop((span.path, span.row_group, span.first), None) or self._open_at(span)
        return group, pa.concat_tables(group.rows.take(span.rows))

    def _open_at(self, span: Span) -> _OpenGroup:
        file = DataFile(self._root, span.path, self._rules, _BUFFER_BYTES)
        rows = RowStream(file.iter_batches(span.row_group, self._columns, _BATCH_ROWS))
        skipped = 0
        while skipped < span.first:
            skipped += rows.next(span.first - skipped).num_rows
        return _OpenGroup(file, rows, span.first)

    def _keep_open(self, key: tuple[str, int, int], group: _OpenGroup) -> None:
        # Two logical workers may continue at the same row; the one that comes second begins the row group again.
        if key in self._open:
            self._open.pop(key).file.close()
        self._open[key] = group
        if len(self._open) > self._max_open:
            self._open.pop(next(iter(self._open))).file.close()


class RowStream:
    """A stream of tables of any size, from which tables of the wanted lengths are taken."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self._rest: pa.Table | None = None

    def take(self, rows: int) -> list[pa.Table]:
        """Returns the next `rows` rows, in one or more tables; raises DataError if fewer are left."""
        parts: list[pa.Table] = []
        while rows:
            parts.append(self.next(rows))
            rows -= parts[-1].num_rows
        return parts

    def next(self, max_rows: int) -> pa.Table:
        """Returns the next table, or its first `max_rows` rows; raises DataError if there is none left."""
        table = self._rest if self._rest is not None else next(self._tables, None)
        if table is None:
            raise DataError(f"The read tasks ended {max_rows} rows too early; the data set changed while it was read.")
        self._rest = table.slice(max_rows) if table.num_rows > max_rows else None
        return table.slice(0, max_rows)


_RETRY = Retry(0.5, attempts=7)
"""The attempts to read; each includes retries of the storage client itself."""
_LASTING_ERRORS = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENXIO)
"""Errors of files and objects that do not exist or may not be read, and of buckets that do not exist."""


def read_with_retries(file: Location, read: Callable[[], T]) -> T:
    """Returns the result of `read`, which reads `file`, and retries for half a minute if the storage fails temporarily.

    Raises:
        StorageError: The disk, the network or an object store still fails.
        DataError: The stored data is damaged or gone, or may not be read.
    """

    def to_error(error: Exception) -> DataError:
        if isinstance(error, OSError) and error.errno in _LASTING_ERRORS:
            return DataError(f"{file} is missing or not readable: {error}. Restore the file, or allow reading it.")
        return to_read_error(file, error, "The file cannot be read as Parquet; restore it or ingest the data again.")

    def raise_if_lasting(error: Exception) -> None:
        failure = to_error(error)
        if not isinstance(failure, StorageError):
            raise failure from error

    try:
        return _RETRY.call(read, (OSError, pa.ArrowException), f"Reading {file}", raise_if_lasting)
    except (OSError, pa.ArrowException) as error:
        raise to_error(error) from error


def choose_fetch(threads: int, default: Fetch) -> Fetch:
    """Returns a `Fetch` that reads in `threads` threads of this process, or `default` where `threads` is 0."""
    return partial(fetch_in_threads, threads=threads) if threads else default


def fetch_in_threads(reader: Reader, specs: Sequence[ReadSpec], threads: int) -> Iterator[pa.Table]:
    """Runs read tasks concurrently in threads, which call `decode` at once, and yields their rows in order.

    The calling thread reads the slices of large row groups.
    """
    waiting: deque[Future[list[pa.Table]]] = deque()
    stop = threading.Event()
    with closing(SliceReader.of(reader)) as slices, ThreadPoolExecutor(threads, "reader") as pool:
        try:
            for spec in specs:
                spec_slices = [slices.take(span) for span in spec if span.group_rows]
                waiting.append(pool.submit(_read_task, reader, spec, spec_slices, stop))
                if len(waiting) > threads:
                    yield from _drain(waiting.popleft().result())
            while waiting:
                yield from _drain(waiting.popleft().result())
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def _drain(tables: list[pa.Table]) -> Iterator[pa.Table]:
    """Yields the tables and removes each from the list, so that its memory is freed once it is consumed."""
    while tables:
        yield tables.pop(0)


def _read_task(reader: Reader, spec: ReadSpec, slices: list[pa.Table], stop: threading.Event) -> list[pa.Table]:
    """Returns all rows of a read task; returns early, with none, once `stop` is set and the result is not used."""
    remaining, tables = iter(slices), list[pa.Table]()
    for table in reader.read(spec, lambda _: next(remaining)):
        if stop.is_set():
            return []
        tables.append(table)
    return tables


@dataclass(frozen=True)
class Decoded:
    """A data set in memory, with the reasons of bad rows by manifest position if the reader skips these."""

    arrays: dict[str, Field]
    reasons: dict[int, str]


def take_rows(rows: RowStream, fields: dict[str, ArraySpec], positions: npt.NDArray[np.int64]) -> Decoded:
    """Returns the next rows of a stream; raises DataError unless they are those at the manifest positions, in order.

    Each table is copied to its part of the fields as it arrives and is then freed, so that the rows are in memory only
    once.
    """
    columns = Columns(fields, len(positions))
    reasons: dict[int, str] = {}
    done = 0
    while done < len(positions):
        table = rows.next(len(positions) - done)
        expected = positions[done : done + table.num_rows]
        check_positions(table, expected)
        reasons |= read_reasons(table, expected)
        columns.add(table)
        done += table.num_rows
    return Decoded(columns.all(), reasons)


def load_all(fetch: Fetch, source: RowSource) -> Decoded:
    """Decodes a whole data set into memory; raises DataError if rows are missing or not the planned ones."""
    tables = fetch(source.reader, plan_all_reads(source.manifest, source.task_rows))
    decoded = take_rows(RowStream(tables), source.fields, np.arange(source.manifest.num_rows))
    for table in tables:
        check_positions(table, np.empty(0, np.int64))
    return decoded
