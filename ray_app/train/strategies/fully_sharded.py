"""The fully sharded strategy: every rank has a shard of each parameter and of its optimizer state (FSDP2).

`ShardedState` builds the model anew for each generation, shards it over the ranks (`torch.distributed.fsdp`) and loads
a whole copy into it. A whole copy does not depend on the number of ranks, so a checkpoint is the same as with any other
strategy, and loads on any number of workers. `ShardedStep` makes the same number of passes on all ranks, because every
pass gathers the parameters from all ranks. `StateShards` and `PiecewiseKernels` let optimizers update a rank's shards
as plain tensors, with results that are bit-identical to those on whole parameters.
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
    """A step on sharded parameters, in which all ranks make the same number of passes.

    A rank makes an idle pass for each logical worker without rows, and if it runs fewer logical workers than another
    rank. An idle pass computes on rows that this rank has had before, with weights of zero, and leaves the buffers
    unchanged.
    """

    non_finite_source = "gradients of finite losses, which are sharded, so that the logical worker is not known"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        assert isinstance(self._reducer, FsdpReducer), "build_reducer made it"
        self._sharded_reducer = self._reducer
        # The passes in which this rank has no logical worker and others do.
        self._idle_passes = count_passes(self._world.size, self._world.logical_workers) - len(self._world.assigned)
        # The rows of idle passes.
        self._idle_batch: MicroBatch | None = None
        # The logical workers of this rank with a loss that is not finite in the present step.
        self._non_finite: set[int] = set()

    def run(self, cursor: Cursor, batches: list[MicroBatch], global_rows: int, flags: Flags) -> StepResult:
        """Does one step, see `Step.run`."""
        self._idle_batch = next((batch for batch in batches if batch.rows), self._idle_batch) or _zero_row(batches[0])
        return super().run(cursor, batches, global_rows, flags)

    def _run_logical_worker(self, cursor: Cursor, batch: MicroBatch, global_rows: int) -> DeviceSums | None:
        sums = None
        if batch.rows:
            sums = super()._run_logical_worker(cursor, batch, global_rows)
        else:
            self._run_idle_pass(cursor)
        if batch.logical_worker == self._world.assigned[-1]:
            for _ in range(self._idle_passes):
                self._run_idle_pass(cursor)
        return sums

    def _replica_stats(
        self, batches: list[MicroBatch], sums: list[LossSums], global_rows: int, flags: Flags
    ) -> list[ReplicaStats]:
        stats = super()._replica_stats(batches, sums, global_rows, flags)
        self._non_finite = {replica.logical_worker for replica in stats if not math.isfinite(replica.loss)}
        return stats

    def _run_idle_pass(self, cursor: Cursor) -> None:
        """Makes a pass that adds zeros to the gradients and leaves the buffers unchanged."""
        batch, buffers = self._idle_batch, list(self._state.model.buffers())
        assert batch is not None
        values_before = [b.clone() for b in buffers]
        with self._error_context(batch):
            self._sharded_reducer.idle(self._losses(cursor, batch, self._state.model).values)
        with torch.no_grad():
            for buffer, value in zip(buffers, values_before, strict=True):
                buffer.copy_(value)

    def _losses(self, cursor: Cursor, batch: MicroBatch, model: nn.Module) -> Losses:
        # The forward gathers parameters, so a lost peer can end it.
        with collective():
            return super()._losses(cursor, batch, model)

    def _gradients(self) -> list[Tensor]:
        """Returns this rank's shards of the gradients."""
        return [p.grad.to_local() for p in self._parameters if p.grad is not None]  # type: ignore[attr-defined]

    def _norms(self) -> list[Tensor]:
        """Returns norms of all shards of the gradient, see `Step._norms`; a collective.

        With `exact` these are the norms of all parameters' gradients, otherwise it is the norm of all of them together.
        """
        if isinstance(self._sharded_reducer, DeterministicShardedReducer):
            norms = self._sharded_reducer.norms()
        else:
            norms = torch.stack(gradient_norms(self._gradients())).double().square().sum()
            with self._world.launch_guard():
                dist.all_reduce(norms)
            norms.sqrt_()
        return [norms.to(self._device, non_blocking=True)]

    def _is_finite(self, cursor: Cursor, batch: MicroBatch, global_rows: int) -> bool:
        """Returns whether the loss of a micro-batch was finite in the step, since another pass would need all ranks."""
        return batch.logical_worker not in self._non_finite

    def _non_finite_rows(self, cursor: Cursor, batch: MicroBatch) -> list[int]:
        """Returns all rows of the micro-batch, since a pass for each row would need all ranks."""
        del cursor
        return batch.positions.tolist()


