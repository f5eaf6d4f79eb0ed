"""Writes the same rows in the format of each source that has columns, for tests of a rule in all formats."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.ingest_inputs import example, write_tar, write_tfrecord

FILES = {"csv": "in.csv", "jsonl": "in.jsonl", "hf": "in.parquet", "tfrecord": "in.tfrecord", "webdataset": "in.tar"}


def write_rows(folder: Path, source: str, rows: list[dict[str, Any]], schema: pa.Schema | None = None) -> Path:
    """Writes rows with the same keys in the format of a source, and returns the file.

    A TFRecord has no missing values and no lists of lists; a CSV has no lists. `schema` has the types of Parquet.
    """
    path = folder / FILES[source]
    match source:
        case "csv":
            lines = [",".join("" if value is None else str(value) for value in row.values()) for row in rows]
            path.write_text("\n".join([",".join(rows[0]), *lines]) + "\n")
        case "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case "hf":
            pq.write_table(pa.Table.from_pylist(rows, schema), path)
        case "tfrecord":
            columns = [{n: v if isinstance(v, list) else [v] for n, v in row.items()} for row in rows]
            encoded = [{n: [x.encode() if isinstance(x, str) else x for x in v] for n, v in c.items()} for c in columns]
            write_tfrecord(path, *(example(**row) for row in encoded))
        case "webdataset":
            write_tar(path, {f"{number}.json": json.dumps(row).encode() for number, row in enumerate(rows)})
    return path
