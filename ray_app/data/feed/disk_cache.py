"""Decoded rows on a node's own disk: filled while rows are read for the first time, shared by the workers of the node and by later runs.

A cache is a folder with the files of each field of the whole data set (`disk_cache_fields.py`), and one file of checksums. A row is held
if its checksum fits its bytes; a checksum of zero says that it is not. So writers need no order among each other, whoever dies in the
middle of a write leaves rows that are not held, and what a disk has spoilt is read anew.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_app.data.dataset.arrays import ArraySpec, from_column, to_column
from ray_app.data.feed.disk_cache_fields import FixedRows, RaggedRows, read_into, rows_of_field, write_from
from ray_app.data.read.bad_rows import REASON, reasons_in
from ray_app.data.read.cutting import Cut
from ray_app.data.read.reader import POSITION, Fetch, Reader, ReadSpec, Span, check_positions
from ray_app.plan.keyed import UInt64, hash_array, mix_array
from ray_app.task.rows.ragged import Field, joined

logger = logging.getLogger(__name__)

SUMS = "sums"
_SUM = 31  # salt: what a key is for
_ABSENT, _BAD = 0, 1
"""In the place of checksums, which are never below 2: a row that is not held, and one that cannot be decoded."""
_LEAVE_FREE = 0.1
"""Share of the disk that stays free: Ray itself stops working on a node whose disk is 95 % full."""


class DiskCache:
    """The open cache of one data set; see the module.

    Args:
        folder: Its files, made by `ray_app.data.feed.disk_cache_folder.open_cache`.
        fields: What a decoded row looks like.
        sums: The open file of checksums; its length says how many rows the cache has room for.
    """

    def __init__(self, folder: Path, fields: dict[str, ArraySpec], sums: int) -> None:
        self._folder, self._fields, self._sums = folder, fields, sums
        self._room = os.fstat(sums).st_size // 8
        self._rows: dict[str, FixedRows | RaggedRows] = {}
        self._is_open, self._is_full = True, False
        for i, (name, spec) in enumerate(fields.items()):
            self._rows[name] = rows_of_field(folder, i, spec)

    def close(self) -> None:
        """Lets go of the files; what they hold stays."""
        if self._is_open:
            self._is_open = False
            os.close(self._sums)
            for rows in self._rows.values():
                rows.close()

    __del__ = close

    def around(self, fetch: Fetch) -> Fetch:
        """Fetches what is held from here, and through `fetch` what is not; that is held from then on."""

        def fetch_missing(reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[pa.Table]:
            missing = [not self._holds(spec) for spec in specs]
            wanted = [spec for spec, is_missing in zip(specs, missing, strict=True) if is_missing]
            cut = Cut(fetch(reader, wanted) if wanted else iter(()))
            for spec, is_missing in zip(specs, missing, strict=True):
                table = None if is_missing else self._load(spec, reader.skips)
                if table is None:
                    table = pa.concat_tables(cut.take(rows_in(spec))) if is_missing else pa.concat_tables(reader.read(spec))
                    self._store(spec, table)
                yield table

        return fetch_missing

    def _holds(self, spec: ReadSpec) -> bool:
        """Whether all rows are here, as far as can be seen without reading them."""
        return all(span.position + span.rows <= self._room and bool(self._marks(span).all()) for span in spec)

    def _marks(self, span: Span) -> UInt64:
        """What stands in the place of the rows' checksums, shape (rows,)."""
        marks = np.empty(span.rows, np.uint64)
        read_into(self._sums, marks, span.position * 8)
        return marks

    def _load(self, spec: ReadSpec, skips: bool) -> pa.Table | None:
        """The rows as `Reader.read` gives them; None if some are not what was written, or are bad and may not be."""
        parts, reasons = [], list[str | None]()
        try:
            for span in spec:
                found = {name: rows.read(span.position, span.rows) for name, rows in self._rows.items()}
                part = {name: values for name, values in found.items() if values is not None}
                marks = self._marks(span)
                bad = marks == _BAD
                if len(part) < len(found) or not ((self._checksums(part, span.position) == marks) | (bad & skips)).all():
                    return None
                parts.append(part)
                reasons += [self._reason(span.position + i).read_text() if is_bad else None for i, is_bad in enumerate(bad.tolist())]
        except OSError as error:
            logger.warning("The disk cache %s cannot be read, reading the data itself: %s", self._folder, error)
            return None
        encoded = [to_column(name, joined([part[name] for part in parts])) for name in self._fields]
        encoded.append(to_column(POSITION, _positions(spec)))
        table = pa.Table.from_arrays([data for _, data in encoded], schema=pa.schema([field for field, _ in encoded]))
        return table.append_column(REASON, pa.array(reasons, pa.string())) if skips else table

    def _store(self, spec: ReadSpec, table: pa.Table) -> None:
        """Takes rows in, unless the disk is full.

        Raises:
            DataError: They are not those of `spec`.
        """
        if self._is_full:
            return
        check_positions(table, _positions(spec))
        try:
            usage = shutil.disk_usage(self._folder)
            if usage.free - table.nbytes < _LEAVE_FREE * usage.total:
                raise OSError(errno.ENOSPC, f"{usage.free / 1e9:.1f} GB are free, and {_LEAVE_FREE:.0%} of the disk must stay so")
            done = 0
            for span in spec:
                self._store_span(span.position, table.slice(done, min(span.rows, max(0, self._room - span.position))))
                done += span.rows
        except OSError as error:
            self._is_full = True
            logger.warning("The disk cache %s takes no more rows, they are read in every epoch: %s", self._folder, error)

    def _store_span(self, position: int, table: pa.Table) -> None:
        if not table.num_rows:
            return
        part = {name: from_column(table.column(name), spec) for name, spec in self._fields.items()}
        marks = self._checksums(part, position)
        for bad, reason in reasons_in(table, np.arange(position, position + table.num_rows)).items():
            self._reason(bad).write_text(reason)
            marks[bad - position] = _BAD
        for name, values in part.items():
            self._rows[name].write(position, values)
        write_from(self._sums, marks, position * 8)

    def _checksums(self, part: dict[str, Field], position: int) -> UInt64:
        """64 bits for each row from all its bytes and its manifest position, never below 2, shape (rows,)."""
        rows = len(next(iter(part.values())))
        total = hash_array(_SUM, np.arange(position, position + rows))
        for name, values in part.items():
            total += self._rows[name].sums(values)
        return mix_array(total) | np.uint64(2)

    def _reason(self, position: int) -> Path:
        """The file that says why a row is bad."""
        return self._folder / f"bad-{position}.txt"


def rows_in(spec: ReadSpec) -> int:
    """Rows of a read task."""
    return sum(span.rows for span in spec)


def _positions(spec: ReadSpec) -> npt.NDArray[np.int64]:
    return np.concatenate([np.arange(span.position, span.position + span.rows) for span in spec])
