"""The dry run: checks of model, optimizer, schedule and metrics on a few rows before a start, on the CPU.

Errors of the task, the optimizer and the schedule are raised here rather than in the workers, where they would cost the
start of the cluster.
"""

from __future__ import annotations

import io
import logging
import re
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR

from ray_app.config.config import Config
from ray_app.config.import_paths import TASK_OPTIMIZER, OptimizerSpec, load_class
from ray_app.config.strategies import list_strategies
from ray_app.devices import HOST
from ray_app.errors import ConfigError, TaskError
from ray_app.preflight.context import (
    SHORT_LENGTH,
    PreflightContext,
    ReadingRates,
    RowProbe,
    count_numbers,
    describe_fields,
    longest_of,
    shortest_of,
    truncate,
)
from ray_app.preflight.gradient_checks import (
    find_single_values,
    graph_nodes,
    parameters_of_turn,
    parameters_without_gradient,
)
from ray_app.preflight.model_checks import KernelRecorder, check_forward, find_failing_part, first_line
from ray_app.preflight.purity import is_same, kept_values
from ray_app.task.base import Batch, Task
from ray_app.task.language_model import CausalLanguageModel
from ray_app.task.losses import check_losses, sum_losses
from ray_app.task.metrics import Chunk, combine, score
from ray_app.task.module import ModuleTask
from ray_app.task.ragged import Arrays, concat_fields, to_batch
from ray_app.task.user_code import user_code
from ray_app.task.user_loop import LoopTask
from ray_app.track.mlflow_client import mlflow_key
from ray_app.train.build import load_reducer
from ray_app.train.job import Job
from ray_app.train.state.alternating_optimizers import TurnSchedules
from ray_app.train.state.parameters import parameter_layout
from ray_app.train.state.state import TrainingState
from ray_app.train.state.transfer import copy_to_host
from ray_app.train.step.micro_batch import module_modes, restore_modes
from ray_app.train.strategies.parameter_server.layout import Layout

logger = logging.getLogger(__name__)

_CODE_ERRORS = (NameError, AttributeError, TypeError, ImportError, NotImplementedError)
"""Errors of code that is wrong for any number of rows."""
_TIMED_ROWS = 2
_BACKWARD_FACTOR = 3
"""Time of a forward and a backward, divided by that of the forward."""
_MAX_GPU_SPEEDUP = 1000
"""Assumed speed of a GPU, divided by that of a thread of a CPU: high, that of large convolutions in bf16."""
_MIN_STEP_S = 0.01
"""Time of a step of a network that is as fast as its kernels are started."""
_GPU_SPEEDUP = 50
"""The same, low, so that the time of an evaluation on a GPU is not underrated."""
_MIN_EVALUATION_S = 30.0
"""An evaluation that takes less is not warned of: a few rows say too little."""
_UNSUPPORTED_STEP = re.compile("closure|dense")
"""Words of PyTorch's errors if a dense gradient is not enough for a step (`LBFGS`, `SparseAdam`)."""


def make_state(context: PreflightContext) -> None:
    """Makes model, optimizer and schedule with the initial parameters, and imports a gradient reducer of the user."""
    if context.config.train.reducer is not None:
        load_reducer(context.config.train.reducer)
    state = TrainingState(context.config, context.task, HOST, context.job.total_steps)
    context.job = replace(context.job, parameters=parameter_layout(state.model))
    context.row_probe = RowProbe(context.task, state)
    context.exit_stack.callback(_finish_task, context)
    state.initialize(context.initial.params)


def _finish_task(context: PreflightContext) -> None:
    """Ends what the task keeps running for the model."""
    with context.dry_run():
        context.task.finish(context.model)


