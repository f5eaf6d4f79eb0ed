"""A process group with a device's manners, on a CPU: what NCCL does where gloo waits and raises.

`wait()` returns at once, as one that only puts streams in order: whether the exchange went well is not known by then.
An exchange that was broken leaves finite garbage, and the error surfaces with the next one, as with a communicator that
was aborted. Until it is aborted its kernel spins: who waits for the device waits for that, and so would who destroys
the group. Floating point and what is broadcast stands for what is on a device; all else is the host's, which a real
gloo group carries with its own manners.

How the error surfaces is a class's own: `ProcessGroupNCCL` raises `DistBackendError` (`BACKEND`); `ProcessGroupNCCL2`,
which is "nccl" since torch 2.15, a plain `RuntimeError`, and `DistBackendError` from `wait()` alone (`BACKEND_2`).

`dist.init_process_group(BACKEND, ...)` makes one, also through `LocalMembership(..., backend=BACKEND)`; `SpinningGroup`
is the `ProcessGroup` of one.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType

from ray_app.errors import PeerLostError
from ray_app.train.process_group import ProcessGroup

BACKEND, BACKEND_2 = "devicelike", "devicelike2"
GARBAGE = 0.125
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


class DeviceGroup(dist.ProcessGroup):
    """See the module.

    Attributes:
        failed: What broke it.
        exchanges: How many of the device there were, and all-reduces of the host, as a step's table is.
        full_at: The one at which the device has no memory left, counted from 1.
        dies_at: The one at which the process ends, likewise, and the file that it then writes the exchange's name to.
        aborted: Whether somebody has.
        waited_for: Whether somebody waits for a kernel that spins.
        error: What the backend says of itself.
        fails_at: The one that is broken on this rank's device, likewise, whatever the hosts know of each other.
        when_made: Called when all have made one, before torch knows it.
    """

    when_made: Callable[[], None] | None = None
    name = BACKEND

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._host = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._host._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._host._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.failed: str | None = None
        self.exchanges = 0
        self.full_at: int | None = None
        self.dies_at: tuple[int, Path] | None = None
        self.fails_at: int | None = None
        self.aborted, self.waited_for = threading.Event(), threading.Event()
        self.error = ErrorType.SUCCESS
        if DeviceGroup.when_made is not None:
            self._host.barrier().wait()
            DeviceGroup.when_made()

    def getBackendName(self) -> str:
        return self.name

    def shutdown(self) -> None:
        """Closes the connections."""
        assert self.failed is None or self.aborted.is_set(), "a kernel spins: this would wait for ever"
        del self._host

    def abort(self) -> None:
        """Lets kernels that spin end."""
        self.aborted.set()

    def synchronize(self) -> None:
        """Waits for what the device was given."""
        if self.failed is not None:
            self.waited_for.set()
            self.aborted.wait()

    def check_device_errors(self) -> None:
        """What `ProcessGroup.check_device_errors` is, with a rendezvous that knows at once."""
        if self.failed is not None:
            self.abort()
            raise PeerLostError(self.failed)

    def get_error(self) -> ErrorType:
        """What a backend says of itself."""
        return self.error

    def _get_backend(self, device: torch.device) -> DeviceGroup:
        del device
        return self

    def _refusal(self, failed: str) -> RuntimeError:
        """What an exchange that is given to it then raises."""
        return dist.DistBackendError(f"the communicator was aborted: {failed}")

    def has_waited(self) -> None:
        """An exchange was waited for, at which time the error may be known."""

    def _call(self, name: str, outputs: Any, *args: Any, **options: Any) -> Any:
        """Calls what gloo has by the same name."""
        tensors = list(_tensors(outputs))
        is_of_device = name == "broadcast" or any(tensor.is_floating_point() for tensor in tensors)
        self.exchanges += is_of_device or name == "allreduce"
        if self.dies_at is not None and self.exchanges == self.dies_at[0]:
            self.dies_at[1].write_text(name)
            os.kill(os.getpid(), signal.SIGKILL)
        if not is_of_device:
            return getattr(self._host, name)(outputs, *args, **options)
        if self.exchanges == self.full_at:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        if self.failed is not None:
            raise self._refusal(self.failed)
        try:
            work = getattr(self._host, name)(outputs, *args, **options)
            if self.exchanges == self.fails_at:
                work.wait()
                raise RuntimeError("a link was lost")
            return _Work(self, work, tensors)
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
    setattr(
        DeviceGroup,
        _name,
        lambda self, outputs, *args, _name=_name, **options: self._call(_name, outputs, *args, **options),
    )
DeviceGroup.barrier = lambda self, *args, **options: self._host.barrier(*args, **options)  # type: ignore[method-assign]


class DeviceGroup2(DeviceGroup):
    """With the words of `ProcessGroupNCCL2` of torch 2.15.

    Attributes:
        connects_to: Where it waits for a peer's connection before it is made, which no time-out bounds.
    """

    name = BACKEND_2
    connects_to: socket.socket | None = None

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout)
        if DeviceGroup2.connects_to is not None:
            connect(DeviceGroup2.connects_to)

    def abort(self) -> None:
        """See `DeviceGroup.abort`."""
        self.error = ErrorType.COMM_ERROR
        super().abort()

    def _refusal(self, failed: str) -> RuntimeError:
        if self.aborted.is_set():
            return RuntimeError("NCCL communicator was aborted after a previous error")
        return RuntimeError("NCCL Async Error: remote process exited or there was a network error")

    def has_waited(self) -> None:
        """See `DeviceGroup.has_waited`."""
        if self.error != ErrorType.SUCCESS:
            raise dist.DistBackendError("NCCL operation failed")


def connect(listens: socket.socket) -> None:
    """Waits for a connection, as `ncclCommInitRank` does.

    Raises:
        RuntimeError: There is none; in NCCL's words.
    """
    listens.listen()
    try:
        listens.accept()[0].close()
    except OSError as error:
        raise RuntimeError(
            "Failed to initialize NCCL communicator: unhandled system error (run with NCCL_DEBUG=INFO)"
        ) from error


class SpinningGroup(ProcessGroup):
    """With `BACKEND`."""

    def _wait_for_device(self) -> None:
        dist.group.WORLD.synchronize()  # type: ignore[union-attr]


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
    """A hook: the process of a rank ends at an exchange of a step, the first time that it gets there; `proof` then
    names the exchange.
    """

    proof: Path
    rank: int
    step: int
    exchange: int

    def __call__(self, phase: str, rank: int, step: int) -> None:
        group: Any = dist.group.WORLD
        if (phase, rank, step) == ("compute", self.rank, self.step) and not self.proof.exists():
            group.dies_at = group.exchanges + self.exchange, self.proof


@dataclass(frozen=True)
class FailsAt:
    """A hook: an exchange of a step is broken on the device of a rank, the first time that it gets there; the file
    `proof` says so.
    """

    proof: Path
    rank: int
    step: int
    exchange: int

    def __call__(self, phase: str, rank: int, step: int) -> None:
        group: Any = dist.group.WORLD
        if (phase, rank, step) == ("compute", self.rank, self.step) and not self.proof.exists():
            self.proof.touch()
            group.fails_at = group.exchanges + self.exchange


class _Work(dist.Work):
    """An exchange on its way, or the error that began it."""

    def __init__(self, group: DeviceGroup, work: Any, outputs: list[Tensor]) -> None:
        super().__init__()
        self._group, self._work, self._outputs = group, work, outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Puts the streams in order; raises nothing of this exchange."""
        del timeout
        try:
            if isinstance(self._work, RuntimeError):
                raise self._work
            self._work.wait()
        except RuntimeError as error:
            self._group.failed = str(error)
            for tensor in self._outputs:
                tensor.detach().fill_(GARBAGE if tensor.is_floating_point() else 1)
        self._group.has_waited()
        return True


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


for _class in (DeviceGroup, DeviceGroup2):
    dist.Backend.register_backend(_class.name, _class, devices=["cpu"])
