"""RoIAlign with deterministic algorithms on a GPU: the Python implementation of torchvision, in parts and without the
compiler.
"""

import sys
from typing import Any

import pytest
import torch
from torchvision import ops

from ray_app import torch_private

MODULE: Any = sys.modules["torchvision.ops.roi_align"]
PARTS = 3


@pytest.fixture(autouse=True)
def eager_roi_align(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the replacement and makes torchvision call its Python function, as it does on a GPU."""
    monkeypatch.setattr(MODULE, "_roi_align", MODULE._roi_align)
    monkeypatch.setattr(MODULE, "is_compile_supported", lambda device: False)
    monkeypatch.setattr(MODULE, "_has_ops", lambda: False)
    monkeypatch.setattr(torch_private, "_ROIS_AT_ONCE", PARTS)
    # A process that scores and trains calls it twice.
    torch_private.use_eager_roi_align()
    torch_private.use_eager_roi_align()


def inputs(regions: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(regions)
    rois = torch.rand(regions, 5, generator=generator) * 8
    rois[:, 0] = torch.randint(0, 2, (regions,), generator=generator)
    rois[:, 3:] += rois[:, 1:3]
    return torch.rand(2, 4, 16, 16, generator=generator, requires_grad=True), rois


@pytest.mark.parametrize("regions", [0, 1, PARTS, 2 * PARTS + 1])
@pytest.mark.parametrize("options", [(0.5, 2, False), (0.25, -1, True)])
def test_values_and_gradients_equal_those_of_the_torchvision_kernel(
    regions: int, options: tuple[float, int, bool]
) -> None:
    features, rois = inputs(regions)
    scale, samples, aligned = options
    values = ops.roi_align(features, rois, (7, 7), scale, samples, aligned)
    kernels = torch.ops.torchvision.roi_align(features, rois, scale, 7, 7, samples, aligned)
    assert values.shape == (regions, 4, 7, 7)
    torch.testing.assert_close(values, kernels)
    gradients = [torch.autograd.grad(output.square().sum(), features)[0] for output in (values, kernels)]
    torch.testing.assert_close(*gradients)


def test_values_do_not_depend_on_gradients_or_earlier_calls() -> None:
    features, rois = inputs(2 * PARTS + 1)
    first = ops.roi_align(features, rois, 7)
    for regions in (0, 1, PARTS):
        ops.roi_align(*inputs(regions), 7)
    with torch.inference_mode():
        assert torch.equal(ops.roi_align(features, rois, 7), first)
    assert torch.equal(ops.roi_align(features, rois, 7), first)


def test_roi_align_does_not_call_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *args, **options: pytest.fail("compiled"))
    features, rois = inputs(1)
    ops.roi_align(features, rois, 7).sum().backward()
    assert features.grad is not None


def test_without_torchvision_the_replacement_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchvision.ops.roi_align")
    torch_private.use_eager_roi_align()
    assert "torchvision.ops.roi_align" not in sys.modules
