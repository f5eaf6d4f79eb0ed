"""Keras on PyTorch: its import with the backend torch, and all private names of it that the package uses.

Keras fixes its backend when it is imported. `choose_backend` therefore sets the backend before anything imports the
user's program, and `import_keras` refuses a process in which Keras runs on another one.
"""

from __future__ import annotations

import inspect
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from ray_app.config.import_paths import require
from ray_app.devices import HOST
from ray_app.errors import ConfigError
from ray_app.torch_private import version_of

logger = logging.getLogger(__name__)

BACKEND = "torch"
_VARIABLE = "KERAS_BACKEND"
_NAME_COUNTERS = "object_name_uids"
"""Keras' global attribute that counts the names of layers of this thread: dense, dense_1, ..."""
_GLOBAL_GENERATOR = "global_seed_generator"
"""Keras' global attribute with the generator of random numbers that get no seed."""
_RANDOM_SEED = "global_random_seed"
"""Keras' global attribute with the seed of `keras.utils.set_random_seed`."""
_MAX_SEED = 2**31
_MAX_STATES = 10_000
"""The maximum number of states of a metric that travel with each step."""


def choose_backend() -> None:
    """Makes PyTorch the backend of a Keras that is imported later in this process."""
    if "keras" in sys.modules:
        return
    other = os.environ.get(_VARIABLE, BACKEND)
    if other != BACKEND:
        logger.info("%s is %s; workers train on PyTorch, so the variable is set to %s here.", _VARIABLE, other, BACKEND)
    os.environ[_VARIABLE] = BACKEND


def import_keras() -> Any:
    """Returns the module Keras.

    Raises:
        ConfigError: Keras is not installed, or runs on another backend in this process.
    """
    require("keras", "A Keras program")
    choose_backend()
    import keras

    if keras.backend.backend() != BACKEND:
        raise ConfigError(
            f"Keras runs on the backend {keras.backend.backend()} in this process, but a run trains on PyTorch. Keras"
            f" cannot change its backend after its import: set {_VARIABLE}={BACKEND} in the environment before Python"
            " starts, or import ray_app.keras before keras."
        )
    return keras


@dataclass(frozen=True)
class Settings:
    """The settings that a program changes for all of Keras.

    Args:
        dtype_policy: The policy that layers get, which Keras keeps for each thread.
        floatx: The type of floats.
        image_data_format: Whether channels are last or first.
    """

    dtype_policy: str
    floatx: str
    image_data_format: str

    @classmethod
    def read(cls) -> Settings:
        """Returns the settings of this thread."""
        config = import_keras().config
        return cls(config.dtype_policy().name, config.floatx(), config.image_data_format())

    def apply(self) -> None:
        """Sets these settings in this thread."""
        config = import_keras().config
        config.set_floatx(self.floatx)
        config.set_image_data_format(self.image_data_format)
        config.set_dtype_policy(self.dtype_policy)


def global_state() -> Any:
    """Returns Keras' module of the attributes that belong to a thread."""
    import_keras()
    from keras.src.backend.common import global_state

    return global_state


def random_seed(default: int) -> int:
    """Returns the seed that `keras.utils.set_random_seed` has set in this thread."""
    seed = global_state().get_global_attribute(_RANDOM_SEED)
    return default if seed is None else int(seed)


@contextmanager
def program_session(settings: Settings | None) -> Iterator[None]:
    """Lets a block make a program as in a new process, with random numbers that only torch's generator determines.

    Keras draws the seeds of initializers from Python's generator. The names of layers are counted from the beginning,
    since the names of parameters contain them. At the end the block restores the generators of Python and NumPy, the
    settings of the thread and the counters of names.

    Args:
        settings: The settings of the program, read after its import; None: the present settings of this thread.
    """
    state = global_state()
    before = Settings.read()
    names = {name: state.get_global_attribute(name) for name in (_NAME_COUNTERS, _GLOBAL_GENERATOR)}
    python, numpy = random.getstate(), np.random.get_state()
    seeds = torch.randint(_MAX_SEED, (2,)).tolist()
    random.seed(seeds[0])
    np.random.seed(seeds[1])
    for name in names:
        state.set_global_attribute(name, None)
    try:
        (settings or before).apply()
        with device_scope(HOST):
            yield
    finally:
        before.apply()
        for name, value in names.items():
            state.set_global_attribute(name, value)
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def notice_models(notice: Callable[[Any], object]) -> Iterator[None]:
    """Calls a function with each model that this thread begins to make in a block, also with those inside a model."""
    import_keras()
    from keras.src.trainers.trainer import Trainer

    # Every model is a trainer, and TensorFlow's looks here for the strategy of the scope, too.
    original, thread = Trainer.__init__, threading.get_ident()

    def initialize(trainer: Any) -> None:
        original(trainer)
        if threading.get_ident() == thread:
            notice(trainer)

    Trainer.__init__ = initialize
    try:
        yield
    finally:
        Trainer.__init__ = original


