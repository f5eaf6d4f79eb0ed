"""Restores the state from which a run starts or continues: a snapshot in memory, a checkpoint, or the initial state."""

from __future__ import annotations

import logging
from functools import partial

import torch

from ray_app.checkpoint.store import CheckpointStore, Fallback
from ray_app.errors import CheckpointError
from ray_app.runlog.journal import put_event, read_events
from ray_app.runlog.redaction import redact_value
from ray_app.task import environment
from ray_app.train.checkpointing.persistence import SnapshotSender
from ray_app.train.checkpointing.step_log import StepLog
from ray_app.train.job import Job
from ray_app.train.state.state import NO_STATE, TrainingState

logger = logging.getLogger(__name__)


def restore_state(
    job: Job, state: TrainingState, step_log: StepLog, sender: SnapshotSender, device: torch.device
) -> None:
    """Loads the newer of the newest snapshot in memory and the newest intact checkpoint, or initializes the state.

    The state is initialized if there is neither a snapshot nor a checkpoint.

    Args:
        job: The run.
        state: The state to load into.
        step_log: Receives the records that come with a snapshot.
        sender: Fetches the newest snapshot in memory.
        device: The device that computes; a change of it since the checkpoint is recorded.

    Raises:
        CheckpointError: There are checkpoints, but none is intact, and there is no snapshot.
        ConfigError: There is neither, and the file with the initial parameters is missing or has other parameters than
            the run began with.
        OSError: The storage does not answer, and there is no snapshot.
    """
    in_memory = sender.newest()
    try:
        checkpoint = CheckpointStore(job.paths).load_newest(
            partial(record_fallback, job), above=in_memory[0].step if in_memory is not None else NO_STATE
        )
    except (OSError, CheckpointError) as error:
        if in_memory is None:
            raise
        logger.warning("Going on from the snapshot in memory, since no checkpoint can be read: %s", error)
        checkpoint = None
    if in_memory is not None and checkpoint is None:
        snapshot, records = in_memory
        state.sync.adopt(snapshot)
        step_log.add_restored(records)
        put_event(job.paths, "resumed", job.fence, step=state.step, source="snapshot")
        logger.info("The state is restored from the snapshot in memory of step %d.", state.step)
        return
    if checkpoint is None:
        state.initialize(job.read_initial())
        return
    commit, snapshot = checkpoint
    state.sync.adopt(snapshot)
    put_event(job.paths, "resumed", job.fence, step=state.step, source="checkpoint", checkpoint_fence=commit.fence)
    logger.info("The state is restored from the checkpoint of step %d, fence %d.", commit.step, commit.fence)
    now = environment.describe(device)
    if now != commit.environment:
        put_event(job.paths, "environment_changed", job.fence, step=state.step, before=commit.environment, now=now)


def record_fallback(job: Job, fallback: Fallback) -> None:
    """Logs and records that a checkpoint is skipped, unless an earlier start or an evaluator has recorded it."""
    details = {"checkpoint": fallback.name, "reason": fallback.reason}
    try:
        # Secrets are removed from the details of an event before it is stored.
        if any(event.details == redact_value(details) for event in read_events(job.paths, "fallback")):
            return
    except OSError as error:
        # The event is better recorded twice than not at all.
        logger.warning("The events could not be read: %s", error)
    logger.warning("The checkpoint %s is passed over: %s", fallback.name, fallback.reason)
    put_event(job.paths, "fallback", job.fence, **details)
