"""The order of the rows: a pure function of (manifest, seed, epoch, logical workers, global batch size).

1. Row groups are ordered by a keyed hash of (seed, epoch, relative path, index).
2. The concatenated rows are cut into one stream per logical worker; the first (rows mod L) streams get one row more.
3. Within a stream rows are shuffled inside windows. A window holds a whole number of micro-batches, so no step crosses one.
4. Step k of the epoch is the k-th micro-batch of every stream.

Memory and time grow with row groups and windows in use, never with rows; any position is reached directly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ray_app.plan.keyed import hash_array, key, mix_array, permutation
from ray_app.plan.manifest import Manifest

Int64 = npt.NDArray[np.int64]

_GROUPS, _WINDOW = 1, 2  # salts: what a key is for


@dataclass(frozen=True)
class Segment:
    """Consecutive rows [first, first + rows) of one row group, counted from the row group's first row."""

    row_group: int
    first: int
    rows: int


@dataclass(frozen=True)
class Plan:
    """What every epoch of a run looks like.

    Args:
        manifest: The row groups.
        seed: Everything random derives from it.
        logical_workers: L, the number of streams.
        global_batch_size: Rows of one step; divisible by L.
        shuffle_window_rows: Wanted rows of a shuffle window per logical worker, rounded down to whole micro-batches, at least one.
        keep_last: Whether an epoch ends with a smaller step (True) or drops the rows that do not fill one (False).
    """

    manifest: Manifest
    seed: int
    logical_workers: int
    global_batch_size: int
    shuffle_window_rows: int
    keep_last: bool = True

    @cached_property
    def micro_batch(self) -> int:
        """Rows of one logical worker in a full step."""
        return self.global_batch_size // self.logical_workers

    @cached_property
    def steps_per_window(self) -> int:
        """Steps that one window lasts."""
        return max(1, self.shuffle_window_rows // self.micro_batch)

    @property
    def window_rows(self) -> int:
        """Rows of a full window of one logical worker."""
        return self.steps_per_window * self.micro_batch

    def stream_start(self, logical_worker: int) -> int:
        """First row of the stream, counted in the concatenated rows of the epoch."""
        share, rest = divmod(self.manifest.num_rows, self.logical_workers)
        return logical_worker * share + min(logical_worker, rest)

    def stream_rows(self, logical_worker: int) -> int:
        """Rows of the stream, before `keep_last` is looked at."""
        return self.stream_start(logical_worker + 1) - self.stream_start(logical_worker)

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch; 0 if `keep_last` is False and the rows do not fill one step."""
        if self.keep_last:
            return -(-self.stream_rows(0) // self.micro_batch)
        return self.stream_rows(self.logical_workers - 1) // self.micro_batch

    @property
    def rows_per_epoch(self) -> int:
        """Rows that one epoch consumes."""
        return self.manifest.num_rows if self.keep_last else self.steps_per_epoch * self.global_batch_size

    @property
    def windows_per_epoch(self) -> int:
        """Windows of one stream in one epoch."""
        return -(-self.steps_per_epoch // self.steps_per_window)

    def rows_of_step(self, step: int) -> list[int]:
        """Rows of every logical worker in step `step` of an epoch, shape (L,)."""
        done = step * self.micro_batch
        return [max(0, min(self.micro_batch, self.stream_rows(v) - done)) for v in range(self.logical_workers)]

    def global_rows(self, step: int) -> int:
        """Rows of step `step` of an epoch over all logical workers; only the last step of an epoch can be smaller."""
        return self.global_batch_size if step + 1 < self.steps_per_epoch else sum(self.rows_of_step(step))

    def epoch(self, epoch: int) -> EpochOrder:
        """The order of one epoch."""
        return EpochOrder(self, epoch)


@dataclass(frozen=True)
class EpochOrder:
    """The order of the rows in one epoch of a plan."""

    plan: Plan
    epoch: int

    @cached_property
    def group_order(self) -> Int64:
        """The row groups of the manifest in the order of this epoch, shape (row groups,)."""
        manifest = self.plan.manifest
        identity = mix_array(manifest.path_hash[manifest.file_of]) + manifest.index_in_file.astype(np.uint64)
        return np.argsort(hash_array(key(_GROUPS, self.plan.seed, self.epoch), identity), kind="stable")

    @cached_property
    def group_start(self) -> Int64:
        """For each place in `group_order`, its first row in the concatenated rows; one more entry for the end."""
        rows = self.plan.manifest.rows[self.group_order]
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(rows)])

    def window_range(self, logical_worker: int, window: int) -> tuple[int, int]:
        """The concatenated rows [start, stop) of a window of a stream."""
        plan = self.plan
        length = min(plan.stream_rows(logical_worker), plan.steps_per_epoch * plan.micro_batch)
        start = plan.stream_start(logical_worker)
        low, high = (min(length, w * plan.window_rows) for w in (window, window + 1))
        return start + low, start + high

    def window_segments(self, logical_worker: int, window: int) -> list[Segment]:
        """Where the rows of a window are stored, in the order in which they are read."""
        start, stop = self.window_range(logical_worker, window)
        segments = []
        place = int(np.searchsorted(self.group_start, start, side="right")) - 1
        while start < stop:
            take = min(stop, int(self.group_start[place + 1])) - start
            if take > 0:
                segments.append(Segment(int(self.group_order[place]), start - int(self.group_start[place]), take))
            start += take
            place += 1
        return segments

    def window_order(self, logical_worker: int, window: int) -> Int64:
        """The order in which the rows of a window are consumed: indices into its rows as read, shape (rows,)."""
        start, stop = self.window_range(logical_worker, window)
        return permutation(key(_WINDOW, self.plan.seed, self.epoch, logical_worker, window), stop - start)

    def stored_positions(self, logical_worker: int, window: int) -> Int64:
        """Manifest positions of a window's rows in the order in which they are read, shape (rows,)."""
        return positions_of(self.plan.manifest, self.window_segments(logical_worker, window))

    def rows_at(self, logical_worker: int, step: int) -> Int64:
        """Manifest positions of the rows of one logical worker in one step: the definition that a feed must meet."""
        window, offset = divmod(step, self.plan.steps_per_window)
        order = self.stored_positions(logical_worker, window)[self.window_order(logical_worker, window)]
        return order[offset * self.plan.micro_batch : (offset + 1) * self.plan.micro_batch]


def positions_of(manifest: Manifest, segments: list[Segment]) -> Int64:
    """Manifest positions of the rows of `segments`, in their order, shape (rows,)."""
    starts = [int(manifest.first_row[s.row_group]) + s.first for s in segments]
    ranges = [np.arange(start, start + s.rows) for start, s in zip(starts, segments, strict=True)]
    return np.concatenate(ranges) if ranges else np.empty(0, np.int64)
