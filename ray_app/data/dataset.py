"""A Parquet data set as its footers describe it: the manifest of its row groups and the facts of its columns.

What is in files, as digests: it tells any other content apart, where the manifest knows paths and row counts alone.

The class of every row, read from one column of a data set before anything is planned.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ray_app.data.arrays import is_bytes, is_number, is_numbers, is_text, spec_of_field, spec_of_list_type
from ray_app.data.parquet_files import DataFile, Footers, Range, load_footers, read_footers
from ray_app.errors import DataError
from ray_app.plan.manifest import ColumnFacts, DataFacts, Manifest, parse_partition_value, parse_partitions
from ray_app.storage.data_files import (
    DataLocation,
    file_versions,
    files_below,
    find_file,
    folders_in,
    is_folder,
    locate_data,
    open_data_file,
)
from ray_app.storage.files import Location, put_json, read_json

_THREADS = 8
_SETTLED_NS = 5_000_000_000


def hash_files(root: DataLocation, paths: Iterable[str], memory: Location | None = None) -> dict[str, str]:
    """SHA-256 of files below a folder, by their relative path.

    Args:
        root: The folder.
        paths: The files.
        memory: A file that keeps the digests: what was not changed since then is not read again. Not given: all are
            read.

    Raises:
        OSError: One cannot be read.
    """
    listed = list(paths)
    now_ns, seen = time.time_ns(), dict(zip(listed, _versions(root, listed), strict=True)) if memory is not None else {}
    known = _remembered(memory, root) if memory is not None else {}
    found = {path: known[path][1] for path in listed if path in known and known[path][0] == seen[path]}
    unknown = [path for path in listed if path not in found]
    with ThreadPoolExecutor(_THREADS) as pool:
        found |= zip(unknown, pool.map(lambda path: sha256(root / path), unknown), strict=True)
    if memory is not None and unknown:
        kept = {path: [seen[path], found[path]] for path in listed if _is_settled(seen[path], now_ns)}
        put_json(memory, {"root": str(root), "files": kept})
    return {path: found[path] for path in listed}


def _versions(root: DataLocation, paths: list[str]) -> list[Any]:
    """What changes with the content of a file: its ETag on S3; on a disk size, times and inode, which a copy cannot all
    set back.
    """
    if not isinstance(root, Path):
        return file_versions(root, paths)
    stats = [(root / path).stat() for path in paths]
    return [[stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino] for stat in stats]


def _is_settled(version: Any, now_ns: int) -> bool:
    """Whether a later change shows in the version: clocks of file systems may stand still for seconds."""
    return isinstance(version, str) or now_ns - version[2] > _SETTLED_NS


def _remembered(memory: Location, root: DataLocation) -> dict[str, Any]:
    try:
        values = read_json(memory) or {}
        return dict(values["files"]) if values.get("root") == str(root) else {}
    except (ValueError, KeyError, TypeError, AttributeError):  # it is damaged; then everything is read
        return {}


def sha256(file: DataLocation) -> str:
    """SHA-256 of a file."""
    with open_data_file(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]


def read_labels(root: str, manifest: Manifest, column: str) -> tuple[list[Any], npt.NDArray[np.unsignedinteger]]:
    """Reads a column of integers or text as classes.

    Args:
        root: Folder (path or URI) that the manifest's paths are relative to.
        manifest: The rows.
        column: Its name.

    Returns:
        The distinct values in ascending order; and for each row, in manifest order, which of them it has, in as few
        bytes as will do.

    Raises:
        DataError: There is no such column, it holds something else, or it has missing values.
    """

    def read(path: str) -> npt.NDArray:
        with DataFile(root, path, manifest.partitions) as file:
            return classes(file)

    def classes(file: DataFile) -> npt.NDArray:
        if column not in file.schema.names:
            raise DataError(
                f"{root} has no column {column!r} of classes; its columns are {', '.join(sorted(file.schema.names))}."
                f" Name another"
                " one (data.balance_by, or task.init_args.label)."
            )
        values = file.read([column]).column(0)
        kind = values.type
        if values.null_count or not (pa.types.is_integer(kind) or pa.types.is_boolean(kind) or is_text(kind)):
            raise DataError(
                f"Column {column!r} of {root} holds {kind} with {values.null_count} missing values; classes are"
                f" integers or text without"
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


UNFINISHED_MARKER = "_ingest.json"
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
    """Opens a Parquet file, or all `*.parquet` files below a folder, by their footers or what an ingest has kept of
    them.

    Raises:
        DataError: Nothing is there, a file is not Parquet, the files have different columns, or there are no rows.
    """
    target = locate_data(path)
    is_one = not is_folder(target)
    if is_one and not find_file(target):
        raise DataError(
            f"data path {path!r} does not exist (looked at {target}); ingest the data first: ray-app ingest --help."
        )
    root = target.parent if is_one else target
    files = [target] if is_one else files_below(target, ".parquet")
    _refuse_unfinished(path, root)
    nested = [] if is_one else [place.name for place in folders_in(root) if find_file(place / "dataset.json")]
    if nested:
        raise DataError(
            f"data path {path!r} holds several data sets: {', '.join(nested)}. Name one of them, such as"
            f" {root / nested[0]}."
        )
    if not files:
        raise DataError(f"data path {path!r} holds no *.parquet file; ingest the data first: ray-app ingest --help.")
    footers = read_footers(root, files, None if is_one else load_footers(root))
    manifest = footers.manifest
    if not manifest.num_rows:
        raise DataError(
            f"data path {path!r} holds {len(files)} Parquet files but not one row; there is nothing to train on."
        )
    facts = _facts(path, root, footers, manifest)
    return Dataset(str(root), manifest, facts)


def _refuse_unfinished(path: str, root: DataLocation) -> None:
    """Refuses a folder on S3 that an ingest has begun and not finished; on a disk there is none."""
    if find_file(root / UNFINISHED_MARKER) and not find_file(root / "dataset.json"):
        raise DataError(
            f"data path {path!r} is being written by an ingest, or one was interrupted there. Wait for it, or start the"
            f" same"
            " ray-app ingest again: it does what is left."
        )


def _facts(path: str, root: DataLocation, footers: Footers, manifest: Manifest) -> DataFacts:
    columns = {field.name: _column_facts(field, footers.range_of(field)) for field in footers.schema}
    columns |= {name: facts for name, facts in _partition_facts(manifest).items() if name not in columns}
    described: dict[str, Any] = read_json(root / "dataset.json") or {}
    classes = described.get("classes")
    count = partial(count_labels, str(root), manifest)
    index = tuple(dict.fromkeys([*index_columns(footers.schema), *described.get("index_columns", [])]))
    return DataFacts(path, manifest.num_rows, columns, tuple(classes) if classes else None, count, index)


def index_columns(schema: pa.Schema) -> tuple[str, ...]:
    """The columns of a table that number its rows.

    These are the index that pandas names in the metadata of its files, what pandas calls an index without a name, and a
    column without a name, as `to_csv` and R's `write.csv` make one of the row numbers, `Unnamed: 0` once pandas has
    read that again.
    """
    try:
        pandas = json.loads((schema.metadata or {}).get(b"pandas", b"{}"))
    except ValueError:
        pandas = {}
    named = pandas.get("index_columns") if isinstance(pandas, dict) else None
    return tuple(name for name in schema.names if (isinstance(named, list) and name in named) or _INDEX.fullmatch(name))


def _partition_facts(manifest: Manifest) -> dict[str, ColumnFacts]:
    """The facts of the columns that are in the names of folders."""
    texts = [parse_partitions(path) for path in manifest.paths] if manifest.partitions else []
    rows = np.bincount(manifest.file_of, manifest.rows, len(manifest.paths))
    found = {}
    for name, kind in manifest.partitions.items():
        values = [parse_partition_value(text[name], kind) for text in texts]
        known = [value for value in values if value is not None]
        nulls = int(sum(count for value, count in zip(values, rows, strict=True) if value is None))
        if kind == "string":
            found[name] = ColumnFacts("text", nulls=nulls)
        else:
            span = 1.0 if kind == "int64" else None
            dtype: tuple[Literal["integer", "number"], str] = (
                ("integer", "int64") if kind == "int64" else ("number", "float64")
            )
            low, high = (float(min(known)), float(max(known))) if known else (None, None)
            found[name] = ColumnFacts(*dtype, (), low, high, nulls, span)
    return found


def _column_facts(field: pa.Field, found: Range) -> ColumnFacts:
    spec = spec_of_field(field) or spec_of_list_type(field.type)
    if spec is not None:
        return ColumnFacts("array" if spec.padding is None else "list", spec.dtype, spec.shape, found.least, found.most)
    kind = field.type
    if is_number(kind):
        dtype = str(kind.to_pandas_dtype().__name__)
        is_float = pa.types.is_floating(kind)
        return ColumnFacts(
            "number" if is_float else "integer", dtype, (), found.least, found.most, found.nulls, found.group_span
        )
    if is_bytes(kind):
        return ColumnFacts("bytes")
    if is_text(kind):
        return ColumnFacts("text")
    if is_numbers(kind):
        return ColumnFacts("list", str(kind), (), found.least, found.most)
    return ColumnFacts("other", str(kind))
