"""torch's default process group of a generation: forming it, finding its errors, aborting it from another thread."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from ray_app.devices import HOST, HOST_GROUP, kind_of
from ray_app.errors import ForgedMessageError, PeerLostError
from ray_app.reduction import messages
from ray_app.reduction.peer_errors import clear_group, collective, launch_lock, set_group
from ray_app.reduction.world import World, stage_groups
from ray_app.task.metric_states import return_false
from ray_app.torch_private import (
    ErrorType,
    backend_error,
    backends_created_by,
    is_group_open,
    nonblocking_options,
    reset_group_count,
    set_timeout,
)
from ray_app.train.membership import KEY_BYTES, GenerationInfo, SingleProcessMembership

logger = logging.getLogger(__name__)

_FORM_TIMEOUT = timedelta(seconds=30)
"""Time-out of each wait of gloo, of the store and of NCCL (`nonblocking_options`) while a group forms."""
_STUCK_S = 60.0
"""Time after which a group that was aborted while it formed counts as stuck.

It is twice `_FORM_TIMEOUT`, after which each wait should have ended.
"""
_COLLECTIVE_TIMEOUT = timedelta(days=1)
"""Time-out of collectives; the step watchdog of the rendezvous ends a stalled generation long before."""
_STORE_BACKLOG = 2048
"""Maximum number of connections that wait for the store; all workers connect at once when a generation forms."""
_MIN_SHARED_MEMORY_BYTES = 512 << 20
"""Free bytes of /dev/shm below which NCCL may fail to connect GPUs of a node; a container often has 64 MB in all."""
_LAUNCH_S = 2.0
"""Maximum time that an abort waits for a launch to end; a launch that waits for a lost peer ends only by the abort."""


class ProcessGroup:
    """torch's default process group for one generation; another thread can abort it while this one waits in it."""

    def __init__(self) -> None:
        self._sockets_before = set(_list_sockets())
        self._store_address: tuple[str, int] | None = None
        self._sockets: list[tuple[int, str]] | None = None
        self.has_device_collectives = False
        """See `World.has_device_collectives`: waits only order streams, so errors are read from the backend (NCCL)."""
        self.device = HOST
        """The device of this rank."""
        self.is_aborted = False
        self._abort_lock = threading.Lock()
        self._abort_threads = dict[Any, threading.Thread]()
        self.is_forming = False
        """Whether `open` waits for the other members."""
        self._connecting: Future[Any] | None = None
        self._aborted_s = 0.0
        self.groups: tuple[Any, ...] = (None,)
        """The process group of this rank in each stage of the reduction, see `World.groups`."""

    def open(self, generation: GenerationInfo, device: torch.device, backend: Literal["auto", "gloo"]) -> None:
        """Forms the group of a generation; blocks until all members have connected.

        Args:
            generation: The generation.
            device: Device of this rank.
            backend: Value of `train.backend`, `gloo` if workers share a GPU.

        Raises:
            PeerLostError: Another thread has aborted the group before it was formed.
        """
        self.is_forming = True
        try:
            self._open(generation, device, backend_name(device, backend))
        finally:
            self.is_forming = False

    def _open(self, generation: GenerationInfo, device: torch.device, name: str) -> None:
        self.has_device_collectives, self.device = name != HOST_GROUP, device
        self._sockets_before, self._store_address = set(_list_sockets()), (generation.host, generation.port)
        set_group(self)
        reset_group_count()
        messages.open_session(generation.number, generation.rank, generation.key)
        store = TCPStore(generation.host, generation.port, is_master=False, timeout=_FORM_TIMEOUT)
        backends = [part.rpartition(":")[2] for part in name.split(",")] if self.has_device_collectives else []
        has_stages = self.has_device_collectives or not kind_of(device).is_host
        with backends_created_by(self._connect, backends):
            init_default_group(
                name, device, PrefixStore(f"generation-{generation.number}", store), generation.rank, generation.size
            )
            self.groups = open_stage_groups(generation.rank, generation.hosts, _FORM_TIMEOUT, has_stages)
        for group in {None, *self.groups}:
            set_timeout(_COLLECTIVE_TIMEOUT, group)
        if not self.is_aborted:
            self._sockets = self._find_group_sockets(
                PrefixStore(f"generation-{generation.number}/listens", store), generation
            )
        # An abort before the group was formed has aborted nothing, so the group must not be used.
        if self.is_aborted:
            raise PeerLostError("the process group was aborted while it formed")
        if self.has_device_collectives:
            # NCCL connects neighbors only in the first collective; there an error would look like one of a step.
            with launch_lock:
                dist.all_gather_into_tensor(torch.empty(generation.size, device=device), torch.ones(1, device=device))
            self.check_device_errors()

    def _connect(self, create: Callable[[], Any]) -> Any:
        """Returns what `create` returns when it has connected to all peers; raises PeerLostError after an abort.

        Another thread calls `create`, because only a time-out ends the wait of NCCL for a lost peer. After an abort
        nothing uses what that thread returns.
        """
        connecting = self._connecting = Future[Any]()
        if self.is_aborted:
            raise PeerLostError("the process group was aborted before it formed")

        def connect() -> None:
            try:
                kind_of(self.device).use(self.device)
                backend = create()
                if connecting.set_running_or_notify_cancel():
                    connecting.set_result(backend)
                else:
                    backend.abort()
            except Exception as error:
                # After an abort nothing needs the error; that of gloo is that it has no abort.
                with suppress(InvalidStateError):
                    connecting.set_exception(error)

        threading.Thread(target=connect, name="connect", daemon=True).start()
        try:
            return connecting.result()
        except CancelledError:
            raise PeerLostError("the process group was aborted while it formed") from None

    def _find_group_sockets(self, store: PrefixStore, generation: GenerationInfo) -> list[tuple[int, str]]:
        """Returns the sockets of this group's connections; a collective of the group.

        A socket of the group was opened since the group began to form, and one of its ends is an address at which a
        member or the store listens. Other new sockets belong to Ray. Every member publishes in the store the addresses
        at which it listens, and the call waits until all members have done so.
        """
        new_sockets = [entry for entry in _list_sockets() if entry not in self._sockets_before]
        ends = {number: _socket_ends(number) for number, _ in new_sockets}
        listening = [local for local, remote in ends.values() if local and not remote]
        store.set(str(generation.rank), json.dumps(listening))
        published = store.multi_get([str(rank) for rank in range(generation.size)])
        try:
            listeners = {(host, port) for entry in published for host, port in json.loads(entry)}
        except (ValueError, TypeError) as error:
            raise ForgedMessageError(f"no worker has published the ports of its store: {error}") from error
        addresses = {self._store_address, *listeners}
        return [(number, identity) for number, identity in new_sockets if addresses.intersection(ends[number])]

    def check_device_errors(self) -> None:
        """Waits for the device, and raises `PeerLostError` if the group was aborted or its backend reports an error.

        It does nothing with gloo, where waits raise by themselves.
        """
        if not self.has_device_collectives:
            return
        self._wait_for_device()
        error = self._error()
        if self.is_aborted:
            raise PeerLostError("the process group was aborted while the device ran its collectives")
        if error is not None:
            raise PeerLostError(f"a collective failed on the device: {error}")

    def _wait_for_device(self) -> None:
        """Waits for the stream that computes, and so for the step's collectives and side streams, which it waits for.

        Uploads of data for later steps may still be in progress afterwards.
        """
        kind_of(self.device).synchronize_stream(self.device)

    def _error(self) -> str | None:
        """Returns the name of the error of the first backend that reports one.

        The backends are not asked after this process has aborted the group; then the result is None.
        """
        with launch_lock:
            errors = (backend_error(group, self.device) for group in self.all_groups() if not self.is_aborted)
            return next((error.name for error in errors if error != ErrorType.SUCCESS), None)

    def has_failed(self) -> bool:
        """Returns whether a backend of the group reports an error, see `Breakable`; False with gloo."""
        # `_error` is None if another thread aborts the group meanwhile.
        return self.has_device_collectives and (self._error() is not None or self.is_aborted)

    def all_groups(self) -> list[Any]:
        """Returns the groups that have been formed, from the one of the last stage to the default group."""
        if (world := dist.group.WORLD) is None:
            return []
        return [group for group in (*reversed(self.groups), world) if group is not None]

    def abort(self) -> None:
        """Ends the waits of this process in the group with an error; may be called by another thread, and repeatedly.

        NCCL has an abort. gloo has none, so its connections are shut down, which ends its waits with an error.

        The call returns at once, because the calling thread also sends the heartbeats of this process and an abort of
        NCCL may take long. All groups are aborted at the same time, each by a thread of its own, because the abort of
        one group may wait for the device's work for another.

        While a group of the device forms, `open` stops waiting. Else only the connection to the store is shut down:
        nothing tells the other connections of the group from those of Ray yet, and gloo ends the process if its
        listening socket is shut down.
        """
        self._aborted_s = self._aborted_s or time.monotonic()
        # This is set before any wait ends, because an aborted collective leaves garbage in its output.
        self.is_aborted = True
        if self._connecting is not None:
            self._connecting.cancel()
        with self._abort_lock:
            for group in self.all_groups() if self.has_device_collectives else ():
                if group not in self._abort_threads:
                    thread = threading.Thread(target=_abort_group, args=(group,), name="abort", daemon=True)
                    self._abort_threads[group] = thread
                    thread.start()
        sockets = self._sockets
        if sockets is None:
            sockets = [
                (number, identity)
                for number, identity in _list_sockets()
                if (number, identity) not in self._sockets_before and self._is_store(number)
            ]
        for number, identity in sockets:
            _shut_down(number, identity)

    @property
    def is_stuck(self) -> bool:
        """Whether `open` still waits although the group was aborted long ago, so that the process has to end.

        This is the last resort for versions of torch in which neither an abort nor a time-out ends a wait in `open`.
        """
        return self.is_forming and self.is_aborted and time.monotonic() - self._aborted_s > _STUCK_S

    def _is_store(self, number: int) -> bool:
        """Returns whether a descriptor is a connection to the store of this group."""
        return self._store_address is not None and _socket_ends(number)[1] == self._store_address

    def close(self, broken: bool = False) -> None:
        """Destroys the group in this process.

        Afterwards no collective of the group runs on the device, so the memory that it would write into can be reused.

        Args:
            broken: Whether to abort the group first. Without an abort NCCL would wait for ever in a broken group, and
                so would the helper thread that reduces gradients by gloo.
        """
        if broken:
            self.abort()
        with self._abort_lock:
            threads = list(self._abort_threads.values())
        for thread in threads:
            thread.join()
        if broken:
            # An error of the device itself is ignored here, because the next call that uses the device raises it again.
            with suppress(RuntimeError):
                kind_of(self.device).synchronize(self.device)
        with launch_lock:
            destroy_default_group()
        clear_group(self)


