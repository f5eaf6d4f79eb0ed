"""Recipes of the pages for data that no reader of ours reads."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import CIFAR10

from tests.support.ingest_inputs import RNG, read_columns
from tests.support.pages import blocks
from tests.support.paths import ROOT

NAMES = ["ant", "bee", "cat"]


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
    monkeypatch.chdir(tmp_path)
    [code] = [block.text for block in blocks(ROOT / "docs" / "data.md") if "CIFAR10" in block.text]
    exec(code, {})
    test = read_columns(tmp_path / "datasets" / "cifar10" / "test")
    np.testing.assert_array_equal(test["image"], planes.reshape(20, 3, 32, 32).transpose(0, 2, 3, 1))
    assert test["label"] == [2, 0] * 10
