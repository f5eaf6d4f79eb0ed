"""Planned reads: what one read task fetches and decodes, and how read tasks run, as Ray Data tasks or in this process.

The plan decides, a source only fetches. Every decoded row carries its manifest position, so that the feed can check on arrival that
it got exactly the rows that it asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from ray_app.data.bad_rows import REASON, Decode, Rows, decode_all, decode_around
from ray_app.data.columns import ArraySpec, decode, encode, is_text, spec_like, spec_of
from ray_app.data.dataset import Dataset
from ray_app.data.places import parquet
from ray_app.errors import BadRowError, DataError, own_error
from ray_app.plan.manifest import Manifest
from ray_app.plan.order import Segment
from ray_app.record.files import location

POSITION = "__position__"
AT_ONCE = 8 << 20
"""Decoded bytes of the rows that are decoded at once, and of a block in the object store."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Piece:
    """Rows [first, first + rows) of a row group of a file; `position` is the manifest position of the first."""

    path: str
    row_group: int
    first: int
    rows: int
    position: int


ReadSpec = tuple[Piece, ...]
"""What one read task reads, in order."""


@dataclass(frozen=True)
class Reader:
    """Reads and decodes pieces of a data set; small, pickled to every read task.

    Args:
        root: Folder (path or URI) that paths are relative to.
        columns: Columns to read.
        decode: Turns rows as read into arrays, see `Task.decode`.
        fields: What a decoded row looks like, see `probe`.
        skips: Whether rows that cannot be decoded are put as zeros, with the reason in a column of its own; otherwise such a row is an
            error.
    """

    root: str
    columns: list[str]
    decode: Decode
    fields: dict[str, ArraySpec]
    skips: bool = False

    def read(self, spec: ReadSpec) -> Iterator[pa.Table]:
        """Decodes the rows of `spec` in order, a few at a time, so that their memory serves the next ones, as fresh memory costs more.

        Yields:
            Tables with an array column per field, the column of positions and, with `skips`, that of reasons.

        Raises:
            BadRowError: A row cannot be decoded, without `skips`.
        """
        files: dict[str, pq.ParquetFile] = {}
        step = rows_per_task(self.fields, AT_ONCE / 1e6)
        for piece in spec:
            if piece.path not in files:
                files[piece.path] = parquet(location(self.root) / piece.path)
            rows = rows_of(_stored(files[piece.path], piece, self.columns))
            for low in range(0, piece.rows, step):
                few = replace(piece, first=piece.first + low, rows=min(step, piece.rows - low), position=piece.position + low)
                yield self._decoded(few, {name: values[low : low + step] for name, values in rows.items()})

    def _decoded(self, piece: Piece, rows: dict[str, Any]) -> pa.Table:
        reasons: list[str | None] = []
        if self.skips:
            decoded, reasons = decode_around(self.decode, rows, piece.rows, self.fields)
        else:
            try:
                decoded = decode_all(self.decode, rows, piece.rows, self.fields)
            except Exception as error:
                raise self._named(piece, rows, error) from error
        decoded[POSITION] = np.arange(piece.position, piece.position + piece.rows)
        encoded = [encode(name, values) for name, values in decoded.items()]
        table = pa.Table.from_arrays([data for _, data in encoded], schema=pa.schema([field for field, _ in encoded]))
        return table.append_column(REASON, pa.array(reasons, pa.string())) if self.skips else table

    def _named(self, piece: Piece, rows: dict[str, Any], error: Exception) -> DataError:
        """The error that says which row of a piece cannot be decoded."""
        for i in range(piece.rows):
            try:
                decode_all(self.decode, {name: values[i : i + 1] for name, values in rows.items()}, 1, self.fields)
            except Exception as row_error:
                return BadRowError(piece.path, piece.row_group, piece.first + i, f"{row_error}")
        return DataError(f"{piece.path}, row group {piece.row_group} cannot be decoded as a whole: {error}")


def _stored(file: pq.ParquetFile, piece: Piece, columns: list[str]) -> pa.Table:
    return file.read_row_group(piece.row_group, columns=columns, use_threads=False).slice(piece.first, piece.rows)


def rows_of(table: pa.Table) -> dict[str, Any]:
    """A table as rows for `Task.decode`: arrays where the column has numbers or arrays, lists of bytes or text otherwise."""
    rows: dict[str, Any] = {}
    for field, column in zip(table.schema, table.columns, strict=True):
        spec = spec_of(field)
        if spec is not None:
            rows[field.name] = decode(column, spec)
        elif is_text(field.type) or pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
            rows[field.name] = column.to_pylist()
        else:
            rows[field.name] = column.to_numpy()
    return rows


def specs_of(manifest: Manifest, segments: list[Segment], max_rows: int) -> list[ReadSpec]:
    """Cuts segments into read tasks of at most `max_rows` rows, keeping their order."""
    specs: list[list[Piece]] = [[]]
    room = max_rows
    for segment in segments:
        done = 0
        while done < segment.rows:
            if not room:
                specs.append([])
                room = max_rows
            take = min(room, segment.rows - done)
            specs[-1].append(_piece(manifest, segment.row_group, segment.first + done, take))
            done, room = done + take, room - take
    return [tuple(spec) for spec in specs if spec]


