"""Callbacks of Keras in `ray_app.keras.fit` beside `Model.fit`: what they see, decide and write, also over a resume."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_app import load_config, run_training
from ray_app.checkpoint.store import CheckpointStore
from ray_app.errors import ConfigError, NonFiniteError
from ray_app.keras import evaluate
from ray_app.runlog.output import TextConsole
from ray_app.runlog.paths import RunPaths
from ray_app.task.keras.library import import_keras, program_session
from tests.support import keras_programs
from tests.support.keras_fits import fit_here
from tests.support.quick_cases import only_quick

keras = import_keras()
callbacks = keras.callbacks
RTOL, ATOL = 1e-5, 1e-6
ROWS = 60


def rows() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.random((ROWS, 8, 8, 1), dtype=np.float32) * 255, np.arange(ROWS) % 5


def get_model() -> Any:
    with program_session(None):
        model = keras_programs.get_plain()
    weights = np.random.default_rng(1)
    model.set_weights([weights.normal(0, 0.05, w.shape) for w in model.get_weights()])
    return model


class Noted(callbacks.Callback):  # type: ignore[name-defined]
    """Notes every call with its logs, and the weights at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def _note(self, name: str, *facts: Any) -> None:
        *number, logs = facts
        self.calls.append((name, *number, {key: round(value, 4) for key, value in sorted((logs or {}).items())}))

    def on_train_begin(self, logs: Any = None) -> None:
        self._note("train begins", self.params["epochs"], self.params["steps"], logs)

    def on_train_end(self, logs: Any = None) -> None:
        self._note("train ends", logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._note("epoch begins", epoch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._note("epoch ends", epoch, round(float(np.abs(self.model.get_weights()[0]).sum()), 3), logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._note("batch begins", batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._note("batch ends", batch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        self._note("test begins", logs)

    def on_test_end(self, logs: Any = None) -> None:
        self._note("test ends", logs)


class Shrinking(callbacks.Callback):  # type: ignore[name-defined]
    """Changes the weights after each epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.set_weights([weight * 0.9 for weight in self.model.get_weights()])


class Interrupting(callbacks.Callback):  # type: ignore[name-defined]
    """Ends the process's training with an error."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self._at = epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == self._at:
            raise RuntimeError("interrupted")


def decide() -> list[Any]:
    """Callbacks that keep a state of their own, and decide by it."""
    return [
        callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.2, factor=0.5),
        callbacks.EarlyStopping("val_loss", patience=3, min_delta=0.2, restore_best_weights=True),
        Shrinking(),
    ]


CASES: dict[str, Callable[[Path], list[Any]]] = {
    "calls and logs": lambda folder: [Noted()],
    "plateau": lambda folder: [callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.2, factor=0.5)],
    "last weights": lambda folder: [callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.5)],
    "best weights": lambda folder: [
        callbacks.EarlyStopping("val_loss", patience=2, min_delta=0.5, restore_best_weights=True)
    ],
    "baseline and start": lambda folder: [
        callbacks.EarlyStopping("loss", baseline=0.1, start_from_epoch=2, patience=2)
    ],
    "rates": lambda folder: [callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch else 0.01)],
    "a rate at the start": lambda folder: [Starting()],
    "weights": lambda folder: [Shrinking(), Noted()],
    "lambdas": lambda folder: [callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(own=epoch * 1.0))],
    "files": lambda folder: [
        callbacks.CSVLogger(folder / "log.csv"),
        callbacks.ModelCheckpoint(folder / "{epoch}-{val_loss:.1f}.keras"),
        callbacks.ModelCheckpoint(folder / "best.weights.h5", "loss", save_best_only=True, save_weights_only=True),
    ],
}


@pytest.mark.parametrize("case", only_quick(CASES, "plateau", "best weights", "weights"))
def test_callbacks_see_and_decide_what_they_do_in_keras(tmp_path: Path, case: str) -> None:
    x, y = rows()
    options = {"batch_size": ROWS, "epochs": 5, "validation_data": (x[:20], y[:20])}
    sides = []
    for side in ("ours", "theirs"):
        (folder := tmp_path / side).mkdir()
        model, used = get_model(), CASES[case](folder)
        run = fit_here(tmp_path, model, x, y, callbacks=used, **options) if side == "ours" else None
        history = run if run is not None else model.fit(x, y, verbose=0, callbacks=used, **options)
        sides.append((model, used, history, folder))
    (ours, our_calls, history, _), (theirs, their_calls, expected, _) = sides
    assert list(history.history) == list(expected.history)
    assert history.epoch == expected.epoch
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, 1e-4, ATOL, err_msg=name)
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, 1e-4, 1e-5)
    assert history.keras_model().get_weights()[0] == pytest.approx(ours.get_weights()[0])
    for noted, expected_calls in zip(our_calls, their_calls, strict=True):
        if isinstance(noted, Noted):
            check_equal_calls(noted.calls, expected_calls.calls)
    files = [{file.name: file for file in folder.iterdir()} for *_, folder in sides]
    assert files[0].keys() == files[1].keys()
    for name in files[0]:
        if name.endswith(".keras"):
            saved = [keras.saving.load_model(part[name]).get_weights() for part in files]
            np.testing.assert_allclose(saved[0][0], saved[1][0], 1e-4, 1e-5)
        elif name.endswith(".csv"):
            tables = [np.genfromtxt(part[name], delimiter=",", names=True) for part in files]
            assert tables[0].dtype.names == tables[1].dtype.names
            np.testing.assert_allclose(tables[0].tolist(), tables[1].tolist(), 1e-4)


