"""The rows and the model of a call of `fit`, as data sets and a file that every node can read.

They are below `run.storage_path`, named by a digest of their content: a later call with the same ones writes nothing.

A run reads its rows again in each epoch, on any worker, and from any step on after a loss. Generators, loaders and
pipelines cannot be read like that, so these are read once, batch by batch, and written.
"""

from __future__ import annotations

import hashlib
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from ray_app.config.import_paths import is_installed, load_class
from ray_app.data.dataset import open_dataset
from ray_app.errors import ConfigError, DataError
from ray_app.ingest.in_memory import ingest_named_arrays, to_numbers
from ray_app.storage.files import put_atomic, to_location
from ray_app.task.keras import copies, library
from ray_app.task.keras.module import refuse_steps
from ray_app.task.keras.task import Columns
from ray_app.task.transforms import Spec

SHARED_FOLDER = "fit-inputs"
"""The folder below `run.storage_path` with the arrays and models that `fit` hands to workers."""
_DIGEST_BYTES = 10
_LOAD_SAVED, _LOAD_STORED = "ray_app.task.keras.program.load_saved", "ray_app.task.keras.program.load_stored"
_FIRST_ROWS = 2
"""Number of rows with which Keras makes the weights of a model."""
_SUFFIX = ".keras"
_ADVICE = "Or pass fit a function that returns the compiled model, in a module that workers can import."

_BATCH_SIZE = 32
"""Keras' default."""
_INPUTS, _TARGETS = ("image", "features", "input"), ("label", "target", "output")
"""Names that an ingest and `fit` give columns."""
_STEPS = {"x": "steps_per_epoch", "validation_data": "validation_steps"}
"""The argument with the number of batches by the argument with the batches."""
_ENDLESS, _UNKNOWN = -1, -2
"""Numbers of batches as tf.data has them."""
_PROGRESS_S = 10.0
_UNEVEN = "Batches differ in size, but all steps use the size of the first. "
_FROZEN = (
    "Random values in a batch stay as they were read: put layers such as keras.layers.RandomFlip into the model, or,"
    ' for images of uint8, set fields={"task.init_args.transforms": [...]}.'
)
Fields = dict[str, Any]
"""Fields of a configuration by their dotted names."""

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
        # Each output has weights of its own.
        weights = None if sample_weight is None else _name_columns("sample_weight", y)
        return cls(_name_columns("input", x), target, weights)

    def fill(
        self, x: Any, y: Any = None, sample_weight: Any = None, like: Any = None, infinite_y: bool = False
    ) -> Arrays:
        """Returns arrays by the names of their columns.

        Args:
            like: Weights with the shapes of those that are 1 where `sample_weight` has none.
            infinite_y: Whether y may be infinite.

        Raises:
            ConfigError: The arrays have another structure than the names, or differ in rows, or are refused.
        """
        parts = {"x": fill_columns(self.inputs, x, "x"), "y": fill_columns(self.target, y, "y", infinite_y)}
        if not (columns := parts["x"] | parts["y"]):
            raise ConfigError(f"x is an empty {type(x).__name__}; the model needs at least one array of rows.")
        if self.sample_weight is None and sample_weight is not None:
            raise ConfigError("The data has a sample_weight, but the training had none. Leave it out.")
        weights = sample_weight
        if weights is None and self.sample_weight is not None:
            rows = len(next(iter(columns.values())))
            keras = library.import_keras()
            weights = keras.tree.map_structure(lambda one: np.ones((rows, *np.shape(one)[1:]), np.float32), like)
        if self.sample_weight is not None and isinstance(y, list | tuple | Mapping):
            weights = library.standardize_weights(y, weights)
        parts["sample_weight"] = fill_columns(self.sample_weight, weights, "sample_weight")
        sizes = {argument: [len(values) for values in part.values()] for argument, part in parts.items() if part}
        if len(set(chain(*sizes.values()))) > 1:
            text = ", ".join(f"{argument} has {' and '.join(map(str, rows))} rows" for argument, rows in sizes.items())
            raise ConfigError(f"The arrays differ in length: {text}. Each row needs one entry in each array.")
        return columns | parts["sample_weight"]


def first_rows(arrays: tuple[Any, Any, Any]) -> tuple[Any, Any, Any] | None:
    """Returns the first rows of x, y and sample_weight as Keras takes them; None if these are no arrays."""
    keras = library.import_keras()

    def cut(values: Any) -> Any:
        column = _to_column(values, "x")[:_FIRST_ROWS]
        return keras.ops.convert_to_tensor(column)

    try:
        x, y, weights = (None if values is None else keras.tree.map_structure(cut, values) for values in arrays)
        return x, y, weights
    except ConfigError:
        return None


