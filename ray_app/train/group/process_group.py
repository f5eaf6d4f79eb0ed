"""torch's default process group, formed anew for every generation and breakable from outside."""

from __future__ import annotations

import json
import os
import socket
import threading
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
from ray_app.plan.route import groups
from ray_app.train.group.messages import Formed

_FORM_TIMEOUT = timedelta(seconds=30)
"""For peers that are lost between their address and their connections: what waits for them then nobody can break."""
_COLLECTIVE_TIMEOUT = timedelta(days=1)
"""The rendezvous ends what stands still, much earlier; a collective's own time-out would only add another opinion."""
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""0: torch's own thread neither ends the process nor aborts; the rendezvous says when, and `settle` looks at the error."""
_NCCL = "cpu:gloo,cuda:nccl"


class ProcessGroup:
    """torch's default process group for one generation, which another thread can break while this one waits in it."""

    def __init__(self) -> None:
        self._before = set(_sockets())
        self._store: tuple[str, int] | None = None
        self._sockets: list[tuple[int, str]] | None = None
        self._asynchronous, self._device = False, torch.device("cpu")
        self._broken, self._aborting, self._aborts = False, threading.Lock(), dict[Any, threading.Thread]()
        self.groups: tuple[Any, ...] = (None,)
        """See `World.groups`."""

    def open(self, formed: Formed, device: torch.device, backend: Literal["auto", "nccl", "gloo"]) -> None:
        """Meets the other members of a generation; blocks until all are there. For `backend` see `train.backend`.

        Raises:
            PeerLostError: It was broken meanwhile.
        """
        name = backend_of(device, backend)
        self._asynchronous, self._device = name != "gloo", device
        if name == _NCCL:
            os.environ.setdefault(_NCCL_ERRORS, "0")
        self._before, self._store = set(_sockets()), (formed.host, formed.port)
        # torch numbers groups, counts those that could not be formed, too, and all ranks must have the same number (torch 2.15)
        dist.distributed_c10d._world.group_count = 0
        store = TCPStore(formed.host, formed.port, is_master=False, timeout=_FORM_TIMEOUT)
        dist.init_process_group(
            name,
            store=PrefixStore(f"generation-{formed.number}", store),
            rank=formed.rank,
            world_size=formed.size,
            timeout=_FORM_TIMEOUT,
            device_id=device if name == _NCCL else None,  # connects now, not in the first backward
        )
        self.groups = open_groups(formed.rank, formed.hosts, _FORM_TIMEOUT, self._asynchronous or device.type != "cpu")
        for group in {None, *self.groups}:
            dist.distributed_c10d._set_pg_timeout(_COLLECTIVE_TIMEOUT, group)  # the public name came after torch 2.13
        if not self._broken:
            self._sockets = self._of_this_group(PrefixStore(f"generation-{formed.number}/listens", store), formed)
        if self._broken:  # before there was what could be aborted
            raise PeerLostError("the group was given up while it formed")

    def _of_this_group(self, store: PrefixStore, formed: Formed) -> list[tuple[int, str]]:
        """The connections that came with this group and go to where a member listens for it, or to the store; others are Ray's.

        Of where they listen the members tell each other, so this waits for all.
        """
        came = [found for found in _sockets() if found not in self._before]
        ends = {number: _ends(number) for number, _ in came}
        store.set(str(formed.rank), json.dumps([mine for mine, other in ends.values() if mine and not other]))
        told = store.multi_get([str(rank) for rank in range(formed.size)])
        listens = {self._store, *((host, port) for each in told for host, port in json.loads(each))}
        return [(number, name) for number, name in came if listens.intersection(ends[number])]

    @property
    def settle(self) -> Callable[[], None] | None:
        """See `World.settle`."""
        return self._settle if self._asynchronous else None

    def _settle(self) -> None:
        self._wait_for_device()
        if self._broken:
            raise PeerLostError("the exchange was given up while the device was at it")
        for group in self._all():
            if (error := group._get_backend(self._device).get_error()) != ErrorType.SUCCESS:
                raise PeerLostError(f"the exchange failed on the device: {error.name}")

    def _wait_for_device(self) -> None:
        torch.cuda.synchronize(self._device)

    def _all(self) -> list[Any]:
        """All that have been formed, those between hosts first."""
        return [group for group in (*reversed(self.groups), dist.group.WORLD) if group is not None] if dist.is_initialized() else []

    def abort(self) -> None:
        """Breaks what the members wait for. NCCL can; gloo cannot, so its connections are shut down, which its waits notice.

        Does not wait: who asks also tells that this process is alive, and NCCL may take its time. All groups are broken at once, since the
        abort of one may wait for what the device does for another.

        While the group forms, that is the connection to the store where they meet; what else this process connects to meanwhile is not
        known to be the group's.
        """
        self._broken = True  # before anybody is set free: what they find is garbage
        with self._aborting:
            for group in self._all() if self._asynchronous else ():
                if group not in self._aborts:
                    self._aborts[group] = threading.Thread(target=group.abort, name="abort", daemon=True)
                    self._aborts[group].start()
        found = self._sockets
        if found is None:
            found = [(number, name) for number, name in _sockets() if (number, name) not in self._before and self._is_store(number)]
        for number, name in found:
            _shut_down(number, name)

    def _is_store(self, number: int) -> bool:
        return self._store is not None and _ends(number)[1] == self._store

    def close(self, broken: bool = False) -> None:
        """Leaves the group; in one that is broken NCCL, and with gloo a thread beside backward, would wait for what never comes."""
        if broken:
            self.abort()
        with self._aborting:
            aborts = list(self._aborts.values())
        for abort in aborts:
            abort.join()
        if dist.is_initialized():
            dist.destroy_process_group()


def backend_of(device: torch.device, backend: str) -> str:
    """What torch calls the backend of `train.backend` on a device; what the host exchanges goes through gloo in any case."""
    if backend in ("auto", "nccl"):
        return _NCCL if device.type == "cuda" else "gloo"
    return backend


def open_groups(rank: int, hosts: tuple[str, ...], timeout: timedelta, collective: bool) -> tuple[Any, ...]:
    """The process group of a rank in each stage of the exchange, see `World.groups`; a collective of all ranks.

    Args:
        rank: This one.
        hosts: The host of every rank.
        timeout: For the groups to form.
        collective: Whether the stages need any; otherwise ranks send to each other (`exchange.transport`).
    """
    stages = groups(hosts) if hosts else [[]]
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
    """Host and port of both ends of a TCP connection; of a socket that listens there is no other end, of any other socket neither."""
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


def use_interface_of(host: str) -> None:
    """Lets collectives go through the network interface that Ray uses, unless the user has chosen one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
