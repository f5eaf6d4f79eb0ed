"""`fit`, `evaluate` and `predict` of Keras programs, with the arguments and the results of `keras.Model`.

`fit` writes its arrays and its model where workers read them, makes a configuration with a `KerasTask` of its
arguments, and calls `run_training`. So a call is a run like any other, with a directory, a report and a resume.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from io import StringIO
from os import fspath
from typing import Any

import numpy as np
from torch import nn

from ray_app.cli.launch import Group
from ray_app.config.config import Config
from ray_app.config.import_paths import explain_extra
from ray_app.config.sections import RunSection
from ray_app.config.strategies import STRATEGIES
from ray_app.driver.finalize import stored_job
from ray_app.driver.parsing import load_config
from ray_app.driver.result import Result
from ray_app.driver.run import Faults, open_run
from ray_app.driver.trained_run import load_trained_job
from ray_app.errors import ConfigError, NonFiniteError, RunExistsError
from ray_app.keras.history import History, copy_state, is_validated, make_history
from ray_app.keras.inputs import (
    Fields,
    FitColumns,
    RowArguments,
    fill_columns,
    first_rows,
    is_path,
    is_source,
    store_batches,
    store_program,
)
from ray_app.keras.strategies import Strategy, strategy_of
from ray_app.runlog.output import TextConsole
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.stored_config import stored_config
from ray_app.storage.files import read_json, to_location
from ray_app.task.keras import library
from ray_app.task.keras.callbacks import (
    CallbackRunner,
    backup_name,
    ends_at_nan,
    evaluates_average,
    monitored_fields,
    refuse_batch_saves,
    running_callbacks,
)
from ray_app.task.keras.module import KerasModule
from ray_app.task.keras.program import hold
from ray_app.task.keras.task import Columns, KerasTask
from ray_app.train.job import Hooks

logger = logging.getLogger(__name__)

_TASK = "ray_app.task.keras.KerasTask"
_LINES = "ray_app.keras.history.EpochLines"
_WORKERS = "scaling.max_workers"
_UNTRACKED = f"The run is not recorded in MLflow, which is {explain_extra('mlflow')}"


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
    shuffle: bool | str = True,
    class_weight: Mapping[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Sequence[int] = 1,
    *,
    name: str | None = None,
    workers: int | str | None = None,
    inputs: Columns | None = None,
    target: Columns | None = None,
    fields: Mapping[str, Any] | None = None,
) -> History:
    """Trains a compiled Keras model as a run, with the arguments of `keras.Model.fit`.

    In another process of `TF_CONFIG` than the chief's it waits for the chief's run, and returns the course of that. A
    model, as opposed to a function, has the trained weights afterwards, and its optimizer the state of training, as
    `Model.fit` leaves them: another call continues with both.

    Args:
        model: A function that returns a compiled `keras.Model`, its import path, or the model itself, which Keras
            writes to a file with its weights.
        x: Arrays: NumPy, torch, or several in a list or dictionary. Or what gives batches of `x`, `(x, y)` or `(x, y,
            sample_weight)`: a `keras.utils.PyDataset`, a generator, a torch `DataLoader`, a `tf.data.Dataset`; it is
            read once, and written as a data set. Or the path of a data set that `ray-app ingest` has written.
        y: The targets in the forms of arrays; with batches and a path None.
        batch_size: Rows of a step over all workers; by default 32, as many as `steps_per_epoch` leaves to a step, or
            the rows of the first of the batches.
        verbose: 0 shows nothing, 2 a line for each epoch, 1 and `auto` also the progress within it.
        callbacks: Callbacks of Keras, also ones of your own. They run in this process between two epochs, while all
            workers wait. What they change then (`stop_training`, the learning rate, weights) takes effect before the
            next step, is recorded, and is repeated by a resume. The methods for batches are called at the end of the
            epoch.
        validation_split: The fraction of the arrays, their last rows, that become validation data.
        validation_data: `(x, y)`, `(x, y, sample_weight)`, what gives batches, or the path of a data set.
        shuffle: Whether arrays and the rows of a `PyDataset` are shuffled in each epoch. Other batches are used in the
            order of the source, unless a loader or a pipeline shuffles them. With a path, False uses the rows in the
            order of the files.
        class_weight: The weight of each class in training.
        sample_weight: The weight of each row; with a path the name of the column.
        initial_epoch: The number of the first epoch: one of the run with `name`, which continues, or of a new run.
        steps_per_epoch: Steps of an epoch; the next one continues with the rows after these. Of batches without an end
            or a length, such as those of a generator, so many are read, and are the data of each epoch.
        validation_steps: The first batches of the validation data that are used; of a path as many rows, an equal share
            of each part.
        validation_batch_size: Rows of one forward pass of an evaluation; by default `batch_size`.
        validation_freq: Epochs between two evaluations, or a list of the epochs, from 1. With a list a run evaluates
            more often, and the history has those of the list.
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
    strategy = strategy_of(model)
    if strategy is not None and strategy.group is not None and strategy.group.machines.rank:
        return _follow_run(strategy.group, model)
    epochs, steps_per_epoch = _limit_steps(initial_epoch, epochs, steps_per_epoch)
    more = dict(fields or {})
    workers_fields = _worker_fields(strategy, workers)
    has_workers = more.get("train.strategy", workers_fields["train.strategy"]) != "single"
    storage_path = more.get("run.storage_path", RunSection.storage_path)
    running, lines = running_callbacks(callbacks)
    if has_workers:
        refuse_batch_saves(running)
    users_model = model if isinstance(model, library.import_keras().Model) else None
    name = name or _resumable_name(backup_name(callbacks), storage_path)
    console = TextConsole(file=StringIO()) if verbose in (0, 2) else TextConsole()
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    ordered = more.get("data.shuffle", shuffle)
    validation = validation_split, validation_data, validation_steps, validation_batch_size
    rows = storage_path, x, y, sample_weight, batch_size, ordered, steps_per_epoch, *validation
    columns, data = RowArguments(*rows, inputs, target, say, ends_at_nan(running)).locate()
    if users_model is not None and not is_path(x):
        library.build_symbolically(users_model, first_rows((x, y, sample_weight)))
    before = None if name is None else stored_config(RunPaths(to_location(storage_path) / name))
    earlier = None if before is None else before.task.init_args.get("model")
    # A run that is continued counts all its epochs.
    first_epoch = initial_epoch if before is None else 0
    if first_epoch and name is not None:
        raise ConfigError(
            f"initial_epoch is {initial_epoch}, but no run {name!r} exists that could continue there. Leave name or"
            " initial_epoch out."
        )
    # Keras' own seed decides where no field does.
    seed = library.random_seed(Config.seed)
    init_args = {
        "model": store_program(model, storage_path, more.get("seed", seed), earlier, has_workers),
        "class_weight": None if class_weight is None else _read_class_weight(class_weight, sample_weight),
        **asdict(columns),
        **({"evaluate_average": True} if evaluates_average(callbacks) else {}),
        **({"infinite_target": True} if ends_at_nan(running) else {}),
    }
    settings: Fields = {
        "task": {"class_path": _TASK, "init_args": init_args},
        **data,
        "seed": seed,
        "train.epochs": epochs - first_epoch,
        "checkpoint.every_epochs": _evaluation_cadence(validation_freq, first_epoch),
        **workers_fields,
        **({} if name is None else {"run.name": name}),
    }
    settings |= (untracked := _untracked_fields(more))
    if verbose != 0:
        lines_of_epochs = {"epochs": epochs, "first_epoch": first_epoch, "validates": "data.eval_path" in settings}
        more["observers"] = [*more.get("observers", []), {"class_path": _LINES, "init_args": lines_of_epochs}]
    if "data.eval_path" in settings:
        # With an `evaluator` in `TF_CONFIG` the strategy has said where.
        settings = _evaluation_fields(str(more.get("train.strategy", settings["train.strategy"])), epochs) | settings
        settings |= {"evaluate.where": "workers", **monitored_fields(running)} if running else {}
    config = load_config(**{key.replace(".", "__"): value for key, value in {**settings, **more}.items()})
    _refuse_other_arrays(config, before)
    for text in [*lines, *([_UNTRACKED] if untracked else [])]:
        say(text)
    validated = partial(is_validated, validation_freq=validation_freq)
    runner = CallbackRunner(running, users_model, first_epoch, validated) if running else None
    result, ended = _train(config, console, runner, users_model, before is not None)
    params = {"verbose": verbose, "epochs": epochs, "steps": stored_job(RunPaths(result.path)).steps_per_epoch}
    if ended is not None:
        numbers = list(range(initial_epoch, initial_epoch + len(ended["loss"])))
        return History(ended, numbers, params, users_model, result)
    history = make_history(result, (initial_epoch, first_epoch), params, users_model, validation_freq)
    history = replace(history, ends_with_average=not (runner and runner.sets_final_weights))
    if strategy is not None and strategy.group is not None:
        course = {name: getattr(history, name) for name in ("history", "epoch", "params", "ends_with_average")}
        strategy.group.broadcast({"path": str(history.result.path), "course": course})
    return _give_state(history, users_model)


