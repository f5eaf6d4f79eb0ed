"""What a run of a Keras program leaves: a `keras.Model`, and an export that Keras loads without ray_app."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from ray_app import Result, load_model, run_training
from ray_app.config.config import Config
from ray_app.errors import ConfigError
from tests.support.local_world import write_images
from tests.support.plain_keras import predict_by_plain_keras


def train(folder: Path, data: Path, task: dict[str, Any]) -> Result:
    config = Config().replace(
        task=task,
        data__path=str(data),
        data__eval_path=str(data),
        data__global_batch_size=12,
        scaling__max_workers=1,
        scaling__logical_workers=2,
        train__strategy="single",
        train__epochs=1,
        evaluate__where="workers",
        tracking__enabled=False,
        run__storage_path=str(folder),
        run__name="run",
    )
    return run_training(config, Console(file=StringIO()))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("keras") / "images", [[50]])


@pytest.mark.rest
def test_plain_keras_loads_an_export_and_predicts_the_same(data: Path, tmp_path: Path) -> None:
    init_args = {"model": "tests.support.keras_programs.get_convolutional", "inputs": "image", "target": "label"}
    result = train(tmp_path / "runs", data, {"class_path": "ray_app.task.keras.KerasTask", "init_args": init_args})
    images = np.random.default_rng(0).integers(0, 255, (7, 8, 8)).astype(np.uint8)
    predicted = result.predict(images)["predicted"]
    model = result.keras_model()
    pixels = images[..., None].astype("float32")
    np.testing.assert_array_equal(model.predict(pixels, verbose=0), predicted)
    assert model.compiled

    described = result.export(str(tmp_path / "export"))
    assert (described["format"], described["refused"]) == ("torch.export", [])
    assert "model.keras" in json.loads((tmp_path / "export" / "export.json").read_text())["files"]
    alone = predict_by_plain_keras(tmp_path / "export", {"image": pixels}, "image")
    np.testing.assert_array_equal(alone["predicted"], predicted)
    served = load_model(tmp_path / "export").predict({"image": images[:, None]}, scores=True)
    np.testing.assert_allclose(served, predicted, 1e-6)


def test_another_run_has_no_keras_model(data: Path, tmp_path: Path) -> None:
    result = train(tmp_path / "runs", data, {"class_path": "ray_app.task.image.ImageClassification", "init_args": {}})
    with pytest.raises(ConfigError, match="not a Keras model"):
        result.keras_model()
