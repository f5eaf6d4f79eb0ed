"""Partitioned training states: while a generation steps, each rank has only a part of the state.

`PartitionedState` makes whole copies of such a state, from which a generation begins and to which it can return.
`PeerReplicas` lets every rank also keep the part of its neighbor, so that the loss of a rank loses no step.
"""

from __future__ import annotations

import logging
import pickle
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ray_app.checkpoint.format import Snapshot
from ray_app.config.config import Config
from ray_app.errors import PeerLostError
from ray_app.reduction.base import World, check_errors_on_all_ranks, collective, gather
from ray_app.reduction.transport import P2PWork, receive, send, start_send
from ray_app.task.base import Task
from ray_app.train.state.state import NO_STATE, TrainingState
from ray_app.train.state.transfer import extract_tensors, insert_tensors, ranks_without_state, transfer_snapshot

logger = logging.getLogger(__name__)


class PartitionedState(TrainingState):
    """A training state of which each rank has a part while a generation steps.

    Every snapshot is a collective and leaves a whole copy in the host memory of every rank. One is made at each
    checkpoint and snapshot, and at the end of a generation that ends as planned. When a peer is lost, the ranks
    continue from the newest whole copy that one of them has, or from the parts that they keep of each other after every
    step (`train.peer_replica`).
    """

    is_partitioned: ClassVar[bool] = True

    def __init__(self, config: Config, task: Task, device: torch.device, total_steps: int) -> None:
        self._world = World(0, 1, 1)
        self._whole: Snapshot | None = None
        self._peer_replicas = PeerReplicas()
        super().__init__(config, task, device, total_steps)

    def snapshot(self, into: Snapshot | None = None) -> Snapshot:
        """Returns a whole copy, see `TrainingState.snapshot`; a collective, unless there is one of this step already.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        # Older copies are not overwritten: if this copy fails half-way, the previous one is needed.
        del into
        if self._whole is None or self._whole.step != self.step:
            with collective():
                whole = self._collect()
            check_errors_on_all_ranks(self._world)
            self._whole = whole
        return self._whole

    def load(self, snapshot: Snapshot) -> None:
        """Keeps a snapshot as the whole copy; `share` distributes it."""
        self._whole, self.step = snapshot, snapshot.step

    @contextmanager
    def bind(self, world: World) -> Iterator[World]:
        """Makes a whole copy at the end of the generation, or returns to the last one, see `TrainingState.bind`."""
        self._world = world
        try:
            yield world
            self.snapshot()
        except PeerLostError:
            self._fall_back()
            raise

    def _fall_back(self) -> None:
        """Returns to the newest state that this rank has by itself, its whole copy."""
        self.step = self._whole.step if self._whole is not None else NO_STATE

    def share(self, world: World, restore: Callable[[], None], was_broken: bool = False) -> list[int]:
        """Gives all ranks the newest whole copy and its parts, see `TrainingState.share`.

        Whole copies are not compared: each was made after all ranks had checked for errors.
        """
        del was_broken
        newest = self._peer_replicas.newest(world, self.step)
        if newest is not None:
            self.step, self._whole = newest[0], Snapshot(newest[0], *newest[1])
        steps = gather(self.step, world)
        if max(steps) == NO_STATE and world.rank == 0:
            restore()
        source = steps.index(max(steps))
        if world.rank == source:
            self._whole = self._local_copy()
        self._whole = self._send_whole(source, ranks_without_state(steps, source))
        self.step = self._whole.step
        self._load_part(self._whole)
        self._peer_replicas.clear()
        return []

    def advance_schedule(self) -> None:
        """Finishes a step, see `TrainingState.advance_schedule`; a collective with `train.peer_replica`."""
        super().advance_schedule()
        if self._config.train.peer_replica and self._world.size > 1:
            self._peer_replicas.keep(self.step, self._local_part(), self._world, self._num_owners)

    def _local_part(self) -> Any:
        """Returns this rank's part of the state, see `PeerReplicas.keep`."""
        live = self._live()
        return live.model, live.optimizer, live.schedule, live.more

    @property
    def _num_owners(self) -> int:
        """Number of ranks with a part of the state, the first ones."""
        return self._world.size

    def _send_whole(self, source: int, to: Sequence[int]) -> Snapshot:
        """Sends the whole copy of a rank to others and returns it; a collective of these ranks.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        whole = transfer_snapshot(self._whole, self._world.rank, source, to)
        assert whole is not None
        return whole

    def _local_copy(self) -> Snapshot:
        """Returns the whole copy that this rank has by itself; without one, that of the state before the first step."""
        return self._whole if self._whole is not None else super().snapshot()

    @abstractmethod
    def _collect(self) -> Snapshot:
        """Returns a whole copy made of the parts; a collective of all ranks."""

    @abstractmethod
    def _load_part(self, whole: Snapshot) -> None:
        """Loads this rank's part of a whole copy at the start of a generation; the copy stays unchanged."""


_SHARD = "a shard"


class ShardReplica(NamedTuple):
    """A copy of one rank's part of a state, in host memory.

    Args:
        head: Everything except the tensors, pickled.
        data: The bytes of the tensors, one after the other.
    """

    head: Tensor
    data: Tensor


