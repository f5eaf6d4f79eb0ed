"""What is in files, as digests: it tells any other content apart, where the manifest knows paths and row counts alone."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ray_app.data.dataset.files import Place, opened, versions
from ray_app.record.files import Location, put_json, read_json

_THREADS = 8
_SETTLED_NS = 5_000_000_000


def contents(root: Place, paths: Iterable[str], memory: Location | None = None) -> dict[str, str]:
    """SHA-256 of files below a folder, by their relative path.

    Args:
        root: The folder.
        paths: The files.
        memory: A file that keeps the digests: what was not changed since then is not read again. Not given: all are read.

    Raises:
        OSError: One cannot be read.
    """
    listed = list(paths)
    now_ns, seen = time.time_ns(), dict(zip(listed, _versions(root, listed), strict=True)) if memory is not None else {}
    known = _remembered(memory, root) if memory is not None else {}
    found = {path: known[path][1] for path in listed if path in known and known[path][0] == seen[path]}
    unknown = [path for path in listed if path not in found]
    with ThreadPoolExecutor(_THREADS) as pool:
        found |= zip(unknown, pool.map(lambda path: sha256(root / path), unknown), strict=True)
    if memory is not None and unknown:
        kept = {path: [seen[path], found[path]] for path in listed if _is_settled(seen[path], now_ns)}
        put_json(memory, {"root": str(root), "files": kept})
    return {path: found[path] for path in listed}


def _versions(root: Place, paths: list[str]) -> list[Any]:
    """What changes with the content of a file: its ETag on S3; on a disk size, times and inode, which a copy cannot all set back."""
    if not isinstance(root, Path):
        return versions(root, paths)
    stats = [(root / path).stat() for path in paths]
    return [[stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino] for stat in stats]


def _is_settled(version: Any, now_ns: int) -> bool:
    """Whether a later change shows in the version: clocks of file systems may stand still for seconds."""
    return isinstance(version, str) or now_ns - version[2] > _SETTLED_NS


def _remembered(memory: Location, root: Place) -> dict[str, Any]:
    try:
        values = read_json(memory) or {}
        return dict(values["files"]) if values.get("root") == str(root) else {}
    except (ValueError, KeyError, TypeError, AttributeError):  # it is damaged; then everything is read
        return {}


def sha256(file: Place) -> str:
    """SHA-256 of a file."""
    with opened(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