def check_equal_calls(ours: list[Any], theirs: list[Any]) -> None:
    assert [call[:-1] for call in ours if call[0] != "epoch ends"] == [
        call[:-1] for call in theirs if call[0] != "epoch ends"
    ]
    for one, other in zip(ours, theirs, strict=True):
        assert one[-1].keys() == other[-1].keys(), one[0]
        assert list(one[-1].values()) == pytest.approx(list(other[-1].values()), 1e-3, 1e-4)
        if one[0] == "epoch ends":
            assert one[1:-1] == pytest.approx(other[1:-1], 1e-4)


def test_batches_get_the_values_of_metrics_that_are_no_means(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x, y = generator.random((ROWS, 6), dtype=np.float32), generator.integers(0, 2, ROWS)
    calls = []
    for side in ("ours", "theirs"):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, "sigmoid", kernel_initializer="ones")])
        model.compile("sgd", "binary_crossentropy", metrics=[keras.metrics.AUC(), keras.metrics.Recall()])
        options: dict[str, Any] = {"batch_size": 20, "epochs": 2, "shuffle": False, "callbacks": [noted := Noted()]}
        _ = fit_here(tmp_path, model, x, y, **options) if side == "ours" else model.fit(x, y, verbose=0, **options)
        calls.append(noted.calls)
    values = [[call[-1] for call in one if call[0] == "batch ends"] for one in calls]
    assert len(values[0]) == len(values[1]) == 6
    for ours, theirs in zip(*values, strict=True):
        assert sorted(ours.values()) == pytest.approx(sorted(theirs.values()), 1e-3)


@pytest.mark.rest
def test_an_interrupted_run_goes_on_with_the_callbacks_as_they_were(tmp_path: Path) -> None:
    """Also their state, which a new process has not, decides when the rate falls and when training stops."""
    x, y = rows()
    options: dict[str, Any] = {"batch_size": 20, "validation_data": (x[:20], y[:20]), "name": "run"}
    whole = fit_here(tmp_path / "whole", get_model(), x, y, epochs=8, callbacks=decide(), **options)
    assert 3 < len(whole.epoch) < 8, "it stops early"
    assert len(set(whole.history["learning_rate"])) > 2, "the rate falls"
    for epoch in (1, 3):
        with pytest.raises(RuntimeError, match="interrupted"):
            fit_here(tmp_path, get_model(), x, y, epochs=8, callbacks=[*decide(), Interrupting(epoch)], **options)
    continued = fit_here(tmp_path, get_model(), x, y, epochs=8, callbacks=decide(), **options)
    assert continued.history == whole.history
    assert continued.result.summary["params_digest"] == whole.result.summary["params_digest"]
    assert continued.result.status == whole.result.status == "stopped_early"


@pytest.mark.rest
def test_a_resume_from_an_older_checkpoint_repeats_the_decisions_and_asks_no_callback(tmp_path: Path) -> None:
    x, y = rows()
    options: dict[str, Any] = {"batch_size": 20, "name": "run", "fields": {"checkpoint.keep_last": 10}}
    whole = fit_here(tmp_path / "whole", get_model(), x, y, epochs=4, callbacks=decide_without_data(), **options)
    fit_here(tmp_path, get_model(), x, y, epochs=3, callbacks=decide_without_data(), **options)
    paths = RunPaths(tmp_path / "run")
    oldest, *newer = CheckpointStore(paths).commits()
    assert oldest.step == 3
    for commit in newer:
        shutil.rmtree(str(paths.checkpoint(commit.step, commit.fence)))
    noted = Noted()
    again = fit_here(tmp_path, get_model(), x, y, epochs=4, callbacks=[*decide_without_data(), noted], **options)
    assert again.result.summary["params_digest"] == whole.result.summary["params_digest"]
    assert [call[1] for call in noted.calls if call[0] == "epoch ends"] == [3], "the others have decided before"


