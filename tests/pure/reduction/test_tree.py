"""The tree sum: the result depends on the number of terms only, and not on the ranks that add them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ray_app.plan.assignment import TreeNode, logical_workers_of, split_point, subtrees
from ray_app.reduction.tree import TreeSum, tree_parents

logical_counts = st.integers(1, 70)


def terms(count: int, seed: int = 0) -> list[Tensor]:
    """Returns values of very different magnitudes, so that another order of additions gives a different result."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-6, 6, count)[torch.randperm(count, generator=generator)]
    return [torch.randn(16, generator=generator) * s for s in scale]


def reference(values: list[Tensor], node: TreeNode) -> Tensor:
    """Returns the sum by the recursive definition of the tree."""
    if node[1] - node[0] == 1:
        return values[node[0]]
    return reference(values, (node[0], split_point(node))) + reference(values, (split_point(node), node[1]))


def add_nodes(nodes: list[tuple[TreeNode, Tensor]], logical_workers: int) -> list[tuple[TreeNode, Tensor]]:
    """Returns the nodes of a tree after the given ones were pushed; the given tensors do not change."""
    tree = TreeSum(tree_parents(logical_workers))
    for node, value in nodes:
        tree.push(node, value.clone())
    return tree.nodes


@given(logical_counts, st.integers(0, 5))
@settings(deadline=None)
def test_a_sum_is_bit_identical_to_that_of_the_recursive_tree(count: int, seed: int) -> None:
    values = terms(count, seed)
    [(root, total)] = add_nodes([((v, v + 1), value) for v, value in enumerate(values)], count)
    assert root == (0, count)
    assert torch.equal(total, reference(values, (0, count)))


@given(st.data(), logical_counts)
@settings(deadline=None)
def test_sums_are_bit_identical_for_every_world_size(data: st.DataObject, count: int) -> None:
    """Ranks add the terms that they own; the rest of the tree is added from their partial sums."""
    size = data.draw(st.integers(1, count))
    values = terms(count)
    partial: list[tuple[TreeNode, Tensor]] = []
    for rank in range(size):
        block = logical_workers_of(rank, size, count)
        nodes = add_nodes([((v, v + 1), values[v]) for v in block], count)
        assert [node for node, _ in nodes] == subtrees(block, count)
        partial += nodes
    [(_, total)] = add_nodes(partial, count)
    assert torch.equal(total, reference(values, (0, count)))


@given(logical_counts)
@settings(deadline=None)
def test_a_tree_sum_keeps_few_tensors_and_frees_the_others(count: int) -> None:
    values = terms(count)
    tree = TreeSum(tree_parents(count))
    freed: list[Tensor] = []
    max_tensors = 0
    for v, value in enumerate(values):
        max_tensors = max(max_tensors, len(tree.nodes) + 1)
        freed += tree.push((v, v + 1), value)
    assert max_tensors <= math.ceil(math.log2(count)) + 1
    assert {id(t) for t in freed} == {id(t) for t in values[1:]}, "all terms but the leftmost should be freed"
    assert tree.nodes[0][1] is values[0], "the sum should be computed in place of the leftmost term"
    assert tree.clear() == [values[0]]
    assert tree.nodes == []


def test_the_terms_distinguish_orders_of_addition() -> None:
    """Adding from left to right gives a different result, so the tests above can fail."""
    values = terms(13)
    assert not torch.equal(torch.stack(values).sum(0), reference(values, (0, 13)))
    total = values[0].clone()
    for value in values[1:]:
        total += value
    assert not torch.equal(total, reference(values, (0, 13)))


@pytest.mark.parametrize(
    ("block", "expected"), [(range(4), [(0, 4)]), (range(1, 4), [(1, 2), (2, 4)]), (range(2), [(0, 2)])]
)
def test_subtrees_of_four(block: range, expected: list[TreeNode]) -> None:
    assert subtrees(block, 4) == expected