class PeerReplicas:
    """The parts of a state that this rank keeps in host memory: its own and that of the rank before it.

    It keeps the parts of the newest two steps, since some ranks may have finished a step that others have not: no rank
    begins the next step before all have the parts of this one.
    """

    def __init__(self) -> None:
        self._versions: deque[tuple[int, int, dict[int, ShardReplica]]] = deque()
        """Step, number of parts of the state, and the parts that this rank keeps, by their owner."""

    def clear(self) -> None:
        """Drops all parts, because every rank has a whole copy."""
        self._versions.clear()

    def keep(self, step: int, part: Any, world: World, owners: int) -> None:
        """Copies this rank's part of a step and exchanges copies with the neighbors; a collective.

        If a peer is lost, it only logs a warning: the next step raises the error.

        Args:
            step: Finished steps.
            part: A state with shards as `DTensor`; only ranks below `owners` have one.
            world: The workers of the generation.
            owners: Number of ranks with a part, the first ones.
        """
        old = self._versions.popleft()[2] if len(self._versions) == 2 else {}
        parts: dict[int, ShardReplica] = {}
        self._versions.append((step, owners, parts))
        before, after, sends = (world.rank - 1) % world.size, (world.rank + 1) % world.size, list[P2PWork]()
        try:
            with collective():
                if world.rank < owners:
                    replica = parts[world.rank] = _pack(part, old.get(world.rank))
                    sizes = torch.tensor([replica.head.numel(), replica.data.numel()])
                    sends = [start_send(value, after) for value in (sizes, *replica)]
                if before < owners:
                    sizes = torch.empty(2, dtype=torch.int64)
                    receive(sizes, before)
                    head = torch.empty(int(sizes[0]), dtype=torch.uint8)
                    data = _reuse_memory(int(sizes[1]), old.get(before))
                    receive(head, before)
                    receive(data, before)
                    parts[before] = ShardReplica(head, data)
                for work in sends:
                    work.wait()
        except PeerLostError as error:
            logger.warning("No second copy of the state of step %d: %s", step, error)

    def newest(self, world: World, step: int) -> tuple[int, Any] | None:
        """Assembles the newest state of which no part is lost, on one rank; a collective of all ranks.

        Args:
            world: The workers of the generation.
            step: Step of this rank's state without the replicas.

        Returns:
            Step and state, on the CPU, on one rank; None on the others, or if no such state is newer than that of any
            rank.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        local_versions = [
            (version_step, owners, {owner: [v.numel() for v in part] for owner, part in parts.items()})
            for version_step, owners, parts in self._versions
        ]
        offers = gather((step, local_versions), world)
        # For each step and number of parts: the first rank that keeps each owner's part, and the part's sizes.
        ranks_with_part: dict[tuple[int, int], dict[int, tuple[int, list[int]]]] = {}
        for rank, (_, versions) in enumerate(offers):
            for version_step, owners, parts in versions:
                for owner, sizes in parts.items():
                    ranks_with_part.setdefault((version_step, owners), {}).setdefault(owner, (rank, sizes))
        max_step = max(rank_step for rank_step, _ in offers)
        complete = [key for key, by_owner in ranks_with_part.items() if len(by_owner) == key[1] and key[0] > max_step]
        if not complete:
            return None
        newest_step, owners = max(complete)
        by_owner = ranks_with_part[newest_step, owners]
        target = by_owner[0][0]
        local_parts = next((parts for at, _, parts in self._versions if at == newest_step), {})
        assembled = []
        with collective():
            for owner in range(owners):
                rank, sizes = by_owner[owner]
                part = (
                    local_parts[owner]
                    if rank == world.rank
                    else ShardReplica(*(torch.empty(size, dtype=torch.uint8) for size in sizes))
                )
                for value in part if rank != target else ():
                    if world.rank == rank:
                        send(value, target)
                    elif world.rank == target:
                        receive(value, rank)
                assembled.append(part)
        return (newest_step, _join([_unpack(part) for part in assembled])) if world.rank == target else None


def _reuse_memory(size: int, old: ShardReplica | None) -> Tensor:
    """Returns memory of `size` bytes, that of an older part if it fits: memory that was touched before is faster."""
    return old.data if old is not None and old.data.numel() == size else torch.empty(size, dtype=torch.uint8)


def _pack(state: Any, old: ShardReplica | None) -> ShardReplica:
    tensors: list[Tensor] = []
    head = bytearray(pickle.dumps(extract_tensors(_mark_shards(state), tensors)))
    data, at = _reuse_memory(sum(t.nbytes for t in tensors), old), 0
    for t in tensors:
        data[at : at + t.nbytes].copy_(t.detach().reshape(-1).view(torch.uint8))
        at += t.nbytes
    return ShardReplica(torch.frombuffer(head, dtype=torch.uint8), data)


def _unpack(part: ShardReplica) -> Any:
    tensors: list[Tensor] = []
    state, at = insert_tensors(pickle.loads(part.head.numpy().tobytes()), tensors), 0
    for t in tensors:
        t.view(-1).view(torch.uint8).copy_(part.data[at : at + t.nbytes])
        at += t.nbytes
    return state


def _mark_shards(value: Any) -> Any:
    """Returns a state with plain tensors, and a dictionary with the key `_SHARD` around each shard."""
    if isinstance(value, Tensor):
        return {_SHARD: value.to_local()} if hasattr(value, "to_local") else value
    if isinstance(value, dict):
        return {k: _mark_shards(v) for k, v in value.items()}
    return type(value)(_mark_shards(v) for v in value) if isinstance(value, list | tuple) else value


def _join(parts: Sequence[Any]) -> Any:
    """Returns the whole state from those of every rank, which differ only in their shards."""
    first = parts[0]
    if isinstance(first, dict) and first.keys() == {_SHARD}:
        return torch.cat([part[_SHARD] for part in parts])
    if isinstance(first, dict):
        return {k: _join([part[k] for part in parts]) for k in first}
    if isinstance(first, list | tuple):
        return type(first)(_join(values) for values in zip(*parts, strict=True))
    return first
