"""Parquet shards of limited rows and bytes, and the content of `_dataset.json`.

`Shards` writes a stream of tables. `merge_descriptions` merges the descriptions of input splits or buckets into the
facts of a data set, and `describe_parquet` reads these facts from a folder of Parquet.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ray_app.data.arrays import is_list, is_number, is_ragged_list, is_text, spec_of_field
from ray_app.data.bad_rows import find_missing_values
from ray_app.data.classes import with_classes
from ray_app.data.dataset import Dataset, describe_unlisted, open_dataset
from ray_app.data.parquet_files import DataFile, load_footers, read_footers
from ray_app.errors import DataError
from ray_app.ingest.options import IngestOptions
from ray_app.ingest.readers.sources import Part
from ray_app.ingest.summary import (
    CONVERT,
    NO_VALUE,
    ColumnStatistics,
    Statistics,
    count_missing,
    find_empty_texts,
    merge_statistics,
)
from ray_app.plan.manifest import ColumnFacts
from ray_app.storage.data_files import files_below, locate, parser_errors, publish, relative_path
from ray_app.storage.files import Location

MAX_COUNTED_LABELS = 100_000


class RowWriter:
    """Base of the writers of a stream of tables, `Shards` and `Runs`.

    Args:
        folder: Folder of the files; created here.
        stem: Beginning of their names.
        scratch: Folder on a disk for the file that is being written; created here.
    """

    def __init__(self, folder: Location, stem: str, scratch: Path) -> None:
        if isinstance(folder, Path):
            folder.mkdir(exist_ok=True)
        scratch.mkdir(exist_ok=True)
        self._folder = folder
        self._stem = stem
        self._scratch = scratch
        self._files: list[dict[str, Any]] = []
        self._columns: dict[str, dict[str, Any]] = {}
        self._pending: list[pa.Table] = []
        self._pending_bytes = 0

    @property
    def rows(self) -> int:
        """Rows of all finished files."""
        return sum(file["rows"] for file in self._files)


class Shards(RowWriter):
    """Cuts a stream of tables into files: `part-00000.parquet`, and if that is full `part-00000_001.parquet` and so on.

    The cuts depend on the rows and the limits only, not on the sizes of the tables. A file gets its name when it is
    finished.

    Args:
        limits: See `IngestOptions.limits`.
        classes: The names of the classes, which each file has in its metadata.
    """

    def __init__(
        self, folder: Location, stem: str, scratch: Path, limits: tuple[int, int, int], classes: Sequence[str] | None
    ) -> None:
        super().__init__(folder, stem, scratch)
        self._limits, self._classes = limits, classes
        self._labels: Counter[int] = Counter()
        self._statistics = ColumnStatistics()
        self._writer: pq.ParquetWriter | None = None
        self._shard_rows = self._pending_rows = 0

    def write(self, table: pa.Table) -> None:
        """Adds rows; a row group is written as soon as the next row does not fit into it."""
        self._describe(table)
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(row_bytes(table))])
        start = 0
        while start < table.num_rows:
            count = self._count_fitting(before, start)
            if count:
                self._pending.append(table.slice(start, count))
                self._pending_rows += count
                self._pending_bytes += int(before[start + count] - before[start])
                start += count
            if start < table.num_rows:
                self._end_row_group()

    def close(self) -> None:
        """Writes the remaining rows and finishes the last file."""
        if self._pending:
            self._end_row_group()
        if self._writer:
            self._end_shard()

    def description(self) -> dict[str, Any]:
        """Returns the `shards`, `columns`, `statistics` and `labels` (rows by label; None: too many), plain JSON."""
        labels = None
        if len(self._labels) <= MAX_COUNTED_LABELS:
            labels = {str(label): rows for label, rows in self._labels.items()}
        statistics = self._statistics.columns
        return {"shards": self._files, "columns": self._columns, "labels": labels, "statistics": statistics}

    @property
    def _name(self) -> str:
        """The name of the file that is being written, or of the next one."""
        return f"{self._stem}{f'_{len(self._files):03d}' if self._files else ''}.parquet"

    def _count_fitting(self, before: npt.NDArray[np.int64], start: int) -> int:
        """Returns how many rows from `start` on fit, at least 1 if it is empty, by the bytes `before` each."""
        shard_rows, row_group_rows, row_group_bytes = self._limits
        free_rows = min(row_group_rows, shard_rows - self._shard_rows) - self._pending_rows
        free_bytes = row_group_bytes - self._pending_bytes
        by_bytes = int(np.searchsorted(before, before[start] + free_bytes, side="right")) - 1 - start
        return max(min(by_bytes, free_rows, len(before) - 1 - start), 0 if self._pending else 1)

    def _end_row_group(self) -> None:
        table = pa.concat_tables(self._pending).combine_chunks()
        self._pending, self._pending_rows = [], 0
        self._pending_bytes = 0
        try:
            if self._writer is None:
                self._writer = _parquet_writer(self._scratch / self._name, with_classes(table.schema, self._classes))
            self._writer.write_table(table, row_group_size=table.num_rows)
        except OSError as error:
            # pyarrow raises it without a number for types that Parquet cannot store; an error of the disk has one.
            if error.errno is None:
                raise DataError(
                    f"the columns {table.column_names} cannot be written: {error}. Leave out the column in question."
                ) from error
            raise
        self._shard_rows += table.num_rows
        if self._shard_rows == self._limits[0]:
            self._end_shard()

    def _end_shard(self) -> None:
        """Finishes the file, reads its footer back and compares it with the written rows."""
        assert self._writer is not None
        self._writer.close()
        path = self._scratch / self._name
        footer = pq.read_metadata(path)
        assert footer.num_rows == self._shard_rows
        facts = {"rows": footer.num_rows, "row_groups": footer.num_row_groups, "bytes": path.stat().st_size}
        publish(path, self._folder / path.name)
        self._files.append({"path": path.name} | facts)
        self._writer, self._shard_rows = None, 0

    def _describe(self, table: pa.Table) -> None:
        """Measures the columns, and counts missing values and up to `MAX_COUNTED_LABELS` labels of rows or boxes."""
        self._statistics.add(table)
        for column in table.schema:
            self._columns.setdefault(column.name, column_facts(column))["nulls"] += count_missing(table[column.name])
        labels: pa.ChunkedArray | None = None
        if "label" in table.column_names:
            labels = table["label"]
        elif {"boxes", "labels"} <= {*table.column_names}:
            kind = table.schema.field("labels").type
            if is_ragged_list(kind) and pa.types.is_integer(kind.value_type):
                labels = pc.list_flatten(table["labels"])
        if labels is not None and len(self._labels) <= MAX_COUNTED_LABELS:
            values, counts = np.unique(labels.to_numpy(), return_counts=True)
            self._labels.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))


def _is_bytes(kind: pa.DataType) -> bool:
    """Returns whether values of this type differ in length: text or encoded files."""
    return bool(pa.types.is_binary(kind) or pa.types.is_string(kind))


def _item_bytes(kind: pa.DataType) -> int:
    """Returns the bytes of a number, or of a list of one size."""
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _item_bytes(kind.value_type)
    return max(1, kind.bit_width // 8)


def _leaf(column: pa.Field) -> str:
    """Returns the path of the numbers of a column of lists in a Parquet schema."""
    name, kind = column.name, column.type
    while is_list(kind):
        name, kind = f"{name}.list.element", kind.value_type
    return str(name)


def row_bytes(table: pa.Table) -> npt.NDArray[np.int64]:
    """Returns the bytes of each row before compression, shape (rows,)."""
    total = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        if _is_bytes(column.type):
            total += pc.fill_null(pc.binary_length(column), 0).to_numpy()
        elif is_ragged_list(column.type):
            total += pc.list_value_length(column).to_numpy().astype(np.int64) * _item_bytes(column.type.value_type)
        else:
            total += _item_bytes(column.type)
    return total


def column_facts(column: pa.Field) -> dict[str, Any]:
    """Returns type, shape of one row, NumPy dtype and number of nulls (0 at first) of a column.

    The shape is [] for plain columns and None for bytes and lists. The dtype is None unless the column holds numbers or
    arrays of numbers.
    """
    if spec := spec_of_field(column):
        return {"type": "array", "shape": list(spec.shape), "dtype": np.dtype(spec.dtype).name, "nulls": 0}
    if _is_bytes(column.type) or is_ragged_list(column.type):
        return {"type": str(column.type), "shape": None, "dtype": None, "nulls": 0}
    dtype = np.dtype(column.type.to_pandas_dtype()).name if is_number(column.type) else None
    return {"type": str(column.type), "shape": [], "dtype": dtype, "nulls": 0}


def _parquet_writer(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    """Opens a Parquet file to write.

    Columns of text except `row_id` have dictionaries; plain columns and lists have statistics. Encoded images are not
    compressed, because they are compressed already. Numbers of small row groups take twice as long with ZSTD and
    dictionaries as with SNAPPY, and as many bytes.
    """
    flat = [f for f in schema if not is_ragged_list(f.type)]
    plain = [f.name for f in flat if spec_of_field(f) is None and not pa.types.is_binary(f.type)]
    lists = {_leaf(f): "ZSTD" for f in schema if is_ragged_list(f.type)}
    return pq.ParquetWriter(
        path,
        schema,
        compression={f.name: _compression(f.type) for f in flat} | lists,
        use_dictionary=[name for name in plain if name != "row_id" and is_text(schema.field(name).type)],
        write_statistics=[*plain, *lists],
    )


def _compression(kind: pa.DataType) -> str:
    return "NONE" if pa.types.is_binary(kind) else "SNAPPY" if is_number(kind) else "ZSTD"


_MAX_ROWS = 1 << 16
_BATCH_BYTES = 8 << 20
_BUFFER_BYTES = 4 << 20


def merge_descriptions(
    part: Part, descriptions: list[dict[str, Any]], refused: int, notes: list[str], base: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the facts of one side of a part, after those of the rows that were there before (`base`).

    Raises DataError if shards have different columns.
    """
    skipped = len(part.skipped_files)
    if base is not None:
        numbers = {name: str(number) for number, name in enumerate(base["classes"] or ())}
        counts = base["class_counts"]
        labels = counts and {numbers.get(name, name): count for name, count in counts.items()}
        descriptions = [{**base, "labels": labels, "statistics": base.get("statistics", {})}, *descriptions]
        refused, skipped = refused + base["refused"], skipped + base["skipped_files"]
        notes = [note for note in [*base["notes"], *notes] if note not in part.notes]
    shards = [shard for description in descriptions for shard in description["shards"]]
    rows = sum(shard["rows"] for shard in shards)
    return {
        "rows": rows,
        "rows_in": rows + refused,
        "refused": refused,
        "classes": part.classes,
        "class_counts": _merge_class_counts(part.classes, descriptions),
        "columns": merge_columns(descriptions, "shards"),
        "statistics": merge_statistics([d["statistics"] for d in descriptions if d["shards"]]),
        "shards": shards,
        "skipped_files": skipped,
        "notes": [*part.notes, *notes],
    }


