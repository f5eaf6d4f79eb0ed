"""Callbacks of Keras: what they become in a configuration, and what is refused with what to use instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from ray_app.driver.result import Result
from ray_app.errors import ConfigError
from ray_app.keras.fit import History, make_rates
from ray_app.task.keras.callbacks import plan_callbacks, plan_configuration
from ray_app.task.keras.library import import_keras

callbacks = import_keras().callbacks

MAPPED: list[tuple[Any, dict[str, Any]]] = [
    (
        callbacks.EarlyStopping(patience=3, min_delta=0.1),
        {"evaluate.patience": 3, "evaluate.min_delta": 0.1, "evaluate.metric": "loss"},
    ),
    (
        callbacks.EarlyStopping("val_accuracy", mode="max"),
        {
            "evaluate.patience": 1,
            "evaluate.min_delta": 0,
            "evaluate.metric": "accuracy",
            "evaluate.mode": "max",
        },
    ),
    (callbacks.ModelCheckpoint("m.keras", save_freq=50), {"checkpoint.every_steps": 50}),
    (callbacks.ModelCheckpoint("m.keras", "val_auc", save_best_only=True), {"evaluate.metric": "auc"}),
    (callbacks.BackupAndRestore("/tmp/backup", save_freq=7), {"run.name": "backup", "checkpoint.every_steps": 7}),
    (callbacks.TensorBoard(update_freq="batch"), {"tracking.tensorboard": True, "tracking.every_steps": 1}),
    (callbacks.TensorBoard(), {"tracking.tensorboard": True}),
    (callbacks.CSVLogger("log.csv"), {}),
    (callbacks.LearningRateScheduler(lambda epoch: 0.1), {}),
    (callbacks.TerminateOnNaN(), {}),
    (callbacks.History(), {}),
    (callbacks.ProgbarLogger(), {}),
]


@pytest.mark.parametrize(("callback", "fields"), MAPPED)
def test_a_callback_with_a_counterpart_becomes_fields_and_a_line(callback: Any, fields: dict[str, Any]) -> None:
    [plan] = plan_callbacks([callback])
    assert plan.fields == fields
    assert plan.text.startswith(f"{type(callback).__name__}: ")
    assert plan.checkpoint == ("best" if isinstance(callback, callbacks.EarlyStopping) else None)


def test_one_callback_needs_no_list() -> None:
    assert len(plan_callbacks(callbacks.TerminateOnNaN())) == 1


class FakeResult:
    """A run of some epochs, with a model that writes its name."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses

    def epochs(self) -> list[dict[str, float]]:
        return [{"loss": loss} for loss in self.losses]

    def keras_model(self, checkpoint: str) -> Any:
        class Model:
            def save(self, file: Path) -> None:
                file.write_text(checkpoint)

        return Model()


def finish(callback: Any, losses: list[float]) -> None:
    """Does what a callback becomes at the end of a run."""
    [plan] = plan_callbacks([callback])
    assert plan.at_end is not None
    result = cast(Result, FakeResult(losses))
    plan.at_end(History({"loss": losses}, list(range(len(losses))), result))


