"""torch's default process group, formed anew for every generation; another thread can abort it."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ray_app.errors import PeerLostError
from ray_app.reduction import group_state
from ray_app.reduction.base import stage_groups
from ray_app.train.membership import GenerationInfo

logger = logging.getLogger(__name__)

_FORM_TIMEOUT = timedelta(seconds=30)
"""Limit of the waits while a group forms: they cannot be aborted if a peer is lost before it has connected.

NCCL has no such limit, see `ProcessGroup.is_stuck`.
"""
_STUCK_S = 60.0
"""Time after which a group that was aborted while it formed counts as stuck: twice the limit of gloo and the store."""
_COLLECTIVE_TIMEOUT = timedelta(days=1)
"""Time-out of collectives, long enough never to matter: the rendezvous's step watchdog acts much earlier."""
_NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Environment variables for NCCL, unless the user has set them.

torch's own threads then neither end the process nor abort, and do not wait for dumps, which would add a minute and more
to a recovery. The rendezvous decides when to abort, and `check_device_errors` reads the error.
"""
_NCCL = "cpu:gloo,cuda:nccl"
_LAUNCH_S = 2.0
"""Limit of an abort's wait for the end of a launch: a launch that waits for a lost peer ends only by the abort."""


class ProcessGroup:
    """torch's default process group for one generation; another thread can abort it while this one waits in it."""

    def __init__(self) -> None:
        self._sockets_before = set(_list_sockets())
        self._store_address: tuple[str, int] | None = None
        self._sockets: list[tuple[int, str]] | None = None
        self._is_asynchronous = False
        self._device = torch.device("cpu")
        self.is_aborted = False
        self._abort_lock = threading.Lock()
        self._abort_threads = dict[Any, threading.Thread]()
        self._is_forming = False
        self._aborted_s = 0.0
        self.groups: tuple[Any, ...] = (None,)
        """The process groups of this rank, see `World.groups`."""

    def open(self, generation: GenerationInfo, device: torch.device, backend: Literal["auto", "nccl", "gloo"]) -> None:
        """Forms the group of a generation; blocks until all members have connected.

        Args:
            generation: The generation.
            device: Device of this rank.
            backend: Value of `train.backend`.

        Raises:
            PeerLostError: The group was aborted meanwhile.
        """
        self._is_forming = True
        try:
            self._open(generation, device, backend_name(device, backend))
        finally:
            self._is_forming = False

    def _open(self, generation: GenerationInfo, device: torch.device, name: str) -> None:
        self._is_asynchronous, self._device = name != "gloo", device
        self._sockets_before, self._store_address = set(_list_sockets()), (generation.host, generation.port)
        group_state.set_group(self)
        # torch numbers groups and also counts those that could not be formed, but all ranks must have the same number
        # (torch 2.15).
        dist.distributed_c10d._world.group_count = 0
        store = TCPStore(generation.host, generation.port, is_master=False, timeout=_FORM_TIMEOUT)
        # An abort before this line had no connection to shut down, and NCCL might wait for ever.
        if self.is_aborted and self._is_asynchronous:
            raise PeerLostError("the group was given up before it formed")
        init_default_group(
            name, device, PrefixStore(f"generation-{generation.number}", store), generation.rank, generation.size
        )
        self.groups = open_stage_groups(
            generation.rank, generation.hosts, _FORM_TIMEOUT, self._is_asynchronous or device.type != "cpu"
        )
        for group in {None, *self.groups}:
            # The public name of this function came after torch 2.13.
            dist.distributed_c10d._set_pg_timeout(_COLLECTIVE_TIMEOUT, group)
        if not self.is_aborted:
            self._sockets = self._find_group_sockets(
                PrefixStore(f"generation-{generation.number}/listens", store), generation
            )
        # An abort before this line may have come before there was a group to abort.
        if self.is_aborted:
            raise PeerLostError("the group was given up while it formed")

    def _find_group_sockets(self, store: PrefixStore, generation: GenerationInfo) -> list[tuple[int, str]]:
        """Returns the sockets of this group's connections.

        They are new since the group began to form, and lead to an address at which a member listens or to the store;
        other new sockets are Ray's. The members publish in the store where they listen, so this waits for all of them.
        """
        new_sockets = [entry for entry in _list_sockets() if entry not in self._sockets_before]
        ends = {number: _socket_ends(number) for number, _ in new_sockets}
        listening = [local for local, remote in ends.values() if local and not remote]
        store.set(str(generation.rank), json.dumps(listening))
        published = store.multi_get([str(rank) for rank in range(generation.size)])
        addresses = {self._store_address, *((host, port) for entry in published for host, port in json.loads(entry))}
        return [(number, name) for number, name in new_sockets if addresses.intersection(ends[number])]

    @property
    def check_device_errors(self) -> Callable[[], None] | None:
        """The function for `World.check_device_errors`; None with gloo, where waits raise by themselves."""
        return self._check_device_errors if self._is_asynchronous else None

    def _check_device_errors(self) -> None:
        """Waits for the device and raises `PeerLostError` if the group was aborted or its backend reports an error."""
        self._wait_for_device()
        error = self._error()
        if self.is_aborted:
            raise PeerLostError("the exchange was given up while the device was at it")
        if error is not None:
            raise PeerLostError(f"the exchange failed on the device: {error}")

    def _wait_for_device(self) -> None:
        """Waits for the stream that computes, which in turn waits for the step's collectives and its side streams.

        Uploads for later steps may still be in progress.
        """
        torch.cuda.current_stream(self._device).synchronize()

    def _error(self) -> str | None:
        """Returns the name of a backend's error, if one has failed; a backend that this process aborts is not asked."""
        with group_state.launch_lock:
            errors = (
                group._get_backend(self._device).get_error() for group in self._all_groups() if not self.is_aborted
            )
            return next((error.name for error in errors if error != ErrorType.SUCCESS), None)

    def has_failed(self) -> bool:
        """Returns whether the group is aborted or its backend reports an error, see `group_state.Breakable`."""
        return self._is_asynchronous and (self._error() is not None or self.is_aborted)

    def _all_groups(self) -> list[Any]:
        """Returns all groups that have been formed, those between hosts first."""
        return (
            [group for group in (*reversed(self.groups), dist.group.WORLD) if group is not None]
            if dist.is_initialized()
            else []
        )

    def abort(self) -> None:
        """Aborts the waits of this process in the group.

        NCCL has an abort. gloo has none, so its connections are shut down, which ends its waits with an error.

        Does not wait: the calling thread also sends the heartbeats of this process, and NCCL may take long. All groups
        are aborted at once, since the abort of one may wait for the device's work for another.

        While the group forms, only the connection to the store is shut down: of the other new connections it is not
        known whether they belong to the group, and gloo ends a process if its listening socket is shut down. So NCCL
        may wait for ever, see `is_stuck`.
        """
        self._aborted_s = self._aborted_s or time.monotonic()
        # Set before any wait ends: what an aborted collective leaves behind is garbage.
        self.is_aborted = True
        with self._abort_lock:
            for group in self._all_groups() if self._is_asynchronous else ():
                if group not in self._abort_threads:
                    thread = threading.Thread(target=_abort_group, args=(group,), name="abort", daemon=True)
                    self._abort_threads[group] = thread
                    thread.start()
        sockets = self._sockets
        if sockets is None:
            sockets = [
                (number, name)
                for number, name in _list_sockets()
                if (number, name) not in self._sockets_before and self._is_store(number)
            ]
        for number, name in sockets:
            _shut_down(number, name)

    @property
    def is_stuck(self) -> bool:
        """Whether this process still waits in a group that was aborted while it formed; only its end can change that.

        NCCL connects without a time limit (torch 2.15): if a peer is lost before it has connected, the others wait for
        it in `open`.
        """
        return self._is_forming and self.is_aborted and time.monotonic() - self._aborted_s > _STUCK_S

    def _is_store(self, number: int) -> bool:
        return self._store_address is not None and _socket_ends(number)[1] == self._store_address

    def close(self, broken: bool = False) -> None:
        """Leaves the group.

        Afterwards no collective of the group runs on the device, so the memory that one would write into can be reused.

        Args:
            broken: Whether to abort the group first: in a broken group NCCL, and with gloo a thread that runs
                concurrently with backward, would wait for ever.
        """
        if broken:
            self.abort()
        with self._abort_lock:
            threads = list(self._abort_threads.values())
        for thread in threads:
            thread.join()
        if broken and self._device.type == "cuda":
            # An error of the device itself is raised again by the next call that uses the device.
            with suppress(RuntimeError):
                torch.cuda.synchronize(self._device)
        with group_state.launch_lock:
            if dist.is_initialized():
                dist.destroy_process_group()
        group_state.clear_group(self)


