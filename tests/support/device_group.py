"""A process group on the CPU that behaves like one of a device, as NCCL does, where gloo waits and raises.

A collective spins until all ranks have arrived or until this rank itself aborts the group. The ranks send each other
data through the group's store, so that the end, the abort or the close of one closes nothing of another: only a
rendezvous shows that a peer is lost, or `watch_peers` in its place. An aborted collective leaves finite garbage, and
the next one raises the error. Floating-point tensors and broadcast ones stand for tensors on a device; all others are
tensors of the host, for which a real gloo group is used; its connections end with a peer.

`wait()` orders streams, so it does not say whether the collective has succeeded. What computes here runs at once, so
`wait()` spins, too, where a GPU would go on until the host synchronizes.

A group connects when it is created: it waits for all ranks, without a time-out unless NCCL's option of non-blocking
communicators is set. An abort frees nothing that another group needs, and may wait for the abort of another group.

Two classes raise the error differently: `ProcessGroupNCCL` raises `DistBackendError` (`BACKEND`); `ProcessGroupNCCL2`,
which is "nccl" since torch 2.15, raises `RuntimeError`, and `DistBackendError` only from `wait()` (`BACKEND_2`).

`dist.init_process_group(BACKEND, ...)` creates such a group, also through `LocalMembership(..., backend=BACKEND)`;
`SpinningGroup` is its `ProcessGroup`.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ErrorType

from ray_app.errors import PeerLostError
from ray_app.train.process_group import ProcessGroup

BACKEND, BACKEND_2 = "devicenccl", "devicenccl2"
GARBAGE = 0.125
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."
_MAX_PAUSE_S = 0.002


class DeviceGroup(dist.ProcessGroup):
    """A group as the module's docstring describes it.

    Attributes:
        failed: The error of the failed collective, if any.
        num_collectives: Number of collectives of the device so far, and of all-reduces of the host, as for step
            statistics.
        out_of_memory_at: The number, from 1, of the collective at which the device is out of memory.
        killed_at: The number of the collective at which the process ends, and the file to which it writes the name of
            the collective.
        aborting: Is set when an abort of the group has begun.
        aborted: Is set when the group is aborted.
        waits_for: The group of which the abort has to begin before that of this one ends.
        is_synchronizing: Is set when a thread waits for a spinning kernel.
        error: The error that the backend reports.
        link_lost_at: The number of the collective that fails on this rank's device, while the hosts stay connected.
        on_created: Is called when all ranks have created a group, before torch registers it.
        on_connecting, on_launching: Are called before a group connects, and before each collective of the device; they
            may raise the error of NCCL.
        connect_s: Seconds that a group takes to connect when all ranks have arrived.
        take_buffers: Takes the buffers of a group from the memory of the device, not of torch's allocator, and returns
            the function that gives them back; raises the error of NCCL if there is not enough.
    """

    on_created: Callable[[], None] | None = None
    on_connecting: Callable[[], None] | None = None
    on_launching: Callable[[], None] | None = None
    connect_s = 0.0
    take_buffers: Callable[[], Callable[[], None]] | None = None
    name = BACKEND

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, options: Any = None) -> None:
        super().__init__(rank, size)
        self._messages, self._has_store = store, True
        self._host = dist.ProcessGroup(store, rank, size)
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._host._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._host._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.failed: str | None = None
        self.num_collectives = 0
        self.out_of_memory_at: int | None = None
        self.killed_at: tuple[int, Path] | None = None
        self.link_lost_at: int | None = None
        self.aborting, self.aborted, self.is_synchronizing = (threading.Event() for _ in range(3))
        self.waits_for: DeviceGroup | None = None
        self.error = ErrorType.SUCCESS
        # The works that no thread has waited for, and the number of messages to and from each peer.
        self._pending: list[_Work] = []
        self._num_sent, self._num_received = Counter[int](), Counter[int]()
        self._give_back = DeviceGroup.take_buffers() if DeviceGroup.take_buffers is not None else lambda: None
        self._connect(timeout if options is not None and options.config.blocking == 0 else None)
        if DeviceGroup.on_created is not None:
            self._host.barrier().wait()
            DeviceGroup.on_created()

    def _connect(self, timeout: timedelta | None) -> None:
        """Waits for all ranks, as `ncclCommInitRank` does; only the time-out ends that."""
        if DeviceGroup.on_connecting is not None:
            DeviceGroup.on_connecting()
        begun_s = time.monotonic()
        with suppress(RuntimeError):
            self._messages.set(f"connects-{self.rank()}", ".")
        while not all(self._has_arrived(f"connects-{rank}") for rank in range(self.size())):
            if timeout is not None and time.monotonic() - begun_s > timeout.total_seconds():
                raise RuntimeError("Failed to initialize NCCL communicator: NCCL operation timed out")
            time.sleep(_MAX_PAUSE_S)
        time.sleep(DeviceGroup.connect_s)

    def getBackendName(self) -> str:
        return self.name

    def shutdown(self) -> None:
        """Closes the group in this process; NCCL would wait for its kernels."""
        is_spinning = self.failed is not None or not all(work.has_arrived() for work in self._pending)
        assert self.aborted.is_set() or not is_spinning, "a kernel spins: this would wait for ever"
        self._give_back()
        del self._host

    def abort(self) -> None:
        """Ends spinning kernels of this rank."""
        self.aborting.set()
        if self.waits_for is not None:
            self.waits_for.aborting.wait()
        self.aborted.set()

    def synchronize(self) -> None:
        """Waits for the work that was submitted to the device."""
        for work in list(self._pending):
            work.finish()
        if self.failed is not None:
            self.is_synchronizing.set()
            self.aborted.wait()

    def check_device_errors(self) -> None:
        """Acts like `ProcessGroup.check_device_errors` with a rendezvous that reports failures at once."""
        for work in list(self._pending):
            work.finish()
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
        """Starts the collective with this name."""
        tensors = list(tensors_in(outputs))
        is_of_device = self._is_of_device(name, tensors)
        self.num_collectives += is_of_device or name == "allreduce"
        if self.killed_at is not None and self.num_collectives == self.killed_at[0]:
            self.killed_at[1].write_text(name)
            os.kill(os.getpid(), signal.SIGKILL)
        if not is_of_device:
            return getattr(self._host, name)(outputs, *args, **options)
        if DeviceGroup.on_launching is not None:
            DeviceGroup.on_launching()
        if self.num_collectives == self.out_of_memory_at:
            raise torch.OutOfMemoryError(OUT_OF_MEMORY)
        if self.failed is not None or self.aborted.is_set():
            raise self._refusal(self.failed or "by this process")
        work = _Work(self, self._launch(name, outputs, *args, **options), tensors)
        self._pending.append(work)
        if self.num_collectives == self.link_lost_at:
            work.fail("a link was lost")
        return work

    def _is_of_device(self, name: str, outputs: list[Tensor]) -> bool:
        """Returns whether the device runs a collective."""
        return name == "broadcast" or any(tensor.is_floating_point() for tensor in outputs)

    def _launch(self, name: str, *args: Any, **options: Any) -> Any:
        """Starts a collective of the device, and returns what waits for it."""
        return self.start(name, *args, **options)

    def start(self, name: str, *args: Any, **options: Any) -> Transfer:
        """Sends this rank's data of a collective to its peers."""
        me = self.rank()
        sends, receives, finish = _PLANS[name](me, self.size(), *args, *options.values())
        pairs = [[tensor.detach() for peer, tensor in part if peer == me] for part in (receives, sends)]
        for output, tensor in zip(*pairs, strict=True):
            output.copy_(tensor)
        for peer, tensor in sends:
            if peer != me:
                data = tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
                # A store that has ended with a peer shows nothing of that here.
                with suppress(RuntimeError):
                    self._messages.set(f"{me}-{peer}-{self._num_sent[peer]}", b"." + data)
                self._num_sent[peer] += 1
        keys = list[tuple[str, Tensor]]()
        for peer, tensor in receives:
            if peer != me:
                keys.append((f"{peer}-{me}-{self._num_received[peer]}", tensor.detach()))
                self._num_received[peer] += 1
        return Transfer(self, keys, finish)

    def _has_arrived(self, key: str) -> bool:
        try:
            return self._has_store and self._messages.check([key])
        # The store has ended with a peer, or this process has shut down its connection.
        except RuntimeError:
            self._has_store = False
            return False

    def take(self, key: str) -> bytes:
        """Spins until a message has arrived, and returns it; raises RuntimeError if this rank aborts the group."""
        pause_s = 0.0
        while not self._has_arrived(key):
            if self.aborted.wait(pause_s):
                raise RuntimeError("this process has aborted the group")
            self.is_synchronizing.set()
            pause_s = min(_MAX_PAUSE_S, pause_s + 1e-4)
        data = self._messages.get(key)
        self._messages.delete_key(key)
        return data[1:]

    def fill_with_garbage(self, output: Tensor) -> None:
        """Fills the output of a failed collective."""
        output.detach().fill_(GARBAGE if output.is_floating_point() else 1)


