"""Micro-batches of rows that are about equally long, so that little of them is padding."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ray_app.plan.keyed import permutation

Int64 = npt.NDArray[np.int64]


def by_length(lengths: Int64, micro_batch: int, base: int) -> Int64:
    """An order of a window's rows: those of a micro-batch are about equally long, and short and long micro-batches are mixed.

    Logical workers that take the same key have micro-batches of like lengths in the same step, so none waits for another. The rows that
    do not fill a micro-batch stay the last ones.

    Args:
        lengths: Of the rows in their shuffled order, shape (rows,).
        micro_batch: Rows of a micro-batch.
        base: Key of the order of the micro-batches.

    Returns:
        Indices into the rows, shape (rows,).
    """
    full = len(lengths) // micro_batch
    alike = np.argsort(lengths[: full * micro_batch], kind="stable").reshape(full, micro_batch)
    return np.concatenate([alike[permutation(base, full)].reshape(-1), np.arange(full * micro_batch, len(lengths))])
