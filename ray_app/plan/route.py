"""By which stages the partial sums of the tree travel: within the hosts first, then between them, so that little crosses from host to host.

In a stage the ranks of a group cut what they hold into as many shards as they are; each gets its shard of what all of them hold, and adds
in the tree. After the last stage each rank has its shard of the whole sum, and the way back gathers the shards. Two stages are the
hierarchical all-reduce of Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision", 2018, with reductions in one
fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ray_app.plan.assign import Node, logical_workers_of, subtrees


@dataclass(frozen=True)
class Stage:
    """What one rank does in a stage.

    Args:
        ranks: Those who exchange with each other, itself among them, by rank.
        held: For each of them, the nodes of the tree whose sums it holds before.
    """

    ranks: tuple[int, ...]
    held: tuple[tuple[Node, ...], ...]


def groups(hosts: Sequence[str]) -> list[list[tuple[int, ...]]]:
    """For each stage the ranks of its groups.

    Args:
        hosts: The host of every rank. Two stages need hosts of equally many ranks, one host after the other; else there is one.
    """
    size, each = len(hosts), hosts.count(hosts[0])
    if not 1 < each < size or list(hosts) != [host for host in dict.fromkeys(hosts) for _ in range(each)]:
        return [[tuple(range(size))]]
    within = [tuple(range(first, first + each)) for first in range(0, size, each)]
    return [within, list(zip(*within, strict=True))]


def route(rank: int, hosts: Sequence[str], logical_workers: int, shares: Sequence[range] = ()) -> list[Stage]:
    """The stages of a rank; for `hosts` see `groups`, for `shares` `exchange.World`."""
    blocks = list(shares) or [logical_workers_of(r, len(hosts), logical_workers) for r in range(len(hosts))]
    stages = []
    for stage in groups(hosts):
        [ranks] = (group for group in stage if rank in group)
        stages.append(Stage(ranks, tuple(tuple(subtrees(blocks[r], logical_workers)) for r in ranks)))
        for group in stage:
            for r in group:
                blocks[r] = range(blocks[group[0]].start, blocks[group[-1]].stop)
    return stages
