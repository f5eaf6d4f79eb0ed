"""Rows that are chosen by a hash of their file's content and their place in it: a sample of old ones, and those of the gate.

The same files give the same rows, whatever the files are called.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_app.data.dataset.data_file import DataFile
from ray_app.data.dataset.dataset import Dataset
from ray_app.ingest.shards import Shards
from ray_app.plan.keyed import hash_array, key
from ray_app.plan.manifest import Manifest
from ray_app.record.files import remove_tree, to_json

_SHARD_ROWS, _ROW_GROUP_ROWS, _ROW_GROUP_BYTES = 1_000_000, 10_000, 16_000_000
_DESCRIPTION = "dataset.json"
_SELECTION_SHARE = 0.5
"""Of the evaluation rows: by these the best checkpoint is chosen. Both parts need rows, the gate to tell a gain from luck."""


def old_files(delivery: dict[str, str], before: dict[str, str]) -> set[str]:
    """The paths of a delivery whose content was in another one, under whatever name."""
    known = set(before.values())
    return {path for path, digest in delivery.items() if digest in known}


def in_share(content: str, first: int, rows: int, share: float) -> npt.NDArray[np.bool_]:
    """Which of some rows of a file are in a share of them, shape (rows,); what a smaller share has, a larger one has, too.

    Args:
        content: SHA-256 of the file's content.
        first: Place of the first of them in the file.
        rows: How many.
        share: From 0 to 1.
    """
    chosen: npt.NDArray[np.bool_] = (
        hash_array(key(int(content[:16], 16)), np.arange(first, first + rows)).astype(np.float64) / 2**64 < share
    )
    return chosen


def gate_rows(manifest: Manifest, delivery: dict[str, str]) -> npt.NDArray[np.bool_]:
    """Which evaluation rows the gate judges on, shape (rows of the manifest,): those that are not in `selection_part`.

    The best of several checkpoints is the luckier one, on the rows that chose it: judged by them, two equally good models differ.

    Args:
        manifest: The evaluation data.
        delivery: SHA-256 of the content of its files by path.
    """
    rows = np.bincount(manifest.file_of, weights=manifest.rows, minlength=len(manifest.paths)).astype(np.int64)
    return ~np.concatenate(
        [in_share(delivery[path], 0, many, _SELECTION_SHARE) for path, many in zip(manifest.paths, rows.tolist(), strict=True)]
    )


def selection_part(dataset: Dataset, columns: list[str], delivery: dict[str, str], out: Path) -> Path:
    """Writes the evaluation rows by which the best checkpoint is chosen, unless that was done before; returns `out`."""
    return put_together(dataset, columns, delivery, set(dataset.manifest.paths), _SELECTION_SHARE, out)


def put_together(dataset: Dataset, columns: list[str], delivery: dict[str, str], old: set[str], fraction: float, out: Path) -> Path:
    """Writes all rows of new files and a share of the rows of old ones, unless that was done before.

    Args:
        dataset: The delivered data.
        columns: The columns that the task reads.
        delivery: SHA-256 of the content of its files by path.
        old: Paths of its old files.
        fraction: Share of their rows; a row is chosen by a hash of its file's content and its place in it.
        out: The new data set, there whole or not at all.

    Returns:
        `out`.
    """
    if (out / _DESCRIPTION).is_file():
        return out
    partial, scratch = out.with_name(f"{out.name}.partial"), out.with_name(f"{out.name}.scratch")
    for left in (partial, scratch):  # of a start that was stopped in the middle; the round's lease lets only one write
        remove_tree(left)
    partial.mkdir(parents=True)
    shards = Shards(partial, "part-00000", scratch, _SHARD_ROWS, _ROW_GROUP_ROWS, _ROW_GROUP_BYTES)
    for table in _rows(dataset, columns, delivery, old, fraction):
        shards.write(table)
    shards.close()
    made_from = {"files": delivery, "old": sorted(old), "old_fraction": fraction}
    described = shards.description() | {"rows": shards.rows, "classes": dataset.facts.classes, "made_from": made_from}
    (partial / _DESCRIPTION).write_text(to_json(described, indent=1))
    remove_tree(scratch)
    os.rename(partial, out)
    return out


def _rows(dataset: Dataset, columns: list[str], delivery: dict[str, str], old: set[str], fraction: float) -> Iterator[pa.Table]:
    manifest = dataset.manifest
    for index, path in enumerate(manifest.paths):
        first = 0
        with DataFile(dataset.root, path, manifest.partitions) as file:
            for group in np.flatnonzero(manifest.file_of == index).tolist():
                table = file.read_row_group(int(manifest.index_in_file[group]), columns)
                kept = table.filter(pa.array(in_share(delivery[path], first, table.num_rows, fraction))) if path in old else table
                first += table.num_rows
                if kept.num_rows:
                    yield kept
