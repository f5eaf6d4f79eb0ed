"""What gives rows to `fit` beside arrays, in which order, and how many are validated; beside plain `Model.fit`."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ray_app.errors import ConfigError, RunExistsError
from ray_app.keras import evaluate, inputs, predict
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.stored_config import read_config
from ray_app.task.keras import library
from tests.support.keras_fits import (
    check_equal_histories,
    check_equal_weights,
    fit_here,
    get_regression,
    get_twice,
)

keras = library.import_keras()
ROWS, BATCH = 50, 8
STEPS = -(-ROWS // BATCH)
rng = np.random.default_rng(0)
X, Y = rng.random((ROWS, 6), np.float32), rng.random((ROWS, 1), np.float32)
WEIGHTS = rng.random(ROWS, np.float32)
Batch = tuple[Any, ...]


def batches(times: int | None = 1, weights: bool = False) -> Iterator[Batch]:
    """Yields batches in the order of the rows, without an end if `times` is None."""
    while times is None or times > 0:
        for low in range(0, ROWS, BATCH):
            part = slice(low, low + BATCH)
            yield (X[part], Y[part], WEIGHTS[part]) if weights else (X[part], Y[part])
        times = times and times - 1


class Sequence(keras.utils.PyDataset):  # type: ignore[name-defined]
    def __init__(self, count: int | None = STEPS) -> None:
        super().__init__()
        self.count = count

    @property
    def num_batches(self) -> int | None:
        return self.count

    def __getitem__(self, number: int) -> Batch:
        return list(batches())[number % STEPS]


class Numberless(keras.utils.PyDataset):  # type: ignore[name-defined]
    """Does not say how many batches it has."""

    def __getitem__(self, number: int) -> Batch:
        return X, Y, None, None


class Pipeline:
    """The methods of a `tf.data.Dataset` that Keras and `fit` use; plain Keras gets the generator instead."""

    def __init__(self, source: Any = None) -> None:
        self._input_dataset = source

    def __iter__(self) -> Iterator[Batch]:
        raise AssertionError("it gives tensors of TensorFlow")

    def as_numpy_iterator(self) -> Iterator[Batch]:
        return batches()

    def cardinality(self) -> int:
        return STEPS


class ShuffleDataset(Pipeline):
    """As tf.data and grain call what shuffles."""


class Stream(IterableDataset[Batch]):
    def __iter__(self) -> Iterator[Batch]:
        return batches()


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y)), **{"batch_size": BATCH, **options})


def validation() -> tuple[Any, ...]:
    return X[:21], Y[:21]


CALLS: dict[str, tuple[Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "arrays in their order": (lambda: {"x": X, "y": Y}, {"batch_size": BATCH, "shuffle": False}),
    "arrays within batches": (lambda: {"x": X, "y": Y}, {"batch_size": BATCH, "shuffle": "batch"}),
    "a number of steps": (lambda: {"x": X, "y": Y}, {"steps_per_epoch": 4, "shuffle": False}),
    "more steps than rows": (lambda: {"x": X, "y": Y}, {"steps_per_epoch": 9, "batch_size": 8, "shuffle": False}),
    "a generator": (lambda: {"x": batches(3)}, {"steps_per_epoch": STEPS}),
    "a generator without an end": (lambda: {"x": batches(None, weights=True)}, {"steps_per_epoch": STEPS}),
    "a PyDataset": (lambda: {"x": Sequence()}, {"shuffle": False}),
    "a PyDataset without an end": (lambda: {"x": Sequence(None)}, {"steps_per_epoch": STEPS}),
    "a loader": (lambda: {"x": loader()}, {}),
    "a loader of a stream": (lambda: {"x": DataLoader(Stream(), batch_size=None)}, {}),
    "a part of a loader": (lambda: {"x": loader()}, {"steps_per_epoch": 3, "epochs": 2}),
    "validation of batches": (
        lambda: {"x": loader(), "validation_data": batches(None)},
        {"validation_steps": 3, "epochs": 1},
    ),
    "a part of the validation": (
        lambda: {"x": loader(), "validation_data": validation()},
        {"validation_steps": 2, "validation_batch_size": 4},
    ),
    "a part of all steps of the validation": (
        lambda: {"x": loader(), "validation_data": validation()},
        {"validation_steps": 2},
    ),
    "weights of the validation": (
        lambda: {"x": X, "y": Y, "validation_data": (*validation(), WEIGHTS[:21])},
        {"batch_size": ROWS},
    ),
    "validation in every second epoch": (
        lambda: {"x": loader(), "validation_data": validation()},
        {"validation_freq": 2, "epochs": 5},
    ),
    "validation in some epochs": (
        lambda: {"x": loader(), "validation_data": validation()},
        {"validation_freq": [1, 4], "epochs": 5},
    ),
}
"""The data of calls, anew for each, and options."""


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:.*will be ignored", "ignore:.*ran out of data")
def test_rows_are_used_as_in_keras(tmp_path: Path, name: str) -> None:
    data, options = CALLS[name]
    ours, theirs = get_twice(get_regression)
    history = fit_here(tmp_path, ours, **data(), **{"epochs": 3, **options})
    check_equal_histories(history, theirs.fit(**data(), verbose=0, **{"epochs": 3, **options}))
    check_equal_weights(ours, theirs)


@pytest.mark.rest
def test_several_logical_workers_use_the_rows_of_a_batch_of_keras(tmp_path: Path) -> None:
    weights = []
    for logical_workers in (1, 2, 4):
        ours, theirs = get_twice(get_regression)
        fields = {"scaling.logical_workers": logical_workers, "data.shuffle_window_rows": 4}
        fit_here(tmp_path, ours, loader(), epochs=2, fields=fields)
        theirs.fit(X, Y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0)
        check_equal_weights(ours, theirs)
        weights.append(ours.get_weights())


def test_a_pipeline_is_read_as_arrays_and_scored_and_predicted(tmp_path: Path) -> None:
    ours, theirs = get_twice(get_regression)
    history = fit_here(tmp_path, ours, Pipeline(Pipeline()), epochs=2, validation_data=Pipeline())
    check_equal_histories(
        history, theirs.fit(X, Y, batch_size=BATCH, shuffle=False, epochs=2, verbose=0, validation_data=(X, Y))
    )
    assert evaluate(history, Pipeline()) == pytest.approx(theirs.evaluate(X, Y, verbose=0), 1e-5)
    np.testing.assert_allclose(predict(history, batches()), theirs.predict(X, verbose=0), 1e-4, 1e-6)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (Sequence(), True),
        (Sequence(None), False),
        (loader(shuffle=True), True),
        (loader(), False),
        (Pipeline(ShuffleDataset(Pipeline())), True),
        (Pipeline(), False),
    ],
)
def test_rows_are_shuffled_where_keras_has_another_order_in_each_epoch(source: Any, expected: bool) -> None:
    assert inputs.is_shuffled(source, True) == expected


def test_what_is_read_once_says_so_and_is_written_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a loader that shuffles are mixed, and these are the rows of arrays."""
    monkeypatch.setattr(inputs, "_PROGRESS_S", -1)
    model = get_regression()
    for data in (batches(), loader(shuffle=True), loader(batch_size=ROWS)):
        fit_here(tmp_path, model, data, verbose=1)
    lines = capsys.readouterr().out.splitlines()
    read = [line for line in lines if "were read once" in line]
    assert all("RandomFlip" in line and str(tmp_path) in line for line in read)
    assert [line.split(" were read")[0] for line in read] == [
        "x: 50 rows in 7 batches",
        "x: 50 rows in 7 batches",
        "x: 50 rows in 1 batches",
    ]
    assert ["in the order given." in line for line in read] == [True, False, True]
    assert "x: 16 rows in 2 batches were read so far. Endless data needs steps_per_epoch." in lines
    kinds = {path.name.split("-")[0] for path in (tmp_path / "fit-inputs").iterdir() if path.is_dir()}
    assert kinds == {"arrays", "ordered"}
    assert read[0].split(" in ")[3] == read[2].split(" in ")[3], "the same rows are written once"


