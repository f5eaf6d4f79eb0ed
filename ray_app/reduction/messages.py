"""Python values between the ranks of a generation, with proof that a member has sent them.

Any process that reaches a port of the process group can join it in place of a rank, and to unpickle a value runs the
code that is in it. So this is the only module that unpickles what a peer sends, and only after it has checked the
sender: the rendezvous makes a key for each generation and hands it to the members over an authenticated connection.

A message is a head and a body. The head has the length and the SHA-256 of the body, and their HMAC-SHA256 (RFC 2104),
which also covers the generation, the sender, the purpose and the number of the message. So a message is refused at any
other place and time than its own, also one of an earlier generation or step. The head has a fixed length and is checked
before memory for the body is allocated. Tensors of a model travel without it (`reduction.transport`): they are numbers.
"""

from __future__ import annotations

import hashlib
import hmac
import pickle
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ray_app.errors import ForgedMessageError
from ray_app.reduction.peer_errors import check_device_errors, collective
from ray_app.reduction.transport import P2PWork, receive, start_send
from ray_app.reduction.world import World

_CONTENT = struct.Struct("<Q32s")
_HEAD_BYTES = _CONTENT.size + hashlib.sha256().digest_size

T = TypeVar("T")


@dataclass(frozen=True)
class _Signature:
    """Signs and checks one message, or those of one collective.

    Args:
        key: The key of the generation.
        context: What else than the content the HMAC covers: generation, purpose and number.
    """

    key: bytes = field(repr=False)
    context: str

    def head(self, sender: int, body: bytes) -> Tensor:
        """Returns the head of a message."""
        content = _CONTENT.pack(len(body), hashlib.sha256(body).digest())
        return to_padded_tensor(content + self._hmac(sender, content))

    def read_head(self, sender: int, head: Tensor) -> tuple[int, bytes]:
        """Returns length and SHA-256 of the body of a message.

        Raises:
            ForgedMessageError: The head is not that of this sender's message.
        """
        data = head.numpy().tobytes()
        content = data[: _CONTENT.size]
        if not hmac.compare_digest(data[_CONTENT.size :], self._hmac(sender, content)):
            raise self._error(sender)
        length, digest = _CONTENT.unpack(content)
        return length, digest

    def load(self, sender: int, body: Tensor, digest: bytes) -> Any:
        """Returns the value in the body of a message.

        Raises:
            ForgedMessageError: The body is another one than that of the head.
        """
        data = body.numpy().data
        if not hmac.compare_digest(hashlib.sha256(data).digest(), digest):
            raise self._error(sender)
        return pickle.loads(data)

    def _hmac(self, sender: int, content: bytes) -> bytes:
        return hmac.digest(self.key, f"{self.context}, from {sender}:".encode() + content, "sha256")

    def _error(self, sender: int) -> ForgedMessageError:
        return ForgedMessageError(
            f"A message in the name of rank {sender} ({self.context}) has no proof that a worker of this run sent it,"
            " so it was not read. Another process has joined the workers' process group, or the network has changed the"
            " message. The workers form a new group; if this repeats, let no other process reach their ports, see"
            " SECURITY.md."
        )


class Session:
    """The messages of this process in one generation."""

    def __init__(self, generation: int, rank: int, key: str) -> None:
        self.rank = rank
        self._generation, self._key = generation, bytes.fromhex(key)
        self._counts = Counter[str]()

    def sign(self, purpose: str) -> _Signature:
        """Returns the signature of the next message of a purpose, which all ranks that take part count alike."""
        self._counts[purpose] += 1
        return _Signature(self._key, f"generation {self._generation}, {purpose} {self._counts[purpose]}")


_session: Session | None = None
"""The session of this process; like torch's default group, there is one at a time."""


def open_session(generation: int, rank: int, key: str) -> None:
    """Begins the messages of a generation.

    Args:
        generation: Number of the generation.
        rank: This rank.
        key: The key of the generation, 64 hexadecimal digits.
    """
    global _session
    # An empty key would prove nothing.
    _session = Session(generation, rank, key) if key else None


