"""Data files on a disk or in a bucket: finding, opening and reading them, and recognizing files that are not data.

Locations and their listings are those of `storage/files.py`; Parquet in a bucket is fetched by ranges.
"""

from __future__ import annotations

import errno
import gzip
import io
import mmap
import os
import re
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from ray_app.errors import DataError, RayAppError, StorageError, remove_addresses
from ray_app.storage.files import Location, list_folders, to_location
from ray_app.storage.object_stores import ObjectPath

HEAD_BYTES = 512
"""The number of bytes that `name_foreign_file` needs."""
LFS_POINTER_BYTES = 1024
"""A Git LFS pointer is shorter than this, says its specification."""
_IMAGES = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8[79]a|RIFF.{4}WEBP", re.DOTALL)
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_WEB_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*(<!--.*?-->\s*)?<(!doctype html|html|head)\b", re.DOTALL | re.IGNORECASE)
_OTHER_FORMATS = {
    b"BM": "a BMP image",
    b"II*\0": "a TIFF image",
    b"MM\0*": "a TIFF image",
    b"II+\0": "a TIFF image",
    b"MM\0+": "a TIFF image",
    b"\0\0\1\0": "an ICO image",
    b"\xff\x0a": "a JPEG XL image",
    b"\0\0\0\x0cjP  ": "a JPEG 2000 image",
    b"%PDF": "a PDF document",
    b"PK\3\4": "a ZIP archive",
    b"\x1f\x8b": "gzipped data",
}
_BRANDS = {
    b"avif": "an AVIF image",
    b"avis": "an AVIF image",
    b"heic": "a HEIC image",
    b"heix": "a HEIC image",
    b"mif1": "a HEIF image",
}


def has_image_signature(head: bytes) -> bool:
    """Returns whether a file with these first bytes is an image that can be decoded: JPEG, PNG, GIF or WebP."""
    return _IMAGES.match(head) is not None


def is_convertible_image(head: bytes) -> bool:
    """Returns whether a file with these first bytes is an image that an ingest stores as PNG: TIFF, BMP or AVIF."""
    return name_other_format(head) in ("a TIFF image", "a BMP image", "an AVIF image")


def name_foreign_file(head: bytes) -> str | None:
    """Recognizes files that are often found in place of data.

    Args:
        head: The first `HEAD_BYTES` of the file, fewer if it is shorter.

    Returns:
        The kind of file and what to do, as the end of "it is ..."; None for all other files.
    """
    if not head:
        return "empty"
    if head.startswith(_LFS_POINTER):
        return "a Git LFS pointer, not the file itself (fetch the files with git lfs pull)"
    if _WEB_PAGE.match(head):
        return "a web page (HTML), such as a server sends instead of a file (download it again)"
    return None


def name_other_format(head: bytes) -> str | None:
    """Returns the name of a format that is not decoded, as the end of "it is ..."; None for an unknown format."""
    if foreign := name_foreign_file(head):
        return foreign
    if head[4:8] == b"ftyp" and (brand := _BRANDS.get(head[8:12])):
        return brand
    return next((name for magic, name in _OTHER_FORMATS.items() if head.startswith(magic)), None)


_BUFFER_BYTES = 1 << 20
_GAP_BYTES = 8192
"""Ranges that are closer to each other are read by one request."""
_MAX_MESSAGE_CHARS = 500
"""Longer messages of parsers are cut off here."""


