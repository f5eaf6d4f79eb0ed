"""Reads of rows before training: the first good rows, a sample of rows, and the longest row.

The first good rows give the specification of a decoded row. The longest row is the one with the longest lists.
"""

from __future__ import annotations

import difflib
import io
import logging
import time
from functools import partial
from itertools import islice

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ray_app.data.arrays import ArraySpec, spec_of_values, to_column
from ray_app.data.bad_rows import REASON, Decode, find_missing_values
from ray_app.data.dataset import Dataset
from ray_app.data.parquet_files import DataFile
from ray_app.data.reader import POSITION, Reader, Span, make_span, read_span, read_with_retries, table_to_rows
from ray_app.errors import BadRowError, DataError
from ray_app.plan.hashing import key, permutation
from ray_app.plan.manifest import Manifest
from ray_app.storage.data_files import locate, parser_errors
from ray_app.storage.files import Location, put_atomic
from ray_app.task.ragged import Arrays, Field, Ragged
from ray_app.task.user_code import row_error_reason

_LENGTH_SAMPLE_ROWS = 256
"""Rows that are decoded to learn the mean length, where rows have different lengths."""


def decode_first_row(dataset: Dataset, columns: list[str], decode_rows: Decode, max_bad: int = 0) -> Arrays:
    """Decodes the first good row of a data set; each field is of shape (1, ...).

    Raises:
        DataError: A column is missing.
        BadRowError: More than `max_bad` rows before the first good one cannot be decoded, or none can.
    """
    _check_columns(dataset, columns)
    manifest = dataset.manifest
    all_rows = ((group, row) for group, rows in enumerate(manifest.rows) for row in range(int(rows)))
    refused: list[BadRowError] = []
    for group, row in islice(all_rows, max_bad + 1):
        span = make_span(manifest, group, row, 1)
        table = read_with_retries(locate(dataset.root, span.path), partial(_read_span, dataset, span, columns))
        if missing := find_missing_values(table, columns):
            refused.append(BadRowError(span.path, span.row_group, row, missing[0]))
            continue
        try:
            return decode_rows(table_to_rows(table))
        except Exception as error:
            refused.append(BadRowError(span.path, span.row_group, row, row_error_reason(error)))
    raise refused[-1]


def _read_span(dataset: Dataset, span: Span, columns: list[str]) -> pa.Table:
    with DataFile(dataset.root, span.path, dataset.manifest.rules) as file:
        return read_span(file, span, columns)


def _check_columns(dataset: Dataset, columns: list[str]) -> None:
    """Refuses columns to read that the data set lacks; `a.b` is a field of a column `a` of objects."""
    available = sorted(dataset.facts.columns)
    for name in columns:
        if name not in available and name.partition(".")[0] not in available:
            similar = difflib.get_close_matches(name, available, 1)
            hint = f"; did you mean {similar[0]!r}?" if similar else "."
            raise DataError(
                f"{dataset.facts.path} has no column {name!r}, which the task reads (Task.columns); its columns are"
                f" {', '.join(available)}{hint} Name another column in task.init_args or ingest the data again."
            )


def decode_first_rows(reader: Reader, manifest: Manifest, max_rows: int) -> dict[str, Field]:
    """Decodes at most `max_rows` good rows of the first row group that has some; each field is of shape (rows, ...).

    Raises BadRowError for a row that cannot be decoded, unless the reader skips it, and DataError if there is no good
    row.
    """
    for group, rows in enumerate(manifest.rows):
        for first in range(0, int(rows), max_rows):
            span = make_span(manifest, group, first, min(max_rows, int(rows) - first))
            table = pa.concat_tables(reader.read((span,)))
            good = table.filter(table.column(REASON).is_null()).drop_columns([REASON]) if reader.skips else table
            if good.num_rows:
                return table_to_rows(good.drop_columns([POSITION]))
    raise DataError(f"{reader.root} has no row that can be decoded.")


def put_rows(file: Location, rows: Arrays) -> None:
    """Writes decoded rows to a file of Parquet, see `read_stored_rows`."""
    fields, columns = zip(*(to_column(name, values) for name, values in rows.items()), strict=True)
    data = io.BytesIO()
    pq.write_table(pa.table(list(columns), pa.schema(fields)), data)
    put_atomic(file, data.getvalue())


def read_stored_rows(file: Location) -> Arrays:
    """Returns the decoded rows in a file of `put_rows`."""
    with parser_errors(file, "The file cannot be read as Parquet."):
        return table_to_rows(pq.read_table(pa.BufferReader(file.read_bytes())))


def probe(dataset: Dataset, columns: list[str], decode_rows: Decode) -> dict[str, ArraySpec]:
    """Returns the specification of a decoded row of a data set, from its first rows."""
    return infer_specs(decode_first_row(dataset, columns, decode_rows), dataset, columns, decode_rows)


def infer_specs(
    row: Arrays, dataset: Dataset, columns: list[str], decode_rows: Decode, skips: bool = False
) -> dict[str, ArraySpec]:
    """Returns the specification of decoded rows, one of which is known; see `sample_ragged_rows`."""
    return {
        name: spec_of_values(values)
        for name, values in sample_ragged_rows(row, dataset, columns, decode_rows, skips).items()
    }