def put_footers(target: Location, shards: list[dict[str, Any]], is_addition: bool) -> None:
    """Writes what is kept of the footers of the shards beside them."""
    paths = {shard["path"] for shard in shards}
    files = [file for file in files_below(target, ".parquet") if relative_path(file, target) in paths]
    read_footers(target, files, load_footers(target) if is_addition else None, trusted=True).put(target)


def format_refused(refused: list[tuple[str, str]]) -> bytes:
    """Returns refused rows and skipped files with the reasons, one JSON object a line."""
    return "".join(json.dumps({"row_id": row_id, "reason": reason}) + "\n" for row_id, reason in refused).encode()


def _merge_class_counts(classes: Sequence[str] | None, descriptions: list[dict[str, Any]]) -> dict[str, int] | None:
    """Returns the rows by class, see `count_classes`; None if they were not counted."""
    labels: Counter[int] = Counter()
    for description in descriptions:
        if description["labels"] is None:
            return None
        labels.update({int(label): rows for label, rows in description["labels"].items()})
    return count_classes(classes, labels)


def count_classes(classes: Sequence[str] | None, labels: Counter[int]) -> dict[str, int] | None:
    """Returns the rows by class name, or by label where classes have no names; None for too many or without labels."""
    if classes is not None and labels:
        return {name: labels[label] for label, name in enumerate(classes)}
    return (
        {str(label): rows for label, rows in sorted(labels.items())} if 0 < len(labels) <= MAX_COUNTED_LABELS else None
    )


