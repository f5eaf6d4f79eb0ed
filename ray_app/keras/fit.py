"""`fit`, `evaluate` and `predict` of Keras programs, with the arguments and the results of `keras.Model`.

`fit` writes its arrays and its model where workers read them, makes a configuration with a `KerasTask` of its
arguments, and calls `run_training`. So a call is a run like any other, with a directory, a report and a resume.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from os import fspath
from typing import Any

import numpy as np

from ray_app.config.config import Config
from ray_app.config.import_paths import explain_extra
from ray_app.config.sections import RunSection
from ray_app.config.strategies import STRATEGIES
from ray_app.data.dataset import open_dataset
from ray_app.driver.parsing import load_config
from ray_app.driver.result import Result
from ray_app.driver.run import run_training
from ray_app.errors import ConfigError, RunExistsError
from ray_app.keras.inputs import FitColumns, fill_columns, is_path, split_arrays, store_arrays, store_program
from ray_app.keras.strategies import Strategy, strategy_of
from ray_app.preflight.inputs import make_plan, make_task, read_classes
from ray_app.runlog.output import TextConsole
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.stored_config import stored_config
from ray_app.storage.files import to_location
from ray_app.task.keras import library
from ray_app.task.keras.callbacks import CallbackPlan, plan_callbacks
from ray_app.task.keras.optimizer import SCHEDULE
from ray_app.task.keras.task import Columns, KerasTask

logger = logging.getLogger(__name__)

_TASK = "ray_app.task.keras.KerasTask"
_BATCH_SIZE = 32
"""Keras' default."""
_WORKERS = "scaling.max_workers"
_UNTRACKED = f"There is no MLflow run, since MLflow is {explain_extra('mlflow')}"
_INPUTS, _TARGETS = ("image", "features"), ("label", "target")
"""Names that an ingest gives columns."""
Fields = dict[str, Any]
"""Fields of a configuration by their dotted names."""


@dataclass(frozen=True)
class History:
    """The course of a run by epoch, as `Model.fit` returns it, and the run itself.

    Args:
        history: The values of each epoch by name: `loss` and the metrics over the training rows, and with `val_` before
            their names the values over the validation data. A metric that is not a mean over rows, such as AUC, has
            only the latter.
        epoch: The numbers of the epochs, from 0.
        result: The run.
        checkpoint: The checkpoint with the weights that training has ended with: `newest`, or `best`.
    """

    history: dict[str, list[float]]
    epoch: list[int]
    result: Result = field(repr=False)
    checkpoint: str = "newest"

    def keras_model(self) -> Any:
        """Returns the trained `keras.Model`."""
        return self.result.keras_model(self.checkpoint)


