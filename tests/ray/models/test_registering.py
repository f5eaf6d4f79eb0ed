"""A run on real Ray registers its best checkpoint as a version of a model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ray_app import run_training
from ray_app.config.config import Config, default_tracking_uri
from ray_app.track.mlflow_client import connect

IMAGES = np.random.default_rng(0).integers(0, 17, (5, 1, 8, 8)).astype(np.uint8)


@pytest.mark.rest
@pytest.mark.usefixtures("ray_cluster")
def test_a_run_registers_its_best_checkpoint(
    make_short_config: Callable[..., Config], digits: Path, capsys: Any
) -> None:
    import mlflow

    config = make_short_config(
        scaling__min_workers=1,
        scaling__max_workers=1,
        data__eval_path=str(digits / "eval"),
        tracking__enabled=True,
        tracking__registered_model="digits of a run",
    )
    result = run_training(config)
    assert result.summary["model"] == {"name": "digits of a run", "version": "1", "aliases": ["challenger", "champion"]}
    assert "digits of a run version 1 @challenger @champion" in capsys.readouterr().out
    mlflow.set_tracking_uri(default_tracking_uri(config))
    served = mlflow.pyfunc.load_model("models:/digits of a run@champion")
    with torch.inference_mode():
        expected = result.task.forward(result.load_model(), {"image": torch.from_numpy(IMAGES)}).numpy()
    assert np.array_equal(served.predict(IMAGES), expected)
    tags = connect(default_tracking_uri(config)).get_model_version("digits of a run", "1").tags
    assert (tags["ray_app.step"], tags["ray_app.metric"]) == (str(result.summary["best"]["step"]), "accuracy")
    again = run_training(config)
    assert again.summary["model"] == result.summary["model"]
