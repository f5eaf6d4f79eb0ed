"""Transports of shards between the ranks of a stage, messages between two ranks, and sums of integers over all ranks.

Messages between two ranks go through host memory. By default a wait for such a message has the time-out with which the
group was formed, because a time-out that is set for the group later counts for collectives only (gloo in torch 2.15).
A peer that takes longer than that is not lost: the rendezvous decides which peers are lost. So every wait here has a
time-out of its own, one day.

`sum_over_ranks` uses recursive doubling as in Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005: about log2 W rounds, while a ring needs two rounds per rank. The order of its additions does
not matter, because only integers are added. A rank that has the sum knows that all ranks have started the call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ray_app.reduction.peer_errors import collective
from ray_app.reduction.world import Stage, World

_WAIT_TIMEOUT = timedelta(days=1)


class P2PWork:
    """A message that is being sent or received.

    Args:
        work: PyTorch's handle of the message.
        value: The tensor that is sent or received into. This object keeps it alive while the message is in progress.
    """

    def __init__(self, work: Any, value: Tensor) -> None:
        self._work, self._value = work, value

    def wait(self) -> None:
        """Waits until the message has been received, or has been sent and `value` may be overwritten.

        Raises:
            RuntimeError: The peer is lost; `reduction.peer_errors.collective` turns this into `PeerLostError`.
        """
        self._work.wait(_WAIT_TIMEOUT)


def start_send(value: Tensor, peer: int, tag: int = 0, group: Any = None) -> P2PWork:
    """Starts to send a tensor; messages to one rank with the same tag arrive in the order of the calls.

    Args:
        value: The tensor.
        peer: The rank to send to.
        tag: Any number; the receiver has to pass the same one.
        group: The process group; None is torch's default group.
    """
    group = group if group is not None else dist.group.WORLD
    return P2PWork(group.send([value], peer, tag), value)


def start_receive(value: Tensor, peer: int, tag: int = 0, group: Any = None) -> P2PWork:
    """Starts to receive a tensor from a peer into `value`, see `start_send`."""
    group = group if group is not None else dist.group.WORLD
    return P2PWork(group.recv([value], peer, tag), value)


def receive(value: Tensor, peer: int) -> None:
    """Receives a tensor into `value` and waits until it is complete."""
    start_receive(value, peer).wait()


class BufferPool:
    """Buffers by name, each of which is allocated by the first call for its name and reused in every step."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._buffers = device, dict[str, Tensor]()

    def get(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns the one-dimensional buffer of a name; every call for a name has to pass the same size and dtype."""
        if name not in self._buffers:
            self._buffers[name] = torch.empty(numel, dtype=dtype, device=self._device)
        return self._buffers[name]


def split_sizes(counts: list[int]) -> list[int] | None:
    """Returns the sizes for an all-to-all of which these are the elements for each rank; None if they are equal.

    Without sizes NCCL runs one collective instead of a message for each rank.
    """
    return counts if len({*counts}) > 1 else None


class CollectiveTransport:
    """A transport of shards by the collectives of process groups, which all ranks have to start in the same order.

    Each `scatter` or `gather` needs a `wait` before the next one.

    Args:
        pool: Memory for the shards that are sent and received.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._get_buffer = pool.get
        self._work: Any = None

    def scatter(self, sums: Sequence[Tensor], stage: Stage, group: Any) -> Sequence[Tensor] | Tensor:
        """Starts to send every rank of the stage its shard of each of this rank's sums.

        Returns:
            This rank's shards of the sums of all ranks of the stage, in the order of `stage.nodes`; they are complete
            after `wait`. They are the rows of one tensor if they are in one piece of memory.
        """
        ranks, nodes = len(stage.ranks), len(sums)
        shard = sums[0].numel() // ranks
        outgoing = sums[0]
        if nodes > 1:
            # All shards for one rank have to be contiguous, so they are copied rank by rank, and within a rank node by
            # node.
            outgoing = self._get_buffer(f"to {stage.ranks}", nodes * ranks * shard, outgoing.dtype)
            torch.stack([value.view(ranks, shard) for value in sums], 1, out=outgoing.view(ranks, nodes, shard))
        counts = [len(sent) * shard for sent in stage.nodes]
        received = self._get_buffer(f"from {stage.ranks}", sum(counts), outgoing.dtype)
        sizes = split_sizes(counts), split_sizes([nodes * shard] * ranks)
        self._work = dist.all_to_all_single(received, outgoing, *sizes, group=group, async_op=True)
        return received.view(sum(map(len, stage.nodes)), shard)

    def gather(self, shard: Tensor, whole: Tensor, stage: Stage, group: Any) -> None:
        """Starts to gather the shards of all ranks of the stage in `whole`, which is complete after `wait`.

        `shard` is the shard of this rank, and may be the part of `whole` in which it belongs.
        """
        self._work = dist.all_gather_into_tensor(whole, shard, group=group, async_op=True)

    def wait(self) -> None:
        """Waits for the transfers that have started; on a device, makes the current stream wait for them."""
        self._work.wait()


class DirectTransport:
    """A transport by messages between two ranks, from the tensors of one rank into those of the other.

    gloo's collectives gather into memory of their own and copy from it, and all ranks have to start them in the same
    order. Here no such copy is made, and each rank may start its buckets in any order. One tag for each bucket is
    enough, because any two ranks share one stage only, and messages with the same tag arrive in the order of sending.

    Args:
        pool: Memory for the shards that are received.
        rank: This rank.
        number: The index of the bucket, the same on all ranks.
    """

    def __init__(self, pool: BufferPool, rank: int, number: int) -> None:
        self._get_buffer = pool.get
        self._rank = rank
        self._tag = number + 1
        # The group is bound here, because a helper thread may outlive its generation and must not send in the group of
        # a later one.
        self._group = dist.group.WORLD
        self._pending: list[P2PWork] = []

    def scatter(self, sums: Sequence[Tensor], stage: Stage, group: Any) -> list[Tensor]:
        """See `CollectiveTransport.scatter`; this rank's shards of its own sums are not copied."""
        outgoing = [value.chunk(len(stage.ranks)) for value in sums]
        shard_size = outgoing[0][0].numel()
        shards: list[Tensor] = []
        for position, (peer, nodes) in enumerate(zip(stage.ranks, stage.nodes, strict=True)):
            if peer == self._rank:
                shards += [parts[position] for parts in outgoing]
                continue
            arriving = self._get_buffer(f"from {peer}", len(nodes) * shard_size, sums[0].dtype).chunk(len(nodes))
            self._pending += [start_receive(value, peer, self._tag, self._group) for value in arriving]
            self._pending += [start_send(parts[position], peer, self._tag, self._group) for parts in outgoing]
            shards += arriving
        return shards

    def gather(self, shard: Tensor, whole: Tensor, stage: Stage, group: Any) -> None:
        """See `CollectiveTransport.gather`."""
        for peer, part in zip(stage.ranks, whole.chunk(len(stage.ranks)), strict=True):
            if peer != self._rank:
                self._pending += [
                    start_receive(part, peer, self._tag, self._group),
                    start_send(shard, peer, self._tag, self._group),
                ]
            elif part.data_ptr() != shard.data_ptr():
                part.copy_(shard)

    def wait(self) -> None:
        """See `CollectiveTransport.wait`."""
        pending, self._pending = self._pending, []
        for work in pending:
            work.wait()


MAX_RING_RANKS = 16
"""The largest number of ranks for which torch's ring all-reduce is as fast as recursive doubling."""


@dataclass(frozen=True)
class DoublingRound:
    """The part of one rank in a round of recursive doubling.

    Args:
        peer: The rank with which this rank communicates.
        sends: Whether this rank sends its value to the peer.
        receives: Whether this rank receives the peer's value.
        adds: Whether this rank adds the received value to its value; otherwise the received value replaces it.
    """

    peer: int
    sends: bool = True
    receives: bool = True
    adds: bool = True


def doubling_rounds(rank: int, size: int) -> list[DoublingRound]:
    """Returns the rounds of a rank in recursive doubling over `size` ranks.

    The doubling itself needs a power of two. If `size` exceeds the largest power of two below it by n, the first 2 n
    ranks form n pairs. The even rank of each pair sends its value to the odd one in the first round, takes no part in
    the doubling, and receives the sum in the last round.
    """
    # The largest power of two that is not above `size`, and the number of ranks that form pairs.
    power = 1 << (size.bit_length() - 1)
    paired = 2 * (size - power)
    if rank < paired and rank % 2 == 0:
        return [DoublingRound(rank + 1, receives=False), DoublingRound(rank + 1, sends=False, adds=False)]
    # The ranks that take part in the doubling are numbered from 0 to power - 1.
    index = rank // 2 if rank < paired else rank - (size - power)
    others = [index ^ (1 << bit) for bit in range(power.bit_length() - 1)]
    rounds = [DoublingRound(2 * other + 1 if 2 * other < paired else other + size - power) for other in others]
    if rank < paired:
        return [DoublingRound(rank - 1, sends=False), *rounds, DoublingRound(rank - 1, receives=False)]
    return rounds


def sum_over_ranks(value: Tensor, world: World) -> Tensor:
    """Returns the sum of a tensor of integers over all ranks; a collective.

    Args:
        value: The integers of this rank, in host memory; the call may overwrite them.
        world: The workers of the generation.

    Raises:
        PeerLostError: A peer left meanwhile.
    """
    with collective():
        if world.size <= MAX_RING_RANKS:
            dist.all_reduce(value)
            return value
        for doubling_round in doubling_rounds(world.rank, world.size):
            received = torch.empty_like(value)
            pending = [start_send(value, doubling_round.peer)] if doubling_round.sends else []
            pending += [start_receive(received, doubling_round.peer)] if doubling_round.receives else []
            for work in pending:
                work.wait()
            if doubling_round.receives:
                value = value + received if doubling_round.adds else received
    return value
