"""A cache of decoded rows on a node's own disk, which the workers of the node and later runs share.

The folder of a node's caches has one folder for each cache; its name is a key of everything that decides what the
decoded rows are. A cache has files for each field of the whole data set and one file of checksums. It holds a row if
the row's checksum matches its bytes; a checksum of zero marks a row that it does not hold. So concurrent writers need
no order, a writer that dies in the middle of a write leaves only rows that the cache does not hold, and rows that the
disk has damaged are read again from the data.

Rows of one size have fixed offsets in their file. Rows of different lengths are appended to a file with capacity for
somewhat more than the expected bytes of all rows; an index file has their offsets and sizes, which the checksums cover.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import inspect
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_app.config.config import digest_json
from ray_app.data.arrays import ArraySpec, from_column, to_column
from ray_app.data.bad_rows import REASON, Decode, read_reasons
from ray_app.data.reader import POSITION, Fetch, Reader, ReadSpec, RowSource, RowStream, Span, check_positions
from ray_app.plan.hashing import UInt64, hash_array, key, mix_array
from ray_app.storage.data_files import file_versions
from ray_app.storage.files import to_location
from ray_app.task.ragged import Field, Ragged, concat_fields

logger = logging.getLogger(__name__)

SUMS = "sums"
"""Name of the file of checksums."""
# Marks in place of a checksum, which is never below 2: a row that the cache does not hold, and a bad row.
_ABSENT, _BAD = 0, 1
_RAY_THRESHOLD = "RAY_local_fs_capacity_threshold"
"""Environment variable with the share of a disk above which Ray itself refuses to write to it, 0.95 by default."""
_SUM = 31
"""Salt of the keys of checksums."""
_INDEX_BYTES = 16
"""Bytes in the index file for the offset and the size of a row."""
_HEADER_BYTES = 8
"""Bytes at the beginning of a file of appended rows, which hold the offset of the next row."""
_CAPACITY_FACTOR = 1.25
"""Capacity for rows of different lengths, relative to the bytes that all rows of the probed mean length need."""


def cached_fetch(fetch: Fetch, source: RowSource, settings: str, folder: str | None, limit_gb: float) -> Fetch:
    """Returns `fetch` with a disk cache in front; `fetch` itself, with a warning, if none can be opened."""
    try:
        return open_cache(source, settings, folder, limit_gb).around(fetch)
    except OSError as error:
        logger.warning("There is no disk cache on this node, the data is read in every epoch: %s", error)
        return fetch


def open_cache(source: RowSource, settings: str, folder: str | None, limit_gb: float) -> DiskCache:
    """Opens the cache of a data set on this node; creates it where there is none yet.

    Unused caches of other data are removed, the least recently opened ones first, until all rows fit into the limit; if
    they still do not, the cache has capacity for the first rows only. The first process that opens a cache decides its
    capacity anew; the cache loses rows only where the capacity shrinks.

    Args:
        folder: Folder of the node's caches; None: `ray_app-UID/cache` in the node's temporary folder.
        limit_gb: Maximum gigabytes of all caches.

    Raises:
        OSError: The folder cannot be used or belongs to another user, or the code that decodes has no source file.
    """
    default = f"{tempfile.gettempdir()}/ray_app-{os.getuid()}/cache"
    root = Path(default if folder is None else folder).expanduser()
    cache = root / cache_key(source, settings)
    root.mkdir(parents=True, exist_ok=True)
    if folder is None:
        # Another user can predict the name of this folder and create it first.
        _check_owner(root)
    with _locked(root / "lock"):
        cache.mkdir(exist_ok=True, mode=0o700)
        _check_owner(cache)
        sums = os.open(cache / SUMS, os.O_RDWR | os.O_CREAT, 0o600)
        num_rows = source.manifest.num_rows
        if not _is_open(cache):
            base_bytes = _cache_bytes(source.fields, 0)
            row_bytes = _cache_bytes(source.fields, 1) - base_bytes
            available = _free_capacity(cache, _cache_bytes(source.fields, num_rows), limit_gb)
            capacity = max(0, min(num_rows, (available - base_bytes) // row_bytes))
            for i, spec in enumerate(source.fields.values()):
                for name, size in file_sizes(i, spec, capacity).items():
                    _resize(cache / name, size)
            os.ftruncate(sums, capacity * 8)
        # This marks the cache as open until this process closes the file or ends.
        fcntl.flock(sums, fcntl.LOCK_SH)
        os.utime(cache)
        capacity = os.fstat(sums).st_size // 8
        if capacity < num_rows:
            logger.warning(
                "The disk cache %s has room for %d of %d rows within data.cache_gb = %g; the others are read in every"
                " epoch.",
                cache,
                capacity,
                num_rows,
                limit_gb,
            )
    return DiskCache(cache, source.fields, sums)


def _cache_bytes(fields: dict[str, ArraySpec], capacity: int) -> int:
    """Returns the bytes of a cache with capacity for `capacity` rows."""
    return capacity * 8 + sum(sum(file_sizes(i, spec, capacity).values()) for i, spec in enumerate(fields.values()))


def _free_capacity(cache: Path, needed: int, limit_gb: float) -> int:
    """Removes the least recently opened caches until `needed` bytes fit, and returns the bytes available then.

    A cache that a process has open stays. `cache` itself, and what is not a cache, stay and do not count.
    """
    caches = (
        f for f in cache.parent.iterdir() if _NAME.fullmatch(f.name) and not f.is_symlink() and (f / SUMS).is_file()
    )
    others = sorted((f for f in caches if f != cache), key=lambda f: f.stat().st_mtime)
    sizes = {folder: sum(file.stat().st_size for file in folder.iterdir()) for folder in others}
    for folder in others:
        if sum(sizes.values()) + needed <= limit_gb * 1e9:
            break
        if not _is_open(folder):
            shutil.rmtree(folder)
            del sizes[folder]
    return max(0, int(limit_gb * 1e9) - sum(sizes.values()))


def _is_open(folder: Path) -> bool:
    """Returns whether a process has the cache open; call it with the lock of all caches, so that none is opening."""
    file = os.open(folder / SUMS, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _resize(path: Path, size: int) -> None:
    """Sets the size of a file; added zeros take no disk space before they are written."""
    with path.open("ab") as file:
        file.truncate(size)


def _check_owner(folder: Path) -> None:
    """Refuses a folder of a user other than this one or root: that user could change the rows in it."""
    if (owner := folder.stat().st_uid) not in (os.getuid(), 0):
        raise PermissionError(
            errno.EPERM,
            f"It belongs to another user (uid {owner}); give data.cache_dir a folder of your own",
            str(folder),
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of all caches of this node."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


_LIBRARIES = ("numpy", "torch", "torchvision", "Pillow", "simplejpeg")
_DIGITS = 32
_DECODING_CODE = (
    *(f"data/{name}.py" for name in ("dataset", "arrays", "parquet_files", "footer_trial", "reader", "bad_rows")),
    *(f"data/{name}.py" for name in ("ray_tasks", "probes")),
    "storage/data_files.py",
    "plan/manifest.py",
    "task/**/*.py",
)
"""Patterns of the application's own files, below `_APPLICATION`, that contribute to a decoded row."""
_APPLICATION = Path(__file__).parents[1]
_NAME = re.compile(rf"[0-9a-f]{{{_DIGITS}}}")
"""Name of a cache's folder, see `cache_key`."""


