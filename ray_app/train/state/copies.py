"""Copies of a state in host memory: those of a device are all given to it, through page-locked memory, before any is waited for.

All ranks copy like this, also those that only hold a copy: the next step waits for the slowest of them. Of this the CPU's part has run, not
that of a GPU; tests look at the order of its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, cuda

from ray_app.train.state.page_locked import views_like


def copied(value: dict[str, Any], into: dict[str, Any] | None = None, whole: Callable[[Tensor], Tensor] = Tensor.detach) -> dict[str, Any]:
    """A deep copy with tensors on the CPU, in the memory of those of `into` where they are alike.

    Args:
        value: Tensors in dictionaries, lists and tuples.
        into: What nobody needs any more.
        whole: Makes the tensor to copy of one that is found.
    """
    devices: set[torch.device] = set()
    found: dict[str, Any] = _copied(value, into, whole, devices, iter(views_like(list(_without_memory(value, into)))))
    for device in devices:
        cuda.current_stream(device).synchronize()
    return found


def _without_memory(value: Any, into: Any) -> Iterator[Tensor]:
    """The tensors on a device that have no copy which is alike, in the order of `_copied`."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu" and not _is_alike(value, into):
            yield value
    elif isinstance(value, dict):
        known = into if isinstance(into, dict) else {}
        for k, v in value.items():
            yield from _without_memory(v, known.get(k))
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _without_memory(v, None)


def _is_alike(value: Tensor, into: Any) -> bool:
    return isinstance(into, Tensor) and (into.dtype, into.shape) == (value.dtype, value.shape)


def _copied(value: Any, into: Any, whole: Callable[[Tensor], Tensor], devices: set[torch.device], memory: Iterator[Tensor]) -> Any:
    """The copy, which is not to be read before what these devices were given is done."""
    if isinstance(value, Tensor):
        room = next(memory) if value.device.type != "cpu" and not _is_alike(value, into) else into
        value = whole(value)
        if value.device.type == "cpu":
            return into.copy_(value) if _is_alike(value, into) else value.to("cpu", copy=True).contiguous()
        devices.add(value.device)
        return (room if _is_alike(value, room) else torch.empty(value.shape, dtype=value.dtype)).copy_(value, non_blocking=True)
    if isinstance(value, dict):
        known = into if isinstance(into, dict) else {}
        return {k: _copied(v, known.get(k), whole, devices, memory) for k, v in value.items()}
    if isinstance(value, np.float64 | np.integer | np.bool_):  # as NumPy's functions make them, which no checkpoint is read with
        return value.item()
    if isinstance(value, list | tuple):
        return type(value)(_copied(v, None, whole, devices, memory) for v in value)
    return value
