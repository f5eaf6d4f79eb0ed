"""A whole data set, decoded into memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ray_app.data.dataset.arrays import Columns
from ray_app.data.read.bad_rows import reasons_in
from ray_app.data.read.reader import Fetch, RowSource, check_positions, whole
from ray_app.errors import DataError
from ray_app.task.rows.ragged import Field


@dataclass(frozen=True)
class Decoded:
    """A whole data set in memory.

    Args:
        arrays: Every field in manifest order.
        reasons: Why rows are bad, by manifest position; only where the reader skips bad rows.
    """

    arrays: dict[str, Field]
    reasons: dict[int, str]


def load_all(fetch: Fetch, source: RowSource) -> Decoded:
    """Decodes a whole data set."""
    manifest = source.manifest
    columns = Columns(source.fields, manifest.num_rows)
    reasons: dict[int, str] = {}
    done = 0
    for table in fetch(source.reader, whole(manifest, source.task_rows)):
        positions = np.arange(done, done + table.num_rows)
        check_positions(table, positions)
        reasons |= reasons_in(table, positions)
        columns.add(table)
        done += table.num_rows
    if done != manifest.num_rows:
        raise DataError(f"Read {done} rows of {manifest.num_rows}; the data set changed while it was read.")
    return Decoded(columns.all(), reasons)