def fit(
    model: Any,
    x: Any,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: int | str = "auto",
    callbacks: Sequence[Any] | None = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int = 1,
    *,
    name: str | None = None,
    workers: int | str | None = None,
    inputs: Columns | None = None,
    target: Columns | None = None,
    fields: Mapping[str, Any] | None = None,
) -> History:
    """Trains a compiled Keras model as a run, with the arguments of `keras.Model.fit`.

    A model, as opposed to a function, has the trained weights afterwards, as `Model.fit` leaves them. Its optimizer is
    as before: another call begins with a new one.

    Args:
        model: A function that returns a compiled `keras.Model`, its import path, or the model itself, which Keras
            writes to a file with its weights.
        x: Arrays: NumPy, torch, or several in a list or dictionary. Or the path of a data set that `ray-app ingest`
            has written.
        y: The targets in the same forms; with a path None.
        batch_size: Rows of a step over all workers; by default 32.
        verbose: 0 shows nothing.
        callbacks: Callbacks of Keras. What has a counterpart in a run is mapped, and a line says to what; what has none
            is refused.
        validation_split: The fraction of the arrays, their last rows, that become validation data.
        validation_data: `(x, y)`, `(x, y, sample_weight)`, or the path of a data set.
        shuffle: True: rows are shuffled in each epoch, which cannot be switched off.
        class_weight: The weight of each class in training.
        sample_weight: The weight of each row; with a path the name of the column.
        steps_per_epoch: Steps of an epoch; the next one continues with the rows after these.
        validation_batch_size: Rows of one forward pass of an evaluation; by default `batch_size`.
        validation_freq: Epochs between two evaluations.
        name: The name of the run. A call with the name of an earlier run continues it, with more epochs, or after it
            was interrupted. By default each call is a new run.
        workers: The largest number of workers, or `all` of the cluster. A model that was
            built in the scope of a strategy has its number by default; without a strategy it trains in this process.
        inputs: With a path: the columns of the inputs, see `KerasTask`; by default `image` or `features`.
        target: With a path: the columns of the targets; by default `label` or `target`.
        fields: Further fields of the configuration by their dotted names: `{"train.precision": "bf16"}`.

    Raises:
        ConfigError: An argument is refused; nothing was started.
        DataError: The data is refused.
        RayAppError: The run failed; starting it again with its name continues it.
    """
    _refuse(
        {
            f"initial_epoch is {initial_epoch}; a run continues by its name. Give name= and the higher number of"
            " epochs.": initial_epoch != 0,
            f"validation_steps is {validation_steps}; an evaluation uses all rows. Give fewer rows, or"
            ' fields={"evaluate.max_rows": ...}, an equal share of all parts.': validation_steps is not None,
            f"shuffle is {shuffle!r}; rows are shuffled in every epoch, in an order that depends on the seed alone."
            " Leave it out.": shuffle is not True,
            f"validation_freq is {validation_freq!r}; it must be a number of epochs.": not isinstance(
                validation_freq, int
            ),
            "validation_split and validation_data are set; leave one of them out.": bool(validation_split)
            and validation_data is not None,
        }
    )
    more = dict(fields or {})
    storage_path = more.get("run.storage_path", RunSection.storage_path)
    plans = plan_callbacks(callbacks)
    columns, data = _locate_rows(storage_path, (x, y, sample_weight), validation_split, validation_data, inputs, target)
    before = None if name is None else stored_config(RunPaths(to_location(storage_path) / name))
    earlier = None if before is None else before.task.init_args.get("model")
    init_args = {
        "model": store_program(model, storage_path, more.get("seed", Config.seed), earlier),
        "class_weight": None if class_weight is None else _read_class_weight(class_weight),
        **asdict(columns),
    }
    rows = _BATCH_SIZE if batch_size is None else batch_size
    settings: Fields = {
        "task": {"class_path": _TASK, "init_args": init_args},
        **data,
        "data.global_batch_size": rows,
        "train.epochs": epochs,
        "train.steps_per_epoch": steps_per_epoch,
        "checkpoint.every_epochs": validation_freq,
        "evaluate.batch_size": rows if validation_batch_size is None else validation_batch_size,
        **_worker_fields(strategy_of(model), workers),
        **{key: value for plan in plans for key, value in plan.fields.items()},
        **({} if name is None else {"run.name": name}),
    }
    settings |= (untracked := _untracked_fields(more))
    if "data.eval_path" in settings:
        settings |= _evaluation_fields(str(more.get("train.strategy", settings["train.strategy"])), epochs)
    elif "evaluate.metric" in settings:
        raise ConfigError("A callback decides by val_ metrics, and validation_data is missing. Give it.")
    config = load_config(**{key.replace(".", "__"): value for key, value in {**settings, **more}.items()})
    _refuse_other_arrays(config, before)
    config, rates = add_schedule(config, plans)
    console = TextConsole(file=StringIO()) if verbose == 0 else TextConsole()
    for text in [*(plan.text for plan in plans), *([_UNTRACKED] if untracked else [])]:
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    checkpoint = next((plan.checkpoint for plan in plans if plan.checkpoint), "newest")
    history = _make_history(run_training(config, console), checkpoint, rates)
    if isinstance(model, library.import_keras().Model):
        _set_weights(model, history.keras_model())
    for plan in plans:
        if plan.at_end is not None:
            plan.at_end(history)
    return history


def _untracked_fields(fields: Mapping[str, Any]) -> Fields:
    """Returns the field that turns tracking off where MLflow is not installed and the caller names no field of it."""
    is_chosen = any(name.startswith("tracking.") for name in fields)
    return {} if is_chosen or importlib.util.find_spec("mlflow") else {"tracking.enabled": False}


def add_schedule(config: Config, plans: Sequence[CallbackPlan]) -> tuple[Config, list[float]]:
    """Returns a configuration with the schedule of a callback, and the learning rate of each epoch; else none.

    The function gets the rate that the model is compiled with for the first epoch.

    Raises:
        ConfigError: The model or the configuration has a schedule already, or the function returns no float.
    """
    schedules = [plan.schedule for plan in plans if plan.schedule is not None]
    if not schedules:
        return config, []
    dataset = open_dataset(config.data.path)
    task = make_task(config).prepare(dataset.facts)
    fields = task.optimizer_fields()
    if len(schedules) > 1 or config.schedule is not None or "schedule" in fields:
        raise ConfigError(
            "LearningRateScheduler sets the learning rate of each epoch, and another schedule sets it, too. Leave one"
            " of them out."
        )
    rates = make_rates(schedules[0], fields["optimizer"]["init_args"]["lr"], config.train.epochs)
    plan = make_plan(config, dataset.manifest, read_classes(config, dataset))
    steps = config.train.steps_per_epoch or plan.steps_per_epoch
    keras_schedules = library.import_keras().optimizers.schedules
    # The last epoch adds a boundary, since Keras needs at least one.
    boundaries = [steps * (epoch + 1) - 1 for epoch in range(len(rates))]
    decay = keras_schedules.PiecewiseConstantDecay(boundaries, [*rates, rates[-1]])
    spec = {"class_path": SCHEDULE, "init_args": {"serialized": keras_schedules.serialize(decay)}}
    return config.replace(schedule=spec), rates


