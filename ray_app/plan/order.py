"""The order of the rows: a pure function of (manifest, seed, epoch, logical workers, global batch size).

1. Row groups are ordered by a keyed hash of (seed, epoch, relative path, index).
2. Each logical worker has a stream. `row`: the concatenated rows are cut into L; the first (rows mod L) streams get one
   row more. `file`: the row groups of the files that are assigned to it. `off`: all row groups, in an order of its own.
3. Within a stream rows are shuffled inside windows. A window has a whole number of micro-batches, so no step crosses
   one.
4. Step k of the epoch is the k-th micro-batch of every stream.

Without `shuffle` the streams of `row` take turns instead, so that step k has the k-th global batch of the manifest.

Memory and time grow with row groups and windows in use, never with rows; any position is reached directly. `Cursor` is
the whole position of a run in its data.

Where classes are balanced, `Uses` says how often each row is used in an epoch, so that all classes occur equally often.
Each row of the largest class is used once. Rows of a smaller class are repeated, some once more than others, and the
rows that are repeated once more rotate from epoch to epoch. Only then memory grows with the rows (1 or 2 bytes each for
the class), and with row groups times classes. A `Mixture` repeats the rows of data sets by their weights.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from ray_app.errors import DataError
from ray_app.plan.hashing import hash_array, key, mix_array, permutation
from ray_app.plan.manifest import Manifest

Int64 = npt.NDArray[np.int64]

# Salts of the keys of this module: each purpose has its own, so that keys of different purposes are independent.
_GROUPS = 1
_WINDOW = 2
_REPEAT = 3
_FILES = 4


@dataclass(frozen=True, order=True)
class Cursor:
    """The position of a run in its data: the next step is `step` (from 0) of `epoch` (from 0)."""

    epoch: int = 0
    step: int = 0

    @classmethod
    def at(cls, global_step: int, steps_per_epoch: int) -> Cursor:
        """Returns the cursor after `global_step` finished steps."""
        return cls(*divmod(global_step, steps_per_epoch))

    def next(self, steps_per_epoch: int) -> Cursor:
        """Returns the cursor one step later."""
        return Cursor(self.epoch, self.step + 1) if self.step + 1 < steps_per_epoch else Cursor(self.epoch + 1, 0)


@dataclass(frozen=True)
class Classes:
    """The classes of the rows of a manifest.

    Args:
        of_row: The class of each row in manifest order, from 0, shape (rows,).
        counts: The number of rows of each class in each row group, shape (row groups, classes); no class is empty.
    """

    of_row: npt.NDArray[np.unsignedinteger]
    counts: Int64

    @classmethod
    def of(cls, manifest: Manifest, of_row: npt.NDArray[np.unsignedinteger]) -> Classes:
        """Returns the classes of a manifest's rows."""
        classes = int(of_row.max()) + 1
        starts = manifest.first_row.tolist()
        groups = [of_row[start : start + rows] for start, rows in zip(starts, manifest.rows.tolist(), strict=True)]
        return cls(of_row, np.stack([np.bincount(group, minlength=classes) for group in groups]))

    @classmethod
    def of_totals(cls, totals: list[int]) -> Classes:
        """Returns classes with nothing but the number of rows of each, which is enough for the length of an epoch."""
        return cls(np.empty(0, np.uint8), np.array([totals], np.int64))

    @cached_property
    def totals(self) -> Int64:
        """The number of rows of each class, shape (classes,)."""
        return self.counts.sum(0)

    @property
    def rows_per_epoch(self) -> int:
        """The number of rows of an epoch, repetitions counted."""
        return len(self.totals) * int(self.totals.max())

    @cached_property
    def first_rank(self) -> Int64:
        """The number of rows of each class before each row group, shape (row groups, classes)."""
        return np.cumsum(self.counts, 0) - self.counts

    @property
    def digest(self) -> str:
        """The SHA-256 of the class of every row."""
        return hashlib.sha256(self.of_row.astype("<u4").tobytes()).hexdigest()


