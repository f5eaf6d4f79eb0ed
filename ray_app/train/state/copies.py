"""Copies of a state in host memory: those of a device are all given to it, through pinned memory, before any is waited for.

Of this the CPU's part has run, not that of a GPU; tests look at the order of its calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, cuda


def copied(value: Any, into: Any = None, whole: Callable[[Tensor], Tensor] = Tensor.detach) -> Any:
    """A deep copy with tensors on the CPU, in the memory of those of `into` where they are alike; not to be read before `arrived`.

    Args:
        value: Tensors in dictionaries, lists and tuples.
        into: What nobody needs any more.
        whole: Makes the tensor to copy of one that is found.
    """
    if isinstance(value, Tensor):
        value = whole(value)
        alike = isinstance(into, Tensor) and (into.dtype, into.shape) == (value.dtype, value.shape)
        if value.device.type == "cpu":
            return into.copy_(value) if alike else value.to("cpu", copy=True).contiguous()
        return (into if alike else _pinned_like(value)).copy_(value, non_blocking=True)
    if isinstance(value, dict):
        known = into if isinstance(into, dict) else {}
        return {k: copied(v, known.get(k), whole) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copied(v, None, whole) for v in value)
    return value


def arrived(device: torch.device) -> None:
    """Waits until all that was copied from a device is there."""
    if device.type != "cpu":
        cuda.current_stream(device).synchronize()


def _pinned_like(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
