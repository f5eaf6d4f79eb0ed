"""Monitors silent data corruption (SDC) over all generations of a worker.

The monitor gathers the workers of each generation for its SDC checks, writes an event for each finding, marks the
checkpoints to which a corrupt worker may have contributed, and compares the parameters of all workers at intervals
(`failure.compare_params_every_steps`).
"""

from __future__ import annotations

import os
import platform

import torch

from ray_app.checkpoint.format import params_digest
from ray_app.errors import PeerLostError
from ray_app.reduction.base import World, gather
from ray_app.runlog.journal import put_event
from ray_app.task.environment import describe
from ray_app.train.checkpointing.step_log import StepLog
from ray_app.train.job import Job
from ray_app.train.state.state import TrainingState
from ray_app.train.step.sdc import ComparedWorkers, SdcFinding, WorkerDevice


class SdcMonitor:
    """Runs SDC detection over all generations of a worker.

    Args:
        job: The run.
        state: The training state.
        device: Device on which this worker computes.
    """

    def __init__(self, job: Job, state: TrainingState, device: torch.device) -> None:
        self._job = job
        self._state = state
        self._device = device
        # Last step in which a recomputed share of a worker was right, by the worker's name, see `ComparedWorkers`.
        self._last_clean_steps = dict[str, int]()
        # The findings for which no checkpoints have been marked yet.
        self._findings = list[SdcFinding]()
        self._rank = 0

    def mark_checkpoints(self, world: World, step_log: StepLog) -> None:
        """Marks as suspect the checkpoints to which a corrupt worker may have contributed.

        It is called at the start of a generation, because the generation in which a worker is found corrupt ends at
        once. All remaining ranks have the findings, and rank 0 marks.
        """
        self._rank = world.rank
        for finding in self._findings if world.rank == 0 else []:
            reason = f"{finding.worker.name} ({finding.worker.device}) computed step {finding.step} wrongly"
            step_log.suspect(finding.clean, f"{reason}; it was last known to be right after step {finding.clean}")
        self._findings.clear()

    def gather_workers(self, world: World) -> ComparedWorkers | None:
        """Returns the workers of a generation for SDC checks; a collective, in which the ranks gather their devices.

        Without SDC checks, or with a single worker, it returns None and is no collective.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        rate = self._job.config.failure.sdc_check_rate
        if not rate or world.size == 1:
            return None
        environment = describe(self._device)
        name = f"{platform.node()}, process {os.getpid()}"
        worker = WorkerDevice(name, environment["device"], tuple(sorted(environment.items())))
        workers = gather(worker, world)
        return ComparedWorkers(rate, self._job.config.seed, workers, self._last_clean_steps, self._report)

    def _report(self, finding: SdcFinding) -> None:
        """Notes a finding; the reporting rank writes the event `sdc_detected`."""
        self._findings.append(finding)
        if self._rank == finding.reporting_rank:
            worker = {"rank": finding.rank, "name": finding.worker.name, "device": finding.worker.device}
            details = {"step": finding.step, "logical_worker": finding.logical_worker, "clean": finding.clean}
            put_event(self._job.paths, "sdc_detected", self._job.fence, **worker, **details)

    def compare_parameters(self, world: World, finished_steps: int) -> None:
        """Compares the parameters of all workers if that is due after this step; a collective then.

        Parameters that differ break the generation; when the next one forms, ranks that differ from the majority get
        the state of the others, see `StateSync.share`.

        Raises:
            PeerLostError: The parameters differ, or a peer left meanwhile.
        """
        every = self._job.config.failure.compare_params_every_steps
        if every is None or finished_steps % every or world.size == 1:
            return
        digests = gather(params_digest(self._state.model.state_dict()), world)
        if len(set(digests)) > 1:
            raise PeerLostError(f"after step {finished_steps} the parameters of the workers are not the same")
