"""What `dataset.json` says about a data set: put together from what its pieces say, or read from a folder of Parquet."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from ray_app.data.dataset.dataset import open_dataset
from ray_app.errors import DataError
from ray_app.ingest.readers.base import Part
from ray_app.ingest.shards import MAX_COUNTED_LABELS


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
    columns = {
        name: {"type": column.kind, "shape": list(column.shape), "dtype": column.dtype, "nulls": column.nulls or 0}
        for name, column in facts.columns.items()
    }
    counts = Counter(manifest.paths[int(i)] for i in manifest.file_of)
    rows: Counter[str] = Counter()
    for group, held in enumerate(manifest.rows):
        rows[manifest.paths[int(manifest.file_of[group])]] += int(held)
    shards = [{"path": name, "rows": rows[name], "row_groups": counts[name]} for name in manifest.paths]
    classes = list(facts.classes) if facts.classes else None
    return {"rows": manifest.num_rows, "classes": classes, "class_counts": None, "columns": columns, "shards": shards}
