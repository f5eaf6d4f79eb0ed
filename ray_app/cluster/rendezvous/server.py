"""The rendezvous as a Ray actor, and the TCP connections between it and the workers.

Each worker sends its heartbeats over one connection and receives the replies over it; the end of the connection shows
that the worker's process has ended. A message is a frame of JSON (`ray_app.channel`) and costs the rendezvous some ten
microseconds, where a call of a Ray actor would cost some hundred.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
import warnings
from dataclasses import fields, replace
from typing import Any, TypeVar, get_args

import ray

from ray_app.channel import FrameReader, Listener, pack_frame
from ray_app.cluster.rendezvous.rendezvous import Rendezvous
from ray_app.process import log_to_stderr
from ray_app.runlog.journal import StepRecord
from ray_app.train.membership import Flags, GenerationInfo, Heartbeat, HeartbeatReply, Phase

logger = logging.getLogger(__name__)

_CHECK_S = 0.2
"""Seconds between two checks for silent workers and stalled generations."""
_FIELDS: dict[type, dict[str, Any]] = {
    message_type: {field.name: field.type for field in fields(message_type)}
    for message_type in (Heartbeat, HeartbeatReply, GenerationInfo, StepRecord)
}
"""The names of the fields of each message and of the dataclasses in it, and their types as texts."""
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "str": (str,),
    "bool": (bool,),
    "float": (int, float),
    "Flags": (int,),
    "Phase": (str,),
    "StepRecord | None": (list, type(None)),
    "GenerationInfo | None": (list, type(None)),
    "list[int]": (list,),
    "tuple[str, ...]": (list,),
}
"""The types that JSON has for a type of a field.

