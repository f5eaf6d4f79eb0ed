"""The norm and the clipping that the host computes equal those of torch."""

import math

import pytest
import torch

from ray_app.reduction.reducer import gradient_norms, scale_and_clip, total_norm


def test_total_norm_combines_all_parts_and_the_factor() -> None:
    parts = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]]), torch.zeros(3)]
    assert total_norm([norm.item() for norm in gradient_norms(parts)], 0.5) == 2.5
    assert gradient_norms([]) == [], "no rank had rows, so there should be no norms"


@pytest.mark.parametrize(("norms", "factor"), [([math.inf, 1.0], 1.0), ([1e38, 1e38], 3.0)])
def test_a_norm_above_the_float32_range_is_infinite(norms: list[float], factor: float) -> None:
    """Otherwise the update would apply infinite values with a finite norm."""
    assert total_norm(norms, factor) == math.inf
    assert math.isnan(total_norm([*norms, math.nan], factor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipped_gradients_are_bit_identical_to_those_of_torch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for trial in range(200):
        parts = [torch.randn(shape, generator=generator).to(dtype) for shape in ((7, 5), (3,), ())]
        norm, max_norm = total_norm([part.norm().item() for part in parts]), 0.01 * 1.1**trial
        parameters = [torch.nn.Parameter(torch.zeros_like(part)) for part in parts]
        for p, part in zip(parameters, parts, strict=True):
            p.grad = part.clone()
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, torch.tensor(norm))
        scale_and_clip(parts, 1.0, norm, max_norm)
        assert all(
            torch.equal(part, p.grad) for p, part in zip(parameters, parts, strict=True) if p.grad is not None
        ), trial


def test_the_largest_float32_value_is_a_finite_norm() -> None:
    largest = torch.finfo(torch.float32).max
    assert total_norm([largest]) == largest
    assert total_norm([largest], 1.0000001) == math.inf
