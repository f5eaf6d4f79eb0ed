"""New rows and a sample of the old ones, put together as a data set of their own; the same files and key give the same rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from ray_app.data.dataset.dataset import Dataset
from ray_app.data.dataset.files import parquet
from ray_app.ingest.shards import Shards
from ray_app.plan.keyed import hash_array, key
from ray_app.record.files import location, remove_tree

_SHARD_ROWS, _ROW_GROUP_ROWS, _ROW_GROUP_BYTES = 1_000_000, 10_000, 16_000_000
_DESCRIPTION = "dataset.json"


def old_files(delivery: dict[str, str], before: dict[str, str]) -> set[str]:
    """The paths of a delivery whose content was in another one, under whatever name."""
    known = set(before.values())
    return {path for path, digest in delivery.items() if digest in known}


def put_together(dataset: Dataset, columns: list[str], delivery: dict[str, str], old: set[str], fraction: float, out: Path) -> Path:
    """Writes all rows of new files and a share of the rows of old ones, unless that was done before.

    Args:
        dataset: The delivered training data.
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
    (partial / _DESCRIPTION).write_text(json.dumps(described, indent=1))
    remove_tree(scratch)
    os.rename(partial, out)
    return out


def _rows(dataset: Dataset, columns: list[str], delivery: dict[str, str], old: set[str], fraction: float) -> Iterator[pa.Table]:
    manifest = dataset.manifest
    for index, path in enumerate(manifest.paths):
        content, first = int(delivery[path][:16], 16), 0
        with parquet(location(dataset.root) / path) as file:
            for group in np.flatnonzero(manifest.file_of == index).tolist():
                table = file.read_row_group(int(manifest.index_in_file[group]), columns=columns)
                if path in old:
                    hashes = hash_array(key(content), np.arange(first, first + table.num_rows))
                    kept = table.filter(pa.array(hashes.astype(np.float64) / 2**64 < fraction))
                else:
                    kept = table
                first += table.num_rows
                if kept.num_rows:
                    yield kept
