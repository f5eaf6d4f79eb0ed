"""Partitioned training states: while a generation steps, each rank has only a part of the state.

`PartitionedSync` makes whole copies of such a state. A generation begins from a whole copy, and if it breaks, the ranks
return to one. With `PeerReplicas` every rank also keeps a copy of the part of the rank before it, so that the loss of
one rank loses no step.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ray_app.checkpoint.format import Snapshot
from ray_app.errors import PeerLostError
from ray_app.reduction.messages import check_errors_on_all_ranks, gather, receive_value, start_send_value
from ray_app.reduction.peer_errors import collective
from ray_app.reduction.transport import P2PWork, receive, start_send
from ray_app.reduction.world import World
from ray_app.train.state.state import NO_STATE, StateSync, TrainingState
from ray_app.train.state.transfer import extract_tensors, insert_tensors, ranks_without_state, transfer_snapshot

logger = logging.getLogger(__name__)


class StateParts(Protocol):
    """The part of a partitioned state that a rank has while a generation steps; a `Placement` that has parts."""

    num_owners: int | None
    """Number of ranks that have a part of the state: the ranks below this number; None for all ranks."""

    def open_group(self, world: World) -> AbstractContextManager[World]:
        """Returns a context that yields the workers of a generation as this strategy needs them."""
        ...

    def gather(self, world: World) -> Snapshot:
        """Returns a whole copy that is assembled from the parts of all ranks; a collective of all ranks."""
        ...

    def broadcast_parameters(self, world: World, averaged: bool) -> None:
        """Gives the model of every rank the parameters, see `StateSync.broadcast_parameters`; a collective."""
        ...

    def whole_copy(self) -> Snapshot | None:
        """Returns a copy of the whole state if this rank has all of it, else None."""
        ...

    def part(self) -> Any:
        """Returns this rank's part of the state for `PeerReplicas.store`, with shards as `DTensor`."""
        ...

    def load(self, whole: Snapshot, world: World) -> None:
        """Loads this rank's part of a whole copy, which stays unchanged, at the start of a generation."""
        ...


class PartitionedSync(StateSync):
    """The sync of a state of which each rank has a part while a generation steps.

    `collect` leaves a whole copy in the host memory of every rank. The loop calls it at each checkpoint and snapshot,
    and at the end of a generation that ends as planned. When a peer is lost, the ranks continue from the newest whole
    copy that one of them has. With `train.peer_replica` they can also assemble a newer state from the copies of parts
    that they exchange after every step.

    Args:
        state: The state.
        parts: This rank's part of it.
        has_peer_replicas: Whether ranks exchange copies of their parts.
    """

    def __init__(self, state: TrainingState, parts: StateParts, has_peer_replicas: bool) -> None:
        super().__init__(state)
        self._parts = parts
        self._has_peer_replicas = has_peer_replicas
        # Outside of a generation this worker counts as the only one.
        self._world = World(0, 1, 1)
        # The newest whole copy that this rank has.
        self._whole: Snapshot | None = None
        self._peer_replicas = PeerReplicas()

    @contextmanager
    def bind(self, world: World) -> Iterator[World]:
        """Binds the state to a generation, see `StateSync.bind`.

        If the generation breaks, this rank returns to the newest state that it can restore without other ranks.
        """
        try:
            with self._parts.open_group(world) as self._world:
                yield self._world
        except PeerLostError:
            # A rank with the whole state of the present step loses no step. If it has to leave before the next
            # generation forms, it saves this copy, without a group.
            self._whole = self._parts.whole_copy() or self._whole
            self._state.step = self._whole.step if self._whole is not None else NO_STATE
            raise

    def share(self, world: World, restore: Callable[[], None], was_broken: bool = False) -> list[int]:
        """Gives every rank the newest whole copy and loads its part of it, see `StateSync.share`.

        The ranks do not compare their copies, because a whole copy is kept only after all ranks have checked for
        errors. So no rank is divergent.
        """
        del was_broken
        newest = self._peer_replicas.newest(world, self._state.step)
        if newest is not None:
            self.adopt(Snapshot(newest[0], *newest[1]))
        steps = gather(self._state.step, world)
        if max(steps) == NO_STATE and world.rank == 0:
            restore()
        source = steps.index(max(steps))
        if world.rank == source:
            # Before the first generation the whole state is here.
            self._whole = self._parts.whole_copy() or self._whole or self._state.copy_to_host()
        whole = transfer_snapshot(self._whole, world, source, ranks_without_state(steps, source))
        assert whole is not None
        self.adopt(whole)
        self._parts.load(whole, world)
        self._peer_replicas.clear()
        return []

    def broadcast_parameters(self, averaged: bool = False) -> None:
        """Gives the model of every rank the parameters, see `StateSync.broadcast_parameters`."""
        self._parts.broadcast_parameters(self._world, averaged)

    def send_replicas(self) -> None:
        """Copies the part of each rank to the next rank, with `train.peer_replica`."""
        if self._has_peer_replicas and self._world.size > 1:
            owners = self._parts.num_owners or self._world.size
            part = self._parts.part() if self._world.rank < owners else None
            self._peer_replicas.store(self._state.step, part, self._world, owners)

    def collect(self) -> None:
        """Collects a whole copy on every rank, unless they have one of this step already, see `StateSync.collect`."""
        if self._whole is None or self._whole.step != self._state.step:
            with collective():
                whole = self._parts.gather(self._world)
            check_errors_on_all_ranks(self._world)
            self._whole = whole

    def snapshot(self, into: Snapshot | None) -> Snapshot:
        """Returns the whole copy that `collect` has made.

        The memory of an older copy is not reused: if a peer is lost meanwhile, that copy is needed.
        """
        del into
        assert self._whole is not None, "share has made it"
        assert self._whole.step == self._state.step, "collect has made it"
        return self._whole

    def adopt(self, snapshot: Snapshot) -> None:
        """Keeps a snapshot as the whole copy of this rank; `share` sends it to the others and loads the parts."""
        self._whole, self._state.step = snapshot, snapshot.step


