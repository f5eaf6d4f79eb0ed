"""One Parquet file of a data set, with the columns that are in the names of its folders; what cannot be read is named
to the column.

Footers that would make the Parquet library abort this process are refused: a process of its own looks at them first.

The process serves all data sets that are opened at about the same time, as its start takes a fifth of a second, and
ends itself when nothing comes for some seconds (`footer_trial.py`).

What is kept of the footers of Parquet files, rows of the row groups and ranges of the columns; the footers are let go
at once.

An ingest puts it beside its shards: a data set is then opened without reading any footer of a file that was not changed
since.
"""

from __future__ import annotations

import atexit
import math
import os
import struct
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ray_app.data.arrays import is_number, is_numbers, spec_of_field
from ray_app.errors import BadRowError, DataError, StorageError
from ray_app.plan.manifest import Manifest, PartitionType, PartitionValue, parse_partition_value, parse_partitions
from ray_app.storage.data_files import (
    CONNECTIONS,
    DataLocation,
    bucket_errors,
    locate_data,
    make_fragment,
    open_parquet,
    parser_errors,
    relative_path,
    to_read_error,
)
from ray_app.storage.files import Location, put_atomic

Partitions = Mapping[str, PartitionType]
_ADVICE = "It cannot be read as Parquet; restore it or ingest the data again."
_MAX_OPEN = 4
_TYPES = {"int64": pa.int64(), "double": pa.float64(), "string": pa.string()}


def partition_fields(partitions: Partitions) -> list[pa.Field]:
    """The partition columns as Arrow fields."""
    return [pa.field(name, _TYPES[kind]) for name, kind in partitions.items()]


