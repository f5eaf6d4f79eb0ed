"""The step log: everything that a run writes while it trains, namely metrics, progress, checkpoints and snapshots.

Every rank keeps the records and checkpoints that are not yet known to be on storage, and rank 0 writes them. When rank
0 is lost, the next rank 0 continues where it stopped: neither the record of a step nor a planned checkpoint depends on
which workers were lost when. At the start of a generation `gather_records` completes the records of every rank; only
records that some ranks lack travel, each from one rank.

`BadRows` lists the rows that a run skips because they cannot be decoded, one file for each row, so that any worker can
write it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Literal

import torch
import torch.distributed as dist

from ray_app.checkpoint.format import Snapshot
from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.data.windows import MicroBatch
from ray_app.errors import DataError
from ray_app.plan.order import Cursor
from ray_app.reduction.base import World, collective, gather
from ray_app.runlog.journal import MetricsWriter, StepRecord, put_event
from ray_app.storage.files import list_files, put_json
from ray_app.task import device as environment
from ray_app.train.checkpointing.snapshots import SnapshotSender
from ray_app.train.checkpointing.writer import CheckpointWriter
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import Membership, Phase
from ray_app.train.state.state import TrainingState
from ray_app.train.step.step_stats import StepResult
from ray_app.train.stragglers import StragglerReporter

logger = logging.getLogger(__name__)

_MAX_RECORDS = 100_000
_MAX_PENDING_CHECKPOINTS = 2
"""Planned checkpoints that a rank other than 0 keeps: rank 0 may still write the last but one when the last is due."""


class StepLog:
    """Writes the records, checkpoints and snapshots of a run, see the module.

    Args:
        job: The run.
        state: The training state.
        membership: Knows the last step on storage, and reports progress.
        sender: Sends snapshots to the snapshot actors.
        device: Device that computes.
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
        self._job, self._state, self._membership, self._sender = job, state, membership, sender
        self._environment = environment.describe(device)
        self._world = World(0, 1, 1)
        self._generation = ""
        self._records: deque[StepRecord] = deque(maxlen=_MAX_RECORDS)
        self._pending_checkpoints: deque[tuple[Commit, Snapshot]] = deque()
        self._last_sent: Snapshot | None = None
        self._metrics_writer: MetricsWriter | None = None
        self._last_written_step = 0
        self._checkpoint_writer = CheckpointWriter(
            job.paths, job.config.checkpoint, self._best_steps, self._before_commit
        )
        self._hook = hooks.before_commit
        self._previous_s = time.perf_counter()

    def collect(self, world: World) -> None:
        """Gives every rank the records that any rank has; a collective.

        It comes before the state is shared, so that a rank with a state has the records of its steps, too.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        self._records = deque(gather_records(self._records, world).values(), maxlen=_MAX_RECORDS)

    def align(self, world: World, generation: int) -> None:
        """Begins a generation; a collective of all ranks.

        The new rank 0 writes the records and checkpoints that the old one may not have written.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        self._forget()
        merged = gather_records(self._records, world)
        self._records = deque(
            (record for step, record in merged.items() if step <= self._state.step), maxlen=_MAX_RECORDS
        )
        self._world, self._generation = world, f"{self._job.fence}.{generation}"
        self._previous_s = time.perf_counter()
        if world.rank == 0:
            # The records of steps that this generation repeats are written, too: they show that steps were lost.
            for record in merged.values():
                self._write(record)
        # Steps that are repeated are recorded again.
        self._last_written_step = min(self._last_written_step, self._state.step)
        if world.rank == 0:
            committed = self._committed()
            for commit, snapshot in self._pending_checkpoints:
                if (commit.step, commit.fence) not in committed:
                    self._wait_for_storage("forming")
                    self._checkpoint_writer.save(partial(_identity, snapshot), commit)
            self._save_missed_checkpoint({step for step, _ in committed})
        self._report()

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
            workers: Number of workers, if it is not the size of the world.
            stragglers: The straggler reporter, if there is one.
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
            generation=self._generation,
            skipped=sum(result.skipped),
            weight=None if result.weight == sum(result.rows) else result.weight,
            metrics=result.metrics,
            replayed=result.recomputed,
            imbalance=stragglers.imbalance if stragglers is not None else None,
            slow=stragglers.slow if stragglers is not None else {},
        )
        self._previous_s = now
        self._records.append(record)
        if self._world.rank == 0:
            self._checkpoint_writer.raise_if_lost()
            self._write(record)
        self._report()
        self._forget()

    def checkpoint(self, cursor: Cursor, why: Literal["cadence", "extra"], alone: bool = False) -> None:
        """Makes a checkpoint of the present state.

        Args:
            cursor: Position of the next step in the data.
            why: `cadence` if the checkpoint is planned, otherwise `extra`.
            alone: Whether this rank writes it, whatever its rank: rank 0 may be lost.
        """
        job, step = self._job, self._state.step
        writes = alone or self._world.rank == 0
        if alone:
            for record in self._records:
                self._write(record)
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

        def take() -> Snapshot:
            # The memory of an older snapshot is reused, so no write from it may be in progress.
            self._checkpoint_writer.wait()
            memory = None
            while len(self._pending_checkpoints) >= (1 if writes else _MAX_PENDING_CHECKPOINTS):
                memory = self._pending_checkpoints.popleft()[1]
            snapshot = self._state.snapshot(memory)
            self._pending_checkpoints.append((commit, snapshot))
            return snapshot

        if writes:
            self._wait_for_storage("exchange")
            self._checkpoint_writer.save(take, commit)
        else:
            take()

    def _save_missed_checkpoint(self, committed: set[int]) -> None:
        """Makes the checkpoint that is planned at the present step, if it is missing.

        All workers were lost before it was written, or rank 0 was lost while the ranks made their copies for it.
        """
        step = self._state.step
        if (
            step
            and self._job.is_checkpoint_due(step)
            and step not in committed | {commit.step for commit, _ in self._pending_checkpoints}
        ):
            self.checkpoint(Cursor.at(step, self._job.plan.steps_per_epoch), "cadence")

    def snapshot(self) -> None:
        """Sends a copy of the state to the snapshot actors."""

        def take() -> Snapshot:
            self._last_sent = self._state.snapshot(self._last_sent)
            return self._last_sent

        # The snapshot of a partitioned state is a collective, so the other ranks make it, too.
        if self._state.is_partitioned:
            self._state.snapshot()
        if self._world.rank == 0:
            self._sender.send(take, list(self._records))

    def suspect(self, after: int, reason: str) -> None:
        """Marks the checkpoints after `after` finished steps as suspect, also one that is being written.

        See `CheckpointStore.mark_suspect`.
        """
        self._wait_for_storage("forming")
        try:
            steps = CheckpointStore(self._job.paths).mark_suspect(after, reason)
        except OSError as error:
            logger.warning("The checkpoints after step %d could not be marked: %s; %s", after, reason, error)
        else:
            put_event(self._job.paths, "suspected", self._job.fence, steps=steps, reason=reason)

    def skip_time(self) -> None:
        """Measures the next step from now, because something else was done since the last one."""
        self._previous_s = time.perf_counter()

    def add_restored(self, records: list[StepRecord]) -> None:
        """Adds the records that came with a snapshot."""
        self._records.extend(records)

    def check(self) -> None:
        """Waits for the last checkpoint, which is the run's result.

        Raises:
            CheckpointError: It could not be written.
        """
        if self._world.rank == 0:
            self._wait_for_storage("exchange")
            self._checkpoint_writer.check()

    def close(self) -> None:
        """Writes the pending records and events, and waits for checkpoints and snapshots."""
        self._checkpoint_writer.wait()
        self._checkpoint_writer.put_pending_events()
        self._sender.wait()
        if self._metrics_writer is None:
            return
        self._metrics_writer.close()
        self._report()
        stalls = [stall_s * 1e3 for stall_s in self._checkpoint_writer.stall_s]
        put_event(self._job.paths, "worker_exit", self._job.fence, step=self._state.step, stalls_ms=stalls)

    def _write(self, record: StepRecord) -> None:
        if self._metrics_writer is None:
            self._metrics_writer = MetricsWriter(self._job.paths, self._job.fence)
        if record.step > self._last_written_step:
            self._last_written_step = record.step
            self._metrics_writer.add(record)

    def _report(self) -> None:
        newest = self._records[-1] if self._world.rank == 0 and self._records else None
        step = max(self._state.step, self._records[-1].step if self._records else 0)
        self._membership.report(
            step, newest, self._metrics_writer.written_step if self._metrics_writer is not None else 0
        )

    def _forget(self) -> None:
        """Drops the records that are known to be on storage."""
        recorded = self._membership.recorded()
        while self._records and self._records[0].step <= recorded:
            self._records.popleft()

    def _before_commit(self, commit: Commit) -> None:
        """Writes the pending records before a checkpoint is committed; called in the checkpoint writer's thread."""
        if self._metrics_writer is not None:
            self._metrics_writer.flush()
        if self._hook is not None:
            self._hook(commit)

    def _committed(self) -> set[tuple[int, int]]:
        """Returns step and fence of every checkpoint on storage; empty if the storage cannot list them.

        A checkpoint that is offered to the storage again is not written twice.
        """
        try:
            return {(commit.step, commit.fence) for commit in CheckpointStore(self._job.paths).commits()}
        except OSError as error:
            logger.warning(
                "The checkpoints could not be listed, so those at hand are offered to the storage again: %s", error
            )
            return set()

    def _wait_for_storage(self, then: Phase) -> None:
        """Waits until no checkpoint is being written, in the phase `saving`, in which the watchdog ends no worker.

        Args:
            then: The phase that follows.
        """
        self._membership.enter("saving")
        self._checkpoint_writer.wait()
        self._membership.enter(then)

    def _best_steps(self) -> list[int]:
        """Returns the steps of the best checkpoints so far, as many as are to be kept."""
        num_best = self._job.config.checkpoint.keep_best
        # With early stopping the best checkpoint may become the run's result.
        if self._job.config.evaluate.patience is not None:
            num_best = max(1, num_best)
        return [e.step for e in self._job.best_first()[:num_best]]


