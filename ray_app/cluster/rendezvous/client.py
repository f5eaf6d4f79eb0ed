"""Who steps together, as a worker sees it: a process group of our own, formed again whenever the set of workers
changes.

Ray Train starts and ends the worker processes; which of them form a group, and when, is decided by the rendezvous.
"""

from __future__ import annotations

import logging
import os
import random
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal

import ray
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ray_app.cluster.rendezvous.server import orders_of, packed
from ray_app.reduction.base import World, collective
from ray_app.runlog.journal import StepRecord, put_event
from ray_app.runlog.paths import RunPaths
from ray_app.train.membership import HEARTBEAT_S, Flags, GenerationInfo, Heartbeat, HeartbeatReply, LeavingError, Phase
from ray_app.train.process_group import ProcessGroup, use_interface_of_host

logger = logging.getLogger(__name__)

_ANSWER_S, _STACKS_S = 5.0, 2.0
_UNHEARD_MS = 20_000
"""After which a connection is made anew: what was cut off is sent again more and more rarely."""
_EARLIEST = 0.75
"""The least part of the time until the next sign of life is due: all that were called at once do not come at once ever
after.
"""


class RendezvousClient:
    """The membership of a Ray Train worker.

    Args:
        rendezvous: Handle of the rendezvous actor.
        logical_workers: L.
        device: Where it computes.
        backend: See `train.backend`.
        paths: The run, for the stacks of a standstill.
        fence: Number of the driver's start.
        recovers: See `Membership`.
    """

    def __init__(
        self,
        rendezvous: Any,
        logical_workers: int,
        device: torch.device,
        backend: Literal["auto", "nccl", "gloo"],
        paths: RunPaths,
        fence: int,
        recovers: bool,
    ) -> None:
        self.recovers = recovers
        self._rendezvous, self._logical_workers, self._device, self._backend = (
            rendezvous,
            logical_workers,
            device,
            backend,
        )
        self._paths, self._fence = paths, fence
        context, host = ray.get_runtime_context(), ray.util.get_node_ip_address()
        use_interface_of_host(host)
        self._server = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._me = Heartbeat(str(context.get_actor_id()), context.get_node_id(), host, self._server.port, os.getpid())
        self._generation = self._rank = self._recorded = self._moves = 0
        self._step = -1
        self._record: StepRecord | None = None
        self._phase: Phase = "starting"
        self._orders = HeartbeatReply()
        self._group: ProcessGroup | None = None
        self._waits, self._lost, self._formed = 0, False, GenerationInfo(0, 0, 0, "", 0)
        self._tickets = 0
        self._line: socket.socket | None = None
        self._rest = b""
        self._heard, self._closed = threading.Condition(), threading.Event()
        self._bell, self._ringer = socket.socketpair()
        self._random = random.Random()
        self._beats = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._beats.start()

    @contextmanager
    def generation(self, step: int, lost: bool) -> Iterator[tuple[World, GenerationInfo]]:
        """See `Membership.generation`.

        Raises:
            LeavingError: This worker has to leave.
            PeerLostError: Another one left meanwhile.
        """
        self._step, self._phase = step, "waiting"
        formed = self._join(lost)
        world = World(formed.rank, formed.size, self._logical_workers)
        if formed.size == 1:
            yield world, formed
            return
        group = self._group = ProcessGroup()
        broken = True
        try:
            self._break()  # it may have been said before there was a group
            with collective():
                group.open(formed, self._device, self._backend)
            check_device_errors = group.check_device_errors
            world = replace(world, hosts=formed.hosts, groups=group.groups, check_device_errors=check_device_errors)
            yield world, formed
            broken = False
        finally:
            group.close(broken)
            self._group = None  # until now the heartbeat may have to break what it waits for

    def need_no_group(self) -> None:
        """This worker works on its own, without generations; it is known from now on, and whether it gets on is
        watched.
        """
        self._generation = 1
        with self._heard:
            self._ring()
            self._heard.wait_for(lambda: self._orders.generation == 1)

    def _join(self, lost: bool) -> GenerationInfo:
        with self._heard:
            self._tickets += 1
            self._waits, self._lost = self._tickets, lost
            self._ring()
            while self._waits:
                self._heard.wait()
                if self._orders.leave and self._orders.waits:
                    self._waits = 0
                    raise LeavingError
            return self._formed

    def _ring(self) -> None:
        """Has the next sign of life given now."""
        self._ringer.send(b"!")

    def _beat(self) -> Heartbeat:
        with self._heard:
            return replace(
                self._me,
                generation=self._generation,
                rank=self._rank,
                step=self._step,
                phase=self._phase,
                record=self._record,
                recorded=self._recorded,
                moves=self._moves,
                waits=self._waits,
                lost=self._lost,
            )

    def flags(self) -> Flags:
        """See `Membership.flags`."""
        orders = self._orders
        if orders.generation != self._generation:
            return orders.flags & ~Flags.REFORM
        return orders.flags | (Flags.REFORM if orders.abort else Flags(0))

    def is_leaving(self) -> bool:
        """See `Membership.is_leaving`."""
        return self._orders.leave

    def enter(self, phase: Phase) -> None:
        """See `Membership.enter`."""
        self._phase = phase

    def moved(self) -> None:
        """See `Membership.moved`."""
        self._moves += 1

    def report(self, step: int, record: StepRecord | None, recorded: int) -> None:
        """See `Membership.report`."""
        self._step, self._record, self._recorded = step, record, recorded

    @property
    def place(self) -> str:
        """Who this is and how far, in words."""
        return f"rank {self._rank}, step {max(0, self._step)}"

    @property
    def who(self) -> str:
        """This process, in the name of a file."""
        return f"worker-{self._me.host.replace(':', '-')}-{os.getpid()}"

    def recorded(self) -> int:
        """See `Membership.recorded`."""
        return self._orders.recorded

    def close(self, over: bool = False) -> None:
        """Takes leave.

        Args:
            over: Whether the run has ended with this worker.
        """
        self._closed.set()
        self._ring()
        self._beats.join()
        with suppress(ray.exceptions.RayError):
            ray.get(self._rendezvous.leave.remote(self._beat(), over), timeout=_ANSWER_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                line = self._line or self._connect()
                line.sendall(packed(self._beat()))
                self._listen(line)
            except Exception as error:  # without signs of life this worker would be given up
                logger.warning("No sign of life went through, will try again: %s: %s", type(error).__name__, error)
                self._hang_up()
                self._closed.wait(HEARTBEAT_S)

    def _connect(self) -> socket.socket:
        """A connection to the rendezvous, whose end says that this process has ended."""
        address, secret = ray.get(self._rendezvous.lifeline.remote())
        line = socket.create_connection(address, timeout=_ANSWER_S)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNHEARD_MS)
        line.sendall(f"{secret}\n".encode())
        self._line, self._rest = line, b""
        return line

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    def _listen(self, line: socket.socket) -> None:
        """Obeys what comes until the next sign of life is due or asked for; returns at the end of the
        connection, too.
        """
        came = select.poll()
        for heard in (line, self._bell):
            came.register(heard, select.POLLIN)
        sent_s = time.monotonic()
        part = self._random.uniform(_EARLIEST, 1.0)
        while (left_s := sent_s + part * self._orders.period_s - time.monotonic()) > 0:
            ready = [number for number, _ in came.poll(1e3 * left_s)]
            if line.fileno() in ready:
                data = line.recv(1 << 16)
                if not data:
                    return self._hang_up()
                *lines, self._rest = (self._rest + data).split(b"\n")
                for each in lines:
                    self._obey(orders_of(each))
            if self._bell.fileno() in ready:
                self._bell.recv(64)
                return None
        return None

    def _obey(self, orders: HeartbeatReply) -> None:
        with self._heard:
            self._orders = orders
            if orders.formed is not None and self._waits and orders.formed.number > self._generation:
                self._formed, self._waits = orders.formed, 0
                self._generation, self._rank = orders.formed.number, orders.formed.rank
            self._heard.notify_all()
        if orders.dump:
            details = {"rank": self._rank, "step": self._step, "doing": self._phase, "stacks": _stacks()}
            writer = threading.Thread(
                target=put_event, args=(self._paths, "stacks", self._fence), kwargs=details, daemon=True
            )
            writer.start()
            writer.join(_STACKS_S)  # a slow storage must not keep this thread from its next sign of life
        if orders.exit:
            logger.error("The rendezvous ends this process: it holds the others up, or was given up")
            os._exit(1)
        self._break()

    def _break(self) -> None:
        """Breaks the generation if the newest orders say so."""
        group, orders = self._group, self._orders
        if orders.abort and group is not None and orders.generation == self._generation:
            group.abort()
            if group.is_stuck:
                logger.error("This process ends: it waits in NCCL for a peer that was lost before it had connected")
                os._exit(1)


def _stacks() -> str:
    """The stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    return "\n".join(parts)