@dataclass(frozen=True)
class Mixture:
    """The data sets of a manifest, of which rows are used in a ratio.

    The rows of an epoch are dealt to the data sets one after another, by a pattern of `sum(weights)` rows in which each
    data set has its weight, spread evenly. Each data set has its row groups in the order of the epoch, and begins again
    when all its rows are used.

    Args:
        weights: The weight of each data set, at least 1.
        of_group: The data set of each row group of the manifest, shape (row groups,).
        rows: The number of rows of each data set, at least 1.
    """

    weights: tuple[int, ...]
    of_group: Int64
    rows: tuple[int, ...]

    @classmethod
    def of(cls, manifest: Manifest, weights: Sequence[int]) -> Mixture:
        """Returns the mixture of the data sets of a manifest, see `Manifest.paths`; DataError for one without rows."""
        of_file = np.array([int(path.partition("/")[0]) for path in manifest.paths], np.int64)
        of_group = of_file[manifest.file_of]
        rows = np.bincount(of_group, weights=manifest.rows, minlength=len(weights)).astype(np.int64)
        if not rows.all():
            raise DataError(
                f"Data set {int(rows.argmin())} of data.path has no row to train on (data.fold). Name another fold."
            )
        common = math.gcd(*weights)
        return cls(tuple(weight // common for weight in weights), of_group, tuple(rows.tolist()))

    @cached_property
    def rows_per_epoch(self) -> int:
        """The rows of an epoch: as few as use each row of all data sets."""
        ends = []
        for index, (rows, weight) in enumerate(zip(self.rows, self.weights, strict=True)):
            patterns, rest = divmod(rows - 1, weight)
            ends.append(patterns * sum(self.weights) + int(np.searchsorted(self._pattern[:, index], rest + 1)))
        return max(ends)

    @cached_property
    def _pattern(self) -> Int64:
        """The rows of each data set before each row of the pattern, and before its end, shape (pattern + 1, sets)."""
        total, used = sum(self.weights), [0] * len(self.weights)
        pattern = [list(used)]
        for row in range(total):
            # Row n of a data set belongs between the rows n / share and (n + 1) / share. The first end decides, so that
            # after each row a data set has had its share to within less than one row (Liu and Layland 1973).
            ends = [
                (-(-(count + 1) * total // weight), weight, index)
                for index, (count, weight) in enumerate(zip(used, self.weights, strict=True))
                if count * total < (row + 1) * weight
            ]
            used[min(ends)[-1]] += 1
            pattern.append(list(used))
        return np.array(pattern, np.int64)

    def rows_before(self, row: int) -> list[int]:
        """Returns how many rows of each data set are among the first `row` rows of an epoch."""
        patterns, rest = divmod(row, sum(self.weights))
        return (patterns * self._pattern[-1] + self._pattern[rest]).tolist()


class Uses:
    """How often each row is used in an epoch; the seed decides which row of a class is repeated first."""

    def __init__(self, manifest: Manifest, classes: Classes, seed: int, epoch: int) -> None:
        self._manifest, self._classes = manifest, classes
        totals = classes.totals
        self._base, self._rest = np.divmod(int(totals.max()), totals)
        begins = np.array([key(_REPEAT, seed, c) % int(n) for c, n in enumerate(totals)])
        self._start = (begins + epoch * self._rest) % totals

    def of_groups(self) -> Int64:
        """Returns the sum of the uses of the rows of each row group, shape (row groups,)."""
        first, counts = self._classes.first_rank, self._classes.counts
        more = self._repeated_before(first + counts) - self._repeated_before(first)
        return (counts * self._base + more).sum(1)

    def _repeated_before(self, rank: Int64) -> Int64:
        """Returns how many of the first `rank` rows of each class are used once more.

        These are the `rest` rows from `start` on, which continue at the beginning of the class.
        """
        totals = self._classes.totals
        start = self._start
        rest = self._rest
        wrapped = np.clip(rank - start + totals, 0, rest) - np.clip(totals - start, 0, rest)
        return np.clip(rank - start, 0, rest) + wrapped

    def of_rows(self, group: int) -> Int64:
        """Returns the uses of each row of a row group, shape (rows,)."""
        first = int(self._manifest.first_row[group])
        label = self._classes.of_row[first : first + int(self._manifest.rows[group])].astype(np.int64)
        counts = self._classes.counts[group]
        rank = np.empty(len(label), np.int64)
        rank[np.argsort(label, kind="stable")] = np.arange(len(label)) - np.repeat(np.cumsum(counts) - counts, counts)
        rank += self._classes.first_rank[group, label]
        return self._base[label] + ((rank - self._start[label]) % self._classes.totals[label] < self._rest[label])


def order_by_length(lengths: Int64, micro_batch: int, base: int) -> Int64:
    """Returns an order of a window's rows, as indices, in which the rows of a micro-batch are about equally long.

    So little of a micro-batch is padding. Short and long micro-batches are mixed, and logical workers with the same key
    have micro-batches of similar lengths in the same step, so none waits for another. The rows that do not fill a
    micro-batch stay the last ones. `lengths` is in the shuffled order; all shapes are (rows,).
    """
    full = len(lengths) // micro_batch
    alike = np.argsort(lengths[: full * micro_batch], kind="stable").reshape(full, micro_batch)
    return np.concatenate([alike[permutation(base, full)].reshape(-1), np.arange(full * micro_batch, len(lengths))])


def fill_bins(sizes: Int64, order: Int64, bins: int) -> Int64:
    """Returns the bin of each item, (items,): each goes, in a given order, to the one with the least so far."""
    bin_of = np.zeros(len(sizes), np.int64)
    heap = [(0, number) for number in range(bins)]
    for item in order.tolist():
        total, number = heap[0]
        bin_of[item] = number
        heapq.heapreplace(heap, (total + int(sizes[item]), number))
    return bin_of


def count_rows_by_file(manifest: Manifest) -> Int64:
    """Returns the number of rows of every file, shape (files,)."""
    return np.bincount(manifest.file_of, weights=manifest.rows, minlength=len(manifest.paths)).astype(np.int64)


@dataclass(frozen=True)
class Segment:
    """The consecutive rows [first, first + rows) of a row group, counted from its first row."""

    row_group: int
    first: int
    rows: int


@dataclass(frozen=True)
class Plan:
    """The plan of every epoch of a run.

    Args:
        global_batch_size: Number of rows of one step; divisible by L.
        shuffle_window_rows: Number of rows of a shuffle window per logical worker; it is rounded down to whole
            micro-batches, at least one.
        keep_last: Whether an epoch ends with smaller steps (True) or drops the rows that do not fill one (False).
        classes: The class of every row, if rows are to be repeated so that all classes are used equally often; not with
            `file`.
        by_length: The field, the lengths of which decide how the rows of a window are put into micro-batches
            (`order_by_length`). The reader of the rows does that, so the plan does not say which of the window's rows
            a step has.
        shuffle: Whether rows are shuffled. Otherwise every epoch has them in the order of the manifest; with `row` step
            k has the k-th `global_batch_size` rows, of which each logical worker has consecutive ones.
        mixture: The data sets that are used in a ratio; with `row` and shuffled rows only, and without classes.
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
    shuffle: bool = True
    mixture: Mixture | None = None

    @cached_property
    def micro_batch(self) -> int:
        """The number of rows of one logical worker in a full step."""
        return self.global_batch_size // self.logical_workers

    @cached_property
    def steps_per_window(self) -> int:
        """The number of steps of one window."""
        return max(1, self.shuffle_window_rows // self.micro_batch)

    @property
    def window_rows(self) -> int:
        """The number of rows of a full window of one logical worker."""
        return self.steps_per_window * self.micro_batch

    @cached_property
    def owner(self) -> Int64:
        """The logical worker of every file for `shard: file`, shape (files,).

        Each file, from the largest to the smallest, goes to the logical worker with the fewest rows so far (Graham
        1969: the longest stream is at most 4/3 of the best possible); a keyed hash orders files of equal size. Logical
        worker 0 then has the most rows and the last one the fewest.
        """
        rows = count_rows_by_file(self.manifest)
        hashed = hash_array(key(_FILES, self.seed), self.manifest.path_hash)
        bins = fill_bins(rows, np.lexsort((hashed, -rows)), self.logical_workers)
        totals = np.bincount(bins, weights=rows, minlength=self.logical_workers)
        return np.argsort(np.argsort(-totals, kind="stable"))[bins]

    @property
    def all_rows(self) -> int:
        """The number of rows of the data set, each counted as often as an epoch uses it."""
        repeated = self.mixture if self.mixture is not None else self.classes
        return repeated.rows_per_epoch if repeated is not None else self.manifest.num_rows

    def stream_start(self, logical_worker: int) -> int:
        """Returns the first row of a stream, counted in the concatenated rows of its row groups."""
        if self.shard != "row":
            return 0
        share, rest = divmod(self.all_rows, self.logical_workers)
        return logical_worker * share + min(logical_worker, rest)

    @cached_property
    def _stream_rows(self) -> list[int]:
        if self.shard == "off":
            return [self.all_rows] * self.logical_workers
        if self.shard == "file":
            rows = np.bincount(self.owner, weights=count_rows_by_file(self.manifest), minlength=self.logical_workers)
            return rows.astype(np.int64).tolist()
        return [self.stream_start(v + 1) - self.stream_start(v) for v in range(self.logical_workers)]

    def stream_rows(self, logical_worker: int) -> int:
        """Returns the number of rows of a stream before `keep_last` is applied; logical worker 0 has the most."""
        return self._stream_rows[logical_worker]

    @cached_property
    def full_steps(self) -> int:
        """The number of steps of an epoch in which all micro-batches are full; they come first."""
        return min(self._stream_rows) // self.micro_batch

    @cached_property
    def steps_per_epoch(self) -> int:
        """The number of steps of one epoch; 0 if `keep_last` is False and the rows do not fill one step."""
        return -(-max(self._stream_rows) // self.micro_batch) if self.keep_last else self.full_steps

    @property
    def rows_per_epoch(self) -> int:
        """The number of rows that one epoch consumes, repetitions counted."""
        return sum(self._stream_rows) if self.keep_last else self.steps_per_epoch * self.global_batch_size

    @property
    def windows_per_epoch(self) -> int:
        """The number of windows of one stream in one epoch."""
        return -(-self.steps_per_epoch // self.steps_per_window)

    def rows_of_step(self, step: int) -> list[int]:
        """Returns the number of rows of every logical worker in a step of an epoch, shape (L,)."""
        done = step * self.micro_batch
        return [max(0, min(self.micro_batch, self.stream_rows(v) - done)) for v in range(self.logical_workers)]

    def global_rows(self, step: int) -> int:
        """Returns the number of rows of a step of an epoch over all logical workers."""
        return self.global_batch_size if step < self.full_steps else sum(self.rows_of_step(step))

    def describe_uses(self, names: Sequence[str]) -> str | None:
        """Returns how often a pass over the data uses rows of data sets with these names; None if each row once."""
        if self.classes is not None:
            totals = self.classes.totals
            return f"balanced: in each pass each of {len(totals)} classes is used {totals.max():,} times"
        if self.mixture is None:
            return None
        parts = zip(names, self.mixture.rows_before(self.all_rows), self.mixture.rows, strict=True)
        sets = ", ".join(f"{uses:,} of {name} ({uses / rows:.3g} per row)" for name, uses, rows in parts)
        return f"weighted: a pass over the data uses {self.all_rows:,} rows: {sets}"

    def epoch(self, epoch: int) -> EpochOrder:
        """Returns the order of one epoch."""
        return EpochOrder(self, epoch)


@dataclass(frozen=True)
class EpochOrder:
    """The order of the rows in one epoch of a plan."""

    plan: Plan
    epoch: int

    @cached_property
    def group_order(self) -> Int64:
        """The row groups of the manifest in the order of this epoch, shape (row groups,)."""
        return self._order_groups(key(_GROUPS, self.plan.seed, self.epoch))

    def _order_groups(self, base: int) -> Int64:
        """Returns the row groups in the order of a key, shape (row groups,)."""
        manifest = self.plan.manifest
        if not self.plan.shuffle:
            return np.arange(manifest.num_row_groups)
        identity = mix_array(manifest.path_hash[manifest.file_of]) + manifest.index_in_file.astype(np.uint64)
        return np.argsort(hash_array(base, identity), kind="stable")

    @cached_property
    def _uses(self) -> Uses | None:
        plan = self.plan
        return Uses(plan.manifest, plan.classes, plan.seed, self.epoch) if plan.classes is not None else None

    @cached_property
    def _group_rows(self) -> Int64:
        """The number of rows of each row group, counted as often as this epoch uses them, shape (row groups,)."""
        return self.plan.manifest.rows if self._uses is None else self._uses.of_groups()

    @cached_property
    def _streams(self) -> dict[int, tuple[Int64, Int64]]:
        return {}

    def _stream(self, stream: int) -> tuple[Int64, Int64]:
        """Returns the row groups of a stream in their order, and the first row of each in their concatenated rows.

        The latter has one entry more, the number of rows of the stream's row groups. See `_shares` for the streams.
        """
        plan = self.plan
        if stream not in self._streams:
            order = self.group_order
            if plan.mixture is not None:
                order = order[plan.mixture.of_group[order] == stream]
            elif plan.shard == "file":
                order = order[plan.owner[plan.manifest.file_of[order]] == stream]
            elif plan.shard == "off":
                order = self._order_groups(key(_GROUPS, plan.seed, self.epoch, stream))
            self._streams[stream] = order, np.concatenate([np.zeros(1, np.int64), np.cumsum(self._group_rows[order])])
        return self._streams[stream]

    def window_range(self, logical_worker: int, window: int) -> tuple[int, int]:
        """Returns the rows [start, stop) of a window of a stream, in the concatenated rows of its row groups."""
        plan = self.plan
        length = min(plan.stream_rows(logical_worker), plan.steps_per_epoch * plan.micro_batch)
        start = plan.stream_start(logical_worker)
        low, high = (min(length, w * plan.window_rows) for w in (window, window + 1))
        return start + low, start + high

    def _ranges(self, logical_worker: int, window: int) -> list[tuple[int, int]]:
        """Returns the ranges [start, stop) of rows that form a window, as `window_range` counts them."""
        plan = self.plan
        if plan.shuffle or plan.shard != "row" or plan.logical_workers == 1:
            return [self.window_range(logical_worker, window)]
        ranges = []
        first = window * plan.steps_per_window
        for step in range(first, min(first + plan.steps_per_window, plan.steps_per_epoch)):
            rows = plan.rows_of_step(step)
            start = step * plan.global_batch_size + sum(rows[:logical_worker])
            ranges.append((start, start + rows[logical_worker]))
        return ranges

    def _parts(self, logical_worker: int, window: int) -> list[Segment]:
        """Returns the parts of row groups that form a window; if rows are repeated, counted with the repetitions."""
        parts = []
        for stream, low, stop in self._shares(logical_worker, window):
            order, starts = self._stream(stream)
            # The rows of a mixture's data set begin again after the last one.
            pass_rows, start = int(starts[-1]), low
            while start < stop:
                row = start % pass_rows
                index = int(np.searchsorted(starts, row, side="right")) - 1
                take = min(stop - start, int(starts[index + 1]) - row)
                parts.append(Segment(int(order[index]), row - int(starts[index]), take))
                start += take
        return parts

    def _shares(self, logical_worker: int, window: int) -> list[tuple[int, int, int]]:
        """Returns the streams and ranges [start, stop) of their rows that form a window.

        The streams are the data sets of a mixture, or the logical workers. With `row` all of these are cut from one.
        """
        plan, ranges = self.plan, self._ranges(logical_worker, window)
        if plan.mixture is not None:
            [(first, last)] = ranges
            rows = zip(plan.mixture.rows_before(first), plan.mixture.rows_before(last), strict=True)
            return [(stream, start, stop) for stream, (start, stop) in enumerate(rows)]
        stream = logical_worker if plan.shard != "row" else 0
        return [(stream, start, stop) for start, stop in ranges]

    def window_segments(self, logical_worker: int, window: int) -> list[Segment]:
        """Returns the segments with the rows of a window, in the order in which they are read, each row once."""
        parts = self._parts(logical_worker, window)
        if self._uses is None:
            return parts
        used = [(part.row_group, self._used_rows(part)[0]) for part in parts]
        return [Segment(group, int(rows[0]), int(rows[-1] - rows[0]) + 1) for group, rows in used]

    def _used_rows(self, part: Segment) -> tuple[Int64, Int64]:
        """Returns the rows of its row group that a part uses, repeated, and the number of each use, (part.rows,)."""
        assert self._uses is not None
        uses = self._uses.of_rows(part.row_group)
        selected = slice(part.first, part.first + part.rows)
        first_use = np.cumsum(uses) - uses
        rows = np.repeat(np.arange(len(uses)), uses)[selected]
        return rows, np.arange(part.first, part.first + part.rows) - first_use[rows]

    def _shuffle(self, logical_worker: int, window: int) -> Int64:
        """Returns the indices of a window's rows, with repetitions, in the order in which they are used."""
        start, stop = self.window_range(logical_worker, window)
        if not self.plan.shuffle:
            return np.arange(stop - start)
        return permutation(key(_WINDOW, self.plan.seed, self.epoch, logical_worker, window), stop - start)

    def window_order(self, logical_worker: int, window: int) -> Int64:
        """Returns the order in which the rows of a window are consumed, shape (rows,).

        These are indices into the window's rows as they are read; rows that are repeated occur several times.
        """
        shuffled = self._shuffle(logical_worker, window)
        if self._uses is None:
            return shuffled
        indices, rows_read = [np.empty(0, np.int64)], 0
        for part in self._parts(logical_worker, window):
            rows = self._used_rows(part)[0]
            indices.append(rows - rows[0] + rows_read)
            rows_read += int(rows[-1] - rows[0]) + 1
        return np.concatenate(indices)[shuffled]

    def window_repeats(self, logical_worker: int, window: int) -> Int64 | int:
        """Returns the number of the use of each row of a window in this epoch, from 0; one number if all are equal."""
        if (mixture := self.plan.mixture) is not None:
            shares = self._shares(logical_worker, window)
            counted = [np.arange(start, stop) // mixture.rows[stream] for stream, start, stop in shares]
            return np.concatenate(counted)[self._shuffle(logical_worker, window)]
        if self._uses is None:
            return logical_worker if self.plan.shard == "off" else 0
        uses = [np.empty(0, np.int64), *(self._used_rows(part)[1] for part in self._parts(logical_worker, window))]
        repeats = np.concatenate(uses)[self._shuffle(logical_worker, window)]
        return repeats * self.plan.logical_workers + logical_worker if self.plan.shard == "off" else repeats

    def stored_positions(self, logical_worker: int, window: int) -> Int64:
        """Returns the manifest positions of a window's rows in the order of reading, each once, shape (rows read,)."""
        segments, first_row = self.window_segments(logical_worker, window), self.plan.manifest.first_row
        starts = [int(first_row[s.row_group]) + s.first for s in segments]
        ranges = [np.arange(start, start + s.rows) for start, s in zip(starts, segments, strict=True)]
        return np.concatenate(ranges) if ranges else np.empty(0, np.int64)

    def rows_at(self, logical_worker: int, step: int) -> Int64:
        """Returns the manifest positions of the rows of one logical worker in one step.

        This is the definition that a feed has to meet, except for the order within a window with `by_length`.
        """
        window, offset = divmod(step, self.plan.steps_per_window)
        order = self.stored_positions(logical_worker, window)[self.window_order(logical_worker, window)]
        return order[offset * self.plan.micro_batch : (offset + 1) * self.plan.micro_batch]
