"""A step on sharded parameters: every pass gathers them from all ranks, so all ranks make the same number of passes.

Optimizers that move a rank's shards as plain tensors, with the bits that they give on whole ones.

Fully sharded state: every rank has its share of each parameter and of its optimizer state (FSDP2,
`torch.distributed.fsdp`).

A generation builds the model anew, shards it over its ranks and fills it from a whole copy, which knows nothing of
shards: a checkpoint is that of any other strategy, and loads on any number of workers.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ray_app.checkpoint.format import Snapshot
from ray_app.config.config import Config
from ray_app.config.import_paths import OptimizerSpec, load_class
from ray_app.data.windows import MicroBatch
from ray_app.plan.assignment import count_passes
from ray_app.plan.order import Cursor
from ray_app.reduction.base import World, collective
from ray_app.reduction.sharded import (
    DeterministicShardedReducer,
    FsdpReducer,
    gather_whole,
    shard_like,
    shard_model,
    wrap_shard,
)
from ray_app.task.base import DeviceSums, Losses, LossSums, Task
from ray_app.train.membership import Flags
from ray_app.train.process_group import backend_name, init_default_group
from ray_app.train.state.parameters import ordered_parameters
from ray_app.train.state.state import TrainingState
from ray_app.train.state.transfer import copy_to_host
from ray_app.train.step.step import Step, gradient_norms
from ray_app.train.step.step_stats import ReplicaStats, StepResult
from ray_app.train.strategies.partitioned import PartitionedState


class ShardedStep(Step):
    """See the module.

    A rank that plays fewer logical workers than another, or one without rows, makes a pass that counts for nothing: on
    rows that it had before, with weights of zero and without a trace in the buffers.
    """

    non_finite_source = "gradients of finite losses, which are sharded, so whose is not known"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self._reducer, FsdpReducer), "build_reducer made it"
        self._sharded = self._reducer
        self._missing = count_passes(self._world.size, self._world.logical_workers) - len(self._world.assigned)
        self._before: MicroBatch | None = None
        self._bad: set[int] = set()

    def run(self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, flags: Flags) -> StepResult:
        """See `Step.run`."""
        self._before = next((batch for batch in batches if batch.rows), self._before) or _blank(batches[0])
        return super().run(cursor, batches, global_rows, flags)

    def _run_logical_worker(self, cursor: Cursor, batch: MicroBatch, global_rows: int) -> DeviceSums | None:
        sums = None
        if batch.rows:
            sums = super()._run_logical_worker(cursor, batch, global_rows)
        else:
            self._pass_idly(cursor)
        if batch.logical_worker == self._world.assigned[-1]:
            for _ in range(self._missing):
                self._pass_idly(cursor)
        return sums

    def _replica_stats(
        self, batches: list[MicroBatch], told: list[LossSums], global_rows: int, flags: Flags
    ) -> list[ReplicaStats]:
        lines = super()._replica_stats(batches, told, global_rows, flags)
        self._bad = {row.logical_worker for row in lines if not math.isfinite(row.loss)}
        return lines

    def _pass_idly(self, cursor: Cursor) -> None:
        batch, buffers = self._before, list(self._state.model.buffers())
        assert batch is not None
        before = [b.clone() for b in buffers]
        with self._error_context(batch):
            self._sharded.idle(self._losses(cursor, batch, self._state.model).values)
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)

    def _losses(self, cursor: Cursor, batch: MicroBatch, model: nn.Module) -> Losses:
        with collective():
            return super()._losses(cursor, batch, model)

    def _gradients(self) -> list[Tensor]:
        return [p.grad.to_local() for p in self._parameters if p.grad is not None]  # type: ignore[attr-defined]

    def _norms(self) -> list[Tensor]:
        """See `Step._norms`; a collective, so that all ranks know the same norm."""
        if isinstance(self._sharded, DeterministicShardedReducer):
            norms = self._sharded.norms()
        else:
            norms = torch.stack(gradient_norms(self._gradients())).double().square().sum()
            with self._world.launch_guard():
                dist.all_reduce(norms)
            norms.sqrt_()
        return [norms.to(self._device, non_blocking=True)]

    def _is_finite(self, cursor: Cursor, batch: MicroBatch, global_rows: int) -> bool:
        """Known from the pass itself: another one would have to be one of all ranks."""
        return batch.logical_worker not in self._bad

    def _non_finite_rows(self, cursor: Cursor, batch: MicroBatch) -> list[int]:
        """All of the micro-batch: to look at each by itself would be a pass of all ranks."""
        del cursor
        return batch.positions.tolist()


def _blank(batch: MicroBatch) -> MicroBatch:
    """One row of zeros in the shape of a micro-batch without rows."""
    fields = {
        name: torch.zeros(1, *value.shape[1:], dtype=value.dtype, device=value.device)
        for name, value in batch.fields.items()
    }
    return MicroBatch(batch.logical_worker, 1, fields, torch.zeros(1, dtype=torch.int64), 0, batch.positions)


ELEMENTWISE_OPTIMIZERS = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adagrad,
    optim.RMSprop,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adadelta,
    optim.ASGD,
    optim.Rprop,
)
"""Optimizers that treat each value of a parameter on its own, so that a shard needs to know nothing of the others."""
_FUSED = (torch._fused_adam_, torch._fused_adamw_, torch._fused_sgd_, torch._fused_adagrad_)
_BLOCK = 64
"""Values: a multiple of what a vector instruction takes at once."""


class StateShards:
    """This rank's shards of sharded parameters as parameters of their own, sharing their memory.

    Args:
        parameters: The sharded ones.
    """

    def __init__(self, parameters: Sequence[DTensor]) -> None:
        self._sharded: dict[Tensor, DTensor] = {
            nn.Parameter(p.to_local().detach(), p.requires_grad): p for p in parameters
        }
        self.of: dict[Tensor, Any] = {p: shard for shard, p in self._sharded.items()}
        self._pieces = {shard: _pieces_of(p, shard.numel()) for shard, p in self._sharded.items()}

    def follow(self, optimizer: Optimizer) -> None:
        """Lets an optimizer of these move them by the gradients that the sharded parameters have then."""

        def before(*_: Any) -> None:
            for shard, p in self._sharded.items():
                gradient: Any = p.grad
                shard.data, shard.grad = p.to_local().detach(), None if gradient is None else gradient.to_local()

        def after(*_: Any) -> None:
            for shard in self._sharded:
                shard.grad = None

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def in_order(self, optimizer: Optimizer) -> list[Any]:
        """The sharded parameters as the optimizer numbers them."""
        return [self._sharded.get(p, p) for p in ordered_parameters(optimizer)]

    def as_whole(self) -> TorchFunctionMode:
        """A context in which fused kernels treat each value as they would in the whole parameter."""
        return PiecewiseKernels(self._pieces)


Piece = tuple[int, int, int, int]
"""Values [low, high) of a shard; where they stand in their block of the whole parameter, and its size, or 0 for whole
blocks.
"""


def cut_shard(start: int, count: int, total: int) -> list[Piece]:
    """Cuts a shard, `count` values from `start` of `exact_sum`, where blocks of the whole parameter begin; the last of
    these is shorter.
    """
    found, at, stop = list[Piece](), start, start + count
    while at < stop:
        block = at // _BLOCK * _BLOCK
        size = min(_BLOCK, total - block)
        if at == block and stop >= block + size:
            end, place = stop if stop == total else stop // _BLOCK * _BLOCK, (0, 0)
        else:
            end, place = min(stop, block + size), (at - block, size)
        found.append((at - start, end - start, *place))
        at = end
    return found


def _pieces_of(p: DTensor, count: int) -> list[Piece]:
    rows = -(-p.shape[0] // p.device_mesh.size())
    return cut_shard(p.device_mesh.get_local_rank() * rows * p.shape[1:].numel(), count, p.numel())


class PiecewiseKernels(TorchFunctionMode):
    """See `StateShards.as_whole`.

    On a CPU a fused kernel takes the values that are left behind its last vector one by one, with other roundings. A
    piece that is no whole blocks goes through it in the place that it has in its block, in memory of its own.
    """

    def __init__(self, of: Mapping[Tensor, list[Piece]]) -> None:
        super().__init__()
        self._pieces = of

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _FUSED or args[0][0].device.type != "cpu":
            return func(*args, **(kwargs or {}))
        cut: list[list[Tensor]] = [[] for _ in args]
        back: list[tuple[Tensor, Tensor]] = []
        for i, shard in enumerate(args[0]):
            for piece in self._pieces[shard]:
                for into, values in zip(cut, args, strict=True):
                    if values:
                        into.append(_cut(values[i], piece, back))
        if cut[0]:
            func(*cut, **(kwargs or {}))
        for value, moved in back:
            value.copy_(moved)
        return None


def _cut(value: Tensor, piece: Piece, back: list[tuple[Tensor, Tensor]]) -> Tensor:
    """A piece of what an optimizer has of a shard; what has to be copied back goes into `back`."""
    low, high, offset, size = piece
    if not value.ndim:  # the number of steps
        return value
    part = value.detach().view(-1)[low:high]
    if not size:
        return part
    block = part.new_zeros(size)
    back.append((part, block[offset : offset + high - low].copy_(part)))
    return block


_CPU = torch.device("cpu")


class ShardedState(PartitionedState):
    """See the module. Outside of a generation there is only the whole copy."""

    def __init__(self, config: Config, task: Task, device: torch.device, total_steps: int) -> None:
        super().__init__(config, task, _CPU, total_steps)  # a device need not have room for all of it
        self._units, self._mesh_device = task.shard_units, device

    def _build_optimizer(self, spec: OptimizerSpec, named: Mapping[str, nn.Parameter]) -> Optimizer:
        """One of plain shards if it treats each value on its own, otherwise of sharded parameters, which know what a
        whole is.
        """
        sharded = (
            [p for p in named.values() if isinstance(p, DTensor)] if load_class(spec) in ELEMENTWISE_OPTIMIZERS else []
        )
        self._shards = StateShards(sharded)
        optimizer = super()._build_optimizer(spec, {name: self._shards.of.get(p, p) for name, p in named.items()})
        self._shards.follow(optimizer)
        return optimizer

    def _can_fuse(self, optimizer: Any) -> bool:
        return optimizer in ELEMENTWISE_OPTIMIZERS and super()._can_fuse(optimizer)

    def optimizer_step(self) -> None:
        """See `TrainingState.optimizer_step`."""
        with self._shards.as_whole():
            super().optimizer_step()

    @contextmanager
    def bind(self, world: World) -> Iterator[World]:
        """See `TrainingState.bind`; a worker that is alone gets a process group, which shards need."""
        world = replace(world, strided=self._config.train.reduction == "exact")
        if world.size > 1:
            with super().bind(world):
                yield world
            return
        init_default_group(
            backend_name(self._mesh_device, self._config.train.backend), self._mesh_device, HashStore(), 0, 1
        )
        try:
            with super().bind(world):
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
        return Snapshot(**copy_to_host(vars(self._live()), whole=gather_whole))

    def _drop(self) -> None:
        """Frees the shards of the last generation and what belongs to them, before those of the next are made: a device
        that has room for a step need not have room for both. They are in circles (`fully_shard`, optimizers), so it
        takes the garbage collector.
        """
        self.model = self.master = nn.Module()
        for name in ("optimizer", "schedule", "turns", "average", "_shards", "_frozen"):
            vars(self).pop(name, None)
        gc.collect()

    def _take(self, whole: Snapshot) -> None:
        self._drop()
        self.model = self.master = self._build_model()
        with collective():
            shard_model(self.model, self._units, self._config.train, self._mesh_device, self._world)
        self._build_optimizers()
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        trained = self._shards.in_order(self.optimizer)
        moved = {
            **whole.optimizer,
            "state": {
                i: _like(values, trained[i], trained[i] in self._shards.of)
                for i, values in whole.optimizer["state"].items()
            },
        }
        more = dict(whole.more)
        if "parameters" in more:
            more["parameters"] = _by_name(more["parameters"], parameters)
        model = _by_name(whole.model, parameters)
        TrainingState.load(
            self, replace(whole, model=model, optimizer=moved, schedule=copy.deepcopy(whole.schedule), more=more)
        )


def _by_name(values: dict[str, Tensor], parameters: dict[str, Any]) -> dict[str, Tensor]:
    """A model's values with those of its parameters as shards."""
    return {
        name: shard_like(value, parameters[name]) if name in parameters else value for name, value in values.items()
    }


def _like(values: dict[str, Any], parameter: DTensor, plain: bool) -> dict[str, Any]:
    """A parameter's optimizer state with (plain) shards of what is one value per value of the parameter, in memory of
    its own.
    """
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
    is_shard = {
        name: isinstance(v, Tensor) and not isinstance(v, DTensor) and v.shape == shape for name, v in values.items()
    }
    return {name: wrap_shard(v, parameter) if is_shard[name] else v for name, v in values.items()}
