"""The first rows of a data set: what a decoded row looks like.

Where the longest row of a data set is, by the lengths of its lists; no row is decoded.
"""

from __future__ import annotations

import difflib
import logging
import time
from functools import partial
from itertools import islice

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ray_app.data.arrays import ArraySpec, spec_of_values
from ray_app.data.bad_rows import REASON, Decode, find_missing_values
from ray_app.data.dataset import Dataset
from ray_app.data.parquet_files import DataFile
from ray_app.data.reader import POSITION, Reader, Span, make_span, read_span, read_with_retries, table_to_rows
from ray_app.errors import BadRowError, DataError
from ray_app.plan.hashing import key, permutation
from ray_app.plan.manifest import Manifest
from ray_app.storage.data_files import locate_data, parser_errors
from ray_app.task.ragged import Arrays, Field, Ragged
from ray_app.task.user_code import row_error_reason

_MEASURED = 256
"""Rows whose lengths are looked at, where rows have different ones."""


def decode_first_row(dataset: Dataset, columns: list[str], decode_rows: Decode, most_bad: int = 0) -> Arrays:
    """Decodes the first good row of a data set, to learn what a decoded row looks like; each field is of shape (1,
    ...).

    Raises:
        DataError: A column is not there.
        BadRowError: More than `most_bad` rows before it cannot be decoded, or none can.
    """
    _need_columns(dataset, columns)
    manifest = dataset.manifest
    places = ((group, row) for group, rows in enumerate(manifest.rows) for row in range(int(rows)))
    refused: list[BadRowError] = []
    for group, row in islice(places, most_bad + 1):
        span = make_span(manifest, group, row, 1)
        table = read_with_retries(locate_data(dataset.root) / span.path, partial(_stored, dataset, span, columns))
        if missing := find_missing_values(table):
            refused.append(BadRowError(span.path, span.row_group, row, missing[0]))
            continue
        try:
            return decode_rows(table_to_rows(table))
        except Exception as error:
            refused.append(BadRowError(span.path, span.row_group, row, row_error_reason(error)))
    raise refused[-1]


def _stored(dataset: Dataset, span: Span, columns: list[str]) -> pa.Table:
    with DataFile(dataset.root, span.path, dataset.manifest.partitions) as file:
        return read_span(file, span, columns)


def _need_columns(dataset: Dataset, columns: list[str]) -> None:
    """Refuses columns to read that are not there; `a.b` is part of a column `a` of objects."""
    there = sorted(dataset.facts.columns)
    for name in columns:
        if name not in there and name.partition(".")[0] not in there:
            like = difflib.get_close_matches(name, there, 1)
            hint = f"; did you mean {like[0]!r}?" if like else "."
            raise DataError(
                f"{dataset.facts.path} has no column {name!r}, which the task reads (Task.columns); its columns are"
                f" {', '.join(there)}{hint} Name another column in task.init_args or ingest the data again."
            )


def decode_first_rows(reader: Reader, manifest: Manifest, most: int) -> dict[str, Field]:
    """Decodes the first good rows of a data set, at most so many and all of one row group; each field is of shape
    (rows, ...).

    Raises:
        BadRowError: One cannot be decoded, and the reader does not skip it.
        DataError: There is no good row.
    """
    for group, rows in enumerate(manifest.rows):
        for first in range(0, int(rows), most):
            table = pa.concat_tables(reader.read((make_span(manifest, group, first, min(most, int(rows) - first)),)))
            good = table.filter(table.column(REASON).is_null()).drop_columns([REASON]) if reader.skips else table
            if good.num_rows:
                return table_to_rows(good.drop_columns([POSITION]))
    raise DataError(f"{reader.root} has no row that can be decoded.")


def probe(dataset: Dataset, columns: list[str], decode_rows: Decode) -> dict[str, ArraySpec]:
    """What a decoded row of a data set looks like."""
    return infer_specs(decode_first_row(dataset, columns, decode_rows), dataset, columns, decode_rows)


def infer_specs(
    row: Arrays, dataset: Dataset, columns: list[str], decode_rows: Decode, skips: bool = False
) -> dict[str, ArraySpec]:
    """What decoded rows look like, of which one is known; see `sample_ragged_rows`."""
    return {
        name: spec_of_values(values)
        for name, values in sample_ragged_rows(row, dataset, columns, decode_rows, skips).items()
    }


