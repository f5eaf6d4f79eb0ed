"""A Parquet data set as its footers describe it: the manifest of its row groups and the facts of its columns."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from ray_app.data.dataset.arrays import is_bytes, is_number, is_numbers, is_text, list_spec, spec_of
from ray_app.data.dataset.below import files_below
from ray_app.data.dataset.files import Place, find, folders_in, is_folder, place_of
from ray_app.data.dataset.footers import Footers, Range, kept_footers, read_footers
from ray_app.data.dataset.labels import count_labels
from ray_app.errors import DataError
from ray_app.plan.facts import ColumnFacts, DataFacts
from ray_app.plan.manifest import Manifest
from ray_app.plan.partitions import partition_texts, partition_value
from ray_app.record.files import read_json

UNFINISHED = "_ingest.json"
"""File in a data set on S3 that an ingest is writing; its `dataset.json` comes last."""
_INDEX = re.compile(r"|__index_level_\d+__|Unnamed: \d+")


@dataclass(frozen=True)
class Dataset:
    """A folder of Parquet files, on a disk or on S3.

    Args:
        root: Folder (path or URI) that the manifest's paths are relative to.
        manifest: Its row groups.
        facts: Its columns.
    """

    root: str
    manifest: Manifest
    facts: DataFacts


def open_dataset(path: str) -> Dataset:
    """Opens a Parquet file, or all `*.parquet` files below a folder, by their footers or what an ingest has kept of them.

    Raises:
        DataError: Nothing is there, a file is not Parquet, the files have different columns, or there are no rows.
    """
    target = place_of(path)
    is_one = not is_folder(target)
    if is_one and not find(target):
        raise DataError(f"data path {path!r} does not exist (looked at {target}); ingest the data first: ray-app ingest --help.")
    root = target.parent if is_one else target
    files = [target] if is_one else files_below(target, ".parquet")
    _refuse_unfinished(path, root)
    nested = [] if is_one else [place.name for place in folders_in(root) if find(place / "dataset.json")]
    if nested:
        raise DataError(f"data path {path!r} holds several data sets: {', '.join(nested)}. Name one of them, such as {root / nested[0]}.")
    if not files:
        raise DataError(f"data path {path!r} holds no *.parquet file; ingest the data first: ray-app ingest --help.")
    footers = read_footers(root, files, None if is_one else kept_footers(root))
    manifest = footers.manifest
    if not manifest.num_rows:
        raise DataError(f"data path {path!r} holds {len(files)} Parquet files but not one row; there is nothing to train on.")
    facts = _facts(path, root, footers, manifest)
    return Dataset(str(root), manifest, facts)


def _refuse_unfinished(path: str, root: Place) -> None:
    """Refuses a folder on S3 that an ingest has begun and not finished; on a disk there is none."""
    if find(root / UNFINISHED) and not find(root / "dataset.json"):
        raise DataError(
            f"data path {path!r} is being written by an ingest, or one was interrupted there. Wait for it, or start the same"
            " ray-app ingest again: it does what is left."
        )


def _facts(path: str, root: Place, footers: Footers, manifest: Manifest) -> DataFacts:
    columns = {field.name: _column_facts(field, footers.range_of(field)) for field in footers.schema}
    columns |= {name: facts for name, facts in _partition_facts(manifest).items() if name not in columns}
    described: dict[str, Any] = read_json(root / "dataset.json") or {}
    classes = described.get("classes")
    count = partial(count_labels, str(root), manifest)
    index = tuple(dict.fromkeys([*index_columns(footers.schema), *described.get("index_columns", [])]))
    return DataFacts(path, manifest.num_rows, columns, tuple(classes) if classes else None, count, index)


def index_columns(schema: pa.Schema) -> tuple[str, ...]:
    """The columns of a table that number its rows.

    These are the index that pandas names in the metadata of its files, what pandas calls an index without a name, and a column without a
    name, as `to_csv` and R's `write.csv` make one of the row numbers, `Unnamed: 0` once pandas has read that again.
    """
    try:
        pandas = json.loads((schema.metadata or {}).get(b"pandas", b"{}"))
    except ValueError:
        pandas = {}
    named = pandas.get("index_columns") if isinstance(pandas, dict) else None
    return tuple(name for name in schema.names if (isinstance(named, list) and name in named) or _INDEX.fullmatch(name))


def _partition_facts(manifest: Manifest) -> dict[str, ColumnFacts]:
    """The facts of the columns that are in the names of folders."""
    texts = [partition_texts(path) for path in manifest.paths] if manifest.partitions else []
    rows = np.bincount(manifest.file_of, manifest.rows, len(manifest.paths))
    found = {}
    for name, kind in manifest.partitions.items():
        values = [partition_value(text[name], kind) for text in texts]
        known = [value for value in values if value is not None]
        nulls = int(sum(count for value, count in zip(values, rows, strict=True) if value is None))
        if kind == "string":
            found[name] = ColumnFacts("text", nulls=nulls)
        else:
            span = 1.0 if kind == "int64" else None
            dtype: tuple[Literal["integer", "number"], str] = ("integer", "int64") if kind == "int64" else ("number", "float64")
            low, high = (float(min(known)), float(max(known))) if known else (None, None)
            found[name] = ColumnFacts(*dtype, (), low, high, nulls, span)
    return found


def _column_facts(field: pa.Field, found: Range) -> ColumnFacts:
    spec = spec_of(field) or list_spec(field.type)
    if spec is not None:
        return ColumnFacts("array" if spec.padding is None else "list", spec.dtype, spec.shape, found.least, found.most)
    kind = field.type
    if is_number(kind):
        dtype = str(kind.to_pandas_dtype().__name__)
        is_float = pa.types.is_floating(kind)
        return ColumnFacts("number" if is_float else "integer", dtype, (), found.least, found.most, found.nulls, found.group_span)
    if is_bytes(kind):
        return ColumnFacts("bytes")
    if is_text(kind):
        return ColumnFacts("text")
    if is_numbers(kind):
        return ColumnFacts("list", str(kind), (), found.least, found.most)
    return ColumnFacts("other", str(kind))
