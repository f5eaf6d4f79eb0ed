"""Writes the files next to this one with the real `datasets` library (5.2.0): `python make.py`."""

import os

import numpy as np
from PIL import Image as Picture

import datasets
from datasets import Array2D, ClassLabel, Dataset, DatasetDict, Features, Image, List, Value  # type: ignore[attr-defined]

FEATURES = Features(
    {
        "image": Image(),
        "label": ClassLabel(names=["ant", "bee", "cat"]),
        "text": Value("string"),
        "vector": List(Value("float32"), length=3),
        "grid": Array2D((2, 2), "float32"),
    }
)


def rows(count: int) -> dict[str, list]:
    return {
        "image": [Picture.fromarray(np.full((4, 5, 3), 10 * i, np.uint8)) for i in range(count)],
        "label": [i % 3 for i in range(count)],
        "text": [f"row {i}" for i in range(count)],
        "vector": [[float(i), 1.0, 2.0] for i in range(count)],
        "grid": [[[i, 1], [2, 3]] for i in range(count)],
    }


dataset = DatasetDict(
    {name: Dataset.from_dict(rows(count), features=FEATURES) for name, count in (("train", 7), ("test", 3))}
)
dataset.save_to_disk("saved", num_shards={"train": 2, "test": 1})
os.mkdir("parquet")
for split, data in dataset.items():
    data.to_parquet(f"parquet/{split}-00000-of-00001.parquet")
datasets.load_dataset(  # type: ignore[attr-defined]
    "parquet", data_files={s: f"parquet/{s}-00000-of-00001.parquet" for s in dataset}, cache_dir="loaded"
)
