"""What the host makes of the norm of a gradient, against what torch computes of it."""

from __future__ import annotations

import math

import pytest
import torch

from ray_app.reduction.base import gradient_norms, scale_and_clip, total_norm


def test_the_norm_is_that_of_all_parts_times_the_factor() -> None:
    parts = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]]), torch.zeros(3)]
    assert total_norm([norm.item() for norm in gradient_norms(parts)], 0.5) == 2.5
    assert gradient_norms([]) == [], "nobody had rows"


@pytest.mark.parametrize(("norms", "factor"), [([math.inf, 1.0], 1.0), ([1e38, 1e38], 3.0)])
def test_a_norm_beyond_what_a_value_can_be_is_infinite(norms: list[float], factor: float) -> None:
    """Or the update would see infinite values of a finite norm."""
    assert total_norm(norms, factor) == math.inf
    assert math.isnan(total_norm([*norms, math.nan], factor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_clipped_has_the_bits_of_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for trial in range(200):
        parts = [torch.randn(shape, generator=generator).to(dtype) for shape in ((7, 5), (3,), ())]
        norm, most = total_norm([part.norm().item() for part in parts]), 0.01 * 1.1**trial
        parameters = [torch.nn.Parameter(torch.zeros_like(part)) for part in parts]
        for p, part in zip(parameters, parts, strict=True):
            p.grad = part.clone()
        torch.nn.utils.clip_grads_with_norm_(parameters, most, torch.tensor(norm))
        scale_and_clip(parts, 1.0, norm, most)
        assert all(
            torch.equal(part, p.grad) for p, part in zip(parameters, parts, strict=True) if p.grad is not None
        ), trial


def test_the_greatest_value_of_float32_is_a_norm() -> None:
    greatest = torch.finfo(torch.float32).max
    assert total_norm([greatest]) == greatest
    assert total_norm([greatest], 1.0000001) == math.inf