@dataclass(frozen=True)
class File:
    """An existing file.

    Args:
        location: The location of the file.
        size: Size in bytes.
        changed_ns: Time of the last change, nanoseconds since 1970 (in a bucket whole seconds).
    """

    location: Location
    size: int
    changed_ns: int

    @property
    def name(self) -> str:
        """The name of the file, in valid UTF-8 for every name that a file system permits."""
        return printable_name(self.location.name)

    def __str__(self) -> str:
        return str(self.location)

    def open(self) -> IO[bytes]:
        """Opens the file for reading; the result is seekable.

        In a bucket one request fetches a megabyte, since readers ask for little at a time.

        Raises:
            DataError: The file is something else than data, see `name_foreign_file`. Some readers would not notice.
        """
        file = open_data_file(self.location)
        if not isinstance(self.location, Path):
            file = io.BufferedReader(cast(io.RawIOBase, file), _BUFFER_BYTES)
        # In a bucket this check needs a request, so only files as short as a Git LFS pointer are checked there.
        is_checked = isinstance(self.location, Path) or self.size < LFS_POINTER_BYTES
        head = cast(io.BufferedReader, file).peek(HEAD_BYTES)[:HEAD_BYTES] if is_checked and self.size else b""
        if head and (foreign := name_foreign_file(head)):
            file.close()
            raise DataError(f"{self} is {foreign}.")
        return file

    def open_unpacked(self) -> IO[bytes]:
        """Opens the file for reading; the contents of a `.gz` or `.tgz` are decompressed."""
        if not self.location.name.endswith((".gz", ".tgz")):
            return self.open()
        stream = self.open()
        if not isinstance(self.location, Path):
            return cast(IO[bytes], gzip.open(stream))
        # gzip closes a file only if it has opened it.
        stream.close()
        return cast(IO[bytes], gzip.open(self.location))


def printable_name(name: str) -> str:
    """Returns a file name as valid UTF-8, for every name that a file system permits."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def relative_path(location: Location, root: Location) -> str:
    """Returns the path of a location relative to `root`."""
    if isinstance(location, ObjectPath):
        return location.key.removeprefix(cast(ObjectPath, root).key).lstrip("/")
    below = os.path.join(cast(Path, root), "")
    if str(location).startswith(below):
        return str(location).removeprefix(below)
    return location.relative_to(cast(Path, root)).as_posix()


Root = str | tuple[str, ...]
"""The folder (path or URI) to which the paths of a data set's files are relative.