def store_arrays(storage_path: str, arrays: Arrays, mixes: bool = True) -> str:
    """Writes arrays as a data set, mixed or in their order, unless it exists, and returns the path of its folder."""
    name = f"{'arrays' if mixes else 'ordered'}-{digest_of(arrays)}"
    folder = to_location(storage_path) / SHARED_FOLDER / name
    # An ingest gives a folder its name when it is complete.
    if not folder.exists():
        ingest_named_arrays(str(folder), arrays, {} if mixes else {"shuffle": False})
    return str(folder)


def fill_columns(columns: Columns | None, values: Any, argument: str, may_be_infinite: bool = False) -> Arrays:
    """Returns arrays by the names of their columns; nothing for no columns.

    Args:
        columns: The names, in the structure of the arrays.
        argument: The name of the argument of `fit`.
        may_be_infinite: Whether numbers may be infinite; they may never be NaN.

    Raises:
        ConfigError: The structures differ, or a value is not an array.
    """
    if columns is None:
        return {}
    if isinstance(columns, str):
        return {columns: _to_column(values, argument, may_be_infinite)}
    names = dict(columns) if isinstance(columns, Mapping) else dict(enumerate(columns))
    arrays = values if isinstance(values, Mapping) else dict(enumerate(values)) if _is_list(values) else {}
    if arrays.keys() != names.keys():
        raise ConfigError(
            f"{argument} is a {type(values).__name__} of {list(arrays)}, but the model is trained with {list(names)}."
            " Pass an array for each of these."
        )
    return {name: _to_column(arrays[key], f"{argument}[{key!r}]", may_be_infinite) for key, name in names.items()}


def split_rows(arrays: Arrays, fraction: float) -> tuple[Arrays, Arrays]:
    """Returns the first rows of arrays and the last ones, a fraction of all, as `validation_split` divides them.

    Raises:
        ConfigError: One of the two would have no rows.
    """
    rows = len(next(iter(arrays.values())))
    split_at = math.floor(rows * (1.0 - fraction))
    if not 0 < split_at < rows:
        raise ConfigError(
            f"validation_split is {fraction} of {rows} rows; both parts need rows. Set a number between 0 and 1."
        )
    first = {name: values[:split_at] for name, values in arrays.items()}
    return first, {name: values[split_at:] for name, values in arrays.items()}


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


