"""Saves the state while a run trains, so that it outlives the workers: as checkpoints and as snapshots.

`CheckpointWriter` commits checkpoints to the storage: the state is copied at the step boundary, and a thread does all
the rest. `SnapshotSender` sends snapshots into the memory of actors outside the workers (`SnapshotActor`), more often
than checkpoints are written, so that the loss of all workers costs few steps.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import platform
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil
import ray
import torch
from ray.actor import ActorHandle
from torch import nn

from ray_app.checkpoint.format import Snapshot, file_writers, pack, params_digest, unpack
from ray_app.checkpoint.retention import Pin, skipped_evaluations
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.config.sections import CheckpointSection
from ray_app.devices import kind_of
from ray_app.errors import CheckpointError, ConfigError, LeaseLostError
from ray_app.reduction.world import World
from ray_app.retry import Retry
from ray_app.runlog.evaluations import evaluated_steps
from ray_app.runlog.journal import PendingEvents, StepRecord, put_event
from ray_app.runlog.paths import RunPaths
from ray_app.storage.files import poll_interval_s

logger = logging.getLogger(__name__)

_RETRY = Retry(0.5, jitter=0.5, attempts=6)
"""The attempts to write one checkpoint before it is given up.

All pauses together take up to 16 s, and each failed attempt the time that the storage takes to fail. The next
checkpoint begins only after the last attempt.
"""
_PARTS_TIMEOUT_S = 60.0
"""Seconds that rank 0 waits for the parts of other ranks, in addition to ten times what its own part has taken."""
MAX_SNAPSHOT_ACTORS = 2
"""The number of snapshot actors of a run: one on the driver's node and one on another node."""
_ACTOR_TIMEOUT_S = 60.0
"""Seconds that a worker waits for the answer of a snapshot actor."""


