"""The plan of the exchange: what crosses from host to host, and that the stages end in the whole sum."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ray_app.plan.assignment import Node, logical_workers_of, subtrees
from ray_app.reduction.base import Stage, plan_stages
from ray_app.reduction.tree import TreeSum, tree_parents

Held = list[tuple[Node, Tensor]]


def spread(hosts: int, each: int) -> list[str]:
    return [f"host-{rank // each}" for rank in range(hosts * each)]


def crossing(hosts: Sequence[str], logical_workers: int) -> float:
    """Bytes that leave the hosts, per host and byte of the gradient; shards are gathered by the way they came."""
    total = 0.0
    for rank, host in enumerate(hosts):
        part = 1.0
        for stage in plan_stages(rank, hosts, logical_workers):
            part /= len(stage.ranks)
            others = sum(hosts[other] != host for other in stage.ranks)
            mine = len(stage.nodes[stage.ranks.index(rank)])
            total += others * part * (mine + 1)
    return total / len(set(hosts))


def ring(hosts: Sequence[str]) -> float:
    """The same of a ring over all ranks: each host passes on all that is reduced, and all that is gathered, but for the
    last shard.
    """
    return 2 * (len(hosts) - 1) / len(hosts)


@pytest.mark.parametrize("hosts", range(2, 33))
@pytest.mark.parametrize("times", [1, 2, 4])
def test_between_hosts_goes_what_a_ring_would_send(hosts: int, times: int) -> None:
    """8 ranks each; before there were stages it was 4.5 times as much."""
    world = spread(hosts, 8)
    assert crossing(world, len(world) * times) <= 1.1 * ring(world)


def test_without_stages_it_is_more() -> None:
    world = spread(4, 8)
    assert crossing([f"{rank}" for rank in range(32)], 32) * 8 > 4 * ring(world)


@pytest.mark.parametrize("logical_workers", [3, 8, 12, 31, 48, 64, 96, 100])
def test_no_rank_sends_much_more_than_the_mean(logical_workers: int) -> None:
    """Sums and the way back, for every number of workers."""
    for size in range(2, logical_workers + 1):
        sent = [
            len(subtrees(logical_workers_of(rank, size, logical_workers), logical_workers)) + 1 for rank in range(size)
        ]
        assert max(sent) <= 1.5 * sum(sent) / size


def reduced(values: list[Tensor], hosts: Sequence[str]) -> list[Tensor]:
    """The shard of the sum that every rank has at the end."""
    count, size = len(values), len(hosts)
    held: list[Held] = [
        [((v, v + 1), values[v].clone()) for v in logical_workers_of(rank, size, count)] for rank in range(size)
    ]
    held = [in_tree(each, count) for each in held]
    routes = [plan_stages(rank, hosts, count) for rank in range(size)]
    for number in range(len(routes[0])):
        held = [after(rank, stages[number], held, count) for rank, stages in enumerate(routes)]
    assert all([node for node, _ in each] == [(0, count)] for each in held)
    return [each[0][1] for each in held]


def after(rank: int, stage: Stage, held: list[Held], count: int) -> Held:
    place, parts = stage.ranks.index(rank), len(stage.ranks)
    assert tuple(tuple(node for node, _ in held[other]) for other in stage.ranks) == stage.nodes
    return in_tree([(node, value.chunk(parts)[place]) for other in stage.ranks for node, value in held[other]], count)


def in_tree(sums: Held, count: int) -> Held:
    tree = TreeSum(tree_parents(count))
    for node, value in sums:
        tree.push(node, value.clone())
    return tree.nodes


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 20))
@settings(deadline=None)
def test_every_way_gives_the_bits_of_the_tree(hosts: int, each: int, more: int) -> None:
    world = spread(hosts, each)
    count = len(world) + more
    generator = torch.Generator().manual_seed(more)
    values = [torch.randn(4 * len(world), generator=generator) * 10.0 ** (v % 7 - 3) for v in range(count)]
    expected = reduced(values, ["all"])[0]
    stages = plan_stages(0, world, count)
    assert len(stages) == (2 if hosts > 1 and each > 1 else 1)
    shards = reduced(values, world)
    order = (
        sorted(range(len(world)), key=lambda rank: (rank % each, rank // each))
        if len(stages) == 2
        else range(len(world))
    )
    assert torch.equal(torch.cat([shards[rank] for rank in order]), expected)


@pytest.mark.parametrize(
    "hosts", [["a", "a", "b"], ["a", "b", "a", "b"], ["a", "a", "b", "b", "a", "a"], ["a", "b", "c"], ["a"] * 4]
)
def test_unequal_or_mixed_hosts_have_one_stage(hosts: list[str]) -> None:
    [stage] = plan_stages(1, hosts, 8)
    assert stage.ranks == tuple(range(len(hosts)))
