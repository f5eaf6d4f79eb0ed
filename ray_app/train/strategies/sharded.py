"""Fully sharded state: every rank has its share of each parameter and of its optimizer state (FSDP2, `torch.distributed.fsdp`).

A generation builds the model anew, shards it over its ranks and fills it from a whole copy, which knows nothing of shards: a checkpoint is
that of any other strategy, and loads on any number of workers.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ray_app.checkpoint.format import Snapshot
from ray_app.config.class_path import load_class
from ray_app.config.config import Config
from ray_app.config.optimizers import OptimizerSpec
from ray_app.exchange.exchange import World, collective
from ray_app.exchange.fsdp import as_sharded, shard, shard_like, whole
from ray_app.task.base import Task
from ray_app.train.group.process_group import backend_of, form_group
from ray_app.train.state.copies import copied
from ray_app.train.state.state import TrainingState
from ray_app.train.strategies.shards import BY_VALUE, StateShards
from ray_app.train.strategies.spread import SpreadState

_CPU = torch.device("cpu")


class ShardedState(SpreadState):
    """See the module. Outside of a generation there is only the whole copy."""

    def __init__(self, config: Config, task: Task, device: torch.device, total_steps: int) -> None:
        super().__init__(config, task, _CPU, total_steps)  # a device need not have room for all of it
        self._units, self._mesh_device = task.shard_units, device

    def _optimizer(self, spec: OptimizerSpec, named: Mapping[str, nn.Parameter]) -> Optimizer:
        """One of plain shards if it treats each value on its own, otherwise of sharded parameters, which know what a whole is."""
        sharded = [p for p in named.values() if isinstance(p, DTensor)] if load_class(spec) in BY_VALUE else []
        self._shards = StateShards(sharded)
        optimizer = super()._optimizer(spec, {name: self._shards.of.get(p, p) for name, p in named.items()})
        self._shards.follow(optimizer)
        return optimizer

    def _can_fuse(self, optimizer: Any) -> bool:
        return optimizer in BY_VALUE and super()._can_fuse(optimizer)

    def advance(self) -> None:
        """See `TrainingState.advance`."""
        with self._shards.as_whole():
            super().advance()

    @contextmanager
    def among(self, world: World) -> Iterator[World]:
        """See `TrainingState.among`; a worker that is alone gets a process group, which shards need."""
        world = replace(world, strided=self._config.train.reduction == "exact")
        if world.size > 1:
            with super().among(world):
                yield world
            return
        form_group(backend_of(self._mesh_device, self._config.train.backend), self._mesh_device, HashStore(), 0, 1)
        try:
            with super().among(world):
                yield world
        finally:
            dist.destroy_process_group()

    def _live(self) -> Snapshot:
        """See `TrainingState._live`; with sharded tensors."""
        live = super()._live()
        parameters = self._shards.in_order(self.optimizer)
        live.optimizer["state"] = {i: _sharded(values, parameters[i]) for i, values in live.optimizer["state"].items()}
        return live

    def _collected(self) -> Snapshot:
        return Snapshot(**copied(vars(self._live()), whole=whole))

    def _drop(self) -> None:
        """Frees the shards of the last generation and what belongs to them, before those of the next are made: a device that has room for
        a step need not have room for both. They are in circles (`fully_shard`, optimizers), so it takes the garbage collector.
        """
        self.model = self.master = nn.Module()
        for name in ("optimizer", "schedule", "turns", "average", "_shards", "_frozen"):
            vars(self).pop(name, None)
        gc.collect()

    def _take(self, whole: Snapshot) -> None:
        self._drop()
        self.model = self.master = self._made()
        with collective():
            shard(self.model, self._units, self._config.train, self._mesh_device, self._world)
        self._equip()
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        trained = self._shards.in_order(self.optimizer)
        moved = {
            **whole.optimizer,
            "state": {i: _like(values, trained[i], trained[i] in self._shards.of) for i, values in whole.optimizer["state"].items()},
        }
        more = dict(whole.more)
        if "parameters" in more:
            more["parameters"] = _by_name(more["parameters"], parameters)
        model = _by_name(whole.model, parameters)
        TrainingState.load(self, replace(whole, model=model, optimizer=moved, schedule=copy.deepcopy(whole.schedule), more=more))


def _by_name(values: dict[str, Tensor], parameters: dict[str, Any]) -> dict[str, Tensor]:
    """A model's values with those of its parameters as shards."""
    return {name: shard_like(value, parameters[name]) if name in parameters else value for name, value in values.items()}


def _like(values: dict[str, Any], parameter: DTensor, plain: bool) -> dict[str, Any]:
    """A parameter's optimizer state with (plain) shards of what is one value per value of the parameter, in memory of its own."""
    found = copy.copy(values)
    for name, value in values.items():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            shard = shard_like(value, parameter)
            found[name] = shard.to_local() if plain else shard
        elif isinstance(value, Tensor):
            found[name] = value.clone()
    return found


def _sharded(values: dict[str, Any], parameter: Any) -> dict[str, Any]:
    """A parameter's optimizer state with sharded tensors where it has plain shards."""
    if not isinstance(parameter, DTensor):
        return values
    shape = parameter.to_local().shape
    is_shard = {name: isinstance(v, Tensor) and not isinstance(v, DTensor) and v.shape == shape for name, v in values.items()}
    return {name: as_sharded(v, parameter) if is_shard[name] else v for name, v in values.items()}
