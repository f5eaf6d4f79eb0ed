"""A process group on the CPU that behaves like one of a device, as NCCL does, where gloo waits and raises.

`wait()` returns at once, as if it only ordered streams: it does not say whether the collective has succeeded. A failed
collective leaves finite garbage, and the next one raises the error, as with an aborted communicator. Until the group is
aborted, the kernel of the failed collective spins: synchronizing the device waits for it, and so would destroying the
group. Floating-point tensors and broadcast ones stand for tensors on a device; all others are tensors of the host, for
which a real gloo group is used.

Two classes raise the error differently: `ProcessGroupNCCL` raises `DistBackendError` (`BACKEND`); `ProcessGroupNCCL2`,
which is "nccl" since torch 2.15, raises `RuntimeError`, and `DistBackendError` only from `wait()` (`BACKEND_2`).

`dist.init_process_group(BACKEND, ...)` creates such a group, also through `LocalMembership(..., backend=BACKEND)`;
`SpinningGroup` is its `ProcessGroup`.
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
    """A group as the module's docstring describes it.

    Attributes:
        failed: The error of the failed collective, if any.
        num_collectives: Number of collectives of the device so far, and of all-reduces of the host, as for step
            statistics.
        out_of_memory_at: The number, from 1, of the collective at which the device is out of memory.
        killed_at: The number of the collective at which the process ends, and the file to which it writes the name of
            the collective.
        aborted: Is set when the group is aborted.
        is_synchronizing: Is set when a thread waits for a spinning kernel.
        error: The error that the backend reports.
        link_lost_at: The number of the collective that fails on this rank's device, while the hosts stay connected.
        on_created: Is called when all ranks have created a group, before torch registers it.
    """

    on_created: Callable[[], None] | None = None
    name = BACKEND

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._host = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._host._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._host._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.failed: str | None = None
        self.num_collectives = 0
        self.out_of_memory_at: int | None = None
        self.killed_at: tuple[int, Path] | None = None
        self.link_lost_at: int | None = None
        self.aborted, self.is_synchronizing = threading.Event(), threading.Event()
        self.error = ErrorType.SUCCESS
        if DeviceGroup.on_created is not None:
            self._host.barrier().wait()
            DeviceGroup.on_created()

    def getBackendName(self) -> str:
        return self.name

    def shutdown(self) -> None:
        """Closes the connections."""
        assert self.failed is None or self.aborted.is_set(), "a kernel spins: this would wait for ever"
        del self._host

    def abort(self) -> None:
        """Ends spinning kernels."""
        self.aborted.set()

    def synchronize(self) -> None:
        """Waits for the work that was submitted to the device."""
        if self.failed is not None:
            self.is_synchronizing.set()
            self.aborted.wait()

    def check_device_errors(self) -> None:
        """Acts like `ProcessGroup.check_device_errors` with a rendezvous that reports failures at once."""
        if self.failed is not None:
            self.abort()
            raise PeerLostError(self.failed)

    def get_error(self) -> ErrorType:
        """Returns the error that the backend reports."""
        return self.error

    def _get_backend(self, device: torch.device) -> DeviceGroup:
        del device
        return self

    def _refusal(self, failed: str) -> RuntimeError:
        """Returns the error that a collective after the failed one raises."""
        return dist.DistBackendError(f"the communicator was aborted: {failed}")

    def on_waited(self) -> None:
        """Is called after `wait()` of a collective; a subclass may raise the error here."""

    def _call(self, name: str, outputs: Any, *args: Any, **options: Any) -> Any:
        """Calls the collective of gloo with this name."""
        tensors = list(tensors_in(outputs))
        is_of_device = self._is_of_device(name, tensors)
        self.num_collectives += is_of_device or name == "allreduce"
        if self.killed_at is not None and self.num_collectives == self.killed_at[0]:
            self.killed_at[1].write_text(name)
            os.kill(os.getpid(), signal.SIGKILL)
        if not is_of_device:
            return getattr(self._host, name)(outputs, *args, **options)
        if self.num_collectives == self.out_of_memory_at:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        if self.failed is not None:
            raise self._refusal(self.failed)
        try:
            work = self._launch(name, outputs, *args, **options)
            if self.num_collectives == self.link_lost_at:
                work.wait()
                raise RuntimeError("a link was lost")
            return _Work(self, work, tensors)
        except RuntimeError as error:
            return _Work(self, error, tensors)

    def _is_of_device(self, name: str, outputs: list[Tensor]) -> bool:
        """Returns whether the device runs a collective."""
        return name == "broadcast" or any(tensor.is_floating_point() for tensor in outputs)

    def _launch(self, name: str, *args: Any, **options: Any) -> Any:
        """Starts a collective of the device, and returns its `Work`."""
        return getattr(self._host, name)(*args, **options)

    def fill_with_garbage(self, output: Tensor) -> None:
        """Fills the output of a failed collective."""
        output.detach().fill_(GARBAGE if output.is_floating_point() else 1)


for _name in (
    "allreduce",
    "allgather",
    "all_gather_single",
    "all_gather_single_coalesced",
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
    """A group with the error messages of `ProcessGroupNCCL2` of torch 2.15.

    Attributes:
        connects_to: The socket at which a group waits for a peer's connection when it is created, without a time-out.
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

    def on_waited(self) -> None:
        """See `DeviceGroup.on_waited`."""
        if self.error != ErrorType.SUCCESS:
            raise dist.DistBackendError("NCCL operation failed")


