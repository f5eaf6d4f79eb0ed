"""Shuffle windows: the rows of one window of one logical worker, and the micro-batches that its steps take from them.

`Windows` is the interface of a source of windows. `CachedWindows`, here, serves a data set that is decoded in memory;
`ray_app.data.prefetch.StreamedWindows` reads and decodes ahead of the training.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ray_app.data.reader import Decoded
from ray_app.plan.hashing import hash_array, key
from ray_app.plan.order import EpochOrder, order_by_length
from ray_app.task.ragged import Arrays, Ragged

Storage = dict[str, Tensor | Ragged]
"""Decoded rows by field; micro-batches are gathered from them."""

# Salts of the hashes: of a row, of a row's augmentation, and of the order of micro-batches by length.
_ROW = 11
_AUGMENT = 12
_LENGTH = 14
_REPEAT_BITS = 40
"""A key holds the manifest position of its row in the lower bits, and from this bit on the repeat of the row."""
_NO_BAD_ROWS: Mapping[int, str] = {}
_ALIGNED_BYTES = 64
"""A tensor begins at a multiple of this many bytes.

Kernels may sum in another order if it begins elsewhere, and the results would not be bit-identical.
"""
BLOCK_BYTES = 2 << 20
"""Small steps are gathered together, in blocks of up to this many bytes.

The calls for each step would take longer than the copying. A block stays in memory as long as one of its micro-batches
is used.
"""


class MicroBatch(NamedTuple):
    """The rows of one logical worker in one step.

    Args:
        rows: Number of rows; may be 0 in the last step of an epoch, or where all rows are bad.
        fields: Decoded fields, each (rows, ...).
        keys: Hash of (seed, epoch, row, repeat of the row in the epoch) per row for `Task.augment`, shape (rows,).
        row_hash: Sum of the rows' 64-bit hashes, modulo 2**64.
        positions: Manifest positions of the rows, shape (rows,).
        bad: The planned rows that cannot be decoded: the reason by manifest position. None of the fields above
            includes them.
    """

    logical_worker: int
    rows: int
    fields: dict[str, Tensor]
    keys: Tensor
    row_hash: int
    positions: npt.NDArray[np.int64]
    bad: Mapping[int, str] = _NO_BAD_ROWS
    num_skipped: int = 0


class Window:
    """The rows of one shuffle window of one logical worker.

    Args:
        fields: Storage that `index` points into.
        index: Indices of the window's rows in the storage, in the order of consumption, shape (rows,).
        positions: Manifest positions of these rows, shape (rows,).
        reasons: Why rows cannot be decoded, by manifest position; may include rows of other windows.

    Attributes:
        step_bytes: Bytes of a full micro-batch.
        is_prepared: Whether all micro-batches were gathered in advance.
    """

    def __init__(
        self,
        order: EpochOrder,
        logical_worker: int,
        window: int,
        fields: Storage,
        index: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        reasons: dict[int, str],
    ) -> None:
        self._micro, self._logical_worker = order.plan.micro_batch, logical_worker
        self._first_step = window * order.plan.steps_per_window
        self._end = min(self._first_step + order.plan.steps_per_window, order.plan.steps_per_epoch)
        self.step_bytes = self._micro * sum(values.nbytes // max(1, len(values)) for values in fields.values())
        uses = positions + (order.window_repeats(logical_worker, window) << _REPEAT_BITS)
        if order.plan.by_length is not None:
            field = fields[order.plan.by_length]
            assert isinstance(field, Ragged), "checked before the start"
            alike = order_by_length(
                field.lengths_of(index), self._micro, key(_LENGTH, order.plan.seed, order.epoch, window)
            )
            index = index[alike]
            positions = positions[alike]
            uses = uses[alike]
        self._fields = fields
        self._index = index
        self._positions = positions
        self._keys = (hash_array(key(_AUGMENT, order.plan.seed, order.epoch), uses) >> np.uint64(1)).astype(np.int64)
        starts = np.arange(0, len(positions), self._micro)
        self._reasons, self._bad = reasons, np.isin(positions, list(reasons)) if reasons else None
        self._row_hash = np.add.reduceat(hash_array(_ROW, positions), starts).tolist() if len(positions) else []
        # Only then may several steps be gathered as one block: each step's part of it begins aligned.
        self._can_gather_blocks = self._bad is None and all(
            isinstance(values, Tensor) and not self._micro * values[:1].nbytes % _ALIGNED_BYTES
            for values in fields.values()
        )
        self._prepared: dict[int, MicroBatch] = {}
        self.is_prepared = False

    def prepare(self, min_steps: int, max_bytes: int) -> Window:
        """Gathers all micro-batches, or those of `min_steps` if all exceed `max_bytes`; returns this window.

        This runs in the thread that reads. During the first steps of a window that thread is busy with the next window,
        and a gathering thread would wait for the interpreter lock in every step.
        """
        steps = range(self._first_step, self._end)
        self.is_prepared = len(steps) * self.step_bytes <= max_bytes
        steps = steps if self.is_prepared else steps[:min_steps]
        block_steps = max(1, BLOCK_BYTES // max(1, self.step_bytes))
        for block in (steps[first : first + block_steps] for first in range(0, len(steps), block_steps)):
            self._prepared |= zip(block, self.micro_batches(block), strict=True)
        return self

    def micro_batches(self, steps: range) -> list[MicroBatch]:
        """Returns the micro-batches of consecutive steps of the epoch, in host memory."""
        is_block = len(steps) > 1 and self._can_gather_blocks and steps[0] not in self._prepared
        return self._gather_block(steps) if is_block else [self._micro_batch(step) for step in steps]

    def _gather_block(self, steps: range) -> list[MicroBatch]:
        """Gathers several steps with the calls of one."""
        numbers = [step - self._first_step for step in steps]
        low, high = numbers[0] * self._micro, (numbers[-1] + 1) * self._micro
        positions = self._positions[low:high]
        sizes = [max(0, min(self._micro, len(positions) - start)) for start in range(0, high - low, self._micro)]
        fields = gather_rows(self._fields, self._index[low:high])
        parts = zip(
            *(values.split(sizes) for values in (torch.from_numpy(self._keys[low:high]), *fields.values())), strict=True
        )
        batches, start = list[MicroBatch](), 0
        for number, rows, (keys, *values) in zip(numbers, sizes, parts, strict=True):
            # `.data` makes each part a tensor that autograd does not take for a view of the block.
            step_fields = {name: value.data for name, value in zip(fields, values, strict=True)}
            row_hash = self._row_hash[number] if rows else 0
            step_positions = positions[start : start + rows]
            batches.append(MicroBatch(self._logical_worker, rows, step_fields, keys, row_hash, step_positions))
            start += rows
        return batches

    def _micro_batch(self, step: int) -> MicroBatch:
        # The thread that still gathers for a cursor that the feed has left may take the same step at the same time.
        prepared = self._prepared.pop(step, None)
        if prepared is not None:
            return prepared
        number = step - self._first_step
        low, high = number * self._micro, (number + 1) * self._micro
        index = self._index[low:high]
        keys = self._keys[low:high]
        positions = self._positions[low:high]
        row_hash = self._row_hash[number] if number < len(self._row_hash) else 0
        reasons, num_skipped = dict[int, str](), 0
        if self._bad is not None and (bad := self._bad[low:high]).any():
            reasons = {position: self._reasons[position] for position in positions[bad].tolist()}
            num_skipped = int(bad.sum())
            index = index[~bad]
            keys = keys[~bad]
            positions = positions[~bad]
            row_hash = int(hash_array(_ROW, positions).sum(dtype=np.uint64))
        fields = gather_rows(self._fields, index)
        return MicroBatch(
            self._logical_worker, len(index), fields, torch.from_numpy(keys), row_hash, positions, reasons, num_skipped
        )


def as_storage(arrays: Arrays) -> Storage:
    """Returns decoded rows as storage for windows, without copying them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {
            name: values if isinstance(values, Ragged) else torch.from_numpy(values) for name, values in arrays.items()
        }


