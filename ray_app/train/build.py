"""Builds the training state, the gradient reducer and the step that belong to each value of `train.strategy`.

`train/loop.py` runs every strategy; `single` is `ddp` with
`SingleProcessMembership` instead of a rendezvous. Only `parameter_server` has a loop of its own,
`train/strategies/parameter_server/worker.py`, because its workers form no generations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from ray_app.config.config import Config
from ray_app.config.import_paths import load_class
from ray_app.config.sections import TrainSection
from ray_app.devices import HOST
from ray_app.errors import ConfigError
from ray_app.reduction.bucketed import BucketedReducer
from ray_app.reduction.reducer import GradientReducer
from ray_app.reduction.world import World
from ray_app.task.base import Task
from ray_app.train.job import Job
from ray_app.train.membership import Phase
from ray_app.train.state.state import TrainingState
from ray_app.train.step.cuda_graphs import CudaGraphs, make_graph_backend
from ray_app.train.step.micro_batch import Passes, ReplicaBuffers
from ray_app.train.step.sdc import ComparedWorkers, SdcChecker
from ray_app.train.step.step import Step, TurnStep
from ray_app.train.step.step_stats import StepStats, StepTimer
from ray_app.train.strategies.central_storage import CentralBackend
from ray_app.train.strategies.local_sgd import LocalStep

TrainingStep = Step | TurnStep | LocalStep
"""A step of one generation of workers; all have `run`, `lr` and `close`."""


def build_state(config: Config, task: Task, device: torch.device, total_steps: int) -> TrainingState:
    """Returns the training state of the configured strategy, see `TrainingState`."""
    if config.train.strategy == "fsdp":
        # Imported here because it imports much of torch that no other strategy needs.
        from ray_app.train.strategies.fully_sharded import ShardedBackend

        backend = ShardedBackend(task.shard_units, config.train, device)
        return TrainingState(config, task, HOST, total_steps, backend)
    if config.train.strategy == "central_storage":
        updates_buffers = type(task).apply_gradients is not Task.apply_gradients
        return TrainingState(config, task, device, total_steps, CentralBackend(device, config.train, updates_buffers))
    return TrainingState(config, task, device, total_steps)


def build_step(
    job: Job,
    state: TrainingState,
    world: World,
    device: torch.device,
    enter: Callable[[Phase], None] = lambda phase: None,
    timer: StepTimer | None = None,
    compared_workers: ComparedWorkers | None = None,
) -> TrainingStep:
    """Returns the step of the configured strategy with its gradient reducer.

    Args:
        job: The run.
        state: The training state that the step updates.
        world: The workers of the generation.
        device: Device to compute on.
        enter: Called with each phase that the step begins.
        timer: Measures the step; None if nothing compares the times of workers.
        compared_workers: The workers that SDC checks compare with each other; None for no SDC checks.
    """
    train = job.config.train
    state.train()
    measure = timer.breakdown if timer is not None else None
    # One local step with an outer learning rate of 1 and without momentum is `ddp`, which `Step` computes.
    if train.strategy == "local_sgd" and (train.local_steps, train.outer_lr, train.outer_momentum) != (1, 1.0, 0.0):
        reducer = BucketedReducer(state.model, world, train.reduction, train.bucket_mb)
        return LocalStep(job, state, reducer, StepStats(world, measure), world, device, enter, timer)
    make_passes: Callable[..., Passes] = Passes
    if train.strategy == "fsdp":
        from ray_app.train.strategies.fully_sharded import ShardedPasses

        make_passes = partial(ShardedPasses, world)
    elif train.capture:
        make_passes = partial(CudaGraphs, make_graph_backend(device))
    turns = state.turns
    moving = job.task.moving_parameters(state.model)
    buffers = ReplicaBuffers(state.model, world, turns is not None and bool(turns.phases), moving)

    def make_step(turn: str | None = None) -> Step:
        loss = None if turn is None else partial(job.task.loss_for_optimizer, turn)
        passes = make_passes(job.config, job.task, device, state.model, state.scale, loss)
        reducer = build_reducer(train, state.model, world)
        sdc = None
        if compared_workers is not None:
            assert isinstance(reducer, BucketedReducer), "checked with the configuration"
            sdc = SdcChecker(compared_workers, world, passes, buffers, reducer)
        return Step(
            task=job.task,
            state=state,
            passes=passes,
            reducer=reducer,
            buffers=buffers,
            stats=StepStats(world, measure),
            world=world,
            enter=enter,
            max_norm=train.grad_clip_norm,
            timer=timer,
            sdc=sdc,
            epoch_steps=job.steps_per_epoch,
        )

    return TurnStep(state, turns, make_step, buffers) if turns is not None else make_step()


def build_reducer(train: TrainSection, model: nn.Module, world: World) -> GradientReducer:
    """Returns the configured gradient reducer: a class of the user, a bucketed one, or one for `fsdp`.

    Raises:
        ConfigError: `train.reducer` is not a `GradientReducer`.
    """
    if train.reducer is not None:
        return load_reducer(train.reducer)(model, world)
    if train.strategy == "fsdp":
        # This imports PyTorch's FSDP, which takes two seconds that the other strategies do not need.
        from ray_app.reduction import sharded

        if train.reduction == "exact":
            return sharded.DeterministicShardedReducer(model, world)
        return sharded.FsdpReducer(model, world)
    return BucketedReducer(model, world, train.reduction, train.bucket_mb)


def load_reducer(path: str) -> Callable[[nn.Module, World], GradientReducer]:
    """Imports a gradient reducer of the user.

    Args:
        path: Value of `train.reducer`.

    Raises:
        ConfigError: It cannot be imported, is not a subclass of `GradientReducer`, or lacks a method.
    """
    try:
        reducer = load_class(path)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"train.reducer is {path!r}, which cannot be imported: {error}. Name an importable class."
        ) from error
    if not (isinstance(reducer, type) and issubclass(reducer, GradientReducer)):
        raise ConfigError(
            f"train.reducer is {path}, which is not a subclass of ray_app.reduction.reducer.GradientReducer. Derive it"
            " from that class."
        )
    if missing := sorted(reducer.__abstractmethods__):
        raise ConfigError(f"train.reducer is {path}, which lacks {', '.join(missing)}. Add these methods.")
    return reducer