def make_rates(schedule: Callable[..., float], rate: float, epochs: int) -> list[float]:
    """Returns the learning rate of each epoch as `LearningRateScheduler` sets it, from the rate of the optimizer."""
    rates = []
    for epoch in range(epochs):
        try:
            rate = schedule(epoch, rate)
        except TypeError:
            rate = schedule(epoch)
        if not isinstance(rate, float | np.floating):
            raise ConfigError(f"The schedule returned {rate!r} for epoch {epoch}; it must return a float.")
        # An optimizer keeps its rate as float32, and the schedule gets the rate of the epoch before.
        rate = float(np.float32(rate))
        rates.append(rate)
    return rates


def _locate_rows(
    storage_path: str,
    rows: Sequence[Any],
    validation_split: float,
    validation_data: Any,
    inputs: Columns | None,
    target: Columns | None,
) -> tuple[FitColumns, Fields]:
    """Returns the columns that the model takes, and the paths of the data, which is written if it is arrays.

    Args:
        rows: The arguments x, y and sample_weight.
    """
    x, y, sample_weight = rows
    if is_path(x):
        _refuse(
            {
                "y is set, and x is a path; name the column of the targets: target=.": y is not None,
                "validation_split is set, and x is a path; ray-app ingest --eval_fraction holds rows out. Give"
                " validation_data=.": bool(validation_split),
            }
        )
        path, columns = fspath(x), _choose_columns(fspath(x), inputs, target, sample_weight)
    else:
        if inputs is not None or target is not None:
            raise ConfigError("inputs and target name columns of a data set, and x is not a path. Leave them out.")
        if validation_split:
            rows, validation_data = split_arrays((x, y, sample_weight), validation_split)
        columns = FitColumns.name(*rows)
        path = store_arrays(storage_path, columns.fill(*rows))
    data = {"data.path": path}
    if validation_data is not None:
        data["data.eval_path"] = _open_validation(storage_path, validation_data, columns)
    return columns, data


def _refuse_other_arrays(config: Config, before: Config | None) -> None:
    """Raises RunExistsError if the run of this name was trained on other rows; a folder's name is their digest."""
    if before is not None and to_location(before.data.path).name != to_location(config.data.path).name:
        raise RunExistsError(
            f"The run {config.run.name!r} was trained on other rows: {before.data.path}, now {config.data.path}. Give"
            " another name for a new run, or the same rows to continue it."
        )


def _make_history(result: Result, checkpoint: str, rates: list[float]) -> History:
    """Returns the course of a run, with its names in the order of Keras."""
    epochs = result.epochs()
    names = sorted({name for values in epochs for name in values})
    history = {name: [values[name] for values in epochs if name in values] for name in names}
    if rates:
        history["learning_rate"] = rates[: len(epochs)]
    return History(history, list(range(len(epochs))), result, checkpoint)


def evaluate(
    run: History,
    x: Any,
    y: Any = None,
    batch_size: int | None = None,
    verbose: int | str = "auto",
    sample_weight: Any = None,
    return_dict: bool = False,
) -> float | list[float] | dict[str, float]:
    """Scores the trained model of a run in this process, as `keras.Model.evaluate` does.

    Args:
        run: The result of `fit`.
        x: Arrays as in `fit`, or the path of a data set.
        y: The targets; with a path None.
        batch_size: Rows of one forward pass; default: `evaluate.batch_size` of the run.
        verbose: As in Keras; nothing is printed here.
        sample_weight: The weight of each row; by default 1.

    Returns:
        The loss; with metrics a list of the loss and them; with `return_dict` all by their names.

    Raises:
        ConfigError: The structure of the arrays differs from the arrays of `fit`.
        DataError: The data is refused.
    """
    del verbose
    task = _task_of(run)
    if is_path(x):
        data: Any = fspath(x)
    else:
        data = FitColumns(task.model_inputs, task.model_target, task.sample_weight).fill(x, y, sample_weight)
    values = run.result.evaluate(data, run.checkpoint, batch_size=batch_size)
    if return_dict:
        return values
    if len(values) == 1:
        return values["loss"]
    # As in Keras: metrics by their own names, in their order, and then those that are reported by others, sorted.
    names = ["loss", *(metric.name for _, metric in task.compiled_metrics() if metric.name in values)]
    return [values[name] for name in [*names, *sorted(values.keys() - set(names))]]


