"""The fully sharded strategy: every rank has a shard of each parameter and of its optimizer state (FSDP2).

`ShardedPlacement` builds the model anew for each generation, shards it over the ranks (`torch.distributed.fsdp`) and
loads a whole copy into it. A whole copy does not depend on the number of ranks, so a checkpoint is the same as with any
other strategy, and loads on any number of workers. `ShardedPasses` makes the same number of passes on all ranks,
because every pass gathers the parameters from all ranks. `StateShards` and `PiecewiseKernels` let optimizers update a
rank's shards as plain tensors, with results that are bit-identical to those on whole parameters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ray_app.checkpoint.format import Snapshot
from ray_app.config.sections import TrainSection
from ray_app.data.windows import MicroBatch
from ray_app.devices import kind_of
from ray_app.plan.assignment import count_passes
from ray_app.plan.order import Cursor
from ray_app.reduction.peer_errors import collective
from ray_app.reduction.reducer import GradientReducer
from ray_app.reduction.sharded import FsdpReducer, gather_whole, shard_like, shard_model
from ray_app.reduction.world import World
from ray_app.task.losses import DeviceSums, Losses
from ray_app.torch_private import FUSED_KERNELS, wrap_shard
from ray_app.train.process_group import open_group_of_one
from ray_app.train.state.parameters import ordered_parameters
from ray_app.train.state.state import Placement, StateSync, TrainingState
from ray_app.train.state.transfer import copy_to_host
from ray_app.train.step.micro_batch import Passes
from ray_app.train.strategies.partitioned import PartitionedSync


class ShardedPasses(Passes):
    """The passes of sharded parameters, in which all ranks make the same number of passes; each is a collective.

    It is a subclass, because it changes one method of the passes that the others call: the forward gathers parameters.

    A rank makes an idle pass for each logical worker without rows, and if it runs fewer logical workers than another
    rank. An idle pass computes on rows that this rank has had before, with weights of zero, and leaves the buffers
    unchanged.

    Args:
        world: The workers of the generation.
        *args: See `Passes`.
    """

    unknown_source = "gradients of finite losses, which are sharded, so that the logical worker is not known"

    def __init__(self, world: World, *args: Any) -> None:
        super().__init__(*args)
        self._assigned = world.assigned
        # The passes in which this rank has no logical worker and others do.
        self._idle_passes = count_passes(world.size, world.logical_workers) - len(world.assigned)
        # The rows of idle passes.
        self._idle_batch: MicroBatch | None = None

    def begin_step(self, batches: Sequence[MicroBatch]) -> None:
        """Chooses the rows of idle passes, see `Passes.begin_step`."""
        self._idle_batch = next((batch for batch in batches if batch.rows), self._idle_batch) or _zero_row(batches[0])

    def run(self, cursor: Cursor, batch: MicroBatch, global_rows: int, reducer: GradientReducer) -> DeviceSums | None:
        """Runs forward and backward of one logical worker, and idle passes after this rank's last one."""
        assert isinstance(reducer, FsdpReducer), "build_reducer made it"
        sums = None
        if batch.rows:
            sums = super().run(cursor, batch, global_rows, reducer)
        else:
            self._run_idle_pass(cursor, reducer)
        if batch.logical_worker == self._assigned[-1]:
            for _ in range(self._idle_passes):
                self._run_idle_pass(cursor, reducer)
        return sums

    def _run_idle_pass(self, cursor: Cursor, reducer: FsdpReducer) -> None:
        """Makes a pass that adds zeros to the gradients and leaves the buffers unchanged."""
        batch, buffers = self._idle_batch, list(self.model.buffers())
        assert batch is not None
        values_before = [b.clone() for b in buffers]
        with self.prepared(batch):
            reducer.idle(self.losses(cursor, batch).values)
        with torch.no_grad():
            for buffer, value in zip(buffers, values_before, strict=True):
                buffer.copy_(value)

    def losses(self, cursor: Cursor, batch: MicroBatch) -> Losses:
        """Returns the losses of a micro-batch's rows, see `Passes.losses`; a lost peer can end the forward."""
        with collective():
            return super().losses(cursor, batch)

    def non_finite_rows(self, cursor: Cursor, batch: MicroBatch, loss: float, over: float) -> list[int]:
        """Returns all rows of a micro-batch with a loss that is not finite, since another pass would need all ranks."""
        del cursor, over
        return [] if math.isfinite(loss) else batch.positions.tolist()


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
        if func not in FUSED_KERNELS or not kind_of(args[0][0].device).rounds_by_position:
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


