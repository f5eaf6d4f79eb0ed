"""What a run will do and need, in figures: steps, workers, bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from ray_app.config.config import default_tracking_uri
from ray_app.record.redact import redact
from ray_app.runs.capacity import megabytes, shared_bytes
from ray_app.runs.outcome.summary import newest_commit
from ray_app.runs.preparing.prepare import Prepared
from ray_app.train.state.state import TrainingState

_STATES = 4  # parameters, gradients, and two values per parameter of the optimizer


@dataclass(frozen=True)
class Figures:
    """A run as it would start now.

    Args:
        workers: W, those that the cluster has room for.
        max_workers: Most that were asked for.
        logical_workers: L.
        rows: Rows of the training data.
        step_rows: Rows of one optimizer step.
        steps_per_epoch: Steps of one epoch.
        total_steps: Steps of the run.
        from_step: Finished steps that it continues from.
        state_bytes: Parameters, buffers, gradients and optimizer of one worker, with two values of the optimizer per parameter.
        shared_bytes: Decoded data in the object store of each node.
        snapshot_bytes: Two snapshots in the memory of the driver's node and one other; 0 without `checkpoint.snapshot_every_steps`.
        run_directory: Where the run is recorded.
        report: Its page.
        tracking: Where MLflow's record is; None without tracking.
    """

    workers: int
    max_workers: int
    logical_workers: int
    rows: int
    step_rows: int
    steps_per_epoch: int
    total_steps: int
    from_step: int
    state_bytes: int
    shared_bytes: int
    snapshot_bytes: int
    run_directory: str
    report: str
    tracking: str | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it; `Figures(**values)` is the same."""
        return asdict(self)

    def lines(self) -> list[tuple[str, str]]:
        """For people: what, and how much."""
        capped = f" of {self.max_workers} asked for" if self.workers < self.max_workers else ""
        done = f", {self.from_step:,} of them done" if self.from_step else ""
        memory = f"{megabytes(self.state_bytes)} of state per worker"
        memory += f", {megabytes(self.shared_bytes)} of decoded data in each node's object store" if self.shared_bytes else ""
        memory += f", {megabytes(self.snapshot_bytes)} of snapshots on the driver's node and one other" if self.snapshot_bytes else ""
        return [
            ("workers (W)", f"{self.workers}{capped}, arithmetic of {self.logical_workers} (L)"),
            ("steps", f"{self.total_steps:,}{done}; {self.steps_per_epoch:,} per epoch of {self.rows:,} rows"),
            ("rows per step", f"{self.step_rows:,}"),
            ("memory", memory),
            ("run directory", self.run_directory),
            ("report", self.report),
            ("MLflow", self.tracking or "none (tracking.enabled is false)"),
        ]


def figures(prepared: Prepared, workers: int) -> Figures:
    """The figures of a run that may start on so many workers."""
    job, config = prepared.job, prepared.job.config
    with torch.random.fork_rng(devices=[]):
        model = TrainingState(config, job.task, torch.device("cpu"), job.total_steps).model
    parameters = sum(value.numel() * value.element_size() for value in model.parameters())
    buffers = sum(value.numel() * value.element_size() for value in model.buffers())
    newest = newest_commit(job) if prepared.resumes else None
    return Figures(
        workers=workers,
        max_workers=config.scaling.most_workers,
        logical_workers=job.plan.logical_workers,
        rows=job.plan.manifest.num_rows,
        step_rows=job.plan.global_batch_size,
        steps_per_epoch=job.plan.steps_per_epoch,
        total_steps=job.total_steps,
        from_step=newest.step if newest else 0,
        state_bytes=_STATES * parameters + buffers,
        shared_bytes=shared_bytes(job),
        snapshot_bytes=2 * (3 * parameters + buffers) if config.checkpoint.snapshot_every_steps else 0,
        run_directory=str(job.paths.root),
        report=str(job.paths.report),
        tracking=redact(default_tracking_uri(config)) if config.tracking.enabled else None,
    )
