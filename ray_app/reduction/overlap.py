"""Work that overlaps with computation: on a side stream of a device (`SideStream`), or in a helper thread
(`SideThread`).

Tests check the order of the calls of `SideStream` on a CPU; `docs/gpu.md` says what has run on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, cuda

_NO_CONTEXT = nullcontext()
_streams: dict[tuple[torch.device, str], Any] = {}


def get_stream(device: torch.device, purpose: str, priority: int = 0) -> Any:
    """Returns the stream of this process for a purpose, the same one at each call.

    PyTorch hands out a few dozen streams in turn, so a new one at each call may be one that is in use.

    Args:
        device: The device of the stream.
        purpose: Any name.
        priority: -1 is the high priority, for which PyTorch has separate streams. NCCL takes another stream of normal
            priority in each generation, so it never gets one of these.
    """
    if (device, purpose) not in _streams:
        _streams[device, purpose] = cuda.Stream(device, priority)
    return _streams[device, purpose]


def record_on_current_stream(tensors: Iterable[Tensor]) -> None:
    """Keeps the memory of tensors that are about to be dropped until the current stream is done with them.

    Without it the memory is free as soon as the stream in which it was allocated is done.
    """
    for tensor in tensors:
        if tensor.device.type != "cpu":
            tensor.record_stream(cuda.current_stream(tensor.device))


class SideStream:
    """A stream of a device besides the one that computes. On a CPU, which runs all work at once, it does nothing.

    Inside `with stream.entered():` work is queued on this stream, and waits for collectives order this stream only.

    Args:
        device: The device.
        purpose: See `get_stream`.
        priority: See `get_stream`.
    """

    def __init__(self, device: torch.device, purpose: str, priority: int = 0) -> None:
        self._device = device
        self._stream: Any = get_stream(device, purpose, priority) if device.type != "cpu" else None

    def entered(self) -> AbstractContextManager[Any]:
        """Returns a context, to be entered once, in one thread; other threads may enter contexts of their own."""
        return _NO_CONTEXT if self._stream is None else cuda.stream(self._stream)

    def join(self) -> None:
        """Makes the computing stream wait for the work that is queued on this stream."""
        if self._stream is not None:
            cuda.current_stream(self._device).wait_stream(self._stream)

    def mark(self) -> Any:
        """Returns an event for `hand_over`, after the work that is queued until now; None on a CPU."""
        return self._stream.record_event() if self._stream is not None else None

    def hand_over(self, tensors: Iterable[Tensor], mark: Any) -> None:
        """Lets the computing stream use tensors that this stream wrote before a mark.

        The memory of the tensors stays reserved until the computing stream is done with them.
        """
        computing = cuda.current_stream(self._device)
        computing.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(computing)


class SideThread:
    """A thread that runs calls in the order in which they are queued; it starts with the first one.

    It is a daemon thread, since it may wait for a peer and the end of the process must not wait for it.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._pending: list[Future[None]] = []
        self._thread = threading.Thread(target=_run_queue, args=(self._queue,), name="reduction", daemon=True)

    def do(self, work: Callable[[], None]) -> None:
        """Queues a call."""
        if self._thread.ident is None:
            self._thread.start()
        self._pending.append(Future())
        self._queue.put((work, self._pending[-1]))

    def join(self) -> None:
        """Waits until all queued calls have returned.

        Raises:
            Exception: The first exception of a call.
        """
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def close(self) -> None:
        """Lets the thread end and does not wait for it: a call that waits for a peer ends with the process group."""
        self._queue.put(None)


def _run_queue(queue: SimpleQueue[tuple[Callable[[], None], Future[None]] | None]) -> None:
    """Runs the calls of a queue until it yields None."""
    while (item := queue.get()) is not None:
        work, done = item
        try:
            work()
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        # These variables would keep the memory of a bucket while the thread waits for the next call.
        del item, work, done
