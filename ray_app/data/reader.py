"""Planned reads: what one read task fetches and decodes, and how read tasks run, as Ray Data tasks or in this process.

The plan decides, a source only fetches. Every decoded row carries its manifest position, so that the feed can check on
arrival that it got exactly the rows that it asked for.

A stream of tables of any size, cut into tables of wanted lengths.

Reading of stored data that does not give up at the first error of the storage.

Row groups that are larger than what is read at once: each is read once, from its beginning to its end, by whoever
fetches.

Parquet has no way into the middle of a row group: a task of its own for each slice would read all of it again.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_app.data.arrays import (
    ArraySpec,
    fixed_array,
    fixed_lists,
    from_column,
    is_bytes,
    is_text,
    ragged_lists,
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
    usable_mask,
)
from ray_app.data.parquet_files import DataFile, OpenFiles, Partitions
from ray_app.errors import BadRowError, DataError, StorageError
from ray_app.plan.hashing import hash_array
from ray_app.plan.manifest import Manifest
from ray_app.plan.order import Segment
from ray_app.storage.data_files import DataLocation, locate_data, to_read_error
from ray_app.task.user_code import row_error_reason


class RowStream:
    """See the module.

    Args:
        tables: What read tasks yield.
    """

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self._rest: pa.Table | None = None

    def take(self, rows: int) -> list[pa.Table]:
        """The next rows, in one or more tables.

        Raises:
            DataError: There are not so many left.
        """
        parts: list[pa.Table] = []
        while rows:
            parts.append(self.next(rows))
            rows -= parts[-1].num_rows
        return parts

    def next(self, most: int) -> pa.Table:
        """The next table, or as many of its rows as are wanted.

        Raises:
            DataError: There is none left.
        """
        table = self._rest if self._rest is not None else next(self._tables, None)
        if table is None:
            raise DataError(f"The read tasks ended {most} rows too early; the data set changed while it was read.")
        self._rest = table.slice(most) if table.num_rows > most else None
        return table.slice(0, most)


logger = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Between the tries, each of which is some of the client's own."""
_LASTING = ("ACCESS_DENIED", "NO_SUCH_", "INVALID_ACCESS_KEY", "SIGNATURE_DOES_NOT_MATCH")


def read_with_retries(place: DataLocation, read: Callable[[], T]) -> T:
    """What `read` gives of a place; where the storage fails in a way that may pass, it is tried again for about half a
    minute.

    Raises:
        StorageError: The disk, the network or S3 still fails.
        DataError: What is stored is to blame, it is gone, or may not be read.
    """
    pauses = iter(RETRY_PAUSES_S)
    while True:
        try:
            return read()
        except (OSError, pa.ArrowException) as error:
            if isinstance(error, FileNotFoundError | PermissionError) or any(code in str(error) for code in _LASTING):
                raise DataError(f"{place} is gone or may not be read: {error}. Restore it, or allow it.") from error
            found = to_read_error(place, error, "It cannot be read as Parquet; restore it or ingest the data again.")
            pause = next(pauses, None)
            if not isinstance(found, StorageError) or pause is None:
                raise found from error
            logger.warning("%s cannot be read now, trying again in %.1f s: %s", place, pause, error)
        time.sleep(pause)


POSITION = "__position__"
MAX_BLOCK_BYTES = 8 << 20
"""Decoded bytes of the rows that are decoded at once, and of a block in the object store."""


@dataclass(frozen=True)
class Span:
    """Rows [first, first + rows) of a row group of a file.

    Args:
        path: The file.
        row_group: Its row group.
        first: First row in that.
        rows: How many rows.
        position: Manifest position of the first one.
        of: Rows of the row group, if it is so large that it is read in slices (`slices.py`), otherwise 0.
        key: Of (seed, epoch), where rows are decoded another way in every epoch.
    """

    path: str
    row_group: int
    first: int
    rows: int
    position: int
    of: int = 0
    key: int | None = None


ReadSpec = tuple[Span, ...]
"""What one read task reads, in order."""
ReadSlice = Callable[[Span], pa.Table]


def describe_spec(spec: ReadSpec, most: int = 6) -> str:
    """The rows of a read task by their files, for people: `part-0.parquet, row group 2, rows 0 to 31`."""
    places = [
        f"{span.path}, row group {span.row_group}, rows {span.first} to {span.first + span.rows - 1}"
        for span in spec[:most]
    ]
    return "; ".join([*places, *([f"and {len(spec) - most} more row groups"] if len(spec) > most else [])])


