"""The time that a worker's steps take, and the profiler's trace of some steps.

`StepTimer` measures where the time of each step goes. Computing on a GPU is timed by events on the device, because the
host does not wait for it. `StepProfile` traces some steps of rank 0 with `torch.profiler` and writes the trace into the
run's directory.
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

logger = logging.getLogger(__name__)


class TimeBreakdown(NamedTuple):
    """Where one worker's time goes in a step, in seconds.

    Args:
        compute_s: Time of forward and backward in this step, divided by the number of logical workers that the worker
            runs.
        data_s: Time that the worker waited for the data of this step.
        other_s: All other time between the reduction of the previous step and the beginning of this one: the update,
            records, snapshots, hooks; 0 without a previous step.
        step_s: Time from the beginning of the previous step to the beginning of this one; 0 without a previous step.
    """

    compute_s: float
    data_s: float
    other_s: float
    step_s: float


NO_TIME = TimeBreakdown(0.0, 0.0, 0.0, 0.0)
TimeValues = tuple[float, float, float, float]
"""The values of a `TimeBreakdown` in the order of its fields, as the ranks gather them."""


class StepTimer:
    """Measures the `TimeBreakdown` of each step.

    Args:
        device: Device that computes; a CUDA device is timed by its events.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: Any = [cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else None
        self._began_s = self._computed_s = self._reduced_s = 0.0
        self._previous_began_s = self._previous_reduced_s = 0.0

    def begin(self) -> None:
        """Marks the beginning of a step."""
        self._previous_began_s = self._began_s
        self._previous_reduced_s = self._reduced_s
        self._began_s = time.perf_counter()
        if self._events is not None:
            self._events[0].record()

    def mark_computed(self) -> None:
        """Marks that the last backward of the step is done, or has been launched on the device."""
        self._computed_s = time.perf_counter()
        if self._events is not None:
            self._events[1].record()

    def mark_reduced(self) -> None:
        """Marks that the gradients are reduced."""
        self._reduced_s = time.perf_counter()

    def breakdown(self, logical_workers: int, data_s: float) -> TimeBreakdown:
        """Returns where the time of the step went.

        Call it after the step's device synchronization point; otherwise it waits for the device.

        Args:
            logical_workers: Number of logical workers that this rank ran.
            data_s: Seconds that this rank waited for the data of the step.
        """
        compute_s = self._computed_s - self._began_s
        if self._events is not None:
            # If no logical worker of this rank had rows, the synchronization point did not wait for this event.
            self._events[1].synchronize()
            compute_s = self._events[0].elapsed_time(self._events[1]) / 1e3
        if not self._previous_began_s:
            return TimeBreakdown(compute_s / logical_workers, data_s, 0.0, 0.0)
        other_s = max(0.0, self._began_s - self._previous_reduced_s - data_s)
        return TimeBreakdown(compute_s / logical_workers, data_s, other_s, self._began_s - self._previous_began_s)


class StepProfile:
    """Traces the steps that `train.profile_steps` gives; if the trace cannot be written, the run continues without it.

    Args:
        job: The run, with `train.profile_steps`.
        device: Device that computes.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job = job
        # The first and the last step to trace, from 1.
        self._first, self._last = job.config.train.profile_steps or (0, 0)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._activities = activities
        self._running: torch.profiler.profile | None = None

    def before(self, rank: int, step: int) -> None:
        """Starts the trace if this is rank 0 and the step is one to trace.

        A rank that becomes rank 0 between the first and the last step starts then.

        Args:
            rank: This rank.
            step: Number of the step that begins, from 1.
        """
        if rank == 0 and self._running is None and self._first <= step <= self._last:
            self._first = step
            self._running = torch.profiler.profile(activities=self._activities)
            self._running.__enter__()

    def after(self, step: int) -> None:
        """Ends the trace after the last step to trace; `step` is the number of the step that is done."""
        if step >= self._last:
            self.end(step)

    def end(self, step: int) -> None:
        """Ends the trace and writes it, if it has started; `step` is the number of the last finished step."""
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
