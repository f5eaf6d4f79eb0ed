"""Work that a device does beside what computes. It has not run on a GPU; tests look at the order of its calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, cuda


class SideStream:
    """A stream of a device besides the one that computes; on a CPU, which does what it is given at once, it is nothing.

    Inside `with stream:` the device is given what it does there; waits for exchanges are that stream's.

    Args:
        device: Of which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = cuda.Stream(device) if device.type != "cpu" else None
        self._entered: Any = None

    def __enter__(self) -> None:
        if self._stream is not None:
            self._entered = cuda.stream(self._stream)
            self._entered.__enter__()

    def __exit__(self, *raised: object) -> None:
        if self._entered is not None:
            self._entered.__exit__(*raised)
            self._entered = None

    def join(self) -> None:
        """Lets what computes from now on wait for what the stream was given."""
        if self._stream is not None:
            cuda.current_stream(self._device).wait_stream(self._stream)

    def mark(self) -> Any:
        """What `hand_over` waits for: all that the stream was given until now. None on a CPU."""
        return self._stream.record_event() if self._stream is not None else None

    def hand_over(self, tensors: Iterable[Tensor], mark: Any) -> None:
        """Lets what computes from now on use tensors that the stream made before a mark; their memory is the stream's."""
        computing = cuda.current_stream(self._device)
        computing.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(computing)
