"""Networks of the guides in docs/from-tf-distribute.md, programs with `ray_app.keras`, and the loop of docs/loop.md."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from rich.console import Console

from ray_app import ingest_arrays, load_config, run_training
from ray_app.keras import MirroredStrategy, MultiWorkerMirroredStrategy, OneDeviceStrategy, fit
from ray_app.task.keras import make_module
from ray_app.task.keras.library import import_keras
from tests.support import keras_programs
from tests.support.pages import blocks
from tests.support.paths import ROOT

keras = import_keras()
Fit = Callable[..., Any]


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


# --- The guides' programs: the lines of `fit` get arrays in place of a `tf.data.Dataset`, and all rows at once, so that
# their order does not count.


def train_on_several_gpus(fit_model: Fit, scope: Callable[[], AbstractContextManager[Any]]) -> tuple[Any, Any, Any]:
    """Trains the network of Keras' guide in a scope, with validation data, and evaluates it on test rows."""
    rng = np.random.default_rng(0)
    x, y = rng.random((96, 784), dtype=np.float32), np.arange(96).astype("float32") % 10
    with scope():
        model = keras_programs.get_dense()
    history = fit_model(model, x[:64], y[:64], batch_size=64, epochs=2, validation_data=(x[64:80], y[64:80]))
    return history, model, model.evaluate(x[80:], y[80:], verbose=0)


def train_on_several_workers(fit_model: Fit, scope: Callable[[], AbstractContextManager[Any]]) -> tuple[Any, Any, Any]:
    """TensorFlow's tutorial: a batch for each worker, a number of steps in each epoch, and a model that is saved."""
    per_worker_batch_size, num_workers = 32, 2
    x, y = np.random.default_rng(0).random((64, 28, 28), dtype=np.float32), np.arange(64) % 10
    with scope():
        multi_worker_model = keras_programs.get_tutorial()
    options = {"epochs": 3, "steps_per_epoch": 1, "batch_size": per_worker_batch_size * num_workers}
    history = fit_model(multi_worker_model, x, y, **options)
    return history, multi_worker_model, multi_worker_model.predict(x[:5], verbose=0)


def train_on_one_device(fit_model: Fit, scope: Callable[[], AbstractContextManager[Any]]) -> tuple[Any, Any, Any]:
    """TensorFlow's page on `tf.distribute`: one weight, and arrays of NumPy."""
    with scope():
        model = keras_programs.get_linear()
    inputs, targets = np.ones((100, 1)), np.ones((100, 1))
    history = fit_model(model, inputs, targets, epochs=2, batch_size=100)
    return history, model, model.evaluate(inputs, targets, verbose=0)


@pytest.mark.rest
@pytest.mark.parametrize(
    ("program", "strategy"),
    [
        (train_on_several_gpus, lambda: MirroredStrategy(["cpu:0", "cpu:1"])),
        (train_on_several_workers, lambda: MultiWorkerMirroredStrategy(workers=2)),
        (train_on_one_device, lambda: OneDeviceStrategy("/cpu:0")),
    ],
)
def test_the_program_of_a_guide_has_the_results_of_keras(
    tmp_path: Path, program: Any, strategy: Callable[[], Any]
) -> None:
    """It trains in the calling process with the strategy's replicas, of which the workers do not change a bit."""
    fields = {"run.storage_path": str(tmp_path), "tracking.enabled": False, "train.strategy": "single"}
    fields |= {"scaling.max_workers": 1}
    fitted = partial(fit, verbose=0, fields=fields)
    results = []
    for fit_model in (fitted, lambda model, *rows, **options: model.fit(*rows, verbose=0, **options)):
        keras.utils.set_random_seed(1)
        results.append(program(fit_model, strategy().scope))
    (history, model, outputs), (expected_history, expected, expected_outputs) = results
    assert history.history.keys() == expected_history.history.keys()
    for name, values in history.history.items():
        np.testing.assert_allclose(values, expected_history.history[name], 1e-5, 1e-6, err_msg=name)
    for one, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, 1e-4, 1e-6)
    np.testing.assert_allclose(outputs, expected_outputs, 1e-4, 1e-6)


def test_the_custom_loop_of_the_page_has_the_losses_of_a_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {block.argument: block.text for block in blocks(ROOT / "docs" / "loop.md") if block.mark == "file"}
    initializer = ", kernel_initializer=keras.initializers.GlorotUniform(seed=1))"
    script = files["keras_script.py"].replace('"relu")', f'"relu"{initializer}').replace("(10)", f"(10{initializer}")
    (tmp_path / "keras_script.py").write_text(script.replace("Dropout(0.1)", "Dropout(0.0)"))
    (tmp_path / "page_script.py").write_text(files["script.py"])
    monkeypatch.syspath_prepend(tmp_path)
    fields = yaml.safe_load(files["train.yaml"].replace("script.", "page_script."))
    module = {"class_path": "ray_app.task.keras.make_module", "init_args": {"model": "keras_script.get_model"}}
    fields["task"]["init_args"]["module"] = module
    fields["data"] = {"path": str(ROOT / fields["data"]["path"]), "global_batch_size": 1438}
    fields["train"], fields["scaling"] = {"epochs": 3, "strategy": "single"}, {"logical_workers": 2}
    run = {"run__storage_path": str(tmp_path), "tracking__enabled": False}
    result = run_training(load_config(**fields, **run), Console(file=StringIO()))

    script_module = importlib.import_module("page_script")
    table = pq.read_table(ROOT / "datasets" / "digits" / "train")
    pixels = np.frombuffer(b"".join(table["image"].to_pylist()), np.uint8).reshape(-1, 8, 8, 1)
    rows = {"image": torch.from_numpy(pixels / np.float32(255)), "label": torch.tensor(table["label"].to_pylist())}
    model, losses = importlib.import_module("keras_script").get_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
    for _ in range(3):
        means = script_module.measured(model, rows)
        optimizer.zero_grad()
        means["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append((means["loss"].item(), means["accuracy"].item()))
    recorded = [(record.loss, record.metrics["accuracy"]) for record in result.metrics()]
    np.testing.assert_allclose(recorded, losses, 1e-5)


def test_the_model_of_a_loop_has_first_weights_that_the_seed_of_torch_decides() -> None:
    states = []
    for python_seed in range(2):
        random.seed(python_seed)
        torch.manual_seed(3)
        states.append(make_module("tests.support.keras_programs.get_uncompiled").state_dict())
    assert states[0].keys() == {"dense/kernel", "dense/bias"}
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    torch.manual_seed(4)
    other = make_module("tests.support.keras_programs.get_uncompiled").state_dict()
    assert not torch.equal(states[0]["dense/kernel"], other["dense/kernel"])
