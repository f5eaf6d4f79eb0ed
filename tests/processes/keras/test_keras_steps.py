"""Optimizers and steps that a Keras program has of its own, beside `fit` of `keras.Model`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_app.keras import History, fit
from ray_app.task.keras.library import import_keras, program_session

keras = import_keras()
optimizers = keras.optimizers
RTOL, ATOL = 1e-5, 1e-6
"""Tolerance of float32: the mean of a loss is the same sum, divided in another place."""
ROWS = 40


def get_twice(function: Callable[[], Any]) -> list[Any]:
    """Returns a model and another one with the same names and weights."""
    models = []
    for _ in range(2):
        with program_session(None):
            models.append(function())
    models[1].set_weights(models[0].get_weights())
    return models


def fit_here(folder: Path, model: Any, *arguments: Any, **options: Any) -> History:
    """Calls `fit` without MLflow, with its run in a folder."""
    fields = {"run.storage_path": str(folder), "tracking.enabled": False}
    return fit(model, *arguments, verbose=0, fields=fields, **options)


def check_equal(ours: History, theirs: Any) -> None:
    assert set(ours.history) == set(theirs.history)
    for name, values in ours.history.items():
        np.testing.assert_allclose(values, theirs.history[name], RTOL, ATOL, err_msg=name)


def check_equal_variables(ours: Any, theirs: Any) -> None:
    for one, other in zip(ours, theirs, strict=True):
        values = [keras.ops.convert_to_numpy(v.value).astype("float64") for v in (one, other)]
        np.testing.assert_allclose(*values, RTOL, ATOL, err_msg=one.path)


class Scaled(optimizers.SGD):  # type: ignore[name-defined]
    """An optimizer with an argument that `get_config` lacks."""

    def __init__(self, factor: float, **options: Any) -> None:
        super().__init__(0.01, momentum=0.9, **options)
        self.factor = factor

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        return super().apply([self.factor * gradient for gradient in grads], trainable_variables)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "Adam": lambda: optimizers.Adam(0.05),
    "a schedule": lambda: optimizers.Adam(optimizers.schedules.CosineDecay(0.1, 10)),
    "a user's": lambda: Scaled(3.0),
    "names that are no paths": lambda: optimizers.Adafactor(0.05),
    "averaged weights": lambda: optimizers.Adam(0.05, use_ema=True, ema_momentum=0.9),
    "overwritten weights": lambda: optimizers.Adam(0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    "accumulation": lambda: optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_second_fit_continues_with_the_optimizer_as_in_keras(tmp_path: Path, name: str) -> None:
    def get() -> Any:
        layers = [keras.Input((4,)), keras.layers.Dense(3, "relu"), keras.layers.Dense(2), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(OPTIMIZERS[name](), "mse")
        return model

    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    ours, theirs = get_twice(get)
    for _ in range(2):
        history = fit_here(tmp_path, ours, x, 2 * x[:, :1], batch_size=ROWS, epochs=3)
        check_equal(history, theirs.fit(x, 2 * x[:, :1], batch_size=ROWS, epochs=3, verbose=0))
        for model in (ours, history.keras_model()):
            check_equal_variables(model.weights, theirs.weights)
            check_equal_variables(model.optimizer.variables, theirs.optimizer.variables)
