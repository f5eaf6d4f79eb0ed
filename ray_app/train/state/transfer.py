"""How a training state gets to those that lack it: tensor by tensor, along a tree of them, in pieces that nobody has to wait long for.

Nothing big is pickled or copied while Python's lock is held, so heartbeats go on however large the state is. A tensor leaves from the
memory that it has and arrives in the memory that it stays in; from a device it goes through the host piece by piece.
"""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ray_app.checkpoint.format import Snapshot
from ray_app.exchange.exchange import collective
from ray_app.exchange.peer import Transfer, receive, sending

_PIECE_BYTES = 16 << 20
_SMALL_BYTES = 4096
"""Tensors up to this size travel with what is no tensor: a message each would take longer than they do."""
_MOST_ON_THE_WAY = 4


class _Place(NamedTuple):
    """Where a tensor belongs that travels on its own."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def lacking(steps: Sequence[int], source: int) -> list[int]:
    """The ranks that do not have what the source has, by every rank's step; nobody has anything at a step below 0."""
    return [rank for rank, step in enumerate(steps) if rank != source and (step < 0 or step != steps[source])]


def odd_ones(steps: Sequence[int], digests: Sequence[str]) -> list[int]:
    """The ranks with the highest step that are not of one mind with more than half of those that have it, by every rank's digest."""
    newest = [rank for rank, step in enumerate(steps) if step == max(steps)]
    digest, count = Counter(digests[rank] for rank in newest).most_common(1)[0]
    return [rank for rank in newest if digests[rank] != digest or 2 * count <= len(newest)]


def transfer(snapshot: Snapshot | None, rank: int, source: int, to: Sequence[int]) -> Snapshot | None:
    """Gives a state to the ranks that lack it; only they and the source take part.

    Args:
        snapshot: What the source has; it may be the memory that it trains in, on a device, too.
        rank: This rank.
        source: Who has it.
        to: Who gets it, the same on all ranks.

    Returns:
        On those who get it the state, on the CPU and in memory of its own; on all others what they gave.

    Raises:
        PeerLostError: One of them left meanwhile.
    """
    order = [source, *to]
    if rank not in order or not to:
        return snapshot
    me = order.index(rank)
    line = _Line(order[(me - 1) // 2] if me else None, order[2 * me + 1 : 2 * me + 3])
    tensors: list[Tensor] = []
    with collective():
        if me == 0:
            assert snapshot is not None
            line.pass_head(pickle.dumps(without_tensors([getattr(snapshot, part.name) for part in fields(Snapshot)], tensors)))
        else:
            snapshot = Snapshot(*with_tensors(pickle.loads(line.pass_head(b"")), tensors))
        for tensor in tensors:
            line.pass_on(tensor)
        line.settle()
    return snapshot


class _Line:
    """A rank's place in the tree.

    Args:
        parent: Where everything comes from; None for the source.
        children: Where it goes.
    """

    def __init__(self, parent: int | None, children: Sequence[int]) -> None:
        self._parent, self._children = parent, children
        self._sent: deque[Transfer] = deque()

    def pass_head(self, head: bytes) -> bytes:
        """Passes on what comes before the tensors; returns it."""
        size = torch.tensor([len(head)])
        self._pass_piece(size)
        data = torch.frombuffer(bytearray(head or bytes(int(size))), dtype=torch.uint8)
        self.pass_on(data)
        return data.numpy().tobytes()

    def pass_on(self, tensor: Tensor) -> None:
        """Passes on the bytes of a tensor, which those who are not the source receive into it."""
        flat = tensor.detach().reshape(-1)
        step = max(1, _PIECE_BYTES // flat.element_size())
        for low in range(0, flat.numel(), step):
            self._pass_piece(flat[low : low + step].cpu().contiguous().view(torch.uint8))

    def _pass_piece(self, piece: Tensor) -> None:
        if self._parent is not None:
            receive(piece, self._parent)
        for child in self._children:
            self._sent.append(sending(piece, child))
        while len(self._sent) > _MOST_ON_THE_WAY * len(self._children):
            self._sent.popleft().wait()

    def settle(self) -> None:
        """Waits until all has left."""
        while self._sent:
            self._sent.popleft().wait()


def without_tensors(value: Any, found: list[Tensor]) -> Any:
    """A value with places instead of tensors, which go into `found`."""
    if isinstance(value, Tensor):
        if value.nbytes <= _SMALL_BYTES:
            return value.detach().cpu().clone()  # a view would take its whole storage along
        found.append(value)
        return _Place(value.dtype, tuple(value.shape))
    if isinstance(value, dict):
        return {k: without_tensors(v, found) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(without_tensors(v, found) for v in value)
    return value


def with_tensors(form: Any, found: list[Tensor]) -> Any:
    """What `without_tensors` was given, with tensors that are still to be filled, which go into `found`."""
    if isinstance(form, _Place):
        found.append(torch.empty(form.shape, dtype=form.dtype))
        return found[-1]
    if isinstance(form, dict):
        return {k: with_tensors(v, found) for k, v in form.items()}
    if isinstance(form, list | tuple):
        return type(form)(with_tensors(v, found) for v in form)
    return form