def gather_rows(fields: Storage, index: npt.NDArray[np.int64]) -> dict[str, Tensor]:
    """Returns the rows at `index` as the batch that a task gets, see `ray_app.task.ragged.to_batch`."""
    batch, rows = dict[str, Tensor](), torch.from_numpy(index)
    for name, values in fields.items():
        if isinstance(values, Ragged):
            batch |= values.batch(name, index)
        else:
            batch[name] = values.index_select(0, rows)
    return batch


class Windows(Protocol):
    """A source of windows."""

    def take(self, order: EpochOrder, logical_worker: int, window: int) -> Window:
        """Returns the next window; callers take windows in the order of epochs, windows and logical workers."""
        ...

    def close(self) -> None:
        """Frees threads and memory."""
        ...


class CachedWindows:
    """Windows over a data set that is decoded in memory, possibly read-only views of shared memory."""

    def __init__(self, decoded: Decoded) -> None:
        self._fields, self._reasons = as_storage(decoded.arrays), decoded.reasons

    def take(self, order: EpochOrder, logical_worker: int, window: int) -> Window:
        """Returns a window, see `Windows.take`."""
        positions = order.stored_positions(logical_worker, window)[order.window_order(logical_worker, window)]
        return Window(order, logical_worker, window, self._fields, positions, positions, self._reasons)

    def close(self) -> None:
        """Does nothing: the memory belongs to the cache."""