@dataclass(frozen=True)
class RowArguments:
    """The arguments of `fit` about rows; `say` shows a line."""

    storage_path: str
    x: Any
    y: Any
    sample_weight: Any
    batch_size: int | None
    shuffle: bool | str
    steps_per_epoch: int | None
    validation_split: float
    validation_data: Any
    validation_steps: int | None
    validation_batch_size: int | None
    inputs: Columns | None
    target: Columns | None
    say: Callable[[str], None]
    infinite_y: bool

    def locate(self) -> tuple[FitColumns, Fields]:
        """Returns the columns that the model takes, and the fields about the data, which is written if it is no path.

        Raises:
            ConfigError: Arguments do not go together, or rows are refused.
        """
        self._refuse_combinations()
        x, steps = self.x, self.steps_per_epoch
        batch, count = self.batch_size, math.inf
        # Keras' "batch" shuffles within batches, which have the rows of the order given.
        mixes, evaluation = self.shuffle is True, Fields()
        if is_path(x):
            path, columns = fspath(x), self._choose_columns(fspath(x))
        elif is_source(x):
            mixes = is_shuffled(x, mixes)
            of_source = steps if _count_batches(x) < 0 else None
            stored = store_batches(self.storage_path, x, "x", None, of_source, mixes, self.say, self.infinite_y)
            path, columns = stored.path, stored.columns
            batch, count = stored.sizes[0], len(stored.sizes)
        else:
            others = self.validation_data[2:] if isinstance(self.validation_data, list | tuple) else ()
            # Rows get weights of 1 where the validation data alone has weights.
            weights = next((weights for weights in (self.sample_weight, *others) if weights is not None), None)
            columns = FitColumns.name(x, self.y, weights)
            arrays = columns.fill(x, self.y, self.sample_weight, weights, self.infinite_y)
            if self.validation_split:
                arrays, held_out = split_rows(arrays, self.validation_split)
                evaluation = self._store_evaluation(held_out)
            rows = len(next(iter(arrays.values())))
            batch = batch or (math.ceil(rows / steps) if steps else _BATCH_SIZE)
            path, count = store_arrays(self.storage_path, arrays, mixes), math.ceil(rows / batch)
        batch = batch or _BATCH_SIZE
        if self.validation_data is not None:
            evaluation = self._locate_validation(columns, batch)
        return columns, {
            "data.path": path,
            "data.global_batch_size": batch,
            **({} if mixes else {"data.shuffle": False}),
            # An epoch of Keras ends with the rows.
            "train.steps_per_epoch": steps if steps and steps < count else None,
            "evaluate.batch_size": self.validation_batch_size or batch,
            **evaluation,
        }

    def _locate_validation(self, columns: FitColumns, batch: int) -> Fields:
        """Returns the fields about the validation data, which is written if it is no path."""
        data, unpack = self.validation_data, library.import_keras().utils.unpack_x_y_sample_weight
        if is_path(data):
            rows = (self.validation_steps or 0) * (self.validation_batch_size or batch)
            return {"data.eval_path": fspath(data), "evaluate.max_rows": rows or None}
        if is_source(data):
            arguments = self.storage_path, data, "validation_data", columns, self.validation_steps, False, self.say
            return {"data.eval_path": store_batches(*arguments).path}
        try:
            x, y, weights = unpack(data)
            return self._store_evaluation(columns.fill(x, y, weights, self.sample_weight))
        except (ConfigError, DataError, ValueError) as error:
            raise ConfigError(f"validation_data: {error}") from error

    def _store_evaluation(self, arrays: Arrays) -> Fields:
        """Writes the rows that `validation_steps` uses; without a size of batches Keras makes them of all rows."""
        batch = self.validation_batch_size or self.batch_size
        rows = self.validation_steps * batch if self.validation_steps and batch else None
        first = {name: values[:rows] for name, values in arrays.items()}
        # Some metrics depend on the batches, which are those of Keras.
        return {"data.eval_path": store_arrays(self.storage_path, first, mixes=False)}

    def _refuse_combinations(self) -> None:
        """Raises ConfigError for arguments that do not go together."""
        has_path, has_batches = is_path(self.x), is_source(self.x)
        kind = type(self.x).__name__
        problems = {
            "validation_split and validation_data are set; leave one of them out.": self.validation_split
            and self.validation_data is not None,
            "validation_split is for arrays. Pass validation_data=; ray-app ingest --eval_fraction holds rows out.": (
                self.validation_split and (has_path or has_batches)
            ),
            "y is set, but x is a path; name the column of the targets: target=.": has_path and self.y is not None,
            "inputs and target name columns of a data set, but x is not a path. Leave them out.": not has_path
            and (self.inputs, self.target) != (None, None),
            **{
                f"When providing `x` as a {kind}, `{name}` should not be passed. Instead, it should be included as part"
                f" of the {kind}.": has_batches and getattr(self, name) is not None
                for name in ("y", "sample_weight", "batch_size")
            },
        }
        if applying := [problem for problem, applies in problems.items() if applies]:
            raise ConfigError("\n".join(applying))

    def _choose_columns(self, path: str) -> FitColumns:
        """Returns the columns of a data set that a model takes; by default an ingest has named them."""
        weights = self.sample_weight
        if weights is not None and not isinstance(weights, str):
            raise ConfigError(f"sample_weight is a {type(weights).__name__}; with a path, name a column.")
        columns = open_dataset(path).facts.columns
        inputs = self.inputs or next((name for name in _INPUTS if name in columns), None)
        if inputs is None:
            raise ConfigError(
                f"{path} has the columns {', '.join(columns)}, but none of {' or '.join(_INPUTS)}. Name the inputs and"
                ' the target: inputs="pixels", target="digit".'
            )
        return FitColumns(inputs, self.target or next((name for name in _TARGETS if name in columns), None), weights)


def is_source(x: Any) -> bool:
    """Returns whether a value gives batches of rows, as opposed to arrays, structures of arrays, and paths."""
    is_rows = x is None or is_path(x) or isinstance(x, list | tuple | Mapping) or hasattr(x, "shape")
    return not is_rows and isinstance(x, Iterable)


