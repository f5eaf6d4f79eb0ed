"""Sums in one fixed binary tree, which are bit-identical for every assignment of their terms to ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ray_app.plan.assignment import TreeNode, split_point, subtrees
from ray_app.torch_private import foreach_add_


def tree_parents(logical_workers: int) -> dict[TreeNode, TreeNode]:
    """Returns the parent of every node of the tree except the root."""
    parents: dict[TreeNode, TreeNode] = {}

    def descend(node: TreeNode) -> None:
        if node[1] - node[0] > 1:
            for child in ((node[0], split_point(node)), (split_point(node), node[1])):
                parents[child] = node
                descend(child)

    descend((0, logical_workers))
    return parents


class TreeSum:
    """Adds tensors in the tree as they are pushed from left to right; keeps at most log2(terms) + 1 tensors at a time.

    A tensor that is pushed belongs to the tree, because each sum is written into its left operand. So the sum of the
    whole tree is in the tensor of the leftmost node, unless `total` is given.

    Args:
        parents: The tree, see `tree_parents`.
        total: The tensor into which the last addition, that of the root, writes; it may be one of the terms.
        add: Adds two terms, as `torch.add` does; the terms may be lists of tensors if it takes lists.

    Attributes:
        nodes: The nodes with a sum that has not been added to another one yet, and these sums, from left to right.
    """

    def __init__(
        self, parents: dict[TreeNode, TreeNode], total: Tensor | None = None, add: Callable[..., Any] = torch.add
    ) -> None:
        self._parents, self._total = parents, total
        self._add = add
        self.nodes: list[tuple[TreeNode, Any]] = []

    def push(self, node: TreeNode, value: Any) -> list[Any]:
        """Adds the tensor of the next node and returns the tensors that the tree no longer needs.

        Args:
            node: The node to the right of all that were pushed before.
            value: The sum of the node.
        """
        freed = []
        self.nodes.append((node, value))
        while len(self.nodes) > 1:
            (left, low), (right, high) = self.nodes[-2:]
            # Two neighbors are added only if they are the two children of one node.
            if left not in self._parents or self._parents.get(left) != self._parents.get(right):
                break
            parent = self._parents[left]
            # Only the root has no parent.
            out = low if self._total is None or parent in self._parents else self._total
            self._add(low, high, out=out)
            freed.append(high)
            self.nodes[-2:] = [(parent, out)]
        return freed

    def clear(self) -> list[Any]:
        """Drops all nodes and returns their tensors."""
        tensors = [value for _, value in self.nodes]
        self.nodes = []
        return tensors


def add_lists(left: list[Tensor], right: list[Tensor], out: list[Tensor]) -> None:
    """Adds tensors to others, `out`, which are `left`; a device does so by one launch for many tensors."""
    del left
    foreach_add_(out, right)


@cache
def are_rows(nodes: tuple[TreeNode, ...], logical_workers: int) -> bool:
    """Returns whether `add_rows` adds the sums of nodes to that of one node.

    They are then neighbors that together are a node, and hold the same power of two of logical workers each, but for
    the last one, which may hold fewer.
    """
    (low, first_high), high = nodes[0], nodes[-1][1]
    size = first_high - low
    is_even = size & (size - 1) == 0 and nodes == tuple((at, min(at + size, high)) for at in range(low, high, size))
    return is_even and subtrees(range(low, high), logical_workers) == [(low, high)]


def add_rows(rows: Tensor, total: Tensor | None = None) -> Tensor:
    """Returns the sum of rows of shape (rows, elements) in the tree, by log2(rows) additions of several rows at a time.

    In each round every second row is added to the row before it, which are the additions of `TreeSum`, since a node of
    the tree splits at a power of two. The rows are overwritten.

    Args:
        rows: The sums of neighboring nodes, see `are_rows`.
        total: The tensor into which the last addition writes; None for the first row.
    """
    while len(rows) > 1:
        left, right = rows[: len(rows) // 2 * 2 : 2], rows[1::2]
        if len(rows) == 2 and total is not None:
            return torch.add(left[0], right[0], out=total)
        left.add_(right)
        rows = rows[::2]
    return rows[0] if total is None else total.copy_(rows[0])
