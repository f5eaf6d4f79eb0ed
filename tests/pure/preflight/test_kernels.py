"""Exactly the operations that PyTorch refuses on a GPU with deterministic algorithms are detected on a CPU."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torchvision import ops

from ray_app.errors import ConfigError
from ray_app.preflight.model_checks import _NONDETERMINISTIC_OPS, KernelRecorder

LISTED = {
    "torch.nn.AvgPool3d": {"avg_pool3d_backward"},
    "torch.nn.AdaptiveAvgPool2d": {"_adaptive_avg_pool2d_backward"},
    "torch.nn.AdaptiveAvgPool3d": {"_adaptive_avg_pool3d_backward"},
    "torch.nn.AdaptiveMaxPool2d": {"adaptive_max_pool2d_backward"},
    "torch.nn.FractionalMaxPool2d": {"fractional_max_pool2d_backward"},
    "torch.nn.FractionalMaxPool3d": {"fractional_max_pool3d_backward"},
    "torch.nn.MaxUnpool1d": {"max_unpool2d"},
    "torch.nn.MaxUnpool2d": {"max_unpool2d"},
    "torch.nn.MaxUnpool3d": {"max_unpool3d"},
    "torch.nn.functional.interpolate": {
        "upsample_linear1d_backward",
        "_upsample_bilinear2d_aa_backward",
        "_upsample_bicubic2d_aa_backward",
    },
    "torch.nn.ReflectionPad1d": {"reflection_pad1d_backward"},
    "torch.nn.ReflectionPad2d": {"reflection_pad2d_backward"},
    "torch.nn.ReflectionPad3d": {"reflection_pad3d_backward"},
    "torch.nn.NLLLoss": {"nll_loss2d_forward"},
    "torch.nn.CTCLoss": {"_ctc_loss_backward"},
    "torch.nn.EmbeddingBag": {"_embedding_bag_dense_backward"},
    "torch.Tensor.put_": {"put"},
    "torch.histc": {"histc"},
    "torch.bincount": {"bincount"},
    "torch.median": {"median", "nanmedian"},
    "torch.nn.functional.grid_sample": {"grid_sampler_2d_backward", "grid_sampler_3d_backward"},
    "torch.Tensor.scatter_reduce": {"scatter_reduce", "scatter"},
}
"""The operations that belong to each entry of the documentation."""
# The kernels of these operations refuse, or add atomically, without an entry in the documentation.
NOT_LISTED = {
    *{"adaptive_max_pool3d_backward", "index_reduce"},
    *{"_roi_pool_backward", "_ps_roi_align_backward", "_ps_roi_pool_backward", "_deform_conv2d_backward"},
}
NOT_ON_A_GPU = ("MPS tensor", "an MPS", "quantized tensor")


@pytest.mark.exact_versions
def test_the_list_of_operations_equals_the_documentation_of_pytorch() -> None:
    text = str(torch.use_deterministic_algorithms.__doc__)
    [refused] = re.findall(r"operations will throw a\n.*?``mode=True``:\n(.*?)\n    In addition", text, re.DOTALL)
    entries = [" ".join(entry.split()) for entry in re.split(r"\n        \* ", refused) if entry.strip()]
    on_gpus = [entry for entry in entries if "CUDA" in entry or not any(word in entry for word in NOT_ON_A_GPU)]
    assert {name for entry in on_gpus for name in re.findall(r":(?:class|func):`([\w.]+)`", entry)} == set(LISTED)
    assert set(_NONDETERMINISTIC_OPS) == set().union(*LISTED.values(), NOT_LISTED)


@pytest.mark.parametrize("name", _NONDETERMINISTIC_OPS)
def test_each_listed_name_is_an_operation(name: str) -> None:
    assert hasattr(torch.ops.aten, name) or hasattr(torch.ops.torchvision, name)


INDEX = torch.tensor([0, 1, 0])
VALUES = torch.tensor([1.0, 2.0, 3.0])
MATRIX = torch.rand(3, 3)
REGIONS = torch.tensor([[0.0, 0.0, 0.0, 4.0, 4.0]])


def differentiate(operation: Callable[[Tensor], Tensor], shape: tuple[int, ...] = (1, 8, 6, 6)) -> None:
    leaf = torch.rand(shape, requires_grad=True)
    torch.autograd.grad(operation(leaf).sum(), [leaf])


REFUSED: dict[str, Callable[[], object]] = {
    "bincount with weights": lambda: torch.bincount(INDEX, VALUES),
    "bincount with weights | named": lambda: torch.bincount(INDEX, weights=VALUES, minlength=4),
    "median with indices": lambda: MATRIX.median(dim=1),
    "nanmedian with indices": lambda: MATRIX.nanmedian(1),
    "scatter_reduce with prod, amax or amin": lambda: VALUES.scatter_reduce(0, INDEX, VALUES, "amax"),
    "scatter_reduce with prod, amax or amin | in place": lambda: VALUES.clone().scatter_reduce_(
        0, INDEX, VALUES, reduce="prod"
    ),
    "scatter that multiplies": lambda: VALUES.scatter(0, INDEX, VALUES, reduce="multiply"),
    "index_reduce": lambda: VALUES.index_reduce(0, INDEX, VALUES, "amin"),
    "put with accumulate": lambda: VALUES.clone().put_(INDEX, VALUES, accumulate=True),
    "put with accumulate | a copy": lambda: VALUES.put(INDEX, VALUES, True),
    "histc": lambda: torch.histc(VALUES, 4),
    "RoIPool, backward": lambda: differentiate(lambda x: ops.roi_pool(x, REGIONS, 2)),
    "PSRoIAlign, backward": lambda: differentiate(lambda x: ops.ps_roi_align(x, REGIONS, 2)),
    "PSRoIPool, backward": lambda: differentiate(lambda x: ops.ps_roi_pool(x, REGIONS, 2)),
    "DeformConv2d, backward": lambda: differentiate(
        lambda x: ops.deform_conv2d(x, torch.zeros(1, 18, 6, 6), torch.rand(4, 8, 3, 3), padding=1)
    ),
}
DETERMINISTIC: dict[str, Callable[[], object]] = {
    "bincount": lambda: torch.bincount(INDEX, minlength=4),
    "bincount, no weights by name": lambda: torch.bincount(INDEX, weights=None, minlength=4),
    "median of all": lambda: (MATRIX.median(), MATRIX.nanmedian()),
    "scatter_reduce with sum or mean": lambda: VALUES.scatter_reduce(0, INDEX, VALUES, "sum").scatter_reduce_(
        0, INDEX, VALUES, "mean"
    ),
    "scatter": lambda: (VALUES.scatter(0, INDEX, VALUES), VALUES.scatter(0, INDEX, 2.0, reduce="multiply")),
    "scatter_add and index_add": lambda: VALUES.scatter_add(0, INDEX, VALUES).index_add(0, INDEX, VALUES),
    "RoIAlign, which is replaced": lambda: differentiate(lambda x: ops.roi_align(x, REGIONS, 2)),
    "cross-entropy": lambda: differentiate(lambda x: functional.cross_entropy(x, INDEX), (3, 4)),
}


@pytest.mark.filterwarnings("ignore:.*(in beta|is deprecated):UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_a_nondeterministic_operation_is_refused_with_an_alternative(name: str) -> None:
    with KernelRecorder() as kernels:
        REFUSED[name]()
    with pytest.raises(ConfigError, match=f"  {name.partition(' | ')[0]}: choose "):
        kernels.check(1)


@pytest.mark.filterwarnings("ignore:.*(in beta|is deprecated):UserWarning")
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_a_deterministic_operation_is_not_refused(name: str) -> None:
    with KernelRecorder() as kernels:
        DETERMINISTIC[name]()
    kernels.check(1)
