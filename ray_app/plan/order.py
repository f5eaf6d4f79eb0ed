"""The order of the rows: a pure function of (manifest, seed, epoch, logical workers, global batch size).

1. Row groups are ordered by a keyed hash of (seed, epoch, relative path, index).
2. Each logical worker has a stream. `row`: the concatenated rows are cut into L; the first (rows mod L) streams get one
   row more. `file`: the row groups of its own files. `off`: all row groups, in an order of its own.
3. Within a stream rows are shuffled inside windows. A window holds a whole number of micro-batches, so no step crosses
   one.
4. Step k of the epoch is the k-th micro-batch of every stream.

Memory and time grow with row groups and windows in use, never with rows; any position is reached directly.

The cursor: the whole position of a run in its data.

Micro-batches of rows that are about equally long, so that little of them is padding.

Which files belong to which logical worker, where whole files do.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from ray_app.plan.class_balancing import Classes, Uses
from ray_app.plan.hashing import hash_array, key, mix_array, permutation
from ray_app.plan.manifest import Manifest


@dataclass(frozen=True, order=True)
class Cursor:
    """The next step to do: `step` (from 0) of `epoch` (from 0)."""

    epoch: int = 0
    step: int = 0

    @classmethod
    def at(cls, global_step: int, steps_per_epoch: int) -> Cursor:
        """The cursor after `global_step` finished steps."""
        return cls(*divmod(global_step, steps_per_epoch))

    def next(self, steps_per_epoch: int) -> Cursor:
        """The cursor one step later."""
        return Cursor(self.epoch, self.step + 1) if self.step + 1 < steps_per_epoch else Cursor(self.epoch + 1, 0)


Int64 = npt.NDArray[np.int64]


def order_by_length(lengths: Int64, micro_batch: int, base: int) -> Int64:
    """An order of a window's rows: those of a micro-batch are about equally long, and short and long micro-batches are
    mixed.

    Logical workers that take the same key have micro-batches of like lengths in the same step, so none waits for
    another. The rows that do not fill a micro-batch stay the last ones.

    Args:
        lengths: Of the rows in their shuffled order, shape (rows,).
        micro_batch: Rows of a micro-batch.
        base: Key of the order of the micro-batches.

    Returns:
        Indices into the rows, shape (rows,).
    """
    full = len(lengths) // micro_batch
    alike = np.argsort(lengths[: full * micro_batch], kind="stable").reshape(full, micro_batch)
    return np.concatenate([alike[permutation(base, full)].reshape(-1), np.arange(full * micro_batch, len(lengths))])


_FILES = 4  # salt: what a key is for


def assign_files(manifest: Manifest, seed: int, logical_workers: int) -> Int64:
    """The logical worker of every file, shape (files,).

    Files go, from the largest to the smallest, to whoever has the fewest rows (Graham 1969: at most 4/3 of the best
    possible longest stream); a keyed hash orders files of equal size. Logical worker 0 then has the most rows, the last
    one the fewest.
    """
    rows = count_rows_by_file(manifest)
    hashed = hash_array(key(_FILES, seed), manifest.path_hash)
    order = np.lexsort((hashed, -rows))
    found = np.zeros(len(rows), np.int64)
    least = [(0, v) for v in range(logical_workers)]
    for file in order.tolist():
        held, v = least[0]
        found[file] = v
        heapq.heapreplace(least, (held + int(rows[file]), v))
    most_first = sorted(range(logical_workers), key=lambda v: (-next(held for held, w in least if w == v), v))
    return np.argsort(np.array(most_first))[found]


def count_rows_by_file(manifest: Manifest) -> Int64:
    """Rows of every file, shape (files,)."""
    return np.bincount(manifest.file_of, weights=manifest.rows, minlength=len(manifest.paths)).astype(np.int64)


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

    Args: manifest: The row groups. seed: Everything random derives from it. logical_workers: L, the number of streams.
        global_batch_size: Rows of one step; divisible by L. shuffle_window_rows: Wanted rows of a shuffle window per
        logical worker, rounded down to whole micro-batches, at least one. keep_last: Whether an epoch ends with smaller
        steps (True) or drops the rows that do not fill one (False). shard: What a stream is made of, see the module.
        classes: The class of every row, if rows are to be repeated so that all classes are used equally often; not with
        `file`. by_length: The field by whose lengths the rows of a window are put into micro-batches, see
        `plan/order.py`: by whoever has read
            them, so that nothing here says which of the window's rows a step has.
    """

    manifest: Manifest
    seed: int
    logical_workers: int
    global_batch_size: int
    shuffle_window_rows: int
    keep_last: bool = True
    shard: Literal["row", "file", "off"] = "row"
    classes: Classes | None = None
    by_length: str | None = None

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

    @cached_property
    def owner(self) -> Int64:
        """The logical worker of every file, where whole files belong to one, shape (files,)."""
        return assign_files(self.manifest, self.seed, self.logical_workers)

    @property
    def all_rows(self) -> int:
        """Rows of the data set, each counted as often as an epoch uses it."""
        return self.classes.rows_per_epoch if self.classes is not None else self.manifest.num_rows

    def stream_start(self, logical_worker: int) -> int:
        """First row of the stream, counted in the concatenated rows of its row groups."""
        if self.shard != "row":
            return 0
        share, rest = divmod(self.all_rows, self.logical_workers)
        return logical_worker * share + min(logical_worker, rest)

    @cached_property
    def _stream_rows(self) -> list[int]:
        if self.shard == "off":
            return [self.all_rows] * self.logical_workers
        if self.shard == "file":
            held = np.bincount(self.owner, weights=count_rows_by_file(self.manifest), minlength=self.logical_workers)
            return held.astype(np.int64).tolist()
        return [self.stream_start(v + 1) - self.stream_start(v) for v in range(self.logical_workers)]

    def stream_rows(self, logical_worker: int) -> int:
        """Rows of the stream, before `keep_last` is looked at; logical worker 0 has the most."""
        return self._stream_rows[logical_worker]

    @cached_property
    def full_steps(self) -> int:
        """Steps of an epoch in which all logical workers have all their rows; they come first."""
        return min(self._stream_rows) // self.micro_batch

    @cached_property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch; 0 if `keep_last` is False and the rows do not fill one step."""
        return -(-max(self._stream_rows) // self.micro_batch) if self.keep_last else self.full_steps

    @property
    def rows_per_epoch(self) -> int:
        """Rows that one epoch consumes, repetitions counted."""
        return sum(self._stream_rows) if self.keep_last else self.steps_per_epoch * self.global_batch_size

    @property
    def windows_per_epoch(self) -> int:
        """Windows of one stream in one epoch."""
        return -(-self.steps_per_epoch // self.steps_per_window)

    def rows_of_step(self, step: int) -> list[int]:
        """Rows of every logical worker in step `step` of an epoch, shape (L,)."""
        done = step * self.micro_batch
        return [max(0, min(self.micro_batch, self.stream_rows(v) - done)) for v in range(self.logical_workers)]

    def global_rows(self, step: int) -> int:
        """Rows of step `step` of an epoch over all logical workers."""
        return self.global_batch_size if step < self.full_steps else sum(self.rows_of_step(step))

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
        return self._ordered(key(_GROUPS, self.plan.seed, self.epoch))

    def _ordered(self, base: int) -> Int64:
        manifest = self.plan.manifest
        identity = mix_array(manifest.path_hash[manifest.file_of]) + manifest.index_in_file.astype(np.uint64)
        return np.argsort(hash_array(base, identity), kind="stable")

    @cached_property
    def _uses(self) -> Uses | None:
        plan = self.plan
        return Uses(plan.manifest, plan.classes, plan.seed, self.epoch) if plan.classes is not None else None

    @cached_property
    def _group_rows(self) -> Int64:
        """Rows of each row group as often as this epoch uses them, shape (row groups,)."""
        return self.plan.manifest.rows if self._uses is None else self._uses.of_groups()

    @cached_property
    def _streams(self) -> dict[int, tuple[Int64, Int64]]:
        return {}

    def _stream(self, logical_worker: int) -> tuple[Int64, Int64]:
        """The row groups of a stream in their order, and for each its first row in their concatenated rows, with one
        entry more.
        """
        plan = self.plan
        at = logical_worker if plan.shard != "row" else 0
        if at not in self._streams:
            order = self.group_order
            if plan.shard == "file":
                order = order[plan.owner[plan.manifest.file_of[order]] == at]
            elif plan.shard == "off":
                order = self._ordered(key(_GROUPS, plan.seed, self.epoch, at))
            self._streams[at] = order, np.concatenate([np.zeros(1, np.int64), np.cumsum(self._group_rows[order])])
        return self._streams[at]

    def window_range(self, logical_worker: int, window: int) -> tuple[int, int]:
        """The rows [start, stop) of a window of a stream, in the concatenated rows of its row groups."""
        plan = self.plan
        length = min(plan.stream_rows(logical_worker), plan.steps_per_epoch * plan.micro_batch)
        start = plan.stream_start(logical_worker)
        low, high = (min(length, w * plan.window_rows) for w in (window, window + 1))
        return start + low, start + high

    def _parts(self, logical_worker: int, window: int) -> list[Segment]:
        """The parts of row groups that a window is made of; where rows are repeated, counted with the repetitions."""
        start, stop = self.window_range(logical_worker, window)
        order, starts = self._stream(logical_worker)
        parts = []
        place = int(np.searchsorted(starts, start, side="right")) - 1
        while start < stop:
            take = min(stop, int(starts[place + 1])) - start
            if take > 0:
                parts.append(Segment(int(order[place]), start - int(starts[place]), take))
            start += take
            place += 1
        return parts

    def window_segments(self, logical_worker: int, window: int) -> list[Segment]:
        """Where the rows of a window are stored, in the order in which they are read, each once."""
        parts = self._parts(logical_worker, window)
        if self._uses is None:
            return parts
        used = [(part.row_group, self._used(part)[0]) for part in parts]
        return [Segment(group, int(rows[0]), int(rows[-1] - rows[0]) + 1) for group, rows in used]

    def _used(self, part: Segment) -> tuple[Int64, Int64]:
        """The rows of its row group that a part uses, with repetitions, and which use of the row each is; each of shape
        (part.rows,).
        """
        assert self._uses is not None
        uses = self._uses.of_rows(part.row_group)
        every = slice(part.first, part.first + part.rows)
        first_use = np.cumsum(uses) - uses
        rows = np.repeat(np.arange(len(uses)), uses)[every]
        return rows, np.arange(part.first, part.first + part.rows) - first_use[rows]

    def _shuffled(self, logical_worker: int, window: int) -> Int64:
        start, stop = self.window_range(logical_worker, window)
        return permutation(key(_WINDOW, self.plan.seed, self.epoch, logical_worker, window), stop - start)

    def window_order(self, logical_worker: int, window: int) -> Int64:
        """The order in which the rows of a window are consumed: indices into its rows as read, with repetitions, shape
        (rows,).
        """
        shuffled = self._shuffled(logical_worker, window)
        if self._uses is None:
            return shuffled
        places, read = [np.empty(0, np.int64)], 0
        for part in self._parts(logical_worker, window):
            rows = self._used(part)[0]
            places.append(rows - rows[0] + read)
            read += int(rows[-1] - rows[0]) + 1
        return np.concatenate(places)[shuffled]

    def window_repeats(self, logical_worker: int, window: int) -> Int64 | int:
        """For each row of a window in the order of consumption, which use of the row in this epoch it is, from 0; or
        one number for all.
        """
        if self._uses is None:
            return logical_worker if self.plan.shard == "off" else 0
        uses = [np.empty(0, np.int64), *(self._used(part)[1] for part in self._parts(logical_worker, window))]
        own = np.concatenate(uses)[self._shuffled(logical_worker, window)]
        return own * self.plan.logical_workers + logical_worker if self.plan.shard == "off" else own

    def stored_positions(self, logical_worker: int, window: int) -> Int64:
        """Manifest positions of a window's rows in the order in which they are read, each once, shape (stored
        rows,).
        """
        return manifest_positions(self.plan.manifest, self.window_segments(logical_worker, window))

    def rows_at(self, logical_worker: int, step: int) -> Int64:
        """Manifest positions of the rows of one logical worker in one step: the definition that a feed must meet, but
        for the order within a window with `by_length`.
        """
        window, offset = divmod(step, self.plan.steps_per_window)
        order = self.stored_positions(logical_worker, window)[self.window_order(logical_worker, window)]
        return order[offset * self.plan.micro_batch : (offset + 1) * self.plan.micro_batch]


def manifest_positions(manifest: Manifest, segments: list[Segment]) -> Int64:
    """Manifest positions of the rows of `segments`, in their order, shape (rows,)."""
    starts = [int(manifest.first_row[s.row_group]) + s.first for s in segments]
    ranges = [np.arange(start, start + s.rows) for start, s in zip(starts, segments, strict=True)]
    return np.concatenate(ranges) if ranges else np.empty(0, np.int64)