class DataFile:
    """An open Parquet file of a data set; a context manager that closes it.

    Args:
        root: Folder (path or URI) of the data set.
        path: The file, relative to it.
        partitions: The partition columns of the data set.
        buffer_bytes: Bytes of a column that are fetched at once; 0: a row group is fetched as a whole.
    """

    def __init__(self, root: str | DataLocation, path: str, partitions: Partitions, buffer_bytes: int = 0) -> None:
        self.place = (locate_data(root) if isinstance(root, str) else root) / path
        self._path = path
        self._file = open_parquet(self.place, buffer_bytes)
        self._own_names = set(self._file.schema_arrow.names)
        self._texts = parse_partitions(path) if partitions else {}
        self._values: dict[str, PartitionValue] = {
            name: parse_partition_value(self._texts[name], kind) for name, kind in partitions.items()
        }
        self._fields = {field.name: field for field in partition_fields(partitions)}

    def __enter__(self) -> DataFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._file.close(force=True)

    @property
    def schema(self) -> pa.Schema:
        """The columns of the file, and the partition columns that it does not hold itself."""
        added = [field for name, field in self._fields.items() if name not in self._own_names]
        return pa.schema([*self._file.schema_arrow, *added])

    def read_row_group(self, index: int, columns: Sequence[str]) -> pa.Table:
        """The rows of a row group.

        Args:
            index: Of the row group in the file.
            columns: Names of columns; `a.b` is a field of a column of objects.

        Raises:
            DataError: A column is damaged, or is not in the file.
            OSError: The storage failed.
        """
        stored = self._stored_names(columns)
        try:
            table = self._file.read_row_group(index, columns=stored, use_threads=False)
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise self._explain(error, index, stored) from error
        return self._with_partitions(table, columns, index, 0)

    def read(self, columns: Sequence[str]) -> pa.Table:
        """The rows of all row groups; see `read_row_group`."""
        groups = [self.read_row_group(index, columns) for index in range(self._file.metadata.num_row_groups)]
        return pa.concat_tables(groups) if groups else self.schema.empty_table().select(list(columns))

    def rows_within(self, index: int, columns: Sequence[str], num_bytes: int) -> int:
        """How many rows of a row group have about so many bytes in these columns, at least one."""
        group = self._file.metadata.row_group(index)
        chunks = (group.column(i) for i in range(group.num_columns))
        begins = tuple(f"{name}." for name in columns)
        size = sum(chunk.total_uncompressed_size for chunk in chunks if f"{chunk.path_in_schema}.".startswith(begins))
        return max(1, num_bytes * group.num_rows // max(1, size))

    def iter_batches(self, index: int, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """The rows of a row group from its beginning, at most so many at a time; see `read_row_group`."""
        stored, first = self._stored_names(columns), 0
        batches = self._file.iter_batches(rows, row_groups=[index], columns=stored, use_threads=False)
        while True:
            try:
                batch = next(batches, None)
            except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
                raise self._explain(error, index, stored) from error
            if batch is None:
                return
            yield self._with_partitions(pa.Table.from_batches([batch]), columns, index, first)
            first += batch.num_rows

    def _stored_names(self, columns: Sequence[str]) -> list[str]:
        """Those of the columns that the file itself holds."""
        known = {name: name in self._own_names or name.partition(".")[0] in self._own_names for name in columns}
        if unknown := [name for name, is_stored in known.items() if not is_stored and name not in self._values]:
            raise DataError(
                f"{self.place} has no column {unknown[0]!r}; its columns are {', '.join(sorted(self.schema.names))}."
                f" The file was changed"
                " since the start: restore it or ingest the data again."
            )
        return [name for name, is_stored in known.items() if is_stored]

    def _with_partitions(self, table: pa.Table, columns: Sequence[str], index: int, first: int) -> pa.Table:
        """The table with the partition columns among `columns`; one that the file holds, too, must say the same."""
        for name in columns:
            if name not in self._values:
                continue
            field = self._fields[name]
            if name not in self._own_names:
                table = table.append_column(field, pa.repeat(pa.scalar(self._values[name], field.type), table.num_rows))
            elif (row := self._contradiction(table.column(name), self._texts[name])) is not None:
                value = table.column(name)[row].as_py()
                reason = f"column {name!r} is {value!r}, but the folder says {self._texts[name]!r}; correct one of them"
                raise BadRowError(self._path, index, first + row, reason)
        return table

    @staticmethod
    def _contradiction(column: pa.ChunkedArray, text: str | None) -> int | None:
        """The first row whose value is not that of the folder's name."""
        try:
            wanted = pa.scalar(text, pa.string()).cast(column.type)
            same = column.is_null() if text is None else pc.fill_null(pc.equal(column, wanted), False)
        except NotImplementedError:
            # Arrow reads no text as a value of this type (half precision), so that nothing can be compared.
            return None
        except pa.ArrowException:  # the folder's text is no value of the column's type
            return 0 if len(column) else None
        row = pc.index(same, False).as_py()
        return row if row >= 0 else None

    def _explain(self, error: Exception, index: int, columns: Sequence[str]) -> Exception:
        """The error of reading a row group, with the column that cannot be read; a failure of the storage as it is."""
        if isinstance(to_read_error(self.place, error, _ADVICE), StorageError):
            return error
        place = f"{self.place}, row group {index}"
        for name in columns:
            try:
                self._file.read_row_group(index, columns=[name], use_threads=False)
            except (OSError, pa.ArrowException, UnicodeDecodeError) as column_error:
                return to_read_error(f"{place}, column {name!r}", column_error, _ADVICE)
        return to_read_error(place, error, _ADVICE)


class OpenFiles:
    """The files of a data set that were read last: few are open at a time, however many are read.

    Args:
        root: Folder (path or URI) of the data set.
        partitions: The partition columns of the data set.
    """

    def __init__(self, root: str, partitions: Partitions) -> None:
        self._root, self._partitions = locate_data(root), partitions
        self._open: OrderedDict[str, DataFile] = OrderedDict()

    def get(self, path: str) -> DataFile:
        """The file, opened unless it is open."""
        if path not in self._open:
            self._open[path] = DataFile(self._root, path, self._partitions)
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(path)
        return self._open[path]

    def close(self) -> None:
        """Closes all of them."""
        while self._open:
            self._open.popitem()[1].close()


class _FooterChecker:
    """The process, started when it is needed; threads take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def first_fatal(self, tails: Sequence[bytes]) -> tuple[int, str] | None:
        """Which footer the process does not survive, and what the process says then; None if it survives all.

        A process may also be ended from outside, so a footer is fatal only if two processes die of it.

        Raises:
            RuntimeError: The process cannot look at footers.
        """
        survived, suspect = 0, -1
        with self._lock:
            while survived < len(tails):
                count, process = self._look_at(tails[survived:])
                survived += count
                if survived == len(tails):
                    break
                assert process.stderr is not None
                message, code = process.stderr.read().decode(errors="replace"), process.wait()
                if code > 0:
                    raise RuntimeError(
                        f"The process that looks at Parquet footers first ended with exit code {code}: {message}"
                    )
                # With exit code 0 it ended itself in the moment before, because nothing came.
                if code and suspect == survived:
                    return survived, message
                suspect = survived if code else suspect
        return None

    def close(self) -> None:
        """Ends the process."""
        with self._lock, suppress(BrokenPipeError):
            if self._process is not None:
                self._process.communicate()

    def _look_at(self, tails: Sequence[bytes]) -> tuple[int, subprocess.Popen[bytes]]:
        """How many footers, from the first one on, the process survives."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            for tail in tails:
                process.stdin.write(struct.pack("<q", len(tail)) + tail)
            process.stdin.flush()
        return len(process.stdout.read(len(tails))), process

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-P", str(Path(__file__).with_name("footer_trial.py"))]
            # The packages of this process, wherever they are: those of a user and of PYTHONPATH, too.
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe)
        return self._process


_footer_checker = _FooterChecker()
atexit.register(_footer_checker.close)


def check_footers(files: Sequence[DataLocation], tails: Sequence[bytes]) -> None:
    """Refuses footers that the Parquet library does not survive.

    Args:
        files: Parquet files.
        tails: The end of each, from its footer on.

    Raises:
        DataError: There is one: its columns are encrypted, or it contradicts itself.
    """
    fatal = _footer_checker.first_fatal(tails)
    if fatal is None:
        return
    place, message = fatal
    reason = message.rpartition("what():")[2].strip().rstrip(".") or "the Parquet library aborts"
    if "decrypt" in reason.lower():
        raise DataError(
            f"{files[place]} has encrypted columns, so it cannot be read ({reason}). Write it again without encryption."
        )
    raise DataError(
        f"{files[place]} has a footer that contradicts itself, so it cannot be read ({reason}). Write it again."
    )


FOOTERS_FILE = "_footers.arrow"
"""File in a data set with what is known of its files, see `Footers`. Without it, or where it is damaged, their footers
are read.
"""
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
    """Of a column of numbers, as far as the files say: least and greatest value, missing values, and how many values
    are from the least to the greatest in a row group, on an average over the rows.
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
        table: A row for each file: `path`, `version` (see `_version`), `rows` of its row groups, and for each column of
            numbers `range.NAME`: least and greatest value, missing values, and the sum over the rows of how many values
            are from the least to the greatest in their row group, which is NaN where one does not say.
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
        put_atomic(folder / FOOTERS_FILE, sink.getvalue().to_pybytes())


def load_footers(root: DataLocation) -> Footers | None:
    """What is kept beside the files of a data set, if it is there and whole.

    Raises:
        StorageError: The bucket does not answer.
    """
    with bucket_errors(root):
        try:
            data = (root / FOOTERS_FILE).read_bytes()
        except FileNotFoundError:
            return None
    try:
        table = pa.ipc.open_file(data).read_all()
        table.validate(full=True)
        schema = pa.ipc.read_schema(pa.py_buffer(table.schema.metadata[_SCHEMA]))
    except (pa.ArrowException, OSError, KeyError, TypeError):
        return None
    return Footers(schema, table.replace_schema_metadata()) if table.schema.equals(_kept_schema(schema)) else None


def read_footers(
    root: DataLocation, files: Sequence[DataLocation], kept: Footers | None = None, trusted: bool = False
) -> Footers:
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
    paths, versions = [relative_path(file, root) for file in files], [_version(file) for file in files]
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
            f"{files[0]} has several columns of the name {repeated[0]!r}; a name stands for one column. Rename or drop"
            f" one, and write the"
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
    return Footers(
        columns.schema, pa.concat_tables([kept.table, table]).take([place[path] for path in paths]).combine_chunks()
    )


class _Columns:
    """The columns that all files of a data set have.

    Args:
        schema: The columns.
        named: A file that has them, for messages.
    """

    def __init__(self, schema: pa.Schema, named: DataLocation) -> None:
        self.schema, self._named = schema, named
        self.leaves = _leaves(schema)
        self._last: tuple[Any, list[int | None]] | None = None

    def places(self, file: DataLocation, footer: pq.FileMetaData, schema: Callable[[], pa.Schema]) -> list[int | None]:
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
                f"{file} has other columns than {self._named}; a data set has one schema. Move the files apart or"
                f" ingest again."
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
    if spec_of_field(field) is not None:
        return None
    if is_number(kind):
        return str(field.name)
    return f"{field.name}.list.element" if is_numbers(kind) else None


def _read(columns: _Columns, trusted: bool, files: list[DataLocation]) -> list[_Kept]:
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


def _schema_of(file: DataLocation) -> pa.Schema:
    with _as_parquet(file):
        return pq.ParquetFile(pa.BufferReader(_tail(file))).schema_arrow


def _as_parquet(file: DataLocation) -> Any:
    return parser_errors(file, "It cannot be read as Parquet; remove it or ingest the data again.")


def _tail(file: DataLocation) -> bytes:
    """The end of a Parquet file, from its footer on; in a bucket one request asks for the size and one fetches it."""
    if not isinstance(file, Path):
        with make_fragment(file).open() as stream:
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


def _version(file: DataLocation) -> str:
    """What changes with the content of a file: size and time on a disk, in a bucket the ETag or the like that was
    listed.
    """
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
    four = [
        pa.FixedSizeListArray.from_arrays(np.ascontiguousarray(ranges[:, i]).reshape(-1), 4)
        for i in range(len(columns.leaves))
    ]
    rows = pa.array([rows for rows, _ in read], pa.list_(pa.int64()))
    named = pa.array(list(map(os.fsencode, paths)), pa.binary())
    return pa.Table.from_arrays(
        [named, pa.array(versions, pa.string()), rows, *four], schema=_kept_schema(columns.schema)
    )


def _paths(footers: Footers) -> list[str]:
    return list(map(os.fsdecode, footers.table["path"].to_pylist()))
