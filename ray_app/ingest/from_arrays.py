"""Arrays of a notebook or a program as a data set."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ray_app.errors import DataError
from ray_app.ingest.ingest import DatasetSummary, IngestOptions, ingest


def ingest_arrays(folder: str, *, eval_fraction: float | None = None, seed: int = 0, **arrays: npt.ArrayLike) -> DatasetSummary:
    """Makes a data set of arrays, as `ray-app ingest --source numpy` does of files: `ingest_arrays("datasets/mine", x=x, y=y)`.

    The same call with the same arrays returns what is there. For a moment the arrays are also in files of the temporary folder.

    Args:
        folder: What to create, on a disk or on s3://; it holds the data set, or the data sets `train` and `eval`, also `test`.
        eval_fraction: See `IngestOptions.eval_fraction`.
        seed: See `IngestOptions.seed`.
        **arrays: Of shape (rows, ...): `x` becomes the column `image` (3 or more axes) or `features`, `y` the column `label` (integers) or
            `target`, others keep their names. With `x_train`, `y_train`, `x_test`, `y_test` the data sets are `train`, `eval` and `test`.

    Raises:
        ConfigError: The folder holds something else.
        DataError: The arrays differ in rows, or hold no numbers.
    """
    with tempfile.TemporaryDirectory(prefix="ray_app-arrays-") as place:
        for name, values in arrays.items():
            file = Path(place) / f"{name}.npy"
            np.save(file, _numbers(name, values), allow_pickle=False)
            same_s = int.from_bytes(hashlib.blake2b(file.read_bytes(), digest_size=7).digest(), "big")
            os.utime(file, ns=(same_s, same_s))  # by its time an ingest knows a file again
        return ingest(IngestOptions("numpy", folder, place, eval_fraction=eval_fraction, seed=seed))


def _numbers(name: str, values: npt.ArrayLike) -> npt.NDArray:
    """The values as an array of numbers, rows first.

    Raises:
        DataError: Some are missing, or they are no numbers.
    """
    try:
        array = np.ma.asarray(values) if isinstance(values, np.ma.MaskedArray) else np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise DataError(f"{name}: {error}. Give an array with one entry for each row, all of one shape.") from error
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        raise DataError(f"{name}: {int(np.ma.count_masked(array))} values are masked. Fill them or leave their rows out.")
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"{name}: an array of {array.dtype}; allowed are bool, integers and floats without missing values. Convert it to numbers,"
            " labels by numpy.unique(y, return_inverse=True)[1]."
        )
    return np.ascontiguousarray(array)
