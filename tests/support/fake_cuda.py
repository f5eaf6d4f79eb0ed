"""CUDA streams that record the order of calls; their effect on a GPU can be tested only on a GPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_app import devices
from ray_app.train.strategies.central_storage import CentralBackend

DEVICE = torch.device("meta")
"""The device in place of a GPU; tensors on it have no values."""


class RecordingCuda:
    """A replacement for `torch.cuda`.

    Attributes:
        calls: The calls so far, each with its stream.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self._threads = threading.local()
        patch.setitem(devices.KINDS, DEVICE.type, _RecordingKind(self))
        patch.setattr(devices, "_streams", {})
        patch.setattr(Tensor, "pin_memory", lambda tensor: self.record("pin_memory", tensor))
        patch.setattr(Tensor, "record_stream", lambda tensor, stream: self.record(f"used by {stream.name}", tensor))
        patch.setattr(Tensor, "new_empty", lambda tensor, size, pin_memory: torch.empty(size, dtype=tensor.dtype))
        to = Tensor.to

        def copied(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
            if args[0] == DEVICE:
                self.record(f"copy{'' if options.get('non_blocking') else ' and wait'}", tensor)
            return to(tensor, *args, **options)

        patch.setattr(Tensor, "to", copied)

    def set_device(self, device: torch.device) -> None:
        """Accepts the only device."""
        assert device == DEVICE

    @property
    def active_streams(self) -> list[str]:
        """The streams that this thread has entered, outermost first."""
        if not hasattr(self._threads, "active_streams"):
            self._threads.active_streams = ["computing"]
        return self._threads.active_streams

    def record(self, operation: str, tensor: Tensor) -> Tensor:
        """Records an operation on a tensor; returns the tensor."""
        self.calls.append(f"{self.active_streams[-1]}: {operation}")
        return tensor

    def Stream(self, device: torch.device, priority: int) -> Any:
        """See `torch.cuda.Stream`."""
        assert device == DEVICE
        return _Stream(self, "side" if not priority else "side, first")

    def current_stream(self, device: torch.device) -> Any:
        """See `torch.cuda.current_stream`."""
        assert device == DEVICE
        return _Stream(self, self.active_streams[-1])

    def stream(self, stream: Any) -> Any:
        """See `torch.cuda.stream`."""
        return stream


class _RecordingKind(devices.DeviceKind):
    """The kind of `DEVICE`; a `RecordingCuda` takes the place of torch's module."""

    def __init__(self, module: RecordingCuda) -> None:
        super().__init__(DEVICE.type)
        self.module = module


class _Stream:
    def __init__(self, streams: RecordingCuda, name: str) -> None:
        self._streams, self.name = streams, name

    def __enter__(self) -> None:
        self._streams.active_streams.append(self.name)

    def __exit__(self, *raised: object) -> None:
        self._streams.active_streams.pop()

    def record_event(self) -> str:
        self._streams.calls.append(f"{self.name}: mark")
        return "mark"

    def wait_event(self, event: str) -> None:
        self._streams.calls.append(f"{self.name}: wait for {event}")

    def synchronize(self) -> None:
        self._streams.calls.append(f"{self.name}: wait for all")

    def wait_stream(self, stream: Any) -> None:
        self._streams.calls.append(f"{self.name}: wait for {stream.name}")


def lock_pages(backend: CentralBackend, device: torch.device, is_first_rank: bool) -> None:
    """Page-locks memory as at the start of a generation of workers with a device."""
    backend._device, backend._has_master = device, is_first_rank
    backend._lock_pages()
