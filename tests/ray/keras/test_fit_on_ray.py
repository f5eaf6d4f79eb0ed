"""`fit` of a Keras program on workers of a real Ray cluster: their number does not change the weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ray_app.keras import fit
from tests.support import keras_programs

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.rest]


def test_a_program_has_the_same_history_and_weights_on_one_and_two_workers(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 256, (96, 8, 8, 1), dtype=np.uint8), np.arange(96) % 5
    histories, weights = [], []
    for workers in (1, 2):
        fields = {
            "run.storage_path": str(tmp_path / str(workers)),
            "tracking.enabled": False,
            "scaling.logical_workers": 2,
            "scaling.min_workers": workers,
        }
        options = {"batch_size": 16, "epochs": 2, "validation_split": 0.25, "workers": workers, "verbose": 0}
        history = fit(keras_programs.get_plain, x, y, **options, fields=fields)
        assert history.result.summary["world_sizes"] == [[0, workers]]
        histories.append(history.history)
        weights.append(history.keras_model().get_weights())
    assert histories[0] == histories[1]
    assert histories[0].keys() == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert all(np.array_equal(one, other) for one, other in zip(*weights, strict=True))