def _identity(snapshot: Snapshot) -> Snapshot:
    return snapshot


StepSpans = tuple[tuple[int, int], ...]
"""First and last step of each span of consecutive steps."""


def step_spans(steps: Iterable[int]) -> StepSpans:
    """Returns the spans of ascending steps."""
    runs = [[step for _, step in run] for _, run in groupby(enumerate(steps), key=lambda pair: pair[1] - pair[0])]
    return tuple((run[0], run[-1]) for run in runs)


def steps_to_send(spans_of_ranks: Sequence[StepSpans]) -> dict[int, list[int]]:
    """Returns the steps of the records that each rank has to send to the others.

    These are the steps that at least one rank lacks, each from the first rank that has it.

    Args:
        spans_of_ranks: For each rank the spans of the steps of its records.
    """
    # Most ranks have the same steps, so only the first rank with each kind of spans is looked at.
    first_rank: dict[StepSpans, int] = {}
    for rank, spans in enumerate(spans_of_ranks):
        first_rank.setdefault(spans, rank)
    steps_of_rank = {
        rank: {step for low, high in spans for step in range(low, high + 1)} for spans, rank in first_rank.items()
    }
    covered = set.intersection(*steps_of_rank.values())
    to_send: dict[int, list[int]] = {}
    # The ranks come in ascending order, because `first_rank` was filled in this order.
    for rank, steps in steps_of_rank.items():
        if new := sorted(steps - covered):
            to_send[rank] = new
            covered |= steps
    return to_send