def sample_ragged_rows(
    row: Arrays, dataset: Dataset, columns: list[str], decode_rows: Decode, skips: bool = False
) -> Arrays:
    """The first rows, where rows have different lengths; else the one that is known.

    Args:
        row: The first good one.
        dataset: Where it is from.
        columns: Columns to read.
        decode_rows: See `Task.decode`.
        skips: Whether rows that cannot be decoded are passed over.
    """
    fields = {name: spec_of_values(values) for name, values in row.items()}
    if all(spec.padding is None for spec in fields.values()):
        return row
    reader = Reader(dataset.root, columns, decode_rows, fields, skips, partitions=dataset.manifest.partitions)
    rows = decode_first_rows(reader, dataset.manifest, _MEASURED)
    return {name: rows[name] for name in fields}


def sample_rows(dataset: Dataset, columns: list[str], decode_rows: Decode, max_rows: int) -> Arrays | None:
    """Decodes rows from all over the first and the last row group of a data set: a file may be sorted by class.

    Returns:
        At most so many rows, each field of shape (rows, ...), all of the data set if it has no more; None: a row cannot
        be decoded, which is said where it is read.
    """
    manifest = dataset.manifest
    groups = [group for group, rows in enumerate(manifest.rows) if rows]
    chosen = groups if manifest.num_rows <= max_rows else sorted({groups[0], groups[-1]})
    tables = []
    for place, group in enumerate(chosen):
        rows = int(manifest.rows[group])
        wanted = (
            rows
            if len(chosen) == len(groups) and manifest.num_rows <= max_rows
            else min(rows, max_rows // (len(chosen) - place))
        )
        span = make_span(manifest, group, 0, rows)
        table = read_with_retries(locate_data(dataset.root) / span.path, partial(_stored, dataset, span, columns))
        if find_missing_values(table):
            return None
        tables.append(table.take(np.linspace(0, rows - 1, wanted).round().astype(np.int64)))
        max_rows -= wanted
    try:
        decoded = decode_rows(table_to_rows(pa.concat_tables(tables).combine_chunks()))
    except Exception:
        return None
    return {
        name: values if isinstance(values, Ragged) or values.flags.writeable else values.copy()
        for name, values in decoded.items()
    }


MAX_SCAN_S = 1.0
"""How long is looked: on a disk at about 100 million numbers."""
_MAX_ROWS, _BATCH_BYTES, _BUFFER_BYTES = 16_384, 4 << 20, 1 << 20
_LOOK = 15  # salt: what a key is for
logger = logging.getLogger(__name__)


def find_longest_row(dataset: Dataset, columns: list[str], most: int, within_s: float = MAX_SCAN_S) -> Span | None:
    """Looks at all lists of a data set, or where it is large at those of row groups from all over it.

    Args:
        dataset: The data set.
        columns: Columns that are read; those of lists of numbers are looked at, their lengths added up.
        most: Longer rows than this are passed over.
        within_s: Seconds after which no more is read.

    Returns:
        The place of the row, of those of the first batch at least; None if no column has lists, or nothing could be
        read. What cannot be read is told when it is trained on.
    """
    columns = [name for name in columns if name in dataset.facts.columns and dataset.facts.columns[name].kind == "list"]
    manifest, found, longest, told = dataset.manifest, None, -1, False
    until_s = time.monotonic() + within_s
    if not columns:
        return None
    for group in permutation(key(_LOOK), len(manifest.rows)).tolist():
        path = manifest.paths[int(manifest.file_of[group])]
        first = 0
        try:
            with (
                parser_errors(locate_data(dataset.root) / path, "It cannot be read as Parquet."),
                DataFile(dataset.root, path, manifest.partitions, _BUFFER_BYTES) as file,
            ):
                at = int(manifest.index_in_file[group])
                # The first batch does not take long where rows are large.
                for rows in file.iter_batches(at, columns, min(_MAX_ROWS, file.rows_within(at, columns, _BATCH_BYTES))):
                    lengths = _lengths(rows)
                    if not told and lengths.max() > most:
                        told = True
                        logger.warning(
                            "A row of %d numbers is not tried before the start, nor are others of more than %d.",
                            lengths.max(),
                            most,
                        )
                    lengths[lengths > most] = -1
                    row = int(lengths.argmax())
                    if lengths[row] > longest:
                        longest, found = int(lengths[row]), make_span(manifest, group, first + row, 1)
                    first += rows.num_rows
                    if time.monotonic() > until_s:
                        logger.info(
                            "The longest row is the longest of those that could be looked at in %g s.", within_s
                        )
                        return found
        except DataError as error:
            logger.info("The longest row is not looked for any further: %s", error)
            return found
    return found


def _lengths(rows: pa.Table) -> npt.NDArray[np.int64]:
    """Numbers in the lists of each row, shape (rows,); lists of lists, such as boxes, are no longer texts."""
    total = np.zeros(rows.num_rows, np.int64)
    for values in rows.columns:
        if not pa.types.is_nested(values.type.value_type):
            total += pc.fill_null(pc.list_value_length(values), 0).to_numpy()
    return total
