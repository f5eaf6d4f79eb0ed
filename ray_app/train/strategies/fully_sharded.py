"""The fully sharded strategy: every rank has a shard of each parameter and of its optimizer state (FSDP2).

`ShardedBackend` builds the model anew for each generation, shards it over the ranks (`torch.distributed.fsdp`) and
loads its rows of each tensor into it. No rank ever has the whole state: rows move from rank to rank, and checkpoints
are written and read in parts. `ShardedPasses` makes the same number of passes on all ranks, because every pass gathers
the parameters from all ranks. `StateShards` and `PiecewiseKernels` let optimizers update a rank's shards as plain
tensors, with results that are bit-identical to those on whole parameters.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ray_app.checkpoint.format import Snapshot, is_rows, make_rows, map_tensors, row_values
from ray_app.config.sections import TrainSection
from ray_app.data.windows import MicroBatch
from ray_app.devices import kind_of
from ray_app.errors import PeerLostError
from ray_app.plan.assignment import count_passes
from ray_app.plan.order import Cursor
from ray_app.reduction.messages import check_errors_on_all_ranks, gather
from ray_app.reduction.peer_errors import collective
from ray_app.reduction.reducer import GradientReducer
from ray_app.reduction.sharded import FsdpReducer, MappedInit, build_without_values, shard_model, shard_rows
from ray_app.reduction.world import World
from ray_app.task.losses import DeviceSums, Losses
from ray_app.torch_private import FUSED_KERNELS, wrap_shard
from ray_app.train.process_group import open_group_of_one
from ray_app.train.state.parameters import match_initial_parameters, ordered_parameters
from ray_app.train.state.state import NO_STATE, StateBackend
from ray_app.train.state.transfer import copy_to_host, is_small
from ray_app.train.step.micro_batch import Passes
from ray_app.train.strategies.partitioned import PeerReplicas, PeerTensor, read_rows, read_whole


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
    rows = shard_rows(p.shape[0], p.device_mesh.get_local_rank(), p.device_mesh.size())
    return cut_shard(rows.start * p.shape[1:].numel(), count, p.numel())


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


class ShardedBackend(StateBackend):
    """The state of the fully sharded strategy: in each generation a rank has a shard of every parameter.

    The state has to be made on the CPU, because the memory of a device may be too small for the whole model. At the end
    of a generation that ends as planned, every rank keeps a copy of its part, and a rank that leaves sends its copy to
    one that stays. If a peer is lost, the ranks return to the newest committed checkpoint. With `train.peer_replica`
    every rank also keeps the part of the rank before it after every step, and they continue from these.

    Args:
        units: Returns the submodules of a model that are FSDP units, see `shard_model`.
        train: The section of the configuration.
        device: Device to compute on.
    """

    builds_anew = True

    def __init__(
        self, units: Callable[[nn.Module], list[nn.Module]], train: TrainSection, device: torch.device
    ) -> None:
        self._units = units
        self._train = train
        self._device = device
        # Outside of a generation this worker counts as the only one.
        self._world = World(0, 1, 1)
        # The state that `restore` has opened.
        self._opened: Snapshot | None = None
        # The steps of the last two checkpoints. The first of them is on storage when the second is made.
        self._checkpoint_steps = deque([NO_STATE], maxlen=2)
        self._replicas = PeerReplicas()

    def build_model(self, build: Callable[[], nn.Module], needs_values: bool) -> nn.Module:
        """Returns a model that takes little memory, see `StateBackend.build_model`."""
        model = None if needs_values else build_without_values(build)
        with MappedInit():  # type: ignore[no-untyped-call]
            return model or build()

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
        """Updates the shards, see `StateBackend.update`."""
        with self._shards.piecewise_kernels():
            apply()

    def _part(self) -> Snapshot:
        """Returns the part of the state that this rank has, with `make_rows` in place of each shard; it is no copy.

        A large tensor that is not sharded is in the part of rank 0.
        """

        def divide(path: str, value: Tensor) -> Any:
            del path
            if isinstance(value, DTensor):
                rows = shard_rows(value.shape[0], self._world.rank, self._world.size)
                return make_rows(value.to_local().detach(), rows.start, value.shape)
            if is_small(value):
                return value
            return make_rows(value if self._world.rank == 0 else value[:0], 0, value.shape)

        live = self.state.live()
        state, parameters = live.optimizer["state"], self._shards.sharded_parameters_of(self.state.optimizer)
        live.optimizer["state"] = {i: _wrap_shards(values, parameters[i]) for i, values in state.items()}
        return replace(Snapshot(**map_tensors(vars(live), divide)), part=(self._world.rank, self._world.size))

    def _load(self, source: Snapshot | None, world: World) -> None:
        """Builds the model anew, shards it over the ranks and loads this rank's rows of a state; a collective.

        Args:
            source: The state, with tensors for `read_rows`. None for the values with which the task builds the model
                on rank 0. Without the state of an optimizer it has only initial parameters.
            world: The workers of the generation.

        Raises:
            ConfigError: The initial parameters do not fit the model.
            PeerLostError: A peer left meanwhile.
        """
        built: dict[str, Any] = {}

        def shard(model: nn.Module) -> None:
            if source is None:
                built.update(_values_of_rank_0(model, world))
            with collective():
                shard_model(model, self._units, self._train, self._device, world)

        # The shards of the last generation are freed with its model.
        vars(self).pop("_shards", None)
        # A loss of the task may lack initial parameters.
        self.state.rebuild(shard, needs_values=not source.optimizer if source is not None else world.rank == 0)
        source = source or Snapshot(0, built, {}, None)
        parameters: dict[str, Any] = dict(self.state.model.named_parameters(remove_duplicate=False))
        if not source.optimizer:
            live = self.state.live()
            initial = match_initial_parameters(self.state.model, source.model, self._train.init_from)
            model = self._read_by_name(initial, parameters, world)
            extra_state = {**live.extra_state, **({"parameters": model} if self.state.average is not None else {})}
            self.state.load(replace(live, step=0, model=model, extra_state=extra_state))
            return
        trained = self._shards.sharded_parameters_of(self.state.optimizer)
        model = self._read_by_name(source.model, parameters, world)
        state = {i: self._read_values(values, trained[i], world) for i, values in source.optimizer["state"].items()}
        extra_state = dict(source.extra_state)
        if "parameters" in extra_state:
            extra_state["parameters"] = self._read_by_name(extra_state["parameters"], parameters, world)
        optimizer, schedule = {**source.optimizer, "state": state}, copy.deepcopy(source.schedule)
        self.state.load(replace(source, model=model, optimizer=optimizer, schedule=schedule, extra_state=extra_state))

    def _read_by_name(
        self, values: Mapping[str, Any], parameters: Mapping[str, Any], world: World
    ) -> dict[str, Tensor]:
        """Returns the values of a model by name, with this rank's shard in place of each parameter."""
        return {
            name: _read_shard(value, parameters[name], world) if name in parameters else read_whole(value, world)
            for name, value in values.items()
        }

    def _read_values(self, values: dict[str, Any], parameter: DTensor, world: World) -> dict[str, Any]:
        """Returns this rank's optimizer state of a parameter, with shards in place of tensors of its shape."""
        is_plain = parameter in self._shards.plain_parameters
        read = copy.copy(values)
        for name, value in values.items():
            if not hasattr(value, "shape"):
                continue
            if value.shape == parameter.shape:
                shard = _read_shard(value, parameter, world)
                read[name] = shard.to_local() if is_plain else shard
            else:
                read[name] = read_whole(value, world)
        return read

    @contextmanager
    def bind(self, world: World) -> Iterator[World]:
        """Binds the state to a generation, with the assignment that `exact` needs, see `StateBackend.bind`.

        If the generation breaks, the step of this rank becomes that of a state to which the ranks can return. It must
        not be a later one, because the step watchdog counts only steps after it.
        """
        self._world = replace(world, strided=self._train.reduction == "exact")
        # A single worker has no process group, but FSDP needs one.
        is_alone = world.size == 1
        try:
            with open_group_of_one(self._device, self._train.backend) if is_alone else nullcontext():
                yield self._world
        except PeerLostError:
            step = self._replicas.newest_step
            self.state.step = self._checkpoint_steps[0] if step is None else step
            raise

    def share(self, world: World, restore: Callable[[], None], was_broken: bool = False) -> list[int]:
        """Gives every rank its rows of the newest state that the ranks have together, or of a checkpoint.

        No rank compares its rows with those of others, which have other rows. So no rank is divergent.
        """
        del was_broken
        self._opened = None
        source = self._open_copies(world)
        if source is None:
            restore()
            source = self._opened
        self._load(source, world)
        if self._opened is not None or self._checkpoint_steps[0] == NO_STATE:
            self._checkpoint_steps = deque([self.state.step if self._opened is not None else 0], maxlen=2)
        self._opened = None
        # A rank needs no copies any more when all ranks have their rows.
        gather(None, world)
        self._replicas.clear()
        self.send_peer_replica()
        return []

    def _open_copies(self, world: World) -> Snapshot | None:
        """Returns the newest state of which the ranks keep all parts, with a `PeerTensor` in place of each tensor.

        Tensors that are not divided are there. The result is None if a part of every state is missing.
        """
        newest = self._replicas.newest(world, NO_STATE)
        if newest is None:
            return None
        step, ranks = newest
        copies = self._replicas.parts_of(step)
        parts = {owner: copy.unpack() for owner, copy in copies.items() if ranks[owner] == world.rank}
        local: dict[str, dict[int, dict[str, Any]]] = {}
        structure: Any = None

        def without_rows(owner: int, path: str, value: Any) -> Any:
            if not is_rows(value):
                return value
            local.setdefault(path, {})[owner] = value
            return torch.empty(value["shape"], dtype=row_values(value).dtype, device="meta")

        for owner, part in sorted(parts.items()):
            stripped = map_tensors(part, partial(without_rows, owner))
            structure = stripped if owner == 0 else structure
        positions = {
            path: {owner: (value["start"], len(row_values(value))) for owner, value in by_owner.items()}
            for path, by_owner in local.items()
        }
        reports = gather((structure, positions), world)
        places_of_owner = [reports[rank][1] for rank in ranks]

        def peer_tensor(path: str, value: Tensor) -> Any:
            if not value.is_meta:
                return value
            pieces = [(*positions[path][owner], ranks[owner]) for owner, positions in enumerate(places_of_owner)]
            rows = {owner: row_values(rows) for owner, rows in local.get(path, {}).items()}
            return PeerTensor(value.dtype, value.shape, pieces, rows)

        return Snapshot(**map_tensors(reports[ranks[0]][0], peer_tensor))

    def send_peer_replica(self) -> None:
        """Copies the part of each rank to the next rank, with `train.peer_replica`."""
        if self._train.peer_replica and self._world.size > 1:
            part = vars(self._part())
            self._replicas.store(self.state.step, part, self._world, self._world.size)

    def collect(self) -> None:
        """Checks that the state of every rank is complete, so that each can copy its part."""
        check_errors_on_all_ranks(self._world)

    def end_generation(self, leaves: bool) -> None:
        """Keeps a copy of this rank's part for the next generation, see `StateBackend.end_generation`."""
        self.collect()
        leaving = [rank for rank, has_to_leave in enumerate(gather(leaves, self._world)) if has_to_leave]
        if len(leaving) < self._world.size:
            part = vars(self._part())
            self._replicas.keep_for_next(self.state.step, part, self._world, leaving)

    def snapshot(self, into: Snapshot | None = None) -> Snapshot:
        """Returns a copy of this rank's part of the state."""
        self._checkpoint_steps.append(self.state.step)
        return Snapshot(**copy_to_host(vars(self._part()), vars(into) if into is not None else None))

    def adopt(self, snapshot: Snapshot) -> None:
        """Makes a snapshot the state of which `share` loads this rank's rows; all ranks have to call it."""
        self._opened, self.state.step = snapshot, snapshot.step