def try_first_row(context: PreflightContext) -> None:
    """Runs two copies of a row through the task: cut to `SHORT_LENGTH` numbers or, if that fails, complete.

    Raises:
        TaskError: The task fails; see `_run_task`.
        ConfigError: As for `_run_task`, or the model lacks positions for the length of the row.
    """
    job, task = context.job, context.task
    row_probe = context.row_probe
    # The script of a `LoopTask` runs once, so that its only row is the longest one.
    row = longest_of(context.rows) if isinstance(task, LoopTask) else shortest_of(context.rows)
    rows = {name: concat_fields([values, values]) for name, values in row.items()}
    can_cut = isinstance(task, ModuleTask | CausalLanguageModel) and not isinstance(task, LoopTask)
    short = truncate(rows, SHORT_LENGTH) if can_cut else rows
    context.accepted_rows, context.are_short = short, can_cut
    with find_single_values(context.model, 2) as context.single_values:
        if count_numbers(short) < count_numbers(rows):
            try:
                context.unused_parameters = _run_task(job, row_probe, short)
                return
            except TaskError:
                # If the cut is not the cause, the complete rows raise the same error below.
                context.accepted_rows, context.are_short = rows, False
        try:
            context.unused_parameters = _run_task(job, row_probe, rows)
        except TaskError as error:
            for evaluates in (False, True) if job.config.data.evaluation_path is not None else (False,):
                if isinstance(task, ModuleTask) and (why := row_probe.explain_too_long(rows, evaluates)) is not None:
                    raise ConfigError(f"{why} The error was: {error}") from error
            raise


def _run_task(job: Job, row_probe: RowProbe, rows: Arrays) -> dict[str, nn.Parameter]:
    """Runs two rows through training, evaluation and prediction; returns the trained parameters without a gradient.

    Raises:
        TaskError: A method of the task or the model fails.
        ConfigError: There is not one loss per row, an operation has no deterministic kernel on GPUs, or the metrics
            lack the one that selects the best checkpoint.
    """
    task, state = job.task, row_probe.state
    config = job.config
    count = len(next(iter(rows.values())))
    unused = dict[str, nn.Parameter]()
    trained_on = user_code(lambda: f"training on two rows of {describe_fields(rows)}")
    with (
        check_forward(state.model, config.optimizers is not None, task.moving_parameters(state.model)),
        trained_on,
        _recording_kernels(config, config.scaling.worker_gpus) as gpus,
    ):
        fields = row_probe.make_batch(rows)
        if isinstance(task, ModuleTask) and not isinstance(task, LoopTask):
            _note_target_range(job, task, state.model, fields)
        for turn, losses in row_probe.losses(fields):
            row_losses = check_losses(task, losses, count)
            sum_losses(task, row_losses)
            moved = parameters_of_turn(state, turn)
            unused |= {name: moved[name] for name in parameters_without_gradient(row_losses.values, moved)}
            if turn is not None and graph_nodes(row_losses.values) is None:
                raise ConfigError(
                    "The model uses torch.utils.checkpoint with use_reentrant=True, which gives no gradient to a part"
                    " whose inputs need none, as in the turn of another optimizer. Set use_reentrant=False."
                )
            if gpus and row_losses.values.requires_grad:
                # Activation checkpointing with `use_reentrant=True` knows no `torch.autograd.grad`.
                row_losses.values.sum().backward()
                state.model.zero_grad()
    if config.data.evaluation_path is None:
        return unused
    evaluator_gpus = config.scaling.worker_gpus if job.workers_evaluate else config.evaluate.num_gpus
    with _recording_kernels(config, evaluator_gpus):
        chunks = list(score(task, state.model, rows, count, HOST))
        _check_metric_names(job, chunks)
    # A Keras program with a `train_step` may have no forward.
    with user_code(lambda: "predicting two rows"), torch.no_grad(), suppress(NotImplementedError):
        batch = to_batch(rows)
        task.predictions(task.forward(state.model, batch), batch)
    return unused


def _note_target_range(job: Job, task: ModuleTask, model: nn.Module, fields: Batch) -> None:
    """Lets the task note the range of target values that the loss accepts, so that readers refuse other rows."""
    modes = module_modes(model)
    model.eval()
    try:
        with torch.no_grad():
            task.note_target_range(model, fields)
    except ValueError as error:
        raise ConfigError(f"Row 0 of data.path {job.config.data.path}: {error}.") from error
    finally:
        restore_modes(modes)


