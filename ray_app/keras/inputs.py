"""The arrays and the model of a call of `fit`, as a data set and a file that every node can read.

They are below `run.storage_path`, named by a digest of their content: a later call with the same ones writes nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ray_app.config.import_paths import load_class
from ray_app.errors import ConfigError
from ray_app.ingest.in_memory import ingest_named_arrays, to_numbers
from ray_app.storage.files import put_atomic, to_location
from ray_app.task.keras import library
from ray_app.task.keras.module import refuse_steps
from ray_app.task.keras.task import Columns
from ray_app.task.transforms import Spec

SHARED_FOLDER = "fit-inputs"
"""The folder below `run.storage_path` with the arrays and models that `fit` hands to workers."""
_DIGEST_BYTES = 10
_LOAD_SAVED = "ray_app.task.keras.program.load_saved"
_SUFFIX = ".keras"
_ADVICE = "Or give fit a function that returns the compiled model, in a module that workers can import."

Arrays = dict[str, npt.NDArray]


@dataclass(frozen=True)
class FitColumns:
    """The columns that a model takes, see `KerasTask`."""

    inputs: Columns
    target: Columns | None = None
    sample_weight: str | None = None

    @classmethod
    def name(cls, x: Any, y: Any, sample_weight: Any) -> FitColumns:
        """Returns names of columns in the structures of arrays, such as `input_0` and `input_1` of a list."""
        target = None if y is None else _name_columns("target", y)
        return cls(_name_columns("input", x), target, None if sample_weight is None else "sample_weight")

    def fill(self, x: Any, y: Any = None, sample_weight: Any = None) -> Arrays:
        """Returns arrays by the names of their columns.

        Raises:
            ConfigError: The arrays have another structure than the names.
        """
        columns = fill_columns(self.inputs, x, "x") | fill_columns(self.target, y, "y")
        if not columns:
            raise ConfigError(f"x is an empty {type(x).__name__}; the model needs at least one array of rows.")
        if self.sample_weight is None and sample_weight is not None:
            raise ConfigError("The data has a sample_weight, and the training had none. Leave it out.")
        if sample_weight is None:
            sample_weight = np.ones(len(next(iter(columns.values()))), np.float32)
        return columns | fill_columns(self.sample_weight, sample_weight, "sample_weight")


def store_arrays(storage_path: str, arrays: Arrays) -> str:
    """Writes arrays as a data set, unless it exists, and returns the path of its folder.

    Raises:
        DataError: The arrays differ in rows.
    """
    folder = to_location(storage_path) / SHARED_FOLDER / f"arrays-{digest_of(arrays)}"
    # An ingest gives a folder its name when it is complete.
    if not folder.exists():
        ingest_named_arrays(str(folder), arrays)
    return str(folder)


def fill_columns(columns: Columns | None, values: Any, argument: str) -> Arrays:
    """Returns arrays by the names of their columns; nothing for no columns.

    Args:
        columns: The names, in the structure of the arrays.
        argument: The name of the argument of `fit`.

    Raises:
        ConfigError: The structures differ, or a value is not an array.
    """
    if columns is None:
        return {}
    if isinstance(columns, str):
        return {columns: _to_column(values, argument)}
    names = dict(columns) if isinstance(columns, Mapping) else dict(enumerate(columns))
    arrays = values if isinstance(values, Mapping) else dict(enumerate(values)) if _is_list(values) else {}
    if arrays.keys() != names.keys():
        raise ConfigError(
            f"{argument} is a {type(values).__name__} of {list(arrays)}, and the model is trained with {list(names)}."
            " Give an array for each of these."
        )
    return {name: _to_column(arrays[key], argument) for key, name in names.items()}


def split_arrays(arguments: tuple[Any, Any, Any], fraction: float) -> tuple[list[Any], list[Any]]:
    """Returns the first rows of arrays and the last ones, a fraction of all, as `validation_split` divides them.

    Args:
        arguments: The arguments x, y and sample_weight of `fit`.

    Raises:
        ConfigError: One of the two would have no rows.
    """
    first = next((array for array in _flatten(list(arguments)) if array is not None), None)
    rows = len(_to_column(first, "x"))
    split_at = math.floor(rows * (1.0 - fraction))
    if not 0 < split_at < rows:
        raise ConfigError(
            f"validation_split is {fraction} of {rows} rows; both parts need rows. Give a number between 0 and 1."
        )

    def part(value: Any, argument: str, rows: slice) -> Any:
        if isinstance(value, Mapping):
            return {key: part(one, argument, rows) for key, one in value.items()}
        if _is_list(value):
            return [part(one, argument, rows) for one in value]
        return None if value is None else _to_column(value, argument)[rows]

    named = list(zip(("x", "y", "sample_weight"), arguments, strict=True))
    first_rows, last_rows = slice(split_at), slice(split_at, None)
    return (
        [part(value, argument, first_rows) for argument, value in named],
        [part(value, argument, last_rows) for argument, value in named],
    )


def digest_of(arrays: Mapping[str, npt.NDArray]) -> str:
    """Returns a digest of the names, types, shapes and values of arrays."""
    sha = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name, values in arrays.items():
        sha.update(f"{name}\0{values.dtype.str}\0{values.shape}\0".encode())
        # The interface of buffers lacks types such as bfloat16, which weights may have.
        sha.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return sha.hexdigest()


def is_path(x: Any) -> bool:
    """Returns whether a value names a data set or a file."""
    return isinstance(x, str | PathLike)


def store_program(model: Any, storage_path: str, seed: int) -> str | Spec:
    """Returns a model as a task names it: its import path, or a file that Keras writes unless it exists.

    Raises:
        ConfigError: It is neither a model nor a function, or Keras cannot write the model to a file.
    """
    keras = library.import_keras()
    if isinstance(model, str) and not model.endswith(_SUFFIX):
        return model
    if isinstance(model, str | PathLike):
        return {"class_path": _LOAD_SAVED, "init_args": {"path": fspath(model)}}
    if not isinstance(model, keras.Model):
        if not callable(model):
            raise ConfigError(
                f"The model is a {type(model).__name__}; give a compiled keras.Model, a function that returns one, its"
                " import path, or the path of a .keras file."
            )
        if (path := _import_path(model)) is not None:
            return path
        # Workers cannot import what a notebook or the script itself defines.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with library.program_session(None):
                model = model()
    return {"class_path": _LOAD_SAVED, "init_args": _store_model(model, storage_path)}


def _import_path(function: Callable[[], Any]) -> str | None:
    """Returns the path under which workers import a function, None if they cannot."""
    path = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    try:
        return path if not path.startswith("__main__.") and load_class(path) is function else None
    except (ImportError, AttributeError):
        return None


def _store_model(model: Any, storage_path: str) -> dict[str, Any]:
    """Writes a compiled model with its weights to a file, unless it exists; returns the arguments of `load_saved`.

    Raises:
        ConfigError: Keras cannot write it, or workers could not import its classes.
    """
    keras = library.import_keras()
    if not isinstance(model, keras.Model):
        raise ConfigError(f"The function returned a {type(model).__name__}; it must return a compiled keras.Model.")
    refuse_steps(model)
    with tempfile.TemporaryDirectory(prefix="ray_app-keras-") as folder:
        file = Path(folder) / f"model{_SUFFIX}"
        try:
            text = model.to_json()
            with warnings.catch_warnings():
                # Keras warns of a model without weights; the run draws them.
                warnings.simplefilter("ignore")
                model.save(file)
        except (NotImplementedError, TypeError, ValueError) as error:
            raise ConfigError(f"Keras cannot write the model {model.name!r} to a file: {error}\n{_ADVICE}") from error
        # The file itself contains the time of its writing, so its digest would differ each time.
        weights = {f"{number}": value for number, value in enumerate(model.get_weights())}
        digest = hashlib.sha256(f"{text}{digest_of(weights)}".encode()).hexdigest()[:20]
        target = to_location(storage_path) / SHARED_FOLDER / f"model-{digest}{_SUFFIX}"
        objects = _custom_objects(json.loads(text))
        put_atomic(target, file.read_bytes(), if_absent=True)
    return {"path": str(target), "custom_objects": objects}


def _custom_objects(config: Any) -> dict[str, str]:
    """Returns the import paths of the classes and functions of a serialized model that are not Keras', by its names.

    Raises:
        ConfigError: Workers cannot import one.
    """
    if isinstance(config, list):
        return {name: path for part in config for name, path in _custom_objects(part).items()}
    if not isinstance(config, dict):
        return {}
    objects = {name: path for part in config.values() for name, path in _custom_objects(part).items()}
    if not config.keys() >= {"module", "class_name", "config"}:
        return objects
    # Keras writes no module for what the script itself defines.
    module, name = config["module"] or "__main__", config["class_name"]
    if module.split(".")[0] in ("keras", "builtins"):
        return objects
    key = config["config"] if name == "function" else config.get("registered_name") or name
    path = f"{module}.{key.rpartition('>')[2] if name == 'function' else name}"
    try:
        is_importable = module != "__main__" and callable(load_class(path))
    except (ImportError, AttributeError):
        is_importable = False
    if not is_importable:
        raise ConfigError(
            f"The model has {path}, which workers cannot import. Move it to the top of a module and import it from"
            f" there. {_ADVICE}"
        )
    return {**objects, key: path}


def _is_list(values: Any) -> bool:
    return isinstance(values, list | tuple)


def _flatten(values: Any) -> list[Any]:
    """Returns the arrays of a structure in their order."""
    if isinstance(values, Mapping):
        values = list(values.values())
    return [array for value in values for array in _flatten(value)] if _is_list(values) else [values]


def _name_columns(prefix: str, values: Any) -> Columns:
    """Returns names of columns in the structure of arrays, such as input_0 and input_1."""
    if isinstance(values, Mapping):
        return {str(key): f"{prefix}_{number}" for number, key in enumerate(values)}
    return [f"{prefix}_{number}" for number in range(len(values))] if _is_list(values) else prefix


def _to_column(values: Any, argument: str) -> npt.NDArray:
    """Returns an array as a column of a data set; floats become float32, as `Model.fit` makes them."""
    if isinstance(values, torch.Tensor):
        # NumPy has no bfloat16.
        values = (values.float() if values.dtype == torch.bfloat16 else values).detach().cpu().numpy()
    if not hasattr(values, "__array__") or not np.ndim(values):
        raise ConfigError(
            f"{argument} has a {type(values).__name__}, and fit takes arrays of rows: NumPy, torch, or several in a"
            " list or a dictionary. Rows that come from a generator, a loader or tf.data are read again in every epoch"
            " and after a loss of a worker, so write them once: as arrays, or as a data set (ray-app ingest), whose"
            " path fit takes, too."
        )
    array = to_numbers(argument, values)
    if array.dtype.kind == "f":
        return array.astype(np.float32, copy=False)
    # Columns of uint8 with these axes are images: the channels of inputs are their last axis, and targets are numbers.
    is_image = array.dtype == np.uint8 and array.ndim in (3, 4)
    if is_image and argument == "y":
        return array.astype(np.int32)
    if is_image and array.ndim == 4 and library.import_keras().config.image_data_format() == "channels_first":
        return array.astype(np.float32)
    return array