def is_shuffled(x: Any, shuffle: bool) -> bool:
    """Returns whether Keras uses the rows of a source in another order in each epoch.

    Keras shuffles a `PyDataset` that ends; loaders and pipelines have a part that shuffles.
    """
    if isinstance(x, library.import_keras().utils.PyDataset):
        return shuffle and _count_batches(x) >= 0
    if isinstance(x, DataLoader):
        sampler = getattr(x.batch_sampler, "sampler", x.sampler)
        return not isinstance(x.dataset, IterableDataset) and not isinstance(sampler, SequentialSampler)
    # The datasets of tf.data and grain that this one is made of.
    inputs = [getattr(x, "_input_dataset", None), *getattr(x, "_parents", ())]
    return "Shuffle" in type(x).__name__ or any(is_shuffled(one, shuffle) for one in inputs if one is not None)


def _count_batches(x: Any) -> int:
    """Returns the number of batches of a source, `_ENDLESS`, or `_UNKNOWN` if only reading tells."""
    try:
        if isinstance(x, library.import_keras().utils.PyDataset):
            return _ENDLESS if x.num_batches is None else int(x.num_batches)
        return int(x.cardinality()) if hasattr(x, "cardinality") else len(x)
    except (TypeError, NotImplementedError):
        return _UNKNOWN


class StoredBatches(NamedTuple):
    """A data set with the rows of a source, its columns, and the rows of each batch."""

    path: str
    columns: FitColumns
    sizes: list[int]


def store_batches(
    storage_path: str,
    x: Any,
    name: str,
    columns: FitColumns | None,
    steps: int | None,
    mixes: bool,
    say: Callable[[str], None],
    infinite_y: bool = False,
) -> StoredBatches:
    """Reads a source once, a batch at a time, and writes its rows as a data set, mixed or in their order.

    Args:
        name: The argument of `fit`.
        columns: The columns of the training; None for the training itself, of which the first batch names them.
        steps: The batches to read; None for all.
        infinite_y: Whether targets may be infinite.

    Raises:
        ConfigError: The source never ends, or has no batch, or a batch is refused.
    """
    if steps is None and _count_batches(x) == _ENDLESS:
        raise ConfigError(f"{name} is a {type(x).__name__} without an end. Set {_STEPS[name]}, the batches to read.")
    unpack = library.import_keras().utils.unpack_x_y_sample_weight
    sizes, rows = list[int](), dict[str, tuple[np.dtype, tuple[int, ...]]]()
    shown_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ray_app-batches-") as folder, ExitStack() as stack:
        files: dict[str, Any] = {}
        for batch in islice(x.as_numpy_iterator() if hasattr(x, "as_numpy_iterator") else x, steps):
            try:
                inputs, targets, weights = unpack(batch)
                columns = columns or FitColumns.name(inputs, targets, weights)
                arrays = columns.fill(inputs, targets, weights, infinite_y=infinite_y)
                kinds = {column: (array.dtype, array.shape[1:]) for column, array in arrays.items()}
                if (rows := rows or kinds) != kinds:
                    raise ConfigError(
                        f"Types and shapes of rows are {kinds}, but {rows} before. Pad rows to one length."
                    )
            except (ConfigError, DataError, ValueError) as error:
                raise ConfigError(f"{name}, batch {len(sizes)}, counted from 0: {error}") from error
            files = files or {column: stack.enter_context((Path(folder) / column).open("wb")) for column in arrays}
            for column, array in arrays.items():
                files[column].write(array.tobytes())
            sizes.append(len(array))
            if time.monotonic() - shown_s > _PROGRESS_S:
                shown_s = time.monotonic()
                advice = "" if steps else f" Endless data needs {_STEPS[name]}."
                say(f"{name}: {sum(sizes):,} rows in {len(sizes):,} batches were read so far.{advice}")
        if columns is None or not sizes:
            raise ConfigError(f"{name} is a {type(x).__name__} without a batch: an earlier read has exhausted it.")
        stack.close()
        whole = Arrays()
        for column, (dtype, shape) in rows.items():
            whole[column] = np.memmap(Path(folder) / column, dtype, "r", shape=(sum(sizes), *shape))
        path = store_arrays(storage_path, whole, mixes)
    order = "" if name != "x" else ", each in a different order" if mixes else ", in the order given"
    is_uneven = any(size != sizes[0] for size in sizes[:-1]) or sizes[-1] > sizes[0]
    say(
        f"{name}: {sum(sizes):,} rows in {len(sizes):,} batches were read once into {path}. All epochs use them{order}."
        f" {_UNEVEN if is_uneven else ''}{_FROZEN}"
    )
    return StoredBatches(path, columns, sizes)


