"""Callbacks of Keras: what they become in a configuration, and what is refused with what to use instead."""

from __future__ import annotations

from typing import Any

import pytest

from ray_app.errors import ConfigError
from ray_app.keras.callbacks import make_rates, plan_callbacks
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


class Printer(callbacks.Callback):
    """A callback of a user."""


class Patient(callbacks.EarlyStopping):
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


def test_all_callbacks_of_keras_are_mapped_or_refused_by_name() -> None:
    """A new version of Keras may bring one that nothing here names."""
    from ray_app.keras.callbacks import _PLANS, _REFUSED

    abstract = {"Callback", "CallbackList", "BackupAndRestore"}
    names = {name for name in dir(callbacks) if isinstance(getattr(callbacks, name), type)}
    assert names - abstract - _PLANS.keys() - _REFUSED.keys() == set()


def test_the_rates_of_a_schedule_are_those_of_each_epoch() -> None:
    assert make_rates(lambda epoch, rate: rate / 2 if epoch else rate, 0.5, 3) == [0.5, 0.25, 0.125]
    assert make_rates(lambda epoch: 1.0 / (epoch + 1), 0.5, 2) == [1.0, 0.5]
    with pytest.raises(ConfigError, match="must return a float"):
        make_rates(lambda epoch, rate: "fast", 0.5, 1)
