"""Files of a checkpoint, put where there are none: two workers may write the same checkpoint at once."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import IO, Any, cast

from ray_app.checkpoint.format import TRAINING, same_values
from ray_app.record.files import Content, Location, in_memory, put_atomic


class _Measured:
    """A file to write to, which knows the digest and the length of what was written.

    Args:
        file: Where it goes; None: it is only measured.
    """

    def __init__(self, file: IO[bytes] | None) -> None:
        self._file, self._sha, self.size = file, hashlib.sha256(), 0

    def write(self, data: bytes | memoryview) -> int:
        self._sha.update(data)
        self.size += len(data)
        return self._file.write(data) if self._file is not None else len(data)

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def facts(self) -> dict[str, Any]:
        return {"sha256": self._sha.hexdigest(), "bytes": self.size}


def put_if_absent(place: Location, content: Content) -> dict[str, Any] | None:
    """Writes a file unless there is one; returns its digest and size, or None if it is there with another content.

    Of a file written here they are taken from what was to be written, not from what the storage has made of it.
    """
    measured: list[_Measured] = []

    def write(file: IO[bytes] | None) -> None:
        measured.append(_Measured(file))
        measured[-1].write(content) if isinstance(content, bytes) else content(cast(IO[bytes], measured[-1]))

    if not place.exists() and put_atomic(place, write, if_absent=True):
        return measured[-1].facts()
    write(None)
    if _facts_of(place) == measured[-1].facts():
        return measured[-1].facts()
    found = place.read_bytes()
    return _facts(found) if place.name == TRAINING and same_values(found, in_memory(content)) else None


def _facts_of(place: Location) -> dict[str, Any]:
    if not isinstance(place, Path):
        return _facts(place.read_bytes())
    with place.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": file.tell()}


def _facts(data: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
