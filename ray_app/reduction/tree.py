"""Adding in one fixed binary tree, so that the bits of a sum depend on the number of its terms only."""

from __future__ import annotations

import torch
from torch import Tensor

from ray_app.plan.assignment import Node, middle


def tree_parents(logical_workers: int) -> dict[Node, Node]:
    """The parent of every node of the tree except the root."""
    found: dict[Node, Node] = {}

    def descend(node: Node) -> None:
        if node[1] - node[0] > 1:
            for child in ((node[0], middle(node)), (middle(node), node[1])):
                found[child] = node
                descend(child)

    descend((0, logical_workers))
    return found


class TreeSum:
    """Adds tensors in the tree as they arrive from left to right; holds at most log2(terms) + 1 of them.

    Sums are made in place in the left operand, so tensors that are pushed belong to the tree; the sum of a whole tree
    ends in the tensor of its leftmost node.

    Args:
        parent: The tree, see `tree_parents`.
        total: Where the sum of the whole tree goes instead; it may be one of the terms.
    """

    def __init__(self, parent: dict[Node, Node], total: Tensor | None = None) -> None:
        self._parent, self._total = parent, total
        self.nodes: list[tuple[Node, Tensor]] = []

    def push(self, node: Node, value: Tensor) -> list[Tensor]:
        """Adds the next node's value.

        Returns:
            The tensors that are free again.
        """
        freed = []
        self.nodes.append((node, value))
        while len(self.nodes) > 1:
            (left, low), (right, high) = self.nodes[-2:]
            if left not in self._parent or self._parent.get(left) != self._parent.get(right):
                break
            both = self._parent[left]
            into = low if self._total is None or both in self._parent else self._total
            torch.add(low, high, out=into)
            freed.append(high)
            self.nodes[-2:] = [(both, into)]
        return freed

    def clear(self) -> list[Tensor]:
        """Forgets all nodes and returns their tensors."""
        tensors = [value for _, value in self.nodes]
        self.nodes = []
        return tensors