def cache_key(source: RowSource, settings: str) -> str:
    """Returns a digest (SHA-256, shortened) of everything that decides what the decoded rows are.

    These are the files as they are now, the task's settings and code, and the libraries. Raises OSError if a file is
    gone.
    """
    manifest, reader = source.manifest, source.reader
    facts = {
        "manifest": manifest.digest,
        "files": file_versions(to_location(reader.root), manifest.paths),
        "fields": {name: asdict(spec) for name, spec in source.fields.items()},
        "columns": reader.columns,
        "classes": dict(reader.rules.class_maps),
        "settings": settings,
        "code": _code_digests(reader.decode),
        "application": _digest(file for pattern in _DECODING_CODE for file in sorted(_APPLICATION.glob(pattern))),
        "libraries": [version(name) for name in _LIBRARIES],
    }
    return digest_json(facts)[:_DIGITS]


def _code_digests(decode: Decode) -> list[str]:
    """Returns the SHA-256 of every module that contributes to the class (or the function) that decodes."""
    owner = getattr(decode, "__self__", None)
    parts = (
        [decode] if owner is None else [c for c in type(owner).__mro__ if c.__module__ not in sys.stdlib_module_names]
    )
    digests = []
    for part in parts:
        try:
            file = inspect.getsourcefile(part)
        except TypeError as error:
            raise OSError(
                f"there is no source file of {part}, which decodes, so a change of it would not be seen"
            ) from error
        digests.append(_digest([Path(file or "")]))
    return digests