class CheckpointWriter:
    """Commits snapshots as checkpoints, one after the other, and removes checkpoints that are no longer needed.

    A failed write is retried and recorded, and does not stop training. A lost lease stops it: nothing is written any
    more, and the next call raises.

    Args:
        paths: The paths of the run.
        section: The configuration of checkpoints, which says how many to keep.
        best_steps: Returns the steps of the best checkpoints so far, which are kept.
        before_commit: Called with the checkpoint before each commit; if it raises, the write has failed.

    Attributes:
        pending_events: The events of failed writes and skipped evaluations; not to be used while a checkpoint is
            being written.
        stall_s: For each call of `save`, the seconds for which it stopped training.
    """

    def __init__(
        self,
        paths: RunPaths,
        section: CheckpointSection,
        best_steps: Callable[[], list[int]],
        before_commit: Callable[[Commit], None] | None = None,
    ) -> None:
        self._paths = paths
        self._section = section
        self._best_steps = best_steps
        self._store = CheckpointStore(paths)
        self._before_commit = before_commit
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._lease_error: LeaseLostError | None = None
        # Whether this rank's part of the checkpoint is written or has failed, and whether to wait no longer for others.
        self._is_part_done, self._ends_wait = threading.Event(), threading.Event()
        # Checkpoints of which all attempts have failed and files may be left.
        self._failed_commits: list[Commit] = []
        self.pending_events = PendingEvents(paths)
        # Skipped evaluations that have an event, as step and name of the evaluator.
        self._recorded_skips: set[tuple[int, str | None]] = set()
        self.stall_s: list[float] = []

    def save(self, take: Callable[[], Snapshot], commit: Commit) -> None:
        """Copies the state and commits it in the background; first waits until the previous checkpoint is written.

        Args:
            take: Makes the snapshot; called before this method returns.
            commit: Describes the checkpoint; the digest of the parameters and the time are filled in.

        Raises:
            LeaseLostError: A later start of the driver has taken the run over.
        """
        start_s = time.perf_counter()
        self.wait()
        self.raise_if_lost()
        snapshot = take()
        self._is_part_done.clear()
        self._ends_wait.clear()
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, commit), name="checkpoint-writer", daemon=True
        )
        self._thread.start()
        self.stall_s.append(time.perf_counter() - start_s)

    def wait(self) -> None:
        """Waits until no checkpoint is being written."""
        if self._thread is not None:
            self._thread.join()

    def wait_for_part(self) -> None:
        """Waits until this rank's part of a checkpoint in parts is written or has failed."""
        if self._thread is not None:
            self._is_part_done.wait()

    def end_wait(self) -> None:
        """Ends the wait for parts of other ranks; if one is still missing, the checkpoint is not committed."""
        self._ends_wait.set()
        self.wait()

    def commit_written(self, commit: Commit, count: int) -> None:
        """Commits a checkpoint in place of a lost rank if all its parts are written; an error is only logged.

        Args:
            commit: The checkpoint.
            count: Number of its parts.
        """
        try:
            if self._store.commit_parts(commit, count, self._call_before_commit):
                put_event(self._paths, "checkpointed", commit.fence, step=commit.step, why=commit.why)
        except Exception as error:
            logger.warning("The checkpoint of step %d is not committed: %s", commit.step, error)

    def raise_if_lost(self) -> None:
        """Raises if the last write found the lease lost; reads no file, so it can be called after every step.

        Raises:
            LeaseLostError: A later start of the driver has taken the run over.
        """
        if self._lease_error is not None:
            raise self._lease_error

    def wait_for_commit(self) -> None:
        """Waits until the last checkpoint is committed.

        Raises:
            CheckpointError: The last checkpoint could not be written, so the run's result is not on storage.
            LeaseLostError: A later start of the driver has taken the run over.
        """
        self.wait()
        self.raise_if_lost()
        if self._failure is not None:
            raise CheckpointError(
                f"The last checkpoint could not be written: {self._failure}. Free or repair the storage and start"
                " again."
            )

    def _write(self, snapshot: Snapshot, commit: Commit) -> None:
        """Writes a checkpoint, in several attempts if needed; the body of the thread."""
        reasons: list[str] = []

        def handle_failure(error: Exception) -> None:
            if isinstance(error, LeaseLostError):
                raise error
            reasons.append(f"{type(error).__name__}: {error}")
            self._failure = reasons[-1]
            # Another rank has not written its part, which no further attempt of this rank changes.
            if isinstance(error, CheckpointError):
                raise error
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                # Evaluators may have released checkpoints since the last commit, and removing these frees space.
                self._remove_old(commit.fence)

        details: dict[str, Any] = {"step": commit.step}
        write = partial(self._write_once, snapshot, commit)
        try:
            _RETRY.call(write, Exception, f"Writing the checkpoint of step {commit.step}", handle_failure)
        except LeaseLostError as error:
            self._lease_error = error
            logger.error("Checkpoint of step %d is not written: %s", commit.step, error)
        except Exception:
            self._failed_commits.append(commit)
            details |= {"attempts": len(reasons), "reason": reasons[-1]}
            self.pending_events.put("write_failed", commit.fence, **details)
            self._remove_old(commit.fence)
            if snapshot.part is not None and not self._is_part_done.is_set():
                with suppress(OSError):
                    self._store.fail_part(commit, *snapshot.part, reasons[-1])
        else:
            self._failure = None
            if reasons:
                details |= {"attempts": len(reasons) + 1, "reason": reasons[-1]}
                put_event(self._paths, "write_retried", commit.fence, **details)
        finally:
            self._is_part_done.set()

    def _write_once(self, snapshot: Snapshot, commit: Commit) -> None:
        """Writes and commits a checkpoint, and then removes those that are no longer needed.

        Raises:
            LeaseLostError: A later start of the driver has taken the run over.
            Exception: The checkpoint was not committed.
        """
        start_s = time.perf_counter()
        if snapshot.part is not None:
            index, count = snapshot.part
            if not self._is_part_done.is_set():
                self._store.write_part(file_writers(snapshot), commit, index, count)
                self._is_part_done.set()
            if index:
                return
            self._commit_parts(commit, count, _PARTS_TIMEOUT_S + 10 * (time.perf_counter() - start_s))
        else:
            commit = replace(commit, params_digest=params_digest(snapshot.model), time_s=time.time())
            self._call_before_commit(commit)
            self._store.write(file_writers(snapshot), commit)
        duration_s = time.perf_counter() - start_s
        put_event(self._paths, "checkpointed", commit.fence, step=commit.step, why=commit.why, duration_s=duration_s)
        logger.info("The checkpoint of step %d is committed (%s), after %.1f s.", commit.step, commit.why, duration_s)
        self._remove_old(commit.fence)

    def _call_before_commit(self, commit: Commit) -> None:
        if self._before_commit is not None:
            self._before_commit(commit)

    def _commit_parts(self, commit: Commit, count: int, limit_s: float) -> None:
        """Waits for the parts of all ranks and commits them.

        Args:
            commit: The checkpoint.
            count: Number of parts.
            limit_s: Maximum number of seconds to wait.

        Raises:
            CheckpointError: A part could not be written, or is not written in time or before a new generation begins.
            LeaseLostError: A later start of the driver has taken the run over.
            OSError: The storage refused.
        """
        deadline_s = time.monotonic() + limit_s
        while True:
            # The parts are read once more after the wait has ended, so that none that is written is missed.
            is_last = self._ends_wait.is_set() or time.monotonic() > deadline_s
            if self._store.commit_parts(commit, count, self._call_before_commit):
                return
            if is_last:
                raise CheckpointError("other ranks have not written their parts of the checkpoint")
            self._ends_wait.wait(poll_interval_s(self._paths.root) / 10)

    def _record_skipped(self, fence: int, pins: list[Pin], removed_steps: list[int]) -> None:
        """Records each evaluation that will never be made, since its checkpoint is about to be removed.

        Each is recorded once, even if the removal fails and is tried again.

        Args:
            fence: Number of the driver's start.
            pins: The pins of the evaluators.
            removed_steps: The steps of the checkpoints that are about to be removed.
        """
        skipped = skipped_evaluations(removed_steps, pins, time.time()) - self._recorded_skips
        for step, name in sorted(skipped, key=lambda pair: pair[0]):
            if step not in evaluated_steps(self._paths, name):
                details = {"step": step, "reason": "the evaluator lags too far behind"} | ({"by": name} if name else {})
                self.pending_events.put("evaluation_skipped", fence, **details)
                self._recorded_skips.add((step, name))

    def _remove_old(self, fence: int) -> None:
        """Removes checkpoints that are no longer needed and the files of failed writes.

        It logs an error and does not raise, since an old checkpoint that stays must not make the write of the new one
        fail; the next call tries again.
        """
        self.pending_events.flush()
        try:
            while self._failed_commits:
                self._store.discard(self._failed_commits[-1])
                self._failed_commits.pop()
            # The pins are read before the best steps, so that a checkpoint that is evaluated and unpinned in between
            # is protected by its pin or is among the best.
            pins = self._store.read_pins()
            record_skipped = partial(self._record_skipped, fence, pins)
            self._store.retain(self._section.keep_last, self._best_steps(), pins, record_skipped)
        except Exception as error:
            logger.warning("Old checkpoints could not be removed, trying again: %s", error)


