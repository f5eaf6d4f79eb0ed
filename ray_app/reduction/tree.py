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
    """Adds tensors in the tree as they are pushed from left to right; has at most log2(terms) + 1 of them at a time.

    Sums are written into the left operand, so tensors that are pushed belong to the tree; the sum of a whole tree ends
    in the tensor of its leftmost node.

    Args:
        parents: The tree, see `tree_parents`.
        total: The tensor for the sum of the whole tree instead; it may be one of the terms.

    Attributes:
        nodes: The sums that have not been added to another one yet, from left to right.
    """

    def __init__(self, parents: dict[Node, Node], total: Tensor | None = None) -> None:
        self._parents, self._total = parents, total
        self.nodes: list[tuple[Node, Tensor]] = []

    def push(self, node: Node, value: Tensor) -> list[Tensor]:
        """Adds the value of the next node; returns the tensors that are free again."""
        freed = []
        self.nodes.append((node, value))
        while len(self.nodes) > 1:
            (left, low), (right, high) = self.nodes[-2:]
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
