"""Parquet shards bounded in rows and bytes, written from a stream of tables, and what `dataset.json` says about them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ray_app.data.dataset.arrays import is_number, spec_of
from ray_app.data.dataset.files import publish
from ray_app.errors import DataError
from ray_app.record.files import Location

MAX_COUNTED_LABELS = 100_000


class Shards:
    """Cuts a stream of tables into files: `part-00000.parquet`, and if that is full `part-00000_001.parquet` and so on.

    Where it cuts depends on the rows and the limits only, not on how the stream comes in tables. A file gets its name when it is finished.

    Args:
        folder: Where the files go; created here.
        stem: Name of the first file without `.parquet`.
        scratch: Folder on a disk for the file that is being written; created here.
        shard_rows: Most rows of one file.
        row_group_rows: Most rows of one row group.
        row_group_bytes: Most bytes of one row group before compression; a larger single row has one of its own.
    """

    def __init__(self, folder: Location, stem: str, scratch: Path, shard_rows: int, row_group_rows: int, row_group_bytes: int) -> None:
        if isinstance(folder, Path):
            folder.mkdir(exist_ok=True)
        scratch.mkdir(exist_ok=True)
        self._folder, self._stem, self._scratch = folder, stem, scratch
        self._limits = (shard_rows, row_group_rows, row_group_bytes)
        self._shards: list[dict[str, Any]] = []
        self._columns: dict[str, dict[str, Any]] = {}
        self._labels: Counter[int] = Counter()
        self._writer: pq.ParquetWriter | None = None
        self._shard_rows = 0
        self._pending: list[pa.Table] = []
        self._pending_rows = self._pending_bytes = 0

    @property
    def rows(self) -> int:
        """Rows of all finished files."""
        return sum(shard["rows"] for shard in self._shards)

    def write(self, table: pa.Table) -> None:
        """Adds rows; a row group is written as soon as the next row does not fit into it."""
        self._describe(table)
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(row_bytes(table))])
        start = 0
        while start < table.num_rows:
            count = self._fitting(before, start)
            if count:
                self._pending.append(table.slice(start, count))
                self._pending_rows += count
                self._pending_bytes += int(before[start + count] - before[start])
                start += count
            if start < table.num_rows:
                self._end_row_group()

    def close(self) -> None:
        """Writes what is left and ends the last file."""
        if self._pending:
            self._end_row_group()
        if self._writer:
            self._end_shard()

    def description(self) -> dict[str, Any]:
        """Its `shards`, `columns` and `labels` (rows by label; None: too many to count)."""
        labels = {str(label): rows for label, rows in self._labels.items()} if len(self._labels) <= MAX_COUNTED_LABELS else None
        return {"shards": self._shards, "columns": self._columns, "labels": labels}

    @property
    def _name(self) -> str:
        """Name of the file that is being written, or of the next one."""
        return f"{self._stem}{f'_{len(self._shards):03d}' if self._shards else ''}.parquet"

    def _fitting(self, before: npt.NDArray[np.int64], start: int) -> int:
        """How many rows from `start` fit into the row group, at least 1 if it is empty; `before`: bytes before each row."""
        shard_rows, row_group_rows, row_group_bytes = self._limits
        room_rows = min(row_group_rows, shard_rows - self._shard_rows) - self._pending_rows
        room_bytes = row_group_bytes - self._pending_bytes
        by_bytes = int(np.searchsorted(before, before[start] + room_bytes, side="right")) - 1 - start
        return max(min(by_bytes, room_rows, len(before) - 1 - start), 0 if self._pending else 1)

    def _end_row_group(self) -> None:
        table = pa.concat_tables(self._pending).combine_chunks()
        self._pending, self._pending_rows, self._pending_bytes = [], 0, 0
        try:
            if self._writer is None:
                self._writer = _parquet_writer(self._scratch / self._name, table.schema)
            self._writer.write_table(table, row_group_size=table.num_rows)
        except OSError as error:
            if error.errno is None:  # pyarrow's word for what Parquet cannot hold; an error of the disk has a number
                raise DataError(f"the columns {table.column_names} cannot be written: {error}. Leave out the one that it is.") from error
            raise
        self._shard_rows += table.num_rows
        if self._shard_rows == self._limits[0]:
            self._end_shard()

    def _end_shard(self) -> None:
        """Ends the file, reads its footer back and holds it against the rows written."""
        assert self._writer is not None
        self._writer.close()
        path = self._scratch / self._name
        footer = pq.read_metadata(path)
        assert footer.num_rows == self._shard_rows
        described = {"path": path.name, "rows": footer.num_rows, "row_groups": footer.num_row_groups, "bytes": path.stat().st_size}
        publish(path, self._folder / path.name)
        self._shards.append(described)
        self._writer, self._shard_rows = None, 0

    def _describe(self, table: pa.Table) -> None:
        """Counts labels (up to a bound) and missing values."""
        for column in table.schema:
            self._columns.setdefault(column.name, column_facts(column))["nulls"] += table[column.name].null_count
        if "label" in table.column_names and len(self._labels) <= MAX_COUNTED_LABELS:
            values, counts = np.unique(table["label"].to_numpy(), return_counts=True)
            self._labels.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))


def _is_bytes(kind: pa.DataType) -> bool:
    """Whether values of this type differ in length: text or encoded files."""
    return bool(pa.types.is_binary(kind) or pa.types.is_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    """Whether values are lists of any length, of numbers or of lists of one size: tokens, boxes."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _item_bytes(kind: pa.DataType) -> int:
    """Bytes of a number, or of a list of one size."""
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _item_bytes(kind.value_type)
    return max(1, kind.bit_width // 8)


def _leaf(column: pa.Field) -> str:
    """What Parquet calls the numbers in a column of lists."""
    name, kind = column.name, column.type
    while _is_list(kind) or pa.types.is_fixed_size_list(kind):
        name, kind = f"{name}.list.element", kind.value_type
    return str(name)


def row_bytes(table: pa.Table) -> npt.NDArray[np.int64]:
    """Bytes of each row before compression, shape (rows,)."""
    total = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        if _is_bytes(column.type):
            total += pc.fill_null(pc.binary_length(column), 0).to_numpy()
        elif _is_list(column.type):
            total += pc.list_value_length(column).to_numpy().astype(np.int64) * _item_bytes(column.type.value_type)
        else:
            total += _item_bytes(column.type)
    return total


def column_facts(column: pa.Field) -> dict[str, Any]:
    """Type, shape of one row and NumPy dtype of a column; the last two are None where a row is no array of numbers."""
    if spec := spec_of(column):
        return {"type": "array", "shape": list(spec.shape), "dtype": np.dtype(spec.dtype).name, "nulls": 0}
    if _is_bytes(column.type) or _is_list(column.type):
        return {"type": str(column.type), "shape": None, "dtype": None, "nulls": 0}
    dtype = np.dtype(column.type.to_pandas_dtype()).name if is_number(column.type) else None
    return {"type": str(column.type), "shape": [], "dtype": dtype, "nulls": 0}


def _parquet_writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """Statistics and dictionaries only for plain columns; encoded images are not compressed twice."""
    plain = [f.name for f in schema if spec_of(f) is None and not pa.types.is_binary(f.type) and not _is_list(f.type)]
    lists = {_leaf(f): "ZSTD" for f in schema if _is_list(f.type)}
    return pq.ParquetWriter(
        path,
        schema,
        compression={f.name: "NONE" if pa.types.is_binary(f.type) else "ZSTD" for f in schema if not _is_list(f.type)} | lists,
        use_dictionary=[name for name in plain if name != "row_id"],
        write_statistics=[*plain, *lists],
    )
