"""Windows that are read and decoded ahead, in a thread, by read tasks of Ray Data."""

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

_DECODE = 13  # salt: what an epoch's key is for
_TASKS_PER_EXECUTION = 64
_PREPARED, _PREPARED_BYTES = 3, 16 << 20
"""Steps of a window that are gathered before it is taken; all of them, if they are no more than so many bytes."""
_EARLY = 4
"""Windows per logical worker before the end of a Ray Data execution at which the next is started, which takes a few
tenths of a second.
"""


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
        source: What they read.
        prefetch_windows: Windows per logical worker to read ahead.
    """

    def __init__(
        self,
        plan: Plan,
        cursor: Cursor,
        played: range,
        epochs: int,
        fetch: Fetch,
        source: RowSource,
        prefetch_windows: int = 1,
    ) -> None:
        self._plan, self._cursor, self._played, self._epochs = plan, cursor, played, epochs
        self._fetch, self._source = fetch, source
        self._ready: queue.Queue[tuple[tuple[int, int, int], Window] | BaseException] = queue.Queue(
            prefetch_windows * len(played)
        )
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
        with ThreadPoolExecutor(1, "next-execution") as starter:
            try:
                self._run_executions(starter)
            except BaseException as error:  # handed to the consumer, who raises it
                self._put(error)

    def _run_executions(self, starter: ThreadPoolExecutor) -> None:
        groups = self._executions()
        under_way = self._started(next(groups, None), starter)
        while under_way is not None:
            wanted, tables = under_way
            early = max(0, len(wanted) - _EARLY * len(self._played))
            with closing(tables):  # the next one, which is waited for at the end, may need its CPUs
                for i, item in enumerate(self._read(wanted, tables)):
                    if i == early:
                        under_way = self._started(next(groups, None), starter)
                    if not self._put(item):
                        return

    def _started(
        self, wanted: list[_Wanted] | None, starter: ThreadPoolExecutor
    ) -> tuple[list[_Wanted], Generator[pa.Table]] | None:
        """Starts reading a group of windows, and returns the tables to come."""
        if wanted is None:
            return None
        tables = self._fetch(self._source.reader, [spec for item in wanted for spec in item.specs])
        first = starter.submit(next, tables, None)

        def all_tables() -> Generator[pa.Table]:
            table = first.result()
            if table is not None:
                yield table
                yield from tables

        return wanted, all_tables()

    def _executions(self) -> Iterator[list[_Wanted]]:
        """All windows from the cursor to the end of the run, in groups that are read by one execution each, across
        epochs.
        """
        group: list[_Wanted] = []
        tasks, is_sliced = 0, False
        for epoch in range(self._cursor.epoch, self._epochs):
            order = self._plan.epoch(epoch)
            first = self._cursor.step // self._plan.steps_per_window if epoch == self._cursor.epoch else 0
            for window, v in product(range(first, self._plan.windows_per_epoch), self._played):
                segments = order.window_segments(v, window)
                specs = plan_reads(self._plan.manifest, segments, self._source.task_rows, self._plan.window_rows)
                if self._source.reader.keyed:
                    base = key(_DECODE, self._plan.seed, epoch)
                    specs = [tuple(replace(span, key=base) for span in spec) for spec in specs]
                group.append(_Wanted(order, v, window, specs))
                tasks += len(specs)
                is_sliced = is_sliced or any(span.of for spec in specs for span in spec)
                if tasks >= _TASKS_PER_EXECUTION and not is_sliced:
                    yield group
                    group, tasks = [], 0
            if is_sliced:  # another execution would begin its row groups anew
                yield group
                group, tasks, is_sliced = [], 0, False
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

    def _read(self, wanted: list[_Wanted], tables: Iterator[pa.Table]) -> Iterator[tuple[tuple[int, int, int], Window]]:
        """A group of windows in their order."""
        rows = RowStream(tables)
        for item in wanted:
            order, v, window = item.order, item.logical_worker, item.window
            stored = order.stored_positions(v, window)
            fields, reasons = self._tensors(rows, stored)
            index = order.window_order(v, window)
            made = Window(order, v, window, fields, index, stored[index], reasons).prepare(_PREPARED, _PREPARED_BYTES)
            yield (order.epoch, window, v), made

    def _tensors(self, rows: RowStream, stored: npt.NDArray[np.int64]) -> tuple[Storage, dict[int, str]]:
        """The fields of a window's rows as read, each (rows, ...), and why some are bad, after a check that they are
        the planned ones.

        Each table is copied to its place as it comes and let go, so that a window is in memory once.
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
