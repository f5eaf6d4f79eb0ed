"""Where files are, a disk or S3, and the one primitive for writing them: a file is there whole or not at all.

Nothing here renames a folder, appends, or needs a folder to exist. A path is a `pathlib.Path` or an `S3Path`; both have
`/`, `name`, `exists`, `read_bytes`, `read_text` and `unlink`, and the functions below do the rest.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Protocol

from ray_app.errors import ConfigError
from ray_app.storage.object_stores import S3Path

Location = Path | S3Path
"""A file or a folder, on a disk or on S3."""

Content = bytes | Callable[[IO[bytes]], object]
"""What a file is to hold: the bytes, or a function that writes them to the open file, once from beginning to end."""

_READERS = 16


def to_location(text: str) -> Location:
    """The place that a path or URI names, `~` being the home folder; `location(str(place))` is the same place, in any
    process.

    Raises:
        ConfigError: It is neither a path nor an S3 URI.
    """
    scheme, is_uri, _ = text.partition("://")
    if not is_uri:
        return Path(os.path.expanduser(text)).resolve()
    if scheme != "s3":
        raise ConfigError(
            f"{text!r} is on {scheme}://; runs and data sets are written to a folder that all nodes see, or to"
            f" s3://bucket/prefix."
        )
    return S3Path.parse(text)


def poll_interval_s(place: Location) -> float:
    """Seconds between two looks for something new; each look at S3 costs time and money."""
    return 0.5 if isinstance(place, Path) else 5.0


def render_content(content: Content) -> bytes:
    """The bytes of a content."""
    if isinstance(content, bytes):
        return content
    with open(os.memfd_create("content"), "w+b") as file:  # io.BytesIO copies under Python's lock: 1.7 s for a gigabyte
        content(file)
        size = file.tell()
        file.seek(0)
        return file.read(size)


def put_atomic(path: Location, data: Content, *, if_absent: bool = False, mode: int = 0o666) -> bool:
    """Writes `data` to `path` so that every reader sees the old file, the new one, or none, also when the writer is
    stopped in the middle.

    On a disk a temporary file is synced, then renamed or linked into place; on S3 it is one put, or one upload in parts
    if it is big.

    Args:
        path: Where to; its folder is made.
        data: The whole content.
        if_absent: Leave a file that is there already.
        mode: Who may do what with a file on a disk, less the process's umask.

    Returns:
        Whether it was written; False only with `if_absent`.

    Raises:
        OSError: The storage refused; what was written of it is removed.
    """
    if isinstance(path, S3Path):
        return path.put(render_content(data), if_absent)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
    try:
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data) if isinstance(data, bytes) else data(file)
            file.flush()
            os.fsync(file.fileno())
        if not if_absent:
            os.replace(temporary, path)
            return True
        try:
            os.link(temporary, path)
            return True
        except FileExistsError:
            return temporary.stat().st_nlink == 2  # NFS repeats a link whose answer was lost; then it is ours
    finally:
        temporary.unlink(missing_ok=True)


def put_json(path: Location, value: Any, *, if_absent: bool = False) -> bool:
    """`put_atomic` of JSON, see `to_json`."""
    return put_atomic(path, to_json(value, indent=1).encode(), if_absent=if_absent)


def to_json(value: Any, indent: int | None = None) -> str:
    """A value as JSON, which has neither NaN nor infinity: they are written as `null`."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(replace_nan(value), indent=indent, allow_nan=False)


def replace_nan(value: Any) -> Any:
    """A JSON value with None for each number that is not finite."""
    if isinstance(value, dict):
        return {name: replace_nan(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [replace_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def restore_nan(value: Any) -> Any:
    """A value of numbers as it was before `without_nan`, with NaN for each that was not finite."""
    if isinstance(value, dict):
        return {name: restore_nan(each) for name, each in value.items()}
    if isinstance(value, list):
        return [restore_nan(each) for each in value]
    return math.nan if value is None else value


class Readable(Protocol):
    """What can be read as a whole."""

    def read_bytes(self) -> bytes:
        """The whole file."""


def read_json(path: Readable) -> Any:
    """The JSON value of a file, or None if there is no such file.

    Raises:
        ValueError: It holds something else.
    """
    try:
        return _parse_json(path, path.read_bytes())
    except FileNotFoundError:
        return None


def _parse_json(path: Readable, data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise ValueError(f"{path} is damaged, it should hold JSON: {error}") from error


def list_files(folder: Location) -> list[str]:
    """Names of the files in a folder, in no order and without temporary ones; none if there is no such folder."""
    if isinstance(folder, S3Path):
        return [name for name in folder.listing() if "/" not in name]
    try:
        return [name for name in os.listdir(folder) if not name.startswith(".")]
    except FileNotFoundError:
        return []


def list_folders(folder: Location) -> list[str]:
    """Names of the folders in a folder, in no order; none if there is no such folder."""
    if isinstance(folder, S3Path):
        return folder.folders()
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    except FileNotFoundError:
        return []


def list_tree(folder: Location, *, temporary: bool = False) -> dict[str, Location]:
    """The files in a folder and in the folders in it, by their path relative to it and in its order. On S3 that is one
    request.

    Args:
        folder: Where to look; it need not exist.
        temporary: Tell instead what writers that were stopped in the middle have left.
    """
    if isinstance(folder, S3Path):
        return dict(sorted(folder.listing(temporary).items()))
    start = len(str(folder)) + 1
    found = [
        os.path.join(root, name)[start:]
        for root, _, files in os.walk(folder)
        for name in files
        if name.startswith(".") is temporary
    ]
    return {name: folder / name for name in sorted(found)}


def read_all(paths: Iterable[Location], missing: bytes | None = None, denied: bytes | None = None) -> list[bytes]:
    """The contents of many small files, on S3 several at a time.

    Args:
        paths: The files.
        missing: What counts as the content of a file that was removed meanwhile.
        denied: Likewise of one that this user may not read.

    Raises:
        FileNotFoundError: There is no such file, and nothing was said to count instead.
        PermissionError: Likewise.
    """

    def read(place: Location) -> bytes:
        try:
            return place.read_bytes()
        except FileNotFoundError:
            if missing is None:
                raise
            return missing
        except PermissionError:
            if denied is None:
                raise
            return denied

    places = list(paths)
    if not any(isinstance(place, S3Path) for place in places):
        return [read(place) for place in places]
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(read, places))


def read_all_json(paths: Iterable[Location], missing: bytes | None = None) -> list[Any]:
    """The JSON values of many small files; see `read_all` and `read_json`."""
    places = list(paths)
    return [_parse_json(place, data) for place, data in zip(places, read_all(places, missing), strict=True)]


def remove_temporary(folder: Location) -> None:
    """Removes what writers of a folder's files that were stopped in the middle have left."""
    if isinstance(folder, S3Path):
        folder.end_uploads()
        return
    for file in list_tree(folder, temporary=True).values():
        file.unlink(missing_ok=True)


def remove_tree(folder: Location) -> None:
    """Removes a folder with all that is in it, as far as the storage lets us; nobody may rely on the order."""
    if isinstance(folder, S3Path):
        folder.remove_tree()
    else:
        shutil.rmtree(folder, ignore_errors=True)
