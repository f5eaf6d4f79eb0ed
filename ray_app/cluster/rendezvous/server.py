"""The TCP connections between the rendezvous and the workers, and their messages.

Each worker sends its heartbeats over one connection and receives the replies over it; the end of the connection shows
that the worker's process has ended. A message is a frame of JSON (`ray_app.channel`) and costs the rendezvous some ten
microseconds, where a call of a Ray actor would cost some hundred.
"""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import fields, replace
from typing import Any, TypeVar, get_args

from ray_app.channel import FrameReader, Listener, pack_frame
from ray_app.cluster.rendezvous.rendezvous import Rendezvous
from ray_app.runlog.journal import StepRecord
from ray_app.train.membership import Flags, GenerationInfo, Heartbeat, HeartbeatReply, Phase

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
    "StepRecord | None": (dict, type(None)),
    "GenerationInfo | None": (dict, type(None)),
    "list[int]": (list,),
    "tuple[str, ...]": (list,),
}
"""The types that JSON has for a type of a field.

The worker of a connection is known by a secret; this is for mistakes and for a version that has other fields.
"""
M = TypeVar("M")


def encode(message: Heartbeat | HeartbeatReply) -> bytes:
    """Returns a message as JSON: an object of its fields, in which a dataclass is such an object."""
    return json.dumps(_values(message), default=_values).encode()


def _values(message: Any) -> dict[str, Any]:
    """Returns the values of the fields of a message or of a dataclass in it, by name."""
    return {name: getattr(message, name) for name in _FIELDS[type(message)]}


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


def _decode(message_type: type[M], values: Any) -> M:
    """Returns a message of the values of its fields; raises ValueError for other fields or types of them."""
    names = _FIELDS[message_type]
    if not isinstance(values, dict) or values.keys() != names.keys():
        raise ValueError(f"a {message_type.__name__} has the fields {', '.join(names)}")
    for name, of in names.items():
        if of in _TYPES and type(values[name]) not in _TYPES[of]:
            raise ValueError(f"{name} of a {message_type.__name__} is not of type {of}: {values[name]!r}")
    return message_type(**values)


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
