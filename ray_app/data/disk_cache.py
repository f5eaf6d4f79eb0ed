"""A cache of decoded rows on a node's own disk, which the workers of the node and later runs share.

The folder of a node's caches has one folder for each cache; its name is a key of everything that decides what the
decoded rows are. A cache has two files. All processes append record batches of Arrow to `ROWS`, each after its size and
checksum; `INDEX` holds the end of these, and for each row the offset of its batch, or zero. A row counts if the
checksum of the batch fits and its position is the wanted one. So concurrent writers need no order, a writer that dies
in the middle of a write leaves only rows that the cache does not hold, and rows that the disk has damaged are read
again from the data.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import inspect
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from ray_app.config.config import digest_json
from ray_app.data.arrays import ArraySpec, fixed_array
from ray_app.data.bad_rows import Decode
from ray_app.data.reader import (
    POSITION,
    Fetch,
    Reader,
    ReadSpec,
    RowSource,
    RowStream,
    Span,
    check_positions,
    count_rows,
    rows_per_task,
)
from ray_app.errors import DataError
from ray_app.plan.hashing import UInt64, hash_array, key
from ray_app.plan.order import Int64
from ray_app.process import check_owner, private_folder
from ray_app.storage.data_files import file_versions

logger = logging.getLogger(__name__)

INDEX, ROWS = "index", "rows"
"""Names of the files of a cache."""
_RAY_THRESHOLD = "RAY_local_fs_capacity_threshold"
"""Environment variable with the share of a disk above which Ray itself refuses to write to it, 0.95 by default."""
_SUM = 31
"""Salt of the key of checksums."""
_HEADER_BYTES = 16
"""Bytes before a batch, which hold its size and its checksum."""
_BATCH_BYTES = 1 << 20
"""Decoded bytes of a batch; a part of it is read as a whole."""
_EXTRA_ROW_BYTES = 32
"""Bytes of a row beside its fields: in the index, its position, its reason, and its part of the batch."""
_CAPACITY_FACTOR = 1.25
"""Capacity relative to the bytes of all rows of the probed mean length, for longer rows and for small batches."""
_MIN_CAPACITY = 1 << 20
"""Capacity in bytes that a small cache has for the metadata of its batches."""


def cached_fetch(fetch: Fetch, source: RowSource, settings: str, folder: str | None, limit_gb: float) -> Fetch:
    """Returns `fetch` with a disk cache in front; `fetch` itself, with a warning, if none can be opened."""
    try:
        return open_cache(source, settings, folder, limit_gb).around(fetch)
    except OSError as error:
        logger.warning("This node has no disk cache, so the data is read in every epoch: %s", error)
        return fetch


def open_cache(source: RowSource, settings: str, folder: str | None, limit_gb: float) -> DiskCache:
    """Opens the cache of a data set on this node; creates it where there is none yet.

    Unused caches of other data are removed, the least recently opened ones first, until all rows fit into the limit; if
    they still do not, the cache has capacity for some rows only. The first process that opens a cache decides its
    capacity anew; the cache loses rows only where the capacity shrinks.

    Args:
        folder: Folder of the node's caches; None: `ray_app-UID/cache` in the node's temporary folder.
        limit_gb: Maximum gigabytes of all caches.

    Raises:
        OSError: The folder cannot be used or belongs to another user, or the code that decodes has no source file.
    """
    root = private_folder() / "cache" if folder is None else Path(folder).expanduser()
    cache = root / cache_key(source, settings)
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / "lock"):
        cache.mkdir(exist_ok=True, mode=0o700)
        check_owner(cache, "set data.cache_dir to a folder that belongs to you")
        index = os.open(cache / INDEX, os.O_RDWR | os.O_CREAT, 0o600)
        rows = os.open(cache / ROWS, os.O_RDWR | os.O_CREAT, 0o600)
        num_rows = source.manifest.num_rows
        row_bytes = _EXTRA_ROW_BYTES + sum(spec.row_bytes for spec in source.fields.values())
        if not _is_open(cache):
            needed = max(_MIN_CAPACITY, round(_CAPACITY_FACTOR * num_rows * row_bytes))
            index_bytes = 8 * (num_rows + 1)
            available = _free_capacity(cache, needed + index_bytes, limit_gb) - index_bytes
            # Added zeros take no disk space before they are written.
            os.ftruncate(rows, max(0, min(needed, available)))
            os.ftruncate(index, index_bytes if available > 0 else 0)
        # This marks the cache as open until this process closes the file or ends.
        fcntl.flock(index, fcntl.LOCK_SH)
        os.utime(cache)
    capacity = os.fstat(rows).st_size // row_bytes
    if capacity < num_rows:
        logger.warning(
            "The disk cache %s holds about %d of %d rows within data.cache_gb = %g; the other rows are read in every"
            " epoch.",
            cache,
            capacity,
            num_rows,
            limit_gb,
        )
    return DiskCache(cache, source.reader, index, rows)


def _free_capacity(cache: Path, needed: int, limit_gb: float) -> int:
    """Removes the least recently opened caches until `needed` bytes fit, and returns the bytes available then.

    A cache that a process has open stays. `cache` itself, and what is not a cache, stay and do not count.
    """
    caches = (
        f for f in cache.parent.iterdir() if _NAME.fullmatch(f.name) and not f.is_symlink() and (f / INDEX).is_file()
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
    file = os.open(folder / INDEX, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


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
        "files": file_versions(reader.root, manifest.paths),
        "fields": {name: asdict(spec) for name, spec in source.fields.items()},
        "columns": reader.columns,
        "classes": dict(reader.rules.class_maps),
        "skips": reader.skips,
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
                f"{part}, which decodes, has no source file, so a change of it would not be noticed"
            ) from error
        digests.append(_digest([Path(file or "")]))
    return digests


def _digest(files: Iterable[Path]) -> str:
    sha = hashlib.sha256()
    for file in files:
        sha.update(file.read_bytes())
    return sha.hexdigest()


class DiskCache:
    """The open cache of one data set.

    Args:
        folder: The folder of the cache.
        reader: Reads the rows of the data set.
        index: The open file `INDEX`, which this object closes.
        rows: The open file `ROWS`; its size is the capacity of the cache.
    """

    def __init__(self, folder: Path, reader: Reader, index: int, rows: int) -> None:
        self._folder = folder
        self._index, self._rows = index, rows
        self._schema, self._batch_rows = reader.schema, rows_per_task(reader.fields, _BATCH_BYTES / 1e6)
        self._is_open, self._is_full = True, False

    def close(self) -> None:
        """Closes the files; the rows stay on the disk."""
        if self._is_open:
            self._is_open = False
            os.close(self._index)
            os.close(self._rows)

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
                tables = None if must_fetch else self._load(spec)
                if tables is None:
                    table = pa.concat_tables(fetched.take(count_rows(spec)) if must_fetch else reader.read(spec))
                    self._store(spec, table)
                    tables = [table]
                yield from tables

        return fetch_missing

    def _has_rows(self, spec: ReadSpec) -> bool:
        """Returns whether the cache has all rows according to the index, without reading them."""
        size = os.fstat(self._rows).st_size
        offsets = [self._offsets(span) for span in spec]
        return all(len(part) and part.min() > 0 and part.max() < size for part in offsets)

    def _offsets(self, span: Span) -> Int64:
        """Returns the offset of the batch of each row, zero for a row that the cache does not hold, shape (rows,)."""
        return np.frombuffer(os.pread(self._index, 8 * span.rows, 8 * (span.position + 1)), np.int64)

    def _load(self, spec: ReadSpec) -> list[pa.Table] | None:
        """Returns the rows as `Reader.read` yields them; None, and removes them from the index, if some are damaged."""
        try:
            tables = [table for span in spec for table in self._read_span(span)]
            check_positions(pa.concat_tables(tables), _positions(spec))
        except OSError as error:
            logger.warning("The disk cache %s cannot be read, so the data is read directly: %s", self._folder, error)
        except (ValueError, IndexError, pa.ArrowException, DataError):
            for span in spec:
                os.pwrite(self._index, bytes(8 * span.rows), 8 * (span.position + 1))
        else:
            return tables
        return None

    def _read_span(self, span: Span) -> Iterator[pa.Table]:
        """Yields the rows of a span in one table for each batch; raises an error of any kind where one is damaged."""
        offsets = self._offsets(span)
        begins = np.flatnonzero(np.append(True, offsets[1:] != offsets[:-1])).tolist()
        for low, high in pairwise([*begins, span.rows]):
            offset = int(offsets[low])
            size, checksum = np.frombuffer(os.pread(self._rows, _HEADER_BYTES, offset), np.uint64).tolist()
            if not 0 < size <= os.fstat(self._rows).st_size - offset:
                raise ValueError(f"A batch has {size} bytes")
            data = os.pread(self._rows, size, offset + _HEADER_BYTES)
            if _checksum(data) != checksum:
                raise ValueError("A batch has another checksum")
            table = pa.Table.from_batches([pa.ipc.read_record_batch(pa.py_buffer(data), self._schema)])
            first = int(fixed_array(table.column(POSITION), ArraySpec("<i8", ()))[0])
            yield table.slice(span.position + low - first, high - low)

    def _store(self, spec: ReadSpec, table: pa.Table) -> None:
        """Adds rows to the cache, unless the disk or the cache is full."""
        if self._is_full:
            return
        check_positions(table, _positions(spec))
        try:
            usage = shutil.disk_usage(self._folder)
            # Twice what Ray leaves free, so that a full cache does not stop Ray on this node.
            leave_free = 2 * max(0.0, 1 - float(os.environ.get(_RAY_THRESHOLD, "0.95")))
            if usage.free - table.nbytes < leave_free * usage.total:
                raise OSError(
                    errno.ENOSPC, f"{usage.free / 1e9:.1f} GB are free, but {leave_free:.0%} of the disk must stay free"
                )
            done = 0
            for span in spec:
                # One call may fetch the same rows for two epochs.
                is_stored = self._has_rows((span,))
                for first in range(0, 0 if is_stored else span.rows, self._batch_rows):
                    rows = min(self._batch_rows, span.rows - first)
                    self._append(span.position + first, table.slice(done + first, rows))
                done += span.rows
        except OSError as error:
            self._is_full = True
            logger.warning(
                "The disk cache %s accepts no more rows, so they are read in every epoch: %s", self._folder, error
            )

    def _append(self, position: int, table: pa.Table) -> None:
        """Appends a batch of rows from a position on; raises OSError if there is no capacity for it."""
        [batch] = table.combine_chunks().to_batches()
        data = batch.serialize()
        offset = self._reserve(_HEADER_BYTES + data.size)
        header = np.array([data.size, _checksum(data)], np.uint64)
        if os.pwritev(self._rows, [header.data, data], offset) < _HEADER_BYTES + data.size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        # The index comes last: a row counts once it is there.
        os.pwrite(self._index, np.full(len(batch), offset, np.int64).data, 8 * (position + 1))

    def _reserve(self, size: int) -> int:
        """Returns the offset of `size` bytes that no other process writes to; it is never zero."""
        fcntl.flock(self._rows, fcntl.LOCK_EX)
        try:
            first = max(_HEADER_BYTES, int.from_bytes(os.pread(self._index, 8, 0), "little"))
            if first + size > os.fstat(self._rows).st_size:
                raise OSError(errno.ENOSPC, "the rows do not fit into data.cache_gb")
            os.pwrite(self._index, (first + size).to_bytes(8, "little"), 0)
        finally:
            fcntl.flock(self._rows, fcntl.LOCK_UN)
        return first


def _positions(spec: ReadSpec) -> Int64:
    return np.concatenate([np.arange(span.position, span.position + span.rows) for span in spec])


@functools.lru_cache(maxsize=32)
def _weights(words: int) -> UInt64:
    """Returns odd weights, so that every change of a single word changes the checksum, shape (words,)."""
    return hash_array(key(_SUM), np.arange(words)) | np.uint64(1)


def _checksum(data: bytes | pa.Buffer) -> int:
    """Returns the weighted sum of the 8-byte words of a batch."""
    words = np.frombuffer(data, np.uint64)
    return int(np.einsum("i,i->", words, _weights(1 << len(words).bit_length())[: len(words)]))
