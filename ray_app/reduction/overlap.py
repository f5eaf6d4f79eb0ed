"""Work that a device does beside what computes. It has not run on a GPU; tests look at the order of its calls.

Work that a thread does beside the one that computes: what `SideStream` is to a device.
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
    """The stream of a process for a purpose, always the same one: PyTorch hands out a few dozen in turn, and the next
    one may be in use.

    Args: device: Of which. purpose: For what. priority: -1: a high one. PyTorch has streams of their own for it, and
        NCCL, which takes another one of the others in each
            generation, never gets the same.
    """
    if (device, purpose) not in _streams:
        _streams[device, purpose] = cuda.Stream(device, priority)
    return _streams[device, purpose]


def record_on_current_stream(tensors: Iterable[Tensor]) -> None:
    """Lets memory that is about to be dropped stay until the present stream is done with it, also if it was made in
    another stream.
    """
    for tensor in tensors:
        if tensor.device.type != "cpu":
            tensor.record_stream(cuda.current_stream(tensor.device))


class SideStream:
    """A stream of a device besides the one that computes; on a CPU, which does what it is given at once, it is nothing.

    Inside `with stream.entered():` the device is given what it does there; waits for exchanges are that stream's.

    Args:
        device: Of which.
        purpose: See `get_stream`.
        priority: See `get_stream`.
    """

    def __init__(self, device: torch.device, purpose: str, priority: int = 0) -> None:
        self._device = device
        self._stream: Any = get_stream(device, purpose, priority) if device.type != "cpu" else None

    def entered(self) -> AbstractContextManager[Any]:
        """For one time in one thread; others may enter meanwhile."""
        return _NO_CONTEXT if self._stream is None else cuda.stream(self._stream)

    def join(self) -> None:
        """Lets what computes from now on wait for what the stream was given."""
        if self._stream is not None:
            cuda.current_stream(self._device).wait_stream(self._stream)

    def mark(self) -> Any:
        """What `hand_over` waits for: all that the stream was given until now. None on a CPU."""
        return self._stream.record_event() if self._stream is not None else None

    def hand_over(self, tensors: Iterable[Tensor], mark: Any) -> None:
        """Lets what computes from now on use tensors that the stream made before a mark; their memory is the
        stream's.
        """
        computing = cuda.current_stream(self._device)
        computing.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(computing)


class SideThread:
    """A thread that does what it is given, in this order; there is none before it is given something.

    It is a daemon, which a process does not wait for at its end: it may wait for a peer.
    """

    def __init__(self) -> None:
        self._todo: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._given, self._thread = (
            list[Future[None]](),
            threading.Thread(target=_run_work, args=(self._todo,), name="reduction", daemon=True),
        )

    def do(self, work: Callable[[], None]) -> None:
        """Gives it something to do."""
        if self._thread.ident is None:
            self._thread.start()
        self._given.append(Future())
        self._todo.put((work, self._given[-1]))

    def join(self) -> None:
        """Waits until all is done.

        Raises:
            Exception: What was raised first.
        """
        given, self._given = self._given, []
        for each in given:
            each.result()

    def close(self) -> None:
        """Lets it end, and waits for nothing: what it waits for itself ends with the process group."""
        self._todo.put(None)


def _run_work(todo: SimpleQueue[tuple[Callable[[], None], Future[None]] | None]) -> None:
    while (given := todo.get()) is not None:
        work, done = given
        try:
            work()
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        del given, work, done  # they hold the memory of a bucket