def device_scope(device: torch.device) -> Any:
    """Returns a context in which Keras makes tensors on a device."""
    return import_keras().device(str(device))


def weights_of(program: Any) -> list[tuple[Any, bool]]:
    """Returns the variables of a model in its order, each once, and whether an optimizer may train it.

    A variable of a frozen layer may be trained; moving statistics and counters may not. The states of generators of
    random numbers and of metrics are no weights.
    """
    trainable = {id(v) for layer in program._flatten_layers() for v in layer._trainable_variables}
    return [(variable, id(variable) in trainable) for variable in program.weights]


def optimizers_of(program: Any) -> dict[str, Any]:
    """Returns the optimizers of a model by its attributes that have them."""
    kind = import_keras().optimizers.Optimizer
    named = {id(value): name for name, value in reversed(vars(program).items()) if isinstance(value, kind)}
    return {name: vars(program)[name] for name in named.values()}


def trained_weights(program: Any) -> list[Any]:
    """Returns the variables of a model that its optimizer trains, in the order of `weights_of`."""
    return [variable for variable, is_parameter in weights_of(program) if is_parameter and variable.trainable]


def normalized_kernels(program: Any) -> list[Any]:
    """Returns the variables of a model that its layers of spectral normalization write in each call of training."""
    kind = import_keras().layers.SpectralNormalization
    return [layer.kernel for layer in program._flatten_layers() if isinstance(layer, kind)]


