"""Which files belong to which logical worker, where whole files do."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from ray_app.plan.keyed import hash_array, key
from ray_app.plan.manifest import Manifest

Int64 = npt.NDArray[np.int64]

_FILES = 4  # salt: what a key is for


def owners(manifest: Manifest, seed: int, logical_workers: int) -> Int64:
    """The logical worker of every file, shape (files,).

    Files go, from the largest to the smallest, to whoever has the fewest rows (Graham 1969: at most 4/3 of the best possible longest
    stream); a keyed hash orders files of equal size. Logical worker 0 then has the most rows, the last one the fewest.
    """
    rows = rows_of_files(manifest)
    hashed = hash_array(key(_FILES, seed), manifest.path_hash)
    order = np.lexsort((hashed, -rows))
    found = np.zeros(len(rows), np.int64)
    least = [(0, v) for v in range(logical_workers)]
    for file in order.tolist():
        held, v = least[0]
        found[file] = v
        heapq.heapreplace(least, (held + int(rows[file]), v))
    most_first = sorted(range(logical_workers), key=lambda v: (-next(held for held, w in least if w == v), v))
    return np.argsort(np.array(most_first))[found]


def rows_of_files(manifest: Manifest) -> Int64:
    """Rows of every file, shape (files,)."""
    return np.bincount(manifest.file_of, weights=manifest.rows, minlength=len(manifest.paths)).astype(np.int64)
