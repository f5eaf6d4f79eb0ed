"""How shards of partial sums travel among the ranks of a stage of the exchange.

From one rank to another, in the host's memory; the waits last as long as it takes.

gloo's own waits for what one rank sends another last no longer than a group may take to form (torch 2.15: what is set
for the group later counts for collectives only), but who is late by more than that is not lost: the rendezvous knows
who is.

The sum of something small over all ranks, in as many rounds as their number doubles; what a ring needs two rounds per
rank for.

Recursive doubling as in Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH",
2005. The order of additions is nobody's business here: only integers are added. Who has the sum knows that all have
come so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ray_app.reduction.base import Stage, World, collective

_WAIT_TIMEOUT = timedelta(days=1)


class P2PWork:
    """What has begun.

    Args:
        work: As PyTorch has it.
        value: What travels, kept until it has.
    """

    def __init__(self, work: Any, value: Tensor) -> None:
        self._work, self._value = work, value

    def wait(self) -> None:
        """Returns when it has been received, or has left.

        Raises:
            RuntimeError: The peer is lost, see `exchange.collective`.
        """
        self._work.wait(_WAIT_TIMEOUT)


def start_send(value: Tensor, peer: int, tag: int = 0, group: Any = None) -> P2PWork:
    """Begins to send; what goes to the same rank under the same tag arrives in this order. `group`: not given, torch's
    default group.
    """
    group = group if group is not None else dist.group.WORLD
    return P2PWork(group.send([value], peer, tag), value)


def start_receive(value: Tensor, peer: int, tag: int = 0, group: Any = None) -> P2PWork:
    """Begins to receive into a tensor; see `start_send`."""
    group = group if group is not None else dist.group.WORLD
    return P2PWork(group.recv([value], peer, tag), value)


def send(value: Tensor, peer: int) -> None:
    """Sends, and waits until it has left."""
    start_send(value, peer).wait()


def receive(value: Tensor, peer: int) -> None:
    """Receives into a tensor."""
    start_receive(value, peer).wait()


class BufferPool:
    """Memory that is made once and is the same one in each step; by name.

    Args:
        device: Where it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._buffers = device, dict[str, Tensor]()

    def get(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Some of it, flat; always asked for as many elements of the same dtype."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty(numel, dtype=dtype, device=self._device)
        return self._buffers[name]


class Transport(Protocol):
    """The way of a bucket: `scatter` or `gather`, then `wait`, then the next."""

    def scatter(self, sums: Sequence[Tensor], stage: Stage, group: Any) -> list[Tensor]:
        """Sends everybody in the stage its shard of each of the sums that this rank holds.

        Returns:
            This rank's shards of what all hold, in the order of `stage.nodes`; they are there after `wait`.
        """

    def gather(self, shard: Tensor, whole: Tensor, stage: Stage, group: Any) -> None:
        """Puts the shards of all in the stage together in `whole`, where they are after `wait`; this rank's may be
        there already.
        """

    def wait(self) -> None:
        """Waits for what was begun; on a device, what computes from now on does."""


class CollectiveTransport(Transport):
    """By the collectives of the process group, which all ranks have to begin in the same order."""

    def __init__(self, pool: BufferPool) -> None:
        self._get_buffer = pool.get
        self._work: Any = None

    def scatter(self, sums: Sequence[Tensor], stage: Stage, group: Any) -> list[Tensor]:
        """See `Transport`."""
        parts, held = len(stage.ranks), len(sums)
        shard = sums[0].numel() // parts
        outgoing = sums[0]
        if held > 1:  # rank by rank, then node by node
            outgoing = self._get_buffer(f"to {stage.ranks}", held * parts * shard, outgoing.dtype)
            torch.stack([value.view(parts, shard) for value in sums], 1, out=outgoing.view(parts, held, shard))
        counts = [len(nodes) * shard for nodes in stage.nodes]
        received = self._get_buffer(f"from {stage.ranks}", sum(counts), outgoing.dtype)
        self._work = dist.all_to_all_single(
            received, outgoing, counts, [held * shard] * parts, group=group, async_op=True
        )
        return list(received.chunk(sum(map(len, stage.nodes))))

    def gather(self, shard: Tensor, whole: Tensor, stage: Stage, group: Any) -> None:
        """See `Transport`."""
        self._work = dist.all_gather_into_tensor(whole, shard, group=group, async_op=True)

    def wait(self) -> None:
        """See `Transport`."""
        self._work.wait()


class DirectTransport(Transport):
    """From rank to rank in the hosts' memory, from where a value is to where it belongs, in whatever order each rank
    comes to it.

    gloo's collectives gather into memory of their own and copy, and want the same order on all ranks. Two ranks meet in
    one stage only, and what one sends the other under a tag arrives in that order, so a tag for each bucket tells
    everything apart.

    Args:
        pool: For what arrives.
        rank: This one.
        number: Of the bucket, on all ranks the same.
    """

    def __init__(self, pool: BufferPool, rank: int, number: int) -> None:
        self._get_buffer, self._rank, self._tag = pool.get, rank, number + 1
        self._group = (
            dist.group.WORLD
        )  # not that of a later generation, which a thread that is left behind would write into
        self._begun: list[P2PWork] = []

    def scatter(self, sums: Sequence[Tensor], stage: Stage, group: Any) -> list[Tensor]:
        """See `Transport`; what this rank holds of its own shard stays where it is."""
        own = [value.chunk(len(stage.ranks)) for value in sums]
        shard, like = own[0][0].numel(), sums[0]
        found: list[Tensor] = []
        for place, (peer, nodes) in enumerate(zip(stage.ranks, stage.nodes, strict=True)):
            if peer == self._rank:
                found += [parts[place] for parts in own]
                continue
            arriving = self._get_buffer(f"from {peer}", len(nodes) * shard, like.dtype).chunk(len(nodes))
            self._begun += [start_receive(value, peer, self._tag, self._group) for value in arriving]
            self._begun += [start_send(parts[place], peer, self._tag, self._group) for parts in own]
            found += arriving
        return found

    def gather(self, shard: Tensor, whole: Tensor, stage: Stage, group: Any) -> None:
        """See `Transport`."""
        for peer, place in zip(stage.ranks, whole.chunk(len(stage.ranks)), strict=True):
            if peer != self._rank:
                self._begun += [
                    start_receive(place, peer, self._tag, self._group),
                    start_send(shard, peer, self._tag, self._group),
                ]
            elif place.data_ptr() != shard.data_ptr():
                place.copy_(shard)

    def wait(self) -> None:
        """See `Transport`."""
        begun, self._begun = self._begun, []
        for transfer in begun:
            transfer.wait()


MAX_RING_RANKS = 16
"""Ranks among which torch's ring is as quick."""


@dataclass(frozen=True)
class DoublingRound:
    """What one rank does in a round.

    Args:
        peer: With whom.
        sends: Whether it sends what it has.
        receives: Whether it receives.
        adds: Whether it adds what it received, or has it instead.
    """

    peer: int
    sends: bool = True
    receives: bool = True
    adds: bool = True


def doubling_rounds(rank: int, size: int) -> list[DoublingRound]:
    """What a rank does: of more ranks than a power of two the first even ones have their neighbours speak for them."""
    power = 1 << (size.bit_length() - 1)
    paired = 2 * (size - power)
    if rank < paired and rank % 2 == 0:
        return [DoublingRound(rank + 1, receives=False), DoublingRound(rank + 1, sends=False, adds=False)]
    own = rank // 2 if rank < paired else rank - (size - power)
    others = [own ^ (1 << bit) for bit in range(power.bit_length() - 1)]
    found = [DoublingRound(2 * other + 1 if 2 * other < paired else other + size - power) for other in others]
    if rank < paired:
        return [DoublingRound(rank - 1, sends=False), *found, DoublingRound(rank - 1, receives=False)]
    return found


def sum_over_ranks(mine: Tensor, world: World) -> Tensor:
    """The sum of all ranks' integers, in the host's memory; a collective.

    Raises:
        PeerLostError: A peer left meanwhile.
    """
    with collective():
        if world.size <= MAX_RING_RANKS:
            dist.all_reduce(mine)
            return mine
        for each in doubling_rounds(world.rank, world.size):
            received = torch.empty_like(mine)
            begun = [start_send(mine, each.peer)] if each.sends else []
            begun += [start_receive(received, each.peer)] if each.receives else []
            for transfer in begun:
                transfer.wait()
            if each.receives:
                mine = mine + received if each.adds else received
    return mine