@dataclass(frozen=True)
class PackedSnapshot:
    """A snapshot as a `SnapshotActor` stores it.

    Args:
        step: Finished steps.
        files: The contents of the files by name, as `checkpoint.format.pack` makes them.
        sha256: The digest of each file.
        records: The records of steps that may not be on storage yet.
    """

    step: int
    files: dict[str, bytes]
    sha256: dict[str, str]
    records: list[StepRecord]

    def is_intact(self) -> bool:
        """Returns whether the files have the digests that were sent with them."""
        return self.sha256 == {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()}


class SnapshotActor:
    """Stores the newest snapshot of a run in memory; `start_snapshot_actors` starts actors of this class."""

    def __init__(self) -> None:
        self._newest: PackedSnapshot | None = None

    def store_snapshot(self, snapshot: PackedSnapshot) -> None:
        """Stores a snapshot in place of the stored one, unless that one is newer."""
        if self._newest is None or snapshot.step >= self._newest.step:
            self._newest = snapshot

    def newest(self) -> PackedSnapshot | None:
        """Returns the stored snapshot; None if there is none."""
        return self._newest


def check_snapshot_memory(model: nn.Module, free_bytes: int) -> None:
    """Checks that this node has memory for a snapshot actor, which has two: the stored one and the one that arrives.

    Args:
        model: The model; the optimizer is assumed to keep two values per parameter.
        free_bytes: Free memory of this node.

    Raises:
        ConfigError: The free memory is too small.
    """
    needed = 2 * _state_bytes(model)
    if needed > free_bytes:
        raise ConfigError(
            f"checkpoint.snapshot_every_steps needs about {needed / 1e9:.1f} GB of memory on the driver's node and on"
            f" one other node, but {free_bytes / 1e9:.1f} GB are free here. Leave the field out, or start the driver on"
            " a node with more memory."
        )


