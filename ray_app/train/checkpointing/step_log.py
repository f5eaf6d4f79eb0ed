"""The step log: everything that a run writes while it trains, namely step records, progress, checkpoints and snapshots.

Every rank keeps the records that are not yet known to be on storage, and some ranks copies of the newest checkpoints.
Rank 0 writes both. When rank 0 is lost, the next rank 0 continues where it stopped, so the loss of a worker costs
neither the record of a step nor a planned checkpoint. At the start of a generation `gather_records` completes the
records of every rank; only records that some ranks lack are sent, each by one rank.

`BadRows` lists the rows that a run skips because they cannot be decoded. Every row has a file of its own, so that each
worker can write the files of its rows.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, Literal

import torch

from ray_app.checkpoint.format import Snapshot
from ray_app.checkpoint.store import PARTS_VERSION, CheckpointStore, Commit
from ray_app.data.windows import MicroBatch
from ray_app.errors import DataError
from ray_app.plan.order import Cursor
from ray_app.reduction.messages import broadcast, gather
from ray_app.reduction.world import World
from ray_app.runlog.journal import MetricsWriter, StepRecord, put_event
from ray_app.storage.files import list_files, put_json
from ray_app.task import environment
from ray_app.train.checkpointing.persistence import CheckpointWriter, SnapshotSender, keeps_copies, warn_of_copies
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import Membership, Phase
from ray_app.train.state.state import TrainingState
from ray_app.train.state.transfer import transfer_snapshot
from ray_app.train.step.step_stats import StepResult
from ray_app.train.stragglers import StragglerReporter

logger = logging.getLogger(__name__)

_MAX_RECORDS = 100_000
"""The maximum number of records that a rank keeps; during a longer outage of the storage it drops the oldest."""
_MAX_PENDING_CHECKPOINTS = 2
"""The maximum number of checkpoints that a rank other than 0 keeps copies of, see `keeps_copies`.