def optimized_variables(optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer was built with."""
    return list(optimizer._trainable_variables)


def tensor_of(variable: Any) -> torch.Tensor:
    """Returns the tensor of a variable itself, also where the variable would give a copy of another type."""
    return variable._value


def bind_tensor(variable: Any, tensor: torch.Tensor) -> None:
    """Makes a tensor the value of a variable, without copying it."""
    variable._value = tensor


def freeze_layers(program: Any, variables: list[Any]) -> None:
    """Freezes the layers of a model of which all variables that they train are among these."""
    frozen = {id(v) for v in variables}
    for layer in program._flatten_layers():
        weights = layer._trainable_variables
        if weights and not layer._layers and all(id(v) in frozen for v in weights):
            layer.trainable = False


def wrapped_modules(program: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields the PyTorch modules that are layers of a model, with the paths of the layers."""
    keras = import_keras()
    for layer in program._flatten_layers():
        if isinstance(layer, keras.layers.TorchModuleWrapper):
            yield layer.path, layer.module


def seed_generators(program: Any) -> list[Any]:
    """Returns the generators of random numbers that the layers of a model have, in their order."""
    generators = {id(g): g for layer in program._flatten_layers() for g in layer._seed_generators}
    return list(generators.values())


def global_seed_generator() -> Any:
    """Returns the generator of this thread for random numbers that get no seed."""
    state = global_state()
    if (generator := state.get_global_attribute(_GLOBAL_GENERATOR)) is None:
        # Keras itself would draw its first seed from Python's generator.
        generator = import_keras().random.SeedGenerator(0)
        state.set_global_attribute(_GLOBAL_GENERATOR, generator)
    return generator


def has_training_argument(program: Any) -> bool:
    """Returns whether a model takes the argument `training`."""
    return bool(program._call_has_training_arg)


def compute_loss(program: Any, x: Any, y: Any, outputs: Any, weights: Any, is_training: bool) -> torch.Tensor:
    """Returns the loss that a compiled model computes of a batch, with all that layers add, of shape ()."""
    loss = program._compute_loss(x=x, y=y, y_pred=outputs, sample_weight=weights, training=is_training)
    program._clear_losses()
    return loss


def update_metrics(program: Any, x: Any, y: Any, outputs: Any, weights: Any) -> None:
    """Updates the metrics of a compiled model with a batch.

    `compute_metrics` of Keras would also compute the values of all metrics.
    """
    if type(program).compute_metrics is not import_keras().Model.compute_metrics:
        program.compute_metrics(x, y, outputs, weights)
    elif program._compile_metrics is not None:
        program._compile_metrics.update_state(y, outputs, weights)


def compiled_metrics(program: Any) -> list[tuple[str, Any]]:
    """Returns the metrics of a model by the names under which Keras reports them, without the mean of the loss.

    Metrics of `compile` exist once a batch has gone through the model.
    """
    named: dict[str, Any] = {}
    for metric in program.metrics:
        if metric is program._compile_metrics:
            _add_metrics(named, metric._flat_metrics or [], "")
            _add_metrics(named, metric._flat_weighted_metrics or [], "weighted_")
        elif metric is not program._loss_tracker and metric.name != "loss":
            named[metric.name] = metric
    return list(named.items())


def is_higher_better(metric: Any) -> bool | None:
    """Returns whether more of a metric is better, None if its class does not define it."""
    return {"up": True, "down": False}.get(getattr(metric, "_direction", ""))


def is_mean(metric: Any) -> bool:
    """Returns whether a metric is a mean that only Keras updates, so that its count is of numbers that it was given.

    A function of the mean, such as the root of RootMeanSquaredError, is none: its means over batches differ from it.
    """
    mean, kind = import_keras().metrics.Mean, type(metric)
    return isinstance(metric, mean) and kind.result is mean.result and kind.__module__.startswith("keras.")


def is_merged(metric: Any) -> bool:
    """Returns whether a metric has a method of its own that adds the states of others."""
    return callable(getattr(metric, "merge_state", None))


def flat_states(metric: Any) -> torch.Tensor:
    """Returns the states of a metric one after the other, as float64 of shape (n,)."""
    return torch.cat([tensor_of(v).detach().double().flatten() for v in metric.variables])


class BatchFacts(NamedTuple):
    """What a batch that has gone through a model shows of its losses and metrics.

    Args:
        means: The metrics that are means of one number per row.
        carried: Those of the others with one value, of states that can be added over parts of the rows.
        left_out: The remaining ones.
        reductions: How the losses of `compile` reduce their numbers, see `noted_losses`.
        is_by_batch: Whether a loss or a mean may be another number for all rows than for batches of them.
        kept: The metrics that `reset_state` leaves as they are, which go on over epochs.
    """

    means: list[str]
    carried: list[str]
    left_out: list[str]
    reductions: list[str]
    is_by_batch: bool
    kept: list[str]


def measure_batch(program: Any, rows: int, update: Callable[[], Any], kept: Sequence[str] = ()) -> BatchFacts:
    """Returns the facts of a model; `update` gives it, its losses and metrics a batch, and returns the outputs."""
    keras = import_keras()
    from keras.src.backend import get_keras_mask

    program.reset_metrics()
    with noted_losses(rows=rows) as notes:
        outputs = update()
    reductions, metrics = [reduction for reduction, _ in notes], dict(compiled_metrics(program))
    parts = [] if program._compile_metrics is None else program._compile_metrics._flat_metrics or []
    compiled = [metric for part in parts if part is not None for metric in part.metrics]
    compiled += [] if program._compile_loss is None else program._compile_loss.metrics
    # Weights and masks are others in each part of a batch.
    has_mask = any(get_keras_mask(tensor) is not None for tensor in keras.tree.flatten(outputs))
    count = -1 if has_mask or "weights" in reductions else rows
    means = [
        name for name, m in metrics.items() if m in compiled and name not in kept and is_mean(m) and m.count == count
    ]
    first = {name: flat_states(m) for name, m in metrics.items() if m.variables}
    once = {name: states for name, states in first.items() if name not in means}
    scalars = [m for m in metrics.values() if isinstance(m, keras.metrics.Mean) and (not is_mean(m) or m.count == 1)]
    update()
    added, carried = added_metrics(metrics, once)
    names = ("compute_loss", "compute_metrics")
    is_own = any(getattr(type(program), name) is not getattr(keras.Model, name) for name in names)
    is_by_batch = len(added) == len(once) and bool(is_own or scalars or {*reductions} - {"rows"})
    if not kept and (kept := _reset_kept(metrics, first)):
        return measure_batch(program, rows, update, kept)
    left_out = [name for name in once if name not in carried]
    return BatchFacts(means, carried, left_out, reductions, is_by_batch, [*kept])


def added_metrics(metrics: Mapping[str, Any], once: Mapping[str, torch.Tensor]) -> tuple[list[str], list[str]]:
    """Returns the names of metrics that can be put together from parts of the rows; and of these those with one value.

    Args:
        metrics: The metrics after two updates with the same batch.
        once: Their states after the first one.
    """
    added = [n for n, one in once.items() if is_merged(metrics[n]) or torch.allclose(flat_states(metrics[n]), 2 * one)]
    is_single = {name: np.prod(np.shape(metrics[name].result())) == 1 for name in added}
    return added, [name for name in added if len(once[name]) <= _MAX_STATES and is_single[name]]


def _reset_kept(metrics: Mapping[str, Any], first: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns the names of metrics that their own `reset_state` leaves as they are, and gives them one that resets.

    Args:
        metrics: The metrics after a second update.
        first: Their states after the first one.
    """
    kept = list[str]()
    for name, states in first.items():
        metric, second = metrics[name], flat_states(metrics[name])
        metric.reset_state()
        if not torch.equal(second, states) and torch.equal(flat_states(metric), second):
            kept.append(name)
            vars(metric)["reset_state"] = partial(import_keras().metrics.Metric.reset_state, metric)
    return kept


@contextmanager
def noted_losses(
    factor: float = 1.0, kinds: Iterable[str] = ("",), rows: int | None = None
) -> Iterator[list[tuple[str, torch.Tensor | None]]]:
    """Notes how each loss of `compile` in a block reduces its numbers, and the weight that it divides by.

    It is `rows` for a mean over all numbers, `weights` for one over the sum of weights or a mask; `sum`, which is
    multiplied by `factor`; and `batch` for one number of a whole batch, or of a batch of `rows` another number of
    values. Of losses with `rows` alone nothing is noted.
    """
    import_keras()
    from keras.src.losses import loss as losses

    original, notes = losses.reduce_weighted_values, list[tuple[str, torch.Tensor | None]]()
    if {"rows"}.issuperset(kinds):
        yield notes
        return

    def reduce(
        values: Any, sample_weight: Any = None, mask: Any = None, reduction: Any = None, dtype: Any = None
    ) -> Any:
        used = sample_weight if mask is None or sample_weight is None else sample_weight.clone()
        result = original(values, used, mask, reduction, dtype)
        if used is not sample_weight:
            # Keras multiplies a mask into the weights, which metrics get then. All 1 stand for no weights.
            sample_weight.copy_(torch.where((sample_weight == 1).all(), sample_weight, used))
        if reduction == "mean_with_sample_weight":
            mask = losses.apply_mask(None if used is None else used.clone(), mask, values.dtype, reduction)
        weight = None if mask is None or reduction == "sum" else torch.as_tensor(mask).detach().sum()
        kind = "rows" if weight is None else "weights"
        is_by_row = values.ndim and rows in (None, len(values))
        notes.append(("sum" if reduction == "sum" else kind if is_by_row else "batch", weight))
        return result * factor if reduction == "sum" else result

    losses.reduce_weighted_values = reduce
    try:
        yield notes
    finally:
        losses.reduce_weighted_values = original


def standardize_weights(y: Any, weights: Any) -> Any:
    """Returns weights of rows in the structure of the targets, as `fit` of Keras makes them, with ones for None.

    Raises:
        ConfigError: Their structures differ.
    """
    keras = import_keras()
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    try:
        adapter = ArrayDataAdapter(y, y, weights)
    except ValueError as error:
        # Keras shows the arrays.
        raise ConfigError(str(error).partition("\n")[0]) from error
    ones = np.ones(len(keras.tree.flatten(y)[0]))
    return keras.tree.map_structure(lambda one: ones if one is None else one, adapter._inputs[2])


def row_states(metric: Any, rows: int) -> torch.Tensor:
    """Returns the states of a metric after a batch; those of a mean that got the mean of the batch alone count rows."""
    states = flat_states(metric)
    is_single = is_mean(metric) and type(metric) is import_keras().metrics.Mean and float(states[1]) == 1
    return states * rows if is_single else states


def _add_metrics(named: dict[str, Any], parts: list[Any], prefix: str) -> None:
    """Adds metrics of outputs by their names, with a prefix or a number where a name exists, as Keras does."""
    for part in parts:
        for metric in part.metrics if part is not None else []:
            output = f"{part.output_name}_" if part.output_name else ""
            name = f"{output}{metric.name}"
            if name in named and prefix:
                name = f"{output}{prefix}{metric.name}"
            number = 0
            while name in named:
                number += 1
                name = f"{output}{metric.name}_{number}"
            named[name] = metric


LOOP = ("fit", "make_train_function", "make_test_function", "make_predict_function")
"""The methods of Keras' loop that a run does not call."""


def is_built(program: Any) -> bool:
    """Returns whether a batch has gone through all layers of a model."""
    return all(layer.built for layer in program._flatten_layers())


def overridden_steps(program: Any) -> list[str]:
    """Returns the methods of Keras' loop that the class of a model writes itself."""
    keras = import_keras()
    names = ("train_step", "test_step", "predict_step", *LOOP)
    return [name for name in names if getattr(type(program), name) is not getattr(keras.Model, name)]


def rate_source(optimizer: Any) -> Any:
    """Returns what gives an optimizer its learning rate: a variable, a schedule, or a function."""
    optimizer = inner_optimizer(optimizer)
    return optimizer._learning_rate


def is_rate_set(optimizer: Any) -> bool:
    """Returns whether the learning rate of an optimizer is a variable."""
    return optimizer is not None and isinstance(rate_source(optimizer), import_keras().Variable)


def rate_inputs(function: Any) -> list[str]:
    """Returns what a function that gives a learning rate reads beside plain numbers, by its names."""
    plain = int | float | ModuleType | FunctionType | BuiltinFunctionType | type
    if not isinstance(function, FunctionType):
        return [type(function).__name__]
    variables = inspect.getclosurevars(function)
    return [name for name, v in {**variables.globals, **variables.nonlocals}.items() if not isinstance(v, plain)]


def current_rate(program: Any) -> float | None:
    """Returns the learning rate of a model's optimizer; None if a schedule gives it."""
    optimizer = program.optimizer
    schedule = import_keras().optimizers.schedules.LearningRateSchedule
    is_fixed = optimizer is not None and not isinstance(rate_source(optimizer), schedule)
    return float(optimizer.learning_rate) if is_fixed else None


def weight_versions(program: Any) -> list[int]:
    """Returns a number for each weight of a model, which changes whenever the weight is written."""
    return [version_of(tensor_of(variable)) for variable in program.weights]


def begin_epoch(program: Any, rate: float, steps: int) -> None:
    """Gives a model's optimizer the learning rate of a run, unless it has a schedule, and the number of its steps."""
    if is_rate_set(program.optimizer):
        program.optimizer.learning_rate = rate
    if program.optimizer is not None:
        step_counter(inner_optimizer(program.optimizer)).assign(steps)


def count_steps(program: Any) -> int:
    """Returns the number of steps that the optimizer of a model has counted, see `step_counter`."""
    return 0 if program.optimizer is None else int(step_counter(inner_optimizer(program.optimizer)))


def step_counter(optimizer: Any) -> Any:
    """Returns the variable that counts the calls of `apply`, with gradient accumulation those between updates, too."""
    return optimizer._iterations


def excludes_weights(optimizer: Any) -> bool:
    """Returns whether weight decay leaves some variables alone, which the optimizer knows by their names."""
    names = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    return bool(names or getattr(optimizer, "_exclude_from_weight_decay", None))


def decay_cache(optimizer: Any) -> Any:
    """Returns the answers of `is_decayed` that an optimizer keeps; None if it keeps none."""
    return getattr(optimizer, "_exclude_from_weight_decay_cache", None)


def is_decayed(optimizer: Any, variable: Any) -> bool:
    """Returns whether weight decay acts on a variable."""
    return bool(optimizer._use_weight_decay(variable))


def build_symbolically(program: Any, batch: Any) -> None:
    """Lets Keras make the weights, metrics and losses of a model for a batch, as its own `fit` does."""
    if batch is None or not program.compiled:
        return
    optimizer = program.optimizer
    # The run has its own.
    program.optimizer = None
    try:
        program._symbolic_build(data_batch=batch)
    finally:
        program.optimizer = optimizer


def loss_scale(program: Any) -> list[float] | None:
    """Returns the state that a `LossScaleOptimizer` gives the scale of the loss; None for another optimizer."""
    optimizer = program.optimizer
    if not isinstance(optimizer, import_keras().optimizers.LossScaleOptimizer):
        return None
    if not optimizer.built:
        return [float(optimizer.initial_scale), 0.0]
    return [float(optimizer.dynamic_scale), float(optimizer.step_counter)]


def variables_of(optimizer: Any) -> list[Any]:
    """Returns the variables of an optimizer, last those that Keras does not list in a `LossScaleOptimizer`."""
    inner, listed = inner_optimizer(optimizer), {id(variable) for variable in optimizer.variables}
    values = [value for value in vars(inner).values() if isinstance(value, import_keras().Variable)]
    return [*optimizer.variables, *(variable for variable in values if id(variable) not in listed)]


def inner_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer that a `LossScaleOptimizer` calls; another optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)
