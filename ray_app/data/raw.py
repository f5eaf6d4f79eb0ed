"""What the readers of raw data share (`raw_files.py`, `raw_arrays.py`): the shape of a reader and how its tables are made.

Every table has a column `row_id` (string): where the row came from. No reader holds more than about `BLOCK_BYTES` of rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa

from ray_app.data.columns import Array, encode

BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Part:
    """One data set of a source.

    Args:
        name: Sub-folder of the output, or "" for the output folder itself.
        rows: How many rows the source says it has; held against what `tables` gives.
        tables: Starts reading: tables of one schema, in the source's order.
        classes: Name of each class by its index in `label`; None where labels have no names.
        skipped_files: Files of the input that are not data of this format.
    """

    name: str
    rows: int
    tables: Callable[[], Iterator[pa.Table]]
    classes: tuple[str, ...] | None = None
    skipped_files: int = 0


class Reader(Protocol):
    """One raw format."""

    def files(self) -> Iterator[Path]:
        """Every file that is read, in a fixed order; raises DataError where the input is missing or empty."""

    def parts(self) -> list[Part]:
        """The data sets of the source; may read the input once, in a stream, to learn its types and classes."""


def table(row_ids: list[str], columns: dict[str, Array | pa.Array]) -> pa.Table:
    """Arrays of more than one dimension become fixed-shape array columns, the rest plain ones."""
    fields, arrays = [pa.field("row_id", pa.string(), nullable=False)], [pa.array(row_ids, pa.string())]
    for name, values in columns.items():
        if isinstance(values, np.ndarray) and values.ndim > 1:
            field, array = encode(name, values)
        else:
            array = pa.array(values) if isinstance(values, np.ndarray) else values
            field = pa.field(name, array.type)
        fields.append(field)
        arrays.append(array)
    return pa.table(arrays, pa.schema(fields))


def listed(folder: Path, *, directories: bool = False) -> list[Path]:
    """Visible files, or visible folders, directly in a folder, sorted by name."""
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if e.is_dir() == directories and not e.name.startswith(".")]
    return [folder / name for name in sorted(names)]


def text(name: str) -> str:
    """A file name as valid UTF-8, whatever the file system holds."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
