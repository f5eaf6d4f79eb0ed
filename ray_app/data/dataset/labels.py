"""The class of every row, read from one column of a data set before anything is planned."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_app.data.dataset.arrays import is_text
from ray_app.data.dataset.data_file import DataFile
from ray_app.errors import DataError
from ray_app.plan.manifest import Manifest

_THREADS = 8


def read_labels(root: str, manifest: Manifest, column: str) -> tuple[list[Any], npt.NDArray[np.unsignedinteger]]:
    """Reads a column of integers or text as classes.

    Args:
        root: Folder (path or URI) that the manifest's paths are relative to.
        manifest: The rows.
        column: Its name.

    Returns:
        The distinct values in ascending order; and for each row, in manifest order, which of them it has, in as few bytes as will do.

    Raises:
        DataError: There is no such column, it holds something else, or it has missing values.
    """

    def read(path: str) -> npt.NDArray:
        with DataFile(root, path, manifest.partitions) as file:
            return classes(file)

    def classes(file: DataFile) -> npt.NDArray:
        if column not in file.schema.names:
            raise DataError(
                f"{root} has no column {column!r} of classes; its columns are {', '.join(sorted(file.schema.names))}. Name another"
                " one (data.balance_by, or task.init_args.label)."
            )
        values = file.read([column]).column(0)
        kind = values.type
        if values.null_count or not (pa.types.is_integer(kind) or pa.types.is_boolean(kind) or is_text(kind)):
            raise DataError(
                f"Column {column!r} of {root} holds {kind} with {values.null_count} missing values; classes are integers or text without"
                " missing values. Name another column (data.balance_by, or task.init_args.label), or convert it."
            )
        return values.to_numpy()

    with ThreadPoolExecutor(_THREADS) as pool:
        values = np.concatenate(list(pool.map(read, manifest.paths)))
    known, of_row = np.unique(values, return_inverse=True)
    return known.tolist(), of_row.astype(np.min_scalar_type(len(known) - 1))


def count_labels(root: str, manifest: Manifest, column: str) -> dict[int, int]:
    """Rows of every value of a column of classes; see `read_labels`."""
    known, of_row = read_labels(root, manifest, column)
    return dict(zip(known, np.bincount(of_row, minlength=len(known)).tolist(), strict=True))
