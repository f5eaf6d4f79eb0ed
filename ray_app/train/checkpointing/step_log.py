"""Records that some ranks have and others lack: only those travel, and each from one rank.

What is written while a run trains: metrics, progress, checkpoints, snapshots.

Every rank keeps what is not yet known to be on storage, rank 0 writes it. So when rank 0 is lost, the next one goes on
where it stopped, and neither the record of a step nor a planned checkpoint depends on who died when.

The list of the rows that a run skipped because they cannot be decoded: a file each, so that whoever meets one first may
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

StepSpans = tuple[tuple[int, int], ...]
"""First and last of each run of steps that follow each other."""


def step_spans(steps: Iterable[int]) -> StepSpans:
    """The spans of steps in their order."""
    runs = [[step for _, step in run] for _, run in groupby(enumerate(steps), key=lambda pair: pair[1] - pair[0])]
    return tuple((run[0], run[-1]) for run in runs)


def steps_to_send(held: Sequence[StepSpans]) -> dict[int, list[int]]:
    """The steps that each rank has to send: what somebody lacks, from the first who has it."""
    first: dict[StepSpans, int] = {}
    for rank, each in enumerate(held):
        first.setdefault(each, rank)
    kinds = {rank: {step for low, high in each for step in range(low, high + 1)} for each, rank in first.items()}
    known = set.intersection(*kinds.values())
    found: dict[int, list[int]] = {}
    for rank, steps in kinds.items():  # the first ranks first
        if new := sorted(steps - known):
            found[rank] = new
            known |= steps
    return found


def gather_records(kept: Iterable[StepRecord], world: World) -> dict[int, StepRecord]:
    """The records that any rank has, by their steps; a collective.

    Raises:
        PeerLostError: A peer left meanwhile.
    """
    mine = {record.step: record for record in kept}
    for rank, steps in steps_to_send(gather(step_spans(sorted(mine)), world)).items():
        sent: list[Any] = [[mine[step] for step in steps] if rank == world.rank else None]
        with collective():
            dist.broadcast_object_list(sent, src=rank)
        mine = {record.step: record for record in sent[0]} | mine
    return dict(sorted(mine.items()))


logger = logging.getLogger(__name__)

_MAX_RECORDS = 100_000
_MAX_PENDING_CHECKPOINTS = 2
"""Planned checkpoints that another rank than 0 keeps: rank 0 may still write the last but one when the last is due."""


def _same(snapshot: Snapshot) -> Snapshot:
    return snapshot


class StepLog:
    """See the module.

    Args:
        job: The run.
        state: What is trained.
        membership: Knows what is on storage, and shows progress.
        sender: Where snapshots go.
        device: Where it is computed.
        hooks: For fault tests.
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
        self._kept: deque[StepRecord] = deque(maxlen=_MAX_RECORDS)
        self._held: deque[tuple[Commit, Snapshot]] = deque()
        self._sent: Snapshot | None = None
        self._writer: MetricsWriter | None = None
        self._added_step = 0
        self._saver = CheckpointWriter(job.paths, job.config.checkpoint, self._best_steps, self._before_commit)
        self._hook = hooks.before_commit
        self._previous_s = time.perf_counter()

    def collect(self, world: World) -> None:
        """Gives every rank the records that any has; a collective, before the state is shared: who has a state has its
        records, too.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        self._kept = deque(gather_records(self._kept, world).values(), maxlen=_MAX_RECORDS)

    def align(self, world: World, generation: int) -> None:
        """Begins a generation; a collective of all ranks. The new rank 0 writes what the old one may not have written.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        self._forget()
        merged = gather_records(self._kept, world)
        self._kept = deque((record for step, record in merged.items() if step <= self._state.step), maxlen=_MAX_RECORDS)
        self._world, self._generation = world, f"{self._job.fence}.{generation}"
        self._previous_s = time.perf_counter()
        if world.rank == 0:
            for record in merged.values():  # also of steps that are done again, or nobody would know that they are
                self._write(record)
        self._added_step = min(self._added_step, self._state.step)  # steps that are done again are recorded again
        if world.rank == 0:
            committed = self._committed()
            for commit, snapshot in self._held:
                if (commit.step, commit.fence) not in committed:
                    self._wait_for_storage("forming")
                    self._saver.save(partial(_same, snapshot), commit)
            self._make_up({step for step, _ in committed})
        self._report()

    def finished(
        self,
        cursor: Cursor,
        done: int,
        result: StepResult,
        lr: float,
        wait_s: float,
        workers: int | None = None,
        pacing: StragglerReporter | None = None,
    ) -> None:
        """Records a step, the `done`-th of the run; `workers` if the world does not say how many there are."""
        now = time.perf_counter()
        record = StepRecord(
            step=done,
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
            replayed=result.replayed,
            imbalance=pacing.imbalance if pacing is not None else None,
            slow=pacing.slow if pacing is not None else {},
        )
        self._previous_s = now
        self._kept.append(record)
        if self._world.rank == 0:
            self._saver.raise_if_lost()
            self._write(record)
        self._report()
        self._forget()

    def checkpoint(self, cursor: Cursor, why: Literal["cadence", "extra"], alone: bool = False) -> None:
        """Makes a checkpoint of the state of now; `cursor` is the next step. `alone`: without rank 0, which may be
        lost.
        """
        job, step = self._job, self._state.step
        writes = alone or self._world.rank == 0
        if alone:
            for record in self._kept:
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
            self._saver.wait()  # nothing is being written from this memory
            memory = None
            while len(self._held) >= (1 if writes else _MAX_PENDING_CHECKPOINTS):
                memory = self._held.popleft()[1]
            snapshot = self._state.snapshot(memory)
            self._held.append((commit, snapshot))
            return snapshot

        if writes:
            self._wait_for_storage("exchange")
            self._saver.save(take, commit)
        else:
            take()

    def _make_up(self, committed: set[int]) -> None:
        """Makes the checkpoint that is due now: all were lost before it was written, or rank 0 while all took their
        copies for it.
        """
        step = self._state.step
        if (
            step
            and self._job.is_checkpoint_due(step)
            and step not in committed | {commit.step for commit, _ in self._held}
        ):
            self.checkpoint(Cursor.at(step, self._job.plan.steps_per_epoch), "cadence")

    def snapshot(self) -> None:
        """Sends a copy of the state to memory outside the workers."""

        def take() -> Snapshot:
            self._sent = self._state.snapshot(self._sent)
            return self._sent

        if self._state.is_partitioned:
            self._state.snapshot()
        if self._world.rank == 0:
            self._sender.send(take, list(self._kept))

    def suspect(self, after: int, reason: str) -> None:
        """Marks the checkpoints of more finished steps, that of now included if it is being written; see
        `CheckpointStore.mark_suspect`.
        """
        self._wait_for_storage("forming")
        try:
            steps = CheckpointStore(self._job.paths).mark_suspect(after, reason)
        except OSError as error:
            logger.warning("The checkpoints after step %d could not be marked: %s; %s", after, reason, error)
        else:
            put_event(self._job.paths, "suspected", self._job.fence, steps=steps, reason=reason)

    def skip_time(self) -> None:
        """Counts the next step from now: something else was done in between."""
        self._previous_s = time.perf_counter()

    def restored(self, records: list[StepRecord]) -> None:
        """Takes over the records that came with a snapshot."""
        self._kept.extend(records)

    def check(self) -> None:
        """Raises if the last checkpoint, which is the run's result, could not be written."""
        if self._world.rank == 0:
            self._wait_for_storage("exchange")
            self._saver.check()

    def close(self) -> None:
        """Writes what is left."""
        self._saver.wait()
        self._saver.tell()
        self._sender.wait()
        if self._writer is None:
            return
        self._writer.close()
        self._report()
        stalls = [s * 1e3 for s in self._saver.stall_s]
        put_event(self._job.paths, "worker_exit", self._job.fence, step=self._state.step, stalls_ms=stalls)

    def _write(self, record: StepRecord) -> None:
        if self._writer is None:
            self._writer = MetricsWriter(self._job.paths, self._job.fence)
        if record.step > self._added_step:
            self._added_step = record.step
            self._writer.add(record)

    def _report(self) -> None:
        newest = self._kept[-1] if self._world.rank == 0 and self._kept else None
        step = max(self._state.step, self._kept[-1].step if self._kept else 0)
        self._membership.report(step, newest, self._writer.written_step if self._writer is not None else 0)

    def _forget(self) -> None:
        """Drops the records that are on storage."""
        recorded = self._membership.recorded()
        while self._kept and self._kept[0].step <= recorded:
            self._kept.popleft()

    def _before_commit(self, commit: Commit) -> None:
        """Called in the saver's thread: the record of the steps is on storage before the checkpoint is."""
        if self._writer is not None:
            self._writer.flush()
        if self._hook is not None:
            self._hook(commit)

    def _committed(self) -> set[tuple[int, int]]:
        """Step and fence of every checkpoint that is known to be on storage; one that is there and not known of is not
        written again.
        """
        try:
            return {(commit.step, commit.fence) for commit in CheckpointStore(self._job.paths).commits()}
        except OSError as error:
            logger.warning(
                "The checkpoints could not be listed, so those at hand are offered to the storage again: %s", error
            )
            return set()

    def _wait_for_storage(self, then: Phase) -> None:
        """Waits until nothing is being written, for which nobody is ended."""
        self._membership.enter("saving")
        self._saver.wait()
        self._membership.enter(then)

    def _best_steps(self) -> list[int]:
        keep = self._job.config.checkpoint.keep_best
        if self._job.config.evaluate.patience is not None:
            keep = max(1, keep)  # it may be the run's result
        return [e.step for e in self._job.best_first()[:keep]]


