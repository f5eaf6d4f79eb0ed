"""Row groups that are larger than what is read at once: each is read once, from its beginning to its end, by whoever fetches.

Parquet has no way into the middle of a row group: a task of its own for each slice would read all of it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from ray_app.data.dataset.files import parquet, place_of
from ray_app.data.read.cutting import Cut
from ray_app.data.read.patience import patiently
from ray_app.data.read.reader import Reader, ReadSpec, Span

_BATCH_ROWS = 1024
_BUFFER_BYTES = 4 << 20
"""Bytes of a column that are fetched at once."""
_MOST_OPEN = 256


@dataclass
class _Open:
    """A row group that is being read, and the row that comes next."""

    file: pq.ParquetFile
    rows: Cut
    at: int


class Slices:
    """Rows of large row groups as they are stored.

    Where several read the same row group, each at its own place, each has it open for itself.

    Args:
        root: Folder (path or URI) that paths are relative to.
        columns: Columns to read.
    """

    def __init__(self, root: str, columns: list[str]) -> None:
        self._root, self._columns = place_of(root), columns
        self._open: dict[tuple[str, int, int], _Open] = {}

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
        file = parquet(self._root / span.path, buffer_bytes=_BUFFER_BYTES)
        rows = Cut(batches(file, span.row_group, self._columns))
        skipped = 0
        while skipped < span.first:
            skipped += rows.next(span.first - skipped).num_rows
        return _Open(file, rows, span.first)

    def _keep(self, key: tuple[str, int, int], opened: _Open) -> None:
        if key in self._open:  # two that go on at the same row; the second one begins anew
            self._open.pop(key).file.close()
        self._open[key] = opened
        if len(self._open) > _MOST_OPEN:
            self._open.pop(next(iter(self._open))).file.close()


def batches(file: pq.ParquetFile, row_group: int, columns: list[str]) -> Iterator[pa.Table]:
    """The rows of a row group from its beginning."""
    for batch in file.iter_batches(_BATCH_ROWS, row_groups=[row_group], columns=columns, use_threads=False):
        yield pa.Table.from_batches([batch])


def fetch_here(reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[pa.Table]:
    """Reads in this process, one task after the other."""
    with closing(Slices(reader.root, reader.columns)) as slices:
        for spec in specs:
            yield from reader.read(spec, slices.take)
