"""The collectives, stages and memory with which `ddp` reduces its buckets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ray_app.config.sections import TrainSection
from ray_app.reduction import transport
from ray_app.reduction.bucketed import BucketedReducer
from ray_app.reduction.transport import P2PWork, start_send
from ray_app.reduction.world import World
from ray_app.testing import WorkerPool
from tests.support.device_group import BACKEND
from tests.support.local_world import LocalMembership

SEND, GATHER = "all_to_all_single", "all_gather_into_tensor"


class RecordOperators(TorchDispatchMode):
    """Records the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class ReductionTrace:
    """The trace of a sum of values on one rank; each order of additions of these values gives another result.

    Args:
        order: The name of each collective, with the size of its group.
        peers: Ranks that this rank sends to directly.
        sums: The sums.
        operators: Operators of a second sum, for which the first one has allocated memory.
    """

    order: list[tuple[str, int]]
    peers: set[int]
    sums: list[Tensor]
    operators: set[str]


def sum_and_trace(
    rank: int,
    store: Path,
    hosts: tuple[str, ...],
    logical_workers: int,
    backend: str = "gloo",
    train: TrainSection = TrainSection(),
) -> ReductionTrace:
    order: list[tuple[str, int]] = []
    peers: set[int] = set()

    def record_peer(value: Tensor, peer: int, *rest: Any) -> P2PWork:
        peers.add(peer)
        return start_send(value, peer, *rest)

    def with_record(name: str) -> Any:
        call = getattr(dist, name)

        def record_and_call(*arguments: Any, group: Any = None, **options: Any) -> Any:
            order.append((name, (group or dist.group.WORLD).size()))
            return call(*arguments, group=group, **options)

        return record_and_call

    world = World(rank, len(hosts), logical_workers)
    with (
        LocalMembership(world, store, backend=backend, hosts=hosts).generation(0, False) as (world, _),
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in (SEND, GATHER, "all_reduce"):
            patch.setattr(dist, name, with_record(name))
        patch.setattr(transport, "start_send", record_peer)
        model = torch.nn.Sequential(torch.nn.Linear(33, 7), torch.nn.Linear(7, 5))
        reducer = BucketedReducer(model, world, train.reduction, 1e-4)
        values = {}
        for v in world.assigned:
            generator = torch.Generator().manual_seed(v)
            values[v] = [torch.randn(p.shape, generator=generator) * 10.0 ** (v % 5 - 2) for p in model.parameters()]
        first_sums, calls = reducer.sum(values), len(order)
        with RecordOperators() as second_operators:
            second_sums = reducer.sum(values)
        assert all(torch.equal(a, b) for a, b in zip(first_sums, second_sums, strict=True))
        assert order[:calls] == order[calls:]
        return ReductionTrace(order[:calls], peers, first_sums, second_operators.names)


@pytest.mark.parametrize("backend", ["gloo", BACKEND])
@pytest.mark.parametrize("logical_workers", [4, 7])
def test_hosts_reduce_among_themselves_first_bit_identically(
    worker_pool: WorkerPool, logical_workers: int, backend: str
) -> None:
    plain, staged = (
        worker_pool.run(4, sum_and_trace, tuple(hosts), logical_workers, backend) for hosts in ("abcd", "aabb")
    )
    if backend == "gloo":
        assert [rank.peers for rank in plain] == [{1, 2, 3}, {0, 2, 3}, {0, 1, 3}, {0, 1, 2}]
        assert [rank.peers for rank in staged] == [{1, 2}, {0, 3}, {0, 3}, {1, 2}]
    else:
        sent = [[size for name, size in rank.order if name == SEND] for rank in plain]
        assert {size for sizes in sent for size in sizes} == {4}
        for rank in staged:
            sizes = [size for name, size in rank.order if name == SEND]
            assert sizes == [2] * len(sizes)
            assert len(sizes) == 2 * len(sent[0])
    [alone] = worker_pool.run(1, sum_and_trace, ("a",), logical_workers)
    for rank in [*plain, *staged]:
        assert all(torch.equal(a, b) for a, b in zip(rank.sums, alone.sums, strict=True))


def test_a_device_gathers_a_bucket_before_it_sends_the_last_one(worker_pool: WorkerPool) -> None:
    """On a device only a stream waits for the bucket; `test_transport.py` tests the host."""
    for rank in worker_pool.run(2, sum_and_trace, ("a", "b"), 4, BACKEND):
        assert [name for name, _ in rank.order] == [SEND, *[SEND, GATHER] * 3, GATHER]


@pytest.mark.parametrize(
    "train",
    [TrainSection(), TrainSection(reduction="overlapped")],
    ids=["exact", "overlapped"],
)
@pytest.mark.parametrize("hosts", ["aabb", "abc"])
def test_a_reduction_on_a_device_allocates_its_memory_once(
    worker_pool: WorkerPool, hosts: str, train: TrainSection
) -> None:
    for rank in worker_pool.run(len(hosts), sum_and_trace, tuple(hosts), 7, BACKEND, train):
        assert "copy_" in rank.operators or "cat.out" in rank.operators, "the second sum recorded no operators"
        assert not rank.operators & {
            "empty.memory_format",
            "zeros.default",
            "zeros_like.default",
            "stack.default",
            "_to_copy.default",
        }, rank.operators
