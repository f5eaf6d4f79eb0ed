"""The two networks of `docs/keras-guides.md` train on a file in the format of Keras' `mnist.npz`."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from ray_app import ingest_arrays, load_config, run_training
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set with the shapes and classes of MNIST; in each image, the rows of its label are bright."""
    rng, sides = np.random.default_rng(0), {"train": 900, "test": 128}
    arrays: dict[str, Any] = {f"y_{side}": (np.arange(rows) % 10).astype(np.uint8) for side, rows in sides.items()}
    for side, rows in sides.items():
        images = rng.integers(0, 100, (rows, 28, 28), dtype=np.uint8)
        for image, label in zip(images, arrays[f"y_{side}"], strict=True):
            image[2 * label : 2 * label + 3] += 120
        arrays[f"x_{side}"] = images
    folder = tmp_path_factory.mktemp("mnist")
    ingest_arrays(str(folder / "mnist"), **arrays)
    return folder / "mnist"


@pytest.mark.rest
@pytest.mark.parametrize(
    ("name", "parameters", "min_accuracy"), [("mnist_dense", 269_322, 0.9), ("mnist_cnn", 2_770_634, 0.2)]
)
def test_the_network_of_a_guide_learns(
    mnist: Path, tmp_path: Path, name: str, parameters: int, min_accuracy: float
) -> None:
    """The network trains in the calling process; other tests show that this equals any number of workers."""
    config = load_config(
        ROOT / "conf" / f"{name}.yaml",
        data__path=str(mnist / "train"),
        data__eval_path=str(mnist / "eval"),
        run__storage_path=str(tmp_path),
        scaling__max_workers=1,
        scaling__logical_workers=2,
        train__strategy="single",
        train__max_steps=56,
        evaluate__where="workers",
        tracking__enabled=False,
    )
    result = run_training(config, Console(file=StringIO()))
    assert sum(p.numel() for p in result.load_model().parameters()) == parameters
    assert result.evaluate(str(mnist / "test"))["accuracy"] > min_accuracy
    losses = [record.loss for record in result.metrics()]
    assert np.mean(losses[-10:]) < np.mean(losses[:10])
