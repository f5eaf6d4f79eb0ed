"""Rows of different length: texts as tokens, boxes of an image, images of any size."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

LENGTHS = "_lengths"
"""Suffix of the field of a batch that has the lengths of the rows of a ragged field."""


@dataclass(frozen=True, eq=False)
class Ragged:
    """A field with rows of different lengths; the rows of a micro-batch are padded to its longest row.

    A micro-batch belongs to one logical worker, so the padded length does not depend on the number of workers.

    Args:
        values: All rows, concatenated, shape (sum of lengths, ...).
        offsets: The index in `values` where each row begins, and where the last one ends, int64, shape (rows + 1,).
        fill: The value that rows are padded with.
        multiple: Padded lengths are rounded up to a multiple of it.
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
        """Makes a ragged field of rows, each of shape `(length, *row_shape)`."""
        arrays = [np.asarray(row, dtype).reshape(-1, *row_shape) for row in rows]
        offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        return cls(np.concatenate([*arrays, np.empty((0, *row_shape), dtype)]), offsets, fill, multiple)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row without its length."""
        return self.values.shape[1:]

    def padded_with(self, fill: float, multiple: int = 1) -> Ragged:
        """Returns the same rows with other padding."""
        return Ragged(self.values, self.offsets, fill, multiple)

    def cut(self, max_length: int) -> Ragged:
        """Returns the rows cut to a length; the same object if no row is longer."""
        if not (self.lengths > max_length).any():
            return self
        return self.like(self.row(i)[:max_length] for i in range(len(self)))

    def like(self, rows: Iterable[npt.NDArray]) -> Ragged:
        """Returns other rows with the type and the padding of this field."""
        return Ragged.of(rows, self.values.dtype, self.fill, self.multiple, self.row_shape)

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The length of each row, shape (rows,)."""
        return np.diff(self.offsets)

    def lengths_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the lengths of some rows, without computing those of the others."""
        return self.offsets[1:][rows] - self.offsets[:-1][rows]

    @property
    def nbytes(self) -> int:
        """The bytes of all rows."""
        return int(self.offsets[-1] - self.offsets[0]) * self.values[:1].nbytes if len(self.values) else 0

    @overload
    def __getitem__(self, rows: slice | npt.NDArray) -> Ragged: ...

    @overload
    def __getitem__(self, rows: int | np.integer) -> npt.NDArray: ...

    def __getitem__(self, rows: int | np.integer | slice | npt.NDArray) -> npt.NDArray | Ragged:
        """Returns one row for an integer, or several rows for a slice, an array of indices or a mask.

        One row has the shape (length, ...). The rows of a slice with a step of 1 are not copied.

        Raises:
            IndexError: The row is out of range.
        """
        if isinstance(rows, slice):
            low, high, step = rows.indices(len(self))
            if step == 1:
                return Ragged(self.values, self.offsets[low : max(low, high) + 1], self.fill, self.multiple)
            rows = np.arange(low, high, step)
        if isinstance(rows, np.ndarray) and rows.ndim:
            return self.like(self.row(i) for i in np.arange(len(self))[rows])
        index = operator.index(rows)
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} rows")
        return self.row(index % len(self))

    def __iter__(self) -> Iterator[npt.NDArray]:
        """Iterates over the rows, each of shape (length, ...)."""
        return map(self.row, range(len(self)))

    def row(self, number: int) -> npt.NDArray:
        """Returns one row, shape (length, ...)."""
        return self.values[self.offsets[number] : self.offsets[number + 1]]

    def compact(self) -> Ragged:
        """Returns the same rows, with `values` that have no others before or after them."""
        low, high = int(self.offsets[0]), int(self.offsets[-1])
        return Ragged(self.values[low:high], self.offsets - low, self.fill, self.multiple)

    def batch(self, name: str, index: npt.NDArray[np.int64]) -> dict[str, Tensor]:
        """Returns some rows, padded, and their lengths as the fields of a task's batch.

        The rows are in memory that torch allocates, which is aligned to 64 bytes. Kernels may give other bits for other
        alignments, and the alignment of NumPy's memory depends on earlier allocations of the process.
        """
        import torch

        return {
            name: torch.from_numpy(self.padded(index)),
            name + LENGTHS: torch.from_numpy(self.lengths_of(index)).clone(),
        }

    def padded(self, index: npt.NDArray[np.int64]) -> npt.NDArray:
        """Returns some rows, padded to the longest of them and at least to 1, shape (rows, length, ...)."""
        import torch

        from ray_app.devices import HOST

        lengths = self.lengths_of(index)
        longest = -(-int(lengths.max(initial=1)) // self.multiple) * self.multiple
        shape, dtype = (len(index), longest, *self.values.shape[1:]), self.values.dtype
        memory = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device=HOST)
        into = memory.numpy().view(dtype).reshape(shape)
        into[...] = self.fill
        if not len(index):
            return into
        position = np.arange(longest)
        is_value = position < lengths[:, None]
        into[is_value] = self.values[(self.offsets[:-1][index][:, None] + position)[is_value]]
        return into


Field = npt.NDArray | Ragged
Arrays = Mapping[str, Field]
"""Decoded rows: fields by name, all with the same number of rows."""


def to_batch(arrays: Arrays, index: slice | npt.NDArray[np.int64] | None = None) -> dict[str, Tensor]:
    """Returns decoded rows, all or those of `index` in its order, as the batch that a task gets, in host memory.

    A field has the shape (rows, ...); a ragged field `x` is padded, (rows, length, ...), with its lengths, int64,
    (rows,), as `x_lengths`.
    """
    import torch

    batch: dict[str, Tensor] = {}
    for name, values in arrays.items():
        if isinstance(values, Ragged):
            batch |= values.batch(name, np.arange(len(values))[slice(None) if index is None else index])
        else:
            batch[name] = torch.from_numpy(values if index is None else values[index])
    return batch


def to_array(values: Tensor) -> npt.NDArray:
    """Returns a tensor on the CPU as an array; NumPy has no bfloat16."""
    import torch

    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def concat_fields(parts: Sequence[Field]) -> Field:
    """Concatenates the rows of several parts of a field."""
    ragged = [part for part in parts if isinstance(part, Ragged)]
    return concat_ragged(ragged) if ragged else np.concatenate(parts)  # type: ignore[arg-type]


def concat_ragged(parts: list[Ragged]) -> Ragged:
    """Concatenates the rows of several ragged fields, with the padding of the first."""
    compact = [part.compact() for part in parts]
    first = compact[0]
    if len(compact) == 1:
        return first
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate([part.lengths for part in compact]))])
    return Ragged(np.concatenate([part.values for part in compact]), offsets, first.fill, first.multiple)
