"""What a file is by its first bytes, for messages about files that are not the data that they should be.

Files of data, on a disk or in a bucket: what is there, and reading and writing big ones in streams.

Buckets are read through pyarrow, so that Parquet is fetched by ranges; where S3 is and who may read it is as in
`storage/object_stores.py`.

The files of data below a folder: what counts as data, and what must not be taken for it.
"""

from __future__ import annotations

import errno
import functools
import gzip
import io
import os
import re
import resource
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from ray_app.errors import DataError, RayAppError, StorageError, remove_addresses
from ray_app.storage.files import Location, to_location
from ray_app.storage.object_stores import AzurePath, CloudPath, GooglePath, ObjectPath

HEAD_BYTES = 512
"""How many bytes `name_foreign_file` needs to see."""
LFS_POINTER_BYTES = 1024
"""A Git LFS pointer is shorter than this, by its specification."""
_IMAGES = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8[79]a|RIFF.{4}WEBP", re.DOTALL)
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_WEB_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*(<!--.*?-->\s*)?<(!doctype html|html|head)\b", re.DOTALL | re.IGNORECASE)
_OTHERS = {
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
    """Returns whether a file that begins so is in a format of images that is decoded: JPEG, PNG, GIF or WebP."""
    return _IMAGES.match(head) is not None


def is_lfs_pointer(head: bytes) -> bool:
    """Returns whether a file that begins so is a pointer that Git LFS puts in the place of a file."""
    return head.startswith(_LFS_POINTER)


def name_foreign_file(head: bytes) -> str | None:
    """Names files that often stand where data should be.

    Args:
        head: The first `HEAD_BYTES` of the file, fewer if it is shorter.

    Returns:
        What the file is and what to do, as the end of "it is ..."; None for everything else.
    """
    if not head:
        return "empty"
    if is_lfs_pointer(head):
        return "a Git LFS pointer, not the file itself (fetch the files with git lfs pull)"
    if _WEB_PAGE.match(head):
        return (
            "a web page (HTML), such as a server sends in the place of a file that it does not give (download it again)"
        )
    return None


def name_other_format(head: bytes) -> str | None:
    """Names a format that `has_image_signature` does not know, as the end of "it is ..."; None where the format is not
    known.
    """
    if foreign := name_foreign_file(head):
        return foreign
    if head[4:8] == b"ftyp" and (brand := _BRANDS.get(head[8:12])):
        return brand
    return next((name for magic, name in _OTHERS.items() if head.startswith(magic)), None)


DataLocation = Location | CloudPath
"""Where data may be read."""
_AT_ONCE_BYTES = 1 << 20
_MAX_SAID = 500
"""Characters of a parser's message that are repeated."""
CONNECTIONS = 64
"""Requests of a process to a bucket that are under way at once."""
_OF_A_BUCKET = ("AWS Error", "google::cloud::Status", "Azure")
"""What pyarrow says where the system failed, and not the file."""


def locate_data(text: str) -> DataLocation:
    """The place of data that a path or URI names; see `location`.

    Raises:
        ConfigError: It is neither a path nor a URI of S3, Google Cloud Storage or Azure Blob Storage.
    """
    for kind in (GooglePath, AzurePath):
        if text.startswith(f"{kind.scheme}://"):
            return kind.parse(text)
    return to_location(text)


@dataclass(frozen=True)
class File:
    """A file that was found.

    Args:
        place: Where it is.
        size: Bytes.
        changed_ns: When it was changed, nanoseconds since 1970 (in a bucket whole seconds).
    """

    place: DataLocation
    size: int
    changed_ns: int

    @property
    def name(self) -> str:
        """Its name, in valid UTF-8 whatever the file system holds."""
        return printable_name(self.place.name)

    def __str__(self) -> str:
        return str(self.place)

    def open(self) -> IO[bytes]:
        """Opens it for reading; positions can be sought. In a bucket a request fetches a megabyte: readers ask for
        little at a time.

        Raises:
            DataError: Something else stands in its place, see `name_foreign_file`. Some readers would take it for data.
        """
        file = open_data_file(self.place)
        if not isinstance(self.place, Path):
            file = io.BufferedReader(cast(io.RawIOBase, file), _AT_ONCE_BYTES)
        # A look into a bucket is a request, so only what is as short as a pointer of Git LFS is looked at there.
        is_looked_at = isinstance(self.place, Path) or self.size < LFS_POINTER_BYTES
        head = cast(io.BufferedReader, file).peek(HEAD_BYTES)[:HEAD_BYTES] if is_looked_at and self.size else b""
        if head and (foreign := name_foreign_file(head)):
            file.close()
            raise DataError(f"{self}: it is {foreign}.")
        return file

    def open_unpacked(self) -> IO[bytes]:
        """Opens what is in it if it is a `.gz` or `.tgz`, or itself."""
        if not self.place.name.endswith((".gz", ".tgz")):
            return self.open()
        stream = self.open()
        if not isinstance(self.place, Path):
            return cast(IO[bytes], gzip.open(stream))
        # gzip closes a file that it opens, and no other.
        stream.close()
        return cast(IO[bytes], gzip.open(self.place))


def printable_name(name: str) -> str:
    """A file name as valid UTF-8, whatever the file system holds."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def relative_path(place: DataLocation, root: DataLocation) -> str:
    """The path of a place below `root`."""
    if isinstance(place, ObjectPath):
        return place.key.removeprefix(cast(ObjectPath, root).key).lstrip("/")
    below = os.path.join(cast(Path, root), "")
    return (
        str(place).removeprefix(below)
        if str(place).startswith(below)
        else place.relative_to(cast(Path, root)).as_posix()
    )


def is_within(place: DataLocation, root: DataLocation) -> bool:
    """Whether a place is `root` or below it."""
    if isinstance(place, Path) or isinstance(root, Path):
        return isinstance(place, Path) and isinstance(root, Path) and place.is_relative_to(root)
    return (place.scheme, place.bucket) == (root.scheme, root.bucket) and f"{place.key}/".startswith(root.below)


def to_arrow(place: DataLocation) -> tuple[pafs.FileSystem, str]:
    """The place as pyarrow names it: a file system and a path on it."""
    if isinstance(place, Path):
        return pafs.LocalFileSystem(), str(place)
    if isinstance(place, CloudPath):
        return place.filesystem, place.path
    return _s3(place.query), f"{place.bucket}/{place.key}".rstrip("/")


@functools.cache
def _s3(query: str) -> pafs.FileSystem:
    """One client per server and process."""
    options = dict(parse_qsl(query))
    endpoint = (
        options.get("endpoint_override") or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    )
    scheme = options.get("scheme", "https")
    if endpoint and "://" in endpoint:
        scheme, endpoint = urlsplit(endpoint).scheme, urlsplit(endpoint).netloc
    pa.set_io_thread_count(
        max(pa.io_thread_count(), CONNECTIONS)
    )  # as many requests as that a client of S3 has under way
    return pafs.S3FileSystem(endpoint_override=endpoint, scheme=scheme, region=options.get("region"))


def find_file(place: DataLocation) -> File | None:
    """The file at a place, if there is one."""
    if isinstance(place, Path):
        if not place.is_file():
            return None
        stat = place.stat()
        return File(place, stat.st_size, stat.st_mtime_ns)
    with bucket_errors(place):
        filesystem, path = to_arrow(place)
        return _file(place, filesystem.get_file_info(path))


def is_folder(place: DataLocation) -> bool:
    """Whether there is a folder; in a bucket, whether anything lies below the place."""
    if isinstance(place, Path):
        return place.is_dir()
    with bucket_errors(place):
        filesystem, path = to_arrow(place)
        return bool(filesystem.get_file_info(path).type == pafs.FileType.Directory)


def files_in(folder: DataLocation) -> list[File]:
    """The visible files directly in a folder, sorted by name."""
    if isinstance(folder, Path):
        with os.scandir(folder) as entries:
            names = sorted(e.name for e in entries if not e.is_dir() and not e.name.startswith("."))
        return [file for name in names if (file := find_file(folder / name))]
    with bucket_errors(folder):
        filesystem, path = to_arrow(folder)
        found = filesystem.get_file_info(pafs.FileSelector(path, allow_not_found=True))
        files = [_file(folder / info.base_name, info) for info in found if not info.base_name.startswith(".")]
    return sorted((file for file in files if file), key=lambda file: file.place.name)


def entries_in(folder: DataLocation) -> list[DataLocation]:
    """Everything directly in a folder, sorted by name: files, folders, links, and hidden ones."""
    if isinstance(folder, Path):
        names = os.listdir(folder)
    else:
        with bucket_errors(folder):
            filesystem, path = to_arrow(folder)
            entries = filesystem.get_file_info(pafs.FileSelector(path, allow_not_found=True))
            names = [info.base_name for info in entries if info.base_name]
    return [folder / name for name in sorted(names)]


def folders_in(folder: DataLocation) -> list[DataLocation]:
    """The visible folders directly in a folder, sorted by name."""
    if isinstance(folder, Path):
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.is_dir() and not e.name.startswith(".")]
    else:
        with bucket_errors(folder):
            names = [name for name in folder.folders() if not name.startswith(".")]
    return [folder / name for name in sorted(names)]


def file_versions(root: DataLocation, paths: Iterable[str]) -> list[Any]:
    """What changes with the content of files below a folder: sizes and times on a disk, in a bucket ETags or the like,
    by one listing.

    Raises:
        OSError: One is gone, or the bucket does not answer.
    """
    if isinstance(root, Path):
        return [(stat.st_size, stat.st_mtime_ns) for stat in ((root / path).stat() for path in paths)]
    there = root.listing()
    try:
        return [there[path].etag for path in paths]
    except KeyError as error:
        raise FileNotFoundError(errno.ENOENT, "No such object", str(root / error.args[0])) from error


def open_data_file(place: DataLocation) -> IO[bytes]:
    """Opens a file for reading; positions can be sought."""
    if isinstance(place, Path):
        return place.open("rb")
    filesystem, path = to_arrow(place)
    return cast(IO[bytes], filesystem.open_input_file(path))


def open_parquet(place: DataLocation, buffer_bytes: int = 0) -> pq.ParquetFile:
    """Opens a Parquet file, whose row groups are read as a whole (in a bucket their pieces together), or in buffers of
    a size.

    Pages that have a checksum are compared with it.
    """
    pre_buffer = not buffer_bytes and not isinstance(place, Path)
    source = str(place) if isinstance(place, Path) else open_data_file(place)
    return pq.ParquetFile(source, buffer_size=buffer_bytes, pre_buffer=pre_buffer, page_checksum_verification=True)


def make_fragment(place: ObjectPath) -> Any:
    """A Parquet file in a bucket, whose footer one request fetches, where the file was listed."""
    import pyarrow.dataset

    filesystem, path = to_arrow(cast(DataLocation, place))
    return pyarrow.dataset.ParquetFileFormat().make_fragment(path, filesystem, file_size=place.size)


def publish(finished: Path, target: Location) -> None:
    """Gives a finished local file its place, whole; on a disk it must be on the same one, and is synced."""
    if isinstance(target, Path):
        with finished.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(finished, target)
        return
    filesystem, path = to_arrow(target)
    with finished.open("rb") as source, filesystem.open_output_stream(path) as stream:
        shutil.copyfileobj(source, stream, 16 << 20)
    finished.unlink()


def _file(place: DataLocation, info: Any) -> File | None:
    if info.type != pafs.FileType.File:
        return None
    return File(place, int(info.size), int(info.mtime_ns or 0))


def to_read_error(file: File | DataLocation | str, error: Exception, advice: str) -> DataError:
    """What to raise where a file cannot be read: a StorageError, or a DataError with advice if what is in it is to
    blame.

    Python and pyarrow call both OSError; only one of the system has a number, and only one of a bucket says so.
    """
    if foreign := _foreign_file_at(file):
        return DataError(f"{file}: it is {foreign}.")
    own = (None, errno.EINVAL)  # a place in the file that there is not
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return StorageError(
            f"{file} cannot be opened: {error}. A process may have {limit} files open here (ulimit -n). Raise that; on"
            f" a cluster of"
            " `ray start` raise it where that is called."
        )
    if isinstance(error, OSError) and (error.errno not in own or any(said in str(error) for said in _OF_A_BUCKET)):
        return StorageError(f"{file} cannot be read: {error}.")
    said = remove_addresses(str(error)) or type(error).__name__
    # Parsers quote what they could not read, which may be the rest of the file.
    return DataError(f"{file}: {said if len(said) <= _MAX_SAID else said[:_MAX_SAID] + ' ...'}. {advice}")


def _foreign_file_at(file: File | DataLocation | str) -> str | None:
    """What stands in the place of a file, see `name_foreign_file`; None also where it is empty or cannot be read."""
    if isinstance(file, str):
        return None
    try:
        with open_data_file(file.place if isinstance(file, File) else file) as stream:
            head = stream.read(HEAD_BYTES)
    except (OSError, pa.ArrowException):
        return None
    return name_foreign_file(head) if head else None


@contextmanager
def parser_errors(file: File | DataLocation | str, advice: str) -> Iterator[None]:
    """Whatever a parser raises about a file as what it is: parsers meet broken files with errors of all kinds.

    Raises:
        StorageError: The system or the bucket failed.
        DataError: What is in the file is to blame; with advice.
    """
    try:
        yield
    except RayAppError:
        raise
    except Exception as error:
        raise to_read_error(file, error, advice) from error


@contextmanager
def bucket_errors(place: DataLocation) -> Iterator[None]:
    """Whatever a bucket raises as what it is.

    Raises:
        StorageError: It does not answer, or refuses.
    """
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        credentials = place.credentials if isinstance(place, ObjectPath) else ""
        raise StorageError(
            f"{place} cannot be read: {error}. Check the address, the bucket and the credentials ({credentials})."
        ) from error


_OF_THE_DISK = "lost+found"
"""A folder that some file systems have at their top, for root alone."""
_LOGS = {"_delta_log": "Delta Lake", ".hoodie": "Apache Hudi"}


def _is_hidden(name: str) -> bool:
    """Whether no data is under a name: `.name`, and `_name`, as Spark and others call what is not finished or their
    own.

    `_name=value` is a folder of the rows with a value.
    """
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def files_below(folder: DataLocation, suffix: str) -> list[DataLocation]:
    """All files below a folder whose name ends so, sorted by path; neither hidden ones nor those in hidden folders.
    Links are followed.

    Raises: DataError: A folder on a disk may not be listed, links lead to a file in two ways, or there is a table with
        a log of its own. StorageError: S3 does not answer.
    """
    if isinstance(folder, Path):
        found: dict[str, DataLocation] = {
            relative_path(place, folder): place for place in _once(_walk(folder, frozenset()), suffix)
        }
    else:
        with bucket_errors(folder):
            found = dict(folder.listing())
        for name in found:
            _refuse_table(folder, *name.split("/"))
    return [
        found[name] for name in sorted(found) if name.endswith(suffix) and not any(map(_is_hidden, name.split("/")))
    ]


def _refuse_table(folder: DataLocation, *parts: str) -> None:
    """Refuses what a log says about rows in other files: those that it has dropped are still in the files.

    Args:
        folder: Where it is.
        parts: Names of folders, one below the other, and of a file or folder in the last one.
    """
    kinds = [_LOGS[part] for part in parts if part in _LOGS]
    if parts[-2:-1] == ("metadata",) and parts[-1].endswith(".metadata.json"):
        kinds.append("Apache Iceberg")
    if kinds:
        raise DataError(
            f"{folder} is a table of {kinds[0]} ({'/'.join(parts)}), whose log says which rows of its files count."
            f" Write the rows that do"
            " as plain Parquet, such as with deltalake, pyiceberg or Spark, and give that folder."
        )


def _once(found: Iterable[tuple[Path, Path]], suffix: str) -> Iterator[Path]:
    """Those of the files whose name ends so; refuses what is reached in two ways, whose rows would count twice."""
    seen: dict[Path, Path] = {}
    for place, real in found:
        if place.name.endswith(suffix):
            if other := seen.get(real):
                one, two = sorted((place, other))
                raise DataError(
                    f"{one} and {two} are the same file by a link, so its rows would be there twice. Remove the link."
                )
            seen[real] = place
            yield place


def _walk(folder: Path, above: frozenset[Path]) -> Iterator[tuple[Path, Path]]:
    """The visible files below a folder, and where each really is; a link to a folder that it is in leads nowhere."""
    real = folder.resolve()
    if real in above:
        return
    try:
        everything = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except PermissionError as error:
        raise DataError(
            f"{folder} may not be listed, so it is not known what is in it. Allow it, or give a folder beside it."
        ) from error
    for entry in everything:
        _refuse_table(folder, folder.name, entry.name)
    for entry in everything:
        if _is_hidden(entry.name) or entry.name == _OF_THE_DISK:
            continue
        if entry.is_dir():
            yield from _walk(folder / entry.name, above | {real})
        elif entry.is_file():
            place = folder / entry.name
            yield place, place.resolve() if entry.is_symlink() else place if real == folder else real / entry.name
