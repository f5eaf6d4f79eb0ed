"""Fused optimizer kernels on shards are bit-identical to those on whole parameters, wherever these are cut."""

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
def test_pieces_cover_the_shard_at_their_offsets_in_the_whole(start: int, count: int, rest: int) -> None:
    total = start + count + rest
    pieces = cut_shard(start, count, total)
    assert [value for low, high, _, _ in pieces for value in range(low, high)] == list(range(count))
    assert len(pieces) <= 3
    for low, high, offset, size in pieces:
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


def train_shard(
    optimizer_class: Any, args: dict[str, Any], rank: int, size: int
) -> tuple[list[nn.Parameter], Optimizer, dict[Tensor, Any]]:
    """Returns a rank's shards of the parameters after some steps, their optimizer, and their pieces."""
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(shape, generator=generator) for shape in SHAPES]
    parameters = [nn.Parameter(shard(value, rank, size)) for value in wholes]
    cuts = {}
    for p, value in zip(parameters, wholes, strict=True):
        cuts[p] = cut_shard(rank * -(-value.shape[0] // size) * value.shape[1:].numel(), p.numel(), value.numel())
    optimizer = optimizer_class(parameters, **args, fused=True)
    for _ in range(STEPS):
        for p, value in zip(parameters, wholes, strict=True):
            p.grad = shard(torch.randn(value.shape, generator=generator), rank, size)
        with PiecewiseKernels(cuts):
            optimizer.step()
    return parameters, optimizer, cuts


@pytest.mark.parametrize(
    ("optimizer_class", "args"),
    [
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1}),
        (torch.optim.Adam, {"lr": 0.001, "weight_decay": 0.01, "amsgrad": True}),
        (torch.optim.AdamW, {"lr": 0.001}),
        (torch.optim.Adagrad, {"lr": 0.01, "lr_decay": 0.1}),
    ],
)
def test_fused_kernels_on_shards_are_bit_identical_to_whole_parameters(
    optimizer_class: Any, args: dict[str, Any]
) -> None:
    whole, whole_optimizer, cuts = train_shard(optimizer_class, args, 0, 1)
    assert all(len(pieces) == 1 and not pieces[0][3] for p, pieces in cuts.items() if p.numel() >= 64), (
        "a piece of a whole parameter would be copied"
    )
    for size in (2, 3, 4, 5):
        shards = [train_shard(optimizer_class, args, rank, size)[:2] for rank in range(size)]
        for i, p in enumerate(whole):
            assert torch.equal(torch.cat([shard_parameters[i] for shard_parameters, _ in shards]), p)
            for name, value in whole_optimizer.state[p].items():
                parts = [
                    shard_optimizer.state[shard_parameters[i]][name] for shard_parameters, shard_optimizer in shards
                ]
                assert torch.equal(torch.cat(parts) if value.ndim else parts[0], value), name