Several data sets have one for each; a path begins with the index of its own, as in `1/part-00000.parquet`.
"""


def locate(root: Root, path: str) -> Location:
    """Returns the location of a file of a data set."""
    if isinstance(root, str):
        return to_location(root) / path
    index, _, rest = path.partition("/")
    return to_location(root[int(index)]) / rest


def is_within(location: Location, root: Location) -> bool:
    """Returns whether a location is `root` or below it."""
    if isinstance(location, Path):
        return isinstance(root, Path) and location.is_relative_to(root)
    return isinstance(root, ObjectPath) and location.is_relative_to(root)


def find_file(location: Location) -> File | None:
    """Returns the file at a location, or None."""
    if isinstance(location, Path):
        if not location.is_file():
            return None
        stat = location.stat()
        return File(location, stat.st_size, stat.st_mtime_ns)
    with bucket_errors(location):
        try:
            return _to_file(location.stat())
        except FileNotFoundError:
            return None


def is_folder(location: Location) -> bool:
    """Returns whether a location is a folder; in a bucket, whether an object lies below it."""
    if isinstance(location, Path):
        return location.is_dir()
    with bucket_errors(location):
        return location.is_folder()


def files_in(folder: Location) -> list[File]:
    """Returns the files directly in a folder that are not hidden, sorted by name."""
    if isinstance(folder, Path):
        with os.scandir(folder) as entries:
            names = sorted(e.name for e in entries if not e.is_dir() and not e.name.startswith("."))
        return [file for name in names if (file := find_file(folder / name))]
    with bucket_errors(folder):
        objects, _ = folder.entries()
    visible = [_to_file(path) for path in objects if not path.name.startswith(".")]
    return sorted(visible, key=lambda file: file.location.name)


def entries_in(folder: Location) -> list[Location]:
    """Returns all entries of a folder, sorted by name: files, folders and links, hidden ones included."""
    if isinstance(folder, Path):
        names = os.listdir(folder)
    else:
        with bucket_errors(folder):
            objects, folders = folder.entries()
        names = [*(path.name for path in objects), *folders]
    return [folder / name for name in sorted(names)]


def folders_in(folder: Location) -> list[Location]:
    """Returns the folders directly in a folder that are not hidden, sorted by name."""
    with bucket_errors(folder):
        return [folder / name for name in sorted(list_folders(folder)) if not name.startswith(".")]


def file_versions(root: Root, paths: Iterable[str]) -> list[Any]:
    """Returns a value for each of some files, which are sorted, that changes with its content.

    On a disk these are size and time; in a bucket ETags or the like, by one listing.

    Raises:
        OSError: A file does not exist, or the bucket does not answer.
    """
    if not isinstance(root, str):
        groups = groupby((path.partition("/") for path in paths), lambda parts: parts[0])
        return [
            version
            for index, parts in groups
            for version in file_versions(root[int(index)], [path for _, _, path in parts])
        ]
    folder = to_location(root)
    if isinstance(folder, Path):
        return [(stat.st_size, stat.st_mtime_ns) for stat in ((folder / path).stat() for path in paths)]
    objects = folder.listing()
    try:
        return [objects[path].etag for path in paths]
    except KeyError as error:
        raise FileNotFoundError(errno.ENOENT, "No such object", str(folder / error.args[0])) from error


def open_data_file(location: Location) -> IO[bytes]:
    """Opens a file for reading; the result is seekable."""
    return location.open("rb") if isinstance(location, Path) else cast(IO[bytes], ObjectReader(location))


def open_parquet(location: Location, buffer_bytes: int = 0) -> pq.ParquetFile:
    """Opens a Parquet file; pages with a checksum are verified.

    Args:
        location: The file.
        buffer_bytes: Read row groups in buffers of this size; 0 reads each as a whole, in a bucket all its column
            chunks at once.
    """
    if isinstance(location, Path):
        return pq.ParquetFile(str(location), buffer_size=buffer_bytes, page_checksum_verification=True)
    return _ObjectParquetFile(ObjectReader(location), buffer_bytes)


class ObjectReader(io.RawIOBase):
    """An open object, which is read by ranges.

    Args:
        path: The object; it takes a request to know the size of one that was not listed.
    """

    def __init__(self, path: ObjectPath) -> None:
        self._path = path if path.size is not None else path.stat()
        self.size = cast(int, self._path.size)
        self._position = 0
        self._prefetched: list[tuple[int, bytes]] = []

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves the position, and returns it."""
        position = (0, self._position, self.size)[whence] + offset
        if position < 0:
            raise OSError(errno.EINVAL, f"{self._path}: {position} is before the beginning")
        self._position = position
        return position

    def read(self, size: int | None = -1) -> bytes:
        """Returns the next `size` bytes, fewer at the end; all that are left if it is negative."""
        left = max(0, self.size - self._position)
        data = self.read_at(self._position, left if size is None or size < 0 else min(size, left))
        self._position += len(data)
        return data

    def readall(self) -> bytes:
        """Returns the bytes from the position to the end."""
        return self.read()

    def readinto(self, buffer: Any) -> int:
        """Reads into a buffer; returns the number of bytes."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read_at(self, begin: int, count: int) -> bytes:
        """Returns `count` bytes from a position on, by a request unless they are prefetched."""
        for start, data in self._prefetched:
            if start <= begin and begin + count <= start + len(data):
                return data[begin - start : begin - start + count]
        return self._path.read_ranges([(begin, begin + count)])[0]

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Reads ranges concurrently, as far as they are in the object; they stay in memory until the next call."""
        merged: list[tuple[int, int]] = []
        for begin, end in sorted((max(0, begin), min(end, self.size)) for begin, end in ranges):
            is_close = merged and begin <= merged[-1][1] + _GAP_BYTES
            merged.append((merged[-1][0], max(end, merged.pop()[1])) if is_close else (begin, end))
        merged = [(begin, end) for begin, end in merged if begin < end]
        self._prefetched = []
        starts = [begin for begin, _ in merged]
        self._prefetched = list(zip(starts, self._path.read_ranges(merged), strict=True))


