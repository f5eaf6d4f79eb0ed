"""The table of a step, a line from each logical worker: exchanged between all ranks, and added up in the order of the
logical workers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

import torch

from ray_app.errors import ConfigError
from ray_app.reduction.base import World, gather
from ray_app.reduction.transport import sum_over_ranks
from ray_app.train.membership import Flags
from ray_app.train.step.timing import TimeValues

_LINE = "<qQdqdqddddd"
"""All of a `ReplicaStats` but its first and its last, eight bytes each."""
_NO_METRICS: Mapping[str, float] = {}


class ReplicaStats(NamedTuple):
    """What one logical worker has to say about a step.

    Args:
        logical_worker: Which.
        rows: Its rows.
        row_hash: The sum of their hashes.
        loss: Its share of the mean loss.
        flags: Those of its rank.
        norm: Its share of the square of the gradient's norm, where that is not known from the sum of the gradients.
        skipped: Its planned rows that cannot be decoded.
        weight: The sum of its rows' weights.
        compute_s, data_s, other_s, step_s: Those of its rank, see `TimeBreakdown`.
        metrics: The sum of each of its rows' metrics.
    """

    logical_worker: int
    rows: int
    row_hash: int
    loss: float
    flags: int
    norm: float
    skipped: int
    weight: float
    compute_s: float
    data_s: float
    other_s: float
    step_s: float
    metrics: Mapping[str, float]


class StepResult(NamedTuple):
    """What all ranks know after a step.

    Args:
        loss: Mean loss of the global batch.
        grad_norm: L2 norm of the global gradient before clipping.
        rows: Rows of every logical worker.
        row_hash: Sum of row hashes of every logical worker, modulo 2**64.
        flags: Every flag that any rank set.
        skipped: Planned rows of every logical worker that cannot be decoded.
        weights: The sum of the rows' weights of every logical worker; a row's weight is 1 unless its task says
            otherwise.
        metrics: Mean of each metric of the task's own over the global batch.
        spent: For every logical worker, the time of its rank, see `TimeBreakdown`.
        replayed: Shares that were computed twice, with the same bits.
    """

    loss: float
    grad_norm: float
    rows: list[int]
    row_hash: list[int]
    flags: Flags
    skipped: Sequence[int]
    weights: Sequence[float]
    metrics: Mapping[str, float] = _NO_METRICS
    spent: Sequence[TimeValues] = ()
    replayed: int = 0

    @property
    def weight(self) -> float:
        """What the means are over; 0: no row counts."""
        return math.fsum(self.weights)

    def over_weight(self, planned: int) -> StepResult:
        """Means over the weight, of a loss and a norm that are over the planned rows and of metrics that are sums."""
        weight = self.weight
        if not weight or (weight == planned and not self.metrics):
            return self._replace(metrics={}) if self.metrics else self
        more, metrics = planned / weight, {name: value / weight for name, value in self.metrics.items()}
        return self._replace(loss=self.loss * more, grad_norm=self.grad_norm * math.sqrt(more), metrics=metrics)


class StepStats:
    """The tables of a generation of workers.

    Args:
        world: The workers of now.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._names: tuple[str, ...] | None = None
        self._known, self._line = set[str](), struct.Struct(_LINE)

    def exchange(self, mine: list[ReplicaStats]) -> StepResult:
        """Tells all ranks every logical worker's row; each row of the table comes from one rank, so sums are exact.

        Raises:
            ConfigError: Logical workers have different metrics.
            PeerLostError: A peer left meanwhile.
        """
        self._agree(mine)
        if self._world.size == 1:
            return combine_stats(mine)
        names = self._names or ()
        packed = torch.zeros(self._world.logical_workers, self._line.size // 8, dtype=torch.int64)
        for row in mine:
            line = self._line.pack(*row[1:-1], *(row.metrics.get(name, 0.0) for name in names))
            packed[row.logical_worker] = torch.frombuffer(bytearray(line), dtype=torch.int64)
        packed = sum_over_ranks(packed, self._world)
        fixed = len(ReplicaStats._fields) - 2
        lines = self._line.iter_unpack(packed.numpy().tobytes())
        return combine_stats(
            [
                ReplicaStats._make((v, *line[:fixed], dict(zip(names, line[fixed:], strict=True))))
                for v, line in enumerate(lines)
            ]
        )

    def _agree(self, mine: list[ReplicaStats]) -> None:
        """Learns the names of the metrics in the first step that has rows, then holds all later ones against them."""
        if self._names is None:
            given = {tuple(sorted(row.metrics)) for row in mine if row.rows}
            found = set[tuple[str, ...]]().union(*gather(given, self._world))
            if found:
                self._names = min(found)
                self._known, self._line = set(self._names), struct.Struct(f"{_LINE}{len(self._names)}d")
            check_same_metrics(found)
        elif any(row.rows and row.metrics.keys() != self._known for row in mine):
            check_same_metrics({self._names, *(tuple(sorted(row.metrics)) for row in mine if row.rows)})


def check_same_metrics(names: Iterable[tuple[str, ...]]) -> None:
    """Refuses metrics of which not all logical workers have the same.

    Raises:
        ConfigError: They are not the same.
    """
    several = sorted(set(names))
    if len(several) > 1:
        said = " and ".join(", ".join(each) or "none" for each in several)
        raise ConfigError(
            f"The losses of some rows came with other metrics than those of others: {said}. Return the same names for"
            f" every batch, with"
            " zeros where there is nothing to say."
        )


def combine_stats(table: list[ReplicaStats]) -> StepResult:
    """What follows from a whole table, in the order of the logical workers."""
    _, rows, row_hash, losses, flags, norms, skipped, weights, *spent, sums = zip(*table, strict=True)
    metrics = {name: exact_sum([each.get(name, 0.0) for each in sums]) for name in next(filter(None, sums), ())}
    said = Flags(reduce(or_, flags))
    times = list(zip(*spent, strict=True))
    return StepResult(
        exact_sum(losses), math.sqrt(sum(norms)), list(rows), list(row_hash), said, skipped, weights, metrics, times
    )


def exact_sum(shares: Sequence[float]) -> float:
    """Their exact sum; `fsum` raises for infinities of both signs."""
    return math.fsum(shares) if all(map(math.isfinite, shares)) else sum(shares)