def _check_metric_names(job: Job, chunks: list[Chunk]) -> None:
    """Refuses metrics that fail for any rows, share a name in MLflow, or lack the one of the best checkpoint."""
    task, metric = job.task, job.best_metric
    try:
        metric_names = sorted({"loss", *combine(task, chunks).values})
    except TaskError as error:
        if isinstance(error.__cause__, _CODE_ERRORS):
            raise
        logger.warning(
            "The metrics cannot be computed from two rows; an evaluation has more rows and may succeed: %s",
            str(error).splitlines()[0],
        )
        metric_names = sorted({"loss", *map(str, task.metrics().keys(keep_base=True))})
    keys: dict[str, str] = {}
    for name in metric_names:
        if (other := keys.setdefault(key := mlflow_key(f"eval_{name}"), name)) != name:
            raise ConfigError(
                f"The metrics {other!r} and {name!r} have the same name in MLflow, {key!r}. Rename one of them, with"
                " letters, digits and '_-. :/'."
            )
    if metric not in metric_names:
        source = (
            "evaluate.metric" if job.config.evaluate.metric is not None else f"best_metric of {type(task).__name__}"
        )
        raise ConfigError(f"{source} is {metric!r}; the task's single-valued metrics are {', '.join(metric_names)}.")


@contextmanager
def _recording_kernels(config: Config, gpus: float) -> Iterator[bool]:
    """Refuses operations without a deterministic kernel, if GPUs and exact reduction are used; yields whether."""
    if not gpus or config.train.reduction != "exact":
        yield False
        return
    with KernelRecorder() as kernels:
        yield True
    kernels.check(gpus)


def check_eval_targets(context: PreflightContext) -> None:
    """Refuses rows of the evaluation data with targets that the loss of a `ModuleTask` does not take."""
    assert isinstance(context.task, ModuleTask)
    assert context.eval_rows is not None
    try:
        context.task.refuse_target(context.eval_rows)
    except ValueError as error:
        raise ConfigError(f"{context.config.data.evaluation_name}, in the first rows: {error}.") from error


def measure_reading(context: PreflightContext) -> None:
    """Measures how long a row takes to decode, and estimates the training rate of a GPU; see `ReadingRates`."""
    task, config = context.task, context.config
    rows = context.undecoded_row
    keys = np.zeros(len(next(iter(rows.values()))), np.int64)
    began_s = time.thread_time()
    for _ in range(_TIMED_ROWS):
        task.decode_training(rows, keys)
    decode_s = (time.thread_time() - began_s) / (_TIMED_ROWS * len(keys))
    step_s = _BACKWARD_FACTOR * seconds_per_row(context, context.rows, evaluates=False)
    gpu_rows = config.scaling.worker_gpus * _MAX_GPU_SPEEDUP / step_s
    launched_rows = config.data.global_batch_size / config.scaling.worker_limit / _MIN_STEP_S
    context.reading_rates = ReadingRates(decode_s, min(gpu_rows, launched_rows))


def check_evaluation_time(context: PreflightContext) -> list[str]:
    """Warns if an evaluation takes longer than the steps between two checkpoints, by the time that a few rows take."""
    config, job = context.config, context.job
    assert context.eval_rows is not None
    assert context.eval_source is not None
    section, scaling = config.evaluate, config.scaling
    rows = context.eval_source.manifest.num_rows
    first = config.run.first_step
    steps = next(step for step in job.planned_evaluations(job.total_steps) if step > first) - first
    worker_speed = _GPU_SPEEDUP * scaling.worker_gpus or scaling.threads_per_worker
    train_speed = worker_speed * scaling.worker_limit
    actor_speed = section.workers * (_GPU_SPEEDUP * section.num_gpus or section.threads)
    evaluation_s = rows * seconds_per_row(context, context.eval_rows, evaluates=True)
    evaluation_s /= train_speed if job.workers_evaluate else actor_speed
    training_s = _BACKWARD_FACTOR * steps * config.data.global_batch_size / train_speed
    training_s *= seconds_per_row(context, context.rows, evaluates=False)
    if evaluation_s < max(training_s, _MIN_EVALUATION_S):
        return []
    effect = "training waits for it" if job.workers_evaluate else "the evaluator falls behind, and the end waits for it"
    speed_up = "" if job.workers_evaluate or section.num_gpus else ", evaluate.num_gpus: 1, more evaluate.num_cpus"
    return [
        f"An evaluation of {rows:,} rows takes about {evaluation_s / training_s:.1f} times as long as the {steps:,}"
        f" steps between two checkpoints, by the time of a few rows on this CPU (a GPU counts as {_GPU_SPEEDUP} of its"
        f" threads): {effect}. Set evaluate.max_rows{speed_up}, or write fewer checkpoints (checkpoint.every_steps,"
        " every_epochs)."
    ]