@contextmanager
def open_group_of_one(device: torch.device, backend: str) -> Iterator[None]:
    """Makes torch's default process group with this process alone, and destroys it at the end of the block."""
    init_default_group(backend_name(device, backend), device, HashStore(), 0, 1)
    try:
        yield
    finally:
        destroy_default_group()


@cache
def prove_device(device: torch.device, backend: str) -> None:
    """Allocates, computes and communicates on a device alone, once in a process, as a generation does with others.

    A worker calls it before it joins the others: a failure in this process would keep them waiting when they form. The
    argument `backend` is that of `ProcessGroup.open`.
    """
    if kind_of(device).is_host:
        return
    kind_of(device).use(device)
    values = torch.ones(16, device=device)
    if backend_name(device, backend) != HOST_GROUP:
        if _free_shared_memory() < _MIN_SHARED_MEMORY_BYTES:
            logger.warning("NCCL may fail: this node has %s", _SHARED_MEMORY.format(_free_shared_memory() >> 20))
        with open_group_of_one(device, backend):
            dist.all_reduce(values)
            values.tolist()
    values.sum().tolist()


_SHARED_MEMORY = "a small /dev/shm, of which {} MB are free (in a container: --shm-size=8g or --ipc=host)"


def _free_shared_memory() -> int:
    """Returns the free bytes of /dev/shm, through which NCCL connects GPUs of a node that do not reach each other."""
    stats = os.statvfs("/dev/shm")
    return stats.f_bavail * stats.f_frsize


