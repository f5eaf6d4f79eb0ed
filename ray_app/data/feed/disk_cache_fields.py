"""The files of one field in a disk cache: rows of one size beside each other, or rows of different lengths wherever there was room.

Rows of different lengths are appended to a file that has room for somewhat more than is expected of all rows; a second file says where each
begins and how long it is. What these say is not trusted more than the rows: the checksum of a row is one of its length, too.
"""

from __future__ import annotations

import errno
import fcntl
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ray_app.data.dataset.arrays import ArraySpec
from ray_app.plan.keyed import UInt64, hash_array, key
from ray_app.task.rows.ragged import Field, Ragged

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
        self._file, self._places = (os.open(folder / name, flags, 0o600) for name in (field_file(number), places_file(number)))

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
        begins = np.flatnonzero(np.append(True, first[1:] != first[:-1] + size[:-1]))  # rows that were written together are
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
                raise OSError(errno.ENOSPC, "rows are longer than the first ones were, for which there was room within data.cache_gb")
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
        return hash_array(key(_SUM, self._number), -1 - values.lengths) + np.concatenate([*rows, np.empty(0, np.uint64)])


def rows_of_field(folder: Path, number: int, spec: ArraySpec) -> FixedRows | RaggedRows:
    """Opens the files of a field."""
    return (FixedRows if spec.padding is None else RaggedRows)(folder, number, spec)


def sizes(number: int, spec: ArraySpec, room: int) -> dict[str, int]:
    """Bytes of the files of a field, by name, with room for so many rows."""
    if spec.padding is None:
        return {field_file(number): room * spec.row_bytes}
    return {field_file(number): _BEGIN + room * (round(spec.row_bytes * _SPARE) + _PLACE), places_file(number): room * _PLACE}


def field_file(number: int) -> str:
    """Name of the file of a field."""
    return f"field-{number:03d}"


def places_file(number: int) -> str:
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
