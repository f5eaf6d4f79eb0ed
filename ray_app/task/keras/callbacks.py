"""Callbacks of Keras as fields of a configuration: what has a counterpart is mapped, and all else is refused.

Callbacks run between the steps of one process, and a run has no such process: workers come and go, and a lost step is
done again. So a callback becomes a setting of the run, or work at its end.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from ray_app.errors import ConfigError
from ray_app.storage.files import put_atomic, to_location
from ray_app.task.keras import library

_VALIDATION = "val_"
_RUN_NAME = "run.name"
_OBSERVER = (
    'Give fields={"observers": [...]}, classes of yours that the driver notifies of evaluations, checkpoints and the'
    " end of a run (docs/runs.md)"
)
_REFUSED = {
    "ReduceLROnPlateau": "The learning rate of a step must not depend on when an evaluation is done, so that a resume"
    " repeats it. Compile the model with a schedule, such as keras.optimizers.schedules.CosineDecay, or use"
    " EarlyStopping.",
    "LambdaCallback": f"{_OBSERVER}.",
    "RemoteMonitor": f"{_OBSERVER}, such as ray_app.Webhook.",
    "SwapEMAWeights": 'Give fields={"train.ema_decay": 0.999}: the average is evaluated and saved.',
    "OrbaxCheckpoint": "Use ModelCheckpoint.",
}
"""The callbacks of Keras without a counterpart, and what to use instead."""


@dataclass(frozen=True)
class CallbackPlan:
    """What a callback becomes.

    Args:
        text: What it becomes, for the user.
        fields: Fields of the configuration by their dotted names.
        checkpoint: The checkpoint with the weights that training ends with, if the callback decides that.
        schedule: Returns the learning rate of each epoch: a function of the epoch and the rate before.
        at_end: Called with the `ray_app.keras.History` after training.
        configured: What it becomes in a configuration, where that differs from `text`.
        refused: Why a configuration cannot have it, and what to use instead; "" if it can.
    """

    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    schedule: Callable[..., float] | None = None
    at_end: Callable[[Any], None] | None = None
    configured: str = ""
    refused: str = ""


def plan_callbacks(callbacks: Any) -> list[CallbackPlan]:
    """Returns what each callback becomes.

    Raises:
        ConfigError: One has no counterpart; two need different values of a field.
    """
    keras = library.import_keras()
    plans: list[CallbackPlan] = []
    origins: dict[str, tuple[Any, str]] = {}
    # Keras takes one callback without a list, too.
    for callback in keras.tree.flatten(callbacks or []):
        name = type(callback).__name__
        if type(callback) is not getattr(keras.callbacks, name, None):
            raise ConfigError(
                f"{name} is a callback of yours, and no process calls it after each step or epoch of a run."
                f" {_OBSERVER}; what happens in a step belongs to the model: compute_loss, metrics, layers."
            )
        if (advice := _REFUSED.get(name)) is not None:
            raise ConfigError(f"{name} has no counterpart in a run. {advice}")
        if (make := _PLANS.get(name)) is None:
            raise ConfigError(f"{name} is not known here; the callbacks with a counterpart are {', '.join(_PLANS)}.")
        plan = make(callback)
        for key, value in plan.fields.items():
            earlier, origin = origins.setdefault(key, (value, name))
            if earlier != value:
                raise ConfigError(
                    f"{origin} needs {key} = {earlier!r}, and {name} needs {value!r}; a run has one. Let both have the"
                    " same."
                )
        plans.append(plan)
    return plans


def plan_configuration(callbacks: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns the fields of a configuration that callbacks become, and a line for each callback.

    A configuration has no call of `fit`, so a callback cannot write a file at its end.

    Raises:
        ConfigError: See `plan_callbacks`; or a callback belongs to a call of `fit`.
    """
    fields: dict[str, Any] = {}
    plans = plan_callbacks(callbacks)
    for plan in plans:
        if plan.refused:
            raise ConfigError(plan.refused)
        # The task keeps them as JSON, which has no numbers of NumPy.
        fields |= {name: value.item() if hasattr(value, "item") else value for name, value in plan.fields.items()}
    # The configuration names the run.
    fields.pop(_RUN_NAME, None)
    return fields, [plan.configured or plan.text for plan in plans]


def _plan_early_stopping(callback: Any) -> CallbackPlan:
    _refuse_set(callback, baseline=None, start_from_epoch=0)
    # Keras stops after the first evaluation that is not better with a patience of 0, as with 1.
    fields = {"evaluate.patience": max(1, callback.patience), "evaluate.min_delta": abs(callback.min_delta)}
    text = f"EarlyStopping: evaluate.patience {fields['evaluate.patience']}; training ends with the best weights"
    # A run goes on while its last evaluations are compared, so that the weights of the stop are not kept.
    return CallbackPlan(text, fields | _monitored(callback), "best")