def _zero_row(batch: MicroBatch) -> MicroBatch:
    """Returns a micro-batch of one row of zeros, with the fields of a micro-batch without rows."""
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
"""Optimizers that update each value of a parameter independently, so that a shard can be updated by itself."""
_FUSED_KERNELS = (torch._fused_adam_, torch._fused_adamw_, torch._fused_sgd_, torch._fused_adagrad_)
_BLOCK_VALUES = 64
"""Number of values in a block of a parameter, see `PiecewiseKernels`.

It is a multiple of the number of values in a vector register.
"""


class StateShards:
    """Plain parameters for an optimizer, one for this rank's shard of each sharded parameter, in the same memory.

    Args:
        parameters: The sharded parameters.

    Attributes:
        plain_parameters: The plain parameter by its sharded parameter.
    """

    def __init__(self, parameters: Sequence[DTensor]) -> None:
        self._sharded: dict[Tensor, DTensor] = {
            nn.Parameter(p.to_local().detach(), p.requires_grad): p for p in parameters
        }
        self.plain_parameters: dict[Tensor, Any] = {p: shard for shard, p in self._sharded.items()}
        self._pieces = {shard: _pieces_of(p, shard.numel()) for shard, p in self._sharded.items()}

    def register_hooks(self, optimizer: Optimizer) -> None:
        """Adds hooks to the optimizer of the plain parameters, so that it uses gradients of the sharded parameters.

        Before each step the plain parameters get the memory and the gradients of their sharded parameters; after the
        step they have no gradients.
        """

        def set_gradients(*_: Any) -> None:
            for shard, p in self._sharded.items():
                gradient: Any = p.grad
                shard.data, shard.grad = p.to_local().detach(), None if gradient is None else gradient.to_local()

        def drop_gradients(*_: Any) -> None:
            for shard in self._sharded:
                shard.grad = None

        optimizer.register_step_pre_hook(set_gradients)
        optimizer.register_step_post_hook(drop_gradients)

    def sharded_parameters_of(self, optimizer: Optimizer) -> list[Any]:
        """Returns the sharded parameters in the order in which an optimizer numbers their plain parameters.

        A parameter of the optimizer that is not one of the plain parameters is returned itself.
        """
        return [self._sharded.get(p, p) for p in ordered_parameters(optimizer)]

    def piecewise_kernels(self) -> TorchFunctionMode:
        """Returns a context manager in which fused kernels update each value as they would in the whole parameter."""
        return PiecewiseKernels(self._pieces)


Piece = tuple[int, int, int, int]
"""A piece of a shard that a kernel updates at once: (low, high, offset, size).

The piece has the values [low, high) of the shard. If it is a part of one block of the whole parameter, `offset` is its
position in the block, and `size` the number of values of the block. If it is one or more whole blocks, both are 0.
"""


def cut_shard(start: int, count: int, total: int) -> list[Piece]:
    """Returns the pieces of a shard: parts of blocks of the whole parameter, and runs of whole blocks.

    The last block of a parameter may have fewer than `_BLOCK_VALUES` values.

    Args:
        start: Position of the shard's first value in the whole parameter.
        count: Number of values of the shard.
        total: Number of values of the whole parameter.
    """
    # All positions are in the whole parameter; those of a piece are in the shard.
    pieces = list[Piece]()
    low = start
    stop = start + count
    while low < stop:
        block = low // _BLOCK_VALUES * _BLOCK_VALUES
        size = min(_BLOCK_VALUES, total - block)
        if low == block and stop >= block + size:
            high = stop if stop == total else stop // _BLOCK_VALUES * _BLOCK_VALUES
            pieces.append((low - start, high - start, 0, 0))
        else:
            high = min(stop, block + size)
            pieces.append((low - start, high - start, low - block, size))
        low = high
    return pieces


