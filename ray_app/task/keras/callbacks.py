"""Callbacks of Keras, which run in the driver's process between two epochs, while all workers wait.

What they decide there (`stop_training`, the learning rate, weights) is an intervention: it is recorded, and takes
effect on all workers before the next step. A few callbacks do what every run does, and do not run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ray_app.devices import HOST
from ray_app.errors import ConfigError
from ray_app.task.interventions import EpochEnd, Intervention
from ray_app.task.keras import library
from ray_app.task.keras.module import KerasModule

_VALIDATION = "val_"
_OF_A_RUN = {
    "BackupAndRestore": "another call with the same name (default: the name of backup_dir) continues the run",
    "ProgbarLogger": "a run always shows its progress",
    "SwapEMAWeights": "evaluations use the average of the weights, with which training also ends",
}
"""Callbacks that do what every run does, and how it does that."""
_REFUSED = {
    "OrbaxCheckpoint": "Use ModelCheckpoint; a run also writes its own checkpoints.",
}
"""The callbacks of Keras without a counterpart, and what to use instead."""
_BATCH_METHODS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def running_callbacks(callbacks: Any) -> tuple[list[Any], list[str]]:
    """Returns the callbacks that run, and a line for each of the others.

    Raises:
        ConfigError: One has no counterpart.
    """
    keras = library.import_keras()
    running, lines = [], []
    # Keras takes one callback without a list, too.
    for callback in keras.tree.flatten(callbacks or []):
        name = type(callback).__name__
        is_of_keras = type(callback) is getattr(keras.callbacks, name, None)
        if not isinstance(callback, keras.callbacks.Callback):
            raise ConfigError(f"callbacks has a {name}; each must be a keras.callbacks.Callback.")
        if is_of_keras and name in _REFUSED:
            raise ConfigError(f"{name} has no counterpart in a run. {_REFUSED[name]}")
        if is_of_keras and name in _OF_A_RUN:
            lines.append(f"{name}: {_OF_A_RUN[name]}")
        if is_of_keras and name == "BackupAndRestore":
            # It would load weights into the model alone, and delete what it has saved.
            callback.on_train_begin = lambda logs=None: None
        if name not in ("ProgbarLogger", "SwapEMAWeights"):
            running.append(_EventFiles.of(callback) if is_of_keras and name == "TensorBoard" else callback)
    return running, lines


def refuse_batch_saves(callbacks: Sequence[Any]) -> None:
    """Raises ConfigError for a callback that saves the model after some batches, which only workers have then."""
    keras = library.import_keras()
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ModelCheckpoint) and isinstance(callback.save_freq, int):
            raise ConfigError(
                f"ModelCheckpoint has save_freq={callback.save_freq}, but with workers, callbacks run only between"
                f' epochs. Leave save_freq out, and set fields={{"checkpoint.every_steps": {callback.save_freq}}}.'
            )


def evaluates_average(callbacks: Any) -> bool:
    """Returns whether `SwapEMAWeights` is among callbacks.

    Raises:
        ConfigError: It is to swap weights for the other callbacks, too.
    """
    keras = library.import_keras()
    swaps = [c for c in keras.tree.flatten(callbacks or []) if isinstance(c, keras.callbacks.SwapEMAWeights)]
    if any(callback.swap_on_epoch for callback in swaps):
        raise ConfigError(
            "SwapEMAWeights has swap_on_epoch=True, but callbacks receive the trained weights. Leave swap_on_epoch out;"
            " training ends with the average."
        )
    return bool(swaps)


def ends_at_nan(callbacks: Sequence[Any]) -> bool:
    """Returns whether a callback ends training at a loss that is not finite."""
    return any(isinstance(c, library.import_keras().callbacks.TerminateOnNaN) for c in callbacks)


def backup_name(callbacks: Any) -> str | None:
    """Returns the name of a run that `BackupAndRestore` continues; None without this callback."""
    keras = library.import_keras()
    backups = [c for c in keras.tree.flatten(callbacks or []) if isinstance(c, keras.callbacks.BackupAndRestore)]
    return next((Path(str(callback.backup_dir)).name for callback in backups), None)


def monitored_fields(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Returns the fields that let the best checkpoint be the best for the first callback that monitors evaluations."""
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and monitor.startswith(_VALIDATION):
            mode = getattr(callback, "mode", "auto")
            modes = {} if mode not in ("min", "max") else {"evaluate.mode": mode}
            return {"evaluate.metric": monitor.removeprefix(_VALIDATION), **modes}
    return {}


