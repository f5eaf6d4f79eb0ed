"""The statistics of a step, with one record per logical worker.

All ranks gather the records and combine them in the order of the logical workers, so that every rank computes the same
result. The host carries them (`StepStats.gather`), or a device that carries the gradients, too
(`StepStats.gather_on_device`), after which the host has to wait only once.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ray_app.data.windows import MicroBatch
from ray_app.devices import HOST, kind_of, to_device
from ray_app.errors import ConfigError, DataError
from ray_app.plan.order import Cursor
from ray_app.reduction.messages import gather
from ray_app.reduction.peer_errors import check_device_errors, launch_guard
from ray_app.reduction.transport import sum_over_ranks
from ray_app.reduction.world import World
from ray_app.task.losses import DeviceSums, LossSums, MetricKey, ReplicaReduction, check_weight, join_values
from ray_app.train.membership import Flags

_RECORD_FORMAT = "<qQqdqdddddd"
"""The fields of a `ReplicaStats` from `rows` to `weight`, eight bytes each.

`logical_worker`, the first field, is left out, because it is the index of the record in the gathered table. The last
fields, `metrics` and `states`, follow as one float for each. A device computes `loss`, `weight` and these.
"""
_NO_METRICS: Mapping[Any, float] = {}


class TimeBreakdown(NamedTuple):
    """Where one worker's time goes in a step, in seconds.

    Args:
        compute_s: Time of forward and backward in this step, divided by the number of logical workers that the worker
            runs.
        data_s: Time that the worker waited for the data of this step.
        other_s: All other time between the reduction of the previous step and the beginning of this one: the update,
            records, snapshots, hooks; 0 without a previous step.
        step_s: Time from the beginning of the previous step to the beginning of this one; 0 without a previous step.
    """

    compute_s: float
    data_s: float
    other_s: float
    step_s: float


NO_TIME = TimeBreakdown(0.0, 0.0, 0.0, 0.0)
TimeValues = tuple[float, float, float, float]
"""The values of a `TimeBreakdown` in the order of its fields, as the ranks gather them."""


class StepTimer:
    """Measures the `TimeBreakdown` of each step.

    Args:
        device: Device that computes; a device with streams is timed by its events.

    Attributes:
        data_wait_s: Seconds that this rank waited for the data of the step; set by the caller before the step.
    """

    def __init__(self, device: torch.device) -> None:
        self.data_wait_s = 0.0
        self._events = kind_of(device).make_timers(2)
        self._began_s = self._computed_s = self._reduced_s = 0.0
        self._previous_began_s = self._previous_reduced_s = 0.0
        self._num_logical_workers = 1

    def begin(self, logical_workers: int) -> None:
        """Marks the beginning of a step in which this rank runs so many logical workers."""
        self._num_logical_workers = logical_workers
        self._previous_began_s = self._began_s
        self._previous_reduced_s = self._reduced_s
        self._began_s = time.perf_counter()
        if self._events is not None:
            self._events[0].record()

    def computed(self) -> None:
        """Marks that the last backward of the step is done, or has been launched on the device."""
        self._computed_s = time.perf_counter()
        if self._events is not None:
            self._events[1].record()

    def reduced(self) -> None:
        """Marks that the gradients are reduced."""
        self._reduced_s = time.perf_counter()

    def breakdown(self) -> TimeBreakdown:
        """Returns where the time of the step went.

        Call it after the step's device synchronization point; otherwise it waits for the device.
        """
        compute_s = self._computed_s - self._began_s
        if self._events is not None:
            # If no logical worker of this rank had rows, the synchronization point did not wait for this event.
            self._events[1].synchronize()
            compute_s = self._events[0].elapsed_time(self._events[1]) / 1e3
        compute_s /= self._num_logical_workers
        if not self._previous_began_s:
            return TimeBreakdown(compute_s, self.data_wait_s, 0.0, 0.0)
        other_s = max(0.0, self._began_s - self._previous_reduced_s - self.data_wait_s)
        return TimeBreakdown(compute_s, self.data_wait_s, other_s, self._began_s - self._previous_began_s)


class ReplicaStats(NamedTuple):
    """The statistics of one logical worker (replica) for one step.

    Args:
        logical_worker: Number of the logical worker.
        rows: Number of its rows.
        row_hash: Sum of the rows' hashes, modulo 2**64.
        flags: The flags of its rank.
        squared_norm: Its share of the square of the gradient's norm with `local_sgd`, where no gradient is reduced;
            else 0.
        skipped: Number of its planned rows that cannot be decoded.
        compute_s, data_s, other_s, step_s: The time of its rank, see `TimeBreakdown`.
        loss: Its share of the mean loss.
        weight: Sum of its rows' weights.
        metrics: Sum of each metric over its rows, and each value of `ray_app.reduce`.
        states: `Losses.states` of its rows.
    """

    logical_worker: int
    rows: int
    row_hash: int
    flags: int
    squared_norm: float
    skipped: int
    compute_s: float
    data_s: float
    other_s: float
    step_s: float
    loss: float
    weight: float
    metrics: Mapping[MetricKey, float]
    states: Sequence[float] = ()


class StepResult(NamedTuple):
    """The result of a step, the same on all ranks.

    Args:
        loss: Mean loss of the global batch.
        grad_norm: L2 norm of the global gradient before clipping.
        rows: Number of rows of every logical worker.
        row_hash: Sum of row hashes of every logical worker, modulo 2**64.
        flags: All flags that any rank set.
        skipped: Number of planned rows of every logical worker that cannot be decoded.
        weights: Sum of the rows' weights of every logical worker; a row's weight is 1 unless its task gives weights.
        metric_sums: Sum of each metric of the task over the global batch, and each result of `ray_app.reduce`.
        metrics: Mean of each metric over the weight of the rows, and each result of `ray_app.reduce`, by name; empty
            before `rescale_to_weight`.
        states: `Losses.states` of every logical worker with rows.
        running: Value of each metric over the rows of the epoch so far, by name, see `Task.running_metrics`.
        times: Time of every logical worker's rank, see `TimeBreakdown`.
        recomputed: Number of shares that SDC checks recomputed; their checksums were equal.
    """

    loss: float
    grad_norm: float
    rows: list[int]
    row_hash: list[int]
    flags: Flags
    skipped: Sequence[int]
    weights: Sequence[float]
    metric_sums: Mapping[MetricKey, float] = _NO_METRICS
    states: Sequence[Sequence[float]] = ()
    metrics: Mapping[str, float] = _NO_METRICS
    running: Mapping[str, float] = _NO_METRICS
    times: Sequence[TimeValues] = ()
    recomputed: int = 0

    @property
    def weight(self) -> float:
        """Total weight of the rows, by which the means are divided; 0 if no row has weight."""
        return math.fsum(self.weights)

    def check_rows(self, cursor: Cursor, planned: int) -> None:
        """Checks that the step at a cursor has consumed, or skipped as bad, exactly the planned rows.

        Raises:
            DataError: The number of rows is another one.
        """
        rows, skipped = sum(self.rows), sum(self.skipped)
        if rows + skipped != planned:
            raise DataError(
                f"Step {cursor} consumed {rows} rows and skipped {skipped}, {planned} were planned; please report this."
            )

    def rescale_to_weight(self, planned: int) -> StepResult:
        """Returns this result with means over the rows' weight instead of means over the planned rows.

        In this result, before the conversion, the loss and the square of the norm are means over the planned rows. The
        results of `ray_app.reduce` are no means over rows, and stay as they are.

        Args:
            planned: Number of planned rows.
        """
        weight = self.weight
        if (not weight or weight == planned) and not self.metric_sums:
            return self
        metrics = {
            key.name: value if key.reduction else value / weight
            for key, value in self.metric_sums.items()
            if key.reduction or weight
        }
        factor = planned / weight if weight else 1.0
        return self._replace(loss=self.loss * factor, grad_norm=self.grad_norm * math.sqrt(factor), metrics=metrics)


class StepStats:
    """Gathers the statistics of each step in a generation of workers.

    Args:
        world: The workers of the generation.
        measure: Returns the time of this rank in the present step; None if times are not measured.
    """

    def __init__(self, world: World, measure: Callable[[], TimeBreakdown] | None = None) -> None:
        self._world = world
        self._measure = measure
        self._keys: tuple[MetricKey, ...] | None = None
        self._key_set = set[MetricKey]()
        self._num_states = 0
        # The time of the step before, for `gather_on_device`.
        self._previous_times = NO_TIME
        self._record = struct.Struct(_RECORD_FORMAT)

    def gather_batches(
        self,
        batches: Sequence[MicroBatch],
        sums: Sequence[LossSums],
        global_rows: int,
        flags: Flags,
        shares: Sequence[tuple[float, float]] = (),
    ) -> StepResult:
        """Gathers the statistics of all logical workers, see `gather`.

        Args:
            batches: The micro-batches of this rank.
            sums: The sums over the rows of each.
            global_rows: Number of rows over which the loss is a mean.
            flags: The flags of this rank.
            shares: The share of each micro-batch in the mean loss and in the square of the gradient's norm; if empty,
                its part of the mean over `global_rows`, and 0.
        """
        times = self._measure() if self._measure is not None else NO_TIME
        shares = shares or [(batch_sums.loss / global_rows, 0.0) for batch_sums in sums]
        return self.gather(
            [
                make_replica_stats(batch, batch_sums, *share, flags, times)
                for batch, batch_sums, share in zip(batches, sums, shares, strict=True)
            ]
        )

    def gather(self, local_stats: list[ReplicaStats]) -> StepResult:
        """Gathers the statistics of all logical workers and combines them; a collective of all ranks.

        The ranks add tables of integers, in which floats are stored as their bit patterns. Each record comes from one
        rank, and the others add zeros, so the sum is exact.

        Args:
            local_stats: The statistics of this rank's logical workers.

        Raises:
            ConfigError: Logical workers have different metrics.
            PeerLostError: A peer left meanwhile.
        """
        self._agree_on_metrics(local_stats)
        if self._world.size == 1:
            return combine_stats(local_stats)
        return combine_stats(self._unpack(sum_over_ranks(self._pack(local_stats), self._world)))

    def gather_on_device(
        self,
        task: object,
        batches: Sequence[MicroBatch],
        sums: Sequence[DeviceSums | None],
        norms: Sequence[Tensor],
        global_rows: int,
        flags: Flags,
    ) -> tuple[StepResult, list[LossSums], list[float]]:
        """Gathers the statistics of all logical workers on the device, and reads them and the norms; a collective.

        All work is queued before the host waits, for the only time in a step. A rank that has the statistics knows that
        the devices of all ranks have reduced the gradient, which they do first. The times are those of the step before.

        Args:
            task: The task.
            batches: The micro-batches of this rank.
            sums: The sums over the rows of each, on the device.
            norms: Further numbers on the device, each of shape () or (n,).
            global_rows: Number of rows over which the loss is a mean.
            flags: The flags of this rank.

        Returns:
            The result, the sums over the rows of each micro-batch of this rank, and the further numbers.

        Raises:
            ConfigError: Logical workers have different metrics, or weights are negative, infinite or NaN.
            PeerLostError: A collective of the step has failed.
        """
        local_stats = []
        for batch, one in zip(batches, sums, strict=True):
            keys = one.metrics or () if one is not None else ()
            num_states = max(0, one.values.numel() - 2 - len(keys)) if one is not None else 0
            unknown = LossSums(0.0, float(batch.rows), dict.fromkeys(keys, 0.0), [0.0] * num_states)
            local_stats.append(make_replica_stats(batch, unknown, 0.0, 0.0, flags, self._previous_times))
        self._agree_on_metrics(local_stats)
        table = to_device(self._pack(local_stats), norms[0].device)
        floats = table.view(torch.float64)
        on_device = floats[:, -2 - len(self._keys or ()) - self._num_states :]
        for batch, one in zip(batches, sums, strict=True):
            if one is not None:
                on_device[batch.logical_worker, : one.values.numel()] = one.values
        with launch_guard(self._world)():
            dist.all_reduce(table)
        numbers = join_values([floats.view(-1), *norms]).to(HOST, non_blocking=True)
        check_device_errors()
        self._previous_times = self._measure() if self._measure is not None else NO_TIME
        stats = self._unpack(numbers[: table.numel()].view(torch.int64))
        for record in stats:
            check_weight(task, record.weight, record.rows)
        records = [stats[batch.logical_worker] for batch in batches]
        local_sums = [LossSums(record.loss, record.weight, dict(record.metrics), record.states) for record in records]
        result = combine_stats([record._replace(loss=record.loss / global_rows) for record in stats])
        return result, local_sums, numbers[table.numel() :].tolist()

    def _pack(self, local_stats: list[ReplicaStats]) -> Tensor:
        """Returns the table with the records of this rank, and zeros for all others."""
        keys = self._keys or ()
        packed = torch.zeros(self._world.logical_workers, self._record.size // 8, dtype=torch.int64)
        for stats in local_stats:
            states = stats.states or [0.0] * self._num_states
            record = self._record.pack(*stats[1:-2], *(stats.metrics.get(key, 0.0) for key in keys), *states)
            packed[stats.logical_worker] = torch.frombuffer(bytearray(record), dtype=torch.int64)
        return packed

    def _unpack(self, packed: Tensor) -> list[ReplicaStats]:
        """Returns the records of the whole table."""
        keys, n = self._keys or (), len(ReplicaStats._fields) - 3
        return [
            ReplicaStats._make((v, *record[:n], dict(zip(keys, record[n:], strict=False)), record[n + len(keys) :]))
            for v, record in enumerate(self._record.iter_unpack(packed.numpy().tobytes()))
        ]

    def _agree_on_metrics(self, local_stats: list[ReplicaStats]) -> None:
        """Gathers the metrics in the first step with rows, and compares those of later steps with them.

        Raises:
            ConfigError: The metrics differ. After the first step only the rank with other metrics raises.
        """
        if self._keys is None:
            lengths = [len(stats.states) for stats in local_stats]
            gathered = gather((metric_keys(local_stats), max(lengths, default=0)), self._world)
            all_keys = set[tuple[MetricKey, ...]]().union(*(keys for keys, _ in gathered))
            if all_keys:
                self._keys = min(all_keys, key=str)
                self._key_set = set(self._keys)
                self._num_states = max(number for _, number in gathered)
                self._record = struct.Struct(f"{_RECORD_FORMAT}{len(self._keys) + self._num_states}d")
            check_same_metrics(all_keys)
        elif any(stats.rows and stats.metrics.keys() != self._key_set for stats in local_stats):
            check_same_metrics({self._keys, *metric_keys(local_stats)})


def make_replica_stats(
    batch: MicroBatch, sums: LossSums, loss: float, squared_norm: float, flags: Flags, times: TimeBreakdown
) -> ReplicaStats:
    """Returns the statistics of the logical worker of a micro-batch, see `ReplicaStats`."""
    return ReplicaStats(
        batch.logical_worker,
        batch.rows,
        batch.row_hash,
        flags,
        squared_norm,
        batch.num_skipped,
        *times,
        loss,
        sums.weight,
        sums.metrics,
        sums.states,
    )


def metric_keys(stats: Iterable[ReplicaStats]) -> set[tuple[MetricKey, ...]]:
    """Returns the different lists of metrics that logical workers with rows have."""
    return {tuple(sorted(replica.metrics)) for replica in stats if replica.rows}


def check_same_metrics(key_lists: set[tuple[MetricKey, ...]]) -> None:
    """Checks that all logical workers with rows have the same metrics, see `metric_keys`.

    Raises:
        ConfigError: The metrics differ.
    """
    if len(key_lists) > 1:
        lists = " and ".join(sorted(", ".join(key.name for key in keys) or "none" for keys in key_lists))
        raise ConfigError(
            f"The losses of some rows have other metrics than the losses of other rows: {lists}. Return the same names"
            " for every batch, with zeros where a metric has no value."
        )


def combine_stats(table: list[ReplicaStats]) -> StepResult:
    """Returns the result of a step from the statistics of all logical workers, in the order of the logical workers.

    Its loss and the square of its norm are means over the planned rows, see `StepResult.rescale_to_weight`.
    """
    if len(table) == 1 and not table[0].metrics and not table[0].states:
        # The usual case, by fewer calls.
        one = table[0]
        values = one.loss, math.sqrt(one.squared_norm), [one.rows], [one.row_hash], Flags(one.flags)
        return StepResult(*values, [one.skipped], [one.weight], times=[one[6:10]])
    columns = zip(*table, strict=True)
    _, rows, row_hash, flags, squared_norms, skipped, *durations, losses, weights, metrics, states = columns
    # Logical workers without rows have no metrics, or zeros in their place.
    replica_metrics = [sums for sums, replica_rows in zip(metrics, rows, strict=True) if replica_rows]
    sums = {
        key: _combine(key.reduction, [sums[key] for sums in replica_metrics])
        for key in (replica_metrics[0] if replica_metrics else ())
    }
    all_flags = Flags(reduce(or_, flags))
    times = list(zip(*durations, strict=True))
    norm = math.sqrt(sum(squared_norms))
    carried = [values for values, replica_rows in zip(states, rows, strict=True) if replica_rows and values]
    return StepResult(
        exact_sum(losses), norm, list(rows), list(row_hash), all_flags, skipped, weights, sums, carried, times=times
    )


def _combine(reduction: ReplicaReduction | None, values: Sequence[float]) -> float:
    """Returns the sum of a metric's values, or what `ray_app.reduce` makes of them; NaN if one value is NaN."""
    if reduction == "max":
        return math.nan if any(map(math.isnan, values)) else max(values)
    return exact_sum(values) / (len(values) if reduction == "mean" else 1)


def exact_sum(shares: Sequence[float]) -> float:
    """Returns the exact sum of numbers, rounded once; if one is not finite, the plain sum."""
    # `fsum` raises for infinities of both signs.
    return math.fsum(shares) if all(map(math.isfinite, shares)) else sum(shares)
