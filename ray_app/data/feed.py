"""The feed: one micro-batch per logical worker and step, as a function of the plan, the cursor and the logical workers.

It takes windows from `StreamedWindows`, which reads ahead in a thread, or from `CachedWindows`, in memory. Within a
window it gathers the rows of several steps at once; where these are large or go to a device, in a thread. `Upload`
sends micro-batches to the device. No state of a feed is saved: `Feed.seek` starts it at any cursor.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ray_app.data.windows import BLOCK_BYTES, MicroBatch, Window, Windows
from ray_app.devices import kind_of, to_device
from ray_app.plan.order import Cursor, Plan
from ray_app.reduction.overlap import SideStream

STEPS_AHEAD = 2
"""Minimum number of steps that are uploaded to a device while one is computed."""
_MIN_THREAD_BYTES = 256 << 10
"""A gather of more bytes than this takes longer than the hand-over to another thread."""
_MAX_BLOCK_STEPS, _MAX_LARGE_BLOCK_BYTES = 4, 32 << 20
"""Limits of a block of large steps that are gathered together: steps, and bytes.

Two blocks are in memory, so that a reading thread may delay the gathering thread.
"""
_MAX_SMALL_BLOCK_STEPS = 32
"""Limit of a block of small steps, see `BLOCK_BYTES`."""

WindowKey = tuple[int, int]
"""Epoch and window."""


@dataclass
class _Stream:
    """An open source of windows of some logical workers, and the window that it delivers next."""

    logical_workers: range
    windows: Windows
    next_window: WindowKey


class Feed:
    """Micro-batches of this rank's logical workers, step by step; `wait_s` has the seconds in `next` so far."""

    def __init__(self, plan: Plan, open_windows: Callable[[Cursor, range], Windows], device: torch.device) -> None:
        self._plan, self._open_windows = plan, open_windows
        kind = kind_of(device)
        self._upload = Upload(device) if not kind.is_host else None
        self._cursor, self._logical_workers = Cursor(0, 0), range(0)
        self._streams: list[_Stream] = []
        self._current: dict[int, tuple[WindowKey, Window]] = {}
        self._gather_thread = ThreadPoolExecutor(1, "gatherer", partial(kind.use, device))
        self._gathered: deque[list[MicroBatch]] = deque()
        self._pending: Future[list[list[MicroBatch]]] | None = None
        self._block_steps = 1
        self._uses_thread = False
        self._order = plan.epoch(0)
        self.wait_s = 0.0

    def seek(self, cursor: Cursor, logical_workers: range) -> None:
        """Continues at a cursor with these logical workers.

        Streams stay open, with what they have read ahead, where all their logical workers are still wanted and they
        have the cursor's window next or as the current one.
        """
        window_key = self._window_key(cursor)
        kept = [
            stream
            for stream in self._streams
            if set(stream.logical_workers) <= set(logical_workers)
            and (stream.next_window == window_key or self._has_window(stream, window_key))
        ]
        for stream in self._streams:
            if stream not in kept:
                stream.windows.close()
        covered = {v for stream in kept for v in stream.logical_workers}
        self._current = {v: current for v, current in self._current.items() if v in covered}
        self._streams = kept + [
            _Stream(part, self._open_windows(cursor, part), window_key)
            for part in _to_ranges([v for v in logical_workers if v not in covered], logical_workers.step)
        ]
        self._cursor, self._logical_workers = cursor, logical_workers
        self._drop_gathered()

    def next(self) -> list[MicroBatch]:
        """Returns the micro-batches of the next step, one per logical worker, and adds its own time to `wait_s`."""
        began = time.perf_counter()
        if self._pending is not None and not self._gathered:
            self._gathered.extend(self._pending.result())
            self._pending = None
        if not self._gathered:
            self._gather_at_cursor()
        batches = self._gathered.popleft()
        self._cursor = self._cursor.next(self._plan.steps_per_epoch)
        if self._uses_thread and self._pending is None:
            self._gather_ahead()
        if self._upload is not None:
            self._upload.make_available(batches)
        self.wait_s += time.perf_counter() - began
        return batches

    def close(self) -> None:
        """Frees threads and memory."""
        self._gather_thread.shutdown()
        for stream in self._streams:
            stream.windows.close()
        self._streams, self._current = [], {}
        self._drop_gathered()

    def _gather_at_cursor(self) -> None:
        """Gathers the step at the cursor, and without a thread the following steps; it may wait for windows."""
        cursor = self._cursor
        if self._order.epoch != cursor.epoch:
            self._order = self._plan.epoch(cursor.epoch)
        for stream in self._streams:
            self._advance(stream, self._window_key(cursor))
        steps = self._steps_from(cursor.step, 1 if self._uses_thread else self._block_steps)
        self._gathered.extend(gather_steps(self._current_windows(), steps, self._upload))

    def _gather_ahead(self) -> None:
        """Starts gathering the epoch's steps behind the gathered ones in the thread, if their windows have been read.

        A window may be left before its last steps have been taken; if `seek` returns to these, it is read again.
        """
        cursor = Cursor(self._cursor.epoch, self._cursor.step + len(self._gathered))
        steps, window_key = self._steps_from(cursor.step, self._block_steps), self._window_key(cursor)
        waiting = [stream for stream in self._streams if not self._has_window(stream, window_key)]
        is_read = all(stream.windows.has_next(len(stream.logical_workers)) for stream in waiting)
        if steps and is_read and self._order.epoch == cursor.epoch:
            for stream in waiting:
                self._advance(stream, window_key)
            self._pending = self._gather_thread.submit(gather_steps, self._current_windows(), steps, self._upload)

    def _window_key(self, cursor: Cursor) -> WindowKey:
        return cursor.epoch, cursor.step // self._plan.steps_per_window

    def _steps_from(self, first: int, max_steps: int) -> range:
        """Returns up to `max_steps` steps from `first` on, which end with its window."""
        size = self._plan.steps_per_window
        return range(first, min(first + max_steps, (first // size + 1) * size, self._plan.steps_per_epoch))

    def _drop_gathered(self) -> None:
        self._gathered.clear()
        if self._pending is not None:
            self._pending.cancel()
        self._pending = None

    def _current_windows(self) -> list[Window]:
        return [self._current[v][1] for v in self._logical_workers]

    def _has_window(self, stream: _Stream, window_key: WindowKey) -> bool:
        return all(v in self._current and self._current[v][0] == window_key for v in stream.logical_workers)

    def _advance(self, stream: _Stream, window_key: WindowKey) -> None:
        """Makes the windows of a stream the current ones, and sets how its steps are gathered."""
        if self._has_window(stream, window_key):
            return
        # This frees the old windows before the new ones are waited for.
        for v in stream.logical_workers:
            self._current.pop(v, None)
        epoch, window = window_key
        for v in stream.logical_workers:
            self._current[v] = window_key, stream.windows.take(self._order, v, window)
        stream.next_window = (epoch, window + 1) if window + 1 < self._plan.windows_per_epoch else (epoch + 1, 0)
        step_bytes = sum(window.step_bytes for _, window in self._current.values() if not window.is_prepared)
        large_steps = max(1, min(_MAX_BLOCK_STEPS, _MAX_LARGE_BLOCK_BYTES // max(1, step_bytes)))
        if self._upload is not None:
            self._block_steps = max(large_steps if step_bytes > _MIN_THREAD_BYTES else 0, STEPS_AHEAD)
            self._uses_thread = True
        else:
            self._block_steps = max(large_steps, min(_MAX_SMALL_BLOCK_STEPS, BLOCK_BYTES // max(1, step_bytes)))
            self._uses_thread = self._block_steps * step_bytes > _MIN_THREAD_BYTES


def gather_steps(windows: list[Window], steps: range, upload: Upload | None) -> list[list[MicroBatch]]:
    """Returns the micro-batches of each step, one per window."""
    if upload is None:
        return [list(step_batches) for step_batches in zip(*(w.micro_batches(steps) for w in windows), strict=True)]
    # Step by step, so that each is on its way to the device while the next one is gathered.
    return [
        upload.send(
            [batch for window in windows for batch in window.micro_batches(range(step, step + 1), is_locked=True)]
        )
        for step in steps
    ]


def _to_ranges(numbers: list[int], step: int) -> list[range]:
    """Returns ascending numbers as ranges with a step."""
    ranges: list[range] = []
    for number in numbers:
        if ranges and ranges[-1][-1] + step == number:
            ranges[-1] = range(ranges[-1].start, number + 1, step)
        else:
            ranges.append(range(number, number + 1, step))
    return ranges


class Uploaded(list[MicroBatch]):
    """The micro-batches of a step, complete once the stream has reached `mark`, see `SideStream.mark`."""

    mark: Any


class Upload:
    """Copies micro-batches to a device through pinned memory, on a side stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, SideStream(device, "upload", -1)

    def send(self, batches: list[MicroBatch]) -> Uploaded:
        """Starts the copies without waiting for them; pinned memory is used again once they are done."""
        with self._side.entered():
            uploaded = Uploaded(batch._replace(fields=self._copy_fields(batch)) for batch in batches)
        uploaded.mark = self._side.mark()
        return uploaded

    def make_available(self, batches: list[MicroBatch]) -> None:
        """Makes the computing stream wait for the copies that `send` has started."""
        assert isinstance(batches, Uploaded)
        self._side.hand_over([values for batch in batches for values in batch.fields.values()], batches.mark)

    def _copy_fields(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        return {name: to_device(values, self._device) for name, values in batch.fields.items()}