class _ObjectParquetFile(pq.ParquetFile):
    """A Parquet file in a bucket. pyarrow asks a Python file for one range after the other, which takes a request each.

    Args:
        reader: The open object.
        buffer_bytes: See `open_parquet`.
    """

    def __init__(self, reader: ObjectReader, buffer_bytes: int) -> None:
        super().__init__(reader, buffer_size=buffer_bytes, pre_buffer=not buffer_bytes, page_checksum_verification=True)
        self._object, self._is_buffered = reader, bool(buffer_bytes)

    def read_row_group(
        self, i: int, columns: list[str] | None = None, use_threads: bool = True, use_pandas_metadata: bool = False
    ) -> pa.Table:
        """Returns a row group, see `pyarrow.parquet.ParquetFile`; its column chunks are fetched concurrently."""
        if not self._is_buffered:
            self._object.prefetch(self._ranges(i, columns))
        try:
            return super().read_row_group(i, columns, use_threads, use_pandas_metadata)
        finally:
            self._object.prefetch([])

    def _ranges(self, index: int, columns: list[str] | None) -> Iterator[tuple[int, int]]:
        """Yields the first byte and the end of each column chunk of a row group."""
        group = self.metadata.row_group(index)
        prefixes = tuple(f"{name}." for name in columns or ())
        for chunk in map(group.column, range(group.num_columns)):
            if columns is None or f"{chunk.path_in_schema}.".startswith(prefixes):
                begin = chunk.dictionary_page_offset or chunk.data_page_offset
                yield begin, begin + chunk.total_compressed_size


def publish(finished: Path, target: Location) -> None:
    """Moves a finished local file to its target atomically; a target on a disk must be on the same file system."""
    with finished.open("rb") as file:
        if isinstance(target, Path):
            os.fsync(file.fileno())
            os.replace(finished, target)
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            target.put(data, if_absent=False)
    finished.unlink()


def _to_file(path: ObjectPath) -> File:
    """Returns a listed object as a file."""
    return File(path, cast(int, path.size), path.changed_s * 10**9)


def to_read_error(file: File | Location | str, error: Exception, advice: str) -> DataError:
    """Returns the error for a file that cannot be read: a DataError with advice if its contents are to blame.

    Otherwise it is a StorageError. Python and pyarrow raise OSError in both cases; one of the system or of an object
    store has a number.
    """
    if foreign := _foreign_file_at(file):
        return DataError(f"{file} is {foreign}.")
    # EINVAL is the number of a seek to a position outside the file, so its contents are to blame.
    content_errors = (None, errno.EINVAL)
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return StorageError(
            f"{file} cannot be opened: {error}. A process may have {limit} open files here (ulimit -n). Raise the"
            " limit; on a cluster, raise it in the shell that runs `ray start`."
        )
    if isinstance(error, OSError) and error.errno not in content_errors:
        return StorageError(f"{file} cannot be read: {error}.")
    message = remove_addresses(str(error)) or type(error).__name__
    # Parsers quote the text that they could not read, which may be the rest of the file.
    if len(message) > _MAX_MESSAGE_CHARS:
        message = f"{message[:_MAX_MESSAGE_CHARS]} ..."
    return DataError(f"{file}: {message}. {advice}")


def _foreign_file_at(file: File | Location | str) -> str | None:
    """Returns `name_foreign_file` of a file; None also if it is empty or cannot be read."""
    if isinstance(file, str):
        return None
    try:
        with open_data_file(file.location if isinstance(file, File) else file) as stream:
            head = stream.read(HEAD_BYTES)
    except (OSError, pa.ArrowException):
        return None
    return name_foreign_file(head) if head else None


@contextmanager
def parser_errors(file: File | Location | str, advice: str) -> Iterator[None]:
    """Turns any error of a parser into one of the application, since parsers raise errors of all kinds.

    Raises:
        StorageError: The system or the bucket failed.
        DataError: The contents of the file are to blame; the message ends with the advice.
    """
    try:
        yield
    except RayAppError:
        raise
    except Exception as error:
        raise to_read_error(file, error, advice) from error


