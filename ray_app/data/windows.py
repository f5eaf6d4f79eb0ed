"""Shuffle windows: the rows of one window of one logical worker, and the micro-batches that its steps take from them.

`Windows` is the interface of a source of windows. `CachedWindows` serves a data set that is decoded in memory. A thread
of `StreamedWindows` reads and decodes ahead of the training, by read tasks of Ray Data or of this process.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from ray_app.data.reader import Decoded, Fetch, ReadSpec, RowSource, RowStream, plan_reads, take_rows
from ray_app.plan.hashing import hash_array, key
from ray_app.plan.order import Cursor, EpochOrder, Plan, order_by_length
from ray_app.task.ragged import Arrays, Ragged

Storage = dict[str, Tensor | Ragged]
"""Decoded rows by field; micro-batches are gathered from them."""

# Salts of the hashes: of a row, of a row's augmentation, of an epoch's decoding, and of the order of micro-batches by
# length.
_ROW = 11
_AUGMENT = 12
_DECODE = 13
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
_TASKS_PER_EXECUTION = 64
_MIN_PREPARED_STEPS, _PREPARED_BYTES = 3, 16 << 20
"""Steps of a window that are gathered before it is taken: at least so many, and all of them up to so many bytes."""
_WINDOWS_BEFORE_NEXT = 4
"""Windows per logical worker before the end of a Ray Data execution at which the next execution starts.

