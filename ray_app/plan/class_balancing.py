"""Balanced sampling as a pure function: how often each row is used in an epoch so that all classes occur equally often.

Each row of the largest class is used once. Rows of a smaller class are repeated, some once more than others, and the
rows that are repeated once more rotate from epoch to epoch. Memory grows with the rows (1 or 2 bytes each for the
class) and with row groups times classes.
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

# Salt of the keys of this module, so that they differ from the other keys of the plan.
_REPEAT = 3


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