def seconds_per_row(context: PreflightContext, rows: Arrays, evaluates: bool) -> float:
    """Returns the CPU time of the forward of a row, from that of the first row, `_TIMED_ROWS` times.

    On a machine that other programs load, the wall time of so few rows says nothing.
    """
    few = {name: concat_fields([values[:1]] * _TIMED_ROWS) for name, values in rows.items()}
    began_s = time.process_time()
    context.row_probe.run(few, evaluates, "a few rows")
    return (time.process_time() - began_s) / _TIMED_ROWS


def try_optimizers(context: PreflightContext) -> None:
    """Makes two steps of each optimizer, unless the task moves the parameters itself."""
    config, task = context.config, context.task
    if type(task).apply_gradients is Task.apply_gradients and config.optimizer.class_path != TASK_OPTIMIZER:
        for spec in config.optimizers.values() if config.optimizers else [config.optimizer]:
            _check_optimizer_step(config, spec, context.model)


def check_server_parts(context: PreflightContext) -> None:
    """Refuses a model or a task that parameter servers, each with parts of the model, cannot train."""
    state, task = context.row_probe.state, context.task
    Layout(state.model, state.optimizer, context.config.train.servers)
    if type(task).apply_gradients is not Task.apply_gradients:
        raise ConfigError(
            "train.strategy is parameter_server, whose servers hold parts of the model, but"
            f" {type(task).__name__}.apply_gradients updates the whole model. Use another strategy, or remove it."
        )


def check_parameter_groups(context: PreflightContext) -> None:
    """Refuses an optimizer that makes groups of parameters by itself, for strategies that cannot keep them apart."""
    config, num_groups = context.config, len(context.row_probe.state.optimizer.param_groups)
    if num_groups > 1 + len(config.optimizer.groups or []):
        raise ConfigError(
            f"optimizer.class_path {config.optimizer.class_path} creates {num_groups} parameter groups itself, which"
            f" train.strategy {config.train.strategy} cannot keep apart. Use"
            f" {list_strategies(lambda t: t.keeps_parameter_groups)}, or define the groups with optimizer.groups."
        )


