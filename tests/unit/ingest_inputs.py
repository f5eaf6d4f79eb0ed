"""Inputs of the tests of ingest, and its output read back."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from ray_app.data.columns import decode, spec_of

RNG = np.random.default_rng(0)


def read(folder: Path | str) -> dict[str, Any]:
    """All columns of a data set in the order of its files: arrays as NumPy, the rest as lists."""
    table = pa.concat_tables(pq.read_table(path) for path in sorted(Path(folder).glob("*.parquet")))
    specs = {field.name: spec_of(field) for field in table.schema}
    return {name: decode(table[name], spec) if spec else table[name].to_pylist() for name, spec in specs.items()}


def write_images(root: Path) -> dict[str, bytes]:
    """Images of every readable format in two classes and a file that is none; returns the bytes by relative path."""
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