There are two, because rank 0 may still be writing one checkpoint when the next is due.
"""


class StepLog:
    """Writes the records, checkpoints and snapshots of a run, see the module.

    Args:
        job: The run.
        state: The training state.
        membership: Reports the progress to the rendezvous, and knows the last step with its record on storage.
        sender: Sends snapshots to the snapshot actors.
        device: The device that computes; checkpoints describe it.
        hooks: Callbacks for fault tests.
    """

    def __init__(
        self,
        job: Job,
        state: TrainingState,
        membership: Membership,
        sender: SnapshotSender,
        device: torch.device,
        hooks: Hooks,
    ) -> None:
        self._job = job
        self._state = state
        self._membership = membership
        self._sender = sender
        self._environment = environment.describe(device)
        self._world, self._keeps_copies = World(0, 1, 1), False
        # Whether every rank writes its part of a checkpoint.
        self._is_sharded = job.config.train.strategy_traits.shards_parameters
        # The number of the driver's start and of the generation, see `StepRecord.generation`.
        self._generation_id = ""
        # The records that are not known to be on storage, by ascending steps.
        self._records: deque[StepRecord] = deque(maxlen=_MAX_RECORDS)
        # The newest checkpoints, which may not be on storage. Their memory is reused for later ones.
        self._pending_checkpoints: deque[tuple[Commit, Snapshot]] = deque()
        # The snapshot that was sent last to the snapshot actors; its memory is reused for the next one.
        self._last_sent: Snapshot | None = None
        # The writer is made when this rank writes its first record, as rank 0 or before it leaves.
        self._metrics_writer: MetricsWriter | None = None
        self._last_written_step = 0
        self._checkpoint_writer = CheckpointWriter(
            job.paths, job.config.checkpoint, lambda: [e.step for e in job.best_first()[:1]], self._before_commit
        )
        self._commit_hook = hooks.before_commit
        # The end of the previous step, from which the duration of the next one counts.
        self._previous_s = time.perf_counter()

    def share_records(self, world: World) -> None:
        """Gives every rank the records that any rank has; a collective.

        It is called before the state is shared, so that every rank that receives a state already has the records of the
        steps in it. If a peer is lost after that, no record is lost with it.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        self._records = deque(gather_records(self._records, world).values(), maxlen=_MAX_RECORDS)

    def wait_for_parts(self, world: World) -> None:
        """Waits until every rank has written its part of a checkpoint in parts; a collective.

        Raises:
            PeerLostError: A peer left meanwhile; its part may be missing.
        """
        if self._is_sharded:
            self._membership.enter("saving")
            self._checkpoint_writer.wait_for_part()
            self._membership.enter("reduction")
            gather(None, world)

    def commit_left_parts(self, world: World, was_broken: bool) -> None:
        """Commits or gives up the checkpoint in parts that a broken generation has left; a collective.

        It is called before the state is shared, which may continue from this checkpoint.

        Args:
            world: The workers of the generation.
            was_broken: Whether the last generation broke for this rank.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        if not self._is_sharded or not any(gather(was_broken, world)):
            return
        self.wait_for_parts(world)
        self._membership.enter("saving")
        self._checkpoint_writer.end_wait()
        pending = gather([(commit, snapshot.part) for commit, snapshot in self._pending_checkpoints], world)
        if world.rank == 0:
            committed = self._list_committed()
            # The rank that had to commit may be lost.
            attempts = {(commit.step, commit.prefix): (commit, part) for of_rank in pending for commit, part in of_rank}
            for commit, part in attempts.values():
                if (commit.step, commit.fence) not in committed and part is not None:
                    self._checkpoint_writer.commit_written(commit, part[1])
        self._membership.enter("forming")
        self._pending_checkpoints.clear()

    def discard_copies(self) -> None:
        """Forgets the copies of checkpoints that are not known to be on storage.

        It is called on a divergent rank: it is not known since when its state has diverged.
        """
        self._pending_checkpoints.clear()

    def begin_generation(self, world: World, generation: int) -> None:
        """Begins a generation, after all ranks have the same state; a collective.

        The new rank 0 writes the records and checkpoints that the old one may not have written.

        Args:
            world: The workers of the generation.
            generation: The number of the generation.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        # The records are shared again, because rank 0 may have restored a snapshot with records since then.
        self._drop_stored_records()
        merged = gather_records(self._records, world)
        self._records = deque(
            (record for step, record in merged.items() if step <= self._state.step), maxlen=_MAX_RECORDS
        )
        if not self._is_sharded:
            self._keeps_copies = keeps_copies(world, self._state.device, self._job.config.evaluate.patience)
            if not self._generation_id and (world.rank == 0 or self._keeps_copies):
                warn_of_copies(self._state.model)
        self._world, self._generation_id = world, f"{self._job.fence}.{generation}"
        self._previous_s = time.perf_counter()
        if world.rank == 0:
            # Records of later steps than that of the state are written, too. They show that these steps were lost.
            for record in merged.values():
                self._write(record)
        self._last_written_step = min(self._last_written_step, self._state.step)
        committed = self._list_committed() if world.rank == 0 else set()
        if not self._is_sharded:
            self._fetch_copies(committed)
            for commit, snapshot in self._pending_checkpoints if world.rank == 0 else ():
                if (commit.step, commit.fence) not in committed:
                    self._wait_for_storage("forming")
                    self._checkpoint_writer.save(partial(replace, snapshot), commit)
        is_missed = world.rank == 0 and self._is_checkpoint_missed({step for step, _ in committed})
        if gather(is_missed, world)[0] if self._is_sharded else is_missed:
            self.checkpoint(Cursor.at(self._state.step, self._job.plan.steps_per_epoch), "cadence")
        self._report()

    def _fetch_copies(self, committed: set[tuple[int, int]]) -> None:
        """Gives rank 0 the copies of checkpoints that it lacks and another rank has, unless they are on storage.

        Args:
            committed: On rank 0 step and fence of every checkpoint on storage.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        world = self._world
        copies: dict[tuple[int, int], Any] = {(c.step, c.fence): (c, s) for c, s in self._pending_checkpoints}
        first_rank: dict[tuple[int, int], int] = {}
        for rank, keys in enumerate(gather(list(copies), world)):
            first_rank = dict.fromkeys(keys, rank) | first_rank
        if not any(first_rank.values()):
            return
        committed = broadcast(committed, 0, world)
        for key, source in sorted(first_rank.items()):
            if source and key not in committed:
                commit, snapshot = copies.get(key, (None, None))
                commit = broadcast(commit, source, world)
                snapshot = transfer_snapshot(snapshot, world, source, [0])
                if world.rank == 0:
                    copies[key] = commit, snapshot
        self._pending_checkpoints = deque(copies[key] for key in sorted(copies))

    def record_step(
        self,
        cursor: Cursor,
        finished_steps: int,
        result: StepResult,
        lr: float,
        wait_s: float,
        workers: int | None = None,
        stragglers: StragglerReporter | None = None,
    ) -> None:
        """Records a finished step.

        Args:
            cursor: Position of the step in the data.
            finished_steps: Finished steps of the run, this one included.
            result: The result of the step.
            lr: Learning rate of the step.
            wait_s: Seconds that this rank waited for data.
            workers: Number of workers; None if it is the size of the world.
            stragglers: The straggler reporter; None if stragglers are not detected.
        """
        now = time.perf_counter()
        record = StepRecord(
            step=finished_steps,
            epoch=cursor.epoch,
            time_s=time.time(),
            loss=result.loss,
            lr=lr,
            grad_norm=result.grad_norm,
            step_ms=(now - self._previous_s) * 1e3,
            data_wait_ms=wait_s * 1e3,
            workers=self._world.size if workers is None else workers,
            rows=result.rows,
            row_hash=result.row_hash,
            generation=self._generation_id,
            skipped=sum(result.skipped),
            weight=None if self._job.task.has_means_over_rows or result.weight == sum(result.rows) else result.weight,
            metrics={**result.metrics, **result.running},
            running=list(result.running),
            recomputed=result.recomputed,
            imbalance=stragglers.imbalance if stragglers is not None else None,
            slow=stragglers.slow if stragglers is not None else {},
        )
        self._previous_s = now
        self._records.append(record)
        if self._world.rank == 0:
            self._checkpoint_writer.raise_if_lost()
            self._write(record)
        self._report()
        self._drop_stored_records()

    def checkpoint(self, cursor: Cursor, why: Literal["cadence", "extra"], alone: bool = False) -> None:
        """Makes a checkpoint of the present state; of a partitioned state `StateBackend.collect` has to come before.

        Rank 0 writes it. Some other ranks keep a copy of the state, see `keeps_copies`; if rank 0 is lost before the
        checkpoint is committed, the next rank 0 writes such a copy. Of a sharded state each rank writes its part.

        Args:
            cursor: Position of the next step in the data.
            why: `cadence` if the checkpoint is planned, otherwise `extra`.
            alone: Whether this worker writes the checkpoint and its records even if it is not rank 0. A worker that
                leaves after a generation broke does so, because rank 0 may be lost. It cannot write a sharded state.
        """
        job, step = self._job, self._state.step
        writes = alone or self._is_sharded or self._world.rank == 0
        if alone:
            for record in self._records:
                self._write(record)
            if self._is_sharded:
                return
        commit = Commit(
            step=step,
            fence=job.fence,
            epoch=cursor.epoch,
            epoch_step=cursor.step,
            why=why,
            config_digest=job.config_digest,
            manifest_digest=job.plan.manifest.digest,
            logical_workers=job.plan.logical_workers,
            params_digest="",
            environment=self._environment,
            time_s=0.0,
        )
        if self._is_sharded:
            # No other attempt has the same generation and step, so that all ranks know the prefix of this one.
            commit = replace(commit, prefix=f"g{self._generation_id}-", schema_version=PARTS_VERSION)

        def take() -> Snapshot:
            memory = None
            # A rank that writes has written the previous checkpoint by now, or failed to, and keeps only the new one.
            while len(self._pending_checkpoints) >= (1 if writes else _MAX_PENDING_CHECKPOINTS):
                memory = self._pending_checkpoints.popleft()[1]
            snapshot = self._state.backend.snapshot(memory)
            self._pending_checkpoints.append((commit, snapshot))
            return snapshot

        if writes or self._keeps_copies:
            # The memory of an older snapshot is reused, so no write from it may be in progress.
            self._wait_for_storage("reduction")
        if writes:
            self._checkpoint_writer.save(take, commit)
        elif self._keeps_copies:
            take()

    def _is_checkpoint_missed(self, committed: set[int]) -> bool:
        """Returns whether a checkpoint is planned at the present step that is neither committed nor pending.

        It is missing if all workers were lost before it was written and the state comes from a snapshot, or if rank 0
        was lost while the ranks made their copies for it.

        Args:
            committed: The steps of the checkpoints on storage.
        """
        step = self._state.step
        is_pending = step in committed | {commit.step for commit, _ in self._pending_checkpoints}
        return bool(step) and self._job.is_checkpoint_due(step) and not is_pending

    def snapshot(self) -> None:
        """Sends a copy of the state to the snapshot actors, from rank 0; see `checkpoint` for a partitioned state."""

        def take() -> Snapshot:
            self._last_sent = self._state.backend.snapshot(self._last_sent)
            return self._last_sent

        if self._world.rank == 0:
            self._sender.send(take, list(self._records))

    def suspect(self, after: int, reason: str) -> None:
        """Marks the checkpoints after a step as suspect, see `CheckpointStore.mark_suspect`, and records an event.

        It waits for a checkpoint that is being written, which is then marked as well.

        Args:
            after: Checkpoints up to this step are not suspect.
            reason: Why the later ones are suspect.
        """
        self._wait_for_storage("forming")
        try:
            steps = CheckpointStore(self._job.paths).mark_suspect(after, reason)
        except OSError as error:
            logger.warning(
                "The checkpoints after step %d could not be marked as suspect (%s): %s", after, reason, error
            )
        else:
            put_event(self._job.paths, "suspected", self._job.fence, steps=steps, reason=reason)

    def skip_time(self) -> None:
        """Measures the duration of the next step from now, to leave out what was done since the last step."""
        self._previous_s = time.perf_counter()

    def add_restored(self, records: list[StepRecord]) -> None:
        """Adds the records that came with a snapshot."""
        self._records.extend(records)

    def wait_for_commit(self) -> None:
        """Waits for the last checkpoint, which is the run's result.

        Raises:
            CheckpointError: The checkpoint could not be written.
            LeaseLostError: A later start of the driver has taken the run over.
        """
        if self._world.rank == 0:
            self._wait_for_storage("reduction")
            self._checkpoint_writer.wait_for_commit()

    def close(self) -> None:
        """Writes the pending records and events, and waits until checkpoints and snapshots are written.

        A rank that has written records also records how long its checkpoints stopped training.
        """
        self._checkpoint_writer.wait()
        self._checkpoint_writer.pending_events.flush()
        self._sender.wait()
        if self._metrics_writer is None:
            return
        self._metrics_writer.close()
        self._report()
        stalls = [stall_s * 1e3 for stall_s in self._checkpoint_writer.stall_s]
        put_event(self._job.paths, "worker_exit", self._job.fence, step=self._state.step, stalls_ms=stalls)

    def _write(self, record: StepRecord) -> None:
        """Writes a record, unless the record of its step or of a later one has been written."""
        if self._metrics_writer is None:
            self._metrics_writer = MetricsWriter(self._job.paths, self._job.fence)
        if record.step > self._last_written_step:
            self._last_written_step = record.step
            self._metrics_writer.add(record)

    def _report(self) -> None:
        """Reports the finished steps to the membership; rank 0 also reports its newest record."""
        newest = self._records[-1] if self._world.rank == 0 and self._records else None
        # With local SGD the records are ahead of the state, which moves only when the logical workers are averaged.
        step = max(self._state.step, self._records[-1].step if self._records else 0)
        self._membership.report(
            step, newest, self._metrics_writer.stored_step if self._metrics_writer is not None else 0
        )

    def _drop_stored_records(self) -> None:
        """Drops the records that are known to be on storage."""
        stored_step = self._membership.stored_step()
        while self._records and self._records[0].step <= stored_step:
            self._records.popleft()

    def flush(self) -> None:
        """Writes the pending records; raises `OSError` if the storage refuses."""
        if self._metrics_writer is not None:
            self._metrics_writer.flush()

    def _before_commit(self, commit: Commit) -> None:
        """Writes the pending records before a checkpoint is committed, so that no checkpoint is ahead of them.

        It is called in the thread of the checkpoint writer.
        """
        self.flush()
        if self._commit_hook is not None:
            self._commit_hook(commit)

    def _list_committed(self) -> set[tuple[int, int]]:
        """Returns the step and the fence of every checkpoint on storage; an empty set if they cannot be listed.

        The pending checkpoints are then written again, which has no effect on those that are committed already.
        """
        try:
            return {(commit.step, commit.fence) for commit in CheckpointStore(self._job.paths).commits()}
        except OSError as error:
            logger.warning(
                "The checkpoints could not be listed, so missing new ones are written again: %s",
                error,
            )
            return set()

    def _wait_for_storage(self, then: Phase) -> None:
        """Waits until no checkpoint is being written.

        It waits in the phase `saving`, which pauses the step watchdog.

        Args:
            then: The phase to enter after that.
        """
        self._membership.enter("saving")
        self._checkpoint_writer.wait()
        self._membership.enter(then)


StepSpans = tuple[tuple[int, int], ...]
"""The first and the last step of each span of consecutive steps: a short description of which steps a rank has."""


def step_spans(steps: Iterable[int]) -> StepSpans:
    """Returns the spans of consecutive steps among `steps`, which are in ascending order."""
    # The difference between a step and its index is the same for all steps of a span.
    groups = groupby(enumerate(steps), key=lambda pair: pair[1] - pair[0])
    spans = [[step for _, step in group] for _, group in groups]
    return tuple((span[0], span[-1]) for span in spans)


def steps_to_send(spans_of_ranks: Sequence[StepSpans]) -> dict[int, list[int]]:
    """Returns, by rank, the steps of the records that the rank has to send to all others.

    These are the steps that at least one rank lacks, each sent by the first rank that has it. Ranks that send nothing
    are left out.

    Args:
        spans_of_ranks: For each rank the spans of the steps of its records.
    """
    # Most ranks have the same steps, so only the first of the ranks with equal spans is considered.
    first_rank: dict[StepSpans, int] = {}
    for rank, spans in enumerate(spans_of_ranks):
        first_rank.setdefault(spans, rank)
    steps_of_rank = {
        rank: {step for low, high in spans for step in range(low, high + 1)} for spans, rank in first_rank.items()
    }
    covered = set.intersection(*steps_of_rank.values())
    to_send: dict[int, list[int]] = {}
    # The ranks are in ascending order here, because `first_rank` was filled in this order.
    for rank, steps in steps_of_rank.items():
        if new := sorted(steps - covered):
            to_send[rank] = new
            covered |= steps
    return to_send


def gather_records(local_records: Iterable[StepRecord], world: World) -> dict[int, StepRecord]:
    """Returns the records that any rank has, by step, in ascending order; a collective.

    Args:
        local_records: The records that this rank has.
        world: The workers of the generation.

    Raises:
        PeerLostError: A peer left meanwhile.
    """
    records = {record.step: record for record in local_records}
    for rank, steps in steps_to_send(gather(step_spans(sorted(records)), world)).items():
        sent = broadcast([records[step] for step in steps] if rank == world.rank else [], rank, world)
        records = {record.step: record for record in sent} | records
    return dict(sorted(records.items()))


class BadRows:
    """Adds the bad rows of one worker to the run's list, which is a folder with a file for each row.

    Args:
        job: The run.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        # The rows that have no file yet, by position, with the reason why they are bad; and the rows that have one.
        self._pending: dict[int, str] = {}
        self._listed: set[int] = set()

    def note(self, batches: list[MicroBatch]) -> None:
        """Lists the bad rows of a step, before the step is run.

        Rows that cannot be written now are tried again at the next step.

        Args:
            batches: The micro-batches of the step.

        Raises:
            DataError: The run has more bad rows than `data.max_bad_rows`; each row of all workers counts once.
        """
        for batch in batches:
            self._pending |= {
                position: reason for position, reason in batch.bad.items() if position not in self._listed
            }
        if not self._pending:
            return
        folder, max_bad_rows = self._job.paths.bad_rows, self._job.config.data.max_bad_rows
        try:
            for position, reason in self._pending.items():
                self._put(position, reason)
            num_bad_rows = len(list_files(folder))
            self._listed |= self._pending.keys()
            self._pending = {}
        except OSError as error:
            logger.warning("Bad rows could not be listed, trying again: %s", error)
            return
        if num_bad_rows > max_bad_rows:
            raise DataError(
                f"{num_bad_rows} rows cannot be decoded, more than data.max_bad_rows = {max_bad_rows}; {folder} lists"
                " them with the reasons. Start the run again with a higher limit to continue it, or fix the data for a"
                " new run."
            )

    def _put(self, position: int, reason: str) -> None:
        """Writes the file of a bad row."""
        path, row_group, row = self._job.plan.manifest.locate(position)
        entry = {"position": position, "path": path, "row_group": row_group, "row": row, "reason": reason}
        put_json(self._job.paths.bad_rows / f"{position:012d}.json", entry)