def init_default_group(name: str, device: torch.device, store: Any, rank: int, size: int) -> None:
    """Makes torch's default process group; blocks until all ranks have connected.

    Args:
        name: Backend, see `backend_name`.
        device: Device of this rank. NCCL connects it now instead of in the first backward; without it NCCL would choose
            a device by the number of the rank.
        store: Store through which the ranks exchange addresses.
        rank: This rank.
        size: Number of ranks.
    """
    if name == _NCCL:
        for variable, value in _NCCL_SETTINGS.items():
            os.environ.setdefault(variable, value)
    device_id = device if name == _NCCL else None
    dist.init_process_group(name, store=store, rank=rank, world_size=size, timeout=_FORM_TIMEOUT, device_id=device_id)


def _abort_group(group: Any) -> None:
    """Aborts a group's communicator while no thread launches a collective.

    NCCL would free memory that the launch uses (torch 2.15).
    """
    is_idle = group_state.launch_lock.acquire(timeout=_LAUNCH_S)
    try:
        # The group may have been closed meanwhile.
        if group in dist.distributed_c10d._world.pg_map:
            group.abort()
    except RuntimeError as error:
        logger.warning("A communicator could not be aborted: %s", error)
    finally:
        if is_idle:
            group_state.launch_lock.release()


def backend_name(device: torch.device, backend: str) -> str:
    """Returns torch's name for the backend of `train.backend` on a device.

    Collectives of host memory use gloo in any case.
    """
    if backend in ("auto", "nccl"):
        return _NCCL if device.type == "cuda" else "gloo"
    return backend


