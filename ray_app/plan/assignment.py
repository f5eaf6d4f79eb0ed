"""The assignment of logical workers to ranks, and the fixed tree in which their gradients are added.

A node of the tree is a half-open range [low, high) of logical workers; its left part is the largest power of two below
its size. So any 2^k logical workers from a multiple of 2^k on are a node, for every L, and a rank that runs such a
block sends one sum. The tree depends on the number of logical workers only, never on the assignment.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import accumulate, pairwise

TreeNode = tuple[int, int]


def logical_workers_of(rank: int, world_size: int, logical_workers: int, strided: bool = False) -> range:
    """Returns the logical workers that a rank runs: a contiguous block, or every W-th one.

    Each logical worker belongs to one rank, and the numbers of the ranks differ by at most one.

    Raises:
        ValueError: The world size is not between 1 and the number of logical workers, or the rank not in the world.
    """
    if not 1 <= world_size <= logical_workers or not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size} cannot run {logical_workers} logical workers")
    if strided:
        return range(rank, logical_workers, world_size)
    return range(rank * logical_workers // world_size, (rank + 1) * logical_workers // world_size)


def blocks_by_speed(seconds: Sequence[float], logical_workers: int) -> tuple[range, ...]:
    """Returns the block of each rank, at least one, for which the last rank finishes earliest."""
    # The heap says when each rank would finish with one logical worker more.
    ends = [(2 * duration_s, rank) for rank, duration_s in enumerate(seconds)]
    sizes = [1] * len(ends)
    heapq.heapify(ends)
    for _ in range(logical_workers - len(sizes)):
        _, rank = ends[0]
        sizes[rank] += 1
        heapq.heapreplace(ends, ((sizes[rank] + 1) * seconds[rank], rank))
    return tuple(range(low, high) for low, high in pairwise(accumulate(sizes, initial=0)))


def split_point(node: TreeNode) -> int:
    """Returns the logical worker at which a node of two or more splits."""
    return node[0] + (1 << (node[1] - node[0] - 1).bit_length() - 1)


def subtrees(block: range, logical_workers: int) -> list[TreeNode]:
    """Returns the largest nodes of the tree that lie in a block, from left to right; together they are the block."""

    def collect(node: TreeNode) -> list[TreeNode]:
        low, high = node
        if block.start <= low and high <= block.stop:
            return [node]
        if high <= block.start or block.stop <= low:
            return []
        return [*collect((low, split_point(node))), *collect((split_point(node), high))]

    return collect((0, logical_workers))


def count_passes(world_size: int, logical_workers: int) -> int:
    """Returns the micro-batches per step of the busiest worker, ceil(L / W), which decide the time of a step."""
    return -(-logical_workers // world_size)
