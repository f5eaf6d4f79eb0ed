"""Files on a disk or in a bucket, and the one primitive for writing them: a file is complete or absent.

Nothing here renames a folder, appends, or needs a folder to exist. A location is a `pathlib.Path` or an `ObjectPath`;
both have `/`, `name`, `parent`, `exists`, `read_bytes`, `read_text`, `unlink` and `is_relative_to`, and the functions
here and in `storage/data_files.py` do the rest. No other module distinguishes object stores.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from ray_app.errors import StorageError
from ray_app.process import current_folder
from ray_app.storage.object_stores import ObjectPath

Location = Path | ObjectPath
"""A file or a folder, on a disk or in a bucket."""

Content = bytes | Callable[[IO[bytes]], object]
"""The content of a file: the bytes, or a function that writes them to the open file, once from beginning to end."""

_READERS = 16


def to_location(text: str) -> Location:
    """Returns the location that a path or a URI names; `~` is the home folder.

    `to_location(str(x))` is the same location as `x`, in every process.

    Raises:
        ConfigError: The text is neither a path nor a URI of an object store, see `ObjectPath.parse`.
        StorageError: The path is relative, and the current folder was removed.
    """
    if "://" in text:
        return ObjectPath.parse(text)
    path = Path(os.path.expanduser(text))
    if not path.is_absolute():
        try:
            current_folder()
        except OSError as error:
            raise StorageError(f"{text} is a broken link: {error}") from error
    return path.resolve()


def poll_interval_s(path: Location) -> float:
    """Returns the seconds between two polls of a location; each poll of a bucket costs time and money."""
    return 0.5 if isinstance(path, Path) else 5.0


_MAX_POLL_SHARE = 0.05
"""Maximum share of the time that polling takes.

So what takes long to read, such as a run with a million steps, is read less often.
"""


def poll_pause_s(interval_s: float, took_s: float) -> float:
    """Returns the pause after a poll of so many seconds, at least `interval_s`."""
    return max(interval_s, took_s / _MAX_POLL_SHARE)


def render_content(content: Content) -> bytes:
    """Returns the bytes of a content."""
    if isinstance(content, bytes):
        return content
    # io.BytesIO copies under the GIL: 1.7 s for a gigabyte.
    with open(os.memfd_create("content"), "w+b") as file:
        content(file)
        size = file.tell()
        file.seek(0)
        return file.read(size)


def put_atomic(path: Location, data: Content, *, if_absent: bool = False, mode: int = 0o666) -> bool:
    """Writes a file atomically: every reader sees the old file, the new one, or none.

    This holds also if the writer is stopped in the middle. On a disk a temporary file is synced, then renamed or linked
    into place; in a bucket it is one request, or one upload in parts, see `ObjectPath.put`.

    Args:
        path: The file; its folder is created.
        data: The whole content.
        if_absent: Do not replace an existing file.
        mode: Permissions of a file on a disk, less the process's umask.

    Returns:
        Whether the file was written; False only with `if_absent`.

    Raises:
        OSError: The storage refused; the temporary file is removed.
    """
    if isinstance(path, ObjectPath):
        return path.put(render_content(data), if_absent)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data) if isinstance(data, bytes) else data(file)
            file.flush()
            _sync(file.fileno())
        if not if_absent:
            os.replace(temporary, path)
            return True
        try:
            os.link(temporary, path)
            return True
        except FileExistsError:
            # NFS repeats a link if its answer was lost; then the existing file is this one.
            return temporary.stat().st_nlink == 2
        except OSError as error:
            if error.errno not in _NO_OPERATION:
                raise
            return _rename_if_absent(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


_NO_OPERATION = (errno.EOPNOTSUPP, errno.EPERM, errno.ENOSYS, errno.EINVAL, errno.EMLINK)
"""Errors with which a file system answers that lacks an operation, such as hard links: Azure Files, gcsfuse, SMB."""
_CURRENT_FOLDER = -100
_RENAME_NOREPLACE = 1


def _sync(descriptor: int) -> None:
    """Waits until a file is on the disk, unless the file system has no such operation (some of FUSE)."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_OPERATION:
            raise