def describe_failed_forms(error: str) -> str:
    """Returns the message for a run in which NCCL fails to connect the workers, the last time with this error."""
    interface = os.environ.get("NCCL_SOCKET_IFNAME", "not set")
    return (
        "NCCL has failed twice to connect the workers, although no worker was lost. The usual causes are"
        f" {_SHARED_MEMORY.format(_free_shared_memory() >> 20)}, a network interface that does not reach other nodes"
        f" (NCCL_SOCKET_IFNAME is {interface}), and a missing InfiniBand device (NCCL_IB_DISABLE=1 uses TCP instead) or"
        f" a blocked port. NCCL's warnings are in the output of the workers. The last error: {error}"
    )


def init_default_group(name: str, device: torch.device, store: Any, rank: int, size: int) -> None:
    """Makes torch's default process group; blocks until all ranks have connected.

    Args:
        name: Backend, see `backend_name`.
        device: Device of this rank. It is passed to NCCL, which then connects at once instead of in the first backward,
            and does not choose a device by the number of the rank.
        store: Store through which the ranks publish their addresses.
        rank: This rank.
        size: Number of ranks.
    """
    is_of_device = name != HOST_GROUP and not kind_of(device).is_host
    for variable, value in kind_of(device).group_settings.items() if is_of_device else ():
        os.environ.setdefault(variable, value)
    dist.init_process_group(
        name,
        store=store,
        rank=rank,
        world_size=size,
        timeout=_FORM_TIMEOUT,
        device_id=device if is_of_device else None,
        pg_options=nonblocking_options(name, _FORM_TIMEOUT),
    )
    _hide_default_group()