def _check_optimizer_step(config: Config, spec: OptimizerSpec, model: nn.Module) -> None:
    """Refuses an optimizer that needs more than a dense gradient, or has state that no checkpoint holds.

    It makes two steps on a copy of the smallest parameter, on the CPU: another process may have reserved the GPU.
    """
    smallest = min((p for p in model.parameters() if p.requires_grad), key=Tensor.numel)
    on_gpus = config.scaling.worker_gpus > 0
    parameter = nn.Parameter(torch.zeros_like(smallest, device=HOST))
    parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer = load_class(spec)([parameter], **spec.init_args)
        optimizer.step()
        attributes, generator = _kept_attributes(optimizer), torch.get_rng_state()
        optimizer.step()
        draws = not torch.equal(generator, torch.get_rng_state())
    except Exception as error:
        # Other errors on the CPU say nothing about an optimizer that may work on GPUs only.
        if on_gpus and not _UNSUPPORTED_STEP.search(str(error)):
            return
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise ConfigError(
            f"optimizer.class_path {spec.class_path} cannot make a step: {reason}. A step passes dense gradients and no"
            " closure. Use another optimizer of torch.optim, such as AdamW, or write Task.apply_gradients."
        ) from error
    now = _kept_attributes(optimizer)
    if changed := [name for name in now if name not in attributes or not is_same(attributes[name], now[name])]:
        raise ConfigError(
            f"optimizer.class_path {spec.class_path} keeps {changed[0]} in the attribute self.{changed[0]}, which no"
            " checkpoint contains. Keep the value in self.state[p] or in the parameter group."
        )
    if draws and (config.train.strategy_traits.shards_parameters or config.train.strategy_traits.has_servers):
        raise ConfigError(
            f"optimizer.class_path {spec.class_path} draws random numbers for whole parameters, and train.strategy"
            f" {config.train.strategy} updates only parts of a parameter per process. Use"
            f" {list_strategies(lambda t: not t.shards_parameters and not t.has_servers)}."
        )
    state = {"state": optimizer.state_dict()["state"], "param_groups": _options(optimizer)}
    _check_storable(f"optimizer.class_path {spec.class_path}", state)


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the options of the groups of an optimizer."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _kept_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Returns counters, tensors and generators that an optimizer keeps outside its state and groups.

    Tensors that are also in its state (`KerasOptimizer`) belong to the state; the parameters are the model's.
    """
    stored = ("state", "param_groups", "defaults")
    in_state = {id(value) for state in optimizer.state.values() for value in state.values()}
    in_state |= {id(p) for group in optimizer.param_groups for p in group["params"]}
    in_state |= {id(cache) for cache in getattr(optimizer, "caches", ())}
    return kept_values({name: value for name, value in vars(optimizer).items() if name not in stored}, in_state)


def try_schedules(context: PreflightContext) -> None:
    """Checks the learning-rate schedules and advances them by one step.

    Raises:
        ConfigError: A schedule needs more than the number of steps, ends before the run does, or has state that cannot
            be restored from a checkpoint.
    """
    state = context.row_probe.state
    schedules: list[tuple[LRScheduler | None, int]]
    if isinstance(state.schedule, TurnSchedules):
        schedules = [
            (schedule, state.schedule.step_counts[turn]) for turn, schedule in state.schedule.schedules.items()
        ]
    else:
        schedules = [(state.schedule, context.job.total_steps)]
    if any(isinstance(schedule, ReduceLROnPlateau) for schedule, _ in schedules):
        raise ConfigError(
            "schedule.class_path is ReduceLROnPlateau, which needs an evaluation at each step, but a schedule may"
            " depend only on the step. Use another, such as OneCycleLR or CosineAnnealingLR."
        )
    for schedule, moves in schedules:
        _check_schedule_steps(schedule, moves)
    if state.schedule is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            with user_code(lambda: "advancing the schedule"):
                state.advance_schedule()
        _check_storable("The schedule", {"schedule": state.schedule.state_dict(), "groups": _options(state.optimizer)})


def _check_schedule_steps(schedule: LRScheduler | None, moves: int) -> None:
    """Refuses a schedule, also one inside another, that ends before it has advanced `moves` times."""
    if isinstance(schedule, SequentialLR):
        bounds = [0, *schedule._milestones, moves]
        for inner, (begin, end) in zip(schedule._schedulers, pairwise(bounds), strict=True):
            _check_schedule_steps(inner, min(end, moves) - begin)
    elif isinstance(schedule, ChainedScheduler):
        for inner in schedule._schedulers:
            _check_schedule_steps(inner, moves)
    elif (steps := getattr(schedule, "total_steps", moves)) < moves:
        raise ConfigError(
            f"{type(schedule).__name__} has total_steps {steps}, but the run advances it {moves} times. Leave"
            f" total_steps out to use all steps of the run, or set it to at least {moves}."
        )


def _check_storable(owner: str, state: dict[str, Any]) -> None:
    """Refuses state that can be written into a checkpoint but not read: only tensors and plain Python objects can."""
    for name, value in state.items():
        if (failure := find_failing_part(name, value, _store_and_load)) is not None:
            part, _, error = failure
            raise ConfigError(
                f"{owner} keeps {part}, and a checkpoint with it could not be read: {first_line(error).rstrip('.')}."
                " Keep only Python numbers and tensors; convert a NumPy number with float(...)."
            ) from error


def _store_and_load(value: Any) -> None:
    """Writes a value into a checkpoint, and reads it again; torch does not document the types of its errors."""
    data = io.BytesIO()
    torch.save(copy_to_host(value), data)
    torch.load(io.BytesIO(data.getvalue()), weights_only=True)
