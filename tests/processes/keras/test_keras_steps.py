"""Optimizers and steps that a Keras program has of its own, beside `fit` of `keras.Model`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ray_app.errors import ConfigError
from tests.support import keras_steps
from tests.support.keras_fits import ATOL, RTOL, check_equal_histories, fit_here, get_twice, keras
from tests.support.quick_cases import only_quick

optimizers = keras.optimizers
ROWS = 40


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
    "a function": lambda: optimizers.Adam(lambda: 0.05),
    "a user's": lambda: Scaled(3.0),
    "names that are no paths": lambda: optimizers.Adafactor(0.05),
    "averaged weights": lambda: optimizers.Adam(0.05, use_ema=True, ema_momentum=0.9),
    "overwritten weights": lambda: optimizers.Adam(0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    "accumulation": lambda: optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("name", only_quick(OPTIMIZERS, "Adam", "accumulation"))
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
        check_equal_histories(history, theirs.fit(x, 2 * x[:, :1], batch_size=ROWS, epochs=3, verbose=0))
        for model in (ours, history.keras_model()):
            check_equal_variables(model.weights, theirs.weights)
            check_equal_variables(model.optimizer.variables, theirs.optimizer.variables)


@pytest.mark.parametrize("scale", [None, 2.0**20])
def test_mixed_float16_has_the_scale_of_keras(tmp_path: Path, scale: float | None) -> None:
    """With a high scale the first gradients overflow."""

    def get() -> Any:
        layers = [keras.layers.Dense(8, "relu", dtype="mixed_float16"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        scaled = optimizers.LossScaleOptimizer(optimizers.Adam(0.05), **({"initial_scale": scale} if scale else {}))
        model.compile(scaled, "mse")
        return model

    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    ours, theirs = get_twice(get)
    for _ in range(2):
        history = fit_here(tmp_path, ours, x, 2 * x[:, :1], batch_size=ROWS, epochs=5)
        expected = theirs.fit(x, 2 * x[:, :1], batch_size=ROWS, epochs=5, verbose=0)
        np.testing.assert_allclose(history.history["loss"], expected.history["loss"], 1e-3)
        for one, other in zip(ours.optimizer.variables[:5], theirs.optimizer.variables[:5], strict=True):
            assert float(one) == float(other), one.path
    assert float(ours.optimizer.iterations) < 10 or scale is None


def rows() -> tuple[Any, Any]:
    return np.random.default_rng(0).normal(size=(ROWS, 6)).astype("float32"), np.arange(ROWS) % 3


@pytest.mark.parametrize("name", only_quick(["vae", "gan", "distiller", "contrastive"], "gan"))
def test_a_train_step_trains_as_in_keras(tmp_path: Path, name: str) -> None:
    ours, theirs = get_twice(getattr(keras_steps, f"get_{name}"))
    x, y = rows()
    data = (x,) if name in ("vae", "gan") else (x, y)
    evaluated = {} if name == "gan" else {"validation_data": data}
    for _ in range(2):
        history = fit_here(tmp_path, ours, *data, batch_size=ROWS, epochs=3, **evaluated)
        if name == "vae":
            evaluated = {"validation_data": x}
        check_equal_histories(history, theirs.fit(*data, batch_size=ROWS, epochs=3, verbose=0, **evaluated))
        evaluated = {"validation_data": data} if evaluated else {}
        check_equal_variables(ours.weights, theirs.weights)
        for attribute in ("optimizer", "d_optimizer", "g_optimizer", "contrastive_optimizer", "probe_optimizer"):
            optimizer = getattr(ours, attribute, None)
            if optimizer is not None and int(optimizer.iterations):
                check_equal_variables(optimizer.variables, getattr(theirs, attribute).variables)


class Assigning(keras_steps.Distiller):
    """A teacher that follows the student."""

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        self.teacher.trainable_weights[0].assign_add(1.0)  # here
        return logs


class Looking(keras_steps.Distiller):
    """A loss of the weights after the update."""

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        return logs | {"after": keras.ops.mean(self.student(data[0]))}  # here


class Counting(keras_steps.Distiller):
    """A count in Python."""

    count = 0

    def train_step(self, data: Any) -> Any:  # here
        self.count += 1
        return super().train_step(data)


class Idle(keras_steps.Distiller):
    """No update."""

    def train_step(self, data: Any) -> Any:  # here
        return self.test_step(data)


class Stepping(keras_steps.Distiller):
    """An update by an optimizer of PyTorch."""

    def train_step(self, data: Any) -> Any:  # here
        logs = super().train_step(data)
        torch.optim.SGD([self.student.trainable_weights[0].value], 0.1).step()
        return logs


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Assigning, "assigns weights"),
        (Looking, "uses the weights after the last update"),
        (Counting, "numbers in attributes"),
        (Idle, "no optimizer"),
        (Stepping, "changes"),
    ],
)
def test_a_step_that_workers_cannot_share_is_refused_with_its_line(
    tmp_path: Path, kind: type[Any], reason: str
) -> None:
    model = keras_steps.get_distiller(kind)
    lines, first = inspect.getsourcelines(kind)
    line = first + next(number for number, text in enumerate(lines) if "# here" in text)
    with pytest.raises(ConfigError, match=rf"test_keras_steps\.py:{line}\) .*{reason}"):
        fit_here(tmp_path, model, *rows(), batch_size=ROWS)