def destroy_default_group() -> None:
    """Destroys torch's default process group, if there is one."""
    try:
        if dist.group.WORLD is not None:
            dist.destroy_process_group()
    finally:
        _replace_questions({answer: getattr(dist.distributed_c10d, name) for name, answer in _QUESTIONS.items()})


def _hide_default_group() -> None:
    """Lets `torch.distributed` answer as without a group, until `destroy_default_group`.

    Code of users, written for DDP, gathers rows of all ranks or divides by their number if there is a group; its
    results would depend on the number of workers. torch and this application ask the module below.
    """
    _replace_questions({getattr(dist.distributed_c10d, name): answer for name, answer in _QUESTIONS.items()})


def _replace_questions(replacements: dict[Callable[..., int], Callable[..., int]]) -> None:
    """Replaces functions in `torch.distributed`, and in modules but torch's that have imported them, by any name."""
    by_id = {id(function): replacement for function, replacement in replacements.items()}
    for key, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (module is dist or key.partition(".")[0] != "torch"):
            names = vars(module)
            names |= {name: by_id[id(value)] for name, value in list(names.items()) if id(value) in by_id}


def _ask_of_group(name: str, group: Any = None) -> int:
    if group is None:
        raise ValueError(f"torch.distributed.{name}: the number of workers is hidden, since no result may depend on it")
    answer: int = getattr(dist.distributed_c10d, name)(group)
    return answer


_QUESTIONS: dict[str, Callable[..., int]] = {
    # An own object: replacements are found by their identity, and others use the function itself.
    "is_initialized": partial(return_false),
    "get_rank": partial(_ask_of_group, "get_rank"),
    "get_world_size": partial(_ask_of_group, "get_world_size"),
}
"""The functions of `torch.distributed` that ask for the default group, with their replacements."""


def _abort_group(group: Any) -> None:
    """Aborts a group's communicator when no thread launches a collective any more, or after `_LAUNCH_S`.

    The abort frees memory that a launch uses (NCCL in torch 2.15). No launch follows, because `collective` refuses it;
    so the lock is not held meanwhile, and all groups abort at the same time.
    """
    if launch_lock.acquire(timeout=_LAUNCH_S):
        launch_lock.release()
    try:
        # The group may have been closed meanwhile.
        if is_group_open(group):
            group.abort()
    except RuntimeError as error:
        logger.warning("A communicator could not be aborted: %s", error)


def backend_name(device: torch.device, backend: str) -> str:
    """Returns torch's name of the backend that a value of `train.backend` selects for a device.

    Collectives in host memory use gloo in any case.
    """
    if backend == "auto":
        return kind_of(device).group_backend
    return backend


def open_stage_groups(rank: int, hosts: tuple[str, ...], timeout: timedelta, uses_collectives: bool) -> tuple[Any, ...]:
    """Returns the process group of a rank in each stage of the reduction, see `World.groups`; a collective.

    Args:
        rank: This rank.
        hosts: The host of every rank.
        timeout: Limit for forming a group.
        uses_collectives: Whether the stages use collectives and so need groups; otherwise every entry is None, because
            the ranks send messages to each other (`reduction.transport`).
    """
    stages = stage_groups(hosts) if hosts else [[]]
    if len(stages) == 1 or not uses_collectives:
        return (None,) * len(stages)
    # Every rank has to call `new_group` for all groups, also for groups that it does not belong to.
    backends = dist.get_backend_config()
    groups = [
        {ranks: dist.new_group(ranks, timeout, pg_options=nonblocking_options(backends, timeout)) for ranks in stage}
        for stage in stages
    ]
    return tuple(group for stage in groups for ranks, group in stage.items() if rank in ranks)


def _list_sockets() -> list[tuple[int, str]]:
    """Returns the descriptor and the identity (`socket:[INODE]`) of every socket of this process.

    The number of a descriptor is used again after a socket is closed; the identity is not.
    """
    sockets = []
    for number in os.listdir("/proc/self/fd"):
        # The descriptor may have been closed meanwhile, as the one of this very listing is.
        with suppress(OSError):
            identity = os.readlink(f"/proc/self/fd/{number}")
            if identity.startswith("socket:"):
                sockets.append((int(number), identity))
    return sockets


