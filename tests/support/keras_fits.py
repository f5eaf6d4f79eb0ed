"""Calls of `ray_app.keras.fit` in a folder, and their comparison with `fit` of Keras."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ray_app.keras import History, fit
from ray_app.task.keras.library import import_keras, program_session

keras = import_keras()
RTOL, ATOL = 1e-5, 1e-6
"""Tolerance of float32: the mean of a loss is the same sum, divided in another place."""


def get_twice(function: Callable[[], Any]) -> list[Any]:
    """Returns a model and another one with the same names and weights."""
    models = []
    torch.manual_seed(0)
    for _ in range(2):
        with program_session(None):
            models.append(function())
    models[1].set_weights(models[0].get_weights())
    return models


def fit_here(
    folder: Path, model: Any, *arguments: Any, fields: dict[str, Any] | None = None, **options: Any
) -> History:
    """Calls `fit` without MLflow, with its run in a folder."""
    fields = {"run.storage_path": str(folder), "tracking.enabled": False, **(fields or {})}
    return fit(model, *arguments, **{"verbose": 0, "fields": fields, **options})


def check_equal_histories(ours: History, theirs: Any, left_out: tuple[str, ...] = ()) -> None:
    assert ours.epoch == theirs.epoch
    assert ours.history.keys() == theirs.history.keys() - set(left_out)
    for name, values in ours.history.items():
        np.testing.assert_allclose(values, theirs.history[name], RTOL, ATOL, err_msg=name)


def check_equal_weights(ours: Any, theirs: Any) -> None:
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, RTOL, ATOL)


def get_regression(layer: Any = None, **compilation: Any) -> Any:
    layers = [keras.Input((6,)), *([] if layer is None else [layer]), keras.layers.Dense(1, bias_initializer="ones")]
    model = keras.Sequential(layers)
    model.compile(**{"optimizer": keras.optimizers.SGD(0.1), "loss": "mse", **compilation})
    return model
