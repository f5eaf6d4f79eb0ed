"""Rows in the order of a hash of their ids, however sorted the source is: training mixes within windows, which then are
like the whole.

Two stages of tasks, so that memory is bounded and the order depends on the rows alone: the pieces of the source write
runs, files of some rows in the order of their hashes; then each bucket, a range of hashes, takes its rows out of all
runs and writes shards.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_app.errors import DataError, StorageError
from ray_app.ingest.options import IngestOptions
from ray_app.ingest.output_folder import RECORDS, RUNS, make_scratch, side_folder
from ray_app.ingest.shards import Shards, column_facts, row_bytes
from ray_app.storage.data_files import find_file, publish, to_arrow
from ray_app.storage.files import Location, put_json, read_json

RUN_BYTES = 64 << 20
"""Bytes of the rows of a run, which are held in memory."""
BUCKET_BYTES = 128 << 20
"""Bytes of the rows of a bucket, on an average; as much is in memory, or mapped to it."""
_BATCH_BYTES = 1 << 20
"""Bytes that are read of a run at once."""
_MERGED_BYTES = 8 << 20
"""Bytes of a bucket that are put in order at once."""
_HASH, _FIRST = "__hash__", b"ray_app.first"
_END = 1 << 63
"""Above every hash."""

Int64 = npt.NDArray[np.int64]


class Runs:
    """Writes a stream of tables as files of rows in the order of their hashes, each with the hashes at which its
    batches begin.

    Args:
        folder: Where the files go.
        stem: Beginning of their names.
        scratch: Folder on a disk for the file that is being written; created here.
    """

    def __init__(self, folder: Location, stem: str, scratch: Path) -> None:
        if isinstance(folder, Path):
            folder.mkdir(exist_ok=True)
        scratch.mkdir(exist_ok=True)
        self._folder, self._stem, self._scratch = folder, stem, scratch
        self._runs: list[dict[str, Any]] = []
        self._columns: dict[str, dict[str, Any]] = {}
        self._pending: list[pa.Table] = []
        self._pending_bytes = 0

    @property
    def rows(self) -> int:
        """Rows of all finished files."""
        return sum(run["rows"] for run in self._runs)

    def write(self, table: pa.Table) -> None:
        """Adds rows.

        Raises:
            DataError: A column is of another type than before.
        """
        for column in table.schema:
            facts = column_facts(column)
            known = self._columns.setdefault(column.name, facts)
            if {**known, "nulls": 0} != {**facts, "nulls": 0}:
                raise DataError(
                    f"the column {column.name!r} is {known} in one file of the input and {facts} in another one; all"
                    f" files of a data set"
                    " have the same. Correct the input."
                )
            known["nulls"] += table[column.name].null_count
        self._pending.append(table)
        self._pending_bytes += int(row_bytes(table).sum())
        if self._pending_bytes >= RUN_BYTES:
            self._end_run()

    def close(self) -> None:
        """Writes what is left."""
        if sum(table.num_rows for table in self._pending):
            self._end_run()

    def description(self) -> dict[str, Any]:
        """Its `runs` and `columns`."""
        return {"runs": self._runs, "columns": self._columns}

    def _end_run(self) -> None:
        table = pa.concat_tables(self._pending, promote_options="default").combine_chunks()
        self._pending, self._pending_bytes = [], 0
        hashes = np.array([_hash(row_id) for row_id in table["row_id"].to_pylist()], np.int64)
        order = np.argsort(hashes, kind="stable")
        sizes = row_bytes(table)
        parts = list(_cut(order, sizes))
        table = table.append_column(_HASH, pa.array(hashes))
        first = json.dumps([int(hashes[part[0]]) for part in parts]).encode()
        path = self._scratch / f"{self._stem}-{len(self._runs):03d}.arrow"
        schema = table.schema.with_metadata({_FIRST: first})
        with pa.ipc.new_file(path, schema) as file:
            for part in parts:
                file.write_table(table.take(part).combine_chunks())
        self._runs.append(
            {"path": path.name, "rows": len(order), "row_bytes": int(sizes.sum()), "bytes": path.stat().st_size}
        )
        publish(path, self._folder / path.name)


def _hash(row_id: str) -> int:
    """What decides where a row goes: from 0, below `_END`."""
    return int.from_bytes(hashlib.blake2b(row_id.encode(), digest_size=8, key=b"mixed").digest(), "big") >> 1


def _cut(order: Int64, sizes: Int64) -> Iterator[Int64]:
    """Rows in parts of about `_BATCH_BYTES`, each of at least one."""
    before = np.cumsum(sizes[order])
    low = 0
    while low < len(order):
        high = max(low + 1, int(np.searchsorted(before, (before[low - 1] if low else 0) + _BATCH_BYTES, side="right")))
        yield order[low:high]
        low = high


@dataclass(frozen=True)
class BucketTask:
    """A range of hashes of a side that a task makes shards of; pickled to it.

    Args:
        side: Data set that the rows go to.
        number: Of the bucket.
        low: Least hash.
        high: The one above the greatest.
        runs: Names of the side's runs, in the order of the source.
        options: Of the ingest.
        folder: Where to write.
    """

    side: str
    number: int
    low: int
    high: int
    runs: tuple[str, ...]
    options: IngestOptions
    folder: Location

    @property
    def record(self) -> Location:
        """Its record."""
        return self.folder / RECORDS / f"{self.side}-{self.number:05d}.mixed.json"


def make_bucket_tasks(
    side: str, made: list[dict[str, Any]], options: IngestOptions, folder: Location
) -> list[BucketTask]:
    """The tasks that make shards of the runs of a side."""
    runs = [run for piece in made for run in piece["runs"]]
    count = max(1, -(-sum(run["row_bytes"] for run in runs) // BUCKET_BYTES))
    bounds = [_END * i // count for i in range(count + 1)]
    names = tuple(run["path"] for run in runs)
    return [BucketTask(side, i, bounds[i], bounds[i + 1], names, options, folder) for i in range(count)]


def write_bucket(task: BucketTask) -> dict[str, Any]:
    """Does a task, unless it was done before; returns what `Shards.description` says.

    Raises:
        StorageError: A run is gone or damaged.
    """
    side = side_folder(task.folder, task.side)
    done: dict[str, Any] | None = read_json(task.record)
    if done is not None and all(
        (found := find_file(side / s["path"])) and found.size == s["bytes"] for s in done["shards"]
    ):
        return done
    parts = [part for name in task.runs for part in _taken(task.folder / RUNS / name, task.low, task.high)]
    with make_scratch(task.folder) as own:
        shards = Shards(side, f"part-{task.number:05d}", Path(own) / "bucket", *task.options.limits)
        count = 1 + sum(part.nbytes for part in parts) // _MERGED_BYTES
        for i in range(count):
            low, high = (task.low + (task.high - task.low) * j // count for j in (i, i + 1))
            shards.write(_merged([_between(part, low, high) for part in parts]))
        shards.close()
    made = shards.description()
    put_json(task.record, made)
    return made


def _merged(parts: list[pa.Table]) -> pa.Table:
    """The rows of tables in the order of their hashes, of equal ones in that of the tables."""
    table = pa.concat_tables(parts, promote_options="default").combine_chunks()
    order = np.argsort(table[_HASH].to_numpy(), kind="stable")
    return table.drop_columns([_HASH]).replace_schema_metadata(None).take(order)


def _between(table: pa.Table, low: int, high: int) -> pa.Table:
    """The rows with hashes in [low, high) of a table that is in the order of hashes."""
    hashes = table[_HASH].to_numpy()
    start = int(np.searchsorted(hashes, low))
    return table.slice(start, int(np.searchsorted(hashes, high - 1, side="right")) - start)


def _taken(run: Location, low: int, high: int) -> list[pa.Table]:
    """The rows of a run with hashes in [low, high), in their order.

    Raises:
        StorageError: It is gone or damaged.
    """
    try:
        with closing(_opened(run)) as source:
            file = pa.ipc.open_file(source)
            first = json.loads(file.schema.metadata[_FIRST])
            numbers = range(max(0, bisect_left(first, low) - 1), bisect_left(first, high))
            return [_between(pa.Table.from_batches([file.get_batch(number)]), low, high) for number in numbers]
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"{run}, which this ingest wrote, cannot be read: {error}") from error


def _opened(place: Location) -> Any:
    if isinstance(place, Path):
        return pa.memory_map(str(place))  # what is taken stays mapped
    filesystem, path = to_arrow(place)
    return filesystem.open_input_file(path)