class Transfer:
    """The messages of a collective that a rank waits for, each with the tensor that gets it.

    Args:
        group: The group.
        receives: The key of each message in the store, and the tensor.
        finish: Is called when all have arrived.
    """

    def __init__(self, group: DeviceGroup, receives: list[tuple[str, Tensor]], finish: Callable[[], None]) -> None:
        self._group, self._finish = group, finish
        self._receives = receives

    def has_arrived(self) -> bool:
        """Returns whether all peers have arrived."""
        return all(self._group._has_arrived(key) for key, _ in self._receives)

    def wait(self) -> None:
        """Spins until all peers have arrived; raises RuntimeError if this rank aborts the group before."""
        for key, tensor in self._receives:
            data = bytearray(self._group.take(key))
            if data:
                tensor.copy_(torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape))
        self._finish()


Sends = list[tuple[int, Tensor]]
Plan = tuple[Sends, Sends, Callable[[], None]]
"""The tensor for each peer, the tensor that gets the data of each peer, and what to do then."""
_REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


def _reduce_into(output: Tensor, parts: list[Tensor], options: Any) -> None:
    """Reduces in the order of the ranks."""
    function = next(function for op, function in _REDUCTIONS.items() if options.reduceOp == op)
    total = reduce(function, parts)
    output.detach().copy_(total / len(parts) if options.reduceOp == dist.ReduceOp.AVG else total)


