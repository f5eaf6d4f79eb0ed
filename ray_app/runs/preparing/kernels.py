"""Operations that have no deterministic kernel on a GPU, found while a task is tried on a CPU, where all of them have one.

They are those that `torch.use_deterministic_algorithms` lists as refused for CUDA tensors (torch 2.15), those that the CUDA kernels of
torch and torchvision refuse beside that list (`index_reduce`, pooling of regions), and the deformable convolution of torchvision, whose
backward adds atomically and does not say so. Operations that PyTorch replaces in that mode, such as bilinear interpolation by
`torch.nn.functional.interpolate`, are not among them, nor operations that a CPU refuses as well, such as `put_` without `accumulate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ray_app.errors import ConfigError


class _Refused(NamedTuple):
    """An operation.

    Args:
        what: Its name for whoever wrote a model.
        instead: What to choose.
        if_: Whether a call of it is refused, given its arguments.
    """

    what: str
    instead: str
    if_: Callable[..., bool] = lambda *args, **options: True


def _has_weights(*args: Any, **options: Any) -> bool:
    """Whether `bincount` gets weights; an argument that is None is none."""
    return (args[1] if len(args) > 1 else options.get("weights")) is not None


def _has_dim(*args: Any, **options: Any) -> bool:
    """Whether a median is taken along a dimension, and so returns indices."""
    return len(args) > 1 or "dim" in options


def _is_not_sum(*args: Any, **options: Any) -> bool:
    """Whether `scatter_reduce` reduces by another operation than a sum or a mean, which PyTorch computes by sorting the indices."""
    return (args[4] if len(args) > 4 else options.get("reduce")) not in ("sum", "mean")


def _multiplies_tensors(*args: Any, **options: Any) -> bool:
    """Whether `scatter` multiplies by a tensor; a number gives the same product in every order."""
    return options.get("reduce") == "multiply" and isinstance(args[3] if len(args) > 3 else options.get("src"), Tensor)


def _accumulates(*args: Any, **options: Any) -> bool:
    """Whether `put_` adds."""
    return bool(args[3] if len(args) > 3 else options.get("accumulate", False))


_POOLS = "pooling with a kernel of fixed size, or a mean (amax) over the pixels, as an adaptive pooling to size 1 is"
_MEDIAN, _PUT, _REGIONS = "sort, and the middle", "index_add, or scatter_add", "RoIAlign"
_SCATTERED = "index_add or scatter_reduce with sum, or a loop over the groups"
_FRACTIONAL, _PADS = "a convolution with a stride", "zeros, or padding_mode replicate"
_REFUSED: Mapping[str, _Refused] = {
    "_adaptive_avg_pool2d_backward": _Refused("AdaptiveAvgPool2d, backward", _POOLS),
    "_adaptive_avg_pool3d_backward": _Refused("AdaptiveAvgPool3d, backward", _POOLS),
    "adaptive_max_pool2d_backward": _Refused("AdaptiveMaxPool2d, backward", _POOLS),
    "adaptive_max_pool3d_backward": _Refused("AdaptiveMaxPool3d, backward", _POOLS),
    "avg_pool3d_backward": _Refused("AvgPool3d, backward", "a convolution with a stride, or a mean over reshaped blocks"),
    "fractional_max_pool2d_backward": _Refused("FractionalMaxPool2d, backward", _FRACTIONAL),
    "fractional_max_pool3d_backward": _Refused("FractionalMaxPool3d, backward", _FRACTIONAL),
    "max_unpool2d": _Refused("MaxUnpool1d or MaxUnpool2d", "a transposed convolution, or interpolation"),
    "max_unpool3d": _Refused("MaxUnpool3d", "a transposed convolution, or interpolation"),
    "upsample_linear1d_backward": _Refused(
        "linear interpolation of one dimension, backward", "mode nearest, or bilinear over (N, C, 1, W)"
    ),
    "_upsample_bilinear2d_aa_backward": _Refused("antialiased interpolation, backward", "antialias=False"),
    "_upsample_bicubic2d_aa_backward": _Refused("antialiased interpolation, backward", "antialias=False"),
    "reflection_pad1d_backward": _Refused("ReflectionPad1d, backward", _PADS),
    "reflection_pad2d_backward": _Refused("ReflectionPad2d, backward", _PADS),
    "reflection_pad3d_backward": _Refused("ReflectionPad3d, backward", _PADS),
    "nll_loss2d_forward": _Refused(
        "cross-entropy or NLLLoss over pixels, as mean or sum",
        "reduction none, and the mean of that",
        lambda *args, **options: (args[3] if len(args) > 3 else options.get("reduction", 1)) != 0,
    ),
    "_ctc_loss_backward": _Refused("CTCLoss, backward", "another loss"),
    "_embedding_bag_dense_backward": _Refused(
        "EmbeddingBag with mode max, backward", "mode sum or mean", lambda *args, **options: 2 in (args[7:8] or (options.get("mode"),))
    ),
    "histc": _Refused("histc", "bincount of integers"),
    "bincount": _Refused("bincount with weights", "index_add", _has_weights),
    "median": _Refused("median with indices", _MEDIAN, _has_dim),
    "nanmedian": _Refused("nanmedian with indices", _MEDIAN, _has_dim),
    "scatter_reduce": _Refused("scatter_reduce with prod, amax or amin", _SCATTERED, _is_not_sum),
    "scatter_reduce_": _Refused("scatter_reduce with prod, amax or amin", _SCATTERED, _is_not_sum),
    "scatter": _Refused("scatter that multiplies", _SCATTERED, _multiplies_tensors),
    "scatter_": _Refused("scatter that multiplies", _SCATTERED, _multiplies_tensors),
    "index_reduce": _Refused("index_reduce", _SCATTERED),
    "index_reduce_": _Refused("index_reduce", _SCATTERED),
    "put": _Refused("put with accumulate", _PUT, _accumulates),
    "put_": _Refused("put with accumulate", _PUT, _accumulates),
    "_roi_pool_backward": _Refused("RoIPool, backward", _REGIONS),
    "_ps_roi_align_backward": _Refused("PSRoIAlign, backward", _REGIONS),
    "_ps_roi_pool_backward": _Refused("PSRoIPool, backward", _REGIONS),
    "_deform_conv2d_backward": _Refused("DeformConv2d, backward", "a convolution"),
    "grid_sampler_2d_backward": _Refused("grid_sample, backward", "an augmentation before the step, in Task.decode or Task.augment"),
    "grid_sampler_3d_backward": _Refused("grid_sample, backward", "an augmentation before the step, in Task.decode or Task.augment"),
}


class Kernels(TorchDispatchMode):
    """Notes what a GPU would refuse of that which is called in its context, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an operation."""
        options = kwargs or {}
        refused = _REFUSED.get(func.overloadpacket.__name__)
        if refused is not None and refused.if_(*args, **options):
            self._found[refused.what] = refused.instead
        return func(*args, **options)

    def refuse(self, gpus: float) -> None:
        """Refuses what was found, for workers or an evaluator with so many GPUs.

        Raises:
            ConfigError: Something was.
        """
        if self._found:
            what = "\n".join(f"  {what}: choose {instead}" for what, instead in sorted(self._found.items()))
            raise ConfigError(
                f"train.reduction is exact, for which PyTorch takes deterministic kernels alone, and on GPUs ({gpus:g} each) it has none"
                f" for\n{what}\nOr set train.reduction to overlapped, which promises the rows of a step, but no bits."
            )
