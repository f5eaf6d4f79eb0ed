"""Decoded rows on a node's own disk: filled while rows are read for the first time, shared by the workers of the node
and by later runs.

A cache is a folder with the files of each field of the whole data set (`disk_cache_fields.py`), and one file of
checksums. A row is held if its checksum fits its bytes; a checksum of zero says that it is not. So writers need no
order among each other, whoever dies in the middle of a write leaves rows that are not held, and what a disk has spoilt
is read anew.

The files of one field in a disk cache: rows of one size beside each other, or rows of different lengths wherever there
was room.

Rows of different lengths are appended to a file that has room for somewhat more than is expected of all rows; a second
file says where each begins and how long it is. What these say is not trusted more than the rows: the checksum of a row
is one of its length, too.

The folder of a node's disk caches: which belongs to which data, what may be removed, and how much room one gets.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import inspect
import json
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

from ray_app.data.arrays import ArraySpec, from_column, to_column
from ray_app.data.bad_rows import REASON, Decode, read_reasons
from ray_app.data.reader import POSITION, Fetch, Reader, ReadSpec, RowSource, RowStream, Span, check_positions
from ray_app.plan.hashing import UInt64, hash_array, key, mix_array
from ray_app.storage.data_files import file_versions, locate_data
from ray_app.task.ragged import Field, Ragged, concat_fields

_SUM = 31  # salt: what a key is for
_PLACE = 16
"""Bytes that say where a row of its own length is, and how long it is."""
_BEGIN = 8
"""Bytes before the first of them, which say where the next one goes."""
_SPARE = 1.25
"""Room for rows of different lengths, over what those that were looked at need."""


class FixedRows:
    """Rows of one size, each at its place.

    Args:
        folder: Of the cache.
        number: Of the field.
        spec: What a row holds.
    """

    def __init__(self, folder: Path, number: int, spec: ArraySpec) -> None:
        self._number, self._spec = number, spec
        self._file = os.open(folder / field_file(number), os.O_RDWR | os.O_CREAT, 0o600)

    def close(self) -> None:
        """Lets go of the files."""
        os.close(self._file)

    def read(self, position: int, rows: int) -> Field | None:
        """Rows from a position on, (rows, ...); zeros, where there are none."""
        values = np.empty((rows, *self._spec.shape), np.dtype(self._spec.dtype))
        read_into(self._file, values, position * self._spec.row_bytes)
        return values

    def write(self, position: int, values: Field) -> None:
        """Puts rows from a position on.

        Raises:
            OSError: There is no room for them.
        """
        assert isinstance(values, np.ndarray)
        write_from(self._file, values, position * self._spec.row_bytes)

    def sums(self, values: Field) -> UInt64:
        """64 bits for each row from all its bytes, shape (rows,)."""
        assert isinstance(values, np.ndarray)
        raw = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
        return _weighed(raw, _weights(self._number, raw.shape[1]))


class RaggedRows:
    """Rows of different lengths; see `FixedRows`."""

    def __init__(self, folder: Path, number: int, spec: ArraySpec) -> None:
        assert spec.padding is not None
        self._number, self._spec, self._padding = number, spec, spec.padding
        self._item = np.dtype(spec.dtype).itemsize * int(np.prod(spec.shape, dtype=np.int64))
        flags = os.O_RDWR | os.O_CREAT
        self._file, self._places = (
            os.open(folder / name, flags, 0o600) for name in (field_file(number), index_file(number))
        )

    def close(self) -> None:
        """See `FixedRows.close`."""
        os.close(self._file)
        os.close(self._places)

    def read(self, position: int, rows: int) -> Field | None:
        """Rows from a position on; None if they cannot be where it is said that they are."""
        places = np.empty((rows, 2), np.int64)
        read_into(self._places, places, position * _PLACE)
        first, size = places.T
        if (places < 0).any() or (size % self._item).any() or size.astype(float).sum() > os.fstat(self._file).st_size:
            return None
        raw, ends = np.empty(int(size.sum()), np.uint8), np.cumsum(size)
        begins = np.flatnonzero(
            np.append(True, first[1:] != first[:-1] + size[:-1])
        )  # rows that were written together are
        for low, high in zip(begins, np.append(begins[1:], rows), strict=True):
            read_into(self._file, raw[ends[low] - size[low] : ends[high - 1]], int(first[low]))
        values = raw.view(self._spec.dtype).reshape(-1, *self._spec.shape)
        return Ragged(values, np.append(0, ends) // self._item, *self._padding)

    def write(self, position: int, values: Field) -> None:
        """See `FixedRows.write`."""
        assert isinstance(values, Ragged)
        own = values.compact()
        offsets = own.offsets * self._item
        first = self._reserved(int(offsets[-1]))
        write_from(self._file, own.values, first)
        write_from(self._places, np.stack([first + offsets[:-1], np.diff(offsets)], 1), position * _PLACE)

    def _reserved(self, size: int) -> int:
        """The place of so many bytes that nobody else writes to."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            taken = np.empty(1, np.int64)
            read_into(self._file, taken, 0)
            first = max(_BEGIN, int(taken[0]))
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
        """See `FixedRows.sums`."""
        assert isinstance(values, Ragged)
        raw = np.ascontiguousarray(values.compact().values).reshape(-1).view(np.uint8)
        offsets, weights = (
            (values.offsets - values.offsets[0]) * self._item,
            _weights(self._number, int(values.lengths.max(initial=0)) * self._item),
        )
        rows = [_weighed(raw[None, low:high], weights) for low, high in pairwise(offsets.tolist())]
        return hash_array(key(_SUM, self._number), -1 - values.lengths) + np.concatenate(
            [*rows, np.empty(0, np.uint64)]
        )