def _give_state(history: History, users_model: Any) -> History:
    """Gives the model of the user, if there is one, the state of training, and returns the history with a model."""
    trained = history.keras_model()
    if users_model is None:
        return replace(history, model=trained)
    copy_state(trained, users_model)
    return history


def _follow_run(group: Group, model: Any) -> History:
    """Waits for the run of the chief, gives a model its weights, and returns its course.

    Raises:
        RayAppError: The chief's program has ended before.
        SystemExit: This machine cannot read the run's folder.
    """
    run = group.broadcast(None)
    paths = RunPaths(to_location(run["path"]))
    if (summary := read_json(paths.summary)) is None:
        print(f"The run has ended. This machine does not have its folder, {run['path']}, so this program also ends.")
        raise SystemExit(0)
    users_model = model if isinstance(model, library.import_keras().Model) else None
    result = Result(paths.root, summary, load_trained_job(paths).task)
    return _give_state(History(**run["course"], model=users_model, result=result), users_model)


def _limit_steps(initial_epoch: int, epochs: int, steps_per_epoch: int | None) -> tuple[int, int | None]:
    """Returns the number of the last epoch and the steps of an epoch, within the limits of Keras' configuration.

    Raises:
        ConfigError: There is no epoch to train.
    """
    config = library.import_keras().config
    epochs = min(epochs, config.max_epochs() or epochs)
    if initial_epoch >= epochs:
        raise ConfigError(
            f"initial_epoch is {initial_epoch}, but epochs is {epochs}, the number of the last epoch, so no epoch is"
            " left to train. Raise epochs."
        )
    return epochs, min(filter(None, (steps_per_epoch, config.max_steps_per_epoch())), default=None)


