"""Calls the user's function, and returns its compiled model as a module that can be trained."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ray_app.config.import_paths import load_class
from ray_app.errors import ConfigError
from ray_app.storage.files import to_location
from ray_app.task.keras import library
from ray_app.task.keras.module import KerasModule, fit_inputs, fit_targets, refuse_steps
from ray_app.task.transforms import Spec, instantiate

_FIELD = "task.init_args.model"
Inputs = tuple[Any, Any, Any]
"""A batch in the form that Keras takes: inputs, targets and weights of rows; the last two may be None."""


def spec_of_program(model: str | Spec, field: str = _FIELD, result: str = "a compiled keras.Model") -> Spec:
    """Returns the specification of a function of a program that is named by its import path, or that has arguments.

    Raises:
        ConfigError: It is neither.
    """
    spec = {"class_path": model} if isinstance(model, str) else model
    if not isinstance(spec, dict) or not isinstance(spec.get("class_path"), str) or "." not in spec["class_path"]:
        raise ConfigError(
            f"{field} is {model!r}; it must be the import path of a function that returns {result}, such as"
            f" my_program.get_{field.rpartition('.')[2]}, or such a path as class_path with init_args."
        )
    return spec


def load_saved(path: str, custom_objects: dict[str, str] | None = None) -> Any:
    """Returns the compiled model of a `.keras` file on a disk or in a bucket.

    Args:
        custom_objects: Import paths of classes and functions by the names that the file has for them.

    Raises:
        ConfigError: Keras cannot make the model from the file.
    """
    keras = library.import_keras()
    with tempfile.TemporaryDirectory(prefix="ray_app-keras-") as folder:
        # Keras reads disks only.
        file = Path(folder) / "model.keras"
        try:
            file.write_bytes(to_location(path).read_bytes())
        except FileNotFoundError as error:
            raise ConfigError(
                f"There is no file {path}, which the task names as its model. Give the path of a .keras file that every"
                " node can read."
            ) from error
        try:
            objects = {name: load_class(import_path) for name, import_path in (custom_objects or {}).items()}
            with warnings.catch_warnings():
                # A run has its own state of the optimizer.
                warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
                return keras.saving.load_model(file, objects)
        except (TypeError, ValueError, ImportError, AttributeError) as error:
            raise ConfigError(
                f"Keras cannot make the model of {path} again: {error}\nGive a function that returns the compiled"
                " model, in a module that workers can import; then it is called instead of reading a file."
            ) from error


def read_settings(spec: Spec) -> library.Settings:
    """Imports the program, and returns the settings of Keras in this thread after the import.

    Raises:
        ConfigError: The program cannot be imported.
    """
    library.import_keras()
    try:
        load_class(spec["class_path"])
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{_FIELD} {spec['class_path']!r} cannot be imported: {error}.") from error
    return library.Settings.read()


def build_program(spec: Spec, settings: library.Settings, sample: Callable[[], list[Inputs]]) -> KerasModule:
    """Makes the model of a program, compiled and built, with random numbers from torch's generator.

    Args:
        spec: The function that makes it.
        settings: The settings of Keras that the program expects.
        sample: Returns batches of zeros; the model is built with the first one that it takes.

    Raises:
        ConfigError: The result is not a compiled model, or it overrides a method of Keras' training loop.
    """
    keras = library.import_keras()
    with library.program_session(settings):
        program = instantiate(spec, _FIELD)
        if not isinstance(program, keras.Model):
            raise ConfigError(
                f"{_FIELD} {spec['class_path']} makes a {type(program).__name__}; it must return a compiled"
                " keras.Model."
            )
        refuse_steps(program)
        _build(program, sample())
        return KerasModule(program, settings)


def _build(program: Any, samples: list[Inputs]) -> None:
    """Lets a batch of zeros go through a model, by which Keras makes its weights, losses and metrics."""
    for number, (inputs, y, weights) in enumerate(samples):
        try:
            with torch.no_grad():
                x = fit_inputs(program, inputs)
                outputs = program(x, training=False) if library.has_training_argument(program) else program(x)
                targets = fit_targets(y, outputs)
                library.compute_loss(program, x, targets, outputs, weights, False)
                program.compute_metrics(x, targets, outputs, weights)
            break
        except Exception:
            if number == len(samples) - 1:
                raise
    program.reset_metrics()
