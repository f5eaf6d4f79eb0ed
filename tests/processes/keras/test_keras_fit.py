"""`ray_app.keras.fit`, `evaluate` and `predict` beside `fit`, `evaluate` and `predict` of `keras.Model`."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ray_app.errors import ConfigError, RunExistsError
from ray_app.keras import evaluate, fit, predict
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.stored_config import read_config
from ray_app.task.keras.library import import_keras
from tests.support import keras_programs
from tests.support.keras_fits import (
    ATOL,
    RTOL,
    check_equal_histories,
    check_equal_weights,
    fit_here,
    get_regression,
    get_twice,
)

keras = import_keras()
ROWS = 60


def images(rows: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (rows, 8, 8, 1), dtype=np.uint8), (np.arange(rows) % 5).astype("int64")


def test_a_model_takes_the_course_of_its_own_fit_and_keeps_the_trained_weights(tmp_path: Path) -> None:
    """With all rows in one step their order changes no more than the last bits."""
    x, y = images()
    x = x.astype("float64")
    weights = np.linspace(0.5, 2, ROWS)
    ours, theirs = get_twice(keras_programs.get_measured)
    options = {"batch_size": ROWS, "epochs": 3, "sample_weight": weights, "validation_split": 0.25}
    history = fit_here(tmp_path, ours, x, y, **options)
    expected = theirs.fit(x, y, verbose=0, **options)
    check_equal_histories(history, expected)
    check_equal_weights(ours, theirs)
    check_equal_weights(history.keras_model(), theirs)

    x_test, y_test = images(23, seed=1)
    x_test = x_test.astype("float32")
    np.testing.assert_allclose(
        evaluate(history, x_test, y_test, verbose=0), theirs.evaluate(x_test, y_test, verbose=0), RTOL
    )
    by_name = theirs.evaluate(x_test, y_test, verbose=0, return_dict=True)
    assert evaluate(history, x_test, y_test, batch_size=7, return_dict=True) == pytest.approx(by_name, RTOL)
    np.testing.assert_allclose(predict(history, x_test, batch_size=7), theirs.predict(x_test, verbose=0), 1e-4, ATOL)


@pytest.mark.rest
def test_without_mlflow_a_run_is_not_tracked_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "mlflow" else find_spec(name))
    x, y = np.zeros((32, 8, 8, 1), np.uint8), np.arange(32) % 5
    history = fit(keras_programs.get_plain, x, y, fields={"run.storage_path": str(tmp_path)})
    assert not read_config(RunPaths(history.result.path)).tracking.enabled
    assert "not recorded in MLflow, which is not installed" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="needs mlflow"):
        fit(keras_programs.get_plain, x, y, fields={"run.storage_path": str(tmp_path), "tracking.enabled": True})


def test_several_inputs_and_outputs_are_dictionaries_of_arrays(tmp_path: Path) -> None:
    pixels, kind = images()
    size = torch.linspace(0, 5, ROWS)
    x = {"picture": pixels, "number": size[:, None]}
    y = {"kind": kind, "size": size}
    ours, theirs = get_twice(keras_programs.get_two_inputs)
    options = {"batch_size": ROWS, "epochs": 2, "validation_data": (x, y)}
    history = fit_here(tmp_path, ours, x, y, **options)
    check_equal_histories(history, theirs.fit(x, y, verbose=0, **options))
    check_equal_weights(ours, theirs)
    np.testing.assert_allclose(evaluate(history, x, y), theirs.evaluate(x, y, verbose=0), RTOL)
    expected = theirs.predict(x, verbose=0)
    for name, values in predict(history, x).items():
        np.testing.assert_allclose(values, expected[name], 1e-4, ATOL)


@pytest.mark.rest
def test_a_function_continues_by_name_and_has_the_weights_of_one_long_run(tmp_path: Path) -> None:
    x, y = images()
    options: dict[str, Any] = {"batch_size": 12, "validation_data": (x, y), "class_weight": {0: 2.0}}
    function = keras_programs.get_convolutional
    once = fit_here(tmp_path, function, x, y, epochs=2, **options)
    first = fit_here(tmp_path, function, x, y, epochs=1, name="longer", **options)
    longer = fit_here(tmp_path, function, x, y, epochs=2, name="longer", **options)
    assert longer.result.summary["params_digest"] == once.result.summary["params_digest"]
    assert first.history == {name: values[:1] for name, values in once.history.items()}
    assert longer.history == once.history
    assert set(once.history) == {"loss", "accuracy", "top2", "val_loss", "val_accuracy", "val_top2"}
    assert len(list((tmp_path / "fit-inputs").iterdir())) == 2, "the same arrays are written once, mixed and in order"
    with pytest.raises(RunExistsError, match="trained on other rows"):
        fit_here(tmp_path, function, x[::-1] // 2, y, epochs=2, name="longer", **options)


@pytest.mark.rest
def test_an_ingested_data_set_and_a_function_of_a_script_train_alike(tmp_path: Path) -> None:
    """A function of a notebook is called once, and its model has the weights that workers would draw."""
    from ray_app import ingest_arrays

    x, y = images()
    ingest_arrays(str(tmp_path / "data"), x=x, y=y)

    def get_here() -> Any:
        return keras_programs.get_plain()

    histories = [
        fit_here(tmp_path, get_here, str(tmp_path / "data"), batch_size=20, validation_data=tmp_path / "data")
        for _ in range(2)
    ]
    assert histories[0].history == histories[1].history
    assert histories[0].result.summary["params_digest"] == histories[1].result.summary["params_digest"]
    assert evaluate(histories[0], tmp_path / "data", return_dict=True) == pytest.approx(
        {name.removeprefix("val_"): values[-1] for name, values in histories[0].history.items() if "val_" in name}
    )


@pytest.mark.rest
def test_a_network_without_an_input_shape_is_built_by_its_rows(tmp_path: Path) -> None:
    x, y = np.ones((20, 3)), np.ones((20, 1))
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(loss="mse", optimizer="sgd")
    history = fit_here(tmp_path, model, x, y, batch_size=10, steps_per_epoch=1, epochs=2)
    assert model.evaluate(x, y, verbose=0) == pytest.approx(evaluate(history, x, y))
    assert history.result.summary["steps"] == 2


class Holding(keras.layers.Layer):  # type: ignore[name-defined]
    """Has what cannot leave its process."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def call(self, x: Any) -> Any:
        return x


