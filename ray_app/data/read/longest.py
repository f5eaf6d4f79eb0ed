"""Where the longest row of a data set is, by the lengths of its lists; no row is decoded."""

from __future__ import annotations

import logging
import time

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ray_app.data.dataset.data_file import DataFile
from ray_app.data.dataset.dataset import Dataset
from ray_app.data.dataset.files import parsing, place_of
from ray_app.data.read.reader import Span, span_of
from ray_app.errors import DataError
from ray_app.plan.keyed import key, permutation

LOOK_S = 1.0
"""How long is looked: on a disk at about 100 million numbers."""
_MAX_ROWS, _BATCH_BYTES, _BUFFER_BYTES = 16_384, 4 << 20, 1 << 20
_LOOK = 15  # salt: what a key is for
logger = logging.getLogger(__name__)


def longest_row(dataset: Dataset, columns: list[str], most: int, within_s: float = LOOK_S) -> Span | None:
    """Looks at all lists of a data set, or where it is large at those of row groups from all over it.

    Args:
        dataset: The data set.
        columns: Columns that are read; those of lists of numbers are looked at, their lengths added up.
        most: Longer rows than this are passed over.
        within_s: Seconds after which no more is read.

    Returns:
        The place of the row, of those of the first batch at least; None if no column has lists, or nothing could be read. What cannot be
        read is told when it is trained on.
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
                parsing(place_of(dataset.root) / path, "It cannot be read as Parquet."),
                DataFile(dataset.root, path, manifest.partitions, _BUFFER_BYTES) as file,
            ):
                at = int(manifest.index_in_file[group])
                # The first batch does not take long where rows are large.
                for rows in file.iter_batches(at, columns, min(_MAX_ROWS, file.rows_within(at, columns, _BATCH_BYTES))):
                    lengths = _lengths(rows)
                    if not told and lengths.max() > most:
                        told = True
                        logger.warning(
                            "A row of %d numbers is not tried before the start, nor are others of more than %d.", lengths.max(), most
                        )
                    lengths[lengths > most] = -1
                    row = int(lengths.argmax())
                    if lengths[row] > longest:
                        longest, found = int(lengths[row]), span_of(manifest, group, first + row, 1)
                    first += rows.num_rows
                    if time.monotonic() > until_s:
                        logger.info("The longest row is the longest of those that could be looked at in %g s.", within_s)
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
