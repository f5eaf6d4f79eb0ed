"""Writes masks/train and masks/eval: images with squares and discs on noise, and their masks."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def png(pixels: np.ndarray) -> bytes:
    """Returns pixels as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def one(random: np.random.Generator) -> dict:
    """Returns an image with its mask."""
    height, width = random.integers(64, 97, 2)
    pixels, mask = random.integers(0, 90, (height, width, 3), dtype=np.uint8), np.zeros((height, width), np.uint8)
    for label in random.integers(1, 3, random.integers(1, 4)):  # 0 is the background, 1 a square, 2 a disc
        side = random.integers(16, 33)
        top, left = random.integers(0, height - side), random.integers(0, width - side)
        down, right = np.abs(np.mgrid[:side, :side] * 2 - side + 1) / side
        inside = np.maximum(down, right) < 1 if label == 1 else down**2 + right**2 < 1
        pixels[top : top + side, left : left + side][inside] = random.integers(150, 256, 3)
        mask[top : top + side, left : left + side][inside] = label
    return {"image": png(pixels), "mask": png(mask)}


def write_masks(folder: Path, train_rows: int = 256, eval_rows: int = 64) -> None:
    """Writes the Parquet files of both data sets."""
    random = np.random.default_rng(0)
    for part, rows in (("train", train_rows), ("eval", eval_rows)):
        (folder / part).mkdir(parents=True)
        pq.write_table(
            pa.Table.from_pylist([one(random) for _ in range(rows)]),
            folder / part / "part-0.parquet",
            row_group_size=32,
        )


if __name__ == "__main__":
    write_masks(Path("masks"))
