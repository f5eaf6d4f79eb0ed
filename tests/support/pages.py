"""The code blocks of the documentation, the marks before them, and the pages with blocks that tests execute.

A mark is a comment in the line before a block: `<!-- not run: REASON -->`, `<!-- run by: FILE::FUNCTION, ... -->`, or
`<!-- file: NAME -->` for a block that a reader writes to a file.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from tests.support.ingest_inputs import write_tar
from tests.support.paths import ROOT, SUPPORT

PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "deploy" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
SHELLS = ("bash", "console", "sh")
MARKS = ("not run", "run by", "file")
_BLOCK = re.compile(r"(?:^ *<!-- (.*) -->\n)?^( *```+)(\w+).*\n((?s:.*?))^\2 *$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block on a page: its first line, language and text, and the mark before it with the text of the mark."""

    page: str
    line: int
    language: str
    text: str
    mark: str
    argument: str

    def is_code(self) -> bool:
        """Returns whether a reader types it: commands or Python."""
        return self.language in (*SHELLS, "python")

    def is_executed(self) -> bool:
        """Returns whether the test of its page executes it."""
        return self.is_code() and not self.mark


def blocks_in(text: str, page: str) -> Iterator[Block]:
    """Yields every block with a language in the text of a page."""
    for match in _BLOCK.finditer(text):
        comment, _, language, inside = match.groups()
        mark, _, mark_text = (comment or "").partition(": ")
        yield Block(page, text.count("\n", 0, match.start(2)) + 1, language, inside, mark, mark_text)


def blocks(page: Path) -> Iterator[Block]:
    """Yields every block with a language on a page."""
    return blocks_in(page.read_text(), str(page.relative_to(ROOT)))


