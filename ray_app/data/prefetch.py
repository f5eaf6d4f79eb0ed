"""Windows that a thread reads and decodes ahead of the training, by read tasks of Ray Data or of this process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_app.data.arrays import Columns
from ray_app.data.bad_rows import read_reasons
from ray_app.data.reader import Fetch, ReadSpec, RowSource, RowStream, check_positions, plan_reads
from ray_app.data.windows import Storage, Window, as_storage
from ray_app.plan.hashing import key
from ray_app.plan.order import Cursor, EpochOrder, Plan

_DECODE = 13
"""Salt of the key that an epoch's decoding gets."""
_TASKS_PER_EXECUTION = 64
_MIN_PREPARED_STEPS, _PREPARED_BYTES = 3, 16 << 20
"""Steps of a window that are gathered before it is taken: at least so many, and all of them up to so many bytes."""
_WINDOWS_BEFORE_NEXT = 4
"""Windows per logical worker before the end of a Ray Data execution at which the next execution starts.

The start of an execution takes a few tenths of a second.
"""

_WindowId = tuple[int, int, int]
"""Epoch, window and logical worker."""


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
            fields, reasons = self._load_fields(rows, stored)
            index = order.window_order(v, number)
            window = Window(order, v, number, fields, index, stored[index], reasons)
            yield (order.epoch, number, v), window.prepare(_MIN_PREPARED_STEPS, _PREPARED_BYTES)

    def _load_fields(self, rows: RowStream, stored: npt.NDArray[np.int64]) -> tuple[Storage, dict[int, str]]:
        """Returns the fields of a window's rows and the reasons of bad rows, and checks the rows against the plan.

        The fields are in reading order, each (rows, ...); the reasons are by manifest position. Each table is copied to
        its part of the fields as it arrives and is then freed, so that a window is in memory only once.
        """
        columns = Columns(self._source.fields, len(stored))
        reasons: dict[int, str] = {}
        done = 0
        while done < len(stored):
            table = rows.next(len(stored) - done)
            positions = stored[done : done + table.num_rows]
            check_positions(table, positions)
            reasons |= read_reasons(table, positions)
            columns.add(table)
            done += table.num_rows
        return as_storage(columns.all()), reasons
