"""The sum of something small over all ranks, in as many rounds as their number doubles; what a ring needs two rounds per rank for.

Recursive doubling as in Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005. The order of
additions is nobody's business here: only integers are added. Who has the sum knows that all have come so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ray_app.exchange.exchange import World, collective
from ray_app.exchange.peer import receiving, sending

RING_AT_MOST = 16
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


def rounds(rank: int, size: int) -> list[DoublingRound]:
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


def summed(mine: Tensor, world: World) -> Tensor:
    """The sum of all ranks' integers, in the host's memory; a collective.

    Raises:
        PeerLostError: A peer left meanwhile.
    """
    with collective():
        if world.size <= RING_AT_MOST:
            dist.all_reduce(mine)
            return mine
        for each in rounds(world.rank, world.size):
            received = torch.empty_like(mine)
            begun = [sending(mine, each.peer)] if each.sends else []
            begun += [receiving(received, each.peer)] if each.receives else []
            for transfer in begun:
                transfer.wait()
            if each.receives:
                mine = mine + received if each.adds else received
    return mine