def _photos(folder: Path) -> None:
    for name in ("cat", "dog"):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(32):
            pixels = np.random.default_rng(number).integers(0, 256, (70, 70, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / name / f"{number}.png")


def _mnist_of_keras(folder: Path) -> None:
    rng = np.random.default_rng(0)
    sides = {"train": 320, "test": 64}
    images = {f"x_{side}": rng.integers(0, 256, (rows, 28, 28), dtype=np.uint8) for side, rows in sides.items()}
    np.savez(
        folder / "mnist.npz",
        **images,
        **{f"y_{side}": (np.arange(rows) % 10).astype(np.uint8) for side, rows in sides.items()},
    )


def _iris(folder: Path) -> None:
    kinds = ("setosa", "versicolor", "virginica")
    lines = [f"{i % 3 + i / 900},{i % 7},{kinds[i % 3]}\n" for i in range(150)]
    (folder / "iris.csv").write_text("length,width,species\n" + "".join(lines))


def _every_source(folder: Path) -> None:
    for write in (_photos, _iris):
        write(folder)
    for number in range(13):
        write_tar(folder / "shards" / f"train-{number:03}.tar", {f"{number}.cls": b"1", f"{number}.txt": b"a"})
    (folder / "records").symlink_to(SUPPORT / "tfrecord")
    (folder / "table.parquet").symlink_to(ROOT / "datasets" / "digits" / "eval" / "part-00000.parquet")


def _annotated_pictures(folder: Path) -> None:
    """Writes four pictures with a box each, as COCO, VOC and YOLO."""
    for name in ("pictures", "annotations", "VOC/Annotations", "VOC/JPEGImages", "yolo/images", "yolo/labels"):
        (folder / name).mkdir(parents=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (30, 40, 3), dtype=np.uint8)
        for name in (f"pictures/{number}.png", f"VOC/JPEGImages/{number}.jpg", f"yolo/images/{number}.jpg"):
            Image.fromarray(pixels).save(folder / name)
        edges = "<xmin>5</xmin><ymin>6</ymin><xmax>20</xmax><ymax>25</ymax>"
        (folder / "VOC" / "Annotations" / f"{number}.xml").write_text(
            f"<annotation><object><name>cat</name><bndbox>{edges}</bndbox></object></annotation>"
        )
        (folder / "yolo" / "labels" / f"{number}.txt").write_text("0 0.5 0.5 0.2 0.4\n")
        images.append({"id": number, "file_name": f"{number}.png", "width": 40, "height": 30})
        polygon = [[4, 5, 20, 5, 20, 25]]
        annotations.append({"id": number, "image_id": number, "category_id": 9, "bbox": [4, 5, 16, 20], "iscrowd": 0})
        annotations[-1]["segmentation"] = polygon
    (folder / "yolo" / "data.yaml").write_text("train: images\nnames: [cat]\n")
    whole = {"images": images, "annotations": annotations, "categories": [{"id": 9, "name": "cat"}]}
    (folder / "annotations" / "instances_train.json").write_text(json.dumps(whole))


def _sales(folder: Path) -> None:
    """Writes a table of sales into a database, and as a table of Delta Lake and of Iceberg."""
    from deltalake import write_deltalake
    from pyiceberg.catalog import load_catalog

    rows = [(number, number / 4, float(number % 7), "ab"[number % 2]) for number in range(60)]
    with closing(sqlite3.connect(folder / "shop.db")) as database:
        database.execute("CREATE TABLE sales (id INTEGER, price REAL, weight REAL, kind TEXT)")
        database.executemany("INSERT INTO sales VALUES (?, ?, ?, ?)", rows)
        database.commit()
    columns = zip(*rows, strict=True)
    table = pa.table(dict(zip(("id", "price", "weight", "kind"), map(list, columns), strict=True)))
    write_deltalake(folder / "delta" / "sales", table)
    catalog = load_catalog(
        "shop", type="sql", uri=f"sqlite:///{folder / 'catalog.db'}", warehouse=f"file://{folder / 'iceberg'}"
    )
    catalog.create_namespace("shop")
    catalog.create_table("shop.sales", schema=table.schema).append(table)


def _pictures() -> Iterator[tuple[int, np.ndarray, Path]]:
    """Yields the numbers and the pixels of forty pictures, and the name of each file."""
    for number in range(40):
        pixels = np.random.default_rng(number).integers(0, 256, (12, 10, 3), dtype=np.uint8)
        yield number, pixels, Path("a", f"{number}.png")


def _save(pixels: np.ndarray, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)


def _images(folder: Path) -> None:
    _photos(folder)
    for number, pixels, name in _pictures():
        _save(pixels, folder / "birds" / "a" / f"{number:04}.png")
        side, kind = ("train", "train", "val", "test")[number % 4], ("rose", "tulip")[number // 4 % 2]
        _save(pixels, folder / "flowers" / side / kind / name.name)
    lines = [f"{n:04}.png,{('robin', 'crow')[n % 2]},{n / 4},{n % 2},{n // 2 % 2}\n" for n in range(40)]
    (folder / "birds.csv").write_text("file,species,age,sings,flies\n" + "".join(lines))


def _masks(folder: Path) -> None:
    for _, pixels, name in _pictures():
        _save(pixels, folder / "scans" / name)
        mask = np.where(pixels[..., :1] > 99, 255, 0).astype(np.uint8)
        _save(mask[..., 0], folder / "scan_masks" / name)
        _save(mask * np.array([1, 0, 0], np.uint8), folder / "colored" / name)


def _tables(folder: Path) -> None:
    _iris(folder)
    _sales(folder)
    lines = [f"{n},{n % 24},{n % 2},{n // 2 % 2},{n % 7 / 2}\n" for n in range(40)]
    (folder / "weather.csv").write_text("day,hour,warm,rain,wind\n" + "".join(lines))
    tagged = [{"text": f"day {n}", "tags": ["rain", "wind"][: n % 3]} for n in range(40)]
    (folder / "tagged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tagged))


def _nothing(folder: Path) -> None:
    """Writes nothing: the page needs only files of the project."""


EXECUTED: dict[str, Callable[[Path], None]] = {
    "README.md": _nothing,
    "docs/data.md": _every_source,
    "docs/detection.md": _annotated_pictures,
    "docs/from-tf-distribute.md": _mnist_of_keras,
    "docs/lightning.md": _nothing,
    "docs/loop.md": _nothing,
    "docs/module-task.md": _masks,
    "docs/language-model.md": _nothing,
    "docs/start/images.md": _images,
    "docs/start/keras.md": _nothing,
    "docs/start/pytorch.md": _nothing,
    "docs/start/tables.md": _tables,
    "docs/start/tune.md": _nothing,
    "docs/text.md": _nothing,
}
"""Pages on which blocks without a mark are executed, each with the function that writes the files of its reader."""
