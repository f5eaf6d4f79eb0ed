"""The shuffle of an ingest: it puts rows into the order of a hash of their ids, however sorted the source is.

Training shuffles rows within windows; after this shuffle a window is a random sample of the data set. Two stages of
tasks bound the memory. The input splits write runs: files of some rows in the order of their hashes. Then each bucket,
a range of hashes, reads its rows from all runs and writes shards.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ray_app.errors import DataError, StorageError
from ray_app.ingest.options import IngestOptions
from ray_app.ingest.output_folder import RECORDS, RUNS, has_files, make_scratch, side_folder
from ray_app.ingest.shards import RowWriter, Shards, column_facts, row_bytes
from ray_app.ingest.summary import count_missing
from ray_app.plan.manifest import Int64
from ray_app.storage.data_files import open_data_file, publish
from ray_app.storage.files import Location, put_json, read_json

RUN_BYTES = 64 << 20
"""Bytes of the rows of a run; as many are in memory."""
BUCKET_BYTES = 128 << 20
"""Mean bytes of the rows of a bucket; as many are in memory, or mapped to it."""
_BATCH_BYTES = 1 << 20
"""Bytes of a run that are read together."""
_MERGED_BYTES = 8 << 20
"""Bytes of a bucket that are sorted together."""
_HASHED_ROWS = 1 << 16
"""Rows of which the ids are Python objects at a time."""
_MAPPED_PARTS = 4
"""Parts in which a bucket on a disk is read, since what is mapped counts as memory of the process."""
_HASH, _FIRST_HASHES = "__hash__", b"ray_app.first"
_HASH_END = 1 << 63
"""Smallest number above every hash."""


class Runs(RowWriter):
    """Writes rows as runs: files in the order of hashes, with the first hash of each batch in the metadata."""

    def write(self, table: pa.Table) -> None:
        """Adds rows; raises DataError if a column is of another type than before."""
        for column in table.schema:
            facts = column_facts(column)
            total = self._columns.setdefault(column.name, facts)
            if {**total, "nulls": 0} != {**facts, "nulls": 0}:
                raise DataError(
                    f"the column {column.name!r} is {total} in one file of the input and {facts} in another; all files"
                    " of a data set need the same type. Correct the input."
                )
            total["nulls"] += count_missing(table[column.name])
        self._pending.append(table)
        self._pending_bytes += int(row_bytes(table).sum())
        if self._pending_bytes >= RUN_BYTES:
            self._end_run()

    def close(self) -> None:
        """Writes the rows that are in memory as the last run."""
        if sum(table.num_rows for table in self._pending):
            self._end_run()

    def description(self) -> dict[str, Any]:
        """Returns the `runs` and `columns`, plain JSON."""
        return {"runs": self._files, "columns": self._columns}

    def _end_run(self) -> None:
        table = pa.concat_tables(self._pending, promote_options="default").combine_chunks()
        self._pending, self._pending_bytes = [], 0
        hashes = _hash_all(table["row_id"])
        order = np.argsort(hashes, kind="stable")
        sizes = row_bytes(table)
        parts = list(_cut(order, sizes))
        table = table.append_column(_HASH, pa.array(hashes))
        first = json.dumps([int(hashes[part[0]]) for part in parts]).encode()
        path = self._scratch / f"{self._stem}-{len(self._files):03d}.arrow"
        schema = table.schema.with_metadata({_FIRST_HASHES: first})
        with pa.ipc.new_file(path, schema) as file:
            for part in parts:
                file.write_table(table.take(part).combine_chunks())
        self._files.append(
            {"path": path.name, "rows": len(order), "row_bytes": int(sizes.sum()), "bytes": path.stat().st_size}
        )
        publish(path, self._folder / path.name)
        # Freed memory of the run would stay with the process until the next run has taken its own.
        del table
        pa.default_memory_pool().release_unused()


def _hash_all(row_ids: pa.ChunkedArray) -> Int64:
    """Returns the hashes by which rows are ordered, from 0 to below `_HASH_END`."""
    # A copy of a hash object takes half the time of a new one.
    copy_keyed = hashlib.blake2b(digest_size=8, key=b"mixed").copy
    digests = bytearray()
    for first in range(0, len(row_ids), _HASHED_ROWS):
        for row_id in row_ids.slice(first, _HASHED_ROWS).cast(pa.binary()).to_pylist():
            hashed = copy_keyed()
            hashed.update(row_id)
            digests += hashed.digest()
    return (np.frombuffer(digests, ">u8") >> 1).astype(np.int64)


def _cut(order: Int64, sizes: Int64) -> Iterator[Int64]:
    """Yields the rows of `order` in parts of about `_BATCH_BYTES`, at least one row each; `sizes` has their bytes."""
    before = np.cumsum(sizes[order])
    low = 0
    while low < len(order):
        high = max(low + 1, int(np.searchsorted(before, (before[low - 1] if low else 0) + _BATCH_BYTES, side="right")))
        yield order[low:high]
        low = high


@dataclass(frozen=True)
class BucketTask:
    """The task that writes the rows of a side with hashes in [low, high) as shards; pickled."""

    side: str
    number: int
    low: int
    high: int
    runs: tuple[str, ...]
    options: IngestOptions
    folder: Location
    classes: tuple[str, ...] | None
    stem: str

    @property
    def record(self) -> Location:
        """The file of the record."""
        return self.folder / RECORDS / f"{self.side}-{self.number:05d}.mixed.json"


def make_bucket_tasks(
    side: str,
    records: list[dict[str, Any]],
    options: IngestOptions,
    folder: Location,
    classes: tuple[str, ...] | None,
    stem: str,
) -> list[BucketTask]:
    """Returns the tasks that write the runs of a side as shards; `stem` is the beginning of the shards' names."""
    runs = [run for record in records for run in record["runs"]]
    # A delivery that is added may have no rows for a side.
    if not runs:
        return []
    count = max(1, -(-sum(run["row_bytes"] for run in runs) // BUCKET_BYTES))
    names = tuple(run["path"] for run in runs)
    common = names, options, folder, classes
    parts = enumerate(_divide(0, _HASH_END, count))
    return [BucketTask(side, i, low, high, *common, f"{stem}{i:05d}") for i, (low, high) in parts]


def write_bucket(task: BucketTask) -> dict[str, Any]:
    """Writes a bucket as shards, unless it was written before, and returns their description."""
    side = side_folder(task.folder, task.side)
    record: dict[str, Any] | None = read_json(task.record)
    if record is not None and has_files(side, record["shards"]):
        return record
    with make_scratch(task.folder) as scratch:
        shards = Shards(side, task.stem, Path(scratch) / "bucket", task.options.limits, task.classes)
        for low, high in _divide(task.low, task.high, _MAPPED_PARTS if isinstance(task.folder, Path) else 1):
            parts = [part for name in task.runs for part in _read_run(task.folder / RUNS / name, low, high)]
            # A range of hashes of a few rows may have none.
            for bounds in _divide(low, high, 1 + sum(part.nbytes for part in parts) // _MERGED_BYTES) if parts else ():
                shards.write(_merge([_between(part, *bounds) for part in parts]))
        shards.close()
    record = shards.description()
    put_json(task.record, record)
    return record


def _divide(low: int, high: int, count: int) -> Iterator[tuple[int, int]]:
    """Yields the bounds of `count` equal parts of the hashes from `low` to below `high`."""
    bounds = [low + (high - low) * i // count for i in range(count + 1)]
    return pairwise(bounds)


def _merge(parts: list[pa.Table]) -> pa.Table:
    """Returns the rows of tables in the order of their hashes; rows of equal hashes keep the order of the tables."""
    table = pa.concat_tables(parts, promote_options="default").combine_chunks()
    order = np.argsort(table[_HASH].to_numpy(), kind="stable")
    return table.drop_columns([_HASH]).replace_schema_metadata(None).take(order)


def _between(table: pa.Table, low: int, high: int) -> pa.Table:
    """Returns the rows with hashes in [low, high) of a table in the order of hashes."""
    hashes = table[_HASH].to_numpy()
    start = int(np.searchsorted(hashes, low))
    return table.slice(start, int(np.searchsorted(hashes, high - 1, side="right")) - start)


def _read_run(run: Location, low: int, high: int) -> list[pa.Table]:
    """Returns the rows of a run with hashes in [low, high), in their order."""
    try:
        with closing(_open_run(run)) as source:
            file = pa.ipc.open_file(source)
            first = json.loads(file.schema.metadata[_FIRST_HASHES])
            numbers = range(max(0, bisect_left(first, low) - 1), bisect_left(first, high))
            return [_between(pa.Table.from_batches([file.get_batch(number)]), low, high) for number in numbers]
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"{run}, written by this ingest, cannot be read: {error}") from error


def _open_run(run: Location) -> Any:
    if isinstance(run, Path):
        # The tables that are read keep the file mapped after it is closed.
        return pa.memory_map(str(run))
    return open_data_file(run)
