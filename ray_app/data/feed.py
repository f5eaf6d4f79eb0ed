"""The feed: one micro-batch per logical worker per step, as a function of (plan, cursor, logical workers to play).

Two sources of windows, siblings of one shape: `StreamedWindows` reads ahead in a thread, `CachedWindows` gathers from a data set
that is decoded in memory. Within a window the rows of a large next step are gathered while the present one is computed. Nothing of a
feed is saved: at another cursor or for other logical workers a new one is made.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ray_app.data.windows import MicroBatch, Window, Windows
from ray_app.plan.cursor import Cursor
from ray_app.plan.order import Plan

_WORTH_A_THREAD = 256 << 10
"""Bytes of a step that take longer to gather than another thread takes to begin."""


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
        self._gatherer = ThreadPoolExecutor(1, "gatherer")
        self._ahead: Future[list[MicroBatch]] | None = None
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
        self._cursor, self._played, self._ahead = cursor, played, None

    def next(self) -> list[MicroBatch]:
        """The micro-batches of the next step, one per played logical worker; `wait_s` grows by the time it took."""
        began = time.perf_counter()
        batches = [batch.to(self._device) for batch in (self._ahead.result() if self._ahead is not None else self._take())]
        self._cursor = self._cursor.next(self._plan.steps_per_epoch)
        is_in_window = self._cursor.step % self._plan.steps_per_window
        is_large = sum(values.nbytes for batch in batches for values in batch.fields.values()) > _WORTH_A_THREAD
        self._ahead = self._gatherer.submit(_gather, self._windows(), self._cursor.step) if is_in_window and is_large else None
        self.wait_s += time.perf_counter() - began
        return batches

    def _take(self) -> list[MicroBatch]:
        """The micro-batches at the cursor, whose windows may have to be waited for."""
        cursor = self._cursor
        if self._order.epoch != cursor.epoch:
            self._order = self._plan.epoch(cursor.epoch)
        wanted = cursor.epoch, cursor.step // self._plan.steps_per_window
        for stream in self._streams:
            self._advance(stream, wanted)
        return _gather(self._windows(), cursor.step)

    def _windows(self) -> list[Window]:
        return [self._current[v][1] for v in self._played]

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
        self._gatherer.shutdown()
        for stream in self._streams:
            stream.windows.close()
        self._streams, self._current, self._ahead = [], {}, None


def _gather(windows: list[Window], step: int) -> list[MicroBatch]:
    return [window.micro_batch(step) for window in windows]


def _runs(numbers: list[int]) -> list[range]:
    """Ascending numbers as ranges without gaps."""
    found: list[range] = []
    for number in numbers:
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found