_SHARD = "a shard"
"""The key of a dictionary that stands for a shard in a packed part, see `_mark_shards`."""


class ShardReplica(NamedTuple):
    """A copy of one rank's part of a state, in host memory.

    Args:
        head: Everything except the large tensors.
        data: The bytes of these tensors, one after the other.
    """

    head: Any
    data: Tensor

    def start_send(self, peer: int) -> list[P2PWork]:
        """Starts to send the copy to a rank."""
        return [*start_send_value((self.head, self.data.numel()), peer), start_send(self.data, peer)]

    @classmethod
    def receive(cls, peer: int, old: ShardReplica | None = None) -> ShardReplica:
        """Receives the copy that a rank sends, in the memory of an older copy if that fits."""
        head, size = receive_value(peer)
        data = _reuse_memory(size, old)
        receive(data, peer)
        return cls(head, data)


class PeerReplicas:
    """Copies of parts of a partitioned state in host memory: the part of this rank and the part of the rank before it.

    The copies of the newest two steps are kept, because after a loss some ranks may have finished a step that others
    have not. Two steps are enough: no rank finishes the next step before all ranks have the copies of this one.
    """

    def __init__(self) -> None:
        self._versions: deque[tuple[int, int, dict[int, ShardReplica]]] = deque()
        """For each kept step: the step, the number of ranks that own a part, and the copies by the owner's rank."""

    def clear(self) -> None:
        """Drops all copies; for when every rank has a whole copy of the state."""
        self._versions.clear()

    def store(self, step: int, part: Any, world: World, owners: int) -> None:
        """Copies this rank's part, sends the copy to the next rank and receives that of the rank before; a collective.

        If a peer is lost, the call only logs a warning, and the next step raises the error.

        Args:
            step: Finished steps.
            part: The part of this rank, with shards as `DTensor`; not read on ranks without a part.
            world: The workers of the generation.
            owners: Number of ranks that have a part: the ranks below this number.
        """
        old = self._versions.popleft()[2] if len(self._versions) == 2 else {}
        parts: dict[int, ShardReplica] = {}
        self._versions.append((step, owners, parts))
        before = (world.rank - 1) % world.size
        after = (world.rank + 1) % world.size
        sends = list[P2PWork]()
        try:
            with collective():
                if world.rank < owners:
                    parts[world.rank] = _pack(part, old.get(world.rank))
                    sends = parts[world.rank].start_send(after)
                if before < owners:
                    parts[before] = ShardReplica.receive(before, old.get(before))
                for work in sends:
                    work.wait()
        except PeerLostError as error:
            logger.warning("The state of step %d has no complete peer replica: %s", step, error)

    def newest(self, world: World, step: int) -> tuple[int, Any] | None:
        """Assembles, on one rank, the newest state of which a copy of every part is left; a collective of all ranks.

        Args:
            world: The workers of the generation.
            step: Step of the state that this rank has without the copies of parts.

        Returns:
            On one rank the step and the state, with tensors on the CPU; None on all others. None on all ranks if no
            such state is newer than the state of every rank.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        local_versions = [(version_step, owners, list(parts)) for version_step, owners, parts in self._versions]
        offers = gather((step, local_versions), world)
        # For each step and number of owners, and for each owner: the first rank that keeps the owner's part.
        ranks_with_part: dict[tuple[int, int], dict[int, int]] = {}
        for rank, (_, versions) in enumerate(offers):
            for version_step, owners, kept_owners in versions:
                for owner in kept_owners:
                    ranks_with_part.setdefault((version_step, owners), {}).setdefault(owner, rank)
        max_step = max(rank_step for rank_step, _ in offers)
        # A state is complete if a rank keeps the part of each owner.
        complete = [key for key, by_owner in ranks_with_part.items() if len(by_owner) == key[1] and key[0] > max_step]
        if not complete:
            return None
        newest_step, owners = max(complete)
        by_owner = ranks_with_part[newest_step, owners]
        # The rank that keeps the first part assembles the state.
        target = by_owner[0]
        local_parts = next((parts for version_step, _, parts in self._versions if version_step == newest_step), {})
        assembled = []
        with collective():
            for owner in range(owners):
                rank = by_owner[owner]
                if world.rank == target:
                    assembled.append(local_parts[owner] if rank == target else ShardReplica.receive(rank))
                elif world.rank == rank:
                    for work in local_parts[owner].start_send(target):
                        work.wait()
        return (newest_step, _join([_unpack(part) for part in assembled])) if world.rank == target else None


def _reuse_memory(size: int, old: ShardReplica | None) -> Tensor:
    """Returns memory of `size` bytes: that of an older copy if it has this size, because new memory is slower."""
    return old.data if old is not None and old.data.numel() == size else torch.empty(size, dtype=torch.uint8)


def _pack(state: Any, old: ShardReplica | None) -> ShardReplica:
    """Returns a copy of a rank's part of a state, in the memory of an older copy if that fits."""
    tensors: list[Tensor] = []
    head = extract_tensors(_mark_shards(state), tensors)
    data, start = _reuse_memory(sum(t.nbytes for t in tensors), old), 0
    for t in tensors:
        data[start : start + t.nbytes].copy_(t.detach().reshape(-1).view(torch.uint8))
        start += t.nbytes
    return ShardReplica(head, data)


