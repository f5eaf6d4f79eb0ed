"""The feed: one micro-batch per logical worker per step, as a function of (plan, cursor, logical workers to play).

Two sources of windows, siblings of one shape: `StreamedWindows` reads ahead in a thread, `CachedWindows` gathers from a data set
that is decoded in memory. Nothing of a feed is saved: at another cursor or for other logical workers a new one is made.
"""

from __future__ import annotations

import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from ray_app.data.columns import ArraySpec, decode
from ray_app.data.source import Fetch, Reader, ReadSpec, check_positions, specs_of
from ray_app.errors import DataError
from ray_app.plan.cursor import Cursor
from ray_app.plan.keyed import hash_array, key
from ray_app.plan.order import EpochOrder, Plan

_ROW, _AUGMENT = 11, 12  # salts: what a row's hash is for
_TASKS_PER_EXECUTION = 64
"""Read tasks of one Ray Data execution: starting one costs this process about half a second of CPU, whatever it reads."""


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


@dataclass(frozen=True)
class _Wanted:
    """A window to read, and the read tasks that do it."""

    order: EpochOrder
    logical_worker: int
    window: int
    specs: list[ReadSpec]


class StreamedWindows:
    """Windows that are read and decoded ahead, in the order in which the feed will take them.

    Args:
        plan: The order.
        cursor: Where the feed starts.
        played: Logical workers to read for.
        epochs: Epochs of the run.
        fetch: How read tasks run.
        reader: What they do.
        fields: What a decoded row looks like.
        task_rows: Most rows of one read task.
        prefetch_windows: Windows per logical worker to read ahead.
    """

    def __init__(
        self,
        plan: Plan,
        cursor: Cursor,
        played: range,
        epochs: int,
        fetch: Fetch,
        reader: Reader,
        fields: dict[str, ArraySpec],
        task_rows: int,
        prefetch_windows: int = 1,
    ) -> None:
        self._plan, self._cursor, self._played, self._epochs = plan, cursor, played, epochs
        self._fetch, self._reader, self._fields, self._task_rows = fetch, reader, fields, task_rows
        self._ready: queue.Queue[tuple[tuple[int, int, int], Window] | BaseException] = queue.Queue(prefetch_windows * len(played))
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()

    def take(self, order: EpochOrder, logical_worker: int, window: int) -> Window:
        """See `Windows.take`; raises what the reader raised."""
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise found
        assert found[0] == (order.epoch, window, logical_worker), f"windows out of order: {found[0]}"
        return found[1]

    def close(self) -> None:
        """Stops reading; what is read ahead is dropped."""
        self._closed.set()
        while self._thread.is_alive():
            while not self._ready.empty():
                self._ready.get_nowait()
            self._thread.join(0.01)

    def _run(self) -> None:
        try:
            for wanted in self._executions():
                for item in self._read(wanted):
                    if not self._put(item):
                        return
        except BaseException as error:  # handed to the consumer, who raises it
            self._put(error)

    def _executions(self) -> Iterator[list[_Wanted]]:
        """All windows from the cursor to the end of the run, in groups that are read by one execution each, across epochs."""
        group: list[_Wanted] = []
        tasks = 0
        for epoch in range(self._cursor.epoch, self._epochs):
            order = self._plan.epoch(epoch)
            first = self._cursor.step // self._plan.steps_per_window if epoch == self._cursor.epoch else 0
            for window, v in product(range(first, self._plan.windows_per_epoch), self._played):
                specs = specs_of(self._plan.manifest, order.window_segments(v, window), self._task_rows)
                group.append(_Wanted(order, v, window, specs))
                tasks += len(specs)
                if tasks >= _TASKS_PER_EXECUTION:
                    yield group
                    group, tasks = [], 0
        if group:
            yield group

    def _put(self, item: tuple[tuple[int, int, int], Window] | BaseException) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def _read(self, wanted: list[_Wanted]) -> Iterator[tuple[tuple[int, int, int], Window]]:
        """Reads a group of windows in their order."""
        rows = _Rows(self._fetch(self._reader, [spec for item in wanted for spec in item.specs]))
        for item in wanted:
            order, v, window = item.order, item.logical_worker, item.window
            stored = order.stored_positions(v, window)
            fields = self._tensors(rows.take(len(stored)), stored)
            index = order.window_order(v, window)
            yield (order.epoch, window, v), Window(order, v, window, fields, index, stored[index])

    def _tensors(self, tables: list[pa.Table], stored: npt.NDArray[np.int64]) -> dict[str, Tensor]:
        """The fields of a window's rows as read, after a check that they are the planned ones; each (rows, ...)."""
        if not tables:
            return {name: torch.from_numpy(np.empty((0, *s.shape), s.dtype)) for name, s in self._fields.items()}
        table = pa.concat_tables(tables)
        check_positions(table, stored)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return {name: torch.from_numpy(decode(table.column(name), spec)) for name, spec in self._fields.items()}