def test_a_run_with_new_random_rows_continues_with_the_rows_that_it_has(tmp_path: Path) -> None:
    def noise() -> Iterator[Batch]:
        yield rng.random((8, 6)), rng.random((8, 1))

    first = fit_here(tmp_path, get_regression(), noise(), name="a")
    with pytest.raises(RunExistsError, match="or the first path as x") as caught:
        fit_here(tmp_path, get_regression(), noise(), name="a", epochs=2)
    path = str(caught.value).split("other rows: ")[1].split(",")[0]
    longer = fit_here(tmp_path, get_regression(), path, name="a", epochs=2, batch_size=8, shuffle=False)
    assert longer.history["loss"][:1] == first.history["loss"]


def uneven(*shapes: tuple[int, ...], dtype: str = "float32") -> Iterator[Batch]:
    for shape in shapes:
        yield np.ones(shape, dtype), np.ones(shape[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": batches(), "y": Y}, "When providing `x` as a generator, `y` should not be passed"),
        ({"x": loader(), "sample_weight": WEIGHTS}, "a DataLoader, `sample_weight` should not be passed"),
        ({"x": Sequence(), "batch_size": 8}, "a Sequence, `batch_size` should not be passed"),
        ({"x": loader(), "validation_split": 0.1}, "validation_split is for arrays"),
        ({"x": Sequence(None)}, "x is a Sequence without an end. Set steps_per_epoch"),
        ({"x": loader(), "validation_data": Sequence(None)}, "Set validation_steps"),
        ({"x": (row for row in ())}, "x is a generator without a batch"),
        ({"x": Numberless()}, "x, batch 0, counted from 0: Data is expected"),
        ({"x": uneven((8, 6), (8, 5))}, "x, batch 1, counted from 0: Types and shapes of rows"),
        ({"x": iter([(X, Y), (X * np.nan, Y)])}, "x, batch 1, counted from 0: x is NaN .* in row 0"),
        ({"x": iter([(X, Y, None, None)])}, "x, batch 0, counted from 0: Data is expected to be in format"),
        ({"x": loader(), "validation_data": (X, Y[:3])}, "validation_data: .* x has 50 rows, y has 3 rows"),
        ({"x": X, "y": iter([Y])}, "y is a list_iterator, but fit accepts arrays"),
    ],
)
def test_batches_that_cannot_be_used_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit_here(tmp_path, get_regression(), **options)