def test_a_run_that_is_continued_adds_its_new_epochs_to_a_table(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    for losses in ([3.0], [3.0, 2.0], [9.0]):
        finish(callbacks.CSVLogger(file, append=True), losses)
    assert file.read_text().split() == ["epoch,loss", "0,3.0", "1,2.0", "0,9.0"]
    finish(callbacks.CSVLogger(file), [1.0])
    assert file.read_text().split() == ["epoch,loss", "0,1.0"]


def test_a_model_is_written_to_a_bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keras itself would write to disks only."""
    written = {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "ray_app.task.keras.callbacks.put_atomic", lambda path, data: written.__setitem__(str(path), data.decode())
    )
    finish(callbacks.ModelCheckpoint("s3://bucket/models/m.keras"), [1.0])
    assert written == {"s3://bucket/models/m.keras": "newest"}
    assert list(tmp_path.iterdir()) == []


class Printer(callbacks.Callback):  # type: ignore[name-defined]
    """A callback of a user."""


class Patient(callbacks.EarlyStopping):  # type: ignore[name-defined]
    """A callback of Keras with other behaviour."""


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ([callbacks.ReduceLROnPlateau()], "keras.optimizers.schedules.CosineDecay"),
        ([callbacks.LambdaCallback(on_epoch_end=print)], "observers"),
        ([callbacks.RemoteMonitor()], "ray_app.Webhook"),
        ([callbacks.SwapEMAWeights()], "train.ema_decay"),
        ([Printer()], "Printer is a callback of yours.*observers"),
        ([Patient()], "Patient is a callback of yours"),
        ([print], "callback of yours"),
        ([callbacks.EarlyStopping("loss")], "Monitor val_loss"),
        ([callbacks.EarlyStopping(baseline=0.5)], "baseline = 0.5"),
        ([callbacks.EarlyStopping(start_from_epoch=2)], "start_from_epoch = 2"),
        ([callbacks.ModelCheckpoint("{epoch}.keras")], "Name one file"),
        ([callbacks.ModelCheckpoint("m.keras", initial_value_threshold=0.5)], "initial_value_threshold"),
        ([callbacks.TensorBoard(histogram_freq=1)], "histogram_freq = 1"),
        (
            [callbacks.EarlyStopping("val_loss"), callbacks.ModelCheckpoint("m.keras", "val_auc", save_best_only=True)],
            "EarlyStopping needs evaluate.metric = 'loss', and ModelCheckpoint needs 'auc'",
        ),
    ],
)
def test_a_callback_without_a_counterpart_is_refused(refused: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_callbacks(refused)


CONFIGURED = [
    callbacks.EarlyStopping("val_accuracy", patience=4),
    callbacks.ModelCheckpoint("m.keras", "val_accuracy", save_best_only=True, save_freq=50),
    callbacks.BackupAndRestore("/tmp/backup"),
    callbacks.TensorBoard(),
    callbacks.TerminateOnNaN(),
]


def test_callbacks_of_a_configuration_become_fields_without_the_name_of_the_run() -> None:
    fields, lines = plan_configuration(CONFIGURED)
    assert fields == {
        "evaluate.patience": 4,
        "evaluate.min_delta": 0,
        "evaluate.metric": "accuracy",
        "checkpoint.every_steps": 50,
        "tracking.tensorboard": True,
    }
    assert [line.partition(":")[0] for line in lines] == [type(callback).__name__ for callback in CONFIGURED]
    assert "ray-app export" in lines[1]


@pytest.mark.parametrize(
    ("callback", "expected"),
    [
        (callbacks.CSVLogger("log.csv"), "Leave it out of a configuration"),
        (callbacks.LearningRateScheduler(lambda epoch: 0.1), "compile the model with a schedule"),
        (callbacks.ReduceLROnPlateau(), "no counterpart in a run"),
    ],
)
def test_callbacks_that_need_a_call_of_fit_are_refused_in_a_configuration(callback: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        plan_configuration([callback])


def test_all_callbacks_of_keras_are_mapped_or_refused_by_name() -> None:
    """A new version of Keras may bring one that nothing here names."""
    from ray_app.task.keras.callbacks import _PLANS, _REFUSED

    abstract = {"Callback", "CallbackList", "BackupAndRestore"}
    names = {name for name in dir(callbacks) if isinstance(getattr(callbacks, name), type)}
    assert names - abstract - _PLANS.keys() - _REFUSED.keys() == set()


def test_the_rates_of_a_schedule_are_those_of_each_epoch() -> None:
    assert make_rates(lambda epoch, rate: rate / 2 if epoch else rate, 0.5, 3) == [0.5, 0.25, 0.125]
    assert make_rates(lambda epoch: 1.0 / (epoch + 1), 0.5, 2) == [1.0, 0.5]
    with pytest.raises(ConfigError, match="must return a float"):
        make_rates(lambda epoch, rate: "fast", 0.5, 1)