def _socket_ends(number: int) -> tuple[tuple[str, int] | None, tuple[str, int] | None]:
    """Returns host and port of the local and of the remote end of a TCP connection.

    The remote end of a listening socket is None; both ends of a socket of another kind, or of a closed one, are None.
    """
    ends: list[tuple[str, int] | None] = [None, None]
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as tcp_socket:
        if tcp_socket.family in (socket.AF_INET, socket.AF_INET6) and tcp_socket.type == socket.SOCK_STREAM:
            for index, get_name in enumerate((tcp_socket.getsockname, tcp_socket.getpeername)):
                host, port = get_name()[:2]
                ends[index] = host.removeprefix("::ffff:").partition("%")[0], port
    return ends[0], ends[1]


def _shut_down(number: int, identity: str) -> None:
    """Shuts down a TCP connection, if the descriptor still has this identity and is a connection."""
    with suppress(OSError):
        if os.readlink(f"/proc/self/fd/{number}") != identity:
            return
        with socket.socket(fileno=os.dup(number)) as tcp_socket:
            if tcp_socket.family in (socket.AF_INET, socket.AF_INET6) and tcp_socket.type == socket.SOCK_STREAM:
                # This raises for a listening socket, which must not be shut down.
                tcp_socket.getpeername()
                tcp_socket.shutdown(socket.SHUT_RDWR)


def open_store(host: str) -> TCPStore:
    """Returns a store that listens at an address of this node only; by itself it would listen at all of them."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=_STORE_BACKLOG)
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def use_interface_of_host(host: str) -> None:
    """Makes collectives use the network interface that has an address, unless the user has chosen an interface.

    Args:
        host: The address at which Ray reaches this node.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            # NCCL takes a name without the sign for the beginning of names.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


_FILE_STORE_TIMEOUT = timedelta(seconds=60)
_LOOPBACK = "127.0.0.1"


class FileStoreMembership(SingleProcessMembership):
    """The membership of a fixed number of processes on this machine, which form their process group through a file.

    There is one generation and no rendezvous: if a process is lost, the others fail.

    Args:
        world: Rank and size of this process, and the number of logical workers.
        store: Path of the file through which the processes find each other; each process group needs a new file. Only
            the user may read it, because it also has the key of the generation.
        backend: Backend of the process group.
        hosts: Names of hosts, one for each rank, to reduce as if the processes were on several hosts, see
            `World.hosts`; if empty, all ranks count as one host.
    """

    def __init__(self, world: World, store: Path, backend: str = "gloo", hosts: tuple[str, ...] = ()) -> None:
        super().__init__(world.logical_workers, lambda: False)
        self._world = world
        self._store = store
        self._backend = backend
        self._hosts = hosts

    @contextmanager
    def generation(self, step: int, was_broken: bool) -> Iterator[tuple[World, GenerationInfo]]:
        """Forms the only generation; see `Membership.generation`."""
        del step, was_broken
        rank, size = self._world.rank, self._world.size
        info = GenerationInfo(1, rank, size, "", 0, self._hosts)
        if size == 1:
            yield self._world, info
            return
        sockets_before = set(_list_sockets())
        use_interface_of_host(_LOOPBACK)
        try:
            with collective():
                reset_group_count()
                self._store.touch(mode=0o600)
                store = dist.FileStore(str(self._store), size)  # type: ignore[attr-defined]
                if rank == 0:
                    store.set("key", secrets.token_hex(KEY_BYTES))
                messages.open_session(1, rank, store.get("key").decode())
                dist.init_process_group(
                    self._backend, store=store, rank=rank, world_size=size, timeout=_FILE_STORE_TIMEOUT
                )
                _hide_default_group()
                groups = open_stage_groups(rank, self._hosts, _FILE_STORE_TIMEOUT, self._backend != "gloo")
                # No process may leave the group while another one still connects.
                dist.barrier()
            yield dataclasses.replace(self._world, hosts=self._hosts, groups=groups), info
        except BaseException:
            group: Any = dist.group.WORLD
            if group is not None:
                group.abort()
            # The frames of the error may keep the group alive, and the peers wait until its connections end.
            for number, identity in set(_list_sockets()) - sockets_before:
                _shut_down(number, identity)
            raise
        finally:
            destroy_default_group()
