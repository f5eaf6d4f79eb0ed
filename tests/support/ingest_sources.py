"""A small intact source for each reader of raw data."""

import gzip
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tests.support.ingest_inputs import write_idx, write_images, write_tar
from tests.support.paths import SUPPORT


def write_csv(folder: Path) -> None:
    folder.mkdir()
    lines = [f"{i},{i / 8},{'uvw'[i % 3]}\n" for i in range(12)]
    (folder / "a.csv").write_text("n,x,kind\n" + "".join(lines))
    (folder / "b.csv.gz").write_bytes(gzip.compress(("n,x,kind\n" + "".join(lines)).encode()))


def write_jsonl(folder: Path) -> None:
    folder.mkdir()
    lines = [
        json.dumps({"n": i, "v": [[i, 1.5], [2, 3]], "kind": "uvw"[i % 3], "day": "2024-01-01"}) + "\n"
        for i in range(12)
    ]
    (folder / "a.jsonl").write_text("".join(lines))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))


def write_numpy(folder: Path, packed: bool) -> None:
    folder.mkdir()
    arrays = {"x": np.arange(48.0).reshape(12, 4), "y": np.arange(12)}
    if packed:
        np.savez_compressed(folder / "a.npz", **arrays)
    else:
        for name, values in arrays.items():
            np.save(folder / f"{name}.npy", values)


def write_tars(folder: Path) -> None:
    for i, end in enumerate(("tar", "tar.gz")):
        members = {
            f"{row}.{kind}": value
            for row in range(4)
            for kind, value in (("cls", b"%d" % row), ("txt", b"some text"), ("json", b'{"a": 1}'))
        }
        write_tar(folder / f"{i}.{end}", members, "w:gz" if end.endswith("gz") else "w")


TFRECORD_COLUMNS = ["image/encoded", "image/class/label", "floats", "integers"]


def write_tfrecord(folder: Path) -> None:
    """Copies the files of TensorFlow; `make.py` there says how they were written."""
    shutil.copytree(SUPPORT / "tfrecord", folder, ignore=shutil.ignore_patterns("*.py"))


def write_hf(folder: Path, kind: str) -> None:
    shutil.copytree(SUPPORT / "hf" / kind, folder)


SOURCES: dict[str, tuple[Callable[[Path], Any], str, dict[str, Any]]] = {
    "images": (write_images, "", {}),
    "csv": (write_csv, "", {"label": "kind"}),
    "jsonl": (write_jsonl, "", {"label": "kind"}),
    "numpy, folder": (partial(write_numpy, packed=False), "", {}),
    "numpy, npz": (partial(write_numpy, packed=True), "a.npz", {}),
    "idx": (partial(write_idx, prefix="train", rows=5, packed=False), "", {"eval_fraction": 0}),
    "idx, packed": (partial(write_idx, prefix="t10k", rows=5, packed=True), "", {}),
    "webdataset": (write_tars, "", {}),
    "tfrecord": (write_tfrecord, "", {"columns": TFRECORD_COLUMNS}),
    "hf, saved": (partial(write_hf, kind="saved"), "", {}),
    "hf, parquet": (partial(write_hf, kind="parquet"), "", {}),
    "parquet": (
        lambda folder: (folder.mkdir(), pq.write_table(pa.table({"a": [1, 2], "b": ["u", "v"]}), folder / "a.parquet")),
        "",
        {},
    ),
}


def write_objects(folder: Path, kind: str) -> None:
    """Writes an image with an object in the layout of COCO, VOC or YOLO."""
    images = folder / ("JPEGImages" if kind == "voc" else "images")
    images.mkdir(parents=True)
    Image.new("RGB", (40, 30)).save(images / "1.jpg")
    files = {
        "coco": {
            "annotations.json": json.dumps(
                {
                    "images": [{"id": 1, "file_name": "1.jpg", "width": 40, "height": 30}],
                    "categories": [{"id": 3, "name": "car"}],
                    "annotations": [{"id": 1, "image_id": 1, "category_id": 3, "bbox": [1, 2, 9, 9], "iscrowd": 0}],
                }
            )
        },
        "voc": {
            "Annotations/1.xml": "<annotation><filename>1.jpg</filename><object><name>dog</name><bndbox><xmin>1</xmin>"
            "<ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></object></annotation>"
        },
        "yolo": {"labels/1.txt": "0 0.5 0.5 1.0 1.0\n", "data.yaml": "names: {0: cat, 1: dog}\nnc: 2\n"},
    }
    for name, text in files[kind].items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


OBJECTS: dict[str, tuple[Callable[[Path], Any], str, dict[str, Any]]] = {
    kind: (partial(write_objects, kind=kind), path, {})
    for kind, path in {"coco": "annotations.json", "voc": "", "yolo": ""}.items()
}