def _unpack(part: ShardReplica) -> Any:
    """Returns the part of a state that `_pack` has copied; its shards are marked, see `_mark_shards`."""
    tensors: list[Tensor] = []
    state, start = insert_tensors(part.head, tensors), 0
    for t in tensors:
        t.view(-1).view(torch.uint8).copy_(part.data[start : start + t.nbytes])
        start += t.nbytes
    return state


def _mark_shards(value: Any) -> Any:
    """Returns a state in which `{_SHARD: tensor}` stands for each shard (`DTensor`), with its local tensor."""
    if isinstance(value, Tensor):
        return {_SHARD: value.to_local()} if hasattr(value, "to_local") else value
    if isinstance(value, dict):
        return {k: _mark_shards(v) for k, v in value.items()}
    return type(value)(_mark_shards(v) for v in value) if isinstance(value, list | tuple) else value


def _join(parts: Sequence[Any]) -> Any:
    """Returns the whole state, assembled from the marked parts of all owners, which differ only in their shards."""
    first = parts[0]
    if isinstance(first, dict) and first.keys() == {_SHARD}:
        return torch.cat([part[_SHARD] for part in parts])
    if isinstance(first, dict):
        return {k: _join([part[k] for part in parts]) for k in first}
    if isinstance(first, list | tuple):
        return type(first)(_join(values) for values in zip(*parts, strict=True))
    return first
