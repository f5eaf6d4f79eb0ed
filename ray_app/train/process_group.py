"""torch's default process group, formed anew for every generation and breakable from outside."""

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
"""For peers that are lost between their address and their connections: what waits for them then nobody can break. NCCL
knows no such bound, see `ProcessGroup.is_stuck`.
"""
_STUCK_S = 60.0
"""After which a group that was given up while it formed forms no more: twice the time that gloo and the store may take
to notice.
"""
_COLLECTIVE_TIMEOUT = timedelta(days=1)
"""The rendezvous ends what stands still, much earlier; a collective's own time-out would only add another opinion."""
_NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Unless the user has set them: torch's own threads neither end the process nor abort, and do not wait for dumps, which
takes a recovery a minute and more. The rendezvous says when to abort, and `check_device_errors` looks at the error.
"""
_NCCL = "cpu:gloo,cuda:nccl"
_LAUNCH_S = 2.0
"""After which an abort no longer waits for the end of a launch: one that waits for a lost peer ends by the abort alone.
"""


class ProcessGroup:
    """torch's default process group for one generation, which another thread can break while this one waits in it."""

    def __init__(self) -> None:
        self._before = set(_sockets())
        self._store: tuple[str, int] | None = None
        self._sockets: list[tuple[int, str]] | None = None
        self._asynchronous, self._device = False, torch.device("cpu")
        self.is_aborted, self._aborting, self._aborts = False, threading.Lock(), dict[Any, threading.Thread]()
        self._forms, self._aborted_s = False, 0.0
        self.groups: tuple[Any, ...] = (None,)
        """See `World.groups`."""

    def open(self, formed: GenerationInfo, device: torch.device, backend: Literal["auto", "nccl", "gloo"]) -> None:
        """Meets the other members of a generation; blocks until all are there. For `backend` see `train.backend`.

        Raises:
            PeerLostError: It was broken meanwhile.
        """
        self._forms = True
        try:
            self._open(formed, device, backend_name(device, backend))
        finally:
            self._forms = False

    def _open(self, formed: GenerationInfo, device: torch.device, name: str) -> None:
        self._asynchronous, self._device = name != "gloo", device
        self._before, self._store = set(_sockets()), (formed.host, formed.port)
        group_state.set_group(self)
        # torch numbers groups, counts those that could not be formed, too, and all ranks must have the same number
        # (torch 2.15)
        dist.distributed_c10d._world.group_count = 0
        store = TCPStore(formed.host, formed.port, is_master=False, timeout=_FORM_TIMEOUT)
        if (
            self.is_aborted and self._asynchronous
        ):  # before there was a connection that could be shut down, and NCCL may wait for ever
            raise PeerLostError("the group was given up before it formed")
        init_default_group(name, device, PrefixStore(f"generation-{formed.number}", store), formed.rank, formed.size)
        self.groups = open_stage_groups(
            formed.rank, formed.hosts, _FORM_TIMEOUT, self._asynchronous or device.type != "cpu"
        )
        for group in {None, *self.groups}:
            dist.distributed_c10d._set_pg_timeout(_COLLECTIVE_TIMEOUT, group)  # the public name came after torch 2.13
        if not self.is_aborted:
            self._sockets = self._of_this_group(PrefixStore(f"generation-{formed.number}/listens", store), formed)
        if self.is_aborted:  # before there was what could be aborted
            raise PeerLostError("the group was given up while it formed")

    def _of_this_group(self, store: PrefixStore, formed: GenerationInfo) -> list[tuple[int, str]]:
        """The connections that came with this group and go to where a member listens for it, or to the store; others
        are Ray's.

        Of where they listen the members tell each other, so this waits for all.
        """
        came = [found for found in _sockets() if found not in self._before]
        ends = {number: _ends(number) for number, _ in came}
        store.set(str(formed.rank), json.dumps([mine for mine, other in ends.values() if mine and not other]))
        told = store.multi_get([str(rank) for rank in range(formed.size)])
        listens = {self._store, *((host, port) for each in told for host, port in json.loads(each))}
        return [(number, name) for number, name in came if listens.intersection(ends[number])]

    @property
    def check_device_errors(self) -> Callable[[], None] | None:
        """See `World.check_device_errors`."""
        return self._check_device_errors if self._asynchronous else None

    def _check_device_errors(self) -> None:
        self._wait_for_device()
        error = self._error()
        if self.is_aborted:
            raise PeerLostError("the exchange was given up while the device was at it")
        if error is not None:
            raise PeerLostError(f"the exchange failed on the device: {error}")

    def _wait_for_device(self) -> None:
        """Waits for the stream that computes, which comes after all that a step needs: its exchanges, and what is done
        beside backward.

        Uploads of later steps, which the device may be at, need not be over.
        """
        torch.cuda.current_stream(self._device).synchronize()

    def _error(self) -> str | None:
        """What a backend says of itself, if it has failed; a backend that this process aborts is not asked."""
        with group_state.launch_lock:
            errors = (group._get_backend(self._device).get_error() for group in self._all() if not self.is_aborted)
            return next((error.name for error in errors if error != ErrorType.SUCCESS), None)

    def has_failed(self) -> bool:
        """See `Breakable`."""
        return self._asynchronous and (self._error() is not None or self.is_aborted)

    def _all(self) -> list[Any]:
        """All that have been formed, those between hosts first."""
        return (
            [group for group in (*reversed(self.groups), dist.group.WORLD) if group is not None]
            if dist.is_initialized()
            else []
        )

    def abort(self) -> None:
        """Breaks what the members wait for. NCCL can; gloo cannot, so its connections are shut down, which its waits
        notice.

        Does not wait: who asks also tells that this process is alive, and NCCL may take its time. All groups are broken
        at once, since the abort of one may wait for what the device does for another.

        While the group forms, that is the connection to the store where they meet; what else this process connects to
        meanwhile is not known to be the group's, and gloo ends a process whose listening socket is shut down. So NCCL
        may wait for ever, see `is_stuck`.
        """
        self._aborted_s = self._aborted_s or time.monotonic()
        self.is_aborted = True  # before anybody is set free: what they find is garbage
        with self._aborting:
            for group in self._all() if self._asynchronous else ():
                if group not in self._aborts:
                    self._aborts[group] = threading.Thread(target=_abort, args=(group,), name="abort", daemon=True)
                    self._aborts[group].start()
        found = self._sockets
        if found is None:
            found = [
                (number, name)
                for number, name in _sockets()
                if (number, name) not in self._before and self._is_store(number)
            ]
        for number, name in found:
            _shut_down(number, name)

    @property
    def is_stuck(self) -> bool:
        """Whether this process still waits in a group that was given up while it formed, which nothing but its end can
        change.

        NCCL connects without a bound (torch 2.15): if a peer is lost before it has connected, the others wait for it in
        `open`.
        """
        return self._forms and self.is_aborted and time.monotonic() - self._aborted_s > _STUCK_S

    def _is_store(self, number: int) -> bool:
        return self._store is not None and _ends(number)[1] == self._store

    def close(self, broken: bool = False) -> None:
        """Leaves the group; in one that is broken NCCL, and with gloo a thread beside backward, would wait for what
        never comes.

        Nothing of the group is at work on the device then: memory that a broken exchange would still write into is free
        from now on.
        """
        if broken:
            self.abort()
        with self._aborting:
            aborts = list(self._aborts.values())
        for abort in aborts:
            abort.join()
        if broken and self._device.type == "cuda":
            with suppress(RuntimeError):  # an error of the device itself is met again by the next call that uses it
                torch.cuda.synchronize(self._device)
        with group_state.launch_lock:
            if dist.is_initialized():
                dist.destroy_process_group()
        group_state.clear_group(self)


