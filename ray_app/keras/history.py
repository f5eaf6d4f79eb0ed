"""The course of a run of a Keras program: what `fit` returns, and the lines that it prints."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray_app.driver.result import Result
from ray_app.runlog.paths import RunPaths
from ray_app.task.keras.callbacks import copy_weights
from ray_app.task.keras.optimizer import copy_optimizers
from ray_app.task.keras.task import KerasTask
from ray_app.train.interventions import read_logs
from ray_app.watch.observers import Observer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class History:
    """The course of a run by epoch, as `Model.fit` returns it, and the run itself.

    Args:
        history: The values of each epoch by name: `loss` and the metrics over the training rows, and with `val_` before
            their names those over the validation data, in the order of Keras.
        epoch: The numbers of the epochs, from 0.
        params: The numbers of epochs and steps, and how much is shown.
        model: The argument `model` of `fit` with the trained weights; if that was a function, the model it returned.
        result: The run.
        ends_with_average: Whether training ends with the average of `use_ema`, unless a callback has set weights then.
    """

    history: dict[str, list[float]]
    epoch: list[int]
    params: dict[str, Any]
    model: Any = field(repr=False)
    result: Result = field(repr=False)
    ends_with_average: bool = field(default=True, repr=False)

    def keras_model(self) -> Any:
        """Returns the trained `keras.Model`, read from the run, its optimizer with the state of training."""
        model = self.result.keras_model("newest")
        if self.ends_with_average:
            model.optimizer.finalize_variable_values(model.trainable_variables)
        return model


class EpochLines(Observer):
    """Prints a line for each epoch, as Keras does.

    Args:
        epochs: Number of the last epoch.
        first_epoch: Number of the first epoch of the run, from 0.
        validates: Whether epochs are evaluated; a line waits for the evaluation then.
    """

    def __init__(self, epochs: int, first_epoch: int, validates: bool) -> None:
        self._epochs, self._first_epoch = epochs, first_epoch
        self._validates = validates
        self._waiting: dict[int, str] = {}

    def epoch_ended(self, epoch: int, step: int, metrics: dict[str, float], seconds: float) -> None:
        """Prints the line of an epoch, or keeps it until the evaluation has come."""
        number = self._first_epoch + epoch + 1
        self._waiting[step] = f"Epoch {number}/{self._epochs} - {seconds:.1f}s{_format_values(metrics)}"
        if not self._validates:
            self.evaluated(step, {})

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """Prints the line of the epoch that ends with a step, and of earlier ones that were not evaluated."""
        for earlier in sorted(number for number in self._waiting if number <= step):
            scores = {f"val_{name}": value for name, value in metrics.items()} if earlier == step else {}
            print(f"{self._waiting.pop(earlier)}{_format_values(scores)}", flush=True)

    def ended(self, status: str, summary: dict[str, Any]) -> None:
        """Prints the lines of epochs without an evaluation."""
        del status, summary
        self.evaluated(max(self._waiting, default=0), {})


def _format_values(values: Mapping[str, float]) -> str:
    return "".join(f" - {name}: {value:.4f}" for name, value in sorted(values.items()))


def is_validated(number: int, validation_freq: int | Sequence[int]) -> bool:
    """Returns whether Keras evaluates an epoch with a number from 1; a run also does that at its end."""
    return number % validation_freq == 0 if isinstance(validation_freq, int) else number in validation_freq


def make_history(
    result: Result,
    first_epochs: tuple[int, int],
    params: dict[str, Any],
    model: Any,
    validation_freq: int | Sequence[int],
) -> History:
    """Returns the course of a run; warns of metrics that it has of the validation data alone.

    Args:
        first_epochs: The numbers of the first epochs of the course and of the run.
    """
    epochs, logs = result.epochs(), read_logs(RunPaths(result.path))
    for number, values in enumerate(epochs, 1):
        if not is_validated(number + first_epochs[1], validation_freq):
            epochs[number - 1] = {name: value for name, value in values.items() if not name.startswith("val_")}
        epochs[number - 1].update(logs.get(number * params["steps"], {}))
    initial_epoch, first_epoch = first_epochs
    epochs = epochs[initial_epoch - first_epoch :]
    task = result.task
    assert isinstance(task, KerasTask)
    # Keras sorts the names of an epoch's values; a callback adds its own ones at the end.
    added = {name for values in logs.values() for name in values}
    ordered = [sorted(values, key=lambda name: (name in added, name)) for values in epochs]
    names = dict.fromkeys(name for names in ordered for name in names if task.is_reported(name))
    if missing := [name for name in names if name.startswith("val_") and name.removeprefix("val_") not in names]:
        logger.warning(
            "The history has %s, but no such values of the training rows, because these are not means over rows.",
            ", ".join(missing),
        )
    history = {name: [values[name] for values in epochs if name in values] for name in names}
    return History(history, list(range(initial_epoch, initial_epoch + len(epochs))), params, model, result)


def copy_state(trained: Any, model: Any) -> None:
    """Gives a model and its optimizer the state of a trained copy; what the first batch would build is built."""
    copy_weights(trained, model)
    copy_optimizers(model, trained)
