"""The connections between workers and the rendezvous: signs of life come in, orders go out, and an end says that a
process has ended.

A call of a Ray actor takes it some hundred microseconds, a line of JSON some ten. Who connects shows a secret first,
which only Ray's own calls tell; nothing that comes is unpickled.

The rendezvous as an actor of Ray: where workers connect to, its looks, and its own restart.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import resource
import secrets
import time
import warnings
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import ray

from ray_app.cluster.rendezvous.rendezvous import Rendezvous
from ray_app.runlog.journal import StepRecord
from ray_app.train.membership import Flags, GenerationInfo, Heartbeat, HeartbeatReply

logger = logging.getLogger(__name__)

_BACKLOG = 4096
_NAMES = {
    kind: [part.name for part in fields(kind)] for kind in (Heartbeat, HeartbeatReply, GenerationInfo, StepRecord)
}


def packed(message: Heartbeat | HeartbeatReply) -> bytes:
    """A message as a line."""
    return json.dumps(_values(message), default=_values).encode() + b"\n"


def _values(message: Any) -> list[Any]:
    return [getattr(message, name) for name in _NAMES[type(message)]]


def beat_of(line: bytes) -> Heartbeat:
    """The sign of life in a line."""
    beat = Heartbeat(*json.loads(line))
    return beat if beat.record is None else replace(beat, record=StepRecord(*beat.record))  # type: ignore[misc]


def orders_of(line: bytes) -> HeartbeatReply:
    """The orders in a line."""
    orders = HeartbeatReply(*json.loads(line))
    formed = None if orders.formed is None else GenerationInfo(*orders.formed)  # type: ignore[misc]
    return replace(orders, flags=Flags(orders.flags), formed=formed and replace(formed, hosts=tuple(formed.hosts)))


class Lines:
    """The rendezvous' end of all connections.

    Args:
        rendezvous: What hears and decides.

    Attributes:
        secret: What who connects has to show.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous, self.secret = rendezvous, secrets.token_hex(16)
        self.open: dict[str, _Line] = {}
        self._calling = False
        self._server: asyncio.Server | None = None
        rendezvous.call = self._call

    async def listen(self, host: str) -> tuple[str, int]:
        """Begins to listen and returns where."""
        with suppress(OSError, ValueError):  # a descriptor for each worker
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
        self._server = await asyncio.get_running_loop().create_server(lambda: _Line(self), host, 0, backlog=_BACKLOG)
        return self._server.sockets[0].getsockname()[:2]

    def close(self) -> None:
        """Listens no more."""
        if self._server is not None:
            self._server.close()

    def _call(self) -> None:
        if not self._calling and self._server is not None:
            self._calling = True
            self._server.get_loop().call_soon(self._tell_all)

    def _tell_all(self) -> None:
        self._calling = False
        for worker, line in self.open.items():
            line.tell(self.rendezvous.orders(worker))


class _Line(asyncio.Protocol):
    """A connection."""

    def __init__(self, lines: Lines) -> None:
        self._lines, self._worker, self._is_trusted, self._rest = lines, "", False, b""
        self._told: HeartbeatReply | None = None
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if self._is_trusted:
                self._hear(beat_of(line))
            elif hmac.compare_digest(line, self._lines.secret.encode()):
                self._is_trusted = True
            else:
                return self._transport.abort()
        return None

    def _hear(self, beat: Heartbeat) -> None:
        if not self._worker:
            self._worker = beat.worker
            self._lines.open[beat.worker] = self
        self._told = None
        self.tell(self._lines.rendezvous.answer(beat))

    def tell(self, orders: HeartbeatReply) -> None:
        """Passes on orders that are not those that it had."""
        if orders != self._told and not self._transport.is_closing():
            self._told = orders
            self._transport.write(packed(orders))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._lines.open.get(self._worker) is self:
            del self._lines.open[self._worker]
            self._lines.rendezvous.lose(self._worker)


_LOOK_S = 0.2


class _Actor(Rendezvous):
    """A rendezvous that Ray starts again when it dies; what it knew is gone then, the numbers that it gave as well."""

    def __init__(self, silence_s: float, step_timeout_s: float | None, least: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's property asks another one of Ray's that is deprecated
            again = ray.get_runtime_context().was_current_actor_reconstructed
        super().__init__(silence_s, step_timeout_s, first=time.time_ns() // 10**6 if again else 1, least=least)
        self._lines = Lines(self)
        self._listening: asyncio.Task[tuple[str, int]] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def lifeline(self) -> tuple[tuple[str, int], str]:
        """Where workers connect to, and what they show there, see `cluster.rendezvous.lines`."""
        if self._listening is None:
            self._listening = asyncio.create_task(self._lines.listen(ray.util.get_node_ip_address()))
            self._watching = asyncio.create_task(self._watch())
        return await self._listening, self._lines.secret

    async def close(self) -> None:
        """Stops watching and listening, before the actor is ended: asyncio complains of what it finds going on then."""
        self._lines.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look(self._clock())


def start_rendezvous(name: str, silence_s: float, step_timeout_s: float | None, least: int = 1) -> Any:
    """Starts the rendezvous actor on this node, so that it lives as long as the driver, and returns its handle."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": -1,
        "max_concurrency": 1000,
        "scheduling_strategy": here,
    }
    return ray.remote(_Actor).options(name=name, **options).remote(silence_s, step_timeout_s, least)
