"""Balanced sampling: how often each row is used in an epoch so that all classes are used equally often, as a pure
function.

The largest class has each of its rows once; rows of a smaller one are repeated, some once more than others, and who is
repeated more goes round from epoch to epoch. Memory grows with the rows (1 or 2 bytes each for the class) and with row
groups times classes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ray_app.plan.hashing import key
from ray_app.plan.manifest import Manifest

Int64 = npt.NDArray[np.int64]

_REPEAT = 3  # salt: what a key is for


@dataclass(frozen=True)
class Classes:
    """The class of every row.

    Args:
        of_row: For each row in manifest order, its class from 0, shape (rows,).
        counts: Rows of each class in each row group, shape (row groups, classes); every class has rows.
    """

    of_row: npt.NDArray[np.unsignedinteger]
    counts: Int64

    @classmethod
    def of(cls, manifest: Manifest, of_row: npt.NDArray[np.unsignedinteger]) -> Classes:
        """Counts the classes of the rows of a manifest, shape (rows,)."""
        classes = int(of_row.max()) + 1
        starts = manifest.first_row.tolist()
        groups = [of_row[start : start + rows] for start, rows in zip(starts, manifest.rows.tolist(), strict=True)]
        return cls(of_row, np.stack([np.bincount(group, minlength=classes) for group in groups]))

    @classmethod
    def of_totals(cls, totals: list[int]) -> Classes:
        """Knows nothing but how many rows each class has: enough for the length of an epoch."""
        return cls(np.empty(0, np.uint8), np.array([totals], np.int64))

    @cached_property
    def totals(self) -> Int64:
        """Rows of each class, shape (classes,)."""
        return self.counts.sum(0)

    @property
    def rows_per_epoch(self) -> int:
        """Rows of an epoch, repetitions counted."""
        return len(self.totals) * int(self.totals.max())

    @cached_property
    def first_rank(self) -> Int64:
        """For each row group and class, how many rows of the class come before, shape (row groups, classes)."""
        return np.cumsum(self.counts, 0) - self.counts

    @property
    def digest(self) -> str:
        """SHA-256 of the class of every row."""
        return hashlib.sha256(self.of_row.astype("<u4").tobytes()).hexdigest()


class Uses:
    """How often each row is used in one epoch.

    Args:
        manifest: The rows.
        classes: Their classes.
        seed: Decides with whom the repeating begins.
        epoch: Which epoch.
    """

    def __init__(self, manifest: Manifest, classes: Classes, seed: int, epoch: int) -> None:
        self._manifest, self._classes = manifest, classes
        totals = classes.totals
        self._base, self._rest = np.divmod(int(totals.max()), totals)
        begins = np.array([key(_REPEAT, seed, c) % int(n) for c, n in enumerate(totals)])
        self._start = (begins + epoch * self._rest) % totals

    def of_groups(self) -> Int64:
        """Uses of all rows of each row group, shape (row groups,)."""
        first, counts = self._classes.first_rank, self._classes.counts
        more = self._repeated_before(first + counts) - self._repeated_before(first)
        return (counts * self._base + more).sum(1)

    def _repeated_before(self, rank: Int64) -> Int64:
        """How many of the first `rank` rows of each class are used once more: those from `start` on, round the end of
        the class.
        """
        totals, start, rest = self._classes.totals, self._start, self._rest
        round_the_end = np.clip(rank - start + totals, 0, rest) - np.clip(totals - start, 0, rest)
        return np.clip(rank - start, 0, rest) + round_the_end

    def of_rows(self, group: int) -> Int64:
        """Uses of each row of a row group, shape (rows,)."""
        first = int(self._manifest.first_row[group])
        label = self._classes.of_row[first : first + int(self._manifest.rows[group])].astype(np.int64)
        counts = self._classes.counts[group]
        rank = np.empty(len(label), np.int64)
        rank[np.argsort(label, kind="stable")] = np.arange(len(label)) - np.repeat(np.cumsum(counts) - counts, counts)
        rank += self._classes.first_rank[group, label]
        return self._base[label] + ((rank - self._start[label]) % self._classes.totals[label] < self._rest[label])
