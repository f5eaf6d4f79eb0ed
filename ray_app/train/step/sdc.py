"""Detects silent data corruption (SDC): a second worker recomputes shares of a step, and checksums are compared.

A share is one logical worker's part of a step. Its gradient is bit-identical wherever it is computed, so two different
checksums of a share show, before the update, that the hardware of one of the two workers errs. Such errors occur at
scale: Dixit et al., "Silent Data Corruptions at Scale", 2021; Hochschild et al., "Cores that don't count", 2021.

`draw_recomputed_shares` is a pure function, so all ranks know which shares of a step are recomputed and by which rank.
In some steps every rank recomputes one share of another rank (at a high rate several), and in the other steps no rank
does, so that no rank waits for one with more work. If two checksums differ, a tie-breaking rank computes the share once
more.

`SdcChecker` does this in the steps of a generation. `SdcMonitor` does the rest over all
generations of a worker: it gathers the workers of each generation, writes an event for each finding, marks the
checkpoints to which a corrupt worker may have contributed, and compares the parameters of all workers at intervals.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from ray_app.data.windows import MicroBatch
from ray_app.errors import IrreproducibleError, PeerLostError, WrongResultError
from ray_app.plan.hashing import key
from ray_app.plan.order import Cursor
from ray_app.reduction.bucketed import BucketedReducer
from ray_app.reduction.messages import gather, receive_value, start_send_value
from ray_app.reduction.peer_errors import collective
from ray_app.reduction.reducer import state_checksum
from ray_app.reduction.transport import P2PWork, sum_over_ranks
from ray_app.reduction.world import World
from ray_app.runlog.journal import put_event
from ray_app.task.environment import describe, device_label
from ray_app.train.job import Job
from ray_app.train.state.state import TrainingState
from ray_app.train.step.micro_batch import Passes, ReplicaBuffers
from ray_app.train.step.step_stats import StepResult

# Salts of the keys, one for each purpose, so that the drawn numbers are independent of each other. Other modules have
# other salts.
_STEP_SALT = 31
_SHIFT_SALT = 32
_SHARE_SALT = 33
_COMPARE_STEPS = 1000
"""Steps between two comparisons of all parameters: a checksum takes about 2 s per GB, as long as several short steps.