def _piece(manifest: Manifest, row_group: int, first: int, rows: int) -> Piece:
    path = manifest.paths[int(manifest.file_of[row_group])]
    position = int(manifest.first_row[row_group]) + first
    return Piece(path, int(manifest.index_in_file[row_group]), first, rows, position)


def whole(manifest: Manifest, max_rows: int) -> list[ReadSpec]:
    """The whole data set in manifest order, in read tasks of at most `max_rows` rows."""
    segments = [Segment(i, 0, int(rows)) for i, rows in enumerate(manifest.rows) if rows]
    return specs_of(manifest, segments, max_rows)


def first_row(dataset: Dataset, columns: list[str], decode_rows: Decode, most_bad: int = 0) -> Rows:
    """Decodes the first good row of a data set, to learn what a decoded row looks like; each field is of shape (1, ...).

    Raises:
        BadRowError: More than `most_bad` rows before it cannot be decoded, or none can.
    """
    manifest = dataset.manifest
    places = ((group, row) for group, rows in enumerate(manifest.rows) for row in range(int(rows)))
    refused: list[BadRowError] = []
    for group, row in islice(places, most_bad + 1):
        piece = _piece(manifest, group, row, 1)
        try:
            return decode_rows(rows_of(_stored(parquet(location(dataset.root) / piece.path), piece, columns)))
        except Exception as error:
            refused.append(BadRowError(piece.path, piece.row_group, row, f"{error}"))
    raise refused[-1]


def first_rows(reader: Reader, manifest: Manifest, most: int) -> dict[str, npt.NDArray]:
    """Decodes the first good rows of a data set, at most so many and all of one row group; each field is of shape (rows, ...).

    Raises:
        BadRowError: One cannot be decoded, and the reader does not skip it.
        DataError: There is no good row.
    """
    for group, rows in enumerate(manifest.rows):
        for first in range(0, int(rows), most):
            table = pa.concat_tables(reader.read((_piece(manifest, group, first, min(most, int(rows) - first)),)))
            good = table.filter(table.column(REASON).is_null()).drop_columns([REASON]) if reader.skips else table
            if good.num_rows:
                return rows_of(good.drop_columns([POSITION]))
    raise DataError(f"{reader.root} has no row that can be decoded.")


def probe(dataset: Dataset, columns: list[str], decode_rows: Decode) -> dict[str, ArraySpec]:
    """What a decoded row of a data set looks like."""
    return {name: spec_like(values) for name, values in first_row(dataset, columns, decode_rows).items()}


def rows_per_task(fields: dict[str, ArraySpec], read_task_mb: float) -> int:
    """Rows of one read task so that its decoded bytes stay within `read_task_mb` megabytes, at least one."""
    return max(1, int(read_task_mb * 1e6 / max(1, sum(spec.row_bytes for spec in fields.values()))))


Fetch = Callable[[Reader, Sequence[ReadSpec]], Iterator[pa.Table]]
"""Runs read tasks and yields their decoded rows in order, in tables of any size."""


def fetch_here(reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[pa.Table]:
    """Reads in this process, one task after the other."""
    for spec in specs:
        yield from reader.read(spec)


def fetch_ray(reader: Reader, specs: Sequence[ReadSpec]) -> Iterator[pa.Table]:
    """Reads as Ray Data read tasks on any CPU of the cluster; blocks arrive in order through the object store."""
    if not specs:
        return
    import ray.data

    from ray_app.data.ray_source import PlannedSource

    quieten().execution_options.preserve_order = True
    dataset = ray.data.read_datasource(PlannedSource(reader, specs), override_num_blocks=len(specs))
    dataset.context.target_max_block_size = AT_ONCE
    try:
        yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)
    except Exception as error:
        raise own_error(error) from error


def quieten() -> Any:
    """Ray Data's settings of this process, with nothing printed."""
    from ray.data.context import DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    logging.getLogger("ray.data._internal.progress").setLevel(logging.ERROR)  # it warns that no bars are shown
    return context


@dataclass(frozen=True)
class RowSource:
    """A data set to be decoded.

    Args:
        reader: Reads and decodes.
        manifest: What to read.
        task_rows: Most rows of one read task.
    """

    reader: Reader
    manifest: Manifest
    task_rows: int

    @property
    def fields(self) -> dict[str, ArraySpec]:
        """What a decoded row looks like."""
        return self.reader.fields


def anchor_here() -> None:
    """Reads nothing with Ray Data, so that the actors that it shares among all readers of a cluster live on this node.

    Whoever reads first makes them, on its node, and everyone who reads asks them. Made by a worker they would be lost with its node, and
    the other workers would stand still until the cluster has noticed that, which takes a minute or two.
    """
    import ray.data

    try:
        quieten()
        ray.data.range(1, override_num_blocks=1).take_all()
    except Exception as error:  # then the first worker makes them
        logger.warning("Ray Data's shared actors could not be made here: %s", error)


def check_positions(table: pa.Table, expected: npt.NDArray[np.int64]) -> None:
    """Checks that a table holds just the expected rows in the expected order.

    Raises:
        DataError: It does not: the rows would not be consumed exactly once.
    """
    arrived = decode(table.column(POSITION), ArraySpec("<i8", ()))
    if not np.array_equal(arrived, expected):
        raise DataError(
            f"A read task delivered {len(arrived)} rows from position {arrived[:1]} where {len(expected)} from {expected[:1]} were planned;"
            " stopping, because rows would be lost or doubled. Please report this."
        )