class BadRows:
    """What one worker adds to the list.

    Args:
        job: The run.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._pending: dict[int, str] = {}
        self._listed: set[int] = set()

    def note(self, batches: list[MicroBatch]) -> None:
        """Lists the bad rows of a step that is about to be done; what cannot be written now is tried again at the next
        step.

        Raises:
            DataError: The run has met more of them than `data.max_bad_rows`.
        """
        for batch in batches:
            self._pending |= {position: why for position, why in batch.bad.items() if position not in self._listed}
        if not self._pending:
            return
        folder, most = self._job.paths.bad_rows, self._job.config.data.max_bad_rows
        try:
            for position, reason in self._pending.items():
                self._put(position, reason)
            self._listed |= self._pending.keys()
            self._pending = {}
            found = len(list_files(folder))
        except OSError as error:
            logger.warning("Bad rows could not be listed, will try again: %s", error)
            return
        if found > most:
            raise DataError(
                f"{found} rows cannot be decoded, more than data.max_bad_rows = {most}; {folder} lists them with the"
                f" reasons. Start the run"
                " again with a higher limit, and it goes on where it was, or mend the data for a new run."
            )

    def _put(self, position: int, reason: str) -> None:
        path, row_group, row = self._job.plan.manifest.locate(position)
        entry = {"position": position, "path": path, "row_group": row_group, "row": row, "reason": reason}
        put_json(self._job.paths.bad_rows / f"{position:012d}.json", entry)