The start of an execution takes a few tenths of a second.
"""

_WindowId = tuple[int, int, int]
"""Epoch, window and logical worker."""


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

    def micro_batches(self, steps: range, is_locked: bool = False) -> list[MicroBatch]:
        """Returns the micro-batches of consecutive steps of the epoch, in host memory.

        With `is_locked` rows that were not gathered before are gathered into page-locked memory, which a copy to a
        device needs.
        """
        is_block = len(steps) > 1 and self._can_gather_blocks and steps[0] not in self._prepared
        return self._gather_block(steps) if is_block else [self._micro_batch(step, is_locked) for step in steps]

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

    def _micro_batch(self, step: int, is_locked: bool) -> MicroBatch:
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
        fields = gather_rows(self._fields, index, is_locked)
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


def gather_rows(fields: Storage, index: npt.NDArray[np.int64], is_locked: bool = False) -> dict[str, Tensor]:
    """Returns the rows at `index` as the batch that a task gets, see `ray_app.task.ragged.to_batch`."""
    batch, rows = dict[str, Tensor](), torch.from_numpy(index)
    for name, values in fields.items():
        if isinstance(values, Ragged):
            batch |= values.batch(name, index)
        elif is_locked:
            target = values.new_empty((len(rows), *values.shape[1:]), pin_memory=True)
            batch[name] = torch.index_select(values, 0, rows, out=target)
        else:
            batch[name] = values.index_select(0, rows)
    return batch


class Windows(Protocol):
    """A source of windows."""

    def take(self, order: EpochOrder, logical_worker: int, window: int) -> Window:
        """Returns the next window; callers take windows in the order of epochs, windows and logical workers."""

    def has_next(self, count: int) -> bool:
        """Returns whether the next `count` windows can be taken without waiting and without an error."""

    def close(self) -> None:
        """Frees threads and memory."""


class CachedWindows:
    """Windows over a data set that is decoded in memory, possibly read-only views of shared memory."""

    def __init__(self, decoded: Decoded) -> None:
        self._fields, self._reasons = as_storage(decoded.arrays), decoded.reasons

    def take(self, order: EpochOrder, logical_worker: int, window: int) -> Window:
        """Returns a window, see `Windows.take`."""
        positions = order.stored_positions(logical_worker, window)[order.window_order(logical_worker, window)]
        return Window(order, logical_worker, window, self._fields, positions, positions, self._reasons)

    def has_next(self, count: int) -> bool:
        """Returns True: all rows are in memory."""
        return True

    def close(self) -> None:
        """Does nothing: the memory belongs to the cache."""


@dataclass(frozen=True)
class _WindowRead:
    """A window to read, and the specs of the read tasks that read it."""

    order: EpochOrder
    logical_worker: int
    window: int
    specs: list[ReadSpec]


class StreamedWindows:
    """Windows that are read and decoded ahead, `prefetch_windows` for each logical worker."""

    def __init__(
        self,
        plan: Plan,
        cursor: Cursor,
        logical_workers: range,
        epochs: int,
        fetch: Fetch,
        source: RowSource,
        prefetch_windows: int = 1,
    ) -> None:
        self._plan = plan
        self._cursor = cursor
        self._epochs = epochs
        self._logical_workers = logical_workers
        self._fetch, self._source = fetch, source
        self._ready: queue.Queue[tuple[_WindowId, Window] | BaseException] = queue.Queue(
            prefetch_windows * len(logical_workers)
        )
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
        self._thread.start()

    def take(self, order: EpochOrder, logical_worker: int, window: int) -> Window:
        """Returns a window, see `Windows.take`; raises the error of the thread that reads."""
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        window_id, next_window = item
        assert window_id == (order.epoch, window, logical_worker), f"windows out of order: {window_id}"
        return next_window

    def has_next(self, count: int) -> bool:
        """See `Windows.has_next`."""
        with self._ready.mutex:
            items = list(islice(self._ready.queue, count))
        return len(items) == count and not any(isinstance(item, BaseException) for item in items)

    def close(self) -> None:
        """Stops reading and drops the windows that were read ahead."""
        self._closed.set()
        while self._thread.is_alive():
            while not self._ready.empty():
                self._ready.get_nowait()
            self._thread.join(0.01)

    def _run(self) -> None:
        with ThreadPoolExecutor(1, "next-execution") as starter:
            try:
                self._run_executions(starter)
            except BaseException as error:
                # `take` raises it in the thread that trains.
                self._put(error)

    def _run_executions(self, starter: ThreadPoolExecutor) -> None:
        groups = self._groups()
        execution = self._start_execution(next(groups, None), starter)
        while execution is not None:
            reads, tables = execution
            start_next_at = max(0, len(reads) - _WINDOWS_BEFORE_NEXT * len(self._logical_workers))
            # Closing frees the CPUs of this execution, which the next one may be waiting for.
            with closing(tables):
                for i, item in enumerate(self._read(reads, tables)):
                    if i == start_next_at:
                        execution = self._start_execution(next(groups, None), starter)
                    if not self._put(item):
                        return

    def _start_execution(
        self, reads: list[_WindowRead] | None, starter: ThreadPoolExecutor
    ) -> tuple[list[_WindowRead], Generator[pa.Table]] | None:
        """Starts reading a group of windows and returns it with its tables; None where there is no group left."""
        if reads is None:
            return None
        tables = self._fetch(self._source.reader, [spec for read in reads for spec in read.specs])
        # Asking for the first table starts the execution.
        first = starter.submit(next, tables, None)

        def all_tables() -> Generator[pa.Table]:
            table = first.result()
            if table is not None:
                yield table
                yield from tables

        return reads, all_tables()

    def _groups(self) -> Iterator[list[_WindowRead]]:
        """Yields all windows from the cursor on in groups, across epochs, that one execution each reads."""
        group: list[_WindowRead] = []
        tasks, is_sliced = 0, False
        for epoch in range(self._cursor.epoch, self._epochs):
            order = self._plan.epoch(epoch)
            first = self._cursor.step // self._plan.steps_per_window if epoch == self._cursor.epoch else 0
            for window, v in product(range(first, self._plan.windows_per_epoch), self._logical_workers):
                segments = order.window_segments(v, window)
                specs = plan_reads(self._plan.manifest, segments, self._source.task_rows, self._plan.window_rows)
                if self._source.reader.keyed:
                    base = key(_DECODE, self._plan.seed, epoch)
                    specs = [tuple(replace(span, key=base) for span in spec) for spec in specs]
                group.append(_WindowRead(order, v, window, specs))
                tasks += len(specs)
                is_sliced = is_sliced or any(span.group_rows for spec in specs for span in spec)
                if tasks >= _TASKS_PER_EXECUTION and not is_sliced:
                    yield group
                    group, tasks = [], 0
            # Sliced row groups stay in one execution per epoch: another one would read them again from the beginning.
            if is_sliced:
                yield group
                group = []
                tasks = 0
                is_sliced = False
        if group:
            yield group

    def _put(self, item: tuple[_WindowId, Window] | BaseException) -> bool:
        """Hands an item to `take`; returns False if the windows are closed before there is a free slot for it."""
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def _read(self, reads: list[_WindowRead], tables: Iterator[pa.Table]) -> Iterator[tuple[_WindowId, Window]]:
        """Yields the windows of a group in their order."""
        rows = RowStream(tables)
        for read in reads:
            order = read.order
            v = read.logical_worker
            number = read.window
            stored = order.stored_positions(v, number)
            decoded = take_rows(rows, self._source.fields, stored)
            index = order.window_order(v, number)
            window = Window(order, v, number, as_storage(decoded.arrays), index, stored[index], decoded.reasons)
            yield (order.epoch, number, v), window.prepare(_MIN_PREPARED_STEPS, _PREPARED_BYTES)