class _Rows:
    """Cuts a stream of tables into tables of wanted lengths."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self._rest: pa.Table | None = None

    def take(self, rows: int) -> list[pa.Table]:
        parts: list[pa.Table] = []
        while rows:
            table = self._rest if self._rest is not None else next(self._tables, None)
            if table is None:
                raise DataError(f"The read tasks ended {rows} rows too early; the data set changed while it was read.")
            parts.append(table.slice(0, rows))
            self._rest = table.slice(rows) if table.num_rows > rows else None
            rows -= parts[-1].num_rows
        return parts


@dataclass
class _Stream:
    """Windows of some logical workers, which are taken in turn."""

    played: range
    windows: Windows


class Feed:
    """Micro-batches of the logical workers that this rank plays, step by step.

    Args:
        plan: The order.
        open_windows: Opens the data at a cursor for some logical workers.
        device: Where the tensors go.
    """

    def __init__(self, plan: Plan, open_windows: Callable[[Cursor, range], Windows], device: torch.device) -> None:
        self._plan, self._open, self._device = plan, open_windows, device
        self._cursor, self._played = Cursor(0, 0), range(0)
        self._streams: list[_Stream] = []
        self._current: dict[int, tuple[tuple[int, int], Window]] = {}
        self._order = plan.epoch(0)
        self.wait_s = 0.0

    def play(self, cursor: Cursor, played: range) -> None:
        """Goes on at a cursor, not before the present one, with these logical workers; what is read already for them is kept."""
        kept = [s for s in self._streams if s.played[0] in played and s.played[-1] in played]
        for stream in self._streams:
            if stream not in kept:
                stream.windows.close()
        have = {v for s in kept for v in s.played}
        self._current = {v: held for v, held in self._current.items() if v in have}
        self._streams = kept + [_Stream(part, self._open(cursor, part)) for part in _runs([v for v in played if v not in have])]
        self._cursor, self._played = cursor, played

    def next(self) -> list[MicroBatch]:
        """The micro-batches of the next step, one per played logical worker; `wait_s` grows by the time it took."""
        began = time.perf_counter()
        cursor = self._cursor
        if self._order.epoch != cursor.epoch:
            self._order = self._plan.epoch(cursor.epoch)
        wanted = cursor.epoch, cursor.step // self._plan.steps_per_window
        for stream in self._streams:
            self._advance(stream, wanted)
        batches = [self._current[v][1].micro_batch(cursor.step, self._device) for v in self._played]
        self._cursor = cursor.next(self._plan.steps_per_epoch)
        self.wait_s += time.perf_counter() - began
        return batches

    def _advance(self, stream: _Stream, wanted: tuple[int, int]) -> None:
        """Takes the wanted windows of a stream, if they are not the current ones."""
        if all(v in self._current and self._current[v][0] == wanted for v in stream.played):
            return
        for v in stream.played:
            self._current.pop(v, None)  # frees the old windows before the new ones are waited for
        for v in stream.played:
            self._current[v] = wanted, stream.windows.take(self._order, v, wanted[1])

    def close(self) -> None:
        """Frees threads and memory."""
        for stream in self._streams:
            stream.windows.close()
        self._streams, self._current = [], {}


def _runs(numbers: list[int]) -> list[range]:
    """Ascending numbers as ranges without gaps."""
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found