def refuse_empty_side(
    side: str,
    part: Part,
    sides: Sequence[str],
    records: Mapping[str, list[dict[str, Any]]],
    refused: Mapping[str, list[Any]],
    options: IngestOptions,
    is_addition: bool,
) -> None:
    """Raises DataError for a data set without rows, unless rows are added to it, or with different columns."""
    files = "shards" if part.keeps_order else "runs"
    merge_columns(records[side], files)
    kept = sum(file["rows"] for other in sides for record in records[other] for file in record[files])
    if any(record[files] for record in records[side]) or (is_addition and kept):
        return
    rows = kept + sum(len(refused[other]) for other in sides)
    where = f"the side {side!r} of the split gets" if len(sides) > 1 and rows else f"source {options.source!r} has"
    raise DataError(f"{options.input}: {where} no rows of {rows}. Add data or set another fraction.")


def merge_columns(descriptions: list[dict[str, Any]], files: str) -> dict[str, Any]:
    """Returns the columns of all descriptions, with the missing values added up; raises DataError if they differ.

    `files` is the key of the files in a description, `shards` or `runs`; a description without files is left out.
    """
    columns: dict[str, Any] = {}
    for description in descriptions:
        if not description[files]:
            continue
        facts = description["columns"]
        without_nulls = {name: {**column, "nulls": 0} for name, column in facts.items()}
        if columns and without_nulls != {name: {**column, "nulls": 0} for name, column in columns.items()}:
            raise DataError(
                f"One part of the input has the columns {without_nulls}, another has {columns}; all files of a data set"
                " need the same. Correct the input."
            )
        for name, column in facts.items():
            columns.setdefault(name, {**column, "nulls": 0})["nulls"] += column["nulls"]
    return columns