def _rename_if_absent(source: Path, target: Path) -> bool:
    """Renames a file unless the target exists (renameat2, Linux); returns whether it did."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(source), os.fsencode(target)
    if not libc.renameat2(_CURRENT_FOLDER, names[0], _CURRENT_FOLDER, names[1], _RENAME_NOREPLACE):
        return True
    number = ctypes.get_errno()
    if number == errno.EEXIST:
        return False
    if number in _NO_OPERATION:
        raise OSError(
            number,
            "the file system has neither hard links nor a rename that replaces no file, so two writers could not be"
            " distinguished",
            str(target),
        )
    raise OSError(number, os.strerror(number), str(target))


def try_writing(folder: Path) -> None:
    """Does what a run does with files once, in a folder that it removes; raises OSError for an operation that fails."""
    with tempfile.TemporaryDirectory(prefix=".ray_app-", dir=folder) as name:
        file = Path(name, "file")
        for operation, is_new in (("writing a file", True), ("renaming a file over an existing one", False)):
            try:
                put_atomic(file, b"1", if_absent=is_new)
            except OSError as error:
                reason = error.strerror or str(error)
                raise OSError(error.errno, f"{operation} is refused: {reason}", str(folder)) from error
        if put_atomic(file, b"1", if_absent=True):
            raise OSError(errno.EIO, "an existing file was overwritten", str(folder))


def put_json(path: Location, value: Any, *, if_absent: bool = False) -> bool:
    """Writes a value as JSON, see `put_atomic` and `to_json`."""
    return put_atomic(path, to_json(value, indent=1).encode(), if_absent=if_absent)


def to_json(value: Any, indent: int | None = None) -> str:
    """Returns a value as JSON; NaN and infinity, which JSON lacks, become `null`."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(replace_nan(value), indent=indent, allow_nan=False)


def replace_nan(value: Any) -> Any:
    """Returns a JSON value with None for each number that is not finite."""
    if isinstance(value, dict):
        return {name: replace_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def restore_nan(value: Any) -> Any:
    """Reverses `replace_nan` for a value of numbers: returns it with NaN for each None."""
    if isinstance(value, dict):
        return {name: restore_nan(item) for name, item in value.items()}
    if isinstance(value, list):
        return [restore_nan(item) for item in value]
    return math.nan if value is None else value


def read_json(path: Location) -> Any:
    """Returns the JSON value of a file, or None if there is no such file.

    Raises:
        ValueError: The file contains something else.
    """
    try:
        return _parse_json(path, path.read_bytes())
    except FileNotFoundError:
        return None


def _parse_json(path: Location, data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise ValueError(f"{path} is damaged; it must contain JSON: {error}") from error


def list_files(folder: Location) -> list[str]:
    """Returns the names of the files in a folder, unordered, without temporary ones; none for a missing folder."""
    if isinstance(folder, ObjectPath):
        return [file.name for file in folder.entries()[0]]
    try:
        return [name for name in os.listdir(folder) if not name.startswith(".")]
    except FileNotFoundError:
        return []


def list_folders(folder: Location) -> list[str]:
    """Returns the names of the folders in a folder, unordered; none for a missing folder."""
    if isinstance(folder, ObjectPath):
        return folder.entries()[1]
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    except FileNotFoundError:
        return []


def list_tree(folder: Location, *, temporary: bool = False) -> dict[str, Location]:
    """Returns all files below a folder, by their relative paths and in the order of these.

    Args:
        folder: The folder; it need not exist.
        temporary: Return the temporary files instead, which writers leave that are stopped in the middle; none are in a
            bucket.
    """
    if isinstance(folder, ObjectPath):
        return {} if temporary else dict(sorted(folder.listing().items()))
    start = len(str(folder)) + 1
    relative_paths = [
        os.path.join(root, name)[start:]
        for root, _, files in os.walk(folder)
        for name in files
        if name.startswith(".") is temporary
    ]
    return {name: folder / name for name in sorted(relative_paths)}


def read_all(paths: Iterable[Location], missing: bytes | None = None) -> list[bytes]:
    """Returns the contents of many small files, which are read concurrently from a bucket.

    Args:
        paths: The files.
        missing: The content to return for a file that does not exist.

    Raises:
        FileNotFoundError: A file does not exist, and `missing` is None.
    """

    def read(path: Location) -> bytes:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            if missing is None:
                raise
            return missing

    files = list(paths)
    if not any(isinstance(file, ObjectPath) for file in files):
        return [read(file) for file in files]
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(read, files))


def read_all_json(paths: Iterable[Location], missing: bytes | None = None) -> list[Any]:
    """Returns the JSON values of many small files, see `read_all` and `read_json`."""
    files = list(paths)
    return [_parse_json(file, data) for file, data in zip(files, read_all(files, missing), strict=True)]


def file_version(file: Location) -> str:
    """Returns a text that changes with the content of a file: facts of the file on a disk, or the listed ETag.

    The file in a bucket must come from a listing.
    """
    if isinstance(file, ObjectPath):
        return file.etag
    stat = file.stat()
    return f"{stat.st_ino} {stat.st_size} {stat.st_mtime_ns}"


def remove_temporary(folder: Location) -> None:
    """Removes the temporary files in a folder, which writers leave that are stopped in the middle."""
    for file in list_tree(folder, temporary=True).values():
        file.unlink(missing_ok=True)


def remove_tree(folder: Location) -> None:
    """Removes a folder with its contents, in any order and as far as the storage permits it."""
    if isinstance(folder, ObjectPath):
        folder.remove_tree()
    else:
        shutil.rmtree(folder, ignore_errors=True)