def _to_all(size: int, tensor: Tensor) -> Sends:
    return [(peer, tensor) for peer in range(size)]


def _nothing() -> None:
    """Does nothing."""


def _plan_allreduce(rank: int, size: int, tensors: list[Tensor], options: Any) -> Plan:
    [tensor] = tensors
    parts = [torch.empty_like(tensor) for _ in range(size)]
    return _to_all(size, tensor), [*enumerate(parts)], lambda: _reduce_into(tensor, parts, options)


def _plan_broadcast(rank: int, size: int, tensors: list[Tensor], options: Any) -> Plan:
    [tensor], root = tensors, options.rootRank
    if rank == root:
        return [(peer, tensor) for peer in range(size) if peer != rank], [], _nothing
    return [], [(root, tensor)], _nothing


def _plan_allgather(rank: int, size: int, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> Plan:
    return _to_all(size, inputs[0]), [*enumerate(outputs[0])], _nothing


def _plan_all_gather_single(rank: int, size: int, output: Tensor, shard: Tensor, options: Any = None) -> Plan:
    return _to_all(size, shard.reshape(-1)), [*enumerate(output.view(-1).tensor_split(size))], _nothing


def _plan_all_gather_coalesced(
    rank: int, size: int, outputs: list[Tensor], inputs: list[Tensor], options: Any = None
) -> Plan:
    plans = [_plan_all_gather_single(rank, size, *pair) for pair in zip(outputs, inputs, strict=True)]
    sends, receives = ([entry for plan in plans for entry in plan[part]] for part in (0, 1))
    return sends, receives, _nothing


def _plan_all_to_all(
    rank: int, size: int, output: Tensor, values: Tensor, output_sizes: Any, sizes: Any, options: Any = None
) -> Plan:
    sent = values.split([*sizes] or [len(values) // size] * size)
    return [*enumerate(sent)], [*enumerate(output.split([*output_sizes] or [len(output) // size] * size))], _nothing


def _plan_reduce_scatter(rank: int, size: int, output: Tensor, values: Tensor, options: Any) -> Plan:
    parts = [torch.empty_like(output) for _ in range(size)]
    shards = values.reshape(-1).chunk(size)
    sends = [(peer, shard.view(output.shape)) for peer, shard in enumerate(shards)]
    return sends, [*enumerate(parts)], lambda: _reduce_into(output, parts, options)


_PLANS: dict[str, Callable[..., Plan]] = {
    "allreduce": _plan_allreduce,
    "allgather": _plan_allgather,
    "all_gather_single": _plan_all_gather_single,
    "all_gather_single_coalesced": _plan_all_gather_coalesced,
    "_allgather_base": _plan_all_gather_single,
    "all_to_all_single": _plan_all_to_all,
    "alltoall_base": _plan_all_to_all,
    "broadcast": _plan_broadcast,
    "recv": lambda rank, size, tensors, peer, tag: ([], [(peer, tensors[0])], _nothing),
    "reduce_scatter_single": _plan_reduce_scatter,
    "_reduce_scatter_base": _plan_reduce_scatter,
    "send": lambda rank, size, tensors, peer, tag: ([(peer, tensors[0])], [], _nothing),
}
for _name in _PLANS:
    setattr(
        DeviceGroup,
        _name,
        lambda self, outputs, *args, _name=_name, **options: self._call(_name, outputs, *args, **options),
    )
DeviceGroup.barrier = lambda self, *args, **options: self._host.barrier(*args, **options)


class DeviceGroup2(DeviceGroup):
    """A group with the error messages of `ProcessGroupNCCL2` of torch 2.15."""

    name = BACKEND_2

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


class SpinningGroup(ProcessGroup):
    """The process group for `BACKEND`."""

    def _wait_for_device(self) -> None:
        for group in self.all_groups():
            group.synchronize()


class OutOfMemoryAt:
    """A hook that lets the device of a rank run out of memory at a collective of this number."""

    def __init__(self, rank: int, collective: int) -> None:
        self.rank, self.collective = rank, collective

    def __call__(self, phase: str, rank: int, step: int) -> None:
        del step
        if (phase, rank) == ("forming", self.rank):
            dist.group.WORLD.out_of_memory_at = self.collective


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
    """A collective in flight, or the error with which it failed."""

    def __init__(self, group: DeviceGroup, work: Any, outputs: list[Tensor]) -> None:
        super().__init__()
        self._group, self._work = group, work
        self._outputs = outputs

    def has_arrived(self) -> bool:
        """Returns whether waiting would not spin."""
        return self._work is None or self._work.has_arrived()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Orders the streams; does not raise an error of this collective."""
        del timeout
        self.finish()
        self._group.on_waited()
        return True

    def finish(self) -> None:
        """Spins until the collective is done, or leaves garbage if this rank aborts the group."""
        work, self._work = self._work, None
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            self._set_failed(str(error))
        self._group._pending.remove(self)

    def fail(self, error: str) -> None:
        """Finishes the collective, and then lets it fail on this rank's device."""
        self.finish()
        self._set_failed(error)

    def _set_failed(self, error: str) -> None:
        self._group.failed = error
        for tensor in self._outputs:
            self._group.fill_with_garbage(tensor)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


@contextmanager
def watch_peers(store: Path, rank: int, size: int) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Notices the loss of a peer in place of the rendezvous: its process has ended, or an error has ended its block.

    Yields a function that is called when all ranks are in the block; what it is given is called after a loss, once.

    Args:
        store: The file of the ranks' store; each rank locks a file beside it.
        rank: This rank.
        size: Number of ranks.
    """
    is_over, lock = threading.Event(), threading.Lock()

    def is_lost(peer: Any) -> bool | None:
        """Returns None while the peer is in the block."""
        with suppress(BlockingIOError):
            fcntl.lockf(peer, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return os.pread(peer.fileno(), 4, 0) != b"done"
        return None

    def watch(on_loss: Callable[[], None]) -> None:
        with ExitStack() as stack:
            peers = [stack.enter_context(open(f"{store}.rank-{r}", "rb")) for r in range(size) if r != rank]
            while peers and not is_over.wait(0.005):
                states = [is_lost(peer) for peer in peers]
                peers = [peer for peer, state in zip(peers, states, strict=True) if state is None]
                if True in states:
                    # The next generation must not lose its groups.
                    with lock:
                        if not is_over.is_set():
                            on_loss()
                    return

    with open(f"{store}.rank-{rank}", "wb", buffering=0) as lock_file:
        fcntl.lockf(lock_file, fcntl.LOCK_EX)
        try:
            yield lambda on_loss: threading.Thread(target=watch, args=(on_loss,), daemon=True).start()
            lock_file.write(b"done")
        finally:
            with lock:
                is_over.set()


def _make_group(kind: type[DeviceGroup]) -> Callable[[Any, Any], DeviceGroup]:
    return lambda options, nccl: kind(options.store, options.group_rank, options.group_size, options.timeout, nccl)


for _class in (DeviceGroup, DeviceGroup2):
    dist.Backend.register_backend(_class.name, _make_group(_class), extended_api=True, devices=["cpu"])