def get_with(layer: Any) -> Any:
    model = keras.Sequential([keras.Input((8, 8, 1)), layer, keras.layers.Flatten(), keras.layers.Dense(5)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


# --- What Keras' own serialization loses or refuses.


class Focal(keras.losses.Loss):  # type: ignore[name-defined]
    """A loss without get_config, as most are written."""

    def __init__(self, gamma: float = 2.0) -> None:
        super().__init__()
        self.gamma = gamma

    def call(self, y: Any, predicted: Any) -> Any:
        return keras.ops.mean(keras.ops.abs(y - predicted) ** self.gamma, -1)


class Above(keras.metrics.Mean):  # type: ignore[name-defined]
    """A metric without get_config."""

    def __init__(self, threshold: float = 0.5) -> None:
        super().__init__("above")
        self.threshold = threshold

    def update_state(self, y: Any, predicted: Any, sample_weight: Any = None) -> None:
        super().update_state(keras.ops.cast(predicted > self.threshold, "float32"), sample_weight)


class OwnLoss(keras.Model):  # type: ignore[name-defined]
    """Computes its loss of targets in the rank in which they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
        return keras.ops.mean((y - keras.ops.squeeze(y_pred, -1)) ** 2)


class Halving(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[name-defined]
    def __call__(self, step: Any) -> Any:
        return 0.1 * 0.5 ** keras.ops.cast(step, "float32")


class OwnOptimizer(keras.optimizers.SGD):  # type: ignore[name-defined]
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient * 2, variable, learning_rate)


for kind in (Focal, Above, OwnLoss, Halving, OwnOptimizer):
    # As of a script or a notebook, which no worker imports.
    kind.__module__ = "__main__"


def square(y: Any, predicted: Any) -> Any:
    return keras.ops.mean((y - predicted) ** 2, -1)


def get_own_loss() -> Any:
    model = OwnLoss()
    model.compile(keras.optimizers.SGD(0.1))
    model(np.zeros((1, 6)))
    return model


def get_undecayed() -> Any:
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return get_regression(optimizer=optimizer)


LOST: dict[str, tuple[Callable[[], Any], int]] = {
    "an argument that get_config lacks": (lambda: get_regression(loss=keras.losses.Huber(delta=0.1)), 2),
    "a loss": (lambda: get_regression(loss=Focal(3.0)), 2),
    "a metric": (lambda: get_regression(metrics=[Above(0.8)]), 2),
    "functions": (lambda: get_regression(loss=square, metrics=[square]), 2),
    "targets of one axis": (get_own_loss, 1),
    "a metric of one axis": (lambda: get_regression(metrics=[square]), 1),
    "weights without decay": (get_undecayed, 2),
    "a lambda": (lambda: get_regression(keras.layers.Lambda(lambda x: 2 * x)), 2),
    "a schedule": (lambda: get_regression(optimizer=keras.optimizers.SGD(Halving())), 2),
    "an optimizer": (lambda: get_regression(optimizer=OwnOptimizer(0.05)), 2),
}
"""Programs of which Keras' own serialization loses a part, each with the axes of its targets."""


@pytest.mark.parametrize("name", LOST)
def test_what_serialization_would_lose_trains_as_in_keras(tmp_path: Path, name: str) -> None:
    function, axes = LOST[name]
    rng = np.random.default_rng(0)
    x, y = rng.random((20, 6)).astype("float32"), rng.random(20).astype("float32")
    y = y if axes == 1 else y[:, None]
    ours, theirs = get_twice(function)
    history = fit_here(tmp_path, ours, x, y, batch_size=20, epochs=3)
    check_equal_histories(history, theirs.fit(x, y, verbose=0, batch_size=20, epochs=3))
    check_equal_weights(ours, theirs)


def test_a_model_with_other_weights_continues_the_run_of_its_name(tmp_path: Path) -> None:
    x, y = np.ones((20, 6), np.float32), np.ones((20, 1), np.float32)
    for epochs in (1, 2):
        history = fit_here(tmp_path, get_regression(), x, y, epochs=epochs, name="a")
    assert history.epoch == [0, 1]
    with pytest.raises(RunExistsError, match="structure"):
        fit_here(tmp_path, get_regression(loss=keras.losses.Huber(0.5)), x, y, epochs=3, name="a")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("uncompiled", {}, "not compiled"),
        ("own_loop", {}, "overrides fit"),
        ("plain", {"initial_epoch": 1}, "no epoch is left to train"),
        ("plain", {"initial_epoch": 1, "epochs": 2, "name": "new"}, "no run 'new' exists that could continue"),
        ("plain", {"validation_split": 0.99}, "both parts need rows"),
        ("plain", {"validation_split": 0.5, "validation_data": images()}, "leave one of them out"),
        ("plain", {"validation_data": images()[0]}, "validation_data: y is a NoneType"),
        ("plain", {"validation_data": (*images(), None, None)}, "validation_data: Data is expected to be in format"),
        ("plain", {"validation_freq": "often"}, "validation_freq is 'often'"),
        ("plain", {"inputs": "image"}, "x is not a path"),
        ("plain", {"batch_size": 7, "workers": 2}, "global_batch_size"),
        ("plain", {"batch_size": -1}, "data.global_batch_size is -1"),
        ("plain", {"class_weight": {"cat": 2.0}}, "class_weight is {'cat': 2.0}"),
        ("plain", {"fields": {"train.speed": 1}}, "train.speed"),
        ("plain", {"fields": {"train.strategy": "x"}, "validation_data": images()}, "train.strategy is x"),
        ("plain", {"callbacks": [print]}, "must be a keras.callbacks.Callback"),
        (
            "plain",
            {"callbacks": [keras.callbacks.ModelCheckpoint("m.keras", save_freq=3)], "workers": 1},
            "save_freq=3",
        ),
        (
            "plain",
            {"callbacks": keras.callbacks.EarlyStopping(), "fields": {"train.strategy": "parameter_server"}},
            "callbacks need the whole model after each epoch. Use ddp or single",
        ),
        (
            "plain",
            {
                "callbacks": keras.callbacks.EarlyStopping(),
                "validation_data": images(),
                "fields": {"evaluate.where": "actor"},
            },
            "evaluate.where is actor",
        ),
        (keras.Sequential([keras.layers.Dense(1)]), {}, "not compiled"),
        (get_with(Holding()), {"workers": 1}, "cannot be sent to workers: TypeError: cannot pickle"),
        (3, {}, "pass a compiled keras.Model"),
    ],
)
def test_what_fit_cannot_do_is_refused(tmp_path: Path, model: Any, options: dict[str, Any], message: str) -> None:
    if isinstance(model, str):
        model = getattr(keras_programs, f"get_{model}")()
    x, y = images(20)
    with pytest.raises(ConfigError, match=message):
        fit_here(tmp_path, model, **{"x": x, "y": y, **options})
    assert [path.name for path in tmp_path.iterdir() if path.name != "fit-inputs"] == [], "no run was started"
