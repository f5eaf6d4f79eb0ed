"""The training state: what a step changes, what a checkpoint holds, what a newcomer receives."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ray_app.checkpoint.format import Snapshot, pack, unpack
from ray_app.config import ClassSpec, Config
from ray_app.strategy.base import World, collective, gather
from ray_app.task.base import Task
from ray_app.train.initial import begin_with
from ray_app.train.logical import seed_init

NOTHING = -1
"""The step of a worker that has no state yet."""


def load_class(spec: ClassSpec) -> Any:
    """Imports the class that a configuration names."""
    module, _, name = spec.class_path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class TrainingState:
    """Model, optimizer, schedule and the number of finished steps.

    Args:
        config: Names optimizer and schedule, and the file of parameters to begin with if there is one.
        task: Makes the model.
        device: Where it lives.
        total_steps: Steps of the run, for schedules that want to know (an argument `total_steps` that is not given).

    Raises:
        ConfigError: The parameters to begin with are not there, or not the model's.
    """

    def __init__(self, config: Config, task: Task, device: torch.device, total_steps: int) -> None:
        seed_init(config.seed, device)
        model = task.build_model()
        if config.train.init_from is not None:
            begin_with(model, config.train.init_from, config.train.init_digest)
        self.model: nn.Module = model.to(device).train()
        self.optimizer = _optimizer(config.optimizer, self.model)
        self.schedule: LRScheduler | None = None
        if config.schedule is not None:
            self.schedule = _schedule(config.schedule, self.optimizer, total_steps)
        self.step = NOTHING

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def advance(self) -> None:
        """Moves the optimizer and the schedule by the gradients that the parameters hold."""
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.step += 1

    def snapshot(self, into: Snapshot | None = None) -> Snapshot:
        """Copies the state to memory of its own.

        Args:
            into: A snapshot that nobody needs any more. Its memory is used again: to touch new memory costs six times the copying.
        """
        schedule = self.schedule.state_dict() if self.schedule is not None else None
        model, optimizer = (into.model, into.optimizer) if into is not None else (None, None)
        return Snapshot(
            self.step, _copied(self.model.state_dict(), model), _copied(self.optimizer.state_dict(), optimizer), _copied(schedule)
        )

    def load(self, snapshot: Snapshot) -> None:
        """Takes over a snapshot's state."""
        self.model.load_state_dict(snapshot.model)
        self.optimizer.load_state_dict(snapshot.optimizer)
        if self.schedule is not None and snapshot.schedule is not None:
            self.schedule.load_state_dict(snapshot.schedule)
        self.step = snapshot.step

    def share(self, world: World, restore: Callable[[], None]) -> None:
        """Gives every rank the state of the highest step; a collective of all ranks, after which all states are equal.

        Args:
            world: The workers of now.
            restore: Gives rank 0 a state; called if nobody has one.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        steps = gather(self.step, world)
        if max(steps) == NOTHING and world.rank == 0:
            restore()
        if min(steps) == max(steps) != NOTHING or world.size == 1:
            return
        source = steps.index(max(steps))
        with collective():
            held: list[Any] = [pack(self.snapshot()) if world.rank == source else None]
            dist.broadcast_object_list(held, source)
        if world.rank != source:
            self.load(unpack(held[0]))


def _optimizer(spec: ClassSpec, model: nn.Module) -> Optimizer:
    made = load_class(spec)
    args = dict(spec.init_args)
    if "fused" in inspect.signature(made).parameters and not {"fused", "foreach"} & args.keys():
        args["fused"] = True  # on CPU it must be asked for
    return made([p for p in model.parameters() if p.requires_grad], **args)


def _schedule(spec: ClassSpec, optimizer: Optimizer, total_steps: int) -> LRScheduler:
    made = load_class(spec)
    args = dict(spec.init_args)
    if "total_steps" in inspect.signature(made).parameters:
        args.setdefault("total_steps", total_steps)
    return made(optimizer, **args)


def _copied(value: Any, into: Any = None) -> Any:
    """A deep copy with tensors on the CPU, in the memory of those of `into` where they are alike."""
    if isinstance(value, Tensor):
        if isinstance(into, Tensor) and (into.dtype, into.shape) == (value.dtype, value.shape):
            return into.copy_(value.detach())
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, dict):
        known = into if isinstance(into, dict) else {}
        return {k: _copied(v, known.get(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(v) for v in value)
    return value