def _train(
    config: Config, console: TextConsole, runner: CallbackRunner | None, users_model: Any, is_continued: bool
) -> tuple[Result, dict[str, list[float]] | None]:
    """Trains a run.

    Args:
        runner: The callbacks; None if there are none.
        users_model: The model of the user; it has every change of the weights if this process trains. None for a
            function.
        is_continued: Whether the run exists.

    Returns:
        The run, and the values of its epochs if `TerminateOnNaN` has ended it.
    """
    with ExitStack() as stack:
        hooks = Hooks()
        if users_model is not None and not config.train.strategy_traits.has_workers:
            stored = config.task.init_args["model"]["init_args"]
            # The first model of a run that is continued is in its file.
            if not is_continued or not stored["path"]:
                stack.enter_context(hold(stored["path"], stored["sha256"], users_model))

            def lend(module: nn.Module) -> None:
                assert isinstance(module, KerasModule)
                stack.callback(module.lend(users_model))

            hooks = Hooks(built=lend)
        with open_run(config, console, Faults(hooks), intervene=runner) as run:
            try:
                return run.run(), None
            except NonFiniteError:
                if runner is None or (history := runner.end_at_nan()) is None:
                    raise
                return Result(run.job.paths.root, read_json(run.job.paths.summary), run.job.task), history


def _resumable_name(name: str | None, storage_path: str) -> str | None:
    """Returns the name of the run that `BackupAndRestore` continues, with a number if the run of this name is finished.

    Keras deletes the backup of a finished training.
    """
    if name is None:
        return None
    number, numbered = 1, name
    while (read_json(RunPaths(to_location(storage_path) / numbered).summary) or {}).get("status") == "finished":
        number += 1
        numbered = f"{name}-{number}"
    return numbered


def _untracked_fields(fields: Mapping[str, Any]) -> Fields:
    """Returns the field that turns tracking off where MLflow is not installed and the caller names no field of it."""
    is_chosen = any(name.startswith("tracking.") for name in fields)
    return {} if is_chosen or importlib.util.find_spec("mlflow") else {"tracking.enabled": False}