def test_batches_of_different_size_are_cut_anew_and_a_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = fit_here(tmp_path, get_regression(), uneven((4, 6), (3, 6), (3, 6)), verbose=1)
    assert history.result.summary["steps"] == 3
    assert "all steps use the size of the first" in capsys.readouterr().out


@pytest.mark.rest
def test_the_seed_of_keras_is_that_of_the_run(tmp_path: Path) -> None:
    """Also for a model that its first batch builds, which has the weights of plain Keras."""

    def train(seed: int, fields: dict[str, Any] | None = None) -> tuple[Any, int]:
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        history = fit_here(tmp_path, model, X, Y, batch_size=ROWS, fields=fields)
        keras.utils.set_random_seed(seed)
        plain = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
        plain.compile("sgd", "mse")
        check_equal_histories(history, plain.fit(X, Y, batch_size=ROWS, verbose=0))
        return history.history, read_config(RunPaths(history.result.path)).seed

    try:
        runs = [train(1), train(2), train(1), train(1, {"seed": 7})]
    finally:
        library.global_state().set_global_attribute(library._RANDOM_SEED, None)
    assert runs[0] == runs[2] != runs[1]
    assert [seed for _, seed in runs] == [1, 2, 1, 7]


def test_one_batch_of_a_source_is_in_memory_at_a_time(tmp_path: Path) -> None:
    used = []

    def large() -> Iterator[Batch]:
        for _ in range(16):
            used.append(tracemalloc.get_traced_memory()[0])
            yield np.ones((64, 2048), np.float32), np.ones((64, 1), np.float32)

    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"train\.speed"):
            fit_here(tmp_path, get_regression(), large(), fields={"train.speed": 1})
    finally:
        tracemalloc.stop()
    assert used[-1] - used[0] < 4 * 64 * 2048 * 4