@contextmanager
def bucket_errors(location: Location) -> Iterator[None]:
    """Turns the errors of a bucket into one of the application.

    Raises:
        StorageError: The bucket does not answer, or refuses.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(f"{location} cannot be read: {error.strerror or error}") from error


_LOST_AND_FOUND = "lost+found"
"""A folder at the top of some file systems that only root can read."""
_TABLE_LOGS = {"_delta_log": "Delta Lake", ".hoodie": "Apache Hudi"}


def _is_hidden(name: str) -> bool:
    """Returns whether a name is hidden: `.name`, or `_name`, which Spark and others use for files that are not data.

    `_name=value` is a folder of the rows with that value.
    """
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def files_below(folder: Location, suffix: str) -> list[Location]:
    """Returns all files below a folder with a suffix, sorted by path. Links are followed.

    Hidden files and files in hidden folders are left out.

    Raises:
        DataError: A folder on a disk may not be listed, a file is reached by two paths, or the folder is a table with a
            log of its own.
        StorageError: The bucket does not answer.
    """
    if isinstance(folder, Path):
        files: dict[str, Location] = {
            relative_path(path, folder): path for path in _check_links(_walk(folder, frozenset()), suffix)
        }
    else:
        with bucket_errors(folder):
            files = dict(folder.listing())
        for name in files:
            _check_no_table(folder, *name.split("/"))
    return [
        files[name] for name in sorted(files) if name.endswith(suffix) and not any(map(_is_hidden, name.split("/")))
    ]


def refuse_table_log(folder: Location) -> None:
    """Raises DataError for the folder of a table with a log of its own, such as that of Delta Lake."""
    for entry in entries_in(folder):
        _check_no_table(folder, entry.name)


def _check_no_table(folder: Location, *parts: str) -> None:
    """Refuses a table with a log, since rows that the log has dropped are still in the files.

    Args:
        folder: The folder of the data.
        parts: Names of nested folders, and of a file or folder in the last one.

    Raises:
        DataError: One of the names belongs to such a log.
    """
    kinds = [_TABLE_LOGS[part] for part in parts if part in _TABLE_LOGS]
    if parts[-2:-1] == ("metadata",) and parts[-1].endswith(".metadata.json"):
        kinds.append("Apache Iceberg")
    if kinds:
        raise DataError(
            f"{folder} is a table of {kinds[0]} ({'/'.join(parts)}). Its log decides which rows are valid, so ingest"
            " the table itself: ray_app.ingest_table(FOLDER, TABLE) with a table of deltalake or pyiceberg; or write"
            " its rows as plain Parquet, and name that folder."
        )


def _check_links(files: Iterable[tuple[Path, Path]], suffix: str) -> Iterator[Path]:
    """Yields the files with a suffix.

    Args:
        files: Each path with the resolved one.
        suffix: The end of the names.

    Raises:
        DataError: Two paths lead to one file, so its rows would count twice.
    """
    visited: dict[Path, Path] = {}
    for path, real in files:
        if path.name.endswith(suffix):
            if other := visited.get(real):
                one, two = sorted((path, other))
                raise DataError(
                    f"{one} and {two} are the same file by a link, so its rows would be used twice. Remove the link."
                )
            visited[real] = path
            yield path


def _walk(folder: Path, above: frozenset[Path]) -> Iterator[tuple[Path, Path]]:
    """Yields the files below a folder that are not hidden, each with its resolved path.

    A link to a folder above itself is not followed.
    """
    real = folder.resolve()
    if real in above:
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except PermissionError as error:
        raise DataError(
            f"{folder} may not be listed, so its content is unknown. Allow listing it, or name another folder."
        ) from error
    for entry in entries:
        _check_no_table(folder, folder.name, entry.name)
    for entry in entries:
        if _is_hidden(entry.name) or entry.name == _LOST_AND_FOUND:
            continue
        if entry.is_dir():
            yield from _walk(folder / entry.name, above | {real})
        elif entry.is_file():
            path = folder / entry.name
            if entry.is_symlink():
                yield path, path.resolve()
            else:
                yield path, path if real == folder else real / entry.name
