"""The norm of a gradient: taken where the gradient is, read by the host, which then says what the gradient is multiplied by."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

_MOST = float(np.finfo(np.float32).max)


def norms_of(gradients: list[Tensor]) -> list[Tensor]:
    """The L2 norm of each tensor; does not wait for the device."""
    return [*torch._foreach_norm(gradients)] if gradients else []  # get_total_norm costs 30 us more


def norm_of(norms: Iterable[float], factor: float = 1.0) -> float:
    """The norm of tensors that have these norms, times a number; infinite where a value of theirs might be."""
    norm = math.sqrt(math.fsum([n * n for n in norms])) * factor
    return math.inf if norm > _MOST else norm


def correct(gradients: list[Tensor], factor: float, norm: float, most: float | None) -> None:
    """Multiplies gradients by a number, and where their norm then is more than `most` by what makes it that.

    By the numbers of `torch.nn.utils.clip_grads_with_norm_`, which sends them from the host to the device and waits for that.
    """
    if factor != 1:
        torch._foreach_mul_(gradients, factor)
    if most is not None:
        share = np.float32(1) / (np.float32(norm) + np.float32(1e-6)) * np.float32(most)
        if share < 1:
            torch._foreach_mul_(gradients, float(share))
