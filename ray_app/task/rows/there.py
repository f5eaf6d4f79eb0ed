"""Values of the host where a device needs them, without waiting for it: a plain copy of a few bytes waits for all that it was given."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Values that were made on the host, such as random numbers of `keys`, on a device."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def constant(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers that stay what they are, shape (numbers,); made once for each device, so that a step and a CUDA graph find them there."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return _constant(tuple(values), device, dtype)


@cache  # also for as long as a CUDA graph reads it
@torch.inference_mode(False)
def _constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, device=device, dtype=dtype)
