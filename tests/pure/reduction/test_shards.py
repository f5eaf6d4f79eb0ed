"""The exact reduction by collectives, with all ranks in this process: its shards are aligned and its bits those of one
rank, and it adds in few launches.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ray_app.reduction.bucketed import BucketedReducer, default_sizes_mb, split_into_buckets
from ray_app.reduction.world import World

ALIGNED = 128


class Collectives:
    """Collectives of several ranks in one process, which take place when all ranks have launched theirs."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._calls: list[tuple[Tensor, Tensor, list[int] | None, list[int] | None]] = []
        self.sizes: list[list[int] | None] = []
        for name in ("all_to_all_single", "all_gather_into_tensor"):
            patch.setattr(dist, name, self._launch)

    def _launch(self, out: Tensor, sent: Tensor, *sizes: Any, **options: Any) -> Collectives:
        self._calls.append((out, sent, *(sizes or (None, [len(sent)]))))
        self.sizes += sizes
        return self

    def wait(self) -> None:
        """Does nothing: a rank that would use what has not been exchanged has other sums."""

    def run(self) -> None:
        """Lets the collective take place."""
        calls, self._calls = self._calls, []
        parts = [sent.split(sizes or [len(sent) // len(calls)] * len(calls)) for _, sent, _, sizes in calls]
        whole = [torch.cat([sent[rank % len(sent)] for sent in parts]) for rank in range(len(calls))]
        for (out, *_), received in zip(calls, whole, strict=True):
            out.copy_(received)


class Adds(TorchDispatchMode):
    """Counts additions."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.overloadpacket.__name__ in ("add", "add_")
        return func(*args, **(kwargs or {}))


def reduce_on(size: int, logical_workers: int, shapes: list[int], dtype: torch.dtype) -> tuple[list[Tensor], int]:
    """Returns the sums of gradients on `size` ranks, which are equal on all, and the additions of a rank's shard."""
    with pytest.MonkeyPatch.context() as patch:
        collectives, adds = Collectives(patch), Adds()
        reducers, models = [], []
        for rank in range(size):
            models.append(nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]))
            world = World(rank, size, logical_workers, has_device_collectives=size > 1)
            reducers.append(BucketedReducer(models[-1], world, "exact", 1.0))
            for v in world.assigned:
                generator = torch.Generator().manual_seed(v)
                for p in models[-1].parameters():
                    p.grad = torch.randn(p.shape, generator=generator).mul_(10.0 ** (v % 7)).to(dtype)
                for bucket in reducers[-1].buckets:
                    assert bucket.shard_numel * bucket.result.element_size() % ALIGNED == 0
                    bucket.take_gradients(v)
        for number in range(len(reducers[0].buckets)) if size > 1 else ():
            pipelines = [reducer.reduce_exactly(reducer.buckets[number]) for reducer in reducers]
            with adds:
                while any([next(pipeline, None) for pipeline in pipelines]):
                    collectives.run()
        if logical_workers % size == 0:
            assert {*map(bool, collectives.sizes)} <= {False}, "equal parts have sizes"
        sums = [[view for bucket in reducer.buckets for view in bucket.views] for reducer in reducers]
        assert all(torch.equal(a, b) for other in sums for a, b in zip(other, sums[0], strict=True))
        return sums[0], adds.number // size


@given(
    st.integers(1, 16),
    st.integers(0, 5),
    st.lists(st.integers(1, 200), min_size=1, max_size=4),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
@settings(deadline=None, max_examples=25)
def test_sums_on_any_number_of_ranks_have_the_bits_of_one(
    size: int, more: int, shapes: list[int], dtype: torch.dtype
) -> None:
    expected, _ = reduce_on(1, size + more, shapes, dtype)
    sums, adds = reduce_on(size, size + more, shapes, dtype)
    assert all(torch.equal(a, b) for a, b in zip(sums, expected, strict=True))
    if not more:
        assert adds <= math.ceil(math.log2(size))


@pytest.mark.parametrize(
    ("device", "world", "sizes_mb", "counts"),
    [
        ("cuda", World(1, 8, 8, has_device_collectives=True), (8, 64), [2, 16, 2]),
        ("cuda", World(0, 1, 8), (8, 64), [2, 16, 2]),
        ("cuda", World(0, 2, 8), (8, 8), [2] * 10),
        ("cpu", World(0, 2, 8), (8, 8), [2] * 10),
    ],
)
def test_buckets_are_larger_where_a_device_adds_them_except_for_the_first(
    device: str, world: World, sizes_mb: tuple[float, float], counts: list[int]
) -> None:
    assert default_sizes_mb(torch.device(device), world) == sizes_mb
    parameters = [nn.Parameter(torch.empty(1 << 20, device="meta")) for _ in range(20)]
    buckets = split_into_buckets(parameters, *(int(size_mb * (1 << 20)) for size_mb in sizes_mb))
    assert [len(bucket) for bucket in buckets] == counts