def store_program(model: Any, storage_path: str, seed: int, before: Any = None, has_workers: bool = True) -> str | Spec:
    """Returns a model as a task names it: its import path, or a file with the model by value.

    Args:
        has_workers: Whether other processes train, so that the model has to travel.
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
                f"The model is a {type(model).__name__}; pass a compiled keras.Model, a function that returns one, its"
                " import path, or the path of a .keras file."
            )
        if (path := _import_path(model)) is not None:
            return path
        # Workers cannot import what a notebook or the script itself defines.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with library.program_session(None):
                model = model()
    arguments = _store_model(model, storage_path, has_workers)
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


def _store_model(model: Any, storage_path: str, has_workers: bool) -> dict[str, Any]:
    """Writes a compiled model by value to a file; returns the arguments of `load_stored`.

    Without workers a model that cannot be pickled is named by its structure, and only this process has it.

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
        if not has_workers:
            structure = copies.structure_digest(model)
            return {"path": "", "sha256": structure, "structure": structure}
        raise ConfigError(
            f"The model {model.name!r} cannot be sent to workers: {type(error).__name__}: {error}\n{_ADVICE}"
        ) from error
    sha256 = hashlib.sha256(data).hexdigest()
    target = to_location(storage_path) / SHARED_FOLDER / f"model-{sha256[:20]}.pkl"
    put_atomic(target, data, if_absent=True)
    return {"path": str(target), "sha256": sha256, "structure": copies.structure_digest(model)}


def _dump_with_modules(model: Any) -> bytes:
    """Returns a model by value, with the classes and functions of the user's modules, which workers may not have."""
    is_users = {name: module for name, module in list(sys.modules.items()) if _is_of_user(name, module)}
    for module in is_users.values():
        cloudpickle.register_pickle_by_value(module)
    try:
        return copies.dump_program(model)
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


def _name_columns(prefix: str, values: Any) -> Columns:
    """Returns names of columns in the structure of arrays, such as input_0 and input_1."""
    if isinstance(values, Mapping):
        return {str(key): f"{prefix}_{number}" for number, key in enumerate(values)}
    return [f"{prefix}_{number}" for number in range(len(values))] if _is_list(values) else prefix


def _to_column(values: Any, argument: str, may_be_infinite: bool = False) -> npt.NDArray:
    """Returns an array as a column of a data set; floats become float32, as `Model.fit` makes them.

    Args:
        argument: What the user calls the array, such as `y` or `x['size']`.

    Raises:
        ConfigError: It is no array of rows, or a number is not finite.
        DataError: It is no array of numbers.
    """
    if isinstance(values, torch.Tensor):
        # NumPy has no bfloat16.
        values = (values.float() if values.dtype == torch.bfloat16 else values).detach().cpu().numpy()
    if not hasattr(values, "__array__") or not np.ndim(values):
        several = "" if argument.startswith("sample_weight") else ", several in a list or a dictionary"
        raise ConfigError(
            f"{argument} is a {type(values).__name__}, but fit accepts arrays of rows (NumPy, torch, pandas){several};"
            " or, as x alone, an iterable of batches of x, (x, y) or (x, y, sample_weight): a keras.utils.PyDataset, a"
            " generator, a DataLoader, a tf.data.Dataset."
        )
    array = to_numbers(argument, values)
    if not len(array):
        raise ConfigError(f"{argument} has no rows, an array of shape {array.shape}. Pass at least one row.")
    if array.dtype.kind == "f":
        array = array.astype(np.float32, copy=False)
        is_allowed = ~np.isnan(array) if may_be_infinite else np.isfinite(array)
        if not is_allowed.all():
            row = int(np.argmin(is_allowed.reshape(len(array), -1).all(1)))
            raise ConfigError(
                f"{argument} is NaN or infinite as float32 in row {row}, counted from 0. A run stops at such a row:"
                " correct or remove it."
            )
        return array
    # Columns of uint8 with these axes are images: the channels of inputs are their last axis, and targets are numbers.
    is_image = array.dtype == np.uint8 and array.ndim in (3, 4)
    if is_image and argument.startswith("y"):
        return array.astype(np.int32)
    if is_image and array.ndim == 4 and library.import_keras().config.image_data_format() == "channels_first":
        return array.astype(np.float32)
    return array
