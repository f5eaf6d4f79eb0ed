"""Recipes of the pages for data that no reader of ours reads."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import CIFAR10

from tests.support.ingest_inputs import RNG, example, read_columns, write_tfrecord
from tests.support.pages import blocks
from tests.support.paths import ROOT

NAMES = ["ant", "bee", "cat"]


def run_block(folder: Path, monkeypatch: pytest.MonkeyPatch, page: str, text: str) -> None:
    """Runs the block of code with a text of a page in a folder."""
    monkeypatch.chdir(folder)
    [code] = [block.text for block in blocks(ROOT / "docs" / page) if text in block.text]
    exec(code, {})


def test_cifar_of_torchvision_becomes_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "downloads" / CIFAR10.base_folder
    folder.mkdir(parents=True)
    planes = RNG.integers(0, 256, (20, 3072), dtype=np.uint8)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (folder / name).write_bytes(pickle.dumps({"data": planes, "labels": [2, 0] * 10}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": NAMES}))
    # torchvision compares the published checksums before it unpickles; these few rows have others.
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setitem(CIFAR10.meta, "md5", None)
    run_block(tmp_path, monkeypatch, "data.md", "CIFAR10")
    test = read_columns(tmp_path / "datasets" / "cifar10" / "test")
    np.testing.assert_array_equal(test["image"], planes.reshape(20, 3, 32, 32).transpose(0, 2, 3, 1))
    assert test["label"] == [2, 0] * 10


def test_records_of_the_object_detection_api_become_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(*boxes: list[float], labels: list[int]) -> bytes:
        sides = {
            f"image/object/bbox/{side}": [box[i] for box in boxes]
            for i, side in enumerate(("xmin", "ymin", "xmax", "ymax"))
        }
        size = {"image/encoded": [b"image"], "image/width": [20], "image/height": [10]}
        return example(**size, **sides, **{"image/object/class/label": labels})

    two = record([0.0, 0.0, 0.5, 0.5], [0.25, 0.5, 1.0, 1.0], labels=[2, 1])
    write_tfrecord(tmp_path / "records" / "train-0.tfrecord", record(labels=[]), two)
    run_block(tmp_path, monkeypatch, "detection.md", "image/object/bbox")
    columns = read_columns(tmp_path / "datasets" / "records")
    assert dict(zip(map(len, columns["boxes"]), columns["boxes"], strict=True)) == {
        0: [],
        2: [[0, 0, 10, 5], [5, 5, 20, 10]],
    }
    assert sorted(columns["labels"]) == [[], [2, 1]]
    assert columns.keys() == {"row_id", "image", "boxes", "labels"}
