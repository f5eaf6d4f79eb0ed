"""Copies of a state in host memory: those of a device are all given to it, through pinned memory, before any is waited for.

Of this the CPU's part has run, not that of a GPU; tests look at the order of its calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, cuda


def copied(value: dict[str, Any], into: dict[str, Any] | None = None, whole: Callable[[Tensor], Tensor] = Tensor.detach) -> dict[str, Any]:
    """A deep copy with tensors on the CPU, in the memory of those of `into` where they are alike.

    Args:
        value: Tensors in dictionaries, lists and tuples.
        into: What nobody needs any more.
        whole: Makes the tensor to copy of one that is found.
    """
    devices: set[torch.device] = set()
    found: dict[str, Any] = _copied(value, into, whole, devices)
    for device in devices:
        cuda.current_stream(device).synchronize()
    return found


def _copied(value: Any, into: Any, whole: Callable[[Tensor], Tensor], devices: set[torch.device]) -> Any:
    """The copy, which is not to be read before what these devices were given is done."""
    if isinstance(value, Tensor):
        value = whole(value)
        alike = isinstance(into, Tensor) and (into.dtype, into.shape) == (value.dtype, value.shape)
        if value.device.type == "cpu":
            return into.copy_(value) if alike else value.to("cpu", copy=True).contiguous()
        devices.add(value.device)
        return (into if alike else _pinned_like(value)).copy_(value, non_blocking=True)
    if isinstance(value, dict):
        known = into if isinstance(into, dict) else {}
        return {k: _copied(v, known.get(k), whole, devices) for k, v in value.items()}
    if isinstance(value, np.float64 | np.integer | np.bool_):  # as NumPy's functions make them, which no checkpoint is read with
        return value.item()
    if isinstance(value, list | tuple):
        return type(value)(_copied(v, None, whole, devices) for v in value)
    return value


def _pinned_like(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
