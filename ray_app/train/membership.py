"""Who steps together: a process group of our own, formed in generations through a small rendezvous actor.

Ray Train starts and ends the worker processes; which of them form a group, and when, is decided here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import ray
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ray_app.record.journal import StepRecord
from ray_app.strategy.base import World, collective

logger = logging.getLogger(__name__)

ATTEMPT = "RAY_APP_ATTEMPT"
"""Environment variable that Ray Train's hook sets alike in all workers of one attempt."""

_BEAT_S = 0.5


class Membership(Protocol):
    """What the loop needs to know about the other workers."""

    def generation(self) -> Any:
        """A context that yields the `World` of a new generation and leaves its process group at the end."""
        ...

    def flags(self) -> int:
        """What the driver has to say to all workers, see `train.step`."""
        ...

    def report(self, record: StepRecord) -> None:
        """Shows the driver how far this worker is; returns at once."""
        ...


@dataclass
class _Forming:
    """An attempt whose workers gather."""

    members: dict[int, str] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    address: asyncio.Future[tuple[str, int]] = field(default_factory=asyncio.Future)


class Rendezvous:
    """Brings the workers of an attempt together and passes words between driver and workers. An actor, see `start_rendezvous`."""

    def __init__(self) -> None:
        self._attempts: dict[tuple[str, int], _Forming] = {}
        self._flags = 0
        self._record: StepRecord | None = None

    async def join(self, attempt: str, generation: int, rank: int, size: int, node: str) -> None:
        """Waits until all `size` workers of the attempt are here."""
        forming = self._attempts.setdefault((attempt, generation), _Forming())
        forming.members[rank] = node
        if len(forming.members) == size:
            forming.complete.set()
        await forming.complete.wait()

    async def publish(self, attempt: str, generation: int, host: str, port: int) -> None:
        """Rank 0 says where its store listens."""
        forming = self._attempts[attempt, generation]
        if not forming.address.done():
            forming.address.set_result((host, port))

    async def address(self, attempt: str, generation: int) -> tuple[str, int]:
        """Where rank 0's store listens, as soon as it says so."""
        return await asyncio.shield(self._attempts[attempt, generation].address)

    async def beat(self, record: StepRecord | None) -> int:
        """A worker's sign of life; rank 0 adds its newest step. Returns the driver's flags."""
        self._record = record or self._record
        return self._flags

    async def raise_flags(self, flags: int) -> None:
        """The driver has something to say to all workers."""
        self._flags |= flags

    async def newest(self) -> StepRecord | None:
        """The newest step that rank 0 told of."""
        return self._record


def start_rendezvous() -> Any:
    """Starts the rendezvous actor on this node, so that it lives as long as the driver, and returns its handle."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(Rendezvous)
    return actor.options(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=256, scheduling_strategy=here).remote()


class RayMembership:
    """The membership of a Ray Train worker.

    Args:
        rendezvous: Handle of the rendezvous actor.
        logical_workers: L.
        device: Decides the backend: NCCL for GPUs, gloo for CPUs.
        timeout_s: Seconds that a collective may take.
    """

    def __init__(self, rendezvous: Any, logical_workers: int, device: torch.device, timeout_s: float) -> None:
        context = ray.train.get_context()
        self._rendezvous, self._logical_workers = rendezvous, logical_workers
        self._device, self._timeout = device, timedelta(seconds=timeout_s)
        self._rank, self._size = context.get_world_rank(), context.get_world_size()
        self._attempt, self._generation = os.environ[ATTEMPT], 0
        self._flags = 0
        self._record: StepRecord | None = None
        self._closed = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._beats.start()

    @contextmanager
    def generation(self) -> Iterator[World]:
        """See `Membership.generation`."""
        self._generation += 1
        me = (self._attempt, self._generation)
        ray.get(self._rendezvous.join.remote(*me, self._rank, self._size, ray.util.get_node_ip_address()))
        if self._size == 1:
            yield World(0, 1, self._logical_workers)
            return
        with collective():
            store = self._open_store(me)
            backend = "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=self._rank, world_size=self._size, timeout=self._timeout)
        try:
            yield World(self._rank, self._size, self._logical_workers)
        finally:
            dist.destroy_process_group()

    def _open_store(self, me: tuple[str, int]) -> Store:
        if self._rank == 0:
            host = ray.util.get_node_ip_address()
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
            ray.get(self._rendezvous.publish.remote(*me, host, store.port))
        else:
            host, port = ray.get(self._rendezvous.address.remote(*me))
            store = TCPStore(host, port, is_master=False, timeout=self._timeout)
        return PrefixStore(f"generation-{self._generation}", store)

    def flags(self) -> int:
        """See `Membership.flags`."""
        return self._flags

    def report(self, record: StepRecord) -> None:
        """See `Membership.report`."""
        self._record = record

    def close(self) -> None:
        """Ends the heartbeat, after a last one."""
        self._closed.set()
        self._beats.join()

    def _beat(self) -> None:
        while True:
            last = self._closed.wait(_BEAT_S)
            try:
                self._flags |= ray.get(self._rendezvous.beat.remote(self._record))
            except ray.exceptions.RayError as error:
                logger.warning("The rendezvous does not answer, will try again: %s", error)
            if last:
                return