_SMALL_TASKS = 4
"""Read tasks' worth of rows in a row group up to which one task reads all of it that is needed."""


@dataclass(frozen=True)
class Reader:
    """Reads and decodes rows of a data set; small, pickled to every read task.

    Args:
        root: Folder (path or URI) that paths are relative to.
        columns: Columns to read.
        decode: Turns rows as read into arrays, see `Task.decode`.
        fields: What a decoded row looks like, see `probe`.
        skips: Whether rows that cannot be decoded are put as zeros, with the reason in a column of its own; otherwise
            such a row is an error.
        keyed: Whether `decode` takes keys of the rows, too, in `rows[KEYS]`: it makes something else of a row in every
            epoch.
        partitions: The columns that are in the names of folders, see `Manifest.partitions`.
    """

    root: str
    columns: list[str]
    decode: Decode
    fields: dict[str, ArraySpec]
    skips: bool = False
    keyed: bool = False
    partitions: Partitions = field(default_factory=dict)

    def read(self, spec: ReadSpec, sliced: ReadSlice | None = None) -> Iterator[pa.Table]:
        """Decodes the rows of `spec` in order, a few at a time, so that their memory serves the next ones, as fresh
        memory costs more.

        Args:
            spec: Which rows.
            sliced: Gives the rows of spans of large row groups as they are stored.

        Yields:
            Tables with an array column per field, the column of positions and, with `skips`, that of reasons.

        Raises:
            BadRowError: A row cannot be decoded, without `skips`.
        """
        step = rows_per_task(self.fields, MAX_BLOCK_BYTES / 1e6)
        with closing(OpenFiles(self.root, self.partitions)) as files:
            for span in spec:
                if span.of and sliced is not None:
                    table = sliced(span)
                else:
                    table = read_with_retries(locate_data(self.root) / span.path, partial(self._stored, files, span))
                yield from self._decoded_span(span, table, step)

    def _stored(self, files: OpenFiles, span: Span) -> pa.Table:
        return read_span(files.get(span.path), span, self.columns)

    def _decoded_span(self, span: Span, table: pa.Table, step: int) -> Iterator[pa.Table]:
        """Decodes the rows of a span, `step` at a time; a missing value makes its row a bad one before `decode` sees
        any.
        """
        bad = find_missing_values(table)
        if bad and not self.skips:
            first = min(bad)
            raise BadRowError(span.path, span.row_group, span.first + first, bad[first])
        usable = usable_mask(span.rows, bad)
        rows = self._rows(span, table.filter(pa.array(usable)) if bad else table)
        if span.key is not None:
            hashed = hash_array(span.key, np.arange(span.position, span.position + span.rows)[usable])
            rows = rows | {KEYS: (hashed >> np.uint64(1)).astype(np.int64)}
        done = 0
        for low in range(0, span.rows, step):
            few = replace(span, first=span.first + low, rows=min(step, span.rows - low), position=span.position + low)
            some = {row - low: reason for row, reason in bad.items() if low <= row < low + few.rows}
            count = few.rows - len(some)
            yield self._decoded(few, {name: values[done : done + count] for name, values in rows.items()}, some)
            done += count

    @staticmethod
    def _rows(span: Span, table: pa.Table) -> dict[str, Any]:
        try:
            return table_to_rows(table)
        except DataError as error:
            raise DataError(f"{span.path}, row group {span.row_group}, {error}") from error

    def _decoded(self, span: Span, rows: dict[str, Any], bad: dict[int, str]) -> pa.Table:
        """Decodes rows; `bad` has the reasons of those that `rows` lacks, by their place in the span."""
        reasons: list[str | None] = []
        if self.skips:
            decoded, reasons = decode_good_rows(self.decode, rows, span.rows - len(bad), self.fields)
            if bad:
                decoded, reasons = insert_bad_rows(decoded, reasons, bad, self.fields)
        else:
            try:
                decoded = decode_all(self.decode, rows, span.rows, self.fields)
            except Exception as error:
                raise self._named(span, rows, error) from error
        decoded[POSITION] = np.arange(span.position, span.position + span.rows)
        encoded = [to_column(name, values) for name, values in decoded.items()]
        table = pa.Table.from_arrays([data for _, data in encoded], schema=pa.schema([field for field, _ in encoded]))
        return table.append_column(REASON, pa.array(reasons, pa.string())) if self.skips else table

    def _named(self, span: Span, rows: dict[str, Any], error: Exception) -> DataError:
        """The error that says which row cannot be decoded."""
        for i in range(span.rows):
            try:
                decode_all(self.decode, {name: values[i : i + 1] for name, values in rows.items()}, 1, self.fields)
            except Exception as row_error:
                return BadRowError(span.path, span.row_group, span.first + i, row_error_reason(row_error))
        return DataError(
            f"{span.path}, row group {span.row_group} cannot be decoded as a whole: {row_error_reason(error)}"
        )