def gather_records(local_records: Iterable[StepRecord], world: World) -> dict[int, StepRecord]:
    """Returns the records that any rank has, by their steps in ascending order; a collective.

    Raises:
        PeerLostError: A peer left meanwhile.
    """
    records = {record.step: record for record in local_records}
    for rank, steps in steps_to_send(gather(step_spans(sorted(records)), world)).items():
        sent: list[Any] = [[records[step] for step in steps] if rank == world.rank else None]
        with collective():
            dist.broadcast_object_list(sent, src=rank)
        records = {record.step: record for record in sent[0]} | records
    return dict(sorted(records.items()))


class BadRows:
    """Adds the bad rows of one worker to the run's list.

    Args:
        job: The run.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._pending: dict[int, str] = {}
        self._listed: set[int] = set()

    def note(self, batches: list[MicroBatch]) -> None:
        """Lists the bad rows of a step that is about to be done.

        Rows that cannot be written now are tried again at the next step.

        Raises:
            DataError: The run has more bad rows than `data.max_bad_rows`.
        """
        for batch in batches:
            self._pending |= {position: why for position, why in batch.bad.items() if position not in self._listed}
        if not self._pending:
            return
        folder, max_bad_rows = self._job.paths.bad_rows, self._job.config.data.max_bad_rows
        try:
            for position, reason in self._pending.items():
                self._put(position, reason)
            self._listed |= self._pending.keys()
            self._pending = {}
            num_bad_rows = len(list_files(folder))
        except OSError as error:
            logger.warning("Bad rows could not be listed, will try again: %s", error)
            return
        if num_bad_rows > max_bad_rows:
            raise DataError(
                f"{num_bad_rows} rows cannot be decoded, more than data.max_bad_rows = {max_bad_rows}; {folder} lists"
                " them with the reasons. Start the run again with a higher limit, and it goes on where it was, or fix"
                " the data for a new run."
            )

    def _put(self, position: int, reason: str) -> None:
        path, row_group, row = self._job.plan.manifest.locate(position)
        entry = {"position": position, "path": path, "row_group": row_group, "row": row, "reason": reason}
        put_json(self._job.paths.bad_rows / f"{position:012d}.json", entry)