def describe_parquet(path: str) -> dict[str, Any]:
    """Returns the facts of Parquet that is trained on as it is; raises DataError if it cannot be trained on."""
    dataset = open_dataset(path)
    facts, manifest = dataset.facts, dataset.manifest
    missing, statistics = _measure_columns(dataset)
    columns = {
        name: {
            "type": column.kind,
            "shape": list(column.shape),
            "dtype": column.dtype,
            "nulls": missing[name],
            "unusable": _explain_unusable(column, missing[name], manifest.num_rows),
        }
        for name, column in facts.columns.items()
    }
    counts = Counter(manifest.paths[int(i)] for i in manifest.file_of)
    rows: Counter[str] = Counter()
    for group, group_rows in enumerate(manifest.rows):
        rows[manifest.paths[int(manifest.file_of[group])]] += int(group_rows)
    shards = [{"path": name, "rows": rows[name], "row_groups": counts[name]} for name in manifest.paths]
    classes = list(facts.classes) if facts.classes else None
    counted = statistics.get("label", {}).get("values") if classes else None
    return {
        "rows": manifest.num_rows,
        "classes": classes,
        "class_counts": count_classes(classes, Counter({int(k): n for k, n in counted.items()})) if counted else None,
        "columns": columns,
        "statistics": statistics,
        "index_columns": list(facts.index_columns),
        "shards": shards,
        "notes": [describe_unlisted(path, dataset.unlisted)] if dataset.unlisted else [],
    }


def _measure_columns(dataset: Dataset) -> tuple[dict[str, int], dict[str, Statistics]]:
    """Returns the rows with a missing value and the statistics by column; refuses a damaged page, as it reads all."""
    manifest, names = dataset.manifest, list(dataset.facts.columns)
    missing, statistics = dict.fromkeys(names, 0), ColumnStatistics()
    for number, groups in groupby(range(manifest.num_row_groups), lambda group: int(manifest.file_of[group])):
        path = manifest.paths[number]
        with (
            parser_errors(locate(dataset.root, path), "The file cannot be read as Parquet; restore it."),
            DataFile(dataset.root, path, manifest.rules, _BUFFER_BYTES) as file,
        ):
            for index in map(int, manifest.index_in_file[list(groups)]):
                for table in file.iter_batches(
                    index, names, min(_MAX_ROWS, file.rows_within(index, names, _BATCH_BYTES))
                ):
                    for name in names:
                        missing[name] += len(find_missing_values(table.select([name])))
                        if is_text(table.schema.field(name).type):
                            missing[name] += pc.sum(find_empty_texts(table[name])).as_py() or 0
                    statistics.add(table)
    return missing, statistics.columns


def _explain_unusable(column: ColumnFacts, missing: int, rows: int) -> str | None:
    """Returns the reason why no task of the application can be trained on a column; None if one can."""
    if column.kind == "other" and not column.is_date:
        return CONVERT
    return NO_VALUE if rows and missing == rows else None
