"""The feed: one micro-batch per logical worker per step, as a function of (plan, cursor, logical workers to play).

Two sources of windows, siblings of one shape: `StreamedWindows` reads ahead in a thread, `CachedWindows` gathers from a
data set that is decoded in memory. Within a window the rows of several steps are gathered at once, while the present
one is computed if they are large or go to a device. Nothing of a feed is saved: at another cursor or for other logical
workers a new one is made.

Micro-batches on their way to a device: through pinned memory, on a stream beside the one that computes.
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
from ray_app.plan.order import Cursor, Plan
from ray_app.reduction.overlap import SideStream

STEPS_AHEAD = 2
"""How many steps are on their way while one is computed, at least."""


class Uploaded(list[MicroBatch]):
    """The micro-batches of a step, which are there when the stream has come to the mark, see `SideStream.mark`."""

    mark: Any


class Upload:
    """See the module.

    Args:
        device: Where to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, SideStream(device, "upload")

    def send(self, batches: list[MicroBatch]) -> Uploaded:
        """Gives the device copies to make, and waits for none; the pinned memory is used again when they are made."""
        with self._side.entered():
            sent = Uploaded(batch._replace(fields=self._there(batch)) for batch in batches)
        sent.mark = self._side.mark()
        return sent

    def _there(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        return {name: values.pin_memory().to(self._device, non_blocking=True) for name, values in batch.fields.items()}

    def arrive(self, sent: list[MicroBatch]) -> None:
        """Lets what computes from now on use what was sent."""
        assert isinstance(sent, Uploaded)
        self._side.hand_over([values for batch in sent for values in batch.fields.values()], sent.mark)


_WORTH_A_THREAD = 256 << 10
"""Bytes that take longer to gather than another thread takes to begin."""
_AT_ONCE, _AT_ONCE_BYTES = 4, 32 << 20
"""Steps that are gathered at once, and their bytes; twice as many are in memory, so that a thread that reads may keep
this one waiting.
"""
_SMALL = 32
"""The same where they are small, see `BLOCK_BYTES`."""


@dataclass
class _Stream:
    """Windows of some logical workers, which are taken in turn; `at`: epoch and window that come next."""

    played: range
    windows: Windows
    at: tuple[int, int]


class Feed:
    """Micro-batches of the logical workers that this rank plays, step by step.

    Args:
        plan: The order.
        open_windows: Opens the data at a cursor for some logical workers.
        device: Where the tensors go.
    """

    def __init__(self, plan: Plan, open_windows: Callable[[Cursor, range], Windows], device: torch.device) -> None:
        self._plan, self._open = plan, open_windows
        self._upload = Upload(device) if device.type != "cpu" else None
        self._cursor, self._played = Cursor(0, 0), range(0)
        self._streams: list[_Stream] = []
        self._current: dict[int, tuple[tuple[int, int], Window]] = {}
        self._gatherer = ThreadPoolExecutor(
            1, "gatherer", partial(torch.cuda.set_device, device) if device.type == "cuda" else None
        )
        self._gathered: deque[list[MicroBatch]] = deque()
        self._ahead: Future[list[list[MicroBatch]]] | None = None
        self._at_once, self._is_ahead = 1, False
        self._order = plan.epoch(0)
        self.wait_s = 0.0

    def play(self, cursor: Cursor, played: range) -> None:
        """Goes on at a cursor with these logical workers; what is read already for them is kept, if it has the cursor's
        window next.
        """
        wanted = cursor.epoch, cursor.step // self._plan.steps_per_window
        kept = [s for s in self._streams if set(s.played) <= set(played) and (s.at == wanted or self._has(s, wanted))]
        for stream in self._streams:
            if stream not in kept:
                stream.windows.close()
        have = {v for s in kept for v in s.played}
        self._current = {v: held for v, held in self._current.items() if v in have}
        self._streams = kept + [
            _Stream(part, self._open(cursor, part), wanted)
            for part in _runs([v for v in played if v not in have], played.step)
        ]
        self._cursor, self._played = cursor, played
        self._forget_gathered()

    def next(self) -> list[MicroBatch]:
        """The micro-batches of the next step, one per played logical worker; `wait_s` grows by the time it took."""
        began = time.perf_counter()
        if self._ahead is not None and not self._gathered:
            self._gathered.extend(self._ahead.result())
            self._ahead = None
        if not self._gathered:
            self._take()
        batches = self._gathered.popleft()
        self._cursor = self._cursor.next(self._plan.steps_per_epoch)
        if self._is_ahead and self._ahead is None:
            self._gather_ahead()
        if self._upload is not None:
            self._upload.arrive(batches)
        self.wait_s += time.perf_counter() - began
        return batches

    def _take(self) -> None:
        """Gathers the micro-batches at the cursor, whose windows may have to be waited for, and those behind it if no
        thread does.
        """
        cursor = self._cursor
        if self._order.epoch != cursor.epoch:
            self._order = self._plan.epoch(cursor.epoch)
        wanted = cursor.epoch, cursor.step // self._plan.steps_per_window
        for stream in self._streams:
            self._advance(stream, wanted)
        self._gathered.extend(
            _gather(self._windows(), self._steps(cursor.step, 1 if self._is_ahead else self._at_once), self._upload)
        )

    def _gather_ahead(self) -> None:
        """Lets the steps behind the gathered ones be gathered."""
        first = self._cursor.step + len(self._gathered)
        if first % self._plan.steps_per_window and (steps := self._steps(first, self._at_once)):
            self._ahead = self._gatherer.submit(_gather, self._windows(), steps, self._upload)

    def _steps(self, first: int, most: int) -> range:
        """So many from one on, up to the end of its window."""
        size = self._plan.steps_per_window
        return range(first, min(first + most, (first // size + 1) * size, self._plan.steps_per_epoch))

    def _forget_gathered(self) -> None:
        self._gathered.clear()
        if self._ahead is not None:
            self._ahead.cancel()
        self._ahead = None

    def _windows(self) -> list[Window]:
        return [self._current[v][1] for v in self._played]

    def _has(self, stream: _Stream, wanted: tuple[int, int]) -> bool:
        return all(v in self._current and self._current[v][0] == wanted for v in stream.played)

    def _advance(self, stream: _Stream, wanted: tuple[int, int]) -> None:
        """Takes the wanted windows of a stream, if they are not the current ones."""
        if self._has(stream, wanted):
            return
        for v in stream.played:
            self._current.pop(v, None)  # frees the old windows before the new ones are waited for
        for v in stream.played:
            self._current[v] = wanted, stream.windows.take(self._order, v, wanted[1])
        epoch, window = wanted
        stream.at = (epoch, window + 1) if window + 1 < self._plan.windows_per_epoch else (epoch + 1, 0)
        step_bytes = sum(window.step_bytes for _, window in self._current.values() if not window.is_prepared)
        some = max(1, min(_AT_ONCE, _AT_ONCE_BYTES // max(1, step_bytes)))
        if self._upload is not None:
            self._at_once, self._is_ahead = max(some if step_bytes > _WORTH_A_THREAD else 0, STEPS_AHEAD), True
        else:
            self._at_once = max(some, min(_SMALL, BLOCK_BYTES // max(1, step_bytes)))
            self._is_ahead = self._at_once * step_bytes > _WORTH_A_THREAD

    def close(self) -> None:
        """Frees threads and memory."""
        self._gatherer.shutdown()
        for stream in self._streams:
            stream.windows.close()
        self._streams, self._current = [], {}
        self._forget_gathered()


def _gather(windows: list[Window], steps: range, upload: Upload | None) -> list[list[MicroBatch]]:
    if upload is not None:  # each is on its way while the next is gathered
        return [
            upload.send([batch for window in windows for batch in window.micro_batches(range(step, step + 1))])
            for step in steps
        ]
    return [list(of_step) for of_step in zip(*(window.micro_batches(steps) for window in windows), strict=True)]


def _runs(numbers: list[int], step: int) -> list[range]:
    """Ascending numbers as ranges with a step."""
    found: list[range] = []
    for number in numbers:
        if found and found[-1][-1] + step == number:
            found[-1] = range(found[-1].start, number + 1, step)
        else:
            found.append(range(number, number + 1, step))
    return found
