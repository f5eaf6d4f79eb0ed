"""The arrays and the model of a call of `fit`, as a data set and a file that every node can read.

They are below `run.storage_path`, named by a digest of their content: a later call with the same ones writes nothing.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch

from ray_app.config.import_paths import is_installed, load_class
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
_LOAD_SAVED, _LOAD_STORED = "ray_app.task.keras.program.load_saved", "ray_app.task.keras.program.load_stored"
_SUFFIX = ".keras"
_ADVICE = "Or give fit a function that returns the compiled model, in a module that workers can import."

Arrays = dict[str, npt.NDArray]


@dataclass(frozen=True)
class FitColumns:
    """The columns that a model takes, see `KerasTask`."""

    inputs: Columns
    target: Columns | None = None
    sample_weight: Columns | None = None

    @classmethod
    def name(cls, x: Any, y: Any, sample_weight: Any) -> FitColumns:
        """Returns names of columns in the structures of arrays, such as `input_0` and `input_1` of a list."""
        # An array called target would lose an axis of one number.
        target = None if y is None else _name_columns("output", y)
        weights = None if sample_weight is None else library.standardize_weights(y, sample_weight)
        return cls(
            _name_columns("input", x), target, None if weights is None else _name_columns("sample_weight", weights)
        )

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
        weights = np.ones(len(next(iter(columns.values()))), np.float32) if sample_weight is None else sample_weight
        if y is not None and self.sample_weight is not None:
            weights = library.standardize_weights(y, weights)
        return columns | fill_columns(self.sample_weight, weights, "sample_weight")


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


def store_program(model: Any, storage_path: str, seed: int, before: Any = None) -> str | Spec:
    """Returns a model as a task names it: its import path, or a file with the model by value.

    Args:
        before: The model as the task of an existing run names it. A run keeps its first weights, so a model that
            differs from that in its weights alone is named like it.

    Raises:
        ConfigError: It is neither a model nor a function, or the model cannot be pickled.
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
    arguments = _store_model(model, storage_path)
    earlier = before.get("init_args", {}) if isinstance(before, Mapping) else {}
    return {
        "class_path": _LOAD_STORED,
        "init_args": dict(earlier) if earlier.get("structure") == arguments["structure"] else arguments,
    }


def _import_path(function: Callable[[], Any]) -> str | None:
    """Returns the path under which workers import a function, None if they cannot."""
    path = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    try:
        return path if not path.startswith("__main__.") and load_class(path) is function else None
    except (ImportError, AttributeError):
        return None


def _store_model(model: Any, storage_path: str) -> dict[str, Any]:
    """Writes a compiled model by value to a file; returns the arguments of `load_stored`.

    Raises:
        ConfigError: It cannot be pickled.
    """
    keras = library.import_keras()
    if not isinstance(model, keras.Model):
        raise ConfigError(f"The function returned a {type(model).__name__}; it must return a compiled keras.Model.")
    refuse_steps(model)
    try:
        data = _dump_with_modules(model)
    except Exception as error:
        raise ConfigError(
            f"The model {model.name!r} cannot travel to workers: {type(error).__name__}: {error}\n{_ADVICE}"
        ) from error
    sha256 = hashlib.sha256(data).hexdigest()
    target = to_location(storage_path) / SHARED_FOLDER / f"model-{sha256[:20]}.pkl"
    put_atomic(target, data, if_absent=True)
    return {"path": str(target), "sha256": sha256, "structure": library.structure_digest(model)}


def _dump_with_modules(model: Any) -> bytes:
    """Returns a model by value, with the classes and functions of the user's modules, which workers may not have."""
    is_users = {name: module for name, module in list(sys.modules.items()) if _is_of_user(name, module)}
    for module in is_users.values():
        cloudpickle.register_pickle_by_value(module)
    try:
        return library.dump_program(model)
    finally:
        for module in is_users.values():
            cloudpickle.unregister_pickle_by_value(module)


def _is_of_user(name: str, module: Any) -> bool:
    """Returns whether a module is neither a library, nor of ray_app, nor the script itself."""
    file = getattr(module, "__file__", None)
    is_library = name.split(".", maxsplit=1)[0] in ("ray_app", "__main__") or file is None or is_installed(Path(file))
    return not is_library and module.__name__ == name


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