def connect(listens: socket.socket) -> None:
    """Waits for a connection, as `ncclCommInitRank` does.

    Raises:
        RuntimeError: No connection was made; the message is that of NCCL.
    """
    listens.listen()
    try:
        listens.accept()[0].close()
    except OSError as error:
        raise RuntimeError(
            "Failed to initialize NCCL communicator: unhandled system error (run with NCCL_DEBUG=INFO)"
        ) from error


class SpinningGroup(ProcessGroup):
    """The process group for `BACKEND`."""

    def _wait_for_device(self) -> None:
        dist.group.WORLD.synchronize()  # type: ignore[union-attr]


class OutOfMemoryAt:
    """A hook that lets the device of a rank run out of memory at a collective of this number."""

    def __init__(self, rank: int, collective: int) -> None:
        self.rank, self.collective = rank, collective

    def __call__(self, phase: str, rank: int, step: int) -> None:
        del step
        if (phase, rank) == ("forming", self.rank):
            dist.group.WORLD.out_of_memory_at = self.collective  # type: ignore[union-attr]


@dataclass(frozen=True)
class KillAtCollective:
    """A hook that kills the process of a rank at a collective of a step, the first time that it gets there; the file
    `proof` then has the name of the collective.
    """

    proof: Path
    rank: int
    step: int
    collective: int

    def __call__(self, phase: str, rank: int, step: int) -> None:
        group: Any = dist.group.WORLD
        if (phase, rank, step) == ("compute", self.rank, self.step) and not self.proof.exists():
            group.killed_at = group.num_collectives + self.collective, self.proof


@dataclass(frozen=True)
class FailAtCollective:
    """A hook that lets a collective of a step fail on the device of a rank, the first time that it gets there, and
    creates the file `proof`.
    """

    proof: Path
    rank: int
    step: int
    collective: int

    def __call__(self, phase: str, rank: int, step: int) -> None:
        group: Any = dist.group.WORLD
        if (phase, rank, step) == ("compute", self.rank, self.step) and not self.proof.exists():
            self.proof.touch()
            group.link_lost_at = group.num_collectives + self.collective


class _Work(dist.Work):
    """A collective in flight, or the error that its start raised."""

    def __init__(self, group: DeviceGroup, work: Any, outputs: list[Tensor]) -> None:
        super().__init__()
        self._group = group
        self._work = work
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Orders the streams; does not raise an error of this collective."""
        del timeout
        try:
            if isinstance(self._work, RuntimeError):
                raise self._work
            self._work.wait()
        except RuntimeError as error:
            self._group.failed = str(error)
            for tensor in self._outputs:
                self._group.fill_with_garbage(tensor)
        self._group.on_waited()
        return True


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


for _class in (DeviceGroup, DeviceGroup2):
    dist.Backend.register_backend(_class.name, _class, devices=["cpu"])