def open_stage_groups(rank: int, hosts: tuple[str, ...], timeout: timedelta, collective: bool) -> tuple[Any, ...]:
    """Returns the process group of a rank in each stage of the reduction, see `World.groups`; a collective.

    Args:
        rank: This rank.
        hosts: The host of every rank.
        timeout: Limit for forming a group.
        collective: Whether the stages use collectives; otherwise ranks send to each other (`reduction.transport`).
    """
    stages = stage_groups(hosts) if hosts else [[]]
    if len(stages) == 1 or not collective:
        return (None,) * len(stages)
    # All ranks have to make all groups, also those without them.
    groups = [{ranks: dist.new_group(ranks, timeout=timeout) for ranks in stage} for stage in stages]
    return tuple(group for stage in groups for ranks, group in stage.items() if rank in ranks)


def _list_sockets() -> list[tuple[int, str]]:
    """Returns descriptor and identity of every socket of this process."""
    sockets = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                sockets.append((int(name), target))
    return sockets


def _socket_ends(number: int) -> tuple[tuple[str, int] | None, tuple[str, int] | None]:
    """Returns host and port of both ends of a TCP connection.

    A listening socket has no remote end; of a socket of another kind both are None.
    """
    ends: list[tuple[str, int] | None] = [None, None]
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as tcp_socket:
        if tcp_socket.family in (socket.AF_INET, socket.AF_INET6) and tcp_socket.type == socket.SOCK_STREAM:
            for index, get_name in enumerate((tcp_socket.getsockname, tcp_socket.getpeername)):
                host, port = get_name()[:2]
                ends[index] = host.removeprefix("::ffff:").partition("%")[0], port
    return ends[0], ends[1]


def _shut_down(number: int, name: str) -> None:
    """Shuts down a socket if it is still the same one and a TCP connection."""
    with suppress(OSError):
        if os.readlink(f"/proc/self/fd/{number}") != name:
            return
        with socket.socket(fileno=os.dup(number)) as tcp_socket:
            if tcp_socket.family in (socket.AF_INET, socket.AF_INET6) and tcp_socket.type == socket.SOCK_STREAM:
                # Raises for a listening socket, which must not be shut down.
                tcp_socket.getpeername()
                tcp_socket.shutdown(socket.SHUT_RDWR)


def use_interface_of_host(host: str) -> None:
    """Makes collectives use the network interface of an address, that of Ray, unless the user has chosen one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