def predict(run: History, x: Any, batch_size: int | None = None, verbose: int | str = "auto") -> Any:
    """Predicts rows by the trained model of a run in this process, as `keras.Model.predict` does.

    Args:
        run: The result of `fit`.
        x: Arrays as in `fit`, or the path of a data set.
        batch_size: Rows of one forward pass; default: `evaluate.batch_size` of the run.
        verbose: As in Keras; nothing is printed here.

    Returns:
        An array (rows, ...); of several outputs a list of arrays, or a dictionary.

    Raises:
        ConfigError: The structure of the arrays differs from the arrays of `fit`.
        DataError: The data is refused.
    """
    del verbose
    task = _task_of(run)
    data: Any = fspath(x) if is_path(x) else fill_columns(task.model_inputs, x, "x")
    outputs = run.result.predict(data, run.checkpoint, batch_size=batch_size)
    if outputs.keys() == {"predicted"}:
        return outputs["predicted"]
    is_list = list(outputs) == [f"predicted_{number}" for number in range(len(outputs))]
    return list(outputs.values()) if is_list else outputs


def _refuse(problems: Mapping[str, bool]) -> None:
    """Raises ConfigError with all problems that apply."""
    if applying := [problem for problem, applies in problems.items() if applies]:
        raise ConfigError("\n".join(applying))


def _task_of(run: History) -> KerasTask:
    if not isinstance(run, History):
        raise ConfigError(
            f"The first argument is a {type(run).__name__}; give what fit has returned. A model that was given to fit"
            " has the trained weights, so its own evaluate and predict work, too."
        )
    assert isinstance(run.result.task, KerasTask)
    return run.result.task


def _choose_columns(path: str, inputs: Columns | None, target: Columns | None, weights: Any) -> FitColumns:
    """Returns the columns of a data set that a model takes; by default an ingest has named them."""
    if weights is not None and not isinstance(weights, str):
        raise ConfigError(f"sample_weight is a {type(weights).__name__}; with a path it is the name of a column.")
    columns = open_dataset(path).facts.columns
    inputs = inputs or next((name for name in _INPUTS if name in columns), None)
    if inputs is None:
        raise ConfigError(
            f"{path} has the columns {', '.join(columns)}, of which none is {' or '.join(_INPUTS)}. Name the inputs and"
            ' the target: inputs="pixels", target="digit".'
        )
    return FitColumns(inputs, target or next((name for name in _TARGETS if name in columns), None), weights)


def _open_validation(storage_path: str, data: Any, columns: FitColumns) -> str:
    """Returns the path of the validation data, which is written if it is arrays."""
    if is_path(data):
        return fspath(data)
    if not isinstance(data, list | tuple) or not 1 <= len(data) <= 3:
        raise ConfigError(
            f"validation_data is a {type(data).__name__}; give (x, y), (x, y, sample_weight), or the path of a data"
            " set."
        )
    return store_arrays(storage_path, columns.fill(*data))


def _read_class_weight(weights: Mapping[int, float]) -> dict[int, float]:
    """Returns weights by the numbers of classes."""
    try:
        return {int(number): float(weight) for number, weight in weights.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"class_weight is {weights!r}; give a weight for each number of a class: {{0: 1.0}}.") from (
            error
        )


def _worker_fields(strategy: Strategy | None, workers: int | str | None) -> Fields:
    """Returns the strategy and the numbers of workers."""
    if strategy is None:
        return {"train.strategy": "single"} if workers is None else {"train.strategy": "ddp", _WORKERS: workers}
    return strategy.fields() | ({} if workers is None else {_WORKERS: workers})


def _evaluation_fields(strategy: str, epochs: int) -> Fields:
    """Returns how each epoch is evaluated: by the workers where the strategy allows it, as `Model.fit` does."""
    # `load_config` refuses a strategy that does not exist.
    traits = STRATEGIES.get(strategy)
    if traits is not None and not traits.can_evaluate:
        # An evaluator that lags behind may skip no epoch.
        return {"evaluate.where": "actor", "evaluate.max_pending": max(epochs, 1)}
    return {"evaluate.where": "workers"}


def _set_weights(model: Any, trained: Any) -> None:
    """Gives a model the weights of its trained copy; a model that its first batch would build is built."""
    if not model.built:
        model.build_from_config(trained.get_build_config())
    model.set_weights(trained.get_weights())