class Starting(callbacks.Callback):  # type: ignore[name-defined]
    def on_train_begin(self, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.02


def test_a_function_gives_the_rate_of_each_epoch(tmp_path: Path) -> None:
    rate, (x, y) = 0.05, rows()

    def halve(epoch: int, logs: Any) -> None:
        nonlocal rate
        rate /= 2

    options = {"batch_size": ROWS, "epochs": 3, "callbacks": [callbacks.LambdaCallback(on_epoch_end=halve)]}
    ours, theirs = get_model(), get_model()
    for model in (ours, theirs):
        model.compile(keras.optimizers.SGD(lambda: rate), "sparse_categorical_crossentropy")
    fit_here(tmp_path, ours, x, y, **options)
    rate = 0.05
    theirs.fit(x, y, verbose=0, **options)
    assert ours.get_weights()[0] == pytest.approx(theirs.get_weights()[0], 1e-4)


def decide_without_data() -> list[Any]:
    return [callbacks.LearningRateScheduler(lambda epoch, rate: rate / (epoch + 1)), Shrinking()]


class Changing(callbacks.Callback):  # type: ignore[name-defined]
    """Changes the training after a batch."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self._change = change

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            self._change(self.model)


def set_rate(model: Any) -> None:
    model.optimizer.learning_rate = 0.5


@pytest.mark.parametrize("change", [set_rate, lambda model: model.set_weights(model.get_weights())])
def test_a_change_after_a_batch_is_refused_with_the_callback(tmp_path: Path, change: Callable[[Any], None]) -> None:
    """Other workers would not make it at the same step."""
    x, y = rows()
    with pytest.raises(ConfigError, match=r"Changing has changed weights, .* after batch 1 of epoch 1"):
        fit_here(tmp_path, get_model(), x, y, batch_size=20, callbacks=Changing(change))


def stop(model: Any) -> None:
    model.stop_training = True


def test_a_callback_stops_this_process_within_an_epoch(tmp_path: Path) -> None:
    x, y = rows()
    noted = Noted()
    used = [Changing(stop), noted]
    history = fit_here(tmp_path, get_model(), x, y, batch_size=20, epochs=3, validation_data=(x, y), callbacks=used)
    assert history.result.summary["steps"] == 2
    assert history.result.status == "stopped_early"
    assert history.epoch == [0]
    assert set(history.history) == {"accuracy", "loss", "val_accuracy", "val_loss"}
    assert [call[0] for call in noted.calls][-4:] == ["test begins", "test ends", "epoch ends", "train ends"]


def test_a_loss_that_is_no_number_ends_training_as_its_callback_says(tmp_path: Path) -> None:
    x, y = rows()

    def get_broken() -> Any:
        model = get_model()
        model.set_weights([np.full(weight.shape, np.inf) for weight in model.get_weights()])
        return model

    with pytest.raises(NonFiniteError):
        fit_here(tmp_path, get_broken(), x, y)
    with pytest.raises(RuntimeError, match="NaN or Inf loss encountered at batch 0"):
        fit_here(tmp_path, get_broken(), x, y, callbacks=callbacks.TerminateOnNaN(raise_error=True))
    noted = Noted()
    used = {"validation_data": (x, y), "callbacks": [callbacks.TerminateOnNaN(), noted]}
    history = fit_here(tmp_path, get_broken(), x, y, epochs=2, **used)
    names = ("accuracy", "loss", "val_accuracy", "val_loss")
    np.testing.assert_equal(history.history, {name: [np.nan] for name in names})
    assert noted.calls[-1][0] == "train ends"


def test_targets_may_be_infinite_where_a_callback_ends_training_at_them(tmp_path: Path) -> None:
    x, y = np.ones((4, 1), np.float32), np.array([[1], [1], [1], [np.inf]], np.float32)
    ends = []
    for fit in (keras.Model.fit, partial(fit_here, tmp_path)):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        options = {"batch_size": 1, "epochs": 3, "shuffle": False, "verbose": 0}
        history = fit(model, x, y, callbacks=callbacks.TerminateOnNaN(), **options).history
        ends.append([np.isfinite(loss) for loss in history["loss"]])
    assert ends == [[False], [False]]
    with pytest.raises(ConfigError, match="y is NaN or infinite as float32 in row 3"):
        fit_here(tmp_path, model, x, y)
    with pytest.raises(ConfigError, match="y is NaN or infinite as float32 in row 3"):
        fit_here(tmp_path, model, x, np.where(np.isinf(y), np.nan, y), callbacks=callbacks.TerminateOnNaN())


def test_a_configuration_names_callbacks_that_run_alike(tmp_path: Path) -> None:
    from ray_app import ingest_arrays

    x, y = rows()
    ingest_arrays(str(tmp_path / "data"), x=x.astype(np.uint8), y=y)
    programs = "tests.support.keras_programs"
    config = load_config(
        task={
            "class_path": "ray_app.task.keras.KerasTask",
            "init_args": {
                "model": f"{programs}.get_plain",
                "inputs": "image",
                "target": "label",
                "callbacks": f"{programs}.get_callbacks",
            },
        },
        data__path=str(tmp_path / "data"),
        data__eval_path=str(tmp_path / "data"),
        data__global_batch_size=20,
        evaluate__where="workers",
        train__strategy="single",
        train__epochs=4,
        run__storage_path=str(tmp_path / "runs"),
        tracking__enabled=False,
    )
    result = run_training(config, TextConsole(quiet=True))
    path = str(tmp_path / "data")
    options: dict[str, Any] = {"batch_size": 20, "epochs": 4, "validation_data": path}
    history = fit_here(tmp_path, keras_programs.get_plain, path, callbacks=keras_programs.get_callbacks(), **options)
    assert result.summary["params_digest"] == history.result.summary["params_digest"]
    assert [record.lr for record in result.metrics()][::3] == pytest.approx(history.history["learning_rate"])


@pytest.mark.rest
def test_another_fit_with_a_backup_continues_what_was_interrupted(tmp_path: Path) -> None:
    x, y = rows()
    whole = fit_here(tmp_path / "whole", get_model(), x, y, batch_size=20, epochs=3)
    backup = tmp_path / "of keras" / "backup"
    used = [callbacks.BackupAndRestore(backup), Interrupting(2)]
    with pytest.raises(RuntimeError, match="interrupted"):
        fit_here(tmp_path, get_model(), x, y, batch_size=20, epochs=3, callbacks=used)
    for number in range(2):
        used = [callbacks.BackupAndRestore(backup)]
        history = fit_here(tmp_path, get_model(), x, y, batch_size=20, epochs=3, callbacks=used)
        assert history.result.summary["params_digest"] == whole.result.summary["params_digest"]
        assert history.result.path.name == ("backup", "backup-2")[number], "a finished training begins again"


def test_evaluations_use_the_average_and_training_ends_with_it(tmp_path: Path) -> None:
    x, y = rows()
    models = [get_model(), get_model()]
    for model in models:
        optimizer = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.9)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    options: dict[str, Any] = {"batch_size": ROWS, "epochs": 3, "validation_data": (x, y), "verbose": 0}
    history = fit_here(tmp_path, models[0], x, y, callbacks=callbacks.SwapEMAWeights(), **options)
    expected = models[1].fit(x, y, callbacks=callbacks.SwapEMAWeights(), **options)
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(history.history[name], expected.history[name], 1e-4)
    assert abs(history.history["val_loss"][1] - history.history["loss"][2]) > 1e-3, "the average is another"
    for one, other in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_allclose(one, other, 1e-4, 1e-5)
    with pytest.raises(ConfigError, match=r"Use history\.model\.evaluate"):
        evaluate(history, x, y)


def test_lines_of_epochs_have_the_values_of_keras(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = rows()
    history = fit_here(
        tmp_path, get_model(), x, y, batch_size=20, epochs=2, validation_split=0.5, verbose=2, initial_epoch=0
    )
    lines = capsys.readouterr().out.splitlines()
    values = [f"{name}: {history.history[name][1]:.4f}" for name in ("accuracy", "loss", "val_accuracy", "val_loss")]
    assert len(lines) == 2
    assert lines[1].startswith("Epoch 2/2 - ")
    assert lines[1].endswith(" - ".join(["", *values]))


def test_the_first_epoch_has_its_number_and_a_new_run_trains_the_rest(tmp_path: Path) -> None:
    x, y = rows()
    noted = Noted()
    options: dict[str, Any] = {"batch_size": 20, "name": None}
    history = fit_here(tmp_path, get_model(), x, y, epochs=4, initial_epoch=2, callbacks=noted, **options)
    assert history.epoch == [2, 3]
    assert [call[1] for call in noted.calls if call[0] == "epoch begins"] == [2, 3]
    options["name"] = "run"
    whole = fit_here(tmp_path / "whole", get_model(), x, y, epochs=3, **options)
    fit_here(tmp_path, get_model(), x, y, epochs=2, **options)
    continued = fit_here(tmp_path, get_model(), x, y, epochs=3, initial_epoch=2, **options)
    assert continued.epoch == [2]
    assert continued.history["loss"] == whole.history["loss"][2:]
