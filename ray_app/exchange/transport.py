"""How shards of partial sums travel among the ranks of a stage of the exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ray_app.exchange.peer import Transfer, receiving, sending
from ray_app.plan.route import Stage


class Rooms:
    """Memory that is made once and is the same one in each step; by name.

    Args:
        device: Where it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._rooms = device, dict[str, Tensor]()

    def room(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Some of it, flat; always asked for as many elements of the same dtype."""
        if name not in self._rooms:
            self._rooms[name] = torch.empty(numel, dtype=dtype, device=self._device)
        return self._rooms[name]


class Transport(Protocol):
    """The way of a bucket: `scatter` or `gather`, then `wait`, then the next."""

    def scatter(self, sums: Sequence[Tensor], stage: Stage, group: Any) -> list[Tensor]:
        """Sends everybody in the stage its shard of each of the sums that this rank holds.

        Returns:
            This rank's shards of what all hold, in the order of `stage.held`; they are there after `wait`.
        """

    def gather(self, shard: Tensor, whole: Tensor, stage: Stage, group: Any) -> None:
        """Puts the shards of all in the stage together in `whole`, where they are after `wait`; this rank's may be there already."""

    def wait(self) -> None:
        """Waits for what was begun; on a device, what computes from now on does."""


class CollectiveTransport(Transport):
    """By the collectives of the process group, which all ranks have to begin in the same order."""

    def __init__(self, rooms: Rooms) -> None:
        self._room = rooms.room
        self._work: Any = None

    def scatter(self, sums: Sequence[Tensor], stage: Stage, group: Any) -> list[Tensor]:
        """See `Transport`."""
        parts, held = len(stage.ranks), len(sums)
        shard = sums[0].numel() // parts
        outgoing = sums[0]
        if held > 1:  # rank by rank, then node by node
            outgoing = self._room(f"to {stage.ranks}", held * parts * shard, outgoing.dtype)
            torch.stack([value.view(parts, shard) for value in sums], 1, out=outgoing.view(parts, held, shard))
        counts = [len(nodes) * shard for nodes in stage.held]
        received = self._room(f"from {stage.ranks}", sum(counts), outgoing.dtype)
        self._work = dist.all_to_all_single(received, outgoing, counts, [held * shard] * parts, group=group, async_op=True)
        return list(received.chunk(sum(map(len, stage.held))))

    def gather(self, shard: Tensor, whole: Tensor, stage: Stage, group: Any) -> None:
        """See `Transport`."""
        self._work = dist.all_gather_into_tensor(whole, shard, group=group, async_op=True)

    def wait(self) -> None:
        """See `Transport`."""
        self._work.wait()


class DirectTransport(Transport):
    """From rank to rank in the hosts' memory, from where a value is to where it belongs, in whatever order each rank comes to it.

    gloo's collectives gather into memory of their own and copy, and want the same order on all ranks. Two ranks meet in one stage only, and
    what one sends the other under a tag arrives in that order, so a tag for each bucket tells everything apart.

    Args:
        rooms: For what arrives.
        rank: This one.
        number: Of the bucket, on all ranks the same.
    """

    def __init__(self, rooms: Rooms, rank: int, number: int) -> None:
        self._room, self._rank, self._tag = rooms.room, rank, number + 1
        self._group = dist.group.WORLD  # not that of a later generation, which a thread that is left behind would write into
        self._begun: list[Transfer] = []

    def scatter(self, sums: Sequence[Tensor], stage: Stage, group: Any) -> list[Tensor]:
        """See `Transport`; what this rank holds of its own shard stays where it is."""
        own = [value.chunk(len(stage.ranks)) for value in sums]
        shard, like = own[0][0].numel(), sums[0]
        found: list[Tensor] = []
        for place, (peer, nodes) in enumerate(zip(stage.ranks, stage.held, strict=True)):
            if peer == self._rank:
                found += [parts[place] for parts in own]
                continue
            arriving = self._room(f"from {peer}", len(nodes) * shard, like.dtype).chunk(len(nodes))
            self._begun += [receiving(value, peer, self._tag, self._group) for value in arriving]
            self._begun += [sending(parts[place], peer, self._tag, self._group) for parts in own]
            found += arriving
        return found

    def gather(self, shard: Tensor, whole: Tensor, stage: Stage, group: Any) -> None:
        """See `Transport`."""
        for peer, place in zip(stage.ranks, whole.chunk(len(stage.ranks)), strict=True):
            if peer != self._rank:
                self._begun += [receiving(place, peer, self._tag, self._group), sending(shard, peer, self._tag, self._group)]
            elif place.data_ptr() != shard.data_ptr():
                place.copy_(shard)

    def wait(self) -> None:
        """See `Transport`."""
        begun, self._begun = self._begun, []
        for transfer in begun:
            transfer.wait()
