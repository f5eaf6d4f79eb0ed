"""Copies of the parts of a partitioned state in the memory of the ranks.

While a generation steps, each rank has only a part of such a state. With `train.peer_replica` every rank also keeps a
copy of the part of the rank before it, so that the loss of one rank loses no step (`PeerReplicas`). A `PeerTensor` is a
tensor with rows in the copies of several ranks; `read_rows` gives each rank the rows that it needs of it, or of a
tensor in a checkpoint.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ray_app.checkpoint.format import StoredTensor, is_rows, make_rows, map_tensors
from ray_app.errors import PeerLostError
from ray_app.reduction.messages import gather, receive_value, start_send_value
from ray_app.reduction.peer_errors import collective
from ray_app.reduction.transport import P2PWork, receive, start_receive, start_send
from ray_app.reduction.world import World
from ray_app.train.state.transfer import aligned_bytes, extract_tensors, insert_tensors, make_views

logger = logging.getLogger(__name__)


class ShardReplica(NamedTuple):
    """A copy of one rank's part of a state, in host memory.

    Args:
        head: Everything except the tensors.
        data: The bytes of the tensors, one after the other, each of them aligned.
    """

    head: Any
    data: Tensor

    @classmethod
    def pack(cls, state: Any, old: ShardReplica | None = None) -> ShardReplica:
        """Returns a copy of a rank's part of a state, in the memory of an older copy if that fits."""
        tensors: list[Tensor] = []
        head = extract_tensors(state, tensors, lambda _: False)
        data = _reuse_memory(sum(map(aligned_bytes, tensors)), old)
        for view, tensor in zip(make_views(tensors, data.numpy()), tensors, strict=True):
            view.copy_(tensor.detach())
        return cls(head, data)

    def unpack(self) -> Any:
        """Returns the part of the state; its tensors are in the memory of this copy."""
        tensors: list[Tensor] = []
        state = insert_tensors(self.head, tensors, torch.device("meta"))
        views = make_views(tensors, self.data.numpy())

        def view(path: str, value: Any) -> Any:
            del path
            return make_rows(next(views), value["start"], value["shape"]) if is_rows(value) else next(views)

        return map_tensors(state, view)

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
        """Drops all copies; for when every rank has its part of the state again."""
        self._versions.clear()

    def store(self, step: int, part: Any, world: World, owners: int) -> None:
        """Copies this rank's part, sends the copy to the next rank and receives that of the rank before; a collective.

        If a peer is lost, the call only logs a warning, and the next step raises the error.

        Args:
            step: Finished steps.
            part: The part of this rank, see `ShardReplica.pack`; not read on ranks without a part.
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
                    parts[world.rank] = ShardReplica.pack(part, old.get(world.rank))
                    sends = parts[world.rank].start_send(after)
                if before < owners:
                    parts[before] = ShardReplica.receive(before, old.get(before))
                for work in sends:
                    work.wait()
        except PeerLostError as error:
            logger.warning("The state of step %d has no complete peer replica: %s", step, error)

    def keep_for_next(self, step: int, part: Any, world: World, leaving: Sequence[int]) -> None:
        """Copies this rank's part, and sends the copy to a rank that stays if this one leaves; a collective.

        Args:
            step: Finished steps.
            part: The part of this rank.
            world: The workers of the generation.
            leaving: The ranks that leave; not all of them.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        parts = dict(self.parts_of(step)) or {world.rank: ShardReplica.pack(part)}
        staying = [rank for rank in range(world.size) if rank not in leaving]
        with collective():
            for number, rank in enumerate(leaving):
                to = staying[number % len(staying)]
                if rank == world.rank:
                    for work in parts[rank].start_send(to):
                        work.wait()
                elif to == world.rank:
                    parts[rank] = ShardReplica.receive(rank)
        self._versions = deque([(step, world.size, parts)])

    @property
    def newest_step(self) -> int | None:
        """The newest step of which this rank keeps a copy; None without one."""
        return self._versions[-1][0] if self._versions else None

    def newest(self, world: World, step: int) -> tuple[int, list[int]] | None:
        """Returns the newest state of which a copy of every part is left; a collective of all ranks.

        Args:
            world: The workers of the generation.
            step: Step of the state that this rank has without the copies of parts.

        Returns:
            Its step, and for each part a rank that keeps it; None if no such state is newer than that of every rank.

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
        return newest_step, [ranks_with_part[newest_step, owners][owner] for owner in range(owners)]

    def parts_of(self, step: int) -> Mapping[int, ShardReplica]:
        """Returns the copies of a step that this rank keeps, by the rank that owned the part."""
        return next((parts for version_step, _, parts in self._versions if version_step == step), {})


def _reuse_memory(size: int, old: ShardReplica | None) -> Tensor:
    """Returns memory of `size` bytes: that of an older copy if it has this size, because new memory is slower."""
    return old.data if old is not None and old.data.numel() == size else torch.empty(size, dtype=torch.uint8)


class PeerTensor:
    """A tensor with rows in the memory of several ranks.

    Args:
        dtype: Its dtype.
        shape: Its whole shape.
        pieces: The first row, the number of rows and the rank of each piece.
        local: The rows of each piece that this rank sends, by the index of the piece.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        shape: torch.Size,
        pieces: Sequence[tuple[int, int, int]],
        local: Mapping[int, Tensor],
    ) -> None:
        self.dtype, self.shape = dtype, shape
        self._pieces, self._local = pieces, local

    def send_rows(self, rows_of_ranks: Sequence[range], world: World) -> Tensor:
        """Sends every rank the rows that it needs and returns those of this rank; a collective of all ranks.

        Args:
            rows_of_ranks: The rows that each rank needs.
            world: The workers of the generation.
        """
        needed, works = rows_of_ranks[world.rank], list[P2PWork]()
        received = torch.empty((len(needed), *self.shape[1:]), dtype=self.dtype)
        for index, (start, count, source) in enumerate(self._pieces):
            for rank in range(world.size) if source == world.rank else [world.rank]:
                rows = rows_of_ranks[rank]
                low, high = max(start, rows.start), min(start + count, rows.stop)
                if low >= high or not self.shape.numel():
                    continue
                target = received[low - needed.start : high - needed.start] if rank == world.rank else None
                sent = self._local[index][low - start : high - start] if source == world.rank else None
                if target is not None and sent is not None:
                    target.copy_(sent)
                elif target is not None:
                    works.append(start_receive(_as_bytes(target), source))
                elif sent is not None:
                    works.append(start_send(_as_bytes(sent), rank))
        for work in works:
            work.wait()
        return received


def _as_bytes(rows: Tensor) -> Tensor:
    return rows.reshape(-1).view(torch.uint8)


def read_rows(tensor: Any, rows_of_ranks: Sequence[range], world: World) -> Tensor:
    """Returns the rows of a tensor that this rank needs, in new memory; a collective for a `PeerTensor`.

    Args:
        tensor: A `PeerTensor`, a `StoredTensor`, or a tensor.
        rows_of_ranks: The rows that each rank needs.
        world: The workers of the generation.

    Raises:
        PeerLostError: A peer left meanwhile.
    """
    rows = rows_of_ranks[world.rank]
    if isinstance(tensor, PeerTensor):
        with collective():
            return tensor.send_rows(rows_of_ranks, world)
    if isinstance(tensor, StoredTensor):
        return tensor.read(rows.start, rows.stop)
    copied: Tensor = tensor[rows.start : rows.stop].clone()
    return copied


def read_whole(tensor: Any, world: World) -> Tensor:
    """Returns a whole tensor, which every rank needs, in new memory; a collective for a `PeerTensor`."""
    if not tensor.shape:
        return tensor.read() if isinstance(tensor, StoredTensor) else tensor.clone()
    return read_rows(tensor, [range(tensor.shape[0])] * world.size, world)