def _refuse_other_arrays(config: Config, before: Config | None) -> None:
    """Raises RunExistsError if the run of this name was trained on other rows; a folder's name is their digest."""
    if before is not None and to_location(before.data.sources[0]).name != to_location(config.data.sources[0]).name:
        raise RunExistsError(
            f"The run {config.run.name!r} was trained on other rows: {before.data.path}, now {config.data.path}. Choose"
            " another name for a new run, or pass the same rows, or the first path as x, to continue it."
        )


def _evaluation_cadence(validation_freq: Any, first_epoch: int) -> int:
    """Returns the epochs between two evaluations that has all epochs of `validation_freq`, which may be a list."""
    numbers = validation_freq if isinstance(validation_freq, list | tuple) else [validation_freq]
    if not numbers or not all(isinstance(number, int) and number > 0 for number in numbers):
        raise ConfigError(
            f"validation_freq is {validation_freq!r}; set it to the epochs between two evaluations, or to a list of"
            " epochs, counted from 1."
        )
    return math.gcd(*numbers, first_epoch)


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
        x: Arrays or batches as in `fit`, or the path of a data set.
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
    columns = FitColumns(task.model_inputs, task.model_target, task.sample_weight)
    if is_path(x) or is_source(x):
        data: Any = _locate(run, x, columns)
    else:
        weights = [] if task.sample_weight is None else task.sample_weight
        like = library.import_keras().tree.map_structure(
            lambda name: np.ones((1, *task.column_types[name][2])), weights
        )
        data = columns.fill(x, y, sample_weight, like)
    values = run.result.evaluate(data, "newest", batch_size=batch_size)
    if return_dict:
        return dict(sorted(values.items()))
    if len(values) == 1:
        return values["loss"]
    # As in Keras: metrics by their own names, in their order, and then those that are reported by others, sorted.
    names = ["loss", *(metric.name for _, metric in task.compiled_metrics() if metric.name in values)]
    return [values[name] for name in [*names, *sorted(values.keys() - set(names))]]


def predict(run: History, x: Any, batch_size: int | None = None, verbose: int | str = "auto") -> Any:
    """Predicts rows by the trained model of a run in this process, as `keras.Model.predict` does.

    Args:
        run: The result of `fit`.
        x: Arrays or batches as in `fit`, or the path of a data set.
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
    if is_path(x) or is_source(x):
        data: Any = _locate(run, x, FitColumns(task.model_inputs))
    else:
        data = fill_columns(task.model_inputs, x, "x")
    outputs = run.result.predict(data, "newest", batch_size=batch_size)
    if outputs.keys() == {"predicted"}:
        return outputs["predicted"]
    is_list = list(outputs) == [f"predicted_{number}" for number in range(len(outputs))]
    return list(outputs.values()) if is_list else outputs


def _locate(run: History, x: Any, columns: FitColumns) -> str:
    """Returns the path of rows in their order, which are written if they come in batches."""
    if is_path(x):
        return fspath(x)
    return store_batches(str(run.result.path.parent), x, "x", columns, None, False, logger.info).path


def _task_of(run: History) -> KerasTask:
    if not isinstance(run, History):
        raise ConfigError(
            f"The first argument is a {type(run).__name__}; pass the result of fit. A model that was passed to fit has"
            " the trained weights, so its evaluate and predict also work."
        )
    if library.inner_optimizer(run.model.optimizer).use_ema:
        raise ConfigError(
            "Training has ended with the optimizer's average (use_ema), but checkpoints of the run have the trained"
            " weights. Use history.model.evaluate and history.model.predict."
        )
    assert isinstance(run.result.task, KerasTask)
    return run.result.task


def _read_class_weight(weights: Mapping[int, float], sample_weight: Any) -> dict[int, float]:
    """Returns weights by the numbers of classes."""
    if sample_weight is not None:
        raise ConfigError(
            "You cannot `class_weight` and `sample_weight` at the same time. Multiply the weights, and pass the product"
            " as sample_weight."
        )
    try:
        return {int(number): float(weight) for number, weight in weights.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"class_weight is {weights!r}; map each class number to a weight, such as {{0: 1.0}}.") from (
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
    where = "workers" if traits is None or traits.can_evaluate else "actor"
    # An evaluator that lags behind may skip no epoch.
    return {"evaluate.where": where, "evaluate.max_pending": max(epochs, 1)}
