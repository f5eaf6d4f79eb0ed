"""Whether workers compute what they should: what was found about them, what is told of it, and which checkpoints are
marked.
"""

from __future__ import annotations

import os
import platform

import torch

from ray_app.checkpoint.format import params_digest
from ray_app.errors import PeerLostError
from ray_app.reduction.base import World, gather
from ray_app.runlog.journal import put_event
from ray_app.task.device import describe
from ray_app.train.checkpointing.step_log import StepLog
from ray_app.train.job import Job
from ray_app.train.state.state import TrainingState
from ray_app.train.step.sdc import SdcChecker, SdcFinding, WorkerDevice


class SdcMonitor:
    """What lives through all generations of a worker.

    Args:
        job: The run.
        state: What is trained.
        device: Where this worker computes.
    """

    def __init__(self, job: Job, state: TrainingState, device: torch.device) -> None:
        self._job, self._state, self._device = job, state, device
        self._clean, self._found = dict[str, int](), list[SdcFinding]()
        self._rank = 0

    def mark(self, world: World, recorder: StepLog) -> None:
        """Marks the checkpoints to which a worker that is gone now may have contributed."""
        self._rank = world.rank
        for wrong in self._found if world.rank == 0 else []:
            said = f"{wrong.place.name} ({wrong.place.device}) computed step {wrong.step} wrongly"
            recorder.suspect(wrong.clean + 1, f"{said}; it was last known to be right at step {wrong.clean}")
        self._found.clear()

    def replays(self, world: World) -> SdcChecker | None:
        """What finds a worker that computes wrongly; a collective if that is asked for.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        rate = self._job.config.failure.sdc_check_rate
        if not rate or world.size == 1:
            return None
        here = describe(self._device)
        place = WorkerDevice(f"{platform.node()}, process {os.getpid()}", here["device"], tuple(sorted(here.items())))
        return SdcChecker(rate, self._job.config.seed, gather(place, world), self._clean, self._tell)

    def _tell(self, wrong: SdcFinding) -> None:
        self._found.append(wrong)
        if self._rank == wrong.told_by:
            where = {"rank": wrong.rank, "name": wrong.place.name, "device": wrong.place.device}
            details = {"step": wrong.step, "logical_worker": wrong.logical_worker, "clean": wrong.clean}
            put_event(self._job.paths, "sdc_detected", self._job.fence, **where, **details)

    def compare(self, world: World, done: int) -> None:
        """Holds the parameters of all workers against each other if that is due; those of a minority are replaced in
        the next generation.

        Raises:
            PeerLostError: They are not the same, or a peer left meanwhile.
        """
        every = self._job.config.failure.compare_params_every_steps
        if every is None or done % every or world.size == 1:
            return
        digests = gather(params_digest(self._state.model.state_dict()), world)
        if len(set(digests)) > 1:
            raise PeerLostError(f"after step {done} the parameters of the workers are not the same")
