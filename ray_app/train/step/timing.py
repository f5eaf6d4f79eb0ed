"""Where the time of a worker's steps goes: by the device's clock where a device computes, which the host does not wait
for.

A trace of some steps of rank 0 by `torch.profiler`, in the run's directory.
"""

from __future__ import annotations

import logging
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import cuda

from ray_app.runlog.journal import put_event
from ray_app.storage.files import put_atomic
from ray_app.train.job import Job


class TimeBreakdown(NamedTuple):
    """Seconds of one worker.

    Args:
        compute_s: Of forward and backward, for each logical worker that it plays.
        data_s: That it waited for data before the step.
        other_s: Of anything else since it had the gradient of the step before: the update, what is recorded and kept,
            hooks.
        step_s: From the beginning of the step before to that of this one; 0 where there was none.
    """

    compute_s: float
    data_s: float
    other_s: float
    step_s: float


NO_TIME = TimeBreakdown(0.0, 0.0, 0.0, 0.0)
TimeValues = tuple[float, float, float, float]
"""The values of a `TimeBreakdown`."""


class StepTimer:
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

    def spent(self, logical_workers: int, data_s: float) -> TimeBreakdown:
        """What the step took until now; to be asked when the host has met the device, or it waits for that.

        Args:
            logical_workers: How many were played.
            data_s: See `TimeBreakdown`.
        """
        compute_s = self._computed_s - self._began_s
        if self._events is not None:
            self._events[1].synchronize()  # nobody waited for it if no logical worker of this rank had rows
            compute_s = self._events[0].elapsed_time(self._events[1]) / 1e3
        if not self._before_s:
            return TimeBreakdown(compute_s / logical_workers, data_s, 0.0, 0.0)
        other_s = max(0.0, self._began_s - self._since_s - data_s)
        return TimeBreakdown(compute_s / logical_workers, data_s, other_s, self._began_s - self._before_s)


logger = logging.getLogger(__name__)

_WARM_UP_STEPS = 3


class StepProfile:
    """Made once for a worker; a trace that cannot be made ends nothing.

    Args:
        job: The run, with `train.profile_steps`.
        device: Where it is computed.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job, self._wanted = job, job.config.train.profile_steps or 0
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._activities = activities
        self._running: torch.profiler.profile | None = None
        self._first = self._last = 0

    def before(self, rank: int, step: int) -> None:
        """Begins before the first of the steps, counted from 1, if this is rank 0."""
        if not self._last:
            first = step + _WARM_UP_STEPS
            self._first, self._last = (
                self._wanted if isinstance(self._wanted, list) else (first, first + self._wanted - 1)
            )
        if rank == 0 and self._running is None and self._first <= step <= self._last:
            self._first = step
            self._running = torch.profiler.profile(activities=self._activities)
            self._running.__enter__()

    def after(self, step: int) -> None:
        """Ends after the last of the steps."""
        if step >= self._last:
            self.end(step)

    def end(self, step: int) -> None:
        """Ends, and writes what there is, if it has begun."""
        running, self._running = self._running, None
        if running is None:
            return
        name = f"steps-{self._first:08d}-{step:08d}.json.gz"
        try:
            running.__exit__(None, None, None)
            with tempfile.TemporaryDirectory(prefix="ray_app-profile-") as folder:
                running.export_chrome_trace(f"{folder}/{name}")
                put_atomic(self._job.paths.profile / name, (Path(folder) / name).read_bytes())
        except Exception as error:
            logger.warning("The trace of steps %d to %d could not be written: %s", self._first, step, error)
            return
        put_event(self._job.paths, "profiled", self._job.fence, step=step, first=self._first, file=f"profile/{name}")
