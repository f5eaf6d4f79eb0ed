"""What a run is to do, tried once before it starts."""

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
from ray_app.task.device import pin, restore_process_state
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
"""What is raised where a name is wrong, however many rows there are."""
_UNSUPPORTED_STEP = re.compile("closure|dense")
"""What PyTorch says where a gradient that is dense is not enough (`LBFGS`, `SparseAdam`)."""


def dry_run(
    job: Job,
    row: Arrays,
    initial: dict[str, Tensor] | None,
    beyond: Sequence[RareRows] = (),
    evaluated: Arrays | None = None,
    has_all: bool = False,
    sample: Callable[[], Arrays | None] = lambda: None,
) -> list[str]:
    """Makes model, optimizer and schedule once and takes a row through all of the task, to refuse before the start what
    cannot work.

    Args:
        job: What is to start.
        row: A decoded row, as a batch of one.
        initial: The parameters to begin with, if they are new to the run.
        beyond: What the data to train and to evaluate on have that the row does not have.
        evaluated: Some decoded rows of the data to evaluate on, if there is such.
        has_all: Whether that data has no others.
        sample: Reads some decoded rows of the data to train on; None: they cannot be decoded.

    Returns:
        What is to be said at the start, in sentences.

    Raises:
        ConfigError: Something of it fails.
    """
    config, task, doubts = job.config, job.task, list[str]()
    try:
        with restore_process_state(), user_code(lambda: "making model, optimizer and schedule"):
            pin(torch.get_num_threads(), config.train.reduction == "exact")
            state = TrainingState(config, task, torch.device("cpu"), job.total_steps)
            try:
                state.initialize(initial)
                doubts = _check_rows(
                    job,
                    state,
                    {name: repeat_rows(values) for name, values in row.items()},
                    beyond,
                    evaluated,
                    has_all,
                    sample,
                )
            finally:
                task.finish(state.model)
    except TaskError as error:
        raise ConfigError(
            f"A trial with one row failed: {error}\nCheck the task, task.init_args, optimizer and schedule; tried were"
            f" {config.task.class_path} {config.task.init_args}, {config.optimizer.class_path}"
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
        doubts = doubts + page_locked_memory_warnings(state.model, config.train, workers, psutil.virtual_memory().total)
    if config.train.strategy == "parameter_server":
        Layout(state.model, state.optimizer, config.train)
        if type(task).apply_gradients is not Task.apply_gradients:
            raise ConfigError(
                f"train.strategy is parameter_server, whose servers hold parts of the model, but"
                f" {type(task).__name__}.apply_gradients"
                " moves the whole. Use another strategy, or leave that method out."
            )
    made, asked = len(state.optimizer.param_groups), len(config.optimizer.groups or [])
    if config.train.strategy in ("local_sgd", "parameter_server") and made > 1 + asked:
        raise ConfigError(
            f"optimizer.class_path {config.optimizer.class_path} makes {made} groups of parameters by itself, which"
            f" train.strategy {config.train.strategy} cannot keep apart. Use ddp, fsdp, single or central_storage, or"
            f" optimizer.groups."
        )
    if config.train.strategy == "fsdp":
        check_shardable(state.model)
    _check_schedules(state, job.total_steps)
    return doubts


def _check_schedules(state: TrainingState, total_steps: int) -> None:
    """Moves the schedules once.

    Raises:
        ConfigError: One asks for more than steps, is over too early, or keeps what no checkpoint can be read with.
    """
    schedules: list[tuple[LRScheduler | None, int]]
    if isinstance(state.schedule, TurnSchedules):
        schedules = [(each, state.schedule.moves[turn]) for turn, each in state.schedule.schedules.items()]
    else:
        schedules = [(state.schedule, total_steps)]
    if any(isinstance(schedule, ReduceLROnPlateau) for schedule, _ in schedules):
        raise ConfigError(
            "A schedule's class_path is ReduceLROnPlateau, which needs an evaluation at each step; schedules here move"
            " by steps alone. Use"
            " another of torch.optim.lr_scheduler, such as OneCycleLR or CosineAnnealingLR."
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
    """Refuses learning rates that a schedule or an optimizer of a user's makes.

    Raises:
        ConfigError: One is not finite.
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
    beyond: Sequence[RareRows],
    evaluated: Arrays | None,
    has_all: bool,
    sample: Callable[[], Arrays | None],
) -> list[str]:
    """`_run_task` with short rows, the greatest numbers of the data in these, and its longest rows once; and the
    metrics with some rows.

    Returns:
        What is to be said at the start, in sentences.

    Raises:
        TaskError: See `_run_task`.
        ConfigError: Likewise, or the model lacks classes, a vocabulary or positions for the data.
    """
    attempt, doubts = RowProbe(job.task, state), list[str]()
    with count_norm_values(state.model, len(next(iter(rows.values())))) as counts:
        short, unused = _check_short_rows(job, attempt, rows)
    check_norm_values(state.model, job.plan, counts)
    check_value_ranges(attempt, short)
    if isinstance(job.task, ModuleTask) and evaluated is not None:
        try:
            job.task.refuse_target(evaluated)
        except ValueError as error:
            raise ConfigError(f"data.eval_path {job.config.data.eval_path}, in the first rows: {error}.") from error
    known = count_numbers(short) // 2
    for each in beyond:
        known = each.refuse(attempt, short, known)
    is_short = _can_truncate(job.task) and count_numbers(short) == count_numbers(truncate(rows, SHORT_LENGTH))
    if job.config.data.eval_path is not None:
        some = short if evaluated is None else cut_unevenly(evaluated) if is_short else evaluated
        doubts = check_metrics(job.task, state.model, some, has_all)
    doubts = [*doubts, *norm_value_warnings(state.model, job.plan, counts)]
    if unused or isinstance(job.task, BatchTask):
        trained = sample()
        doubts += gradient_warnings(
            job, attempt, unused, cut_unevenly(trained) if is_short and trained is not None else trained
        )
    return doubts


def _check_short_rows(job: Job, attempt: RowProbe, rows: Arrays) -> tuple[Arrays, dict[str, nn.Parameter]]:
    """`_run_task` with what rows of tokens begin with, or the rows as they are; returns those that it works with, and
    what it returned.

    Raises:
        TaskError: See `_run_task`.
        ConfigError: Likewise, or the model lacks positions.
    """
    task, short = job.task, truncate(rows, SHORT_LENGTH)
    if _can_truncate(task) and count_numbers(short) < count_numbers(rows):
        try:
            return short, _run_task(job, attempt, short)
        except TaskError:  # if it is not the length, the rows as they are say it
            pass
    try:
        return rows, _run_task(job, attempt, rows)
    except TaskError as error:
        for evaluates in (False, True) if job.config.data.eval_path is not None else (False,):
            if isinstance(task, ModuleTask) and (why := attempt.too_long(rows, evaluates)) is not None:
                raise ConfigError(f"{why} What was raised: {error}") from error
        raise


def _can_truncate(task: Task) -> bool:
    """Whether a task is tried with the beginnings of its rows."""
    return isinstance(task, ModuleTask | CausalLanguageModel) and not isinstance(task, LoopTask)


def _run_task(job: Job, attempt: RowProbe, rows: Arrays) -> dict[str, nn.Parameter]:
    """Takes two rows through training and evaluation, as workers and evaluator will; returns the parameters that get no
    gradient.

    Raises:
        TaskError: Something of it fails.
        ConfigError: The losses are not one for each row, a GPU would refuse an operation, or no metric is the one that
            decides.
    """
    task, state, count, config = job.task, attempt.state, len(next(iter(rows.values()))), job.config
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
        for turn in attempt.turns:
            losses = (
                task.training_loss(state.model, fields)
                if turn is None
                else task.loss_for_optimizer(turn, state.model, fields)
            )
            found = check_losses(task, losses, count)
            sum_losses(task, found)
            moved = parameters_of_turn(state, turn)
            unused |= {name: moved[name] for name in parameters_without_gradient(found.values, moved)}
            if gpus and found.values.requires_grad:
                parameters = [p for p in state.model.parameters() if p.requires_grad]
                torch.autograd.grad(found.values.sum(), parameters, allow_unused=True)
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
    """Lets the task note which values the loss takes in its target, so that its readers refuse rows with others.

    Raises:
        ConfigError: The first row has others.
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
    """Computes the metrics once, and refuses one that is to decide and that an evaluation does not give.

    Raises:
        TaskError: They cannot be computed, and more rows would not help.
        ConfigError: It is none of those of one number.
    """
    task, metric = job.task, job.best_metric
    try:
        known = sorted({"loss", *combine(task, chunks).values})
    except TaskError as error:
        if isinstance(error.__cause__, _CODE_ERRORS):
            raise
        logger.warning(
            "The metrics cannot be computed of two rows; an evaluation has more, and may: %s",
            str(error).splitlines()[0],
        )
        known = sorted({"loss", *map(str, task.metrics().keys(keep_base=True))})
    keys: dict[str, str] = {}
    for name in known:
        if (other := keys.setdefault(key := mlflow_key(f"eval_{name}"), name)) != name:
            raise ConfigError(
                f"The metrics {other!r} and {name!r} have one name in MLflow, {key!r}: it takes letters, digits and"
                f" '_-. :/', all else and"
                " what is no path become '_', and names are cut to 250 characters. Give one of them another name."
            )
    if metric not in known:
        given = "evaluate.metric" if job.config.evaluate.metric is not None else f"best_metric of {type(task).__name__}"
        raise ConfigError(f"{given} is {metric!r}; the task's metrics of one number are {', '.join(known)}.")


@contextmanager
def _recording_kernels(config: Config, gpus: float) -> Iterator[bool]:
    """The context of what is to run on GPUs with deterministic kernels, if it is, which it yields."""
    if not gpus or config.train.reduction != "exact":
        yield False
        return
    with KernelRecorder() as kernels:
        yield True
    kernels.refuse(gpus)


def _check_schedule_steps(schedule: LRScheduler | None, moves: int) -> None:
    """Refuses a schedule that ends before it was moved this often, also one in another."""
    if isinstance(schedule, SequentialLR):
        bounds = [0, *schedule._milestones, moves]
        for each, (begin, end) in zip(schedule._schedulers, pairwise(bounds), strict=True):
            _check_schedule_steps(each, min(end, moves) - begin)
    elif isinstance(schedule, ChainedScheduler):
        for each in schedule._schedulers:
            _check_schedule_steps(each, moves)
    elif (steps := getattr(schedule, "total_steps", moves)) < moves:
        raise ConfigError(
            f"{type(schedule).__name__} has total_steps {steps}, but is moved at {moves} steps of the run; leave"
            f" total_steps out to use all"
            " steps of the run, or set at least as many."
        )


def _check_optimizer_step(config: Config, spec: OptimizerSpec, model: nn.Module) -> None:
    """Moves a copy of the smallest parameter by a gradient of zeros, on the CPU: a GPU may be another process's alone.

    Raises:
        ConfigError: That is not all that the optimizer needs.
    """
    least = min((p for p in model.parameters() if p.requires_grad), key=Tensor.numel)
    on_gpus = config.scaling.gpus_per_worker > 0
    tried = nn.Parameter(torch.zeros_like(least, device="cpu"))
    tried.grad = torch.zeros_like(tried)
    try:
        optimizer = load_class(spec)([tried], **spec.init_args)
        optimizer.step()
        counted = _numeric_attributes(optimizer)
        optimizer.step()
    except Exception as error:
        if on_gpus and not _UNSUPPORTED_STEP.search(str(error)):  # it may be that it works on GPUs only
            return
        said = f"{type(error).__name__}: {error}".rstrip(".")
        raise ConfigError(
            f"optimizer.class_path {spec.class_path} cannot make a step: {said}. Steps have the gradient, which is"
            f" dense, and"
            " no closure. Use another of torch.optim, such as AdamW, or write Task.apply_gradients."
        ) from error
    if changed := [
        name for name, value in _numeric_attributes(optimizer).items() if name not in counted or counted[name] != value
    ]:
        raise ConfigError(
            f"optimizer.class_path {spec.class_path} keeps {changed[0]} in itself (self.{changed[0]}), which no"
            f" checkpoint has. Keep it in"
            " self.state[p] or in the group."
        )
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    _check_storable(
        f"optimizer.class_path {spec.class_path}", {"state": optimizer.state_dict()["state"], "param_groups": groups}
    )


def _numeric_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer has beside its state and its groups that may be counted or added up."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _check_storable(what: str, held: dict[str, Any]) -> None:
    """Refuses what can be written into a checkpoint, but not read from it, since only PyTorch's own and plain Python
    are.

    Raises:
        ConfigError: It cannot; the message names the entry.
    """
    for name, value in held.items():
        if (refused := find_failing_part(name, value, _storing_error)) is not None:
            part, _, error = refused
            raise ConfigError(
                f"{what} keeps {part}, which no checkpoint can be read with: {first_line(error).rstrip('.')}. Keep"
                f" numbers of Python and"
                " tensors: float(...) of what NumPy gives."
            ) from error


def _storing_error(value: Any) -> Exception | None:
    """Why a value cannot be written into a checkpoint and read from it; None if it can."""
    data = io.BytesIO()
    try:
        torch.save(copy_to_host(value), data)
        data.seek(0)
        torch.load(data, weights_only=True)
    except Exception as error:  # torch raises what it likes
        return error
    return None