Most differences show earlier, in the recomputed shares; the comparison finds those that change no gradient.
"""


class RecomputedShare(NamedTuple):
    """A share and the rank that recomputes it.

    Args:
        logical_worker: The logical worker of the share.
        owner: The rank that runs the logical worker.
        by: The rank that recomputes the share.
    """

    logical_worker: int
    owner: int
    by: int


def draw_recomputed_shares(
    step: int, seed: int, rate: float, blocks: Sequence[range], groups: Sequence[Sequence[int]]
) -> list[RecomputedShare]:
    """Returns the shares that are recomputed in a step.

    Args:
        step: Number of the step, from 0 over the run.
        seed: Seed of the run.
        rate: Fraction of all shares to recompute, 0 to 1.
        blocks: The logical workers of every rank.
        groups: Groups of ranks with comparable results; shares of a rank alone in its group are not recomputed.
    """
    shares = list[RecomputedShare]()
    # In a round every rank recomputes one share of another rank of its group. A rank has up to `max_block` shares, so
    # with `rate * max_block` rounds per step on average the fraction `rate` of all shares is recomputed.
    max_block = max(map(len, blocks))
    mean_rounds = rate * max_block
    # Whether a step has one more round is drawn at random: every n-th step could be the same step in each epoch.
    chance = key(_STEP_SALT, seed, step) / 2**64
    for round_number in range(math.floor(mean_rounds) + (chance < mean_rounds % 1)):
        for group in groups:
            shift = 1 + key(_SHIFT_SALT, seed, step, round_number) % max(1, len(group) - 1)
            for position, by in enumerate(group):
                owner = group[(position + shift) % len(group)]
                # An index beyond the shares of a rank with a smaller block means no share, so that each share of every
                # rank is recomputed equally often.
                index = (key(_SHARE_SALT, seed, step, owner) + round_number) % max_block
                if owner != by and index < len(blocks[owner]):
                    shares.append(RecomputedShare(blocks[owner][index], owner, by))
    return shares


def tie_breaking_ranks(share: RecomputedShare, groups: Sequence[Sequence[int]]) -> list[int]:
    """Returns the ranks that compute a share once more after its two results differed.

    This is a third rank of the group; if there is none, both ranks compute the share again.
    """
    [group] = [group for group in groups if share.by in group]
    others = [rank for rank in group if rank not in (share.owner, share.by)]
    return others[:1] or [share.owner, share.by]


def corrupt_rank(
    share: RecomputedShare, checksums: tuple[int, int], tie_breakers: Sequence[tuple[int, int]]
) -> int | None:
    """Returns the rank with the wrong result; None if the results do not show it.

    Args:
        share: The share.
        checksums: The results of its owner and of the rank that recomputed it, which differ.
        tie_breakers: Rank and result of each of the `tie_breaking_ranks`.
    """
    by_owner, by_other = checksums
    # If the tie-breaking result is that of one rank, the other rank is corrupt.
    rank_by_right_result = {by_owner: share.by, by_other: share.owner}
    if len(tie_breakers) == 1:
        return rank_by_right_result.get(tie_breakers[0][1])
    [(_, owner_again), (_, other_again)] = tie_breakers
    if owner_again != other_again:
        return None
    return rank_by_right_result.get(owner_again)


@dataclass(frozen=True)
class WorkerDevice:
    """A worker and the device on which it computes.

    Args:
        name: Node and process of the worker.
        device: The device, see `device_label`.
        environment: Everything that its results depend on, the name of the device included; only results of workers
            with equal environments are compared.
    """

    name: str
    device: str
    environment: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class SdcFinding:
    """The finding that a worker computed a wrong result.

    Args:
        rank: Rank of the corrupt worker.
        worker: The corrupt worker and its device.
        step: Number of the step, from 1 over the run.
        logical_worker: Logical worker of the share.
        clean: Last step, from 1, in which a recomputed share of that worker was right; 0 if there was none.
        reporting_rank: The rank that records the finding.
    """

    rank: int
    worker: WorkerDevice
    step: int
    logical_worker: int
    clean: int
    reporting_rank: int


@dataclass(frozen=True)
class ComparedWorkers:
    """The workers of a generation that SDC checks compare, with all that an `SdcChecker` takes from the run.

    Args:
        rate: Fraction of all shares to recompute, 0 to 1.
        seed: Seed of the run.
        devices: Worker and device of each rank.
        last_clean_steps: Last step, from 1, in which a recomputed share of a worker was right, by the worker's name.
            It is updated by the checker and outlives the generation.
        report: Called on all ranks with each finding, before the corrupt rank ends.
    """

    rate: float
    seed: int
    devices: Sequence[WorkerDevice]
    last_clean_steps: dict[str, int]
    report: Callable[[SdcFinding], None]

    @cached_property
    def groups(self) -> list[list[int]]:
        """The groups of ranks with equal environments; results are compared within a group."""
        by_environment: dict[tuple[tuple[str, str], ...], list[int]] = {}
        for rank, device in enumerate(self.devices):
            by_environment.setdefault(device.environment, []).append(rank)
        return list(by_environment.values())


class SdcChecker:
    """Recomputes shares of other ranks while the gradients of a step travel, and compares checksums, see the module.

    In a step with recomputed shares `begin` and `check` are collectives of all ranks; in every other step each method
    returns at once.

    Args:
        workers: The workers of the generation.
        world: The same workers with the present assignment of logical workers.
        passes: Computes the gradient of a micro-batch.
        buffers: The buffers of the model.
        reducer: The gradient reducer of the step, which computes the checksums of gradients.
    """

    def __init__(
        self,
        workers: ComparedWorkers,
        world: World,
        passes: Passes,
        buffers: ReplicaBuffers,
        reducer: BucketedReducer,
    ) -> None:
        self._workers = workers
        self._world = world
        self._passes = passes
        self._buffers = buffers
        self._reducer = reducer
        self._blocks = [world.assigned_to(rank) for rank in range(world.size)]
        # The shares of the present step and the logical workers of this rank among them; the micro-batches of this
        # rank by logical worker; those that it recomputes; and the checksums of both by logical worker.
        self._shares = list[RecomputedShare]()
        self._own_shares = set[int]()
        self._batches: dict[int, MicroBatch] = {}
        self._batches_to_recompute = list[MicroBatch]()
        self._buffer_checksums = dict[int, int]()
        self._recomputed_checksums = dict[int, int]()

    def begin(self, step: int, cursor: Cursor, batches: Sequence[MicroBatch], global_rows: int) -> None:
        """Draws the shares of the step and sends their micro-batches to the ranks that recompute them.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        workers = self._workers
        self._shares = draw_recomputed_shares(step, workers.seed, workers.rate, self._blocks, workers.groups)
        self._own_shares = {share.logical_worker for share in self._shares if share.owner == self._world.rank}
        if not self._shares:
            return
        # Findings and messages number steps from 1.
        self._step, self._cursor = step + 1, cursor
        self._global_rows = global_rows
        self._batches = {batch.logical_worker: batch for batch in batches}
        self._buffer_checksums = {}
        self._reducer.watch_checksums(self._own_shares)
        self._batches_to_recompute = self._send_batches(self._shares)

    def _send_batches(self, shares: Sequence[RecomputedShare]) -> list[MicroBatch]:
        """Sends the micro-batches of shares to the ranks that recompute them; returns those for this rank."""
        rank = self._world.rank
        sends = list[P2PWork]()
        batches = list[MicroBatch]()
        with collective():
            for share in shares:
                if rank == share.owner != share.by:
                    sends += start_send_value(_copy_batch(self._batches[share.logical_worker]), share.by)
            for share in shares:
                if rank == share.by:
                    is_local = share.owner == rank
                    batches.append(self._batches[share.logical_worker] if is_local else receive_value(share.owner))
            for send in sends:
                send.wait()
        return batches

    def end_logical_worker(self, logical_worker: int) -> None:
        """Notes the checksum of the buffers after a logical worker of which the share is recomputed."""
        if logical_worker in self._own_shares:
            self._buffer_checksums[logical_worker] = self._buffers.checksum()

    def recompute(self) -> None:
        """Recomputes the shares that are drawn for this rank."""
        if self._shares:
            self._recomputed_checksums = {
                batch.logical_worker: self._recompute(batch) for batch in self._batches_to_recompute
            }

    def _recompute(self, batch: MicroBatch) -> int:
        """Recomputes a share; returns the checksum of its gradient and its buffers.

        The gradients and buffers of this rank stay as they are.
        """
        with self._reducer.free_grads(), self._buffers.from_start():
            self._passes.recompute(self._cursor, batch, self._global_rows)
            return _to_int64(self._buffers.checksum() + self._reducer.gradient_checksum())

    def check(self, result: StepResult) -> StepResult:
        """Compares the two checksums of each share; returns the result with the number of shares.

        All ranks raise, or none does.

        Raises:
            WrongResultError: This rank computed a wrong result.
            PeerLostError: Another rank computed a wrong result and ends, or a peer left.
            IrreproducibleError: The results do not show which rank is corrupt.
        """
        if not self._shares:
            return result
        rank, gradient_checksums = self._world.rank, self._reducer.checksums()
        checksums = {
            v: _to_int64(buffer_checksum + gradient_checksums.get(v, 0))
            for v, buffer_checksum in self._buffer_checksums.items()
        }
        self._reducer.watch_checksums(set())
        # Each rank fills in its own results and zeros, so the sum over ranks has the results of all.
        results = torch.zeros(len(self._shares), 2, dtype=torch.int64)
        for row, share in zip(results, self._shares, strict=True):
            row[0] = checksums[share.logical_worker] if share.owner == rank else 0
            row[1] = self._recomputed_checksums[share.logical_worker] if share.by == rank else 0
        all_results = sum_over_ranks(results, self._world).tolist()
        for share, (by_owner, by_other) in zip(self._shares, all_results, strict=True):
            if by_owner != by_other:
                self._raise_mismatch(share, (by_owner, by_other))
        devices = self._workers.devices
        self._workers.last_clean_steps.update({devices[share.owner].name: self._step for share in self._shares})
        return result._replace(recomputed=len(self._shares))

    def _raise_mismatch(self, share: RecomputedShare, checksums: tuple[int, int]) -> None:
        """Lets the tie-breaking ranks compute a share once more and raises the error of `check`; a collective."""
        ranks, this_rank = tie_breaking_ranks(share, self._workers.groups), self._world.rank
        batches = self._send_batches([share._replace(by=rank) for rank in ranks])
        results = torch.zeros(len(ranks), dtype=torch.int64)
        if this_rank in ranks:
            results[ranks.index(this_rank)] = self._recompute(batches[0])
        tie_breakers = list(zip(ranks, sum_over_ranks(results, self._world).tolist(), strict=True))
        rank = corrupt_rank(share, checksums, tie_breakers)
        if rank is None:
            raise IrreproducibleError(
                f"Step {self._step}: ranks {sorted({share.owner, share.by, *ranks})} computed different gradients of"
                f" logical worker {share.logical_worker}. Either the task draws random numbers that do not depend on"
                " the seed, or uses nondeterministic operations (ray-app check finds both), or a device is faulty, and"
                " there are too few workers to identify it."
            )
        worker = self._workers.devices[rank]
        # The corrupt rank ends, so another one records the finding.
        reporting_rank = next(r for r in range(self._world.size) if r != rank)
        clean = self._workers.last_clean_steps.get(worker.name, 0)
        self._workers.report(SdcFinding(rank, worker, self._step, share.logical_worker, clean, reporting_rank))
        message = (
            f"rank {rank} on {worker.name} ({worker.device}) computed logical worker {share.logical_worker} of step"
            f" {self._step} wrongly"
        )
        if rank == this_rank:
            raise WrongResultError(
                f"This worker is corrupt: {message}; other ranks agree on another result. The worker ends, and no"
                " result of this step is kept."
            )
        raise PeerLostError(f"{message}, and ends")


