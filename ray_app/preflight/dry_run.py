"""The dry run before a start: model, optimizer, schedule and metrics are made once and run on a few rows, on the CPU.

Errors of the task, the optimizer and the schedule are raised here rather than in the workers, where they would cost the
start of the cluster. Everything else that may surprise the user becomes a warning.
"""

from __future__ import annotations

import io
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR

from ray_app.config.config import Config
from ray_app.config.import_paths import TASK_OPTIMIZER, OptimizerSpec, load_class
from ray_app.errors import ConfigError, TaskError
from ray_app.preflight.gradient_checks import (
    check_norm_values,
    count_norm_values,
    cut_unevenly,
    gradient_warnings,
    norm_value_warnings,
    parameters_of_turn,
    parameters_without_gradient,
)
from ray_app.preflight.metric_checks import check_metrics
from ray_app.preflight.model_checks import KernelRecorder, check_forward, check_shardable, find_failing_part, first_line
from ray_app.preflight.probe_rows import SHORT_LENGTH, RowProbe, count_numbers, truncate
from ray_app.preflight.rare_rows import RareRows, check_value_ranges
from ray_app.task.base import Batch, Task, check_losses, sum_losses
from ray_app.task.device import restore_process_state, set_threads_and_kernels
from ray_app.task.language_model import CausalLanguageModel
from ray_app.task.metrics import Chunk, combine, score
from ray_app.task.module import ModuleTask
from ray_app.task.ragged import Arrays, repeat_rows, to_batch
from ray_app.task.user_code import user_code
from ray_app.task.user_loop import LoopTask
from ray_app.task.whole_batches import BatchTask
from ray_app.track.mlflow_client import mlflow_key
from ray_app.train.checkpointing.snapshots import check_snapshot_memory, page_locked_memory_warnings
from ray_app.train.job import Job
from ray_app.train.state.alternating_optimizers import TurnSchedules
from ray_app.train.state.state import TrainingState
from ray_app.train.state.transfer import copy_to_host
from ray_app.train.step.micro_batch import module_modes, restore_modes
from ray_app.train.strategies.parameter_server.layout import Layout

logger = logging.getLogger(__name__)

_CODE_ERRORS = (NameError, AttributeError, TypeError, ImportError, NotImplementedError)
"""Errors of code that is wrong for any number of rows."""
_UNSUPPORTED_STEP = re.compile("closure|dense")
"""Words of PyTorch's errors if a dense gradient is not enough for a step (`LBFGS`, `SparseAdam`)."""


def dry_run(
    job: Job,
    row: Arrays,
    initial: dict[str, Tensor] | None,
    rare_rows: Sequence[RareRows] = (),
    eval_rows: Arrays | None = None,
    has_all: bool = False,
    sample_training: Callable[[], Arrays | None] = lambda: None,
) -> list[str]:
    """Makes model, optimizer and schedule, runs a row through training and evaluation, and returns warnings.

    Args:
        job: The job that is to start.
        row: A decoded training row, as a batch of one.
        initial: Initial parameters, if they are new to the run.
        rare_rows: The longest row and the value ranges of the training data and the evaluation data.
        eval_rows: Some decoded rows of the evaluation data, if there is any.
        has_all: Whether `eval_rows` are all rows of the evaluation data.
        sample_training: Returns some decoded training rows, or None if they cannot be decoded.

    Returns:
        Warnings for the start, each one or two sentences.

    Raises:
        ConfigError: The task, the optimizer or the schedule fails, or does not fit the strategy or the memory.
    """
    config = job.config
    task = job.task
    messages = list[str]()
    try:
        with restore_process_state(), user_code(lambda: "making model, optimizer and schedule"):
            set_threads_and_kernels(torch.get_num_threads(), config.train.reduction == "exact")
            state = TrainingState(config, task, torch.device("cpu"), job.total_steps)
            try:
                state.initialize(initial)
                messages = _check_rows(
                    job,
                    state,
                    {name: repeat_rows(values) for name, values in row.items()},
                    rare_rows,
                    eval_rows,
                    has_all,
                    sample_training,
                )
            finally:
                task.finish(state.model)
    except TaskError as error:
        raise ConfigError(
            f"The dry run with one row failed: {error}\nCheck the task, task.init_args, optimizer and schedule; tried"
            f" were {config.task.class_path} {config.task.init_args}, {config.optimizer.class_path}"
            f" {config.optimizer.init_args}"
            + (f", {config.schedule.class_path} {config.schedule.init_args}." if config.schedule else ".")
        ) from error
    if type(task).apply_gradients is Task.apply_gradients and config.optimizer.class_path != TASK_OPTIMIZER:
        for spec in config.optimizers.values() if config.optimizers else [config.optimizer]:
            _check_optimizer_step(config, spec, state.model)
    if config.checkpoint.snapshot_every_steps is not None:
        check_snapshot_memory(state.model, psutil.virtual_memory().available)
    if (gpus := config.scaling.gpus_per_worker) and config.train.strategy != "parameter_server":
        workers = max(1, min(config.scaling.worker_limit, int(torch.cuda.device_count() / gpus)))
        messages = messages + page_locked_memory_warnings(
            state.model, config.train, workers, psutil.virtual_memory().total
        )
    if config.train.strategy == "parameter_server":
        Layout(state.model, state.optimizer, config.train.servers)
        if type(task).apply_gradients is not Task.apply_gradients:
            raise ConfigError(
                "train.strategy is parameter_server, whose servers hold parts of the model, but"
                f" {type(task).__name__}.apply_gradients moves the whole. Use another strategy, or leave that method"
                " out."
            )
    num_groups = len(state.optimizer.param_groups)
    num_configured = len(config.optimizer.groups or [])
    if config.train.strategy in ("local_sgd", "parameter_server") and num_groups > 1 + num_configured:
        raise ConfigError(
            f"optimizer.class_path {config.optimizer.class_path} makes {num_groups} groups of parameters by itself,"
            f" which train.strategy {config.train.strategy} cannot keep apart. Use ddp, fsdp, single or"
            " central_storage, or optimizer.groups."
        )
    if config.train.strategy == "fsdp":
        check_shardable(state.model)
    _check_schedules(state, job.total_steps)
    return messages


