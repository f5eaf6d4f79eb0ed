"""Writes shapes/train and shapes/eval: images with squares and discs on noise, and the box of each."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

SCHEMA = {"image": pa.binary(), "boxes": pa.list_(pa.list_(pa.float32())), "labels": pa.list_(pa.int64())}


def one(random: np.random.Generator) -> dict:
    """Returns an image with its boxes and their labels."""
    height, width = random.integers(64, 97, 2)
    pixels = random.integers(0, 90, (height, width, 3), dtype=np.uint8)
    row: dict = {"boxes": [], "labels": []}
    for label in random.integers(1, 3, random.integers(0, 4)):
        side = random.integers(16, 33)
        top, left = random.integers(0, height - side), random.integers(0, width - side)
        down, right = np.abs(np.mgrid[:side, :side] * 2 - side + 1) / side
        inside = np.maximum(down, right) < 1 if label == 1 else down**2 + right**2 < 1
        pixels[top : top + side, left : left + side][inside] = random.integers(150, 256, 3)
        row["boxes"].append([left, top, left + side, top + side])
        row["labels"].append(label)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return row | {"image": file.getvalue()}


def write_shapes(folder: Path, train_rows: int = 256, eval_rows: int = 64) -> None:
    """Writes the Parquet files of both data sets."""
    random = np.random.default_rng(0)
    for part, rows in (("train", train_rows), ("eval", eval_rows)):
        (folder / part).mkdir(parents=True)
        table = pa.Table.from_pylist([one(random) for _ in range(rows)], pa.schema(SCHEMA))
        pq.write_table(table, folder / part / "part-0.parquet", row_group_size=32)


if __name__ == "__main__":
    write_shapes(Path("shapes"))
