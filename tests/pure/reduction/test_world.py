"""The stages of the reduction send few bytes between hosts, and end in the sum of all logical workers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ray_app.plan.assignment import TreeNode, logical_workers_of, subtrees
from ray_app.reduction.reducer import state_checksum
from ray_app.reduction.tree import TreeSum, tree_parents
from ray_app.reduction.world import Stage, plan_stages

NodeSums = list[tuple[TreeNode, Tensor]]


def hosts_of_ranks(hosts: int, ranks_per_host: int) -> list[str]:
    return [f"host-{rank // ranks_per_host}" for rank in range(hosts * ranks_per_host)]


def bytes_between_hosts(hosts: Sequence[str], logical_workers: int) -> float:
    """Returns the bytes that leave a host, per byte of the gradient; shards are gathered along the same way back."""
    total = 0.0
    for rank, host in enumerate(hosts):
        part = 1.0
        for stage in plan_stages(rank, hosts, logical_workers):
            part /= len(stage.ranks)
            num_remote = sum(hosts[other] != host for other in stage.ranks)
            num_nodes = len(stage.nodes[stage.ranks.index(rank)])
            total += num_remote * part * (num_nodes + 1)
    return total / len(set(hosts))


def ring_bytes(hosts: Sequence[str]) -> float:
    """Returns the same for a ring over all ranks: each host passes on all reduced and all gathered bytes but
    the last shard.
    """
    return 2 * (len(hosts) - 1) / len(hosts)


QUICK_HOSTS = (2, 3, 8, 31, 32)


@pytest.mark.parametrize(
    "hosts", [pytest.param(hosts, marks=() if hosts in QUICK_HOSTS else pytest.mark.rest) for hosts in range(2, 33)]
)
@pytest.mark.parametrize("workers_per_rank", [1, 2, 4])
def test_the_stages_send_about_as_much_between_hosts_as_a_ring(hosts: int, workers_per_rank: int) -> None:
    """Each host has 8 ranks. Without stages it was 4.5 times as much."""
    world = hosts_of_ranks(hosts, 8)
    assert bytes_between_hosts(world, len(world) * workers_per_rank) <= 1.1 * ring_bytes(world)


def test_a_single_stage_sends_more_between_hosts_than_a_ring() -> None:
    world = hosts_of_ranks(4, 8)
    assert bytes_between_hosts([f"{rank}" for rank in range(32)], 32) * 8 > 4 * ring_bytes(world)


@pytest.mark.parametrize("logical_workers", [3, 8, 12, 31, 48, 64, 96, 100])
def test_no_rank_sends_much_more_than_the_mean(logical_workers: int) -> None:
    """Counts the sums and the way back, for every number of workers."""
    for size in range(2, logical_workers + 1):
        sent = [
            len(subtrees(logical_workers_of(rank, size, logical_workers), logical_workers)) + 1 for rank in range(size)
        ]
        assert max(sent) <= 1.5 * sum(sent) / size


def reduce_shards(values: list[Tensor], hosts: Sequence[str]) -> list[Tensor]:
    """Returns the shard of the sum that each rank has at the end."""
    count, size = len(values), len(hosts)
    sums_of_ranks: list[NodeSums] = [
        [((v, v + 1), values[v].clone()) for v in logical_workers_of(rank, size, count)] for rank in range(size)
    ]
    sums_of_ranks = [add_in_tree(sums, count) for sums in sums_of_ranks]
    routes = [plan_stages(rank, hosts, count) for rank in range(size)]
    for number in range(len(routes[0])):
        sums_of_ranks = [run_stage(rank, stages[number], sums_of_ranks, count) for rank, stages in enumerate(routes)]
    assert all([node for node, _ in sums] == [(0, count)] for sums in sums_of_ranks)
    return [sums[0][1] for sums in sums_of_ranks]


def run_stage(rank: int, stage: Stage, sums_of_ranks: list[NodeSums], count: int) -> NodeSums:
    index, parts = stage.ranks.index(rank), len(stage.ranks)
    assert tuple(tuple(node for node, _ in sums_of_ranks[other]) for other in stage.ranks) == stage.nodes
    return add_in_tree(
        [(node, value.chunk(parts)[index]) for other in stage.ranks for node, value in sums_of_ranks[other]], count
    )


def add_in_tree(sums: NodeSums, count: int) -> NodeSums:
    tree = TreeSum(tree_parents(count))
    for node, value in sums:
        tree.push(node, value.clone())
    return tree.nodes


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 20))
@settings(deadline=None)
def test_every_plan_of_stages_is_bit_identical_to_the_tree(hosts: int, ranks_per_host: int, extra: int) -> None:
    world = hosts_of_ranks(hosts, ranks_per_host)
    count = len(world) + extra
    generator = torch.Generator().manual_seed(extra)
    values = [torch.randn(4 * len(world), generator=generator) * 10.0 ** (v % 7 - 3) for v in range(count)]
    expected = reduce_shards(values, ["all"])[0]
    stages = plan_stages(0, world, count)
    assert len(stages) == (2 if hosts > 1 and ranks_per_host > 1 else 1)
    shards = reduce_shards(values, world)
    order = (
        sorted(range(len(world)), key=lambda rank: (rank % ranks_per_host, rank // ranks_per_host))
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


def test_a_checksum_of_a_state_tells_states_apart_that_a_plain_sum_does_not() -> None:
    state = [torch.arange(6.0).view(2, 3), torch.ones(5, dtype=torch.bool), torch.ones(2, dtype=torch.complex128)]
    bits = state[0].view(torch.int32) + torch.tensor([0, 1, -1], dtype=torch.int32)
    others = [
        [state[0].view(-1)[[1, 0, 2, 3, 4, 5]].view(2, 3), *state[1:]],
        [bits.view(torch.float32), *state[1:]],
        [state[0], state[1].logical_and(torch.arange(5) > 0), state[2]],
        [state[1], state[0], state[2]],
        state[:2],
    ]
    checksums = [state_checksum(tensors) for tensors in (state, *others)]
    assert len({*checksums}) == len(checksums)
    assert state_checksum([state[0].t().contiguous().t(), *state[1:]]) == checksums[0]
    assert state_checksum([]) == 0
