"""What `dataset.json` says about a data set: put together from what its pieces say, or read from a folder of Parquet."""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby
from typing import Any

from ray_app.data.dataset.data_file import DataFile
from ray_app.data.dataset.dataset import Dataset, open_dataset
from ray_app.data.dataset.files import parsing, place_of
from ray_app.data.read.missing import missing_reasons
from ray_app.errors import DataError
from ray_app.ingest.readers.base import Part
from ray_app.ingest.shards import MAX_COUNTED_LABELS
from ray_app.plan.facts import ColumnFacts

_MAX_ROWS, _BATCH_BYTES, _BUFFER_BYTES = 1 << 16, 8 << 20, 4 << 20


def merged(part: Part, made: list[dict[str, Any]], refused: int, notes: list[str]) -> dict[str, Any]:
    """The facts of one side of a part, of which `made` describes the shards, in their order.

    Args:
        part: The part.
        made: What describes the shards.
        refused: Rows that were left out.
        notes: What is to be said about the part's columns.

    Raises:
        DataError: Shards have different columns.
    """
    shards = [shard for piece in made for shard in piece["shards"]]
    rows = sum(shard["rows"] for shard in shards)
    return {
        "rows": rows,
        "rows_in": rows + refused,
        "refused": refused,
        "classes": part.classes,
        "class_counts": _class_counts(part, made),
        "columns": columns_of(made, "shards"),
        "shards": shards,
        "skipped_files": len(part.skipped_files),
        "notes": [*part.notes, *notes],
    }


def refused_lines(refused: list[tuple[str, str]]) -> bytes:
    """Refused rows, and files that were left out, with the reasons, one JSON object a line."""
    return "".join(json.dumps({"row_id": row_id, "reason": reason}) + "\n" for row_id, reason in refused).encode()


def _class_counts(part: Part, made: list[dict[str, Any]]) -> dict[str, int] | None:
    labels: Counter[int] = Counter()
    for piece in made:
        if piece["labels"] is None:
            return None
        labels.update({int(label): rows for label, rows in piece["labels"].items()})
    if part.classes is not None:
        return {name: labels[label] for label, name in enumerate(part.classes)}
    return {str(label): rows for label, rows in sorted(labels.items())} if 0 < len(labels) <= MAX_COUNTED_LABELS else None


def columns_of(made: list[dict[str, Any]], files: str) -> dict[str, Any]:
    """The columns of pieces, missing values counted over all of them; `files`: the name of what they list.

    Raises:
        DataError: They are not the same in all.
    """
    found: dict[str, Any] = {}
    for piece in made:
        if not piece[files]:
            continue
        facts = piece["columns"]
        same = {name: {**column, "nulls": 0} for name, column in facts.items()}
        if found and same != {name: {**column, "nulls": 0} for name, column in found.items()}:
            raise DataError(
                f"A part of the input gives the columns {same}, another one {found}; all files of a data set have the same. Correct the"
                " input."
            )
        for name, column in facts.items():
            found.setdefault(name, {**column, "nulls": 0})["nulls"] += column["nulls"]
    return found


def describe_parquet(path: str) -> dict[str, Any]:
    """What there is in a file or folder of Parquet that is trained on as it is.

    Raises:
        DataError: It cannot be trained on.
    """
    dataset = open_dataset(path)
    facts, manifest = dataset.facts, dataset.manifest
    missing = _missing(dataset)
    columns = {
        name: {
            "type": column.kind,
            "shape": list(column.shape),
            "dtype": column.dtype,
            "nulls": missing[name],
            "unusable": _why_unusable(column, missing[name], manifest.num_rows),
        }
        for name, column in facts.columns.items()
    }
    counts = Counter(manifest.paths[int(i)] for i in manifest.file_of)
    rows: Counter[str] = Counter()
    for group, held in enumerate(manifest.rows):
        rows[manifest.paths[int(manifest.file_of[group])]] += int(held)
    shards = [{"path": name, "rows": rows[name], "row_groups": counts[name]} for name in manifest.paths]
    classes = list(facts.classes) if facts.classes else None
    return {"rows": manifest.num_rows, "classes": classes, "class_counts": None, "columns": columns, "shards": shards}


def _missing(dataset: Dataset) -> dict[str, int]:
    """Rows with a missing value in each column; reads all pages once, so that a damaged one is refused here.

    Raises:
        DataError: A page is damaged, or has another checksum.
    """
    manifest, names = dataset.manifest, list(dataset.facts.columns)
    missing = dict.fromkeys(names, 0)
    for number, groups in groupby(range(manifest.num_row_groups), lambda group: int(manifest.file_of[group])):
        path = manifest.paths[number]
        with (
            parsing(place_of(dataset.root) / path, "It cannot be read as Parquet; restore it."),
            DataFile(dataset.root, path, manifest.partitions, _BUFFER_BYTES) as file,
        ):
            for index in map(int, manifest.index_in_file[list(groups)]):
                for table in file.iter_batches(index, names, min(_MAX_ROWS, file.rows_within(index, names, _BATCH_BYTES))):
                    for name in names:
                        missing[name] += len(missing_reasons(table.select([name])))
    return missing


def _why_unusable(column: ColumnFacts, missing: int, rows: int) -> str | None:
    """Why no task of the application can be trained on a column; None if one can."""
    if column.kind == "other":
        return "convert it to numbers, text, bytes or lists of numbers"
    return "it has no value in any row" if rows and missing == rows else None
