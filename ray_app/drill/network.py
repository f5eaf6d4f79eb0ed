"""Scenarios in which TCP connections of a worker are cut: its kernel drops every packet that arrives on them.

A socket filter (`SO_ATTACH_FILTER`, classic BPF) does that; a process may attach one to its own sockets without
privileges. The kernel does not acknowledge the dropped packets either, so after its retransmission timeout (at least
0.2 s) the other end only repeats packets and sends no new ones. As when a cable is unplugged, neither end of the
connection gets an error. The kernel counts the packets that it drops; this count is the evidence.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch.distributed as dist

from ray_app.drill.faults import MAX_WAIT_S, Evidence, address_of_actor
from ray_app.drill.scenario import Scenario, ScenarioContext, ScenarioResult, is_gone, unmet
from ray_app.driver.run import Faults
from ray_app.train.job import Hooks, Job

# Linux calls these SO_ATTACH_FILTER, SO_DETACH_FILTER, SO_MEMINFO and, for the index of the number of dropped packets
# in the value of SO_MEMINFO, SK_MEMINFO_DROPS; Python has no names for them.
_ATTACH, _DETACH = 26, 27
_MEMORY, _DROPS = 55, 8
_RETURN = 0x06
_POLL_INTERVAL_S = 0.02
_STEP_TIMEOUT_S = 8.0

Address = tuple[str, int]


@dataclass(frozen=True)
class TcpConnection:
    """One end of a TCP connection of this process, with a duplicate of its descriptor."""

    socket: socket.socket
    local: Address
    remote: Address

    def cut(self) -> None:
        """Drops every packet that arrives from now on."""
        # The only instruction of the filter returns how many bytes of a packet to keep: 0.
        program = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
        self.socket.setsockopt(socket.SOL_SOCKET, _ATTACH, struct.pack("HL", 1, ctypes.addressof(program)))

    def restore(self) -> None:
        """Accepts packets again, also those that the other end sends again."""
        self.socket.setsockopt(socket.SOL_SOCKET, _DETACH, 0)

    @property
    def dropped_packets(self) -> int:
        """The number of packets that the kernel has dropped."""
        return int(struct.unpack("9I", self.socket.getsockopt(socket.SOL_SOCKET, _MEMORY, 36))[_DROPS])


def open_connections() -> list[TcpConnection]:
    """Returns the open TCP connections of this process."""
    connections = list[TcpConnection]()
    for entry in psutil.Process().net_connections("tcp"):
        # A socket that listens has no other end, and a connection may end meanwhile.
        with suppress(OSError), ExitStack() as stack:
            duplicate = stack.enter_context(socket.socket(fileno=os.dup(entry.fd)))
            local, remote = _parse_address(duplicate.getsockname()), _parse_address(duplicate.getpeername())
            connections.append(TcpConnection(duplicate, local, remote))
            stack.pop_all()
    return connections


def _parse_address(name: tuple[Any, ...]) -> Address:
    """Returns host and port of a socket name; an IPv4 address mapped to IPv6 becomes the plain IPv4 address."""
    return str(name[0]).removeprefix("::ffff:"), int(name[1])


@dataclass
class CutConnections:
    """Cuts the connections of a rank to other ranks after a step; a hook for `Hooks.after_step` and `Hooks.at`.

    Args:
        others: The ranks at the other ends.
        rendezvous: Whether to cut the connection to the rendezvous, too; the evidence `listening` has its address.
        restores: Whether the connections work again once the other ranks have formed a generation without this one.
    """

    evidence: Evidence
    step: int
    rank: int
    others: list[int]
    rendezvous: bool
    restores: bool
    _is_cut: bool = False
    _connections: list[TcpConnection] = field(default_factory=list)
    _dropped_before: list[int] = field(default_factory=list)

    def __call__(self, rank: int, step: int) -> None:
        """Records the connections of a rank in `others`, or cuts those of `self.rank`; see `Hooks.after_step`."""
        if step != self.step or self.evidence.has("cut"):
            return
        if rank in self.others:
            connections = open_connections()
            ends = [[connection.local, connection.remote] for connection in connections]
            self.evidence.put(f"connections-{rank}", rank=rank, step=step, ends=ends)
            for connection in connections:
                connection.socket.close()
        if rank == self.rank:
            self._cut()

    def forming(self, phase: str, rank: int, step: int) -> None:
        """Records that the other ranks form a generation without the cut rank; see `Hooks.at`."""
        is_other = self.restores and phase == "forming" and not self._is_cut
        if is_other and self.evidence.has("cut") and not self.evidence.has("continued"):
            world = dist.group.WORLD
            size = 1 if world is None else world.size()
            self.evidence.put("continued", rank=rank, workers=size)

    def _cut(self) -> None:
        listening = ["listening"] if self.rendezvous else []
        if not self.evidence.wait([f"connections-{rank}" for rank in self.others] + listening, MAX_WAIT_S):
            return
        entries = [self.evidence.get(f"connections-{rank}") or {} for rank in self.others]
        # The local end of a connection in another rank is the remote end of the same connection in this rank.
        ends = {(tuple(remote), tuple(local)) for entry in entries for local, remote in entry["ends"]}
        rendezvous_addresses = [tuple((self.evidence.get(name) or {})["address"]) for name in listening]
        for connection in open_connections():
            if (connection.local, connection.remote) in ends or connection.remote in rendezvous_addresses:
                self._connections.append(connection)
            else:
                connection.socket.close()
        self._is_cut = True
        # The kernel counts from the creation of a socket, and for other reasons, too.
        self._dropped_before = [connection.dropped_packets for connection in self._connections]
        for connection in self._connections:
            connection.cut()
        names = [f"{c.local[0]}:{c.local[1]} - {c.remote[0]}:{c.remote[1]}" for c in self._connections]
        to_rendezvous = sum(connection.remote in rendezvous_addresses for connection in self._connections)
        self.evidence.put(
            "cut", rank=self.rank, step=self.step, connections=names, rendezvous_connections=to_rendezvous
        )
        threading.Thread(target=self._watch, name="cut", daemon=True).start()

    def _watch(self) -> None:
        """Records the dropped packets, and restores the connections once the others have gone on."""
        deadline_s = time.monotonic() + MAX_WAIT_S
        is_done = False
        while not is_done and time.monotonic() < deadline_s:
            time.sleep(_POLL_INTERVAL_S)
            is_done = self.evidence.has("continued") if self.restores else any(self._dropped_packets())
        self.evidence.put(
            "restored" if self.restores else "silent", rank=self.rank, dropped_packets=self._dropped_packets()
        )
        for connection in self._connections:
            if self.restores:
                connection.restore()
            connection.socket.close()

    def _dropped_packets(self) -> list[int]:
        """Returns for each connection how many packets have been dropped since the cut."""
        counts = [connection.dropped_packets for connection in self._connections]
        return [count - before for count, before in zip(counts, self._dropped_before, strict=True)]


def _find_obstacle(context: ScenarioContext) -> str | None:
    """Returns why the run has no connections that can be cut; None if it has."""
    if context.workers < 2:
        return "a single worker has no connection to another"
    if context.config.train.strategy_traits.has_servers:
        return "workers of parameter servers have no connections to each other"
    if context.config.scaling.worker_gpus:
        return "NCCL uses no connection within a machine that could be cut"
    return None


def _make_scenario(
    context: ScenarioContext,
    others: int,
    restores: bool,
    confirm: Callable[[ScenarioResult, int], list[str]],
    **fields: Any,
) -> Scenario:
    """Returns a scenario that cuts the connections of a random rank to at most so many others.

    With `restores` that to the rendezvous is cut, too, and all are restored later. `confirm` gets the step of the cut.
    """
    step, (rank, *rest) = context.choose_step(), context.random.sample(range(context.workers), context.workers)
    cut = CutConnections(context.evidence, step, rank, rest[:others], rendezvous=restores, restores=restores)

    def observe(job: Job) -> None:
        if restores and not context.evidence.has("listening"):
            context.evidence.put("listening", address=address_of_actor(job.rendezvous))

    def confirm_cut(run: ScenarioResult) -> list[str]:
        entry, dropped_packets = run.evidence["cut"], run.evidence["restored" if restores else "silent"]
        has_others = len(entry["connections"]) > entry["rendezvous_connections"]
        return unmet(
            (has_others, "no connection to another worker was cut"),
            (not restores or entry["rendezvous_connections"], "no connection to the rendezvous was cut"),
            (sum(dropped_packets["dropped_packets"]) > 0, "no packet was dropped"),
        ) + confirm(run, step)

    hooks = Hooks(after_step=context.delayed(step, cut), at=cut.forming)
    return Scenario([step], confirm=confirm_cut, faults=Faults(train=hooks), observe=observe, **fields)


def partition(context: ScenarioContext) -> Scenario | str:
    """A worker is cut off from all others and the rendezvous, until these have gone on without it."""

    def confirm(run: ScenarioResult, step: int) -> list[str]:
        remaining = run.evidence["continued"]["workers"]
        is_back = is_gone(run.evidence["cut"]) is not False or run.sizes[-1] > remaining
        return unmet(
            (remaining < context.workers, f"the others continued with {remaining} workers"),
            (is_back, "the worker still lives but has not rejoined"),
        )

    changes = {"scaling__min_workers": 1}
    return _find_obstacle(context) or _make_scenario(
        context, context.workers, True, confirm, expected=["cut", "continued", "restored"], changes=changes
    )


def half_open(context: ScenarioContext) -> Scenario | str:
    """The connections between two workers transfer nothing any more, but do not end."""

    def confirm(run: ScenarioResult, step: int) -> list[str]:
        has_stalled, has_formed = (
            any(e.details["step"] == step for e in run.events(kind)) for kind in ("stacks", "formed")
        )
        return unmet(
            (has_stalled, "the run has no record of a stalled step"),
            (has_formed, f"no generation formed at step {step}"),
        )

    changes = {"failure__step_timeout_s": _STEP_TIMEOUT_S}
    return _find_obstacle(context) or _make_scenario(
        context, 1, False, confirm, expected=["cut", "silent"], changes=changes
    )
