"""Where a run that is started goes on: from a snapshot in memory, an intact checkpoint, or the beginning."""

from __future__ import annotations

import logging
from functools import partial

import torch

from ray_app.checkpoint.store import CheckpointStore, Fallback
from ray_app.errors import CheckpointError
from ray_app.runlog.journal import put_event, read_events
from ray_app.runlog.redaction import redact_value
from ray_app.task import device as environment
from ray_app.train.checkpointing.snapshots import SnapshotSender
from ray_app.train.checkpointing.step_log import StepLog
from ray_app.train.job import Job
from ray_app.train.state.state import NO_STATE, TrainingState

logger = logging.getLogger(__name__)


def restore_state(
    job: Job, state: TrainingState, recorder: StepLog, sender: SnapshotSender, device: torch.device
) -> None:
    """Gives a state the newest that there is.

    Args:
        job: The run.
        state: Takes it over.
        recorder: Takes over the records that come with a snapshot.
        sender: Knows the snapshots in memory.
        device: Where it is computed.

    Raises:
        CheckpointError: There are checkpoints, but not one is intact, and no snapshot.
        ConfigError: There is nothing to go on from, and the parameters to begin with are gone.
        OSError: The storage does not answer, and there is no snapshot.
    """
    kept = sender.newest()
    try:
        found = CheckpointStore(job.paths).load_newest(
            partial(record_fallback, job), above=kept[0].step if kept is not None else NO_STATE
        )
    except (OSError, CheckpointError) as error:
        if kept is None:
            raise
        logger.warning("Going on from the snapshot in memory, since no checkpoint can be read: %s", error)
        found = None
    if kept is not None and found is None:
        snapshot, records = kept
        state.load(snapshot)
        recorder.restored(records)
        put_event(job.paths, "resumed", job.fence, step=state.step, source="snapshot")
        return
    if found is None:
        state.initialize(job.read_initial())
        return
    commit, snapshot = found
    state.load(snapshot)
    put_event(job.paths, "resumed", job.fence, step=state.step, source="checkpoint", checkpoint_fence=commit.fence)
    now = environment.describe(device)
    if now != commit.environment:
        put_event(job.paths, "environment_changed", job.fence, step=state.step, before=commit.environment, now=now)


def record_fallback(job: Job, fallback: Fallback) -> None:
    """Says and records that a checkpoint is passed over, once in a run, whoever found it damaged: an evaluator may have
    looked before.
    """
    details = {"checkpoint": fallback.name, "reason": fallback.reason}
    try:
        if any(event.details == redact_value(details) for event in read_events(job.paths, "fallback")):
            return
    except OSError as error:  # better twice than never
        logger.warning("The events could not be read: %s", error)
    logger.warning("The checkpoint %s is passed over: %s", fallback.name, fallback.reason)
    put_event(job.paths, "fallback", job.fence, **details)