def _pieces_of(p: DTensor, count: int) -> list[Piece]:
    """Returns the pieces of this rank's shard of a parameter; `count` is the number of values of the shard."""
    rows = -(-p.shape[0] // p.device_mesh.size())
    return cut_shard(p.device_mesh.get_local_rank() * rows * p.shape[1:].numel(), count, p.numel())


class PiecewiseKernels(TorchFunctionMode):
    """Makes fused kernels update shards with the same roundings as whole parameters.

    `StateShards.piecewise_kernels` returns this mode for its shards.

    On a CPU a fused kernel updates the values after the last full vector register one by one, with other roundings. So
    the values of a shard have to be in the same position of a register as in the whole parameter. To that end a piece
    that is a part of a block is copied into a temporary block of zeros, at the position that it has in its block; the
    kernel updates the temporary block, and the piece is copied back. Whole blocks are updated in place.

    Args:
        pieces: The pieces of each shard.
    """

    def __init__(self, pieces: Mapping[Tensor, list[Piece]]) -> None:
        super().__init__()
        self._pieces = pieces

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _FUSED_KERNELS or args[0][0].device.type != "cpu":
            return func(*args, **(kwargs or {}))
        piece_args: list[list[Tensor]] = [[] for _ in args]
        copies_back: list[tuple[Tensor, Tensor]] = []
        for i, shard in enumerate(args[0]):
            for piece in self._pieces[shard]:
                for pieces, values in zip(piece_args, args, strict=True):
                    if values:
                        pieces.append(_cut_piece(values[i], piece, copies_back))
        if piece_args[0]:
            func(*piece_args, **(kwargs or {}))
        for target, updated in copies_back:
            target.copy_(updated)
        return None


def _cut_piece(value: Tensor, piece: Piece, copies_back: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns a piece of a tensor for the kernel: a view of it, or a temporary block with the piece in it.

    Args:
        value: A tensor that the optimizer passes to the kernel for a shard: the shard, its gradient or its state.
        piece: The piece.
        copies_back: For a temporary block, the piece's view and its copy in the block are appended.
    """
    low, high, offset, size = piece
    # The number of steps has no dimension and is the same for all pieces.
    if not value.ndim:
        return value
    part = value.detach().view(-1)[low:high]
    if not size:
        return part
    block = part.new_zeros(size)
    copies_back.append((part, block[offset : offset + high - low].copy_(part)))
    return block


_CPU = torch.device("cpu")


class ShardedState(PartitionedState):
    """The training state of the fully sharded strategy; outside of a generation it consists of the whole copy only."""

    def __init__(self, config: Config, task: Task, device: torch.device, total_steps: int) -> None:
        # The whole model is built on the CPU, because the memory of a device may be too small for it.
        super().__init__(config, task, _CPU, total_steps)
        self._units, self._mesh_device = task.shard_units, device

    def _build_optimizer(
        self, spec: OptimizerSpec, named: Mapping[str, nn.Parameter], field: str = "optimizer"
    ) -> Optimizer:
        """Returns an optimizer of plain shards if its class updates each value independently.

        Any other optimizer gets the sharded parameters (`DTensor`); its operators compute as with whole parameters.
        """
        sharded = (
            [p for p in named.values() if isinstance(p, DTensor)] if load_class(spec) in ELEMENTWISE_OPTIMIZERS else []
        )
        self._shards = StateShards(sharded)
        shards = {name: self._shards.plain_parameters.get(p, p) for name, p in named.items()}
        optimizer = super()._build_optimizer(spec, shards, field)
        self._shards.register_hooks(optimizer)
        return optimizer

    def _can_fuse(self, optimizer_class: Any) -> bool:
        return optimizer_class in ELEMENTWISE_OPTIMIZERS and super()._can_fuse(optimizer_class)

    def optimizer_step(self) -> None:
        """Updates the shards, see `TrainingState.optimizer_step`."""
        with self._shards.piecewise_kernels():
            super().optimizer_step()

    @contextmanager
    def bind(self, world: World) -> Iterator[World]:
        """Binds the state to a generation, see `PartitionedState.bind`.

        A single worker has no process group, but FSDP needs one, so it gets one for the generation.
        """
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
        """Returns the state with sharded tensors, see `TrainingState._live`."""
        live = super()._live()
        state, parameters = live.optimizer["state"], self._shards.sharded_parameters_of(self.optimizer)
        live.optimizer["state"] = {i: _wrap_shards(values, parameters[i]) for i, values in state.items()}
        return live

    def _collect(self) -> Snapshot:
        return Snapshot(**copy_to_host(vars(self._live()), whole=gather_whole))

    def _drop(self) -> None:
        """Frees the shards of the last generation and everything that belongs to them.

        This has to be done before the shards of the next generation are made, because the memory of a device may be too
        small for both. Models and optimizers are in reference cycles, so the garbage collector has to run.
        """
        self.model = self.master = nn.Module()
        for name in ("optimizer", "schedule", "turns", "average", "_shards", "_frozen_layers"):
            vars(self).pop(name, None)
        gc.collect()

    def _load_part(self, whole: Snapshot) -> None:
        self._drop()
        self.model = self.master = self._build_model()
        with collective():
            shard_model(self.model, self._units, self._config.train, self._mesh_device, self._world)
        self._build_optimizers()
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        trained = self._shards.sharded_parameters_of(self.optimizer)
        optimizer = {
            **whole.optimizer,
            "state": {
                i: _shard_values(values, trained[i], trained[i] in self._shards.plain_parameters)
                for i, values in whole.optimizer["state"].items()
            },
        }
        extra_state = dict(whole.extra_state)
        if "parameters" in extra_state:
            extra_state["parameters"] = _shard_by_name(extra_state["parameters"], parameters)
        model = _shard_by_name(whole.model, parameters)
        TrainingState.load(
            self,
            replace(
                whole, model=model, optimizer=optimizer, schedule=copy.deepcopy(whole.schedule), extra_state=extra_state
            ),
        )


def _shard_by_name(values: dict[str, Tensor], parameters: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the values of a model by name, with a shard in place of the value of each parameter."""
    return {
        name: shard_like(value, parameters[name]) if name in parameters else value for name, value in values.items()
    }


def _shard_values(values: dict[str, Any], parameter: DTensor, plain: bool) -> dict[str, Any]:
    """Returns this rank's optimizer state of a parameter; it shares no tensor with the state of the whole parameter.

    A tensor of the parameter's shape is replaced by its shard, every other tensor by a copy.

    Args:
        values: The state for the whole parameter.
        parameter: The sharded parameter.
        plain: Whether to return shards as plain tensors instead of `DTensor`.
    """
    sharded = copy.copy(values)
    for name, value in values.items():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            shard = shard_like(value, parameter)
            sharded[name] = shard.to_local() if plain else shard
        elif isinstance(value, Tensor):
            sharded[name] = value.clone()
    return sharded


def _wrap_shards(values: dict[str, Any], parameter: Any) -> dict[str, Any]:
    """Returns the optimizer state of a parameter with a sharded tensor (`DTensor`) in place of each plain shard."""
    if not isinstance(parameter, DTensor):
        return values
    shape = parameter.to_local().shape
    is_shard = {
        name: isinstance(v, Tensor) and not isinstance(v, DTensor) and v.shape == shape for name, v in values.items()
    }
    return {name: wrap_shard(v, parameter) if is_shard[name] else v for name, v in values.items()}