def read_span(file: DataFile, span: Span, columns: list[str]) -> pa.Table:
    """The rows of a span as they are stored."""
    return file.read_row_group(span.row_group, columns).slice(span.first, span.rows)


def table_to_rows(table: pa.Table) -> dict[str, Any]:
    """A table as rows for `Task.decode`: arrays where the column has numbers, arrays or lists of one size, `Ragged`
    where it has other lists of numbers, lists of bytes or text otherwise.

    Raises:
        DataError: The values of a column cannot be read in Python.
    """
    rows: dict[str, Any] = {}
    for item, column in zip(table.schema, table.columns, strict=True):
        try:
            rows[item.name] = _values(item, column)
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise DataError(
                f"column {item.name!r} of type {item.type} cannot be read: {error}. Convert it to numbers, text, bytes"
                f" or lists of numbers."
            ) from error
    return rows


def _values(item: pa.Field, column: pa.ChunkedArray) -> Any:
    """The values of a column, see `table_to_rows`."""
    spec = spec_of_field(item)
    if spec is not None:
        return from_column(column, spec)
    if is_text(item.type) or is_bytes(item.type):
        return column.to_pylist()
    if (array := fixed_lists(column)) is not None:
        return array
    if (lists := ragged_lists(column)) is not None:
        return lists
    return column.to_numpy()


def plan_reads(
    manifest: Manifest, segments: list[Segment], max_rows: int, window_rows: int | None = None
) -> list[ReadSpec]:
    """Puts segments into read tasks of about `max_rows` rows, keeping their order; what is needed of a row group is
    read by one task.

    Only row groups of more than `window_rows` (if given) or of several times `max_rows` are cut, and read in slices.
    """
    specs: list[list[Span]] = [[]]
    room = max_rows
    for segment in segments:
        of = int(manifest.rows[segment.row_group])
        is_large = of > _SMALL_TASKS * max_rows or (window_rows is not None and of > window_rows)
        for (span,) in cut_reads(manifest, [segment], max_rows if is_large else segment.rows):
            if span.rows > room and specs[-1]:
                specs.append([])
                room = max_rows
            specs[-1].append(replace(span, of=of) if is_large else span)
            room -= span.rows
    return [tuple(spec) for spec in specs if spec]


def cut_reads(manifest: Manifest, segments: list[Segment], max_rows: int) -> list[ReadSpec]:
    """Cuts segments into reads of exactly `max_rows` rows, the last of fewer, keeping their order."""
    specs: list[list[Span]] = [[]]
    room = max_rows
    for segment in segments:
        done = 0
        while done < segment.rows:
            if not room:
                specs.append([])
                room = max_rows
            take = min(room, segment.rows - done)
            specs[-1].append(make_span(manifest, segment.row_group, segment.first + done, take))
            done, room = done + take, room - take
    return [tuple(spec) for spec in specs if spec]


def make_span(manifest: Manifest, row_group: int, first: int, rows: int) -> Span:
    """Some rows of a row group, by its number in the manifest."""
    path = manifest.paths[int(manifest.file_of[row_group])]
    position = int(manifest.first_row[row_group]) + first
    return Span(path, int(manifest.index_in_file[row_group]), first, rows, position)


def plan_all_reads(manifest: Manifest, max_rows: int) -> list[ReadSpec]:
    """The whole data set in manifest order, in read tasks of about `max_rows` rows."""
    segments = [Segment(i, 0, int(rows)) for i, rows in enumerate(manifest.rows) if rows]
    return plan_reads(manifest, segments, max_rows)


