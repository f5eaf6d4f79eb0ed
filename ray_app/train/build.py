"""Builds the training state and the step that belong to each value of `train.strategy`.

The gradient reducers are built in `reduction/bucketed.py`. `train/loop.py` runs every strategy; `single` is `ddp` with
`SingleProcessMembership` instead of a rendezvous. Only `parameter_server` has a loop of its own,
`train/strategies/parameter_server/worker.py`, because its workers form no generations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ray_app.config.config import Config
from ray_app.reduction.base import World
from ray_app.reduction.bucketed import build_bucketed_reducer, build_reducer
from ray_app.task.base import Task
from ray_app.train.job import Job
from ray_app.train.membership import Phase
from ray_app.train.state.state import TrainingState
from ray_app.train.step.step import Step, TurnStep
from ray_app.train.strategies.central_storage import CentralState
from ray_app.train.strategies.local_sgd import LocalState, LocalStep


def build_state(config: Config, task: Task, device: torch.device, total_steps: int) -> TrainingState:
    """Returns the training state of the configured strategy, see `TrainingState`."""
    if config.train.strategy == "fsdp":
        # Imported here because it imports much of torch that no other strategy needs.
        from ray_app.train.strategies.fully_sharded import ShardedState

        return ShardedState(config, task, device, total_steps)
    state_classes = {"central_storage": CentralState, "local_sgd": LocalState}
    return state_classes.get(config.train.strategy, TrainingState)(config, task, device, total_steps)


def build_step(
    job: Job, state: TrainingState, world: World, device: torch.device, enter: Callable[[Phase], None]
) -> Step:
    """Returns the step of the configured strategy with its gradient reducer, see `Step`."""
    train = job.config.train
    # One local step with an outer learning rate of 1 and without momentum is `ddp`, which `Step` computes.
    if train.strategy == "local_sgd" and (train.local_steps, train.outer_lr, train.outer_momentum) != (1, 1.0, 0.0):
        assert isinstance(state, LocalState), "build_state made it"
        return LocalStep(job, state, build_bucketed_reducer(train, state.model, world), world, device, enter)
    if state.turns is not None:
        return TurnStep(
            job.config,
            job.task,
            state,
            state.turns,
            lambda: build_reducer(train, state.model, world),
            world,
            device,
            enter,
        )
    reducer = build_reducer(train, state.model, world)
    if train.strategy == "fsdp":
        from ray_app.train.strategies.fully_sharded import ShardedStep

        return ShardedStep(job.config, job.task, state, reducer, world, device, enter)
    return Step(job.config, job.task, state, reducer, world, device, enter)
