"""`World` is one worker's view of its generation, and `plan_stages` decides how partial sums travel.

They travel first within each host, then between the hosts, so that little crosses the network. In a stage each rank of
a group cuts its sums into as many shards as the group has ranks, receives one shard of the sums of every rank of the
group, and adds these shards in the tree. After the last stage each rank has one shard of the total; then the shards are
gathered, from the last stage to the first. Two stages are the hierarchical all-reduce of Jia et al., "Highly Scalable
Deep Learning Training System with Mixed-Precision", 2018, with additions in one fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ray_app.plan.assignment import TreeNode, logical_workers_of, subtrees


@dataclass(frozen=True)
class Stage:
    """One stage of the reduction, from the view of one rank.

    Args:
        ranks: The ranks that send shards to each other in this stage, including this one, in ascending order.
        nodes: For each of these ranks, the nodes of the tree for which it has sums before the stage.
    """

    ranks: tuple[int, ...]
    nodes: tuple[tuple[TreeNode, ...], ...]

    @cached_property
    def all_nodes(self) -> tuple[TreeNode, ...]:
        """The nodes of all ranks, from left to right."""
        return tuple(node for nodes in self.nodes for node in nodes)


def stage_groups(hosts: Sequence[str]) -> list[list[tuple[int, ...]]]:
    """Returns for each stage the groups of ranks that send shards to each other.

    There are two stages if all hosts have the same number of ranks, more than one, and the ranks of each host are
    consecutive: first one group per host, then one group for each local rank. Otherwise one stage has all ranks.

    Args:
        hosts: The host of every rank.
    """
    size, per_host = len(hosts), hosts.count(hosts[0])
    if not 1 < per_host < size or list(hosts) != [host for host in dict.fromkeys(hosts) for _ in range(per_host)]:
        return [[tuple(range(size))]]
    within = [tuple(range(first, first + per_host)) for first in range(0, size, per_host)]
    return [within, list(zip(*within, strict=True))]


def plan_stages(rank: int, hosts: Sequence[str], logical_workers: int, assignment: Sequence[range] = ()) -> list[Stage]:
    """Returns the stages in which a rank takes part, in their order.

    Args:
        rank: The rank.
        hosts: The host of every rank.
        logical_workers: L, the number of logical workers.
        assignment: The block of logical workers of every rank; if empty, the blocks are as equal as possible.
    """
    # A block holds the logical workers over which a rank has sums; it grows with each stage.
    blocks = list(assignment) or [logical_workers_of(r, len(hosts), logical_workers) for r in range(len(hosts))]
    stages = []
    for groups in stage_groups(hosts):
        [ranks] = (group for group in groups if rank in group)
        stages.append(Stage(ranks, tuple(tuple(subtrees(blocks[r], logical_workers)) for r in ranks)))
        # After the stage every rank of a group has sums over the logical workers of the whole group, of its own shard.
        for group in groups:
            for r in group:
                blocks[r] = range(blocks[group[0]].start, blocks[group[-1]].stop)
    return stages


@dataclass(frozen=True)
class World:
    """The workers of a generation, from the view of one of them.

    Args:
        rank: The rank of this worker.
        size: W, the number of workers.
        logical_workers: L, the number of logical workers.
        hosts: The host of every rank; if empty, all ranks count as one host.
        groups: The process group of this rank in each stage of the reduction, see `plan_stages`. None stands for
            torch's default group, and for a stage that sends messages from rank to rank and so needs no group.
        strided: Whether each rank runs every W-th logical worker instead of a block. Then the logical workers that the
            ranks run at the same time are neighbors in the tree.
        assignment: The block of logical workers of every rank; if empty, the blocks are as equal as possible.
        has_device_collectives: Whether the device carries the collectives of tensors on it (NCCL), not the host (gloo).
    """

    rank: int
    size: int
    logical_workers: int
    hosts: tuple[str, ...] = ()
    groups: tuple[Any, ...] = (None,)
    strided: bool = False
    assignment: tuple[range, ...] = ()
    has_device_collectives: bool = False

    def assigned_to(self, rank: int) -> range:
        """Returns the logical workers of a rank."""
        if self.assignment:
            return self.assignment[rank]
        return logical_workers_of(rank, self.size, self.logical_workers, self.strided)

    @cached_property
    def stages(self) -> list[Stage]:
        """The stages by which the sums of this rank reach the others."""
        return plan_stages(self.rank, self.hosts or ("",) * self.size, self.logical_workers, self.assignment)

    @cached_property
    def assigned(self) -> range:
        """The logical workers of this rank."""
        return self.assigned_to(self.rank)
