"""What a rank alone has of a state, kept by the next rank, too, so that the death of one of them loses nothing."""

from __future__ import annotations

import logging
import pickle
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ray_app.errors import PeerLostError
from ray_app.exchange.exchange import World, collective, gather
from ray_app.exchange.peer import Transfer, receive, send, sending
from ray_app.train.state.transfer import with_tensors, without_tensors

logger = logging.getLogger(__name__)

_SHARD = "a shard"


class StatePart(NamedTuple):
    """What one rank has of the state of a step: everything but tensors, pickled, and their bytes one after the other, on the CPU."""

    head: Tensor
    data: Tensor


class Copies:
    """The parts that this rank keeps, its own and that of the rank before it, of the newest two steps.

    Two, since some may have finished a step which others have not: nobody begins the next one before all have the parts of this.
    """

    def __init__(self) -> None:
        self._cuts: deque[tuple[int, int, dict[int, StatePart]]] = deque()
        """Step, in how many parts its state is, and those that are here by their owner."""

    def clear(self) -> None:
        """Forgets all: everyone has the whole state."""
        self._cuts.clear()

    def keep(self, step: int, mine: Any, world: World, owners: int) -> None:
        """Copies this rank's part of a step and exchanges it with the neighbours; a collective, which raises nothing if a peer is lost.

        Args:
            step: Finished steps.
            mine: A state whose `DTensor` are shards; of ranks below `owners`.
            world: The workers of now.
            owners: How many of the first ranks have a part.
        """
        old = self._cuts.popleft()[2] if len(self._cuts) == 2 else {}
        parts: dict[int, StatePart] = {}
        self._cuts.append((step, owners, parts))
        before, behind, sent = (world.rank - 1) % world.size, (world.rank + 1) % world.size, list[Transfer]()
        try:
            with collective():
                if world.rank < owners:
                    own = parts[world.rank] = _packed(mine, old.get(world.rank))
                    sizes = torch.tensor([own.head.numel(), own.data.numel()])
                    sent = [sending(value, behind) for value in (sizes, *own)]
                if before < owners:
                    sizes = torch.empty(2, dtype=torch.int64)
                    receive(sizes, before)
                    head, data = torch.empty(int(sizes[0]), dtype=torch.uint8), _room(int(sizes[1]), old.get(before))
                    receive(head, before)
                    receive(data, before)
                    parts[before] = StatePart(head, data)
                for transfer in sent:
                    transfer.wait()
        except PeerLostError as error:  # the next step meets it again
            logger.warning("No second copy of the state of step %d: %s", step, error)

    def newest(self, world: World, step: int) -> tuple[int, Any] | None:
        """Puts the newest state together of which no part is lost; a collective of all ranks, of which one gets it.

        Args:
            world: The workers of now.
            step: That of the state which this rank has without it.

        Returns:
            Its step, and it, on the CPU; None on the others, or if it is not newer than what any rank has.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        mine = [(at, owners, {owner: [v.numel() for v in part] for owner, part in parts.items()}) for at, owners, parts in self._cuts]
        offers = gather((step, mine), world)
        held: dict[tuple[int, int], dict[int, tuple[int, list[int]]]] = {}
        for rank, (_, cuts) in enumerate(offers):
            for at, owners, parts in cuts:
                for owner, sizes in parts.items():
                    held.setdefault((at, owners), {}).setdefault(owner, (rank, sizes))
        whole = [key for key, holders in held.items() if len(holders) == key[1] and key[0] > max(at for at, _ in offers)]
        if not whole:
            return None
        at, owners = max(whole)
        holders, to = held[at, owners], held[at, owners][0][0]
        own = next((parts for cut, _, parts in self._cuts if cut == at), {})
        found = []
        with collective():
            for owner in range(owners):
                rank, sizes = holders[owner]
                part = own[owner] if rank == world.rank else StatePart(*(torch.empty(size, dtype=torch.uint8) for size in sizes))
                for value in part if rank != to else ():
                    if world.rank == rank:
                        send(value, to)
                    elif world.rank == to:
                        receive(value, rank)
                found.append(part)
        return (at, _joined([_unpacked(part) for part in found])) if world.rank == to else None


def _room(size: int, old: StatePart | None) -> Tensor:
    """Memory for so many bytes; what was touched before is quicker."""
    return old.data if old is not None and old.data.numel() == size else torch.empty(size, dtype=torch.uint8)


def _packed(state: Any, old: StatePart | None) -> StatePart:
    tensors: list[Tensor] = []
    head = bytearray(pickle.dumps(without_tensors(_marked(state), tensors)))
    data, at = _room(sum(t.nbytes for t in tensors), old), 0
    for t in tensors:
        data[at : at + t.nbytes].copy_(t.detach().reshape(-1).view(torch.uint8))
        at += t.nbytes
    return StatePart(torch.frombuffer(head, dtype=torch.uint8), data)


def _unpacked(part: StatePart) -> Any:
    tensors: list[Tensor] = []
    state, at = with_tensors(pickle.loads(part.head.numpy().tobytes()), tensors), 0
    for t in tensors:
        t.view(-1).view(torch.uint8).copy_(part.data[at : at + t.nbytes])
        at += t.nbytes
    return state


def _marked(value: Any) -> Any:
    """A state with plain tensors, those that are shards marked."""
    if isinstance(value, Tensor):
        return {_SHARD: value.to_local()} if hasattr(value, "to_local") else value
    if isinstance(value, dict):
        return {k: _marked(v) for k, v in value.items()}
    return type(value)(_marked(v) for v in value) if isinstance(value, list | tuple) else value


def _joined(parts: Sequence[Any]) -> Any:
    """The whole state, given that of every rank, in which what is no shard is the same."""
    first = parts[0]
    if isinstance(first, dict) and first.keys() == {_SHARD}:
        return torch.cat([part[_SHARD] for part in parts])
    if isinstance(first, dict):
        return {k: _joined([part[k] for part in parts]) for k in first}
    if isinstance(first, list | tuple):
        return type(first)(_joined(each) for each in zip(*parts, strict=True))
    return first
