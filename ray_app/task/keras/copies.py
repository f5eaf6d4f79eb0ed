"""Copies of Keras models by value, for workers or in one process, with all private names of Keras that they need."""

import copyreg
import hashlib
import importlib
import io
import json
import pickle
import re
import threading
from collections.abc import Callable, Mapping
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import cloudpickle
import torch

from ray_app.task.keras.library import import_keras, inner_optimizer


def dump_program(program: Any) -> bytes:
    """Returns a model by value, with its compilation: classes and functions of a script or a notebook travel with it.

    Keras' own pickle writes what `get_config` returns, and reads the rest as its defaults: `Huber(delta=0.1)`, a metric
    without `get_config` or `exclude_from_weight_decay` would silently become another.

    Raises:
        Exception: Something in the model cannot be pickled, such as an open file.
    """
    file = io.BytesIO()
    _ProgramPickler(file).dump(program)
    return file.getvalue()


def dump_shared(program: Any) -> tuple[bytes, list[Any]]:
    """Returns a model for copies in this process, which share its functions and classes, and all that has no copies."""
    file, shared = io.BytesIO(), list[Any]()
    _SharingPickler(file, shared).dump(program)
    return file.getvalue(), shared


def load_program(data: bytes, shared: list[Any] | None = None) -> Any:
    """Returns the model that `dump_program` or `dump_shared` has written; this runs the code in it."""
    import_keras()
    from keras.src.ops.function import Function, map_graph

    unpickler = pickle.Unpickler(io.BytesIO(data))
    if shared is not None:
        unpickler.persistent_load = shared.__getitem__  # type: ignore[method-assign]
    program = unpickler.load()
    for graph in program._flatten_layers():
        if isinstance(graph, Function):
            # The names of the nodes contain the addresses of the layers.
            graph._nodes = map_graph(graph._inputs, graph._outputs)[0]
    return program


class _ProgramPickler(cloudpickle.CloudPickler):
    """Pickles the objects of Keras by their attributes."""

    def reducer_override(self, obj: Any) -> Any:
        """Returns how an object is pickled, see `pickle.Pickler`."""
        keras = import_keras()
        from keras.src.saving.keras_saveable import KerasSaveable
        from keras.src.utils import tracking
        from keras.src.utils.backend_utils import DynamicBackend

        if isinstance(obj, type(torch.ops)):
            # `cloudpickle` sends it with a function that names `torch` and the `ops` of Keras.
            return importlib.import_module, (obj.__name__,)
        if isinstance(obj, DynamicBackend):
            return DynamicBackend, (obj._backend,)
        if isinstance(obj, tracking.TrackedList | tracking.TrackedDict | tracking.TrackedSet):
            items = dict(obj) if isinstance(obj, dict) else list(obj)
            return _reduce(obj, (dict(vars(obj)), items), _fill)
        if isinstance(obj, keras.optimizers.Optimizer):
            state = dict(vars(obj))
            # Keras finds variables by their addresses.
            ids = state.pop("_exclude_from_weight_decay", None)
            state |= {"_trainable_variables_indices": {}, "_exclude_from_weight_decay_cache": {}}
            excluded = None if ids is None else [v for v in obj._trainable_variables if id(v) in ids]
            return _reduce(obj, (state, excluded), _restore_optimizer)
        if isinstance(obj, KerasSaveable):
            return _reduce(obj, dict(vars(obj)), _update)
        return super().reducer_override(obj)


_WITHOUT_COPIES = (type, FunctionType, ModuleType, GeneratorType, io.IOBase, type(threading.Lock()))
"""Types of objects that copies of a model in one process share."""


class _SharingPickler(_ProgramPickler):
    """Pickles a model for this process; `shared` gets the objects that have no copies."""

    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_id(self, obj: Any) -> int | None:
        """Returns the place of an object in `shared`, see `pickle.Pickler`."""
        is_shared = isinstance(obj, _WITHOUT_COPIES) and not _contains_layer(obj)
        # A method of an object that is no part of the model, such as a test or an application.
        is_foreign = isinstance(obj, MethodType) and not type(obj.__self__).__module__.startswith("keras.")
        if not is_shared and not (is_foreign and not isinstance(obj.__self__, import_keras().layers.Layer)):
            return None
        self._shared.append(obj)
        return len(self._shared) - 1


