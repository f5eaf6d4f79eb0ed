"""Row groups that are larger than what is read at once: each is read once, from its beginning to its end, by whoever fetches.

Parquet has no way into the middle of a row group: a task of its own for each slice would read all of it again.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa

from ray_app.data.dataset.data_file import DataFile, Partitions
from ray_app.data.dataset.files import place_of
from ray_app.data.read.cutting import Cut
from ray_app.data.read.patience import patiently
from ray_app.data.read.reader import Reader, ReadSpec, Span

_BATCH_ROWS = 1024
_BUFFER_BYTES = 4 << 20
"""Bytes of a column that are fetched at once."""
_MAX_OPEN = 256
"""Files that are open at most: a quarter of the usual limit of 1024. Where the limit is lower, a quarter of that."""


@dataclass
class _Open:
    """A row group that is being read, and the row that comes next."""

    file: DataFile
    rows: Cut
    at: int


class Slices:
    """Rows of large row groups as they are stored.

    Where several read the same row group, each at its own place, each has it open for itself.

    Args:
        root: Folder (path or URI) that paths are relative to.
        columns: Columns to read.
        partitions: The columns that are in the names of folders.
    """

    def __init__(self, root: str, columns: list[str], partitions: Partitions) -> None:
        self._root, self._columns, self._partitions = place_of(root), columns, partitions
        self._max_open = min(_MAX_OPEN, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._open: dict[tuple[str, int, int], _Open] = {}

    @classmethod
    def of(cls, reader: Reader) -> Slices:
        """The slices that a reader decodes."""
        return cls(reader.root, reader.columns, reader.partitions)

    def take(self, span: Span) -> pa.Table:
        """The rows of a span; what lies before them in the row group is skipped, unless they continue what was taken before.

        Raises:
            DataError: The row group has fewer rows.
        """
        found, table = patiently(self._root / span.path, lambda: self._taken(span))
        found.at += span.rows
        if found.at < span.of:
            self._keep((span.path, span.row_group, found.at), found)
        else:
            found.file.close()
        return table

    def close(self) -> None:
        """Closes all files."""
        while self._open:
            self._open.popitem()[1].file.close()

    def _taken(self, span: Span) -> tuple[_Open, pa.Table]:
        """The row group and the rows; where that fails, the row group is begun anew the next time."""
        found = self._open.pop((span.path, span.row_group, span.first), None) or self._begun(span)
        return found, pa.concat_tables(found.rows.take(span.rows))

    def _begun(self, span: Span) -> _Open:
        file = DataFile(self._root, span.path, self._partitions, _BUFFER_BYTES)
        rows = Cut(file.iter_batches(span.row_group, self._columns, _BATCH_ROWS))
        skipped = 0
        while skipped < span.first:
            skipped += rows.next(span.first - skipped).num_rows
        return _Open(file, rows, span.first)

    def _keep(self, key: tuple[str, int, int], opened: _Open) -> None:
        if key in self._open:  # two that go on at the same row; the second one begins anew
            self._open.pop(key).file.close()
        self._open[key] = opened
        if len(self._open) > self._max_open:
            self._open.pop(next(iter(self._open))).file.close()


def fetch_here(reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[pa.Table]:
    """Reads in this process, one task after the other."""
    with closing(Slices.of(reader)) as slices:
        for spec in specs:
            yield from reader.read(spec, slices.take)