def _values_of_rank_0(model: nn.Module, world: World) -> dict[str, Any]:
    """Returns the values with which rank 0 has built a model, by name and for `read_rows`; a collective."""
    values: dict[str, Any] = model.state_dict()
    small = gather({name: v for name, v in values.items() if is_small(v) and world.rank == 0}, world)[0]
    local = {name: {0: v} if world.rank == 0 else {} for name, v in values.items()}
    return {
        name: small[name] if name in small else PeerTensor(v.dtype, v.shape, [(0, len(v), 0)], local[name])
        for name, v in values.items()
    }


def _read_shard(value: Any, parameter: DTensor, world: World) -> Any:
    """Returns this rank's shard of a tensor of the shape of a parameter, in memory of its own."""
    if isinstance(value, DTensor):
        return value
    rows = [shard_rows(parameter.shape[0], rank, world.size) for rank in range(world.size)]
    return wrap_shard(read_rows(value, rows, world).to(parameter.to_local().device), parameter)


def _wrap_shards(values: dict[str, Any], parameter: Any) -> dict[str, Any]:
    """Returns the optimizer state of a parameter with a sharded tensor (`DTensor`) in place of each plain shard."""
    if not isinstance(parameter, DTensor):
        return values
    shape = parameter.to_local().shape
    is_shard = {
        name: isinstance(v, Tensor) and not isinstance(v, DTensor) and v.shape == shape for name, v in values.items()
    }
    return {name: wrap_shard(v, parameter) if is_shard[name] else v for name, v in values.items()}