def open_field(folder: Path, number: int, spec: ArraySpec) -> FixedRows | RaggedRows:
    """Opens the files of a field."""
    return (FixedRows if spec.padding is None else RaggedRows)(folder, number, spec)


def file_sizes(number: int, spec: ArraySpec, room: int) -> dict[str, int]:
    """Bytes of the files of a field, by name, with room for so many rows."""
    if spec.padding is None:
        return {field_file(number): room * spec.row_bytes}
    return {
        field_file(number): _BEGIN + room * (round(spec.row_bytes * _SPARE) + _PLACE),
        index_file(number): room * _PLACE,
    }


def field_file(number: int) -> str:
    """Name of the file of a field."""
    return f"field-{number:03d}"


def index_file(number: int) -> str:
    """Name of the file that says where its rows are."""
    return f"{field_file(number)}-places"


def _weights(number: int, most: int) -> UInt64:
    """What the bytes of a row of at most so many count."""
    return hash_array(key(_SUM, number), np.arange(most // 8 + 8)) | np.uint64(1)


def _weighed(raw: npt.NDArray[np.uint8], weights: UInt64) -> UInt64:
    """Every eight bytes count times a number of their own: odd, so that no change of only one of them goes unseen."""
    words, rest = divmod(raw.shape[1], 8)
    total: UInt64 = np.einsum("ij,j->i", raw[:, : 8 * words].view(np.uint64), weights[:words])
    return total + np.einsum("ij,j->i", raw[:, 8 * words :].astype(np.uint64), weights[words : words + rest])


def read_into(file: int, into: npt.NDArray, offset: int) -> None:
    """Fills an array; what the file does not have is zeros."""
    raw = into.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(raw):
        got = os.preadv(file, [raw[done:]], offset + done)
        if not got:
            raw[done:] = bytes(len(raw) - done)
            return
        done += got


def write_from(file: int, values: npt.NDArray, offset: int) -> None:
    """Writes an array."""
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    done = 0
    while done < len(raw):
        done += os.pwrite(file, raw[done:], offset + done)


logger = logging.getLogger(__name__)

SUMS = "sums"
_ABSENT, _BAD = 0, 1
"""In the place of checksums, which are never below 2: a row that is not held, and one that cannot be decoded."""
_LEAVE_FREE = 0.1
"""Share of the disk that stays free: Ray itself stops working on a node whose disk is 95 % full."""


class DiskCache:
    """The open cache of one data set; see the module.

    Args:
        folder: Its files, made by `ray_app.data.disk_cache.open_cache`.
        fields: What a decoded row looks like.
        sums: The open file of checksums; its length says how many rows the cache has room for.
    """

    def __init__(self, folder: Path, fields: dict[str, ArraySpec], sums: int) -> None:
        self._folder, self._fields, self._sums = folder, fields, sums
        self._room = os.fstat(sums).st_size // 8
        self._rows: dict[str, FixedRows | RaggedRows] = {}
        self._is_open, self._is_full = True, False
        for i, (name, spec) in enumerate(fields.items()):
            self._rows[name] = open_field(folder, i, spec)

    def close(self) -> None:
        """Lets go of the files; what they hold stays."""
        if self._is_open:
            self._is_open = False
            os.close(self._sums)
            for rows in self._rows.values():
                rows.close()

    __del__ = close

    def around(self, fetch: Fetch) -> Fetch:
        """Fetches what is held from here, and through `fetch` what is not; that is held from then on."""

        def fetch_missing(reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[pa.Table]:
            missing = [not self._holds(spec) for spec in specs]
            wanted = [spec for spec, is_missing in zip(specs, missing, strict=True) if is_missing]
            cut = RowStream(fetch(reader, wanted) if wanted else iter(()))
            for spec, is_missing in zip(specs, missing, strict=True):
                table = None if is_missing else self._load(spec, reader.skips)
                if table is None:
                    table = (
                        pa.concat_tables(cut.take(count_rows(spec)))
                        if is_missing
                        else pa.concat_tables(reader.read(spec))
                    )
                    self._store(spec, table)
                yield table

        return fetch_missing

    def _holds(self, spec: ReadSpec) -> bool:
        """Whether all rows are here, as far as can be seen without reading them."""
        return all(span.position + span.rows <= self._room and bool(self._marks(span).all()) for span in spec)

    def _marks(self, span: Span) -> UInt64:
        """What stands in the place of the rows' checksums, shape (rows,)."""
        marks = np.empty(span.rows, np.uint64)
        read_into(self._sums, marks, span.position * 8)
        return marks

    def _load(self, spec: ReadSpec, skips: bool) -> pa.Table | None:
        """The rows as `Reader.read` gives them; None if some are not what was written, or are bad and may not be."""
        parts, reasons = [], list[str | None]()
        try:
            for span in spec:
                found = {name: rows.read(span.position, span.rows) for name, rows in self._rows.items()}
                part = {name: values for name, values in found.items() if values is not None}
                marks = self._marks(span)
                bad = marks == _BAD
                if (
                    len(part) < len(found)
                    or not ((self._checksums(part, span.position) == marks) | (bad & skips)).all()
                ):
                    return None
                parts.append(part)
                reasons += [
                    self._reason(span.position + i).read_text() if is_bad else None
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
        """Takes rows in, unless the disk is full.

        Raises:
            DataError: They are not those of `spec`.
        """
        if self._is_full:
            return
        check_positions(table, _positions(spec))
        try:
            usage = shutil.disk_usage(self._folder)
            if usage.free - table.nbytes < _LEAVE_FREE * usage.total:
                raise OSError(
                    errno.ENOSPC, f"{usage.free / 1e9:.1f} GB are free, and {_LEAVE_FREE:.0%} of the disk must stay so"
                )
            done = 0
            for span in spec:
                self._store_span(span.position, table.slice(done, min(span.rows, max(0, self._room - span.position))))
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
            self._reason(bad).write_text(reason)
            marks[bad - position] = _BAD
        for name, values in part.items():
            self._rows[name].write(position, values)
        write_from(self._sums, marks, position * 8)

    def _checksums(self, part: dict[str, Field], position: int) -> UInt64:
        """64 bits for each row from all its bytes and its manifest position, never below 2, shape (rows,)."""
        rows = len(next(iter(part.values())))
        total = hash_array(_SUM, np.arange(position, position + rows))
        for name, values in part.items():
            total += self._rows[name].sums(values)
        return mix_array(total) | np.uint64(2)

    def _reason(self, position: int) -> Path:
        """The file that says why a row is bad."""
        return self._folder / f"bad-{position}.txt"


def count_rows(spec: ReadSpec) -> int:
    """Rows of a read task."""
    return sum(span.rows for span in spec)


def _positions(spec: ReadSpec) -> npt.NDArray[np.int64]:
    return np.concatenate([np.arange(span.position, span.position + span.rows) for span in spec])


_LIBRARIES = ("numpy", "torch", "torchvision", "Pillow", "simplejpeg")
_DIGITS = 32
_OURS = (
    *(f"data/{name}.py" for name in ("dataset", "arrays", "parquet_files", "footer_trial", "reader", "bad_rows")),
    *(f"data/{name}.py" for name in ("ray_tasks", "local_readers", "probes")),
    "storage/data_files.py",
    "plan/manifest.py",
    "task/**/*.py",
)
"""Code of the application, below `_APPLICATION`, that has a part in what a decoded row is."""
_APPLICATION = Path(__file__).parents[1]
_NAME = re.compile(rf"[0-9a-f]{{{_DIGITS}}}")
"""Name of a cache's folder, see `identity`."""


def open_cache(source: RowSource, settings: str, folder: str | None, limit_gb: float) -> DiskCache:
    """Opens the cache of a data set on this node, empty if there is none yet.

    Caches of other data that nobody has open are removed, those that were opened longest ago first, until there is room
    for all rows within the limit; if there is still too little, the cache has room for the first rows only. Who opens
    it while nobody else has it open decides anew how much room it has; rows that it holds are lost only where there is
    less than before.

    Args:
        source: The data set, and how it is decoded.
        settings: Whatever else decides how a decoded row looks.
        folder: Where the node's caches are; None: `ray_app-UID/cache` in its temporary folder.
        limit_gb: Most gigabytes of all of them.

    Raises:
        OSError: The folder cannot be used or belongs to another user, or nobody can say which code decodes.
    """
    root = (
        Path(folder).expanduser()
        if folder is not None
        else Path(tempfile.gettempdir()) / f"ray_app-{os.getuid()}" / "cache"
    )
    own = root / cache_key(source, settings)
    root.mkdir(parents=True, exist_ok=True)
    if folder is None:
        _refuse_foreign(root)  # its name can be foreseen
    with _locked(root / "lock"):
        own.mkdir(exist_ok=True, mode=0o700)
        _refuse_foreign(own)
        sums = os.open(own / SUMS, os.O_RDWR | os.O_CREAT, 0o600)
        if not _is_open(own):
            most = source.manifest.num_rows
            least = _bytes(source.fields, 0)
            row_bytes = _bytes(source.fields, 1) - least
            room = max(0, min(most, (_make_room(own, _bytes(source.fields, most), limit_gb) - least) // row_bytes))
            for i, spec in enumerate(source.fields.values()):
                for name, size in file_sizes(i, spec, room).items():
                    _resize(own / name, size)
            os.ftruncate(sums, room * 8)
        fcntl.flock(sums, fcntl.LOCK_SH)  # in use, until this process closes it or ends
        os.utime(own)
        room = os.fstat(sums).st_size // 8
        if room < source.manifest.num_rows:
            logger.warning(
                "The disk cache %s has room for %d of %d rows within data.cache_gb = %g; the others are read in every"
                " epoch.",
                own,
                room,
                source.manifest.num_rows,
                limit_gb,
            )
    return DiskCache(own, source.fields, sums)


def _bytes(fields: dict[str, ArraySpec], room: int) -> int:
    """Bytes of a cache with room for so many rows."""
    return room * 8 + sum(sum(file_sizes(i, spec, room).values()) for i, spec in enumerate(fields.values()))


def cached_fetch(fetch: Fetch, source: RowSource, settings: str, folder: str | None, limit_gb: float) -> Fetch:
    """`fetch` with a disk cache around it, or as it is, with a warning, where there can be none; see `open_cache`."""
    try:
        return open_cache(source, settings, folder, limit_gb).around(fetch)
    except OSError as error:
        logger.warning("There is no disk cache on this node, the data is read in every epoch: %s", error)
        return fetch


def cache_key(source: RowSource, settings: str) -> str:
    """SHA-256 of all that decides what the decoded rows are: the files as they are now, the task's settings and code,
    the libraries.

    Raises:
        OSError: A file of the data is gone, S3 does not answer, or there is no source file of the code.
    """
    manifest, reader = source.manifest, source.reader
    facts = {
        "manifest": manifest.digest,
        "files": file_versions(locate_data(reader.root), manifest.paths),
        "fields": {name: asdict(spec) for name, spec in source.fields.items()},
        "columns": reader.columns,
        "settings": settings,
        "code": _code(reader.decode),
        "application": _digest(file for pattern in _OURS for file in sorted(_APPLICATION.glob(pattern))),
        "libraries": [version(name) for name in _LIBRARIES],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:_DIGITS]


def _code(decode: Decode) -> list[str]:
    """SHA-256 of every module that has a part in the class (or the function) that decodes."""
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


def _refuse_foreign(folder: Path) -> None:
    """Refuses a folder of another user than this one or root, who could change what is read from it."""
    if (owner := folder.stat().st_uid) not in (os.getuid(), 0):
        raise PermissionError(
            errno.EPERM,
            f"It belongs to another user (uid {owner}); give data.cache_dir a folder of your own",
            str(folder),
        )


def _make_room(own: Path, wanted: int, limit_gb: float) -> int:
    """Removes caches that nobody has open, oldest first, until `wanted` bytes fit; returns the bytes that there are
    then.

    Whatever else is in the folder is left alone and does not count.
    """
    caches = (
        f for f in own.parent.iterdir() if _NAME.fullmatch(f.name) and not f.is_symlink() and (f / SUMS).is_file()
    )
    others = sorted((f for f in caches if f != own), key=lambda f: f.stat().st_mtime)
    sizes = {folder: sum(file.stat().st_size for file in folder.iterdir()) for folder in others}
    for folder in others:
        if sum(sizes.values()) + wanted <= limit_gb * 1e9:
            break
        if not _is_open(folder):
            shutil.rmtree(folder)
            del sizes[folder]
    return max(0, int(limit_gb * 1e9) - sum(sizes.values()))


def _is_open(folder: Path) -> bool:
    """Whether a process has the cache open; only under the lock of all caches, where none is being opened."""
    file = os.open(folder / SUMS, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _resize(path: Path, size: int) -> None:
    """Gives a file its size; zeros are added, which take no room before they are written."""
    with path.open("ab") as file:
        file.truncate(size)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of all caches of this node."""
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
