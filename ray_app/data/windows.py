"""The rows of a shuffle window and the micro-batches in it, and windows over a data set that is decoded in memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ray_app.data.local_readers import Decoded
from ray_app.plan.hashing import hash_array, key
from ray_app.plan.order import EpochOrder, order_by_length
from ray_app.task.ragged import Arrays, Ragged

Storage = dict[str, Tensor | Ragged]
"""Decoded rows that micro-batches are gathered from."""
_ROW, _AUGMENT, _LENGTH = 11, 12, 14  # salts: what a row's hash, or a window's key, is for
_REPEAT_BITS = 40
"""Above the bits of a manifest position in a key: which use of the row in its epoch it is for."""
_NOT_ONE: Mapping[int, str] = {}
_ALIGNED_BYTES = 64
"""Where a tensor of its own begins in memory; what begins elsewhere may give other bits."""
BLOCK_BYTES = 2 << 20
"""Of steps whose rows are gathered at once, because the calls for each would take longer than the copying: one that is
kept keeps all.
"""


class MicroBatch(NamedTuple):
    """The rows of one logical worker in one step.

    Args:
        logical_worker: Whose rows.
        rows: How many; may be 0 in the last step of an epoch, or where all are bad.
        fields: Decoded fields, each (rows, ...).
        keys: Hash of (seed, epoch, row, which use of it in the epoch) per row for `Task.augment`, shape (rows,).
        row_hash: Sum of the rows' 64-bit hashes, modulo 2**64.
        positions: Manifest positions of the rows, shape (rows,).
        bad: Rows that were planned here and cannot be decoded: why, by manifest position. They are in nothing of the
            above.
        num_skipped: How many they are, repetitions counted.
    """

    logical_worker: int
    rows: int
    fields: dict[str, Tensor]
    keys: Tensor
    row_hash: int
    positions: npt.NDArray[np.int64]
    bad: Mapping[int, str] = _NOT_ONE
    num_skipped: int = 0


class Window:
    """The rows of one shuffle window of one logical worker.

    Args:
        order: The epoch's order.
        logical_worker: Whose window.
        window: Which.
        fields: Storage that `index` points into.
        index: Where the window's rows are in the storage, in the order of consumption, shape (rows,).
        positions: Their manifest positions, shape (rows,).
        reasons: Why rows cannot be decoded, by manifest position; may have those of other windows.

    Attributes:
        step_bytes: Bytes of a micro-batch, all of whose rows are there.
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
            index, positions, uses = index[alike], positions[alike], uses[alike]
        self._fields, self._index, self._positions = fields, index, positions
        self._keys = (hash_array(key(_AUGMENT, order.plan.seed, order.epoch), uses) >> np.uint64(1)).astype(np.int64)
        starts = np.arange(0, len(positions), self._micro)
        self._reasons, self._bad = reasons, np.isin(positions, list(reasons)) if reasons else None
        self._row_hash = np.add.reduceat(hash_array(_ROW, positions), starts).tolist() if len(positions) else []
        self._is_even = self._bad is None and all(
            isinstance(values, Tensor) and not self._micro * values[:1].nbytes % _ALIGNED_BYTES
            for values in fields.values()
        )
        self._prepared: dict[int, MicroBatch] = {}
        self.is_prepared = False

    def prepare(self, at_least: int, most_bytes: int) -> Window:
        """Gathers the rows of all steps in advance, of as many bytes at most; where they are more, those of the first
        steps.

        In the thread that reads: at the first steps it would be busy with the next window, and a thread that gathers
        for every step waits for Python's lock.
        """
        steps = range(self._first_step, self._end)
        self.is_prepared = len(steps) * self.step_bytes <= most_bytes
        steps = steps if self.is_prepared else steps[:at_least]
        at_once = max(1, BLOCK_BYTES // max(1, self.step_bytes))
        for block in (steps[at : at + at_once] for at in range(0, len(steps), at_once)):
            self._prepared |= zip(block, self.micro_batches(block), strict=True)
        return self

    def micro_batches(self, steps: range) -> list[MicroBatch]:
        """Those of some steps of the epoch that follow each other, in host memory."""
        is_block = len(steps) > 1 and self._is_even and steps[0] not in self._prepared
        return self._block(steps) if is_block else [self._micro_batch(step) for step in steps]

    def _block(self, steps: range) -> list[MicroBatch]:
        """Those of several steps with the calls of one."""
        places = [step - self._first_step for step in steps]
        low, high = places[0] * self._micro, (places[-1] + 1) * self._micro
        positions = self._positions[low:high]
        sizes = [max(0, min(self._micro, len(positions) - at)) for at in range(0, high - low, self._micro)]
        fields = gather_rows(self._fields, self._index[low:high])
        parts = zip(
            *(values.split(sizes) for values in (torch.from_numpy(self._keys[low:high]), *fields.values())), strict=True
        )
        told, at = list[MicroBatch](), 0
        for place, rows, (keys, *values) in zip(places, sizes, parts, strict=True):
            own = {
                name: value.data for name, value in zip(fields, values, strict=True)
            }  # for autograd a tensor of its own
            row_hash = self._row_hash[place] if rows else 0
            told.append(MicroBatch(self._logical_worker, rows, own, keys, row_hash, positions[at : at + rows]))
            at += rows
        return told

    def _micro_batch(self, step: int) -> MicroBatch:
        prepared = self._prepared.pop(step, None)  # the thread that gathers for a cursor that was left may take it, too
        if prepared is not None:
            return prepared
        place = step - self._first_step
        low, high = place * self._micro, (place + 1) * self._micro
        index, keys, positions = self._index[low:high], self._keys[low:high], self._positions[low:high]
        row_hash = self._row_hash[place] if place < len(self._row_hash) else 0
        named, num_skipped = dict[int, str](), 0
        if self._bad is not None and (bad := self._bad[low:high]).any():
            named = {position: self._reasons[position] for position in positions[bad].tolist()}
            num_skipped = int(bad.sum())
            index, keys, positions = index[~bad], keys[~bad], positions[~bad]
            row_hash = int(hash_array(_ROW, positions).sum(dtype=np.uint64))
        fields = gather_rows(self._fields, index)
        return MicroBatch(
            self._logical_worker, len(index), fields, torch.from_numpy(keys), row_hash, positions, named, num_skipped
        )


def as_storage(arrays: Arrays) -> Storage:
    """Decoded rows, without copying them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {
            name: values if isinstance(values, Ragged) else torch.from_numpy(values) for name, values in arrays.items()
        }


def gather_rows(fields: Storage, index: npt.NDArray[np.int64]) -> dict[str, Tensor]:
    """Some rows as the batch that a task gets, see `ray_app.task.ragged.to_batch`."""
    batch, places = dict[str, Tensor](), torch.from_numpy(index)
    for name, values in fields.items():
        if isinstance(values, Ragged):
            batch |= values.batch(name, index)
        else:
            batch[name] = values.index_select(0, places)
    return batch


class Windows(Protocol):
    """Where windows come from."""

    def take(self, order: EpochOrder, logical_worker: int, window: int) -> Window:
        """The next window; they are taken in the order of epochs, windows and logical workers."""
        ...

    def close(self) -> None:
        """Frees threads and memory."""
        ...


class CachedWindows:
    """Windows over a data set that is decoded in memory.

    Args:
        decoded: The data set; read-only views of shared memory are fine.
    """

    def __init__(self, decoded: Decoded) -> None:
        self._fields, self._reasons = as_storage(decoded.arrays), decoded.reasons

    def take(self, order: EpochOrder, logical_worker: int, window: int) -> Window:
        """See `Windows.take`."""
        positions = order.stored_positions(logical_worker, window)[order.window_order(logical_worker, window)]
        return Window(order, logical_worker, window, self._fields, positions, positions, self._reasons)

    def close(self) -> None:
        """Nothing to free: the memory belongs to the cache."""
