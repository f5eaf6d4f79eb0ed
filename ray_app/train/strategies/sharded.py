"""Fully sharded state: every rank has its share of each parameter and of its optimizer state (FSDP2, `torch.distributed.fsdp`).

A generation builds the model anew, shards it over its ranks and fills it from a whole copy, which knows nothing of shards: a checkpoint is
that of any other strategy, and loads on any number of workers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

from ray_app.checkpoint.format import Snapshot
from ray_app.config.config import Config
from ray_app.exchange.exchange import World, collective
from ray_app.exchange.fsdp import shard, shard_like, whole
from ray_app.task.base import Task
from ray_app.train.state.state import TrainingState, copied
from ray_app.train.strategies.spread import SpreadState

_CPU = torch.device("cpu")


class ShardedState(SpreadState):
    """See the module. Outside of a generation there is only the whole copy."""

    def __init__(self, config: Config, task: Task, device: torch.device, total_steps: int) -> None:
        super().__init__(config, task, _CPU, total_steps)  # a device need not have room for all of it
        self._units, self._mesh_device = task.shard_units, device

    def _can_fuse(self, optimizer: Any) -> bool:
        return optimizer in (torch.optim.Adam, torch.optim.AdamW)  # torch 2.15 has no other fused kernel that knows of shards

    @contextmanager
    def among(self, world: World) -> Iterator[None]:
        """See `TrainingState.among`; a worker that is alone gets a process group, which shards need."""
        if world.size > 1:
            with super().among(world):
                yield
            return
        backend = "cpu:gloo,cuda:nccl" if self._mesh_device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        try:
            with super().among(world):
                yield
        finally:
            dist.destroy_process_group()

    def _collected(self) -> Snapshot:
        live = self._live()
        parts = (copied(part, whole=whole) for part in (live.model, live.optimizer, live.schedule, live.more))
        return Snapshot(live.step, *parts)

    def _take(self, whole: Snapshot) -> None:
        with collective():
            self.model = shard(self._made(), self._units, self._config.train, self._mesh_device, self._world)
        self.master = self.model
        self._equip()
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        moved = {**whole.optimizer, "state": {i: _like(values, trained[i]) for i, values in whole.optimizer["state"].items()}}
        more = dict(whole.more)
        if "parameters" in more:
            more["parameters"] = _by_name(more["parameters"], parameters)
        model = _by_name(whole.model, parameters)
        TrainingState.load(self, replace(whole, model=model, optimizer=moved, schedule=copy.deepcopy(whole.schedule), more=more))


def _by_name(values: dict[str, Tensor], parameters: dict[str, Any]) -> dict[str, Tensor]:
    """A model's values with those of its parameters as shards."""
    return {name: shard_like(value, parameters[name]) if name in parameters else value for name, value in values.items()}


def _like(values: dict[str, Any], parameter: DTensor) -> dict[str, Any]:
    """A parameter's optimizer state with shards of what is one value per value of the parameter, in memory of its own."""
    found = copy.copy(values)
    for name, value in values.items():
        if isinstance(value, Tensor):
            found[name] = shard_like(value, parameter) if value.shape == parameter.shape else value.clone()
    return found
