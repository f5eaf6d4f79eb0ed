"""A whole data set, decoded into memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ray_app.data.dataset.arrays import from_column
from ray_app.data.read.bad_rows import reasons_in
from ray_app.data.read.reader import Fetch, RowSource, check_positions, whole
from ray_app.errors import DataError


@dataclass(frozen=True)
class Decoded:
    """A whole data set in memory.

    Args:
        arrays: Every field in manifest order, each (rows, ...).
        reasons: Why rows are bad, by manifest position; only where the reader skips bad rows.
    """

    arrays: dict[str, npt.NDArray]
    reasons: dict[int, str]


def load_all(fetch: Fetch, source: RowSource) -> Decoded:
    """Decodes a whole data set."""
    manifest = source.manifest
    arrays = {name: np.empty((manifest.num_rows, *spec.shape), np.dtype(spec.dtype)) for name, spec in source.fields.items()}
    reasons: dict[int, str] = {}
    done = 0
    for table in fetch(source.reader, whole(manifest, source.task_rows)):
        positions = np.arange(done, done + table.num_rows)
        check_positions(table, positions)
        reasons |= reasons_in(table, positions)
        for name, spec in source.fields.items():
            arrays[name][done : done + table.num_rows] = from_column(table.column(name), spec)
        done += table.num_rows
    if done != manifest.num_rows:
        raise DataError(f"Read {done} rows of {manifest.num_rows}; the data set changed while it was read.")
    return Decoded(arrays, reasons)
