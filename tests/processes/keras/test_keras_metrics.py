"""Metrics, masks and weights of `ray_app.keras.fit` beside `keras.Model.fit`, all rows of an epoch in a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_app.errors import ConfigError
from ray_app.keras import History, evaluate, fit
from ray_app.task.keras.library import import_keras, program_session
from tests.support.quick_cases import only_quick

keras = import_keras()
layers, metrics = keras.layers, keras.metrics
RTOL, ATOL = 2e-5, 1e-6
ROWS, EVAL_ROWS = 48, 20
RNG = np.random.default_rng(0)
X = RNG.random((ROWS, 6)).astype("float32")
CLASS, BINARY = RNG.integers(0, 3, ROWS), RNG.integers(0, 2, (ROWS, 1))
REAL = RNG.random((ROWS, 1)).astype("float32")
WEIGHT, OTHER = RNG.random(ROWS), RNG.random(ROWS)
TOKENS = np.where(np.arange(8) < RNG.integers(2, 9, (ROWS, 1)), RNG.integers(1, 9, (ROWS, 8)), 0)
TWO = {"a": REAL, "b": REAL[::-1].copy()}


class Highest(metrics.Metric):  # type: ignore[name-defined]
    """The highest output, which is no sum: `merge_state` combines it."""

    def __init__(self, name: str = "highest", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.highest = self.add_variable((), "zeros", name="highest")

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.highest.assign(keras.ops.maximum(self.highest, keras.ops.max(outputs)))

    def result(self) -> Any:
        return self.highest + 0

    def merge_state(self, others: list[Any]) -> None:
        for other in others:
            self.highest.assign(keras.ops.maximum(self.highest, other.highest))


class Unmerged(Highest):
    merge_state = None


class Endless(metrics.MeanSquaredError):  # type: ignore[name-defined]
    def reset_state(self) -> None:
        """Resets nothing."""


class Tracked(keras.Model):  # type: ignore[name-defined]
    """Has trackers of its own, as the guides of Keras write them, one of them with the name of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(1)
        self.tracker, self.tracked = metrics.Mean(name="loss"), metrics.Mean(name="tracked")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
        loss = keras.ops.mean((y - y_pred) ** 2)
        self.tracker.update_state(loss)
        self.tracked.update_state(2 * loss)
        return loss