def _to_int64(value: int) -> int:
    """Returns the signed 64-bit integer that is equal to an integer modulo 2**64."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _copy_batch(batch: MicroBatch) -> MicroBatch:
    """Returns a copy on the CPU: pickle would write the whole storage of a tensor that is a view of a part of it."""
    fields = {name: values.cpu().clone() for name, values in batch.fields.items()}
    return batch._replace(fields=fields, keys=batch.keys.clone())


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

    def mark_checkpoints(self, world: World, suspect: Callable[[int, str], None]) -> None:
        """Marks as suspect the checkpoints to which a corrupt worker may have contributed.

        It is called at the start of a generation, because the generation in which a worker is found corrupt ends at
        once. All remaining ranks have the findings, and rank 0 marks.

        Args:
            world: The workers of the new generation.
            suspect: Marks the checkpoints after a step, and records the reason, see `StepLog.suspect`.
        """
        self._rank = world.rank
        for finding in self._findings if world.rank == 0 else []:
            reason = f"{finding.worker.name} ({finding.worker.device}) computed step {finding.step} wrongly"
            suspect(finding.clean, f"{reason}; its last verified result is from step {finding.clean}")
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
        worker = WorkerDevice(name, device_label(self._device), tuple(sorted(environment.items())))
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
        the state of the others, see `StateBackend.share`.

        Raises:
            PeerLostError: The parameters differ, or a peer left meanwhile.
        """
        if finished_steps % _COMPARE_STEPS or world.size == 1:
            return
        config = self._job.config
        if not config.failure.sdc_check_rate or not config.train.strategy_traits.can_compare_parameters:
            return
        checksums = gather(state_checksum(self._state.model.state_dict().values()), world)
        if len(set(checksums)) > 1:
            raise PeerLostError(f"after step {finished_steps} the parameters of the workers differ")
