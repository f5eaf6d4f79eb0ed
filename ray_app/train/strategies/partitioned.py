"""What a rank alone has of a state, kept by the next rank, too, so that the death of one of them loses nothing.

Training state that no rank alone has all of while a generation steps, and the whole copies that it is made of again.
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

_SHARD = "a shard"


class ShardReplica(NamedTuple):
    """What one rank has of the state of a step: everything but tensors, pickled, and their bytes one after the other,
    on the CPU.
    """

    head: Tensor
    data: Tensor


class PeerReplicas:
    """The parts that this rank keeps, its own and that of the rank before it, of the newest two steps.

    Two, since some may have finished a step which others have not: nobody begins the next one before all have the parts
    of this.
    """

    def __init__(self) -> None:
        self._cuts: deque[tuple[int, int, dict[int, ShardReplica]]] = deque()
        """Step, in how many parts its state is, and those that are here by their owner."""

    def clear(self) -> None:
        """Forgets all: everyone has the whole state."""
        self._cuts.clear()

    def keep(self, step: int, mine: Any, world: World, owners: int) -> None:
        """Copies this rank's part of a step and exchanges it with the neighbours; a collective, which raises nothing if
        a peer is lost.

        Args:
            step: Finished steps.
            mine: A state whose `DTensor` are shards; of ranks below `owners`.
            world: The workers of now.
            owners: How many of the first ranks have a part.
        """
        old = self._cuts.popleft()[2] if len(self._cuts) == 2 else {}
        parts: dict[int, ShardReplica] = {}
        self._cuts.append((step, owners, parts))
        before, behind, sent = (world.rank - 1) % world.size, (world.rank + 1) % world.size, list[P2PWork]()
        try:
            with collective():
                if world.rank < owners:
                    own = parts[world.rank] = _packed(mine, old.get(world.rank))
                    sizes = torch.tensor([own.head.numel(), own.data.numel()])
                    sent = [start_send(value, behind) for value in (sizes, *own)]
                if before < owners:
                    sizes = torch.empty(2, dtype=torch.int64)
                    receive(sizes, before)
                    head, data = torch.empty(int(sizes[0]), dtype=torch.uint8), _room(int(sizes[1]), old.get(before))
                    receive(head, before)
                    receive(data, before)
                    parts[before] = ShardReplica(head, data)
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
        mine = [
            (at, owners, {owner: [v.numel() for v in part] for owner, part in parts.items()})
            for at, owners, parts in self._cuts
        ]
        offers = gather((step, mine), world)
        held: dict[tuple[int, int], dict[int, tuple[int, list[int]]]] = {}
        for rank, (_, cuts) in enumerate(offers):
            for at, owners, parts in cuts:
                for owner, sizes in parts.items():
                    held.setdefault((at, owners), {}).setdefault(owner, (rank, sizes))
        whole = [
            key for key, holders in held.items() if len(holders) == key[1] and key[0] > max(at for at, _ in offers)
        ]
        if not whole:
            return None
        at, owners = max(whole)
        holders, to = held[at, owners], held[at, owners][0][0]
        own = next((parts for cut, _, parts in self._cuts if cut == at), {})
        found = []
        with collective():
            for owner in range(owners):
                rank, sizes = holders[owner]
                part = (
                    own[owner]
                    if rank == world.rank
                    else ShardReplica(*(torch.empty(size, dtype=torch.uint8) for size in sizes))
                )
                for value in part if rank != to else ():
                    if world.rank == rank:
                        send(value, to)
                    elif world.rank == to:
                        receive(value, rank)
                found.append(part)
        return (at, _joined([_unpacked(part) for part in found])) if world.rank == to else None


def _room(size: int, old: ShardReplica | None) -> Tensor:
    """Memory for so many bytes; what was touched before is quicker."""
    return old.data if old is not None and old.data.numel() == size else torch.empty(size, dtype=torch.uint8)


def _packed(state: Any, old: ShardReplica | None) -> ShardReplica:
    tensors: list[Tensor] = []
    head = bytearray(pickle.dumps(extract_tensors(_marked(state), tensors)))
    data, at = _room(sum(t.nbytes for t in tensors), old), 0
    for t in tensors:
        data[at : at + t.nbytes].copy_(t.detach().reshape(-1).view(torch.uint8))
        at += t.nbytes
    return ShardReplica(torch.frombuffer(head, dtype=torch.uint8), data)


def _unpacked(part: ShardReplica) -> Any:
    tensors: list[Tensor] = []
    state, at = insert_tensors(pickle.loads(part.head.numpy().tobytes()), tensors), 0
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


class PartitionedState(TrainingState):
    """See the module.

    Every snapshot is a collective and leaves a whole copy in the host memory of every rank. One is made at each
    checkpoint and snapshot, and at the end of a generation that ends as planned. When a peer is lost, the ranks go on
    from the newest copy that one of them has, or from what they keep of each other after every step
    (`train.peer_replica`).
    """

    is_partitioned: ClassVar[bool] = True

    def __init__(self, config: Config, task: Task, device: torch.device, total_steps: int) -> None:
        self._world = World(0, 1, 1)
        self._whole: Snapshot | None = None
        self._copies = PeerReplicas()
        super().__init__(config, task, device, total_steps)

    def snapshot(self, into: Snapshot | None = None) -> Snapshot:
        """See `TrainingState.snapshot`; a collective, unless there is a whole copy of this step already.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        del into  # should this copy fail half-way, the one before it is needed
        if self._whole is None or self._whole.step != self.step:
            with collective():
                collected = self._collected()
            check_errors_on_all_ranks(self._world)
            self._whole = collected
        return self._whole

    def load(self, snapshot: Snapshot) -> None:
        """See `TrainingState.load`; takes effect with `share`."""
        self._whole, self.step = snapshot, snapshot.step

    @contextmanager
    def bind(self, world: World) -> Iterator[World]:
        """See `TrainingState.bind`."""
        self._world = world
        try:
            yield world
            self.snapshot()
        except PeerLostError:
            self._fall_back()
            raise

    def _fall_back(self) -> None:
        """Goes back to what this rank has alone."""
        self.step = self._whole.step if self._whole is not None else NO_STATE

    def share(self, world: World, restore: Callable[[], None], was_broken: bool = False) -> list[int]:
        """See `TrainingState.share`; whole copies are not compared: they are made of what has settled on all ranks."""
        del was_broken
        found = self._copies.newest(world, self.step)
        if found is not None:
            self.step, self._whole = found[0], Snapshot(found[0], *found[1])
        steps = gather(self.step, world)
        if max(steps) == NO_STATE and world.rank == 0:
            restore()
        source = steps.index(max(steps))
        if world.rank == source:
            self._whole = self._own()
        self._whole = self._sent(source, ranks_without_state(steps, source))
        self.step = self._whole.step
        self._take(self._whole)
        self._copies.clear()
        return []

    def advance_schedule(self) -> None:
        """See `TrainingState.advance_schedule`; a collective if there are second copies."""
        super().advance_schedule()
        if self._config.train.peer_replica and self._world.size > 1:
            self._copies.keep(self.step, self._part(), self._world, self._owners)

    def _part(self) -> Any:
        """What this rank alone has of the state, see `PeerReplicas.keep`."""
        live = self._live()
        return live.model, live.optimizer, live.schedule, live.more

    @property
    def _owners(self) -> int:
        """How many of the first ranks have a part."""
        return self._world.size

    def _sent(self, source: int, to: Sequence[int]) -> Snapshot:
        """The whole copy of one rank, on it and those who get it; a collective of these.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        whole = transfer_snapshot(self._whole, self._world.rank, source, to)
        assert whole is not None
        return whole

    def _own(self) -> Snapshot:
        """A whole copy of the state that this rank has alone: that of before the first step if it has none."""
        return self._whole if self._whole is not None else super().snapshot()

    @abstractmethod
    def _collected(self) -> Snapshot:
        """Makes a whole copy; a collective of all ranks."""

    @abstractmethod
    def _take(self, whole: Snapshot) -> None:
        """Begins a generation with a state, which stays as it is."""