def _open_session() -> Session:
    if _session is None:
        raise RuntimeError("This process group was formed without a key, so its ranks cannot send each other values.")
    return _session


def gather(value: T, world: World) -> list[T]:
    """Returns the values of all ranks, in the order of the ranks; a collective.

    Raises:
        PeerLostError: A peer left meanwhile.
        ForgedMessageError: A message is not of its rank.
    """
    if world.size == 1:
        return [value]
    session, body = _open_session(), pickle.dumps(value)
    signature = session.sign("gather")
    with collective():
        heads = _gather_tensors(signature.head(session.rank, body), world.size)
        contents = [signature.read_head(rank, head) for rank, head in enumerate(heads)]
        max_length = max(length for length, _ in contents)
        bodies = _gather_tensors(to_padded_tensor(body, max_length), world.size)
    return [signature.load(rank, bodies[rank][:length], digest) for rank, (length, digest) in enumerate(contents)]


def _gather_tensors(value: Tensor, size: int) -> Sequence[Tensor]:
    whole = torch.empty(size * value.numel(), dtype=torch.uint8)
    dist.all_gather_into_tensor(whole, value)
    return whole.view(size, -1)  # type: ignore[return-value]


def broadcast(value: T, source: int, world: World) -> T:
    """Returns the value of one rank on all ranks; a collective.

    Args:
        value: The value at the rank `source`, not read on other ranks.
        source: The rank.
        world: The workers of the generation.

    Raises:
        PeerLostError: A peer left meanwhile.
        ForgedMessageError: The message is not of the rank `source`.
    """
    signature = _open_session().sign("broadcast")
    if world.rank == source:
        body = pickle.dumps(value)
        with collective():
            for part in (signature.head(source, body), to_padded_tensor(body)):
                dist.broadcast(part, source)
        return value
    with collective():
        received: T = _receive(signature, source, lambda part: dist.broadcast(part, source))
    return received


def start_send_value(value: Any, peer: int) -> list[P2PWork]:
    """Starts to send a value to a rank, see `transport.start_send`; it is pickled before the call returns."""
    session, body = _open_session(), pickle.dumps(value)
    head = session.sign(f"message from {session.rank} to {peer}").head(session.rank, body)
    return [start_send(head, peer), start_send(to_padded_tensor(body), peer)]


def receive_value(peer: int) -> Any:
    """Waits for the next value that a rank sends by `start_send_value`, and returns it.

    Raises:
        ForgedMessageError: The message is not of this rank.
    """
    session = _open_session()
    signature = session.sign(f"message from {peer} to {session.rank}")
    return _receive(signature, peer, lambda part: receive(part, peer))


def _receive(signature: _Signature, sender: int, fill: Callable[[Tensor], object]) -> Any:
    """Returns a value; `fill` receives into a tensor."""
    head = torch.zeros(_HEAD_BYTES, dtype=torch.uint8)
    fill(head)
    length, digest = signature.read_head(sender, head)
    body = torch.zeros(length, dtype=torch.uint8)
    fill(body)
    return signature.load(sender, body, digest)


def to_padded_tensor(data: bytes, length: int = 0) -> Tensor:
    """Returns the bytes, with zeros up to a length."""
    tensor = torch.zeros(max(length, len(data)), dtype=torch.uint8)
    tensor.numpy()[: len(data)] = np.frombuffer(data, np.uint8)
    return tensor


def check_errors_on_all_ranks(world: World) -> None:
    """Waits until the collectives of the device have succeeded on all ranks; a collective if there is a device.

    A result that is to outlive the generation must not be used before: it may be right on this rank and garbage on
    another one.

    Raises:
        PeerLostError: A collective failed, on this rank or another one.
    """
    if world.has_device_collectives:
        check_device_errors()
        gather(None, world)