class CallbackRunner:
    """Calls callbacks between two epochs, and returns what they have changed; an `Intervener`.

    Args:
        callbacks: The callbacks.
        model: The model that callbacks get as `self.model`; None: a model of the task.
        first_epoch: Number of the first epoch, from 0.
        is_validated: Returns whether callbacks get the evaluation of an epoch, by its number from 1.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        model: Any = None,
        first_epoch: int = 0,
        is_validated: Callable[[int], bool] = lambda number: True,
    ) -> None:
        self._callbacks, self._model = list(callbacks), model
        self._first_epoch, self._is_validated = first_epoch, is_validated
        keras = library.import_keras()
        self._history = keras.callbacks.History()
        self.sets_final_weights = False
        """Whether a callback has set weights in `on_train_end`; an average of the optimizer must not replace them."""
        self._list: Any = None
        self._epoch, self._batch = first_epoch, 0
        self._module: KerasModule | None = None
        self._first_iteration = 0
        self._before: list[Any] = []
        self._eval_batches = 0
        self._rate: float | None = None

    def __call__(self, end: EpochEnd) -> Intervention:
        """Calls the callbacks; see `Intervener`."""
        with torch.random.fork_rng(devices=[]), library.device_scope(HOST):
            return self._call(end)

    def resume(self, end: EpochEnd) -> None:
        """Begins training for the callbacks within an epoch, see `Intervener`."""
        self._bring(end)
        epoch, self._batch = divmod(end.step, end.steps_per_epoch)
        self._epoch = self._first_epoch + epoch
        self._list.on_train_batch_begin(self._batch)

    def _bring(self, end: EpochEnd) -> tuple[KerasModule, Any]:
        """Returns the model of the run, and the model of the callbacks with its weights; begins training for them."""
        if self._module is None:
            module = end.build_model()
            assert isinstance(module, KerasModule)
            self._module = module
            self._first_iteration = library.count_steps(module.saved_program())
            self._eval_batches = end.eval_batches
        if end.parameters:
            self._module.load_state_dict(dict(end.parameters))
        trained = self._module.saved_program()
        model = trained if self._model is None else self._model
        self._before = trained.get_weights()
        if model is not trained and end.parameters:
            copy_weights(trained, model)
        library.begin_epoch(model, end.lr, self._first_iteration + end.step)
        self._rate = library.current_rate(model)
        if self._list is None:
            self._begin(model, end)
        return self._module, model

    def _call(self, end: EpochEnd) -> Intervention:
        module, model = self._bring(end)
        trained = module.saved_program()
        epoch = self._epoch = self._first_epoch + end.epoch - 1
        logs: dict[str, float] = {}
        lengths = {name: len(values) for name, values in self._history.history.items()}
        if end.step and not end.has_ended:
            self._repeat_batches(end.batches)
            evaluation = end.scores if self._is_validated(epoch + 1) else None
            if evaluation is not None:
                self._list.on_test_begin()
                for number in range(end.eval_batches):
                    self._list.on_test_batch_begin(number)
                    self._list.on_test_batch_end(number, dict(evaluation))
                self._list.on_test_end(dict(evaluation))
            scores = {f"{_VALIDATION}{name}": value for name, value in (evaluation or {}).items()}
            logs = {**end.logs, **scores}
            self._list.on_epoch_end(epoch, logs)
        stops = bool(model.stop_training)
        if end.is_last or stops:
            versions = library.weight_versions(model)
            self._list.on_train_end(logs)
            self.sets_final_weights = library.weight_versions(model) != versions
        else:
            self._epoch, self._batch = epoch + 1, 0
            self._list.on_epoch_begin(epoch + 1)
            if end.is_live:
                self._list.on_train_batch_begin(0)
        parameters = None
        if model is not trained:
            trained.set_weights(model.get_weights())
        if not _are_equal(self._before, trained.get_weights()):
            parameters = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        recorded = self._history.history.items()
        newest = {name: values[-1] for name, values in recorded if len(values) > lengths.get(name, 0)}
        state, arrays = _pack(self._callbacks)
        more = {name: value for name, value in newest.items() if name not in logs and isinstance(value, float)}
        new_rate = library.current_rate(model)
        new_rate = new_rate if new_rate != self._rate else None
        return Intervention(stops, end.is_last, new_rate, parameters, more, state, arrays)

    def at_batch(self, number: int, logs: Mapping[str, float]) -> bool:
        """Calls the callbacks after a step, see `Intervener`."""
        model = self._list.model
        with self._refusing_changes(number, may_stop=True):
            self._list.on_train_batch_end(number, dict(logs))
            if not model.stop_training and number + 1 < self._list.params["steps"]:
                self._list.on_train_batch_begin(number + 1)
        self._batch = number + 1
        return bool(model.stop_training)

    def end_at_nan(self) -> dict[str, list[float]] | None:
        """Ends training for the callbacks if one of them ends it at a loss that is not a number.

        Returns:
            The values of the epochs by name; None if no callback does.

        Raises:
            RuntimeError: The callback raises it.
        """
        if self._module is None or not ends_at_nan(self._callbacks):
            return None
        facts, metrics = self._module.facts, library.compiled_metrics(self._module.program)
        # The optimizer did not apply the step, and the metrics of the epoch are unknown.
        logs = dict.fromkeys(sorted(["loss", *facts.means, *facts.carried]), math.nan)
        self._list.on_train_batch_end(self._batch, logs)
        if self._eval_batches and self._is_validated(self._epoch + 1):
            logs |= dict.fromkeys(sorted(f"{_VALIDATION}{name}" for name in ["loss", *dict(metrics)]), math.nan)
        self._list.on_epoch_end(self._epoch, logs)
        self._list.on_train_end(logs)
        return dict(self._history.history)

    def _begin(self, model: Any, end: EpochEnd) -> None:
        """Begins training for the callbacks; those of an interrupted run go on as they were."""
        keras = library.import_keras()
        if not end.is_live:
            refuse_batch_saves(self._callbacks)
        model.stop_training = False
        if end.before is not None:
            for callback in self._callbacks:
                if isinstance(callback, keras.callbacks.CSVLogger):
                    callback.append = True
        self._list = keras.callbacks.CallbackList(
            [*self._callbacks, self._history],
            model=model,
            verbose=0,
            epochs=self._first_epoch + end.epochs,
            steps=end.steps_per_epoch,
        )
        before = model.get_weights()
        self._list.on_train_begin()
        if end.before is not None:
            # What they did when training began is in the state of the run.
            if not _are_equal(before, model.get_weights()):
                model.set_weights(before)
            library.begin_epoch(model, end.lr, self._first_iteration + end.step)
            _unpack(self._callbacks, end.before)

    def _repeat_batches(self, batches: Sequence[Mapping[str, float]]) -> None:
        """Calls the callbacks of each step of the epoch that has ended."""
        if not batches or not self._batch_callbacks():
            return
        with self._refusing_changes(None):
            for number, values in enumerate(batches):
                self._list.on_train_batch_begin(number)
                self._list.on_train_batch_end(number, dict(values))

    def _batch_callbacks(self) -> list[str]:
        """Returns the names of the callbacks that are called for each batch."""
        base = library.import_keras().callbacks.Callback
        return [
            type(callback).__name__
            for callback in self._callbacks
            if any(getattr(type(callback), method) is not getattr(base, method) for method in _BATCH_METHODS)
        ]

    @contextmanager
    def _refusing_changes(self, number: int | None, may_stop: bool = False) -> Iterator[None]:
        """Raises ConfigError if callbacks change the training in a block, where other workers would not notice it."""
        model = self._list.model
        before = library.current_rate(model), library.weight_versions(model)
        yield
        after = library.current_rate(model), library.weight_versions(model)
        if before != after or (model.stop_training and not may_stop):
            at = f"after batch {number} of" if number is not None else "after a batch of"
            raise ConfigError(
                f"{' or '.join(self._batch_callbacks())} has changed weights, the learning rate or stop_training {at}"
                f" epoch {self._epoch + 1}. Workers make the steps of an epoch without waiting for callbacks."
                " Change these in on_epoch_end, or use a schedule for the learning rate."
            )


def copy_weights(trained: Any, model: Any) -> None:
    """Gives a model the weights of its trained copy; a model that its first batch would build is built."""
    if not model.built:
        model.build_from_config(trained.get_build_config())
    model.set_weights(trained.get_weights())


class _EventFiles:
    """Stands for `TensorBoard`, which needs TensorFlow for its files."""

    @staticmethod
    def of(callback: Any) -> Any:
        """Returns a callback that writes the same values of each epoch to the same folder."""
        from tensorboardX import SummaryWriter

        keras = library.import_keras()

        class EventFiles(keras.callbacks.Callback):  # type: ignore[name-defined]
            def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
                for part in ("train", "validation"):
                    is_part = part == "validation"
                    values = {k: v for k, v in (logs or {}).items() if k.startswith(_VALIDATION) == is_part}
                    if not values and is_part:
                        continue
                    with SummaryWriter(str(Path(callback.log_dir) / part)) as writer:
                        for name, value in values.items():
                            writer.add_scalar(f"epoch_{name.removeprefix(_VALIDATION)}", value, epoch)
                        if part == "train" and callback.histogram_freq and epoch % callback.histogram_freq == 0:
                            for variable in self.model.weights:
                                writer.add_histogram(f"{variable.path}/histogram", np.array(variable), epoch)

        return EventFiles()


def _are_equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))


def _pack(callbacks: Sequence[Any]) -> tuple[str, dict[str, Tensor]]:
    """Returns the state of callbacks: attributes with plain values as JSON, and those with arrays by their places."""
    plain: dict[str, Any] = {}
    arrays: dict[str, Tensor] = {}
    for number, callback in enumerate(callbacks):
        for name, value in vars(callback).items():
            key = f"{number}.{name}"
            if isinstance(value, list) and value and all(isinstance(one, np.ndarray) for one in value):
                arrays |= {f"{key}.{i}": torch.from_numpy(np.ascontiguousarray(one)) for i, one in enumerate(value)}
            elif name not in ("_model", "_params"):
                try:
                    plain[key] = json.loads(json.dumps(value.item() if isinstance(value, np.generic) else value))
                except (TypeError, ValueError):
                    # Files, functions and models are made again when training begins.
                    continue
    return json.dumps(plain), arrays


def _unpack(callbacks: Sequence[Any], before: Intervention) -> None:
    """Gives callbacks the state of an earlier process."""
    for key, value in json.loads(before.state or "{}").items():
        number, _, name = key.partition(".")
        if int(number) < len(callbacks):
            setattr(callbacks[int(number)], name, value)
    lists: dict[str, list[Any]] = {}
    for key in sorted(before.arrays, key=lambda key: (key.rpartition(".")[0], int(key.rpartition(".")[2]))):
        lists.setdefault(key.rpartition(".")[0], []).append(before.arrays[key].numpy())
    for key, values in lists.items():
        number, _, name = key.partition(".")
        if int(number) < len(callbacks):
            setattr(callbacks[int(number)], name, values)
