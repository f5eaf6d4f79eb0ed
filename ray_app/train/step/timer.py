"""Where the time of a worker's steps goes: by the device's clock where a device computes, which the host does not wait for."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import cuda


class Spent(NamedTuple):
    """Seconds of one worker.

    Args:
        compute_s: Of forward and backward, for each logical worker that it plays.
        data_s: That it waited for data before the step.
        other_s: Of anything else since it had the gradient of the step before: the update, what is recorded and kept, hooks.
        step_s: From the beginning of the step before to that of this one; 0 where there was none.
    """

    compute_s: float
    data_s: float
    other_s: float
    step_s: float


UNTOLD = Spent(0.0, 0.0, 0.0, 0.0)
SpentOf = tuple[float, float, float, float]
"""The values of a `Spent`."""


class Timer:
    """See the module.

    Args:
        device: Which computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: Any = [cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else None
        self._began_s = self._computed_s = self._met_s = self._before_s = self._since_s = 0.0

    def begin(self) -> None:
        """A step begins."""
        self._before_s, self._since_s, self._began_s = self._began_s, self._met_s, time.perf_counter()
        if self._events is not None:
            self._events[0].record()

    def computed(self) -> None:
        """The last backward has been given to the device, or is done."""
        self._computed_s = time.perf_counter()
        if self._events is not None:
            self._events[1].record()

    def met(self) -> None:
        """The others' gradients are there."""
        self._met_s = time.perf_counter()

    def spent(self, logical_workers: int, data_s: float) -> Spent:
        """What the step took until now; to be asked when the host has met the device, or it waits for that.

        Args:
            logical_workers: How many were played.
            data_s: See `Spent`.
        """
        compute_s = self._computed_s - self._began_s
        if self._events is not None:
            self._events[1].synchronize()  # nobody waited for it if no logical worker of this rank had rows
            compute_s = self._events[0].elapsed_time(self._events[1]) / 1e3
        if not self._before_s:
            return Spent(compute_s / logical_workers, data_s, 0.0, 0.0)
        other_s = max(0.0, self._began_s - self._since_s - data_s)
        return Spent(compute_s / logical_workers, data_s, other_s, self._began_s - self._before_s)