class Watched(layers.Layer):  # type: ignore[name-defined]
    """Updates a metric while it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = metrics.Mean(name="watched")

    def call(self, x: Any) -> Any:
        self.watched.update_state(keras.ops.mean(x, 1))
        return x


def dense(units: int = 1, loss: Any = "mse", activation: str | None = None, layer: Any = None, **more: Any) -> Any:
    between = [] if layer is None else [layer]
    output = layers.Dense(units, activation, kernel_regularizer="l2")
    model = keras.Sequential([keras.Input((6,)), *between, layers.Dense(8, "relu"), output])
    model.compile("adam", loss, **more)
    return model


def tagger(mask_zero: bool, **loss: Any) -> Any:
    embedding = layers.Embedding(9, 4, mask_zero=mask_zero)
    model = keras.Sequential([keras.Input((None,)), embedding, layers.GRU(5, return_sequences=True), layers.Dense(9)])
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True, **loss)
    model.compile("adam", entropy, metrics=["accuracy"], weighted_metrics=["sparse_top_k_categorical_accuracy"])
    return model


def two_outputs(losses: Any = "mse", as_list: bool = False, **more: Any) -> Any:
    inputs = keras.Input((6,))
    outputs = {name: layers.Dense(1, name=name)(inputs) for name in ("b", "a")}
    model = keras.Model(inputs, [outputs["a"], outputs["b"]] if as_list else outputs)
    model.compile("adam", losses if as_list else {"a": losses, "b": "mae"}, **more)
    return model


def tracked() -> Any:
    model = Tracked()
    model.compile("adam")
    return model


def loss_of(name: str, reduction: str) -> Any:
    return getattr(keras.losses, name)(reduction=reduction)


counts = ["accuracy", "AUC", "Precision", "Recall"]
OF_OUTPUTS = {"a": ["mae", metrics.R2Score], "b": ["mse"]}
PROGRAMS: dict[str, tuple[Callable[[], Any], Any, Any, dict[str, Any]]] = {
    "counts": (lambda: dense(1, "binary_crossentropy", "sigmoid", metrics=[*counts, metrics.F1Score()]), X, BINARY, {}),
    "weights": (
        lambda: dense(metrics=["mae"], weighted_metrics=["mae", metrics.RootMeanSquaredError()]),
        X,
        REAL,
        {"sample_weight": WEIGHT},
    ),
    "matrices": (
        lambda: dense(
            3,
            "sparse_categorical_crossentropy",
            "softmax",
            metrics=[metrics.MeanIoU(3, sparse_y_true=True, sparse_y_pred=False), Highest(), "accuracy"],
            weighted_metrics=["accuracy"],
        ),
        X,
        CLASS,
        {"class_weight": {0: 3.0, 2: 0.5}},
    ),
    "functions of sums": (lambda: dense(metrics=[metrics.R2Score(), "mae"]), X, REAL, {}),
    "a mask": (lambda: tagger(True), TOKENS, TOKENS, {}),
    "an ignored class": (lambda: tagger(False, ignore_class=0), TOKENS, TOKENS, {}),
    "a sum": (lambda: dense(loss=loss_of("MeanSquaredError", "sum"), metrics=["mae"]), X, REAL, {}),
    "a mean over weights": (
        lambda: dense(loss=loss_of("MeanSquaredError", "mean_with_sample_weight"), metrics=["mae"]),
        X,
        REAL,
        {"sample_weight": WEIGHT},
    ),
    "weights of outputs": (
        lambda: two_outputs(loss_of("MeanSquaredError", "sum"), weighted_metrics={"a": ["mse"], "b": ["mae"]}),
        X,
        TWO,
        {"sample_weight": {"b": OTHER, "a": WEIGHT}},
    ),
    "names of outputs": (
        lambda: two_outputs(metrics={"a": ["mae", metrics.R2Score()], "b": ["mse"]}, weighted_metrics={"a": ["mae"]}),
        X,
        TWO,
        {"sample_weight": WEIGHT[:, None]},
    ),
    "a list of outputs": (
        lambda: two_outputs(["mse", "mae"], as_list=True, weighted_metrics=[["mse"], ["mae"]]),
        X,
        [TWO["a"], TWO["b"]],
        {"sample_weight": [WEIGHT, None]},
    ),
    "a tracker": (tracked, X, REAL, {}),
    "a metric of a layer": (lambda: dense(layer=Watched()), X, REAL, {}),
}
QUICK = ("counts", "matrices", "a mask", "a sum", "weights of outputs")


def first_rows(value: Any) -> Any:
    return keras.tree.map_structure(lambda one: one if one is None else one[:EVAL_ROWS], value)


def fit_both(folder: Path, function: Callable[[], Any], x: Any, y: Any, **options: Any) -> tuple[History, Any]:
    """Trains a program by both, on two logical workers here, and compares histories and weights."""
    models = []
    for _ in range(2):
        with program_session(None):
            models.append(function())
            models[-1](x[:1])
    ours, theirs = models
    theirs.set_weights(ours.get_weights())
    options = {"epochs": 2, "batch_size": ROWS, "verbose": 0, **options}
    expected = theirs.fit(x, y, **options)
    fields = {"run.storage_path": str(folder), "tracking.enabled": False, "scaling.logical_workers": 2}
    history = fit(ours, x, y, fields=fields, **options)
    assert list(history.history) == list(expected.history), "the same keys in the same order"
    for name, values in history.history.items():
        np.testing.assert_allclose(values, np.ravel(expected.history[name]), RTOL, ATOL, err_msg=name)
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, RTOL, 2e-6)
    return history, theirs


@pytest.mark.parametrize("name", only_quick(PROGRAMS, *QUICK))
def test_metrics_over_the_training_rows_are_those_of_keras(tmp_path: Path, name: str) -> None:
    """On two logical workers each has half of the rows, and of the weights, the mask and the states."""
    function, x, y, options = PROGRAMS[name]
    validation = [first_rows(x), first_rows(y)]
    if "sample_weight" in options and name != "a list of outputs":
        validation.append(first_rows(options["sample_weight"]))
    history, theirs = fit_both(tmp_path, function, x, y, validation_data=tuple(validation), **options)
    values = theirs.evaluate(*validation[:2], verbose=0, return_dict=True, batch_size=EVAL_ROWS)
    if "sample_weight" not in options:
        values = {key: float(np.ravel(value)[0]) for key, value in values.items()}
        assert evaluate(history, *validation[:2], return_dict=True) == pytest.approx(values, RTOL)


def test_the_states_of_an_epoch_begin_anew_and_last_over_its_steps(tmp_path: Path) -> None:
    """Weights that stay as they are give the same numbers in any order of the rows."""

    def counted() -> Any:
        # With some initial weights the network gives the same score to all rows.
        keras.utils.set_random_seed(0)
        model = dense(1, "binary_crossentropy", "sigmoid")
        weighted = ["AUC", metrics.FalseNegatives(name="missed")]
        model.compile(keras.optimizers.SGD(0.0), "binary_crossentropy", metrics=counts, weighted_metrics=weighted)
        return model

    history, _ = fit_both(tmp_path, counted, X, BINARY, epochs=3, batch_size=20, sample_weight=WEIGHT)
    records = history.result.metrics()
    assert [len(record.running) for record in records] == [5] * 9
    assert records[0].metrics["AUC"] != records[2].metrics["AUC"] == history.history["AUC"][0]


def test_a_metric_that_resets_nothing_goes_on_over_epochs(tmp_path: Path) -> None:
    """Validation rows would count in it, too."""

    def program() -> Any:
        return dense(metrics=[Endless(name="endless"), metrics.R2Score()])

    fit_both(tmp_path, program, X, REAL, epochs=3, batch_size=20, shuffle=False)
    with pytest.raises(ConfigError, match="reset_state resets nothing"):
        fit_both(tmp_path, program, X, REAL, validation_data=(X, REAL))


def test_a_metric_without_a_value_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ray_app.task.keras.task")
    model = dense(3, "categorical_crossentropy", "softmax", metrics=[Unmerged(), metrics.F1Score(), "accuracy"])
    fields = {"run.storage_path": str(tmp_path), "tracking.enabled": False}
    history = fit(model, X, np.eye(3)[CLASS], verbose=0, fields=fields)
    assert set(history.history) == {"loss", "accuracy"}
    assert [name in caplog.text for name in ("highest has no value", "f1_score has no value")] == [True, True]


REFUSED: dict[str, tuple[Callable[[], Any], Any, dict[str, Any], str]] = {
    "weights and classes": (dense, REAL, {"class_weight": {0: 2.0}, "sample_weight": WEIGHT}, "at the same time"),
    "classes of two outputs": (two_outputs, TWO, {"class_weight": {0: 2.0}}, "Models with a single output"),
    "part of the outputs": (two_outputs, TWO, {"sample_weight": {"a": WEIGHT}}, "one `sample_weight` array per output"),
    "a list for a dictionary": (
        two_outputs,
        TWO,
        {"sample_weight": [WEIGHT, OTHER]},
        "The two structures did not match",
    ),
    "several numbers": (two_outputs, TWO, {"sample_weight": np.ones((ROWS, 2))}, "one scalar score per sample"),
    "other rows": (dense, REAL, {"sample_weight": WEIGHT[:5]}, "ambiguous|differ in length"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_keras_refuses_are_refused_in_its_words(tmp_path: Path, name: str) -> None:
    function, y, options, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        function().fit(X, y, verbose=0, **options)
    with pytest.raises(ConfigError, match=words):
        fit(function(), X, y, verbose=0, fields={"run.storage_path": str(tmp_path)}, **options)


def test_classes_of_several_places_in_a_row_are_refused(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input(X.shape[1:]), layers.Dense(6), layers.Reshape((2, 3))])
    model.compile("sgd", "categorical_crossentropy")
    y = np.eye(3)[np.arange(2 * len(X)).reshape(-1, 2) % 3]
    with pytest.raises(ConfigError, match="one class per row"):
        fit(model, X, y, class_weight={0: 2.0}, fields={"run.storage_path": str(tmp_path)})
