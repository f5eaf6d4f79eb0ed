"""A Parquet data set as its footers describe it: the manifest of its row groups and the facts of its columns."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ray_app.data.dataset.arrays import is_numbers, is_text, spec_of
from ray_app.data.dataset.below import files_below
from ray_app.data.dataset.files import Place, find, folders_in, is_folder, parquet, parsing, place_of, relative
from ray_app.data.dataset.labels import count_labels
from ray_app.errors import DataError
from ray_app.plan.facts import ColumnFacts, DataFacts
from ray_app.plan.manifest import Manifest
from ray_app.record.files import read_json

_FOOTER_THREADS = 8
UNFINISHED = "_ingest.json"
"""File in a data set on S3 that an ingest is writing; its `dataset.json` comes last."""
_Placed = tuple[pq.FileMetaData, dict[str, int]]
"""A footer, and the place of each column in its row groups."""


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
    """Reads the footers of a Parquet file or of all `*.parquet` files below a folder.

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
    with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
        footers = list(pool.map(_footer, files))
    schema = footers[0].schema.to_arrow_schema()
    for file, footer in zip(files, footers, strict=True):
        if footer.schema.to_arrow_schema().remove_metadata() != schema.remove_metadata():
            raise DataError(f"{file} has other columns than {files[0]}; a data set has one schema. Move the files apart or ingest again.")
    groups = [[footer.row_group(i).num_rows for i in range(footer.num_row_groups)] for footer in footers]
    manifest = Manifest.from_files((relative(file, root), rows) for file, rows in zip(files, groups, strict=True))
    if not manifest.num_rows:
        raise DataError(f"data path {path!r} holds {len(files)} Parquet files but not one row; there is nothing to train on.")
    facts = replace(_facts(path, manifest.num_rows, schema, footers, root), count=partial(count_labels, str(root), manifest))
    return Dataset(str(root), manifest, facts)


def _refuse_unfinished(path: str, root: Place) -> None:
    """Refuses a folder on S3 that an ingest has begun and not finished; on a disk there is none."""
    if find(root / UNFINISHED) and not find(root / "dataset.json"):
        raise DataError(
            f"data path {path!r} is being written by an ingest, or one was interrupted there. Wait for it, or start the same"
            " ray-app ingest again: it does what is left."
        )


def _footer(file: Place) -> pq.FileMetaData:
    with parsing(file, "It cannot be read as Parquet; remove it or ingest the data again."), parquet(file) as opened:
        opened.schema_arrow  # noqa: B018 - a damaged schema is found where the file is known
        return opened.metadata


def _facts(path: str, rows: int, schema: pa.Schema, footers: list[pq.FileMetaData], root: Place) -> DataFacts:
    placed = [(footer, {footer.schema.column(i).path: i for i in range(footer.num_columns)}) for footer in footers]
    columns = {field.name: _column_facts(field, placed) for field in schema}
    described: dict[str, Any] = read_json(root / "dataset.json") or {}
    classes = described.get("classes")
    return DataFacts(path, rows, columns, tuple(classes) if classes else None)


def _column_facts(field: pa.Field, footers: list[_Placed]) -> ColumnFacts:
    spec = spec_of(field)
    if spec is not None:
        return ColumnFacts("array" if spec.padding is None else "list", spec.dtype, spec.shape)
    kind = field.type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_floating(kind):
        dtype = str(kind.to_pandas_dtype().__name__)
        return ColumnFacts("number" if pa.types.is_floating(kind) else "integer", dtype, (), *_range(field.name, footers))
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return ColumnFacts("bytes")
    if is_text(kind):
        return ColumnFacts("text")
    if is_numbers(kind):
        least, most, _, _ = _range(f"{field.name}.list.element", footers)
        return ColumnFacts("list", str(kind), (), least, most)
    return ColumnFacts("other", str(kind))


def _range(name: str, footers: list[_Placed]) -> tuple[float | None, float | None, int | None, float | None]:
    """Least and greatest value, missing values and span of a column from the row groups' statistics; None where one does not say."""
    rows: list[int] = []
    low: list[float | None] = []
    high: list[float | None] = []
    nulls = 0
    for footer, places in footers:
        for i in range(footer.num_row_groups):
            group = footer.row_group(i)
            statistics = group.column(places[name]).statistics if name in places else None
            if not group.num_rows:
                continue
            if statistics is not None:
                nulls += statistics.null_count or 0
            rows.append(group.num_rows)
            least, most = (statistics.min, statistics.max) if statistics is not None and statistics.has_min_max else (None, None)
            low.append(float(least) if isinstance(least, int | float) else None)  # of half precision pyarrow gives the bytes
            high.append(float(most) if isinstance(most, int | float) else None)
    lows, highs = [v for v in low if v is not None], [v for v in high if v is not None]
    complete = bool(lows) and len(lows) == len(low)
    if not complete:
        return None, None, nulls, None
    spans = sum((high - low + 1) * held for low, high, held in zip(lows, highs, rows, strict=True))
    return min(lows), max(highs), nulls, spans / sum(rows)