def _state_bytes(model: nn.Module) -> int:
    """Returns the number of bytes of parameters, buffers, and two values of the optimizer for each parameter."""
    tensors = [*model.parameters(), *model.parameters(), *model.parameters(), *model.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def keeps_copies(world: World, device: torch.device, patience: int | None) -> bool:
    """Returns whether a rank keeps copies of the checkpoints that rank 0 writes, which may be lost before it has.

    On CPUs these are all ranks, so that a checkpoint is lost only with all of them. A copy of the state on a GPU takes
    page-locked memory: there these are the first rank of each host, and rank 1 if there is one host. With
    `evaluate.patience` the end of the run depends on every planned checkpoint, so these are all ranks on GPUs, too.
    """
    first_ranks = {world.hosts.index(host) for host in world.hosts} - {0}
    return kind_of(device).is_host or patience is not None or world.rank in (first_ranks or {1})


def warn_of_copies(model: nn.Module) -> None:
    """Warns if the free memory of this node is too small for the two copies of the state that this rank may keep."""
    needed, free = 2 * _state_bytes(model), psutil.virtual_memory().available
    if needed > free:
        logger.warning(
            "Two copies of the training state take about %.1f GB of the memory of %s, but %.1f GB are free: checkpoints"
            " may kill this worker. Use nodes with more memory.",
            *(needed / 1e9, platform.node(), free / 1e9),
        )


def start_snapshot_actors() -> list[ActorHandle]:
    """Starts the snapshot actors, one on this node and one on another node if there is one; returns their handles."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    this_node = ray.get_runtime_context().get_node_id()
    other_nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != this_node]
    actor = ray.remote(SnapshotActor)
    return [
        actor.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for node in [this_node, *sorted(other_nodes)][:MAX_SNAPSHOT_ACTORS]
    ]


class SnapshotSender:
    """Sends snapshots to the snapshot actors from a thread, one after the other, and fetches the newest from them.

    Args:
        actors: Handles of the snapshot actors; if the list is empty, nothing is sent.
    """

    def __init__(self, actors: list[ActorHandle]) -> None:
        self._actors = actors
        self._thread: threading.Thread | None = None

    def send(self, take: Callable[[], Snapshot], records: list[StepRecord]) -> None:
        """Copies the state and sends it in the background; first waits until the previous snapshot has been sent.

        Args:
            take: Makes the snapshot. It may reuse the memory of the previous one.
            records: The records to store with it, see `PackedSnapshot`.
        """
        if not self._actors:
            return
        self.wait()
        self._thread = threading.Thread(target=self._send, args=(take(), records), name="snapshots", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until no snapshot is being sent."""
        if self._thread is not None:
            self._thread.join()

    def newest(self) -> tuple[Snapshot, list[StepRecord]] | None:
        """Returns the newest intact snapshot that an actor stores, with its records; None if there is none."""
        snapshots: list[PackedSnapshot] = []
        for actor in self._actors:
            try:
                snapshot = ray.get(actor.newest.remote(), timeout=_ACTOR_TIMEOUT_S)
            except (ray.exceptions.RayError, TimeoutError) as error:
                logger.warning("A snapshot actor does not answer: %s", error)
                continue
            if snapshot is not None and snapshot.is_intact():
                snapshots.append(snapshot)
        if not snapshots:
            return None
        newest = max(snapshots, key=lambda snapshot: snapshot.step)
        return unpack(newest.files), newest.records

    def _send(self, snapshot: Snapshot, records: list[StepRecord]) -> None:
        """Packs a snapshot and stores it in all snapshot actors; the body of the thread."""
        files = pack(snapshot)
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        packed = PackedSnapshot(snapshot.step, files, digests, records)
        sent = [actor.store_snapshot.remote(packed) for actor in self._actors]
        done, _ = ray.wait(sent, num_returns=len(sent), timeout=_ACTOR_TIMEOUT_S)
        for reference in done:
            try:
                ray.get(reference)
            except ray.exceptions.RayError as error:
                logger.warning("A snapshot could not be stored: %s", error)
