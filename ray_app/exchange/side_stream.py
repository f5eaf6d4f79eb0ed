"""Work that a device does beside what computes. It has not run on a GPU; tests look at the order of its calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import cuda


class SideStream:
    """A stream of a device besides the one that computes; on a CPU, which does what it is given at once, it is nothing.

    Inside `with stream:` the device is given what it does there; waits for exchanges are that stream's.

    Args:
        device: Of which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = cuda.Stream(device) if device.type == "cuda" else None
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
