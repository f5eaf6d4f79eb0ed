"""A process group with a device's manners, on a CPU: what NCCL does where gloo waits and raises.

`wait()` returns at once, as one that only puts streams in order: whether the exchange went well is not known by then. An exchange that was
broken leaves finite garbage, and the error surfaces with the next one, as with a communicator that was aborted. Tensors of floating point
stand for those on a device; all others are the host's, which a real gloo group carries with its own manners.

`dist.init_process_group(BACKEND, ...)` makes one, also through `LocalMembership(..., backend=BACKEND)`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ray_app.errors import PeerLostError

BACKEND = "devicelike"
GARBAGE = 0.125
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


class DeviceGroup(dist.ProcessGroup):
    """See the module.

    Attributes:
        failed: What broke it.
        exchanges: How many of the device there were.
        full_at: The one at which the device has no memory left, counted from 1.
        dies_at: The one at which the process ends, likewise.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._host = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._host._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._host._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.failed: str | None = None
        self.exchanges = 0
        self.full_at: int | None = None
        self.dies_at: int | None = None

    def getBackendName(self) -> str:
        return BACKEND

    def shutdown(self) -> None:
        """Closes the connections."""
        del self._host

    def settle(self) -> None:
        """What `ProcessGroup.settle` is with NCCL."""
        if self.failed is not None:
            raise PeerLostError(self.failed)

    def _call(self, name: str, outputs: Any, *args: Any, **options: Any) -> Any:
        """Calls what gloo has by the same name."""
        tensors = list(_tensors(outputs))
        if not any(tensor.is_floating_point() for tensor in tensors):
            return getattr(self._host, name)(outputs, *args, **options)
        self.exchanges += 1
        if self.exchanges == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.exchanges == self.full_at:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        if self.failed is not None:
            raise dist.DistBackendError(f"the communicator was aborted: {self.failed}")
        try:
            return _Work(self, getattr(self._host, name)(outputs, *args, **options), tensors)
        except RuntimeError as error:
            return _Work(self, error, tensors)


for _name in (
    "allreduce",
    "allgather",
    "all_gather_single",
    "_allgather_base",
    "all_to_all_single",
    "alltoall_base",
    "broadcast",
    "recv",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "send",
):
    setattr(DeviceGroup, _name, lambda self, outputs, *args, _name=_name, **options: self._call(_name, outputs, *args, **options))
DeviceGroup.barrier = lambda self, *args, **options: self._host.barrier(*args, **options)  # type: ignore[method-assign]


class FullAt:
    """A hook: the device of a rank has no memory left at one of its exchanges."""

    def __init__(self, rank: int, exchange: int) -> None:
        self.rank, self.exchange = rank, exchange

    def __call__(self, phase: str, rank: int, step: int) -> None:
        del step
        if (phase, rank) == ("forming", self.rank):
            dist.group.WORLD.full_at = self.exchange  # type: ignore[union-attr]


@dataclass(frozen=True)
class DiesAt:
    """A hook: the process of a rank ends at one of the exchanges of a step, the first time that it gets there; the file `proof` says so."""

    proof: Path
    rank: int
    step: int
    exchange: int

    def __call__(self, phase: str, rank: int, step: int) -> None:
        group: Any = dist.group.WORLD
        if (phase, rank, step) == ("compute", self.rank, self.step) and not self.proof.exists():
            self.proof.touch()
            group.dies_at = group.exchanges + self.exchange


class _Work(dist.Work):
    """An exchange on its way, or the error that began it."""

    def __init__(self, group: DeviceGroup, work: Any, outputs: list[Tensor]) -> None:
        super().__init__()
        self._group, self._work, self._outputs = group, work, outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Puts the streams in order; never raises."""
        del timeout
        try:
            if isinstance(self._work, RuntimeError):
                raise self._work
            self._work.wait()
        except RuntimeError as error:
            self._group.failed = str(error)
            for tensor in self._outputs:
                tensor.detach().fill_(GARBAGE)
        return True


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


dist.Backend.register_backend(BACKEND, DeviceGroup, devices=["cpu"])
