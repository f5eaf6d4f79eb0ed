"""Where a run that is started goes on: from a snapshot in memory, an intact checkpoint, or the beginning."""

from __future__ import annotations

import torch

from ray_app.checkpoint.store import CheckpointStore, Fallback
from ray_app.record.journal import put_event
from ray_app.train import environment
from ray_app.train.job import Job
from ray_app.train.recorder import Recorder
from ray_app.train.snapshots import SnapshotSender
from ray_app.train.state import TrainingState


def restore(job: Job, state: TrainingState, recorder: Recorder, sender: SnapshotSender, device: torch.device) -> None:
    """Gives a state the newest that there is.

    Args:
        job: The run.
        state: Takes it over.
        recorder: Takes over the records that come with a snapshot.
        sender: Knows the snapshots in memory.
        device: Where it is computed.

    Raises:
        CheckpointError: There are checkpoints, but not one is intact.
        ConfigError: There is none yet, and the parameters to begin with are gone.
    """

    def passed_over(fallback: Fallback) -> None:
        put_event(job.paths, "fallback", job.fence, checkpoint=fallback.name, reason=fallback.reason)

    kept = sender.newest()
    found = CheckpointStore(job.paths).load_newest(passed_over)
    if kept is not None and (found is None or kept[0].step > found[0].step):
        snapshot, records = kept
        state.load(snapshot)
        recorder.restored(records)
        put_event(job.paths, "resumed", job.fence, step=state.step, source="snapshot")
        return
    if found is None:
        state.begin(job.read_initial())
        return
    commit, snapshot = found
    state.load(snapshot)
    put_event(job.paths, "resumed", job.fence, step=state.step, source="checkpoint", checkpoint_fence=commit.fence)
    now = environment.describe(device)
    if now != commit.environment:
        put_event(job.paths, "environment_changed", job.fence, step=state.step, before=commit.environment, now=now)
