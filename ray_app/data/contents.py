"""What is in files, as digests: it tells any other content apart, where the manifest knows paths and row counts alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from ray_app.data.places import opened
from ray_app.record.files import Location

_THREADS = 8


def contents(root: Location, paths: Iterable[str]) -> dict[str, str]:
    """SHA-256 of files below a folder, by their relative path; reads all of them.

    Raises:
        OSError: One cannot be read.
    """
    listed = list(paths)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(listed, pool.map(lambda path: sha256(root / path), listed), strict=True))


def sha256(file: Location) -> str:
    """SHA-256 of a file."""
    with opened(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
