"""Restores what a start, or a generation without a state, continues from.

This is the newest snapshot with its records, the newest intact checkpoint, or the initial state.
"""

from __future__ import annotations

import logging
from functools import partial

import torch

from ray_app.checkpoint.format import Snapshot
from ray_app.checkpoint.store import CheckpointStore, Commit, Fallback
from ray_app.errors import CheckpointError, DamagedError
from ray_app.reduction.messages import gather
from ray_app.reduction.world import World
from ray_app.runlog.journal import put_event, read_events
from ray_app.runlog.redaction import redact_value
from ray_app.task import environment
from ray_app.train.checkpointing.persistence import SnapshotSender
from ray_app.train.checkpointing.step_log import StepLog
from ray_app.train.job import Job
from ray_app.train.state.state import NO_STATE, TrainingState

logger = logging.getLogger(__name__)


def restore_state(
    job: Job, state: TrainingState, step_log: StepLog, sender: SnapshotSender, device: torch.device, world: World
) -> None:
    """Loads the newer of the newest snapshot in memory and the newest intact checkpoint, or initializes the state.

    The state is initialized if there is neither a snapshot nor a checkpoint. Of a sharded state all ranks have to call
    this function, which then opens a checkpoint without reading it as a whole.

    Args:
        job: The run.
        state: The state to load into.
        step_log: Receives the records that come with a snapshot.
        sender: Fetches the newest snapshot in memory.
        device: The device that computes; a change of it since the checkpoint is recorded.
        world: The workers of the generation.

    Raises:
        CheckpointError: There are checkpoints, but none is intact, and there is no snapshot; or a branch has none.
        ConfigError: There is neither, and the file with the initial parameters is missing or has other parameters than
            the run began with.
        OSError: The storage does not answer, and there is no snapshot.
    """
    is_sharded = job.config.train.strategy_traits.shards_parameters
    in_memory = None if is_sharded else sender.newest()
    try:
        if is_sharded:
            checkpoint = _open_newest(job, world)
        else:
            checkpoint = CheckpointStore(job.paths).load_newest(
                partial(record_fallback, job), above=in_memory[0].step if in_memory is not None else NO_STATE
            )
    except (OSError, CheckpointError) as error:
        if in_memory is None:
            raise
        logger.warning("Continuing from the snapshot in memory, since no checkpoint can be read: %s", error)
        checkpoint = None
    if in_memory is not None and checkpoint is None:
        snapshot, records = in_memory
        state.backend.adopt(snapshot)
        step_log.add_restored(records)
        put_event(job.paths, "resumed", job.fence, step=state.step, source="snapshot")
        logger.info("The state is restored from the snapshot in memory of step %d.", state.step)
        return
    if checkpoint is None:
        if job.config.run.branch_from is not None:
            raise CheckpointError(f"{job.paths.root} is a branch, and the checkpoint with which it began is missing.")
        if is_sharded and (initial := job.open_initial(world.rank == 0)) is not None:
            state.backend.adopt(Snapshot(0, initial, {}, None))
        elif not is_sharded:
            state.initialize(job.read_initial())
        return
    commit, snapshot = checkpoint
    state.backend.adopt(snapshot)
    if world.rank:
        return
    put_event(job.paths, "resumed", job.fence, step=state.step, source="checkpoint", checkpoint_fence=commit.fence)
    logger.info("The state is restored from the checkpoint of step %d, fence %d.", commit.step, commit.fence)
    now = environment.describe(device)
    if now != commit.environment:
        put_event(job.paths, "environment_changed", job.fence, step=state.step, before=commit.environment, now=now)


def _open_newest(job: Job, world: World) -> tuple[Commit, Snapshot] | None:
    """Opens the newest intact checkpoint on all ranks, each of which verifies some of its files; a collective.

    Rank 0 chooses the checkpoints and records those that are skipped, see `CheckpointStore.load_newest`.
    """
    store = CheckpointStore(job.paths)

    def open_on_all_ranks(commit: Commit) -> Snapshot:
        snapshot, error = None, None
        try:
            store.verify(commit, set(sorted(commit.files)[world.rank :: world.size]).__contains__)
            snapshot = store.open(commit)
        except (CheckpointError, OSError) as caught:
            error = caught
        if errors := [reason for reason in gather(error, world) if reason is not None]:
            # A rank that has not verified a damaged file may not be able to open it.
            raise next((reason for reason in errors if isinstance(reason, DamagedError)), errors[0])
        assert snapshot is not None
        return snapshot

    if world.rank == 0:
        newest = store.load_newest(
            partial(record_fallback, job), read=lambda commit: open_on_all_ranks(gather(commit, world)[0])
        )
        gather(None, world)
        return newest
    opened = None
    while (commit := gather(None, world)[0]) is not None:
        try:
            opened = commit, open_on_all_ranks(commit)
        except CheckpointError:
            opened = None
    return opened


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
    logger.warning("The checkpoint %s is skipped: %s", fallback.name, fallback.reason)
    put_event(job.paths, "fallback", job.fence, **details)
