"""Rows of different length: texts as tokens, boxes of an image, images of any size."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LENGTHS = "_lengths"
"""What is added to a ragged field's name for the lengths of its rows in a batch."""


@dataclass(frozen=True, eq=False)
class Ragged:
    """A field whose rows have different lengths; the rows of a micro-batch are padded to the longest of them.

    A micro-batch belongs to one logical worker, so what it is padded to depends on nothing else.

    Args:
        values: All rows, one after the other, shape (sum of lengths, ...).
        offsets: Where each row begins in them, and where the last one ends, int64, shape (rows + 1,).
        fill: What a row is padded with.
        multiple: What a padded length is a multiple of.
    """

    values: npt.NDArray
    offsets: npt.NDArray[np.int64]
    fill: float = 0
    multiple: int = 1

    @classmethod
    def of(
        cls,
        rows: Iterable[npt.ArrayLike],
        dtype: npt.DTypeLike,
        fill: float = 0,
        multiple: int = 1,
        row_shape: tuple[int, ...] = (),
    ) -> Ragged:
        """Puts rows together, each of shape (length, ...) with `row_shape` in the place of the dots."""
        arrays = [np.asarray(row, dtype).reshape(-1, *row_shape) for row in rows]
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        return cls(np.concatenate([*arrays, np.empty((0, *row_shape), dtype)]), offsets, fill, multiple)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row without its length."""
        return self.values.shape[1:]

    def padded_with(self, fill: float, multiple: int = 1) -> Ragged:
        """The same rows, padded otherwise."""
        return Ragged(self.values, self.offsets, fill, multiple)

    def cut(self, most: int) -> Ragged:
        """The first so many of each row; the same object, if none has more."""
        if not (self.lengths > most).any():
            return self
        return Ragged.of(
            (self.row(i)[:most] for i in range(len(self))), self.values.dtype, self.fill, self.multiple, self.row_shape
        )

    def __len__(self) -> int:
        """How many rows."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Of each row, shape (rows,)."""
        return np.diff(self.offsets)

    def lengths_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of some rows, without a look at the others."""
        return self.offsets[1:][rows] - self.offsets[:-1][rows]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return int(self.offsets[-1] - self.offsets[0]) * self.values[:1].nbytes if len(self.values) else 0

    @overload
    def __getitem__(self, rows: slice | npt.NDArray) -> Ragged: ...

    @overload
    def __getitem__(self, rows: int | np.integer) -> npt.NDArray: ...

    def __getitem__(self, rows: int | np.integer | slice | npt.NDArray) -> npt.NDArray | Ragged:
        """One row, shape (length, ...), as of a list; or several: a slice without copying where its step is 1, an index
        or a mask.

        Raises:
            IndexError: There is no such row.
        """
        if isinstance(rows, slice):
            low, high, step = rows.indices(len(self))
            if step == 1:
                return Ragged(self.values, self.offsets[low : max(low, high) + 1], self.fill, self.multiple)
            rows = np.arange(low, high, step)
        if isinstance(rows, np.ndarray) and rows.ndim:
            return Ragged.of(
                (self.row(i) for i in np.arange(len(self))[rows]),
                self.values.dtype,
                self.fill,
                self.multiple,
                self.row_shape,
            )
        index = operator.index(rows)
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} rows")
        return self.row(index % len(self))

    def __iter__(self) -> Iterator[npt.NDArray]:
        """The rows one after the other, each of shape (length, ...)."""
        return map(self.row, range(len(self)))

    def row(self, number: int) -> npt.NDArray:
        """One row, shape (length, ...)."""
        return self.values[self.offsets[number] : self.offsets[number + 1]]

    def compact(self) -> Ragged:
        """The same rows, whose values begin with the first and end with the last."""
        low, high = int(self.offsets[0]), int(self.offsets[-1])
        return Ragged(self.values[low:high], self.offsets - low, self.fill, self.multiple)

    def batch(self, name: str, index: npt.NDArray[np.int64]) -> dict[str, Tensor]:
        """Some rows padded, and their lengths, as they stand in a task's batch.

        In memory of torch's, which begins at a multiple of 64 bytes: kernels may give other bits for what begins
        elsewhere, and where NumPy's begins depends on what the process did before.
        """
        return {
            name: torch.from_numpy(self.padded(index)),
            name + LENGTHS: torch.from_numpy(self.lengths_of(index)).clone(),
        }

    def padded(self, index: npt.NDArray[np.int64]) -> npt.NDArray:
        """Some rows, padded to the longest of them, at least 1, shape (rows, length, ...)."""
        lengths = self.lengths_of(index)
        longest = -(-int(lengths.max(initial=1)) // self.multiple) * self.multiple
        shape, dtype = (len(index), longest, *self.values.shape[1:]), self.values.dtype
        into = (
            torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device="cpu")
            .numpy()
            .view(dtype)
            .reshape(shape)
        )
        into[...] = self.fill
        if not len(index):
            return into
        place = np.arange(longest)
        there = place < lengths[:, None]
        into[there] = self.values[(self.offsets[:-1][index][:, None] + place)[there]]
        return into


Field = npt.NDArray | Ragged
Arrays = Mapping[str, Field]
"""Decoded rows: a field by its name, each of as many rows."""


def to_batch(arrays: Arrays, index: slice | npt.NDArray[np.int64] | None = None) -> dict[str, Tensor]:
    """Decoded rows as the batch that a task gets, in host memory.

    Args:
        arrays: The fields.
        index: Which rows, in which order; not given: all.

    Returns:
        Each field, (rows, ...); a ragged one padded, (rows, length, ...), with its lengths beside it, int64, (rows,),
        as NAME_lengths.
    """
    batch: dict[str, Tensor] = {}
    for name, values in arrays.items():
        if isinstance(values, Ragged):
            batch |= values.batch(name, np.arange(len(values))[slice(None) if index is None else index])
        else:
            batch[name] = torch.from_numpy(values if index is None else values[index])
    return batch


def repeat_rows(values: Field) -> Field:
    """The same rows two times."""
    return concat_ragged([values, values]) if isinstance(values, Ragged) else np.concatenate([values, values])


def concat_fields(parts: Sequence[Field]) -> Field:
    """The rows of several parts of a field, one after the other."""
    ragged = [part for part in parts if isinstance(part, Ragged)]
    return concat_ragged(ragged) if ragged else np.concatenate(parts)  # type: ignore[arg-type]


def concat_ragged(parts: list[Ragged]) -> Ragged:
    """The rows of several, one after the other."""
    own = [part.compact() for part in parts]
    if len(own) == 1:
        return own[0]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate([part.lengths for part in own]))])
    return Ragged(np.concatenate([part.values for part in own]), offsets, own[0].fill, own[0].multiple)
