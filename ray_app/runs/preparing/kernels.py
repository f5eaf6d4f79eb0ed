"""Operations that have no deterministic kernel on a GPU, found while a task is tried on a CPU, where all of them have one.

They are those that `torch.use_deterministic_algorithms` lists as refused for CUDA tensors (torch 2.15). What PyTorch itself replaces in
that mode, as bilinear interpolation by `torch.nn.functional.interpolate`, is not among them, nor what it refuses on CPUs, too, as `put_`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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


_POOLS = "pooling with a kernel of fixed size, or a mean (amax) over the pixels, as an adaptive pooling to size 1 is"
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
    "bincount": _Refused("bincount with weights", "index_add", lambda *args, **options: bool(args[1:2]) or "weights" in options),
    "median": _Refused("median with indices", "sort, and the middle", lambda *args, **options: len(args) > 1 or "dim" in options),
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
