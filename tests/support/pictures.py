"""Pictures of different sizes, with masks, numbers and classes, as Parquet."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def table_data(folder: Path, columns: dict[str, Any]) -> dict[str, Any]:
    """Writes rows as Parquet; returns the fields of the section `data` for training and evaluation on them."""
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=16)
    return {"path": str(folder), "eval_path": str(folder), "global_batch_size": 16}


def write_pictures(folder: Path) -> dict[str, Any]:
    """Writes 48 pictures with a bright square, its mask, its share of the pixels, and whether it is large; returns the
    fields as `table_data` does.
    """
    random, columns = np.random.default_rng(0), dict[str, list[Any]](image=[], mask=[], area=[], large=[])
    for _ in range(48):
        height = random.integers(20, 30)
        width = random.integers(20, 30)
        side = random.integers(4, 12)
        pixels = random.integers(0, 90, (height, width, 3)).astype(np.uint8)
        mask = np.zeros((height, width), np.uint8)
        top, left = random.integers(0, height - side), random.integers(0, width - side)
        mask[top : top + side, left : left + side] = 1
        pixels[mask == 1] += 100
        for name, value in (
            ("image", _png(pixels)),
            ("mask", _png(mask)),
            ("area", float(mask.mean())),
            ("large", int(side > 7)),
        ):
            columns[name].append(value)
    return table_data(folder, columns)


def _png(pixels: Any) -> bytes:
    return encoded(Image.fromarray(pixels))


def encoded(image: Image.Image, kind: str = "png") -> bytes:
    """Returns an image as a file."""
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()
