"""The rendezvous as a Ray actor, and the TCP connections between it and the workers.

Heartbeats come in on a connection, replies go out, and the end of a connection says that a process has ended. A
connection costs a line of JSON per message, some ten microseconds, where a call of a Ray actor costs it some hundred.
A client sends a secret first, which it gets through a Ray call. Nothing that arrives is unpickled.
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
_CHECK_S = 0.2
"""Seconds between two checks for silent workers."""
_FIELD_NAMES = {
    kind: [part.name for part in fields(kind)] for kind in (Heartbeat, HeartbeatReply, GenerationInfo, StepRecord)
}


def encode(message: Heartbeat | HeartbeatReply) -> bytes:
    """Returns a message as a line of JSON."""
    return json.dumps(_values(message), default=_values).encode() + b"\n"


def _values(message: Any) -> list[Any]:
    return [getattr(message, name) for name in _FIELD_NAMES[type(message)]]


def decode_heartbeat(line: bytes) -> Heartbeat:
    """Returns the heartbeat in a line."""
    heartbeat = Heartbeat(*json.loads(line))
    if heartbeat.record is None:
        return heartbeat
    return replace(heartbeat, record=StepRecord(*heartbeat.record))  # type: ignore[misc]


def decode_reply(line: bytes) -> HeartbeatReply:
    """Returns the reply in a line."""
    reply = HeartbeatReply(*json.loads(line))
    formed = None if reply.formed is None else GenerationInfo(*reply.formed)  # type: ignore[misc]
    return replace(reply, flags=Flags(reply.flags), formed=formed and replace(formed, hosts=tuple(formed.hosts)))


class ConnectionServer:
    """The rendezvous' end of the connections to all workers.

    Args:
        rendezvous: Handles the heartbeats and makes the replies.

    Attributes:
        secret: The line that a client has to send first.
        connections: The open connections by the id of their worker.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self.secret = secrets.token_hex(16)
        self.connections: dict[str, _WorkerConnection] = {}
        self._is_broadcast_scheduled = False
        self._server: asyncio.Server | None = None
        rendezvous.on_change = self._schedule_broadcast

    async def listen(self, host: str) -> tuple[str, int]:
        """Starts to listen and returns the address."""
        # Each worker needs a file descriptor, and the default limit may be lower than the number of workers.
        with suppress(OSError, ValueError):
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _WorkerConnection(self), host, 0, backlog=_BACKLOG)
        return self._server.sockets[0].getsockname()[:2]

    def close(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.close()

    def _schedule_broadcast(self) -> None:
        """Has one broadcast follow all the changes of one message."""
        if not self._is_broadcast_scheduled and self._server is not None:
            self._is_broadcast_scheduled = True
            self._server.get_loop().call_soon(self._broadcast)

    def _broadcast(self) -> None:
        self._is_broadcast_scheduled = False
        for worker, connection in self.connections.items():
            connection.send_if_changed(self.rendezvous.reply_for(worker))


class _WorkerConnection(asyncio.Protocol):
    """The connection of one worker."""

    def __init__(self, server: ConnectionServer) -> None:
        self._server = server
        self._worker = ""
        self._is_authenticated = False
        self._incomplete_line = b""
        self._last_reply: HeartbeatReply | None = None
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        *lines, self._incomplete_line = (self._incomplete_line + data).split(b"\n")
        for line in lines:
            if self._is_authenticated:
                self._handle(decode_heartbeat(line))
            elif hmac.compare_digest(line, self._server.secret.encode()):
                self._is_authenticated = True
            else:
                return self._transport.abort()
        return None

    def _handle(self, heartbeat: Heartbeat) -> None:
        if not self._worker:
            self._worker = heartbeat.worker
            self._server.connections[heartbeat.worker] = self
        # A heartbeat is always answered, also with the reply that was sent last.
        self._last_reply = None
        self.send_if_changed(self._server.rendezvous.handle_heartbeat(heartbeat))

    def send_if_changed(self, reply: HeartbeatReply) -> None:
        """Sends a reply unless it is equal to the one that was sent last."""
        if reply != self._last_reply and not self._transport.is_closing():
            self._last_reply = reply
            self._transport.write(encode(reply))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._server.connections.get(self._worker) is self:
            del self._server.connections[self._worker]
            self._server.rendezvous.on_disconnect(self._worker)


class _RendezvousActor(Rendezvous):
    """A rendezvous in an actor, which Ray restarts when it dies; its members and the numbers it used are lost then."""

    def __init__(self, silence_s: float, step_timeout_s: float | None, min_workers: int) -> None:
        with warnings.catch_warnings():
            # Ray's property uses a property of Ray that is deprecated.
            warnings.simplefilter("ignore")
            is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
        # Milliseconds since 1970 are higher than any number that an earlier instance has reached by counting.
        first_generation = time.time_ns() // 10**6 if is_restarted else 1
        super().__init__(silence_s, step_timeout_s, first_generation=first_generation, min_workers=min_workers)
        self._connections = ConnectionServer(self)
        self._listening: asyncio.Task[tuple[str, int]] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def lifeline(self) -> tuple[tuple[str, int], str]:
        """Returns the address for workers' connections and the secret that they send first."""
        if self._listening is None:
            self._listening = asyncio.create_task(self._connections.listen(ray.util.get_node_ip_address()))
            self._watching = asyncio.create_task(self._watch())
        return await self._listening, self._connections.secret

    async def close(self) -> None:
        """Stops watching and listening. asyncio would complain about tasks that run when the actor is killed."""
        self._connections.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            self.check_liveness(self._clock())


def start_rendezvous(name: str, silence_s: float, step_timeout_s: float | None, min_workers: int = 1) -> Any:
    """Starts the rendezvous actor on this node, so that it lives as long as the driver, and returns its handle."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": -1,
        "max_concurrency": 1000,
        "scheduling_strategy": this_node,
    }
    actor = ray.remote(_RendezvousActor).options(name=name, **options)
    return actor.remote(silence_s, step_timeout_s, min_workers)