def _check_schedules(state: TrainingState, total_steps: int) -> None:
    """Checks the learning-rate schedules and advances them by one step.

    Raises:
        ConfigError: A schedule needs more than the number of steps, ends before the run does, gives a rate that is not
            finite, or has state that cannot be restored from a checkpoint.
    """
    schedules: list[tuple[LRScheduler | None, int]]
    if isinstance(state.schedule, TurnSchedules):
        schedules = [
            (schedule, state.schedule.step_counts[turn]) for turn, schedule in state.schedule.schedules.items()
        ]
    else:
        schedules = [(state.schedule, total_steps)]
    if any(isinstance(schedule, ReduceLROnPlateau) for schedule, _ in schedules):
        raise ConfigError(
            "A schedule's class_path is ReduceLROnPlateau, which needs an evaluation at each step; schedules here move"
            " by steps alone. Use another of torch.optim.lr_scheduler, such as OneCycleLR or CosineAnnealingLR."
        )
    for schedule, moves in schedules:
        _check_schedule_steps(schedule, moves)
    _check_learning_rates(state, "in the first step")
    if state.schedule is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            with user_code(lambda: "moving the schedule"):
                state.advance_schedule()
        _check_learning_rates(state, "after the first step")
        groups = [
            {name: value for name, value in group.items() if name != "params"} for group in state.optimizer.param_groups
        ]
        _check_storable("The schedule", {"schedule": state.schedule.state_dict(), "groups": groups})


def _check_learning_rates(state: TrainingState, when: str) -> None:
    """Refuses learning rates that are not finite, as a user's schedule or optimizer may give them.

    Raises:
        ConfigError: A rate is not finite; the message says when.
    """
    rates = [float(group["lr"]) for group in state.optimizer.param_groups if "lr" in group]
    if wrong := [rate for rate in rates if not math.isfinite(rate)]:
        raise ConfigError(
            f"The learning rate is {wrong[0]} {when}; it must be finite. Correct optimizer, its groups or schedule."
        )


def _check_rows(
    job: Job,
    state: TrainingState,
    rows: Arrays,
    rare_rows: Sequence[RareRows],
    eval_rows: Arrays | None,
    has_all: bool,
    sample_training: Callable[[], Arrays | None],
) -> list[str]:
    """Runs the task on short rows, on the value ranges of the data and on the longest rows, and checks the metrics.

    Returns:
        Warnings for the start, each one or two sentences.

    Raises:
        TaskError: The task fails; see `_run_task`.
        ConfigError: As for `_run_task`, or the model lacks classes, a vocabulary or positions for the data.
    """
    row_probe, messages = RowProbe(job.task, state), list[str]()
    with count_norm_values(state.model, len(next(iter(rows.values())))) as counts:
        short, unused = _check_short_rows(job, row_probe, rows)
    check_norm_values(state.model, job.plan, counts)
    check_value_ranges(row_probe, short)
    if isinstance(job.task, ModuleTask) and eval_rows is not None:
        try:
            job.task.refuse_target(eval_rows)
        except ValueError as error:
            raise ConfigError(f"data.eval_path {job.config.data.eval_path}, in the first rows: {error}.") from error
    # The probe has two copies of one row.
    checked_length = count_numbers(short) // 2
    for rows_of_source in rare_rows:
        checked_length = rows_of_source.check(row_probe, short, checked_length)
    is_short = _can_truncate(job.task) and count_numbers(short) == count_numbers(truncate(rows, SHORT_LENGTH))
    if job.config.data.eval_path is not None:
        metric_rows = short
        if eval_rows is not None:
            metric_rows = cut_unevenly(eval_rows) if is_short else eval_rows
        messages = check_metrics(job.task, state.model, metric_rows, has_all)
    messages = [*messages, *norm_value_warnings(state.model, job.plan, counts)]
    if unused or isinstance(job.task, BatchTask):
        training_rows = sample_training()
        if is_short and training_rows is not None:
            training_rows = cut_unevenly(training_rows)
        messages += gradient_warnings(job, row_probe, unused, training_rows)
    return messages


