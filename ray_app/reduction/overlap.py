"""Work that overlaps with computation: a side stream, and executors of the reduction of buckets.

Tests check the order of work on simulated devices; `docs/gpu.md` says what has run on a GPU.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from ray_app.devices import KINDS, get_stream, kind_of

_NO_CONTEXT = nullcontext()


def record_on_current_stream(tensors: Iterable[Tensor]) -> None:
    """Keeps the memory of tensors that are about to be dropped until the current stream is done with them.

    Without this call the memory can be allocated again as soon as the stream that allocated it is done with them.
    """
    for tensor in tensors:
        kind = KINDS[tensor.device.type]
        if not kind.is_host:
            tensor.record_stream(kind.current_stream(tensor.device))


class SideStream:
    """A stream of a device besides the stream that computes. On the CPU its calls do nothing.

    Inside `with stream.entered():` work is queued on this stream, and only this stream waits for collectives.

    Args:
        device: The device.
        purpose: See `devices.get_stream`.
        priority: See `devices.get_stream`.
    """

    def __init__(self, device: torch.device, purpose: str, priority: int = 0) -> None:
        self._device, self._kind = device, kind_of(device)
        self._stream: Any = get_stream(device, purpose, priority) if not self._kind.is_host else None

    def entered(self) -> AbstractContextManager[Any]:
        """Returns a context manager in which this stream is the current one.

        Each context manager is entered once, by one thread; several threads may each enter one at the same time.
        """
        return _NO_CONTEXT if self._stream is None else self._kind.enter(self._stream)

    def join(self) -> None:
        """Makes the computing stream wait for the work that is queued on this stream."""
        if self._stream is not None:
            self._kind.current_stream(self._device).wait_stream(self._stream)

    def mark(self) -> Any:
        """Returns an event for `hand_over` that follows all work queued on this stream so far; None without streams."""
        return self._stream.record_event() if self._stream is not None else None

    def hand_over(self, tensors: Iterable[Tensor], mark: Any) -> None:
        """Makes the computing stream wait for tensors that this stream has written.

        The memory of the tensors is not reused until the computing stream is done with them.

        Args:
            tensors: The tensors.
            mark: The event that `mark` returned after the tensors were written.
        """
        if self._stream is None:
            return
        computing = self._kind.current_stream(self._device)
        computing.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(computing)


Pipeline = Iterator[object]
"""The reduction of a bucket: each `next` waits for the transfer in progress and starts another, until the last one."""


class InlineExecutor:
    """Starts pipelines in the calling thread, and advances them only when they are drained."""

    def __init__(self) -> None:
        self._pipelines: list[Pipeline] = []

    def start(self, pipeline: Pipeline, is_last: bool) -> None:
        """Starts a pipeline; `is_last` says that no other follows before `drain`."""
        del is_last
        next(pipeline)
        self._pipelines.append(pipeline)

    def _advance(self) -> None:
        """Moves each bucket to its next transfer."""
        self._pipelines = [pipeline for pipeline in self._pipelines if next(pipeline, None) is not None]

    def drain(self) -> None:
        """Advances all pipelines to their ends."""
        while self._pipelines:
            self._advance()

    def close(self) -> None:
        """Ends the use of memory that the pipelines of a broken generation have."""


class StreamExecutor(InlineExecutor):
    """Advances the earlier pipelines at each start, on a side stream of the device, so that only that stream waits.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._side = SideStream(device, "reduction", -1)

    def start(self, pipeline: Pipeline, is_last: bool) -> None:
        """Starts a pipeline after the computations that are queued so far, see `InlineExecutor.start`."""
        next(pipeline)
        self._advance()
        self._pipelines.append(pipeline)

    def _advance(self) -> None:
        with self._side.entered():
            super()._advance()

    def drain(self) -> None:
        """Advances all pipelines to their ends, for which the computing stream waits instead of the host."""
        super().drain()
        self._side.join()

    def close(self) -> None:
        """Makes the computing stream, which may get the pipelines' memory for other tensors, wait for their work."""
        self._side.join()


class ThreadExecutor(InlineExecutor):
    """Starts each pipeline and advances the earlier ones in a helper thread, which runs while backward continues.

    The last pipeline is the exception: no computation follows that it could overlap with, so the calling thread starts
    it, and a model of one bucket needs no thread. It is a daemon thread: it may wait for a peer, and then the process
    must be able to end without it.

    Args:
        device: The device that the thread uses; a new thread would use the first one, which may be that of another
            process.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._queue: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._pending: list[Future[None]] = []
        self._thread = threading.Thread(target=_run_queue, args=(self._queue, device), name="reduction", daemon=True)
        # The last pipeline, which the calling thread has started while the helper thread uses `_pipelines`.
        self._last: list[Pipeline] = []

    def start(self, pipeline: Pipeline, is_last: bool) -> None:
        """Queues the start of a pipeline, see `InlineExecutor.start`."""
        if is_last:
            next(pipeline)
            self._last.append(pipeline)
            return
        if self._thread.ident is None:
            self._thread.start()
        self._pending.append(Future())
        self._queue.put((partial(self._start_and_advance, pipeline), self._pending[-1]))

    def _start_and_advance(self, pipeline: Pipeline) -> None:
        next(pipeline)
        self._advance()
        self._pipelines.append(pipeline)

    def drain(self) -> None:
        """Waits for the helper thread and advances all pipelines to their ends.

        Raises:
            Exception: The first exception in the helper thread.
        """
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()
        self._pipelines, self._last = self._pipelines + self._last, []
        super().drain()

    def close(self) -> None:
        """Lets the thread end after the queued calls, and does not wait for that.

        A call that waits for a peer returns when the process group is closed.
        """
        self._queue.put(None)


def _run_queue(queue: SimpleQueue[tuple[Callable[[], None], Future[None]] | None], device: torch.device) -> None:
    """Runs the calls of a queue until its next item is None."""
    kind_of(device).use(device)
    while (item := queue.get()) is not None:
        work, done = item
        try:
            work()
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        # Otherwise these variables would keep the memory of a bucket while the thread waits for the next call.
        del item, work, done
