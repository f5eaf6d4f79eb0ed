"""torchvision's RoIAlign on a GPU with deterministic algorithms, without a compiler."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

_ROIS_AT_ONCE = 256
"""Regions of one pass: each intermediate value takes 50 MB with 256 channels, 7 x 7 bins and 2 x 2 samples."""


def use_eager_roi_align() -> None:
    """Replaces the compiled implementation of torchvision's RoIAlign by the same one without compilation.

    torchvision (0.29) has a backward that adds atomically, and for deterministic algorithms on a GPU an implementation
    in Python, which it compiles for dynamic shapes. That needs Triton and a C compiler on every node, and the first
    shapes choose the kernels, so the result of a step would depend on the earlier steps of a worker. The same
    implementation without compilation needs neither; `_InParts` limits its memory.
    """
    module: Any = sys.modules.get("torchvision.ops.roi_align")
    if module is None or isinstance(module._roi_align, _InParts):
        return
    module._roi_align = _InParts(module._roi_align.__wrapped__)
    # torchvision calls the function only where it supports compilation.
    module.is_compile_supported = lambda device: True


class _InParts:
    """Runs the Python implementation on some regions at a time; backward recomputes each part instead of keeping it."""

    def __init__(self, roi_align: Any) -> None:
        self._roi_align = roi_align

    def __call__(self, features: Tensor, rois: Tensor, *options: Any) -> Tensor:
        """Returns the values of the regions, shape (regions, channels, *bins).

        Args:
            features: Shape (images, channels, height, width).
            rois: Shape (regions, 5): the image's index, left, top, right, bottom.
            options: Scale, numbers of bins, of samples, and whether pixels are aligned.
        """
        if not torch.is_grad_enabled() or not features.requires_grad:
            return torch.cat([self._roi_align(features, part, *options) for part in rois.split(_ROIS_AT_ONCE)])
        from torch.utils.checkpoint import checkpoint

        fields: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        return torch.cat(
            [checkpoint(self._roi_align, features, part, *options, **fields) for part in rois.split(_ROIS_AT_ONCE)]
        )
