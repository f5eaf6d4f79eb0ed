"""The tables of what a strategy keeps (state) and how it steps; `strategy/build.py` has that of how its gradients meet (exchange).

`train/loop.py` runs any of them; `single` is `ddp` with `train/alone.py` in the place of the other workers. Only `parameter_server` has a
loop of its own, `train/parameter_worker.py`, whose workers meet nobody.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ray_app.config import Config
from ray_app.strategy.base import Strategy, World
from ray_app.strategy.ddp import DataParallel
from ray_app.task.base import Task
from ray_app.train.central import CentralState
from ray_app.train.job import Job
from ray_app.train.local_step import LocalStep
from ray_app.train.messages import Phase
from ray_app.train.state import TrainingState
from ray_app.train.step import Step


def build_state(config: Config, task: Task, device: torch.device, total_steps: int) -> TrainingState:
    """Makes the training state of the configured strategy, see `TrainingState`."""
    if config.train.strategy == "fsdp":
        from ray_app.train.sharded import ShardedState  # imports that the others do not need

        return ShardedState(config, task, device, total_steps)
    made = CentralState if config.train.strategy == "central_storage" else TrainingState
    return made(config, task, device, total_steps)


def build_step(
    job: Job, state: TrainingState, strategy: Strategy, world: World, device: torch.device, enter: Callable[[Phase], None]
) -> Step:
    """Makes the step of the configured strategy, see `Step`."""
    train = job.config.train
    if train.strategy == "local_sgd" and (train.local_steps, train.outer_lr, train.outer_momentum) != (1, 1.0, 0.0):
        assert isinstance(strategy, DataParallel)
        return LocalStep(job, state, strategy, world, device, enter)
    if train.strategy == "fsdp":
        from ray_app.train.sharded_step import ShardedStep

        return ShardedStep(job.config, job.task, state, strategy, world, device, enter)
    return Step(job.config, job.task, state, strategy, world, device, enter)
