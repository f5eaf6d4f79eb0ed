"""The rows of a shuffle window and the micro-batches in it, and windows over a data set that is decoded in memory."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ray_app.plan.keyed import hash_array, key
from ray_app.plan.order import EpochOrder

_ROW, _AUGMENT = 11, 12  # salts: what a row's hash is for


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The rows of one logical worker in one step.

    Args:
        logical_worker: Whose rows.
        rows: How many; may be 0 in the last step of an epoch.
        fields: Decoded fields on the device, each (rows, ...).
        keys: Hash of (seed, epoch, row) per row for `Task.augment`, shape (rows,).
        row_hash: Sum of the rows' 64-bit hashes, modulo 2**64.
        positions: Manifest positions of the rows, shape (rows,).
    """

    logical_worker: int
    rows: int
    fields: dict[str, Tensor]
    keys: Tensor
    row_hash: int
    positions: npt.NDArray[np.int64]


class Window:
    """The rows of one shuffle window of one logical worker.

    Args:
        order: The epoch's order.
        logical_worker: Whose window.
        window: Which.
        fields: Storage that `index` points into, each (rows, ...).
        index: Where the window's rows are in the storage, in the order of consumption, shape (rows,).
        positions: Their manifest positions, shape (rows,).
    """

    def __init__(
        self,
        order: EpochOrder,
        logical_worker: int,
        window: int,
        fields: dict[str, Tensor],
        index: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
    ) -> None:
        self._micro, self._logical_worker = order.plan.micro_batch, logical_worker
        self._first_step = window * order.plan.steps_per_window
        self._fields, self._index, self._positions = fields, torch.from_numpy(index), positions
        self._keys = torch.from_numpy((hash_array(key(_AUGMENT, order.plan.seed, order.epoch), positions) >> np.uint64(1)).astype(np.int64))
        starts = np.arange(0, len(positions), self._micro)
        self._row_hash = np.add.reduceat(hash_array(_ROW, positions), starts).tolist() if len(positions) else []

    def micro_batch(self, step: int, device: torch.device) -> MicroBatch:
        """The micro-batch of a step of the epoch."""
        place = step - self._first_step
        low, high = place * self._micro, (place + 1) * self._micro
        index = self._index[low:high]
        fields = {name: values.index_select(0, index) for name, values in self._fields.items()}
        if device.type != "cpu":
            fields = {name: values.to(device, non_blocking=True) for name, values in fields.items()}
        row_hash = self._row_hash[place] if place < len(self._row_hash) else 0
        return MicroBatch(self._logical_worker, len(index), fields, self._keys[low:high], row_hash, self._positions[low:high])


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
        arrays: Every field of the whole data set in manifest order, each (rows, ...); read-only views of shared memory are fine.
    """

    def __init__(self, arrays: dict[str, npt.NDArray]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            self._fields = {name: torch.from_numpy(values) for name, values in arrays.items()}

    def take(self, order: EpochOrder, logical_worker: int, window: int) -> Window:
        """See `Windows.take`."""
        positions = order.stored_positions(logical_worker, window)[order.window_order(logical_worker, window)]
        return Window(order, logical_worker, window, self._fields, positions, positions)

    def close(self) -> None:
        """Nothing to free: the memory belongs to the cache."""