The worker of a connection is known by a secret; this is for mistakes and for a version that has other fields.
"""
M = TypeVar("M")


def encode(message: Heartbeat | HeartbeatReply) -> bytes:
    """Returns a message as JSON: a list of the values of its fields, in which a dataclass is such a list."""
    return json.dumps(_values(message), default=_values).encode()


def _values(message: Any) -> list[Any]:
    """Returns the values of the fields of a message or of a dataclass in it, in their order."""
    return [getattr(message, name) for name in _FIELDS[type(message)]]


def decode_heartbeat(data: bytes) -> Heartbeat:
    """Returns the heartbeat in a frame, see `encode`; raises ValueError for anything else."""
    heartbeat = _decode(Heartbeat, json.loads(data))
    if heartbeat.phase not in get_args(Phase):
        raise ValueError("a heartbeat has an unknown phase")
    return heartbeat if heartbeat.record is None else replace(heartbeat, record=_decode(StepRecord, heartbeat.record))


def decode_reply(data: bytes) -> HeartbeatReply:
    """Returns the reply in a frame, see `encode`; raises ValueError for anything else."""
    reply = _decode(HeartbeatReply, json.loads(data))
    formed = None if reply.formed is None else _decode(GenerationInfo, reply.formed)
    return replace(reply, flags=Flags(reply.flags), formed=formed and replace(formed, hosts=tuple(formed.hosts)))


def _decode(kind: type[M], values: Any) -> M:
    """Returns a message of the values of its fields; raises ValueError for another number or type of them."""
    if not isinstance(values, list) or len(values) != len(_FIELDS[kind]):
        raise ValueError(f"a {kind.__name__} is a list of {len(_FIELDS[kind])} values")
    for (name, of), value in zip(_FIELDS[kind].items(), values, strict=True):
        if of in _TYPES and type(value) not in _TYPES[of]:
            raise ValueError(f"{name} of a {kind.__name__} has another type than {of}: {value!r}")
    return kind(*values)


class ConnectionServer:
    """The rendezvous's end of the connections to all workers.

    Args:
        rendezvous: Handles the heartbeats and makes the replies. Its `on_change` is set to a broadcast of replies.

    Attributes:
        secret: See `Listener`.
        connections: The newest connection of each worker, by worker id.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self._listener = Listener(self._add_connection)
        self.secret = self._listener.secret
        self.connections: dict[str, _WorkerConnection] = {}
        self._is_broadcast_scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # asyncio keeps only weak references to tasks.
        self._tasks: set[asyncio.Task[Any]] = set()
        rendezvous.on_change = self._schedule_broadcast

    async def listen(self, host: str) -> tuple[str, int]:
        """Starts to listen on a free port of a host; returns the address."""
        self._loop = asyncio.get_running_loop()
        return self._listener.listen(host, self._loop)

    def close(self) -> None:
        """Stops listening."""
        self._listener.close()

    def _add_connection(self, connection: socket.socket) -> None:
        """Gives an authenticated connection its protocol."""
        assert self._loop is not None
        task = self._loop.create_task(self._loop.connect_accepted_socket(lambda: _WorkerConnection(self), connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _schedule_broadcast(self) -> None:
        """Schedules one broadcast for all the changes that one message makes."""
        if not self._is_broadcast_scheduled and self._loop is not None:
            self._is_broadcast_scheduled = True
            self._loop.call_soon(self._broadcast)

    def _broadcast(self) -> None:
        """Sends every connected worker its reply, if that has changed."""
        self._is_broadcast_scheduled = False
        for worker, connection in self.connections.items():
            connection.send_if_changed(self.rendezvous.reply_for(worker))


class _WorkerConnection(asyncio.Protocol):
    """The connection of one worker; the worker is known from its first heartbeat on."""

    def __init__(self, server: ConnectionServer) -> None:
        self._server = server
        self._worker = ""
        self._frames = FrameReader()
        self._last_reply: HeartbeatReply | None = None
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        # What is not a heartbeat raises, after which asyncio logs the error and closes the connection.
        for frame in self._frames.feed(data):
            self._handle(decode_heartbeat(frame))

    def _handle(self, heartbeat: Heartbeat) -> None:
        """Hands a heartbeat to the rendezvous and sends the reply."""
        if not self._worker:
            self._worker = heartbeat.worker
            self._server.connections[heartbeat.worker] = self
        # Every heartbeat is answered, even if the reply equals the one that was sent last.
        self._last_reply = None
        self.send_if_changed(self._server.rendezvous.handle_heartbeat(heartbeat))

    def send_if_changed(self, reply: HeartbeatReply) -> None:
        """Sends a reply unless it equals the one that was sent last."""
        if reply != self._last_reply and not self._transport.is_closing():
            self._last_reply = reply
            self._transport.write(pack_frame(encode(reply)))

    def connection_lost(self, exc: Exception | None) -> None:
        # A worker that has connected anew is not lost when its old connection ends.
        if self._server.connections.get(self._worker) is self:
            del self._server.connections[self._worker]
            self._server.rendezvous.on_disconnect(self._worker)


class _RendezvousActor(Rendezvous):
    """The rendezvous in an actor. Ray restarts it when it dies, without its members and its newest generation number.

    Args:
        silence_s: See `Rendezvous`.
        step_timeout_s: See `Rendezvous`.
        min_workers: See `Rendezvous`.
    """

    def __init__(self, silence_s: float, step_timeout_s: float | None, min_workers: int) -> None:
        log_to_stderr()
        with warnings.catch_warnings():
            # This property of Ray reads another one that is deprecated, which would warn.
            warnings.simplefilter("ignore")
            is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
        # The milliseconds since 1970 exceed every number that an earlier instance can have reached, since a generation
        # takes longer than a millisecond.
        first_generation = time.time_ns() // 10**6 if is_restarted else 1
        super().__init__(silence_s, step_timeout_s, first_generation=first_generation, min_workers=min_workers)
        self._connections = ConnectionServer(self)
        self._listening: asyncio.Task[tuple[str, int]] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def address_and_secret(self) -> tuple[tuple[str, int], str]:
        """Returns the address for the workers' connections and the secret that a client sends first.

        The first call starts to listen and to check for silent workers. A call after one that failed tries again.
        """
        if self._listening is not None and self._listening.done() and self._listening.exception() is not None:
            self._listening = None
        if self._listening is None:
            self._listening = asyncio.create_task(self._connections.listen(ray.util.get_node_ip_address()))
            self._watching = self._watching or asyncio.create_task(self._watch())
        return await self._listening, self._connections.secret

    async def close(self) -> None:
        """Stops listening and checking; asyncio would complain about a task that runs when the actor is killed."""
        self._connections.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        """Checks for silent workers and stalled generations, again and again."""
        while True:
            await asyncio.sleep(_CHECK_S)
            try:
                self.check_liveness(self._clock())
            # Any error is retried: without this check a frozen worker would stall the others for good.
            except Exception:
                logger.exception("The workers could not be checked, will try again.")


def start_rendezvous(name: str, silence_s: float, step_timeout_s: float | None, min_workers: int = 1) -> Any:
    """Starts the rendezvous actor on this node, so that it lives as long as the driver; returns its handle.

    Args:
        name: The name of the actor.
        silence_s: See `Rendezvous`.
        step_timeout_s: See `Rendezvous`.
        min_workers: See `Rendezvous`.
    """
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