def _check_short_rows(job: Job, row_probe: RowProbe, rows: Arrays) -> tuple[Arrays, dict[str, nn.Parameter]]:
    """Runs the task on rows cut to `SHORT_LENGTH` tokens or, if that fails, on the complete rows.

    Returns:
        The rows on which the task works, and the parameters without a gradient (see `_run_task`).

    Raises:
        TaskError: The task fails; see `_run_task`.
        ConfigError: As for `_run_task`, or the model lacks positions for the length of the rows.
    """
    task, short = job.task, truncate(rows, SHORT_LENGTH)
    if _can_truncate(task) and count_numbers(short) < count_numbers(rows):
        try:
            return short, _run_task(job, row_probe, short)
        except TaskError:
            # If the cut is not the cause, the complete rows raise the same error below.
            pass
    try:
        return rows, _run_task(job, row_probe, rows)
    except TaskError as error:
        for evaluates in (False, True) if job.config.data.eval_path is not None else (False,):
            if isinstance(task, ModuleTask) and (why := row_probe.explain_too_long(rows, evaluates)) is not None:
                raise ConfigError(f"{why} What was raised: {error}") from error
        raise


def _can_truncate(task: Task) -> bool:
    """Returns whether the dry run may use the first tokens of rows only."""
    return isinstance(task, ModuleTask | CausalLanguageModel) and not isinstance(task, LoopTask)


def _run_task(job: Job, row_probe: RowProbe, rows: Arrays) -> dict[str, nn.Parameter]:
    """Runs two rows through training, evaluation and prediction, as workers and evaluator do.

    Returns:
        The trained parameters without a gradient, by name.

    Raises:
        TaskError: A method of the task or the model fails.
        ConfigError: There is not one loss per row, an operation has no deterministic kernel on GPUs, or the metrics
            lack the one that selects the best checkpoint.
    """
    task = job.task
    state = row_probe.state
    config = job.config
    count = len(next(iter(rows.values())))
    unused = dict[str, nn.Parameter]()
    state.train()
    trained_on = user_code(lambda: "training on two rows")
    with (
        check_forward(state.model, config.optimizers is not None),
        trained_on,
        _recording_kernels(config, config.scaling.gpus_per_worker) as gpus,
    ):
        fields = task.augment(to_batch(rows), torch.arange(count))
        if isinstance(task, ModuleTask) and not isinstance(task, LoopTask):
            _note_target_range(job, task, state.model, fields)
        for turn in row_probe.turns:
            losses = (
                task.training_loss(state.model, fields)
                if turn is None
                else task.loss_for_optimizer(turn, state.model, fields)
            )
            row_losses = check_losses(task, losses, count)
            sum_losses(task, row_losses)
            moved = parameters_of_turn(state, turn)
            unused |= {name: moved[name] for name in parameters_without_gradient(row_losses.values, moved)}
            if gpus and row_losses.values.requires_grad:
                parameters = [p for p in state.model.parameters() if p.requires_grad]
                torch.autograd.grad(row_losses.values.sum(), parameters, allow_unused=True)
    if config.data.eval_path is None:
        return unused
    with _recording_kernels(
        config, config.scaling.gpus_per_worker if job.workers_evaluate else config.evaluate.num_gpus
    ):
        chunks = list(score(task, state.model, rows, count, torch.device("cpu")))
        _check_metric_names(job, chunks)
    with user_code(lambda: "predicting two rows"), torch.inference_mode():
        batch = to_batch(rows)
        task.predictions(task.forward(state.model, batch), batch)
    return unused