def sample_ragged_rows(
    row: Arrays, dataset: Dataset, columns: list[str], decode_rows: Decode, skips: bool = False
) -> Arrays:
    """Returns the first decoded rows, where rows have different lengths; otherwise the known row."""
    fields = {name: spec_of_values(values) for name, values in row.items()}
    if all(spec.padding is None for spec in fields.values()):
        return row
    reader = Reader(dataset.root, columns, decode_rows, fields, skips, rules=dataset.manifest.rules)
    rows = decode_first_rows(reader, dataset.manifest, _LENGTH_SAMPLE_ROWS)
    return {name: rows[name] for name in fields}


def sample_rows(dataset: Dataset, columns: list[str], decode_rows: Decode, max_rows: int) -> Arrays | None:
    """Decodes rows spread over the first and the last row group of a data set, as a file may be sorted by class.

    Returns:
        At most `max_rows` rows, each field of shape (rows, ...), and all rows of a data set that has no more; None if a
        row cannot be decoded, which is reported where the row is read.
    """
    manifest = dataset.manifest
    groups = [group for group, rows in enumerate(manifest.rows) if rows]
    chosen = groups if manifest.num_rows <= max_rows else sorted({groups[0], groups[-1]})
    tables = []
    for number, group in enumerate(chosen):
        rows = int(manifest.rows[group])
        takes_all = len(chosen) == len(groups) and manifest.num_rows <= max_rows
        sampled = rows if takes_all else min(rows, max_rows // (len(chosen) - number))
        span = make_span(manifest, group, 0, rows)
        table = read_with_retries(locate(dataset.root, span.path), partial(_read_span, dataset, span, columns))
        if find_missing_values(table, columns):
            return None
        tables.append(table.take(np.linspace(0, rows - 1, sampled).round().astype(np.int64)))
        max_rows -= sampled
    try:
        decoded = decode_rows(table_to_rows(pa.concat_tables(tables).combine_chunks()))
    except Exception:
        return None
    return {
        name: values if isinstance(values, Ragged) or values.flags.writeable else values.copy()
        for name, values in decoded.items()
    }


MAX_SCAN_S = 1.0
"""Seconds that the search for the longest row may take: on a disk it reads about 100 million numbers in them."""
_MAX_ROWS = 16_384
_BATCH_BYTES = 4 << 20
_BUFFER_BYTES = 1 << 20
_SCAN = 15
"""Salt of the key by which row groups are chosen."""
logger = logging.getLogger(__name__)


def find_longest_row(
    dataset: Dataset, columns: list[str], max_length: int, within_s: float = MAX_SCAN_S
) -> Span | None:
    """Returns the longest row of a data set by the added lengths of its lists; no row is decoded.

    Reads all row groups, or those from all over a large data set for which there is time, and at least the first batch.
    Returns None if no column has lists, or nothing could be read, which training reports.
    """
    columns = [name for name in columns if name in dataset.facts.columns and dataset.facts.columns[name].kind == "list"]
    manifest = dataset.manifest
    longest_row: Span | None = None
    longest = -1
    has_warned = False
    until_s = time.monotonic() + within_s
    if not columns:
        return None
    for group in permutation(key(_SCAN), len(manifest.rows)).tolist():
        path = manifest.paths[int(manifest.file_of[group])]
        first = 0
        try:
            with (
                parser_errors(locate(dataset.root, path), "The file cannot be read as Parquet."),
                DataFile(dataset.root, path, manifest.rules, _BUFFER_BYTES) as file,
            ):
                index = int(manifest.index_in_file[group])
                # A batch is limited in bytes, too, so that the first one does not take long where rows are large.
                batch_rows = min(_MAX_ROWS, file.rows_within(index, columns, _BATCH_BYTES))
                for rows in file.iter_batches(index, columns, batch_rows):
                    lengths = row_lengths(rows)
                    if not has_warned and lengths.max() > max_length:
                        has_warned = True
                        logger.warning(
                            "A row of %d numbers is not tried before the start, nor is any other row of more than %d.",
                            lengths.max(),
                            max_length,
                        )
                    lengths[lengths > max_length] = -1
                    row = int(lengths.argmax())
                    if lengths[row] > longest:
                        longest = int(lengths[row])
                        longest_row = make_span(manifest, group, first + row, 1)
                    first += rows.num_rows
                    if time.monotonic() > until_s:
                        logger.info("The longest row is the longest one that was read within %g s.", within_s)
                        return longest_row
        except DataError as error:
            logger.info("The search for the longest row ends: %s", error)
            return longest_row
    return longest_row


def row_lengths(rows: pa.Table) -> npt.NDArray[np.int64]:
    """Returns how many numbers the lists of each row hold, shape (rows,), without lists of lists, such as boxes."""
    total = np.zeros(rows.num_rows, np.int64)
    for values in rows.columns:
        if not pa.types.is_nested(values.type.value_type):
            total += pc.fill_null(pc.list_value_length(values), 0).to_numpy()
    return total