def _plan_model_checkpoint(callback: Any) -> CallbackPlan:
    path = callback.filepath
    if "{" in path:
        raise ConfigError(
            f"ModelCheckpoint has the filepath {path!r} with fields. Name one file; result.export(folder, 'step-500')"
            " writes the model of a certain checkpoint."
        )
    if callback.best is not None:
        raise ConfigError("ModelCheckpoint has initial_value_threshold, which has no counterpart. Leave it out.")
    checkpoint, target = "best" if callback.save_best_only else "newest", to_location(path)

    def write(history: Any) -> None:
        model = history.result.keras_model(checkpoint)
        with tempfile.TemporaryDirectory(prefix="ray_app-keras-") as folder:
            # Keras writes to disks only, and chooses the format by the end of the name.
            file = Path(folder) / Path(path).name
            (model.save_weights if callback.save_weights_only else model.save)(file)
            put_atomic(target, file.read_bytes())

    text = f"ModelCheckpoint: the {checkpoint} model is written to {path} at the end; the run has checkpoints meanwhile"
    monitored = _monitored(callback) if callback.save_best_only else {}
    return CallbackPlan(
        text,
        _save_fields(callback.save_freq) | monitored,
        at_end=write,
        configured=f"ModelCheckpoint: the run keeps its {checkpoint} checkpoint, and `ray-app export --run RUN --out"
        f" FOLDER{'' if checkpoint == 'best' else ' --checkpoint newest'}` writes its model",
    )


def _plan_backup(callback: Any) -> CallbackPlan:
    name = Path(callback.backup_dir).name
    return CallbackPlan(
        "BackupAndRestore: another call with the same name continues the run, by default the name of backup_dir",
        {_RUN_NAME: name, **_save_fields(callback.save_freq)},
        configured="BackupAndRestore: another start with the same run.name continues the run",
    )


def _plan_tensorboard(callback: Any) -> CallbackPlan:
    _refuse_set(callback, histogram_freq=0, write_images=False, embeddings_freq=0)
    steps = {} if callback.update_freq == "epoch" else {"tracking.every_steps": callback.update_freq}
    return CallbackPlan(
        f"TensorBoard: event files are in the run's folder tensorboard, and not in {callback.log_dir}",
        {"tracking.tensorboard": True, **steps},
    )


def _plan_csv(callback: Any) -> CallbackPlan:
    path = Path(callback.filename)

    def write(history: Any) -> None:
        header, *rows = _table_lines(history, callback.sep)
        has_more = callback.append and path.exists()
        before = path.read_bytes().decode().splitlines(keepends=True) if has_more else []
        # A run that was continued has the epochs of its earlier calls again.
        written = max(count for count in range(len(rows) + 1) if before[len(before) - count :] == rows[:count])
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if callback.append else "w", newline="") as file:
            file.writelines([*([] if before else [header]), *rows[written:]])

    return CallbackPlan(
        f"CSVLogger: {path} is written at the end",
        at_end=write,
        refused="CSVLogger writes a file at the end of a call of ray_app.keras.fit. Leave it out of a configuration:"
        " the values of each epoch are in the report, in MLflow, and in Result.epochs() of Python.",
    )


def _table_lines(history: Any, separator: str) -> list[str]:
    """Returns the lines of a CSV file with the values of each epoch, and the names before them."""
    text = StringIO()
    names = ["epoch", *sorted(history.history)]
    writer = csv.DictWriter(text, names, restval="NA", delimiter=separator)
    writer.writeheader()
    complete = {name: values for name, values in history.history.items() if len(values) == len(history.epoch)}
    for epoch, values in enumerate(history.result.epochs()):
        writer.writerow({"epoch": epoch, **values, **{name: one[epoch] for name, one in complete.items()}})
    return text.getvalue().splitlines(keepends=True)


def _plan_schedule(callback: Any) -> CallbackPlan:
    return CallbackPlan(
        "LearningRateScheduler: called for all epochs before the start",
        schedule=callback.schedule,
        refused="LearningRateScheduler belongs to a call of ray_app.keras.fit. For a configuration compile the model"
        " with a schedule, such as keras.optimizers.schedules.PiecewiseConstantDecay, or name one of torch in"
        " schedule.",
    )


_PLANS: dict[str, Callable[[Any], CallbackPlan]] = {
    "EarlyStopping": _plan_early_stopping,
    "ModelCheckpoint": _plan_model_checkpoint,
    "BackupAndRestore": _plan_backup,
    "TensorBoard": _plan_tensorboard,
    "CSVLogger": _plan_csv,
    "LearningRateScheduler": _plan_schedule,
    "TerminateOnNaN": lambda callback: CallbackPlan("TerminateOnNaN: every run does that"),
    "History": lambda callback: CallbackPlan(
        "History: fit returns it", configured="History: the report and MLflow have the values of each epoch"
    ),
    "ProgbarLogger": lambda callback: CallbackPlan("ProgbarLogger: a run shows its progress"),
}
"""What each callback with a counterpart becomes."""


def _refuse_set(callback: Any, **defaults: Any) -> None:
    """Raises ConfigError for arguments of a callback that are not at their defaults."""
    for name, default in defaults.items():
        if (value := getattr(callback, name)) != default:
            raise ConfigError(f"{type(callback).__name__} has {name} = {value!r}, without a counterpart. Leave it out.")


def _monitored(callback: Any) -> dict[str, Any]:
    """Returns the fields with the metric that decides."""
    monitor = callback.monitor
    if not monitor.startswith(_VALIDATION):
        raise ConfigError(
            f"{type(callback).__name__} monitors {monitor!r} of the training rows; a run decides by its evaluations."
            f" Monitor {_VALIDATION}{monitor}, and give validation_data."
        )
    mode = {} if callback.mode == "auto" else {"evaluate.mode": callback.mode}
    return {"evaluate.metric": monitor.removeprefix(_VALIDATION), **mode}


def _save_fields(save_freq: int | str) -> dict[str, Any]:
    return {"checkpoint.every_steps": save_freq} if isinstance(save_freq, int) else {}
