"""A trace of some steps of rank 0 by `torch.profiler`, in the run's directory."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import torch

from ray_app.record.files import put_atomic
from ray_app.record.progress.journal import put_event
from ray_app.train.job import Job

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
            self._first, self._last = self._wanted if isinstance(self._wanted, list) else (first, first + self._wanted - 1)
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