def _digest(files: Iterable[Path]) -> str:
    sha = hashlib.sha256()
    for file in files:
        sha.update(file.read_bytes())
    return sha.hexdigest()


class DiskCache:
    """The open cache of one data set; the size of the file of checksums decides its capacity in rows."""

    def __init__(self, folder: Path, fields: dict[str, ArraySpec], sums: int) -> None:
        self._folder = folder
        self._fields = fields
        self._sums = sums
        self._capacity = os.fstat(sums).st_size // 8
        self._rows: dict[str, FixedRows | RaggedRows] = {}
        self._is_open, self._is_full = True, False
        for i, (name, spec) in enumerate(fields.items()):
            self._rows[name] = (FixedRows if spec.padding is None else RaggedRows)(folder, i, spec)

    def close(self) -> None:
        """Closes the files; the rows stay on the disk."""
        if self._is_open:
            self._is_open = False
            os.close(self._sums)
            for rows in self._rows.values():
                rows.close()

    __del__ = close

    def around(self, fetch: Fetch) -> Fetch:
        """Returns a `Fetch` that serves cached rows, and fetches missing rows through `fetch` and adds them.

        If the cache has rows but they are damaged, this process reads them itself and stores them again.
        """

        def fetch_missing(reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[pa.Table]:
            is_missing = [not self._has_rows(spec) for spec in specs]
            missing = [spec for spec, missing in zip(specs, is_missing, strict=True) if missing]
            fetched = RowStream(fetch(reader, missing) if missing else iter(()))
            for spec, must_fetch in zip(specs, is_missing, strict=True):
                table = None if must_fetch else self._load(spec, reader.skips)
                if table is None:
                    table = pa.concat_tables(fetched.take(count_rows(spec)) if must_fetch else reader.read(spec))
                    self._store(spec, table)
                yield table

        return fetch_missing

    def _has_rows(self, spec: ReadSpec) -> bool:
        """Returns whether the cache has all rows according to their marks, without reading the rows."""
        return all(span.position + span.rows <= self._capacity and bool(self._marks(span).all()) for span in spec)

    def _marks(self, span: Span) -> UInt64:
        """Returns the checksums or marks of the rows, shape (rows,)."""
        marks = np.empty(span.rows, np.uint64)
        read_into(self._sums, marks, span.position * 8)
        return marks

    def _load(self, spec: ReadSpec, skips: bool) -> pa.Table | None:
        """Returns the rows as `Reader.read` yields them; None if rows are damaged, or bad without `skips`."""
        parts, reasons = [], list[str | None]()
        try:
            for span in spec:
                fields = {name: rows.read(span.position, span.rows) for name, rows in self._rows.items()}
                part = {name: values for name, values in fields.items() if values is not None}
                marks = self._marks(span)
                bad = marks == _BAD
                if (
                    len(part) < len(fields)
                    or not ((self._checksums(part, span.position) == marks) | (bad & skips)).all()
                ):
                    return None
                parts.append(part)
                reasons += [
                    self._reason_file(span.position + i).read_text() if is_bad else None
                    for i, is_bad in enumerate(bad.tolist())
                ]
        except OSError as error:
            logger.warning("The disk cache %s cannot be read, reading the data itself: %s", self._folder, error)
            return None
        encoded = [to_column(name, concat_fields([part[name] for part in parts])) for name in self._fields]
        encoded.append(to_column(POSITION, _positions(spec)))
        table = pa.Table.from_arrays([data for _, data in encoded], schema=pa.schema([field for field, _ in encoded]))
        return table.append_column(REASON, pa.array(reasons, pa.string())) if skips else table

    def _store(self, spec: ReadSpec, table: pa.Table) -> None:
        """Adds rows to the cache, unless the disk is full."""
        if self._is_full:
            return
        check_positions(table, _positions(spec))
        try:
            usage = shutil.disk_usage(self._folder)
            # Twice what Ray leaves free, so that a full cache does not stop Ray on this node.
            leave_free = 2 * max(0.0, 1 - float(os.environ.get(_RAY_THRESHOLD, "0.95")))
            if usage.free - table.nbytes < leave_free * usage.total:
                raise OSError(
                    errno.ENOSPC, f"{usage.free / 1e9:.1f} GB are free, and {leave_free:.0%} of the disk must stay so"
                )
            done = 0
            for span in spec:
                rows = min(span.rows, max(0, self._capacity - span.position))
                self._store_span(span.position, table.slice(done, rows))
                done += span.rows
        except OSError as error:
            self._is_full = True
            logger.warning(
                "The disk cache %s takes no more rows, they are read in every epoch: %s", self._folder, error
            )

    def _store_span(self, position: int, table: pa.Table) -> None:
        if not table.num_rows:
            return
        part = {name: from_column(table.column(name), spec) for name, spec in self._fields.items()}
        marks = self._checksums(part, position)
        for bad, reason in read_reasons(table, np.arange(position, position + table.num_rows)).items():
            self._reason_file(bad).write_text(reason)
            marks[bad - position] = _BAD
        for name, values in part.items():
            self._rows[name].write(position, values)
        # The checksums come last: a row counts once its checksum is written.
        write_from(self._sums, marks, position * 8)

    def _checksums(self, part: dict[str, Field], position: int) -> UInt64:
        """Returns a 64-bit checksum of each row over its bytes and its manifest position, shape (rows,).

        It is never below 2, because smaller values are marks.
        """
        rows = len(next(iter(part.values())))
        total = hash_array(_SUM, np.arange(position, position + rows))
        for name, values in part.items():
            total += self._rows[name].sums(values)
        return mix_array(total) | np.uint64(2)

    def _reason_file(self, position: int) -> Path:
        """Returns the path of the file with the reason why a row is bad."""
        return self._folder / f"bad-{position}.txt"


def count_rows(spec: ReadSpec) -> int:
    """Returns the number of rows of a read task."""
    return sum(span.rows for span in spec)


def _positions(spec: ReadSpec) -> npt.NDArray[np.int64]:
    return np.concatenate([np.arange(span.position, span.position + span.rows) for span in spec])


class FixedRows:
    """The file of a field with rows of one size, each at a fixed offset."""

    def __init__(self, folder: Path, number: int, spec: ArraySpec) -> None:
        self._number, self._spec = number, spec
        self._file = os.open(folder / field_file(number), os.O_RDWR | os.O_CREAT, 0o600)

    def close(self) -> None:
        """Closes the files."""
        os.close(self._file)

    def read(self, position: int, rows: int) -> Field | None:
        """Returns the rows from a position on, (rows, ...), with zeros for those that were never written."""
        values = np.empty((rows, *self._spec.shape), np.dtype(self._spec.dtype))
        read_into(self._file, values, position * self._spec.row_bytes)
        return values

    def write(self, position: int, values: Field) -> None:
        """Writes rows from a position on; raises OSError if there is no capacity for them."""
        assert isinstance(values, np.ndarray)
        write_from(self._file, values, position * self._spec.row_bytes)

    def sums(self, values: Field) -> UInt64:
        """Returns 64 bits for each row from all its bytes, shape (rows,)."""
        assert isinstance(values, np.ndarray)
        raw = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
        return _weighted_sums(raw, _weights(self._number, raw.shape[1]))


class RaggedRows:
    """The files of a field with rows of different lengths; see `FixedRows`."""

    def __init__(self, folder: Path, number: int, spec: ArraySpec) -> None:
        assert spec.padding is not None
        self._number = number
        self._spec = spec
        self._padding = spec.padding
        self._item_bytes = np.dtype(spec.dtype).itemsize * int(np.prod(spec.shape, dtype=np.int64))
        flags = os.O_RDWR | os.O_CREAT
        self._file = os.open(folder / field_file(number), flags, 0o600)
        self._index = os.open(folder / index_file(number), flags, 0o600)

    def close(self) -> None:
        """Closes the files."""
        os.close(self._file)
        os.close(self._index)

    def read(self, position: int, rows: int) -> Field | None:
        """Returns the rows from a position on; None if the index has an impossible offset or size."""
        index = np.empty((rows, 2), np.int64)
        read_into(self._index, index, position * _INDEX_BYTES)
        first, size = index.T
        is_invalid = (index < 0).any() or (size % self._item_bytes).any()
        if is_invalid or size.astype(float).sum() > os.fstat(self._file).st_size:
            return None
        raw, ends = np.empty(int(size.sum()), np.uint8), np.cumsum(size)
        # Rows that were written together lie next to each other, and one call reads them.
        begins = np.flatnonzero(np.append(True, first[1:] != first[:-1] + size[:-1]))
        for low, high in zip(begins, np.append(begins[1:], rows), strict=True):
            read_into(self._file, raw[ends[low] - size[low] : ends[high - 1]], int(first[low]))
        values = raw.view(self._spec.dtype).reshape(-1, *self._spec.shape)
        return Ragged(values, np.append(0, ends) // self._item_bytes, *self._padding)

    def write(self, position: int, values: Field) -> None:
        """Writes rows from a position on, see `FixedRows.write`."""
        assert isinstance(values, Ragged)
        compact = values.compact()
        offsets = compact.offsets * self._item_bytes
        first = self._reserve(int(offsets[-1]))
        write_from(self._file, compact.values, first)
        write_from(self._index, np.stack([first + offsets[:-1], np.diff(offsets)], 1), position * _INDEX_BYTES)

    def _reserve(self, size: int) -> int:
        """Returns the offset of `size` bytes that no other process writes to."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            next_offset = np.empty(1, np.int64)
            read_into(self._file, next_offset, 0)
            first = max(_HEADER_BYTES, int(next_offset[0]))
            if first + size > os.fstat(self._file).st_size:
                raise OSError(
                    errno.ENOSPC,
                    "rows are longer than the first ones were, for which there was room within data.cache_gb",
                )
            write_from(self._file, np.array([first + size]), 0)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        return first

    def sums(self, values: Field) -> UInt64:
        """Returns 64 bits for each row from its length and all its bytes, shape (rows,)."""
        assert isinstance(values, Ragged)
        raw = np.ascontiguousarray(values.compact().values).reshape(-1).view(np.uint8)
        offsets = (values.offsets - values.offsets[0]) * self._item_bytes
        weights = _weights(self._number, int(values.lengths.max(initial=0)) * self._item_bytes)
        rows = [_weighted_sums(raw[None, low:high], weights) for low, high in pairwise(offsets.tolist())]
        return hash_array(key(_SUM, self._number), -1 - values.lengths) + np.concatenate(
            [*rows, np.empty(0, np.uint64)]
        )


def file_sizes(number: int, spec: ArraySpec, capacity: int) -> dict[str, int]:
    """Returns the bytes of the files of a field, by name, with capacity for `capacity` rows."""
    if spec.padding is None:
        return {field_file(number): capacity * spec.row_bytes}
    return {
        field_file(number): _HEADER_BYTES + capacity * (round(spec.row_bytes * _CAPACITY_FACTOR) + _INDEX_BYTES),
        index_file(number): capacity * _INDEX_BYTES,
    }


def field_file(number: int) -> str:
    """Returns the name of the file of a field's rows."""
    return f"field-{number:03d}"


def index_file(number: int) -> str:
    """Returns the name of the file with the offsets and sizes of a field's rows."""
    return f"{field_file(number)}-places"


def _weights(number: int, max_bytes: int) -> UInt64:
    """Returns the weights of the bytes of a row of at most `max_bytes` bytes."""
    return hash_array(key(_SUM, number), np.arange(max_bytes // 8 + 8)) | np.uint64(1)


def _weighted_sums(raw: npt.NDArray[np.uint8], weights: UInt64) -> UInt64:
    """Returns for each row the weighted sum of its 8-byte words and of its remaining bytes.

    The weights are odd, so that every change of a single word changes the sum.
    """
    words, rest = divmod(raw.shape[1], 8)
    total: UInt64 = np.einsum("ij,j->i", raw[:, : 8 * words].view(np.uint64), weights[:words])
    return total + np.einsum("ij,j->i", raw[:, 8 * words :].astype(np.uint64), weights[words : words + rest])


def read_into(file: int, into: npt.NDArray, offset: int) -> None:
    """Fills an array from a file, with zeros behind the end of the file."""
    raw = into.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(raw):
        count = os.preadv(file, [raw[done:]], offset + done)
        if not count:
            raw[done:] = bytes(len(raw) - done)
            return
        done += count


def write_from(file: int, values: npt.NDArray, offset: int) -> None:
    """Writes an array to a file."""
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    done = 0
    while done < len(raw):
        done += os.pwrite(file, raw[done:], offset + done)
