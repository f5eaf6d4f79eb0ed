"""How the buckets of `ddp` go from rank to rank: in which order, by which stages, through which memory."""

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
from ray_app.reduction.base import World
from ray_app.reduction.bucketed import BucketedReducer
from ray_app.reduction.transport import P2PWork, start_send
from ray_app.testing import WorkerPool
from tests.support.device_group import BACKEND
from tests.support.local_world import LocalMembership

SEND, GATHER = "all_to_all_single", "all_gather_into_tensor"


class Operators(TorchDispatchMode):
    """Their names."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Summed:
    """What a rank sees of a sum of values whose every order of additions gives other bits.

    Args:
        order: The name of each collective, with how many take part.
        peers: Ranks that it sends to directly.
        found: The sum.
        made: Operators of a second sum, which the first has made memory for.
    """

    order: list[tuple[str, int]]
    peers: set[int]
    found: list[Tensor]
    made: set[str]


def summed_on(
    rank: int,
    store: Path,
    hosts: tuple[str, ...],
    logical_workers: int,
    backend: str = "gloo",
    train: TrainSection = TrainSection(),
) -> Summed:
    order: list[tuple[str, int]] = []
    peers: set[int] = set()

    def noting_peer(value: Tensor, peer: int, *rest: Any) -> P2PWork:
        peers.add(peer)
        return start_send(value, peer, *rest)

    def noting(name: str) -> Any:
        call = getattr(dist, name)

        def noted(*arguments: Any, group: Any = None, **options: Any) -> Any:
            order.append((name, dist.get_world_size(group)))
            return call(*arguments, group=group, **options)

        return noted

    world = World(rank, len(hosts), logical_workers)
    with (
        LocalMembership(world, store, backend=backend, hosts=hosts).generation(0, False) as (world, _),
        pytest.MonkeyPatch.context() as patch,
    ):
        for name in (SEND, GATHER, "all_reduce"):
            patch.setattr(dist, name, noting(name))
        patch.setattr(transport, "start_send", noting_peer)
        model = torch.nn.Sequential(torch.nn.Linear(33, 7), torch.nn.Linear(7, 5))
        reducer = BucketedReducer(model, world, train.reduction, 1e-4, train.gradient_compression)
        values = {}
        for v in world.assigned:
            generator = torch.Generator().manual_seed(v)
            values[v] = [torch.randn(p.shape, generator=generator) * 10.0 ** (v % 5 - 2) for p in model.parameters()]
        first, calls = reducer.sum(values), len(order)
        with Operators() as second:
            again = reducer.sum(values)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert order[:calls] == order[calls:]
        return Summed(order[:calls], peers, first, second.names)


@pytest.mark.parametrize("backend", ["gloo", BACKEND])
@pytest.mark.parametrize("logical_workers", [4, 7])
def test_hosts_add_among_themselves_first_and_the_bits_are_the_same(
    pool: WorkerPool, logical_workers: int, backend: str
) -> None:
    plain, staged = (pool.run(4, summed_on, tuple(hosts), logical_workers, backend) for hosts in ("abcd", "aabb"))
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
    [alone] = pool.run(1, summed_on, ("a",), logical_workers)
    for rank in [*plain, *staged]:
        assert all(torch.equal(a, b) for a, b in zip(rank.found, alone.found, strict=True))


def test_what_a_device_exchanges_of_a_bucket_comes_back_before_the_last_is_sent(pool: WorkerPool) -> None:
    """Where waiting for it keeps only a stream waiting; for a host see `test_transport.py`."""
    for rank in pool.run(2, summed_on, ("a", "b"), 4, BACKEND):
        assert [name for name, _ in rank.order] == [SEND, *[SEND, GATHER] * 3, GATHER]


@pytest.mark.parametrize(
    "train",
    [TrainSection(), TrainSection(reduction="overlapped", gradient_compression="bf16")],
    ids=["exact", "overlapped"],
)
@pytest.mark.parametrize("hosts", ["aabb", "abc"])
def test_an_exchange_on_a_device_makes_its_memory_once(pool: WorkerPool, hosts: str, train: TrainSection) -> None:
    for rank in pool.run(len(hosts), summed_on, tuple(hosts), 7, BACKEND, train):
        assert "copy_" in rank.made or "cat.out" in rank.made, "what is counted is what is done"
        assert not rank.made & {
            "empty.memory_format",
            "zeros.default",
            "zeros_like.default",
            "stack.default",
            "_to_copy.default",
        }, rank.made