def _note_target_range(job: Job, task: ModuleTask, model: nn.Module, fields: Batch) -> None:
    """Lets the task note the range of target values that the loss accepts, so that readers refuse other rows.

    Raises:
        ConfigError: The target of the first row is out of this range.
    """
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
    """Computes the metrics and refuses a metric for the best checkpoint that an evaluation does not give.

    Raises:
        TaskError: The metrics cannot be computed, and more rows would not help.
        ConfigError: The metric is not among those of one number, or two metrics have the same name in MLflow.
    """
    task, metric = job.task, job.best_metric
    try:
        metric_names = sorted({"loss", *combine(task, chunks).values})
    except TaskError as error:
        if isinstance(error.__cause__, _CODE_ERRORS):
            raise
        logger.warning(
            "The metrics cannot be computed of two rows; an evaluation has more, and may: %s",
            str(error).splitlines()[0],
        )
        metric_names = sorted({"loss", *map(str, task.metrics().keys(keep_base=True))})
    keys: dict[str, str] = {}
    for name in metric_names:
        if (other := keys.setdefault(key := mlflow_key(f"eval_{name}"), name)) != name:
            raise ConfigError(
                f"The metrics {other!r} and {name!r} have one name in MLflow, {key!r}: it takes letters, digits and"
                " '_-. :/', all else and what is no path become '_', and names are cut to 250 characters. Give one of"
                " them another name."
            )
    if metric not in metric_names:
        source = (
            "evaluate.metric" if job.config.evaluate.metric is not None else f"best_metric of {type(task).__name__}"
        )
        raise ConfigError(f"{source} is {metric!r}; the task's metrics of one number are {', '.join(metric_names)}.")


@contextmanager
def _recording_kernels(config: Config, gpus: float) -> Iterator[bool]:
    """Refuses operations in the block that have no deterministic kernel on GPUs.

    Yields whether it does: only if GPUs are used, and with exact reduction.
    """
    if not gpus or config.train.reduction != "exact":
        yield False
        return
    with KernelRecorder() as kernels:
        yield True
    kernels.check(gpus)


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
            f"{type(schedule).__name__} has total_steps {steps}, but is moved at {moves} steps of the run; leave"
            " total_steps out to use all steps of the run, or set at least as many."
        )


def _check_optimizer_step(config: Config, spec: OptimizerSpec, model: nn.Module) -> None:
    """Makes two steps of the optimizer on a copy of the smallest parameter, with a gradient of zeros, on the CPU.

    The GPU of this machine may be reserved by another process.

    Raises:
        ConfigError: The optimizer needs more than a dense gradient, keeps numbers outside its state, or has state that
            cannot be restored from a checkpoint.
    """
    smallest = min((p for p in model.parameters() if p.requires_grad), key=Tensor.numel)
    on_gpus = config.scaling.gpus_per_worker > 0
    parameter = nn.Parameter(torch.zeros_like(smallest, device="cpu"))
    parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer = load_class(spec)([parameter], **spec.init_args)
        optimizer.step()
        attributes = _numeric_attributes(optimizer)
        optimizer.step()
    except Exception as error:
        # Other errors on the CPU say nothing about an optimizer that may work on GPUs only.
        if on_gpus and not _UNSUPPORTED_STEP.search(str(error)):
            return
        reason = f"{type(error).__name__}: {error}".rstrip(".")
        raise ConfigError(
            f"optimizer.class_path {spec.class_path} cannot make a step: {reason}. Steps have the gradient, which is"
            " dense, and no closure. Use another of torch.optim, such as AdamW, or write Task.apply_gradients."
        ) from error
    if changed := [
        name
        for name, value in _numeric_attributes(optimizer).items()
        if name not in attributes or attributes[name] != value
    ]:
        raise ConfigError(
            f"optimizer.class_path {spec.class_path} keeps {changed[0]} in itself (self.{changed[0]}), which no"
            " checkpoint has. Keep it in self.state[p] or in the group."
        )
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    _check_storable(
        f"optimizer.class_path {spec.class_path}", {"state": optimizer.state_dict()["state"], "param_groups": groups}
    )


def _numeric_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the numbers among an optimizer's attributes, which may be counters outside its state and groups."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _check_storable(owner: str, state: dict[str, Any]) -> None:
    """Refuses state that can be written into a checkpoint but not read: only tensors and plain Python objects can.

    Raises:
        ConfigError: A part of the state cannot be read; the message names it.
    """
    for name, value in state.items():
        if (failure := find_failing_part(name, value, _storing_error)) is not None:
            part, _, error = failure
            raise ConfigError(
                f"{owner} keeps {part}, which no checkpoint can be read with: {first_line(error).rstrip('.')}. Keep"
                " numbers of Python and tensors: float(...) of what NumPy gives."
            ) from error


def _storing_error(value: Any) -> Exception | None:
    """Returns the error of writing a value into a checkpoint and reading it again, or None."""
    data = io.BytesIO()
    try:
        torch.save(copy_to_host(value), data)
        data.seek(0)
        torch.load(data, weights_only=True)
    except Exception as error:  # torch does not document the types of these errors.
        return error
    return None
