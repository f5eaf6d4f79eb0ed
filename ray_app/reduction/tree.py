"""Addition in one fixed binary tree, so that a sum is bit-identical for every assignment of its terms to ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ray_app.plan.assignment import Node, split_point


def tree_parents(logical_workers: int) -> dict[Node, Node]:
    """Returns the parent of every node of the tree except the root."""
    parents: dict[Node, Node] = {}

    def descend(node: Node) -> None:
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

    Attributes:
        nodes: The nodes with a sum that has not been added to another one yet, and these sums, from left to right.
    """

    def __init__(self, parents: dict[Node, Node], total: Tensor | None = None) -> None:
        self._parents, self._total = parents, total
        self.nodes: list[tuple[Node, Tensor]] = []

    def push(self, node: Node, value: Tensor) -> list[Tensor]:
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
            torch.add(low, high, out=out)
            freed.append(high)
            self.nodes[-2:] = [(parent, out)]
        return freed

    def clear(self) -> list[Tensor]:
        """Drops all nodes and returns their tensors."""
        tensors = [value for _, value in self.nodes]
        self.nodes = []
        return tensors
