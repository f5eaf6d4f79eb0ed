"""Calls the user's function, and returns its compiled model as a module that can be trained."""

from __future__ import annotations

import hashlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ray_app.config.import_paths import load_class
from ray_app.errors import ConfigError
from ray_app.storage.files import to_location
from ray_app.task.keras import copies, library
from ray_app.task.keras.module import NO_FACTS, KerasModule, fit_inputs, fit_targets, pack, refuse_steps
from ray_app.task.keras.steps import OwnSteps, examine_steps
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
            f" my_program.get_{field.rpartition('.')[2]}, or a class_path with init_args."
        )
    return spec


def load_saved(path: str) -> Any:
    """Returns the compiled model of a `.keras` file on a disk or in a bucket.

    Raises:
        ConfigError: Keras cannot make the model from the file.
    """
    keras = library.import_keras()
    with tempfile.TemporaryDirectory(prefix="ray_app-keras-") as folder:
        # Keras reads disks only.
        file = Path(folder) / "model.keras"
        file.write_bytes(_read_model(path))
        try:
            with warnings.catch_warnings():
                # A run has its own state of the optimizer.
                warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
                return keras.saving.load_model(file)
        except (TypeError, ValueError, ImportError, AttributeError) as error:
            raise ConfigError(
                f"Keras cannot rebuild the model of {path}: {error}\nPass the model itself, or a function that returns"
                " it: Keras loads classes and functions of a program only if they are registered."
            ) from error


_models_in_process: dict[str, tuple[bytes, list[Any]]] = {}
"""The models of the runs that train in this process, by their digests, see `hold`."""


@contextmanager
def hold(path: str, sha256: str, model: Any) -> Iterator[None]:
    """Lets `load_stored` return copies of a model of this process while a block runs; without a file also later."""
    _models_in_process[sha256] = copies.dump_shared(model)
    try:
        yield
    finally:
        if path:
            del _models_in_process[sha256]


def load_stored(path: str, sha256: str, structure: str) -> Any:
    """Returns the model that `ray_app.keras.fit` has stored by value (`copies.dump_program`).

    The file is code. It is read only if it is the one that the configuration names by its digest.

    Args:
        structure: The digest by which a later call notices another model; not used here.

    Raises:
        ConfigError: The file is missing or another one, or a worker lacks a module that it needs.
    """
    del structure
    if (shared := _models_in_process.get(sha256)) is not None:
        return copies.load_program(*shared)
    if not path:
        raise ConfigError(
            "The model of this run cannot be pickled, so only the process that trained it can rebuild it. Load the file"
            " of model.save, or pass fit a function that returns the model."
        )
    data = _read_model(path)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ConfigError(
            f"{path} has changed since the configuration of the run was writtenand is not loaded, because it contains"
            " code. Restore the file, or start a run with another name."
        )
    try:
        return copies.load_program(data)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"The model of {path} needs a module that cannot be imported here: {error}. Install the module on all"
            " nodes, or keep it in the folder of the program."
        ) from error


def _read_model(path: str) -> bytes:
    try:
        return to_location(path).read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(
            f"The file {path}, which the task names as its model, does not exist. Set a path that every node can read."
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
        names, steps = library.overridden_steps(program), OwnSteps()
        expands_targets, facts = False, NO_FACTS
        if not {"train_step", "test_step"} <= set(names):
            # A `train_step` may have a loss of its own.
            with suppress(*([ValueError, NotImplementedError] if "train_step" in names else [])):
                expands_targets, facts = _build(program, sample())
        if {"train_step", "test_step"} & set(names):
            steps = _build_steps(program, sample())
            if steps.phases:
                states = [*steps.carried], [*steps.left_out]
                facts = library.BatchFacts([], *states, facts.reductions, facts.is_by_batch, facts.kept)
        return KerasModule(program, settings, expands_targets, facts, steps)


def _build_steps(program: Any, samples: list[Inputs]) -> OwnSteps:
    """Lets a batch of zeros go through a model and the steps that it writes itself, and returns these."""
    for number, (x, y, weights) in enumerate(samples):
        try:
            with torch.no_grad(), suppress(NotImplementedError):
                if not library.is_built(program):
                    program(fit_inputs(program, x))
            with torch.random.fork_rng(devices=[]):
                return examine_steps(program, pack(program, x, y, weights))
        except Exception as error:
            if number == len(samples) - 1 or isinstance(error, ConfigError):
                raise
    raise AssertionError("there is a sample")


def make_module(model: str) -> KerasModule:
    """Returns the model of a function of a program as an `nn.Module`, for a loop of your own; see docs/loop.md.

    Args:
        model: The import path of the function. The model needs no compilation, but a `keras.Input`: no batch builds it.
    """
    settings = read_settings({"class_path": model})
    with library.program_session(settings):
        return KerasModule(load_class(model)(), settings)


def _build(program: Any, samples: list[Inputs]) -> tuple[bool, library.BatchFacts]:
    """Lets a batch of zeros go through a model, by which Keras makes its weights, losses and metrics.

    Returns:
        Whether the model needs targets in the shapes of its outputs: some metrics of Keras refuse a number for each
        row where the model gives rows of one number. And the facts of its losses and metrics.
    """
    # A layer may count its calls.
    before = program.get_weights() if program.built else None
    attempts = [(*sample, expands_targets) for sample in samples for expands_targets in (False, True)]
    for number, (inputs, y, weights, expands_targets) in enumerate(attempts):
        x = fit_inputs(program, inputs)
        update = partial(_update, program, x, y, weights, expands_targets)
        try:
            with torch.no_grad():
                facts = library.measure_batch(program, len(library.import_keras().tree.flatten(x)[0]), update)
            program.reset_metrics()
            if before is not None:
                program.set_weights(before)
            return expands_targets, facts
        except Exception:
            if number == len(attempts) - 1:
                raise
    raise AssertionError("there is a sample")


def _update(program: Any, x: Any, y: Any, weights: Any, expands_targets: bool) -> Any:
    """Lets a batch go through a model, its losses and metrics; returns the outputs."""
    outputs = program(x, training=False) if library.has_training_argument(program) else program(x)
    targets = fit_targets(y, outputs) if expands_targets else y
    library.compute_loss(program, x, targets, outputs, weights, True)
    program.compute_metrics(x, targets, outputs, weights)
    return outputs
