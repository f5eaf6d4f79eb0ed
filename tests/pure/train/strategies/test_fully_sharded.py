"""Optimizers on shards: fused kernels give the bits that they give on whole parameters, wherever these are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from ray_app.train.strategies.fully_sharded import PiecewiseKernels, cut_shard

SHAPES = [(5,), (7, 3), (13, 17), (31, 3, 3, 3), (100, 33), (1, 9), (64,), (130,)]
STEPS = 4


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_pieces_are_the_shard_and_stand_where_they_stand_in_the_whole(start: int, count: int, behind: int) -> None:
    total = start + count + behind
    found = cut_shard(start, count, total)
    assert [value for low, high, _, _ in found for value in range(low, high)] == list(range(count))
    assert len(found) <= 3
    for low, high, offset, size in found:
        block = start + low - offset
        assert block % 64 == 0
        if size:
            assert size == min(64, total - block)
            assert offset + high - low <= size
        else:
            assert (high - low) % 64 == 0 or start + high == total


def shard(value: Tensor, rank: int, size: int) -> Tensor:
    rows = -(-value.shape[0] // size)
    return value[rank * rows : (rank + 1) * rows].clone()


def moved(
    optimizer: Any, args: dict[str, Any], rank: int, size: int
) -> tuple[list[nn.Parameter], Optimizer, dict[Tensor, Any]]:
    """What an optimizer makes in some steps of a rank's shards of some parameters, and where they are cut."""
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(shape, generator=generator) for shape in SHAPES]
    parameters = [nn.Parameter(shard(value, rank, size)) for value in wholes]
    cuts = {}
    for p, value in zip(parameters, wholes, strict=True):
        cuts[p] = cut_shard(rank * -(-value.shape[0] // size) * value.shape[1:].numel(), p.numel(), value.numel())
    made = optimizer(parameters, **args, fused=True)
    for _ in range(STEPS):
        for p, value in zip(parameters, wholes, strict=True):
            p.grad = shard(torch.randn(value.shape, generator=generator), rank, size)
        with PiecewiseKernels(cuts):
            made.step()
    return parameters, made, cuts


@pytest.mark.parametrize(
    ("optimizer", "args"),
    [
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1}),
        (torch.optim.Adam, {"lr": 0.001, "weight_decay": 0.01, "amsgrad": True}),
        (torch.optim.AdamW, {"lr": 0.001}),
        (torch.optim.Adagrad, {"lr": 0.01, "lr_decay": 0.1}),
    ],
)
def test_fused_kernels(optimizer: Any, args: dict[str, Any]) -> None:
    whole, of_whole, cuts = moved(optimizer, args, 0, 1)
    assert all(len(each) == 1 and not each[0][3] for p, each in cuts.items() if p.numel() >= 64), (
        "nothing of it is copied"
    )
    for size in (2, 3, 4, 5):
        shards = [moved(optimizer, args, rank, size)[:2] for rank in range(size)]
        for i, p in enumerate(whole):
            assert torch.equal(torch.cat([own[i] for own, _ in shards]), p)
            for name, value in of_whole.state[p].items():
                parts = [made.state[own[i]][name] for own, made in shards]
                assert torch.equal(torch.cat(parts) if value.ndim else parts[0], value), name
