"""Parquet files of a data set: reading one file, checking footers, and the digest of all footers.

`DataFile` reads one file and the columns in the names of its folders; an error names the column that cannot be read.

Some footers make the Parquet library abort its process. `check_footers` refuses them: a child process
(`footer_trial.py`) reads every footer first. Its start takes a fifth of a second, so it serves all data sets that are
opened at about the same time.

`Footers` keeps only the rows of row groups and the ranges of columns. An ingest writes it beside its shards, so that
opening a data set reads only the footers of files that have changed since.
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
from collections.abc import Callable, Iterator, Sequence
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

from ray_app.data.arrays import describe_other_columns, is_number, is_numbers, spec_of_field
from ray_app.data.classes import map_classes, stored_classes
from ray_app.data.plain_columns import is_plain, plain_schema, to_plain
from ray_app.errors import BadRowError, DataError, StorageError
from ray_app.plan.manifest import (
    Manifest,
    PartitionValue,
    ReadRules,
    parse_partition_value,
    parse_partitions,
)
from ray_app.storage.data_files import (
    ObjectReader,
    Root,
    bucket_errors,
    locate,
    open_parquet,
    parser_errors,
    relative_path,
    to_read_error,
)
from ray_app.storage.files import Location, put_atomic
from ray_app.storage.object_stores import CONNECTIONS

_ADVICE = "The file cannot be read as Parquet; restore it or ingest the data again."
_MAX_OPEN = 4
"""Maximum number of open files of a data set."""
_TYPES = {"int64": pa.int64(), "double": pa.float64(), "string": pa.string()}


class DataFile:
    """An open Parquet file, also a context manager; with `buffer_bytes` 0 row groups are fetched as a whole."""

    def __init__(self, root: Root, path: str, rules: ReadRules, buffer_bytes: int = 0) -> None:
        self._location = locate(root, path)
        self._path = path
        self._file = open_parquet(self._location, buffer_bytes)
        self._is_plain = is_plain(self._file.schema_arrow)
        self._stored_columns = set(self._file.schema_arrow.names)
        self._class_map = rules.class_maps.get(path)
        self._kept_rows = partial(rules.kept_rows, path)
        self._texts = parse_partitions(path) if rules.partitions else {}
        self._values: dict[str, PartitionValue] = {
            name: parse_partition_value(self._texts[name], kind) for name, kind in rules.partitions.items()
        }
        self._fields = {name: pa.field(name, _TYPES[kind]) for name, kind in rules.partitions.items()}

    def __enter__(self) -> DataFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._file.close(force=True)

    @property
    def schema(self) -> pa.Schema:
        """The columns of the file by `plain_schema`, and the partition columns that it does not store itself."""
        added = [field for name, field in self._fields.items() if name not in self._stored_columns]
        return pa.schema([*plain_schema(self._file.schema_arrow), *added])

    def read_row_group(self, index: int, columns: Sequence[str]) -> pa.Table:
        """Returns the rows of a row group by `to_plain`; a column `a.b` is a field of a column of objects.

        Raises:
            DataError: A column is damaged, or is not in the file.
            OSError: The storage failed.
        """
        stored = self._stored_names(columns)
        try:
            table = self._file.read_row_group(index, columns=stored, use_threads=False)
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise self._explain(error, index, stored) from error
        return self._apply_rules(table, columns, index, 0)

    def read(self, columns: Sequence[str]) -> pa.Table:
        """Returns the rows of all row groups; see `read_row_group`."""
        groups = [self.read_row_group(index, columns) for index in range(self._file.metadata.num_row_groups)]
        return pa.concat_tables(groups) if groups else self.schema.empty_table().select(list(columns))

    def rows_within(self, index: int, columns: Sequence[str], num_bytes: int) -> int:
        """Returns how many rows of a row group have about `num_bytes` bytes in these columns, at least 1."""
        group = self._file.metadata.row_group(index)
        chunks = (group.column(i) for i in range(group.num_columns))
        prefixes = tuple(f"{name}." for name in columns)
        size = sum(chunk.total_uncompressed_size for chunk in chunks if f"{chunk.path_in_schema}.".startswith(prefixes))
        return max(1, num_bytes * group.num_rows // max(1, size))

    def iter_batches(self, index: int, columns: Sequence[str], rows: int) -> Iterator[pa.Table]:
        """Yields the rows of a row group from its beginning, at most `rows` at a time; see `read_row_group`."""
        stored, first = self._stored_names(columns), 0
        batches = self._file.iter_batches(rows, row_groups=[index], columns=stored, use_threads=False)
        while True:
            try:
                batch = next(batches, None)
            except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
                raise self._explain(error, index, stored) from error
            if batch is None:
                return
            yield self._apply_rules(pa.Table.from_batches([batch]), columns, index, first)
            first += batch.num_rows

    def _stored_names(self, columns: Sequence[str]) -> list[str]:
        """Returns the columns that the file itself stores; raises DataError if neither it nor its folders have one."""
        stored = dict.fromkeys(name for name in columns if {name, name.partition(".")[0]} & self._stored_columns)
        if unknown := [name for name in columns if name not in stored and name not in self._values]:
            raise DataError(
                f"{self._location} has no column {unknown[0]!r}; its columns are"
                f" {', '.join(sorted(self.schema.names))}. The file has changed since the start: restore it or ingest"
                " the data again."
            )
        return list(stored)

    def _apply_rules(self, table: pa.Table, columns: Sequence[str], index: int, first: int) -> pa.Table:
        """Returns the kept rows with plain types, the partition columns among `columns`, and the data set's classes.

        Raises BadRowError for a stored value that the name of the folder contradicts.
        """
        table = table if self._is_plain else to_plain(table, columns)
        if self._class_map is not None:
            table = map_classes(table, self._class_map, self._file.schema_arrow.names)
        for name in columns:
            if name not in self._values:
                continue
            field = self._fields[name]
            if name not in self._stored_columns:
                table = table.append_column(field, pa.repeat(pa.scalar(self._values[name], field.type), table.num_rows))
            elif (row := self._first_mismatch(table.column(name), self._texts[name])) is not None:
                value = table.column(name)[row].as_py()
                reason = f"column {name!r} is {value!r}, but the folder's name has {self._texts[name]!r}; correct one"
                raise BadRowError(self._path, index, first + row, reason)
        kept = self._kept_rows(index, first, table.num_rows)
        return table if kept is None else table.filter(pa.array(kept))

    @staticmethod
    def _first_mismatch(column: pa.ChunkedArray, text: str | None) -> int | None:
        """Returns the first row that has another value than the name of the folder, or None."""
        try:
            expected = pa.scalar(text, pa.string()).cast(column.type)
            is_equal = column.is_null() if text is None else pc.fill_null(pc.equal(column, expected), False)
        except NotImplementedError:
            # Arrow cannot convert text to this type (half precision), so there is nothing to compare.
            return None
        except pa.ArrowException:
            # The text in the folder's name is not a value of the column's type.
            return 0 if len(column) else None
        row = pc.index(is_equal, False).as_py()
        return row if row >= 0 else None

    def _explain(self, error: Exception, index: int, columns: Sequence[str]) -> Exception:
        """Returns the error of reading a row group with the column at fault; a failure of the storage unchanged."""
        if isinstance(to_read_error(self._location, error, _ADVICE), StorageError):
            return error
        group_name = f"{self._location}, row group {index}"
        for name in columns:
            try:
                self._file.read_row_group(index, columns=[name], use_threads=False)
            except (OSError, pa.ArrowException, UnicodeDecodeError) as column_error:
                return to_read_error(f"{group_name}, column {name!r}", column_error, _ADVICE)
        return to_read_error(group_name, error, _ADVICE)


class OpenFiles:
    """The files of a data set that were read last, of which at most `_MAX_OPEN` are open at a time; see `DataFile`."""

    def __init__(self, root: Root, rules: ReadRules) -> None:
        self._root, self._rules = root, rules
        self._open: OrderedDict[str, DataFile] = OrderedDict()

    def get(self, path: str) -> DataFile:
        """Returns a file; opens it unless it is open."""
        if path not in self._open:
            self._open[path] = DataFile(self._root, path, self._rules)
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(path)
        return self._open[path]

    def close(self) -> None:
        """Closes all files."""
        while self._open:
            self._open.popitem()[1].close()


class _FooterChecker:
    """The child process that reads footers first; it is started when it is needed, and threads take turns."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def first_fatal(self, tails: Sequence[bytes]) -> tuple[int, str] | None:
        """Returns the index of the first footer that ends the process, and its message; None if it survives all.

        Another process may also have ended it, so a footer is fatal only if two processes die of it.
        """
        survived, suspect = 0, -1
        with self._lock:
            while survived < len(tails):
                count, process = self._read_in_child(tails[survived:])
                survived += count
                if survived == len(tails):
                    break
                assert process.stderr is not None
                message, code = process.stderr.read().decode(errors="replace"), process.wait()
                if code > 0:
                    raise RuntimeError(f"The process that tries Parquet footers ended with exit code {code}: {message}")
                # With exit code 0 the process ended itself just before, because no footer had arrived.
                if code and suspect == survived:
                    return survived, message
                suspect = survived if code else suspect
        return None

    def close(self) -> None:
        """Ends the process."""
        with self._lock, suppress(BrokenPipeError):
            if self._process is not None:
                self._process.communicate()

    def _read_in_child(self, tails: Sequence[bytes]) -> tuple[int, subprocess.Popen[bytes]]:
        """Returns how many footers, from the first one on, the process survives, and the process."""
        process = self._running_process()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            for tail in tails:
                process.stdin.write(struct.pack("<q", len(tail)) + tail)
            process.stdin.flush()
        return len(process.stdout.read(len(tails))), process

    def _running_process(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-P", str(Path(__file__).with_name("footer_trial.py"))]
            # The child imports pyarrow from where this process does: also from the user's packages or PYTHONPATH.
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(
                command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        return self._process


_footer_checker = _FooterChecker()
atexit.register(_footer_checker.close)


def check_footers(files: Sequence[Location], tails: Sequence[bytes]) -> None:
    """Raises DataError for a footer that makes the Parquet library abort its process.

    Its columns are encrypted, or it contradicts itself. `tails` has the end of each file from its footer on.
    """
    fatal = _footer_checker.first_fatal(tails)
    if fatal is None:
        return
    index, message = fatal
    reason = message.rpartition("what():")[2].strip().rstrip(".") or "the Parquet library aborts"
    if "decrypt" in reason.lower():
        raise DataError(
            f"{files[index]} has encrypted columns, so it cannot be read ({reason}). Write it without encryption."
        )
    raise DataError(
        f"{files[index]} has a footer that contradicts itself, so it cannot be read ({reason}). Write the file again."
    )


FOOTERS_FILE = "_footers.arrow"
"""File in a data set that stores its `Footers`; where it is missing or damaged, all footers are read."""
_DISK_THREADS = 8
_FILES_PER_TASK = 64
_TAIL_BYTES = 64 << 10
_SCHEMA = b"ray_app.schema"
_NUMBERS = (int, float, bool)
# Columns of a range as it is stored, see `Footers`.
_MIN, _MAX, _NULLS, _SPANS = range(4)
_FileFacts = tuple[list[int], npt.NDArray[np.float64], str]
"""Rows of the row groups of a file, its ranges, shape (columns of numbers, 4), and its classes; see `Footers`."""


@dataclass(frozen=True)
class Range:
    """The values of a column of numbers, as far as the footers have statistics.

    Args:
        group_span: Number of integers from the smallest to the greatest value of a row group, as a mean over the rows.
    """

    min: float | None = None
    max: float | None = None
    nulls: int | None = None
    group_span: float | None = None


@dataclass(frozen=True)
class Footers:
    """The facts that are kept of the footers of a data set.

    Args:
        table: A row for each file: `path`, `version` (see `_version`), `rows` of its row groups, `classes` (as JSON, ""
            without names; missing where they are those of the metadata of `schema`), and for each column of numbers
            `range.NAME` with four numbers: smallest and greatest value, missing values, and the sum over the
            rows of the span of their row group (the number of integers from its smallest to its greatest value), which
            is NaN where a row group has no statistics.
    """

    schema: pa.Schema
    table: pa.Table

    @property
    def manifest(self) -> Manifest:
        """The row groups of the data set."""
        return Manifest.from_files(zip(self.paths, self.table["rows"].to_pylist(), strict=True))

    @property
    def paths(self) -> list[str]:
        """The path of each file."""
        return list(map(os.fsdecode, self.table["path"].to_pylist()))

    @property
    def classes(self) -> list[str]:
        """The names of the classes of each file, see `stored_classes`."""
        shared = stored_classes(self.schema.metadata)
        return [shared if classes is None else classes for classes in self.table["classes"].to_pylist()]

    def range_of(self, field: pa.Field) -> Range:
        """Returns the range of a column over all files."""
        name = _leaf(field)
        if name is None:
            return Range()
        ranges = self.table[f"range.{name}"].combine_chunks().flatten().to_numpy().reshape(-1, 4)
        nulls, spans = int(ranges[:, _NULLS].sum()), float(ranges[:, _SPANS].sum())
        if math.isnan(spans) or not np.isfinite(ranges[:, _MIN]).any():
            return Range(nulls=nulls)
        rows = int(self.table["rows"].combine_chunks().flatten().to_numpy().sum())
        return Range(float(ranges[:, _MIN].min()), float(ranges[:, _MAX].max()), nulls, spans / rows)

    def put(self, folder: Location) -> None:
        """Writes the facts into a folder, beside the files."""
        table = self.table.replace_schema_metadata({_SCHEMA: self.schema.serialize().to_pybytes()})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as file:
            file.write_table(table)
        put_atomic(folder / FOOTERS_FILE, sink.getvalue().to_pybytes())


def load_footers(root: Location) -> Footers | None:
    """Returns the `Footers` that an ingest has stored in a data set; None if they are missing or damaged."""
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
    return Footers(schema, table.replace_schema_metadata()) if table.schema.equals(_table_schema(schema)) else None


def read_footers(
    root: Location, files: Sequence[Location], kept: Footers | None = None, trusted: bool = False
) -> Footers:
    """Reads the footers of files, many at a time, and returns their facts.

    Args:
        files: The files, as they were listed; at least one.
        kept: Facts from an earlier reading: footers of files that have not changed since are not read.
        trusted: Whether the application itself has just written the files.

    Raises:
        DataError: A file is not Parquet, or the files have different columns.
    """
    paths, versions = [relative_path(file, root) for file in files], [_version(file) for file in files]
    version_of = dict(zip(paths, versions, strict=True))
    kept_files = list(zip(kept.paths, kept.table["version"].to_pylist(), strict=True)) if kept is not None else []
    # The row of each unchanged file in the kept table; later also of the newly read files behind it.
    table_row = {path: i for i, (path, version) in enumerate(kept_files) if version_of.get(path) == version}
    if kept is not None and table_row:
        if list(table_row) == paths == kept.paths:
            return kept
        unchanged = next(file for file, path in zip(files, paths, strict=True) if path in table_row)
        columns = _SharedColumns(kept.schema, unchanged)
    else:
        columns, kept = _SharedColumns(_schema_of(files[0]), files[0]), None
    if repeated := sorted(name for name, times in Counter(plain_schema(columns.schema).names).items() if times > 1):
        raise DataError(
            f"{files[0]} has several columns of the name {repeated[0]!r}; each column needs its own name. Rename or"
            " drop one, and write the file again."
        )
    unread = [i for i, path in enumerate(paths) if path not in table_row]
    threads = _DISK_THREADS if isinstance(root, Path) else CONNECTIONS
    size = min(_FILES_PER_TASK, max(1, len(unread) // (4 * threads)))
    groups = [[files[i] for i in unread[low : low + size]] for low in range(0, len(unread), size)]
    with ThreadPoolExecutor(threads) as pool:
        facts = [file for group in pool.map(partial(_read_group, columns, trusted), groups) for file in group]
    table = _facts_table(columns, [paths[i] for i in unread], [versions[i] for i in unread], facts)
    if kept is None:
        return Footers(columns.schema, table)
    table_row |= {paths[i]: kept.table.num_rows + n for n, i in enumerate(unread)}
    merged = pa.concat_tables([kept.table, table]).take([table_row[path] for path in paths])
    return Footers(columns.schema, merged.combine_chunks())


class _SharedColumns:
    """The columns that all files of a data set have."""

    def __init__(self, schema: pa.Schema, example: Location) -> None:
        self.schema, self._example = schema, example
        self.leaves = _leaves(schema)
        self._last: tuple[Any, list[int | None]] | None = None

    def leaf_indices(
        self, file: Location, footer: pq.FileMetaData, schema: Callable[[], pa.Schema]
    ) -> list[int | None]:
        """Returns the index of each column of numbers in the row groups of a file, or None where it has none.

        `schema` returns the columns of the file, which takes a while. Raises DataError if these are other columns.
        """
        group = footer.row_group(0) if footer.num_row_groups else None
        stored = [group.column(i) for i in range(footer.num_columns)] if group else []
        layout = footer.metadata, [(column.path_in_schema, column.physical_type) for column in stored]
        if self._last is not None and layout == self._last[0]:
            return self._last[1]
        if others := describe_other_columns(schema(), self.schema):
            raise DataError(
                f"{file} has other columns than {self._example}: {others}. A data set has one schema. Move the files"
                " into separate folders, or ingest again."
            )
        index_of = {path: i for i, (path, _) in enumerate(layout[1])}
        indices = [index_of.get(name) for name in self.leaves]
        # Only with Arrow's schema in the metadata does an equal layout imply equal types of the columns.
        if stored and b"ARROW:schema" in (footer.metadata or {}):
            self._last = layout, indices
        return indices


def _leaves(schema: pa.Schema) -> list[str]:
    return list(dict.fromkeys(name for name in map(_leaf, plain_schema(schema)) if name is not None))


def _leaf(field: pa.Field) -> str | None:
    """Returns the path of a column's numbers in a Parquet schema; None for a column without a range."""
    kind = field.type
    if spec_of_field(field) is not None:
        return None
    if is_number(kind):
        return str(field.name)
    return f"{field.name}.list.element" if is_numbers(kind) else None


def _read_group(columns: _SharedColumns, trusted: bool, files: list[Location]) -> list[_FileFacts]:
    """Returns the facts of the footers of some files."""
    facts, tails = [], list[bytes]()
    for file in files:
        with _as_parquet(file):
            tails.append(read_tail(file))
    if not trusted:
        check_footers(files, tails)
    for file, tail in zip(files, tails, strict=True):
        with _as_parquet(file):
            parquet_file = pq.ParquetFile(pa.BufferReader(tail))
            footer = parquet_file.metadata
            # The schema comes from the file: `footer.schema` would make the footer refer to itself and stay in memory.
            indices = columns.leaf_indices(file, footer, partial(getattr, parquet_file, "schema_arrow"))
            facts.append(file_facts(footer, indices))
    return facts


def _schema_of(file: Location) -> pa.Schema:
    with _as_parquet(file):
        return pq.ParquetFile(pa.BufferReader(read_tail(file))).schema_arrow


def _as_parquet(file: Location) -> Any:
    return parser_errors(file, "The file cannot be read as Parquet; remove it or ingest the data again.")


def read_tail(file: Location) -> bytes:
    """Returns the end of a Parquet file from its footer on, in a bucket of a listed file by one request."""
    if not isinstance(file, Path):
        reader = ObjectReader(file)
        return _tail_of(reader.size, lambda count, offset: reader.read_at(offset, count))
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return _tail_of(os.fstat(descriptor).st_size, lambda count, offset: os.pread(descriptor, count, offset))
    finally:
        os.close(descriptor)


def _tail_of(size: int, read: Callable[[int, int], bytes]) -> bytes:
    """Returns the end of a file from its footer on; `read` gets a number of bytes and an offset."""
    begin = max(0, size - _TAIL_BYTES)
    tail = read(size - begin, begin)
    footer = 8 + int.from_bytes(tail[-8:-4], "little")
    if footer > size:
        return tail
    return tail[-footer:] if footer <= len(tail) else read(footer, size - footer)


def _version(file: Location) -> str:
    """Returns a text that changes with the content of a file: size and time on a disk, the listed ETag in a bucket."""
    if not isinstance(file, Path):
        return file.etag
    stat = file.stat()
    return f"{stat.st_size}-{stat.st_mtime_ns}"


def file_facts(footer: pq.FileMetaData, indices: list[int | None]) -> _FileFacts:
    """Returns the facts of a file; `indices` has the column with each statistic, or None if there is none."""
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    rows = [group.num_rows for group in groups]
    filled = [(group, group_rows) for group, group_rows in zip(groups, rows, strict=True) if group_rows]
    return rows, np.array([_range(filled, index) for index in indices], np.float64), stored_classes(footer.metadata)


def _range(groups: list[tuple[pq.RowGroupMetaData, int]], index: int | None) -> tuple[float, float, int, float]:
    """Returns the four numbers of a column in a file, see `Footers`, from its row groups and their rows."""
    low, high = math.inf, -math.inf
    nulls, spans = 0, 0.0
    for group, rows in groups:
        statistics: Any = group.column(index).statistics if index is not None else None
        if statistics is not None:
            nulls += statistics.null_count or 0
            # A row group of empty lists or missing values has no range.
            if not statistics.num_values and statistics.null_count:
                continue
        group_min: Any = statistics.min if statistics is not None and statistics.has_min_max else None
        # pyarrow returns the bytes of numbers of half precision.
        if type(group_min) not in _NUMBERS:
            spans = math.nan
            continue
        group_max: Any = statistics.max
        low, high = low if low < group_min else float(group_min), high if high > group_max else float(group_max)
        spans += (float(group_max) - float(group_min) + 1) * rows
    return low, high, nulls, spans


def _table_schema(schema: pa.Schema) -> pa.Schema:
    ranges = [pa.field(f"range.{name}", pa.list_(pa.float64(), 4)) for name in _leaves(schema)]
    stored = {"path": pa.binary(), "version": pa.string(), "rows": pa.list_(pa.int64()), "classes": pa.string()}
    return pa.schema([*map(pa.field, *zip(*stored.items(), strict=True)), *ranges])


def _facts_table(columns: _SharedColumns, paths: list[str], versions: list[str], facts: list[_FileFacts]) -> pa.Table:
    """Returns the table of `Footers` with a row for each file."""
    ranges = np.array([file_ranges for _, file_ranges, _ in facts]).reshape(len(facts), len(columns.leaves), 4)
    range_columns = [
        pa.FixedSizeListArray.from_arrays(np.ascontiguousarray(ranges[:, i]).reshape(-1), 4)
        for i in range(len(columns.leaves))
    ]
    rows = pa.array([rows for rows, _, _ in facts], pa.list_(pa.int64()))
    shared = stored_classes(columns.schema.metadata)
    classes = pa.array([None if names == shared else names for _, _, names in facts], pa.string())
    path_column = pa.array(list(map(os.fsencode, paths)), pa.binary())
    return pa.Table.from_arrays(
        [path_column, pa.array(versions, pa.string()), rows, classes, *range_columns],
        schema=_table_schema(columns.schema),
    )