def rows_per_task(fields: dict[str, ArraySpec], read_task_mb: float) -> int:
    """Rows of one read task so that its decoded bytes stay within `read_task_mb` megabytes, at least one."""
    return max(1, int(read_task_mb * 1e6 / max(1, sum(spec.row_bytes for spec in fields.values()))))


Fetch = Callable[[Reader, Sequence[ReadSpec]], Iterator[pa.Table]]
"""Runs read tasks and yields their decoded rows in order, in tables of any size."""


@dataclass(frozen=True)
class RowSource:
    """A data set to be decoded.

    Args:
        reader: Reads and decodes.
        manifest: What to read.
        task_rows: Most rows of one read task.
    """

    reader: Reader
    manifest: Manifest
    task_rows: int

    @property
    def fields(self) -> dict[str, ArraySpec]:
        """What a decoded row looks like."""
        return self.reader.fields


def check_positions(table: pa.Table, expected: npt.NDArray[np.int64]) -> None:
    """Checks that a table holds just the expected rows in the expected order.

    Raises:
        DataError: It does not: the rows would not be consumed exactly once.
    """
    arrived = fixed_array(table.column(POSITION), ArraySpec("<i8", ()))
    if not np.array_equal(arrived, expected):
        raise DataError(
            f"A read task delivered {len(arrived)} rows from position {arrived[:1]} where {len(expected)} from"
            f" {expected[:1]} were planned;"
            " stopping, because rows would be lost or doubled. Please report this."
        )


_BATCH_ROWS = 1024
_BUFFER_BYTES = 4 << 20
"""Bytes of a column that are fetched at once."""
_MAX_OPEN = 256
"""Files that are open at most: a quarter of the usual limit of 1024. Where the limit is lower, a quarter of that."""


@dataclass
class _Open:
    """A row group that is being read, and the row that comes next."""

    file: DataFile
    rows: RowStream
    at: int


class SliceReader:
    """Rows of large row groups as they are stored.

    Where several read the same row group, each at its own place, each has it open for itself.

    Args:
        root: Folder (path or URI) that paths are relative to.
        columns: Columns to read.
        partitions: The columns that are in the names of folders.
    """

    def __init__(self, root: str, columns: list[str], partitions: Partitions) -> None:
        self._root, self._columns, self._partitions = locate_data(root), columns, partitions
        self._max_open = min(_MAX_OPEN, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._open: dict[tuple[str, int, int], _Open] = {}

    @classmethod
    def of(cls, reader: Reader) -> SliceReader:
        """The slices that a reader decodes."""
        return cls(reader.root, reader.columns, reader.partitions)

    def take(self, span: Span) -> pa.Table:
        """The rows of a span; what lies before them in the row group is skipped, unless they continue what was taken
        before.

        Raises:
            DataError: The row group has fewer rows.
        """
        found, table = read_with_retries(self._root / span.path, lambda: self._taken(span))
        found.at += span.rows
        if found.at < span.of:
            self._keep((span.path, span.row_group, found.at), found)
        else:
            found.file.close()
        return table

    def close(self) -> None:
        """Closes all files."""
        while self._open:
            self._open.popitem()[1].file.close()

    def _taken(self, span: Span) -> tuple[_Open, pa.Table]:
        """The row group and the rows; where that fails, the row group is begun anew the next time."""
        found = self._open.pop((span.path, span.row_group, span.first), None) or self._begun(span)
        return found, pa.concat_tables(found.rows.take(span.rows))

    def _begun(self, span: Span) -> _Open:
        file = DataFile(self._root, span.path, self._partitions, _BUFFER_BYTES)
        rows = RowStream(file.iter_batches(span.row_group, self._columns, _BATCH_ROWS))
        skipped = 0
        while skipped < span.first:
            skipped += rows.next(span.first - skipped).num_rows
        return _Open(file, rows, span.first)

    def _keep(self, key: tuple[str, int, int], opened: _Open) -> None:
        if key in self._open:  # two that go on at the same row; the second one begins anew
            self._open.pop(key).file.close()
        self._open[key] = opened
        if len(self._open) > self._max_open:
            self._open.pop(next(iter(self._open))).file.close()


def fetch_in_process(reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[pa.Table]:
    """Reads in this process, one task after the other."""
    with closing(SliceReader.of(reader)) as slices:
        for spec in specs:
            yield from reader.read(spec, slices.take)
