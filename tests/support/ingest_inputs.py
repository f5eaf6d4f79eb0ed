"""Inputs for the tests of ingest, and functions that read its output."""

import gzip
import io
import re
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ray_app.data.arrays import from_column, spec_of_field
from ray_app.errors import ConfigError, DataError, StorageError
from ray_app.ingest.ingest import IngestOptions, ingest
from ray_app.ingest.readers.tfrecord import _example, _masked

RNG = np.random.default_rng(0)


def ingest_and_read(tmp_path: Path, source: Any, input_path: Path | str, **options: Any) -> dict[str, Any]:
    """Ingests and returns the columns."""
    ingest(IngestOptions(source, str(tmp_path / "out"), str(input_path), **options))
    return read_columns(tmp_path / "out")


def ingest_error(tmp_path: Path, source: Any, input_path: Path | str, **options: Any) -> str:
    """Returns the message with which an input is refused (exit code 2), and asserts that no output was written."""
    with pytest.raises((DataError, ConfigError)) as caught:
        ingest(IngestOptions(source, str(tmp_path / "out"), str(input_path), **options))
    assert not isinstance(caught.value, StorageError)
    assert not list(tmp_path.glob("out*"))
    return str(caught.value)


def read_columns(folder: Path | str, *, as_stored: bool = False) -> dict[str, Any]:
    """Returns all columns of a data set, in the order of the source by row id or as stored: arrays as NumPy, others as
    lists.
    """
    table = pa.concat_tables(pq.read_table(path) for path in sorted(Path(folder).glob("*.parquet")))
    if not as_stored:
        table = table.take(
            sorted(
                range(table.num_rows), key=[source_order(row_id) for row_id in table["row_id"].to_pylist()].__getitem__
            )
        )
    specs = {field.name: spec_of_field(field) for field in table.schema}
    return {name: from_column(table[name], spec) if spec else table[name].to_pylist() for name, spec in specs.items()}


def source_order(row_id: str) -> list[tuple[int, str]]:
    """Returns the sort key of a row id, by which `f.csv:9` precedes `f.csv:10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", row_id)]


def write_images(root: Path) -> dict[str, bytes]:
    """Writes images of each readable format in two classes, and a text file; returns the images' bytes by path."""
    for name in ("cat/b.png", "cat/a.jpg", "cat/c.gif", "dog/z.WEBP", "dog/y.jpeg"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(RNG.integers(0, 255, (9, 7, 3), dtype=np.uint8)).save(root / name)
    (root / "cat" / "notes.txt").write_text("not an image")
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*.*") if p.suffix != ".txt"}


def write_idx(folder: Path, prefix: str, rows: int, packed: bool, magic: int = 2051, labels: int | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    labels = rows if labels is None else labels
    images = struct.pack(">4I", magic, rows, 28, 28) + RNG.integers(0, 256, rows * 784, dtype=np.uint8).tobytes()
    marks = struct.pack(">2I", 2049, labels) + (np.arange(labels) % 10).astype(np.uint8).tobytes()
    for kind, data in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", marks)):
        name = f"{prefix}-{kind}{'.gz' if packed else ''}"
        (folder / name).write_bytes(gzip.compress(data) if packed else data)


def write_tar(path: Path, members: dict[str, bytes], mode: str = "w") -> None:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))


def tf_record(data: bytes) -> bytes:
    """Returns a record of a TFRecord file."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))


def example(**features: list[Any]) -> bytes:
    """Returns a serialized row; the type of the values decides about the kind of a feature."""
    row = _example()()
    for name, values in features.items():
        kind = (
            {bytes: "bytes_list", float: "float_list", int: "int64_list"}[type(values[0])] if values else "int64_list"
        )
        getattr(row.features.feature[name], kind).value.extend(values)
    return row.SerializeToString()


def write_tfrecord(path: Path, *rows: bytes) -> Path:
    """Writes a TFRecord file and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(map(tf_record, rows)))
    return path
