"""Small data sets for the configurations in `conf/`, with the columns of the real ones."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from ray_app.data.arrays import to_column


def write_shipped_data(name: str, folder: Path) -> Path:
    """Writes the data that a configuration trains on; returns its folder.

    Args:
        name: The configuration's file without `.yaml`.
        folder: A new folder.
    """
    folder.mkdir(parents=True)
    columns = _COLUMNS[name](np.random.default_rng(0))
    fields = [
        to_column(key, values) if isinstance(values, np.ndarray) else (pa.field(key, values.type), values)
        for key, values in columns
    ]
    table = pa.Table.from_arrays([values for _, values in fields], schema=pa.schema([field for field, _ in fields]))
    pq.write_table(table, folder / "part-0.parquet")
    return folder


Columns = list[tuple[str, Any]]


def _images(rows: int, pixels: int, classes: int) -> Any:
    def make(random: np.random.Generator) -> Columns:
        return [
            ("image", random.integers(0, 256, (rows, pixels, pixels), np.uint8)),
            ("label", pa.array(np.arange(rows) % classes)),
        ]

    return make


def _png(random: np.random.Generator, pixels: int, channels: int | None) -> bytes:
    shape = (pixels, pixels) if channels is None else (pixels, pixels, channels)
    data = io.BytesIO()
    Image.fromarray(random.integers(0, 3 if channels is None else 256, shape, np.uint8)).save(data, "PNG")
    return data.getvalue()


def _photographs(random: np.random.Generator) -> Columns:
    image = _png(random, 32, 3)
    return [("image", pa.array([image] * 1024)), ("label", pa.array(np.arange(1024) % 1000))]


def _shapes(random: np.random.Generator) -> Columns:
    boxes = pa.array([[[4.0, 4.0, 40.0, 40.0], [10.0, 20.0, 30.0, 60.0]]] * 16, pa.list_(pa.list_(pa.float32(), 4)))
    return [("image", pa.array([_png(random, 96, 3)] * 16)), ("boxes", boxes), ("labels", pa.array([[1, 2]] * 16))]


def _masks(random: np.random.Generator) -> Columns:
    return [("image", pa.array([_png(random, 64, 3)] * 16)), ("mask", pa.array([_png(random, 64, None)] * 16))]


def _texts(random: np.random.Generator) -> Columns:
    lengths = random.integers(4, 30, 64)
    tokens = [random.integers(0, 2048, n).tolist() for n in lengths]
    return [("tokens", pa.array(tokens, pa.list_(pa.int32()))), ("label", pa.array(np.arange(64) % 5))]


def _packed(random: np.random.Generator) -> Columns:
    return [("tokens", pa.array(random.integers(1, 2048, (32, 128)).tolist(), pa.list_(pa.int32())))]


_COLUMNS: dict[str, Any] = {
    "digits": _images(128, 8, 10),
    "retrain_digits": _images(128, 8, 10),
    "mnist_dense": _images(128, 28, 10),
    "mnist_cnn": _images(128, 28, 10),
    "resnet50_imagenet": _photographs,
    "detection": _shapes,
    "segmentation": _masks,
    "text": _texts,
    "language_model": _packed,
}