class ShardedPlacement(Placement):
    """The parameters of the fully sharded strategy: in each generation a rank has its shard of each.

    The state has to be made on the CPU, because the memory of a device may be too small for the whole model.

    Args:
        units: Returns the submodules of a model that are FSDP units, see `shard_model`.
        train: The section of the configuration.
        device: Device to compute on.
    """

    num_owners: int | None = None

    def __init__(
        self, units: Callable[[nn.Module], list[nn.Module]], train: TrainSection, device: torch.device
    ) -> None:
        self._units = units
        self._train = train
        self._device = device

    def make_sync(self, state: TrainingState) -> StateSync:
        """Returns the sync of the state, see `Placement.make_sync`."""
        self._state = state
        return PartitionedSync(state, self, self._train.peer_replica)

    def build_optimizer(
        self,
        build: Callable[[list[Any], bool], Optimizer],
        make_groups: Callable[[Mapping[str, nn.Parameter]], list[Any]],
        named: Mapping[str, nn.Parameter],
        optimizer_class: type[Optimizer],
    ) -> Optimizer:
        """Returns an optimizer of plain shards if its class updates each value independently.

        Any other optimizer gets the sharded parameters (`DTensor`); its operators compute as with whole parameters, and
        may communicate for that.
        """
        is_elementwise = optimizer_class in ELEMENTWISE_OPTIMIZERS or getattr(optimizer_class, "is_elementwise", False)
        self._shards = StateShards([p for p in named.values() if isinstance(p, DTensor)] if is_elementwise else [])
        shards = {name: self._shards.plain_parameters.get(p, p) for name, p in named.items()}
        optimizer = build(make_groups(shards), is_elementwise)
        self._shards.register_hooks(optimizer)
        return optimizer

    def update(self, apply: Callable[[], None]) -> None:
        """Updates the shards, see `Placement.update`."""
        with self._shards.piecewise_kernels():
            apply()

    @contextmanager
    def open_group(self, world: World) -> Iterator[World]:
        """Yields the workers with the assignment of logical workers that `exact` needs.

        A single worker has no process group, but FSDP needs one, so it gets one inside the block.
        """
        world = replace(world, strided=self._train.reduction == "exact")
        if world.size > 1:
            yield world
            return
        with open_group_of_one(self._device, self._train.backend):
            yield world

    def broadcast_parameters(self, world: World, averaged: bool) -> None:
        """Does nothing, because each forward gathers the parameters."""

    def whole_copy(self) -> Snapshot | None:
        """Returns None, because no rank has all shards."""
        return None

    def part(self) -> Any:
        """Returns the shards of this rank, see `StateParts.part`."""
        live = self._live()
        return live.model, live.optimizer, live.schedule, live.extra_state

    def _live(self) -> Snapshot:
        """Returns the state with sharded tensors, see `TrainingState.live`."""
        live = self._state.live()
        state, parameters = live.optimizer["state"], self._shards.sharded_parameters_of(self._state.optimizer)
        live.optimizer["state"] = {i: _wrap_shards(values, parameters[i]) for i, values in state.items()}
        return live

    def gather(self, world: World) -> Snapshot:
        """Gathers all shards, see `StateParts.gather`."""
        del world
        return Snapshot(**copy_to_host(vars(self._live()), whole=gather_whole))

    def load(self, whole: Snapshot, world: World) -> None:
        """Builds the model anew, shards it over the ranks and loads a whole copy, see `StateParts.load`.

        FSDP forms the groups of its device mesh meanwhile, so all ranks have to call it.
        """

        def shard(model: nn.Module) -> None:
            with collective():
                shard_model(model, self._units, self._train, self._device, world)

        # The shards of the last generation are freed with its model.
        vars(self).pop("_shards", None)
        self._state.rebuild(shard)
        parameters = dict(self._state.model.named_parameters(remove_duplicate=False))
        trained = self._shards.sharded_parameters_of(self._state.optimizer)
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
        model, schedule = _shard_by_name(whole.model, parameters), copy.deepcopy(whole.schedule)
        self._state.load(replace(whole, model=model, optimizer=optimizer, schedule=schedule, extra_state=extra_state))


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