def _contains_layer(function: Any) -> bool:
    """Returns whether a function refers to a layer, as Keras' wrapper of `build` does; each copy needs another one."""
    saveable = import_keras().KerasTensor, import_keras().layers.Layer
    cells = getattr(function, "__closure__", None) or ()
    return any(isinstance(_content_of(cell), saveable) for cell in cells)


def _content_of(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # An empty cell.
        return None


def _reduce(obj: Any, state: Any, set_state: Callable[[Any, Any], None]) -> tuple[Any, ...]:
    return copyreg.__newobj__, (type(obj),), state, None, None, set_state  # type: ignore[attr-defined]


def _update(obj: Any, attributes: dict[str, Any]) -> None:
    """Sets attributes without Keras' tracking, which has happened before."""
    vars(obj).update(attributes)


def _fill(container: Any, state: tuple[dict[str, Any], Any]) -> None:
    """Fills a container of Keras, and then gives it what tracks its changes."""
    attributes, items = state
    kind: Any = next(kind for kind in (list, dict, set) if isinstance(container, kind))
    (kind.extend if kind is list else kind.update)(container, items)
    vars(container).update(attributes)


def _restore_optimizer(optimizer: Any, state: tuple[dict[str, Any], list[Any] | None]) -> None:
    attributes, excluded = state
    vars(optimizer).update(attributes)
    if optimizer.built:
        for number, variable in enumerate(optimizer._trainable_variables):
            optimizer._trainable_variables_indices[optimizer._var_key(variable)] = number
    if excluded is not None:
        optimizer._exclude_from_weight_decay = {optimizer._var_key(variable) for variable in excluded}


def structure_digest(program: Any) -> str:
    """Returns a digest of the layers of a model and of its compilation, but not of its weights.

    Keras numbers the names of objects in a process; the numbers do not count.
    """
    keras = import_keras()
    # The first batch adds layers of these kinds to a model.
    containers = (keras.Sequential, keras.layers.InputLayer)
    layers = [
        layer for layer in program._flatten_layers() if not isinstance(layer, containers) and not _is_functional(layer)
    ]
    text = json.dumps([_describe(layers), _describe(program._compile_config.config)], sort_keys=True)
    return hashlib.sha256(re.sub(r"(?<=[a-z])_\d+(?=[\"/])", "", text).encode()).hexdigest()[:20]


def _is_functional(layer: Any) -> bool:
    from keras.src.models.functional import Functional

    return type(layer) is Functional


def _describe(value: Any) -> Any:
    """Returns a value as JSON has it; an object by its class, its configuration and its plain attributes."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        # Keras' number of an object that a model has twice is an address.
        return {str(key): _describe(one) for key, one in value.items() if key != "shared_object_id"}
    if isinstance(value, list | tuple | set):
        return [_describe(one) for one in value]
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if code := getattr(value, "__code__", None):
        return [value.__qualname__, hashlib.sha256(code.co_code).hexdigest(), repr(code.co_consts)]
    try:
        config = _describe(value.get_config()) if hasattr(value, "get_config") else None
    except NotImplementedError:
        config = None
    plain = vars(value) if hasattr(value, "__dict__") and not name.startswith("keras.") else {}
    attributes = {k: v for k, v in plain.items() if isinstance(v, bool | int | float | str) and k != "built"}
    # `get_config` of Keras' own losses leaves some of these out.
    more = _describe(getattr(value, "_fn_kwargs", None))
    return [name, config, more, {k: v for k, v in attributes.items() if not k.startswith("_")}]


def unbuilt_optimizer(optimizer: Any) -> Any:
    """Returns a copy of an optimizer as it is before its first step, also where `get_config` lacks a part."""
    optimizer = pickle.loads(dump_program(optimizer))
    kept = (optimizer._iterations, optimizer._learning_rate)
    optimizer._variables[:] = [variable for variable in optimizer._variables if any(variable is one for one in kept)]
    optimizer._iterations.assign(0)
    vars(optimizer).update(built=False, _trainable_variables=[], _trainable_variables_indices={})
    return optimizer


def take_optimizer(optimizer: Any) -> Any:
    """Returns an optimizer as it is before its first step, with a variable for its learning rate."""
    optimizer = unbuilt_optimizer(inner_optimizer(optimizer))
    rate = import_keras().Variable(0.0, name="learning_rate", dtype="float32", trainable=False)
    # What was a schedule is the run's, see `KerasSchedule`.
    optimizer._learning_rate = rate
    # A loss that is scaled by a number gives gradients that are divided by it again.
    optimizer.loss_scale_factor = None
    return optimizer