def init_default_group(name: str, device: torch.device, store: Any, rank: int, size: int) -> None:
    """Makes torch's default process group; blocks until all are there.

    Args:
        name: See `backend_name`.
        device: Of this rank. NCCL connects it now, not in the first backward; not told, it would take one by the number
            of the rank.
        store: Where they meet.
        rank: This one.
        size: How many they are.
    """
    if name == _NCCL:
        for variable, value in _NCCL_SETTINGS.items():
            os.environ.setdefault(variable, value)
    device_id = device if name == _NCCL else None
    dist.init_process_group(name, store=store, rank=rank, world_size=size, timeout=_FORM_TIMEOUT, device_id=device_id)


def _abort(group: Any) -> None:
    """Aborts a group's communicator when no call is at it, so that NCCL frees nothing that the call uses (torch
    2.15).
    """
    is_idle = group_state.launch_lock.acquire(timeout=_LAUNCH_S)
    try:
        if group in dist.distributed_c10d._world.pg_map:  # or it was closed meanwhile
            group.abort()
    except RuntimeError as error:
        logger.warning("A communicator could not be aborted: %s", error)
    finally:
        if is_idle:
            group_state.launch_lock.release()


def backend_name(device: torch.device, backend: str) -> str:
    """What torch calls the backend of `train.backend` on a device; what the host exchanges goes through gloo in any
    case.
    """
    if backend in ("auto", "nccl"):
        return _NCCL if device.type == "cuda" else "gloo"
    return backend


def open_stage_groups(rank: int, hosts: tuple[str, ...], timeout: timedelta, collective: bool) -> tuple[Any, ...]:
    """The process group of a rank in each stage of the reduction, see `World.groups`; a collective of all ranks.

    Args:
        rank: This one.
        hosts: The host of every rank.
        timeout: For the groups to form.
        collective: Whether the stages need any; otherwise ranks send to each other (`reduction.transport`).
    """
    stages = stage_groups(hosts) if hosts else [[]]
    if len(stages) == 1 or not collective:
        return (None,) * len(stages)
    made = [{ranks: dist.new_group(ranks, timeout=timeout) for ranks in stage} for stage in stages]
    return tuple(group for stage in made for ranks, group in stage.items() if rank in ranks)


def _sockets() -> list[tuple[int, str]]:
    """Descriptor and identity of every socket of this process."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found.append((int(name), target))
    return found


def _ends(number: int) -> tuple[tuple[str, int] | None, tuple[str, int] | None]:
    """Host and port of both ends of a TCP connection; of a socket that listens there is no other end, of any other
    socket neither.
    """
    ends: list[tuple[str, int] | None] = [None, None]
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as found:
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
            for place, ask in enumerate((found.getsockname, found.getpeername)):
                host, port = ask()[:2]
                ends[place] = host.removeprefix("::ffff:").partition("%")[0], port
    return ends[0], ends[1]


def _shut_down(number: int, name: str) -> None:
    """Shuts down a socket if it is still the same one and a TCP connection."""
    with suppress(OSError):
        if os.readlink(f"/proc/self/fd/{number}") != name:
            return
        with socket.socket(fileno=os.dup(number)) as found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                found.getpeername()  # raises for one that listens
                found.shutdown(socket.SHUT_RDWR)


def use_interface_of_host(host: str) -> None:
    """Lets collectives go through the network interface that Ray uses, unless the user has chosen one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
