"""The folder of a node's disk caches: which belongs to which data, what may be removed, and how much room one gets."""

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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from ray_app.data.dataset.arrays import ArraySpec
from ray_app.data.dataset.files import place_of, versions
from ray_app.data.feed.disk_cache import SUMS, DiskCache
from ray_app.data.feed.disk_cache_fields import sizes
from ray_app.data.read.bad_rows import Decode
from ray_app.data.read.reader import Fetch, RowSource

logger = logging.getLogger(__name__)

_LIBRARIES = ("numpy", "torch", "torchvision", "Pillow", "simplejpeg")
_DIGITS = 32
_OURS = ("data/dataset/*.py", "data/read/*.py", "plan/partitions.py", "task/**/*.py")
"""Code of the application, below `_APPLICATION`, that has a part in what a decoded row is."""
_APPLICATION = Path(__file__).parents[2]
_NAME = re.compile(rf"[0-9a-f]{{{_DIGITS}}}")
"""Name of a cache's folder, see `identity`."""


def open_cache(source: RowSource, settings: str, folder: str | None, limit_gb: float) -> DiskCache:
    """Opens the cache of a data set on this node, empty if there is none yet.

    Caches of other data that nobody has open are removed, those that were opened longest ago first, until there is room for all rows
    within the limit; if there is still too little, the cache has room for the first rows only. Who opens it while nobody else has it open
    decides anew how much room it has; rows that it holds are lost only where there is less than before.

    Args:
        source: The data set, and how it is decoded.
        settings: Whatever else decides how a decoded row looks.
        folder: Where the node's caches are; None: `ray_app-UID/cache` in its temporary folder.
        limit_gb: Most gigabytes of all of them.

    Raises:
        OSError: The folder cannot be used or belongs to another user, or nobody can say which code decodes.
    """
    root = Path(folder).expanduser() if folder is not None else Path(tempfile.gettempdir()) / f"ray_app-{os.getuid()}" / "cache"
    own = root / identity(source, settings)
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
                for name, size in sizes(i, spec, room).items():
                    _resize(own / name, size)
            os.ftruncate(sums, room * 8)
        fcntl.flock(sums, fcntl.LOCK_SH)  # in use, until this process closes it or ends
        os.utime(own)
        room = os.fstat(sums).st_size // 8
        if room < source.manifest.num_rows:
            logger.warning(
                "The disk cache %s has room for %d of %d rows within data.cache_gb = %g; the others are read in every epoch.",
                own,
                room,
                source.manifest.num_rows,
                limit_gb,
            )
    return DiskCache(own, source.fields, sums)


def _bytes(fields: dict[str, ArraySpec], room: int) -> int:
    """Bytes of a cache with room for so many rows."""
    return room * 8 + sum(sum(sizes(i, spec, room).values()) for i, spec in enumerate(fields.values()))


def cached_fetch(fetch: Fetch, source: RowSource, settings: str, folder: str | None, limit_gb: float) -> Fetch:
    """`fetch` with a disk cache around it, or as it is, with a warning, where there can be none; see `open_cache`."""
    try:
        return open_cache(source, settings, folder, limit_gb).around(fetch)
    except OSError as error:
        logger.warning("There is no disk cache on this node, the data is read in every epoch: %s", error)
        return fetch


def identity(source: RowSource, settings: str) -> str:
    """SHA-256 of all that decides what the decoded rows are: the files as they are now, the task's settings and code, the libraries.

    Raises:
        OSError: A file of the data is gone, S3 does not answer, or there is no source file of the code.
    """
    manifest, reader = source.manifest, source.reader
    facts = {
        "manifest": manifest.digest,
        "files": versions(place_of(reader.root), manifest.paths),
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
    parts = [decode] if owner is None else [c for c in type(owner).__mro__ if c.__module__ not in sys.stdlib_module_names]
    digests = []
    for part in parts:
        try:
            file = inspect.getsourcefile(part)
        except TypeError as error:
            raise OSError(f"there is no source file of {part}, which decodes, so a change of it would not be seen") from error
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
            errno.EPERM, f"It belongs to another user (uid {owner}); give data.cache_dir a folder of your own", str(folder)
        )


def _make_room(own: Path, wanted: int, limit_gb: float) -> int:
    """Removes caches that nobody has open, oldest first, until `wanted` bytes fit; returns the bytes that there are then.

    Whatever else is in the folder is left alone and does not count.
    """
    caches = (f for f in own.parent.iterdir() if _NAME.fullmatch(f.name) and not f.is_symlink() and (f / SUMS).is_file())
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
