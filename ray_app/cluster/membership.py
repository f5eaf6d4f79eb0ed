"""Who steps together, as a worker sees it: a process group of our own, formed again whenever the set of workers changes.

Ray Train starts and ends the worker processes; which of them form a group, and when, is decided by the rendezvous.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Literal

import ray
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ray_app.exchange.exchange import World, collective
from ray_app.record.paths import RunPaths
from ray_app.record.progress.journal import put_event
from ray_app.record.progress.segments import StepRecord
from ray_app.train.group.membership import LeavingError
from ray_app.train.group.messages import Beat, Flags, Formed, Orders, Phase
from ray_app.train.group.process_group import ProcessGroup, use_interface_of

logger = logging.getLogger(__name__)

_BEAT_S = 0.25
_LOOK_S, _STACKS_S = 0.1, 2.0


class RayMembership:
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
        self._rendezvous, self._logical_workers, self._device, self._backend = rendezvous, logical_workers, device, backend
        self._paths, self._fence = paths, fence
        context, host = ray.get_runtime_context(), ray.util.get_node_ip_address()
        use_interface_of(host)
        self._server = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._me = Beat(str(context.get_actor_id()), context.get_node_id(), host, self._server.port, os.getpid())
        self._generation = self._rank = self._recorded = self._moves = 0
        self._step = -1
        self._record: StepRecord | None = None
        self._phase: Phase = "starting"
        self._orders = Orders()
        self._group: ProcessGroup | None = None
        self._line: socket.socket | None = None
        self._closed = threading.Event()
        self._beats = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._beats.start()

    @contextmanager
    def generation(self, step: int, lost: bool) -> Iterator[tuple[World, Formed]]:
        """See `Membership.generation`.

        Raises:
            LeavingError: This worker has to leave.
            PeerLostError: Another one left meanwhile.
        """
        self._step, self._phase = step, "waiting"
        formed = self._join(lost)
        self._generation, self._rank = formed.number, formed.rank
        world = World(formed.rank, formed.size, self._logical_workers)
        if formed.size == 1:
            yield world, formed
            return
        group = self._group = ProcessGroup()
        broken = True
        try:
            with collective():
                group.open(formed, self._device, self._backend)
            yield replace(world, hosts=formed.hosts, groups=group.groups, settle=group.settle), formed
            broken = False
        finally:
            group.close(broken)
            self._group = None  # until now the heartbeat may have to break what it waits for

    def need_no_group(self) -> None:
        """This worker works on its own, without generations; it is known from now on, and whether it gets on is watched."""
        self._generation = 1
        self._obey(ray.get(self._rendezvous.beat.remote(self._beat())))

    def _join(self, lost: bool) -> Formed:
        while True:
            waiting = self._rendezvous.join.remote(self._beat(), lost)
            try:
                while not ray.wait([waiting], timeout=_LOOK_S)[0]:
                    if self._orders.leave and self._orders.waits:
                        raise LeavingError
                return ray.get(waiting)
            except (ConnectionError, ray.exceptions.RayActorError) as error:
                logger.warning("Joining again: %s", error)

    def _beat(self) -> Beat:
        return replace(
            self._me,
            generation=self._generation,
            rank=self._rank,
            step=self._step,
            phase=self._phase,
            record=self._record,
            recorded=self._recorded,
            moves=self._moves,
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
        self._beats.join()
        with suppress(ray.exceptions.RayError):
            ray.get([self._rendezvous.beat.remote(self._beat()), self._rendezvous.leave.remote(self._me.worker, over)], timeout=5)

    def _run(self) -> None:
        while not self._closed.wait(_BEAT_S):
            try:
                self._keep_line()
                self._obey(ray.get(self._rendezvous.beat.remote(self._beat())))
            except Exception as error:  # without signs of life this worker would be given up
                logger.warning("No sign of life went through, will try again: %s: %s", type(error).__name__, error)

    def _keep_line(self) -> None:
        """Keeps a connection to the rendezvous, whose end says that this process has ended."""
        if self._line is not None:
            try:
                if self._line.recv(1):
                    return
            except BlockingIOError:
                return
            self._line.close()
            self._line = None
        line = socket.create_connection(ray.get(self._rendezvous.lifeline.remote()), timeout=5)
        line.sendall(self._me.worker.encode())
        line.setblocking(False)
        self._line = line

    def _obey(self, orders: Orders) -> None:
        self._orders = orders
        if orders.dump:
            details = {"rank": self._rank, "step": self._step, "doing": self._phase, "stacks": _stacks()}
            writer = threading.Thread(target=put_event, args=(self._paths, "stacks", self._fence), kwargs=details, daemon=True)
            writer.start()
            writer.join(_STACKS_S)  # a slow storage must not keep this thread from its next sign of life
        if orders.exit:
            logger.error("The rendezvous ends this process: it holds the others up, or was given up")
            os._exit(1)
        group = self._group
        if orders.abort and group is not None and orders.generation == self._generation:
            group.abort()


def _stacks() -> str:
    """The stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}" for ident, frame in sys._current_frames().items()]
    return "\n".join(parts)
