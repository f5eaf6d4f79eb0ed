"""Parameters, gradients and optimizer state sharded over the workers: torch's `fully_shard` and two gradient reducers.

The method is that of Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023, and of
stage 3 of Rajbhandari et al., "ZeRO", SC 2020. An FSDP unit is a submodule with parameters that are gathered together:
for its forward and again for its backward, after which its gradients are added and scattered. A pass is the forward and
the backward of one logical worker on every rank at the same time.

- `FsdpReducer` uses FSDP's own reduce-scatter, in which the order of the additions depends on the number of workers.
- `DeterministicShardedReducer` adds in the tree. In each pass an all-to-all sends every rank its shard of each rank's
  gradients of a unit, without an addition; it transfers as many bytes as the reduce-scatter that it replaces. Rank r
  runs the logical workers r, r + W, and so on, so the gradients of a pass are the next W leaves of the tree: they are
  added as one piece of memory per unit, and the sums of several passes by one call for all parameters. Between two
  passes a rank has, for its shard of each parameter, the sums of at most log2(L) + 1 nodes.
"""

from __future__ import annotations

import math
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import swap_tensors

from ray_app.config.sections import TrainSection
from ray_app.devices import HOST, kind_of
from ray_app.errors import ConfigError
from ray_app.plan.assignment import TreeNode, subtrees
from ray_app.reduction.overlap import record_on_current_stream
from ray_app.reduction.peer_errors import collective, launch_guard
from ray_app.reduction.reducer import ALIGNED_BYTES, GradientReducer, gradient_norms, partial_gradient_error
from ray_app.reduction.transport import split_sizes
from ray_app.reduction.tree import TreeSum, add_lists, add_rows, tree_parents
from ray_app.reduction.world import World
from ray_app.torch_private import (
    BatchNorm,
    DefaultAllGather,
    DefaultReduceScatter,
    FsdpParameters,
    ReduceScatter,
    TorchDispatchMode,
    is_before_backward,
    run_backward,
    shard_version,
    tree_leaves,
    wrap_shard,
)

_MIN_LARGE_BYTES = 1 << 20
"""The smallest size of a tensor for which `MappedInit` makes a file, and to which `build_without_values` gives none."""


def _large_dtype(func: Any, args: Any, options: dict[str, Any]) -> torch.dtype | None:
    """Returns the dtype of a large tensor on the host that an operator makes without values; else None."""
    if func is not torch.ops.aten.empty.memory_format or options.get("device", HOST) != HOST:
        return None
    dtype: torch.dtype = options.get("dtype") or torch.get_default_dtype()
    return dtype if math.prod(args[0]) * dtype.itemsize >= _MIN_LARGE_BYTES else None


class MappedInit(TorchDispatchMode):
    """A context in which a model is built with its large parameters in temporary files that are mapped into memory.

    The operating system can write their pages out, so a model can be built that fits into the memory of no process,
    with the same values as elsewhere.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an operator, or makes a tensor in a file in place of a large one of `torch.empty`."""
        kwargs = kwargs or {}
        if (dtype := _large_dtype(func, args, kwargs)) is not None:
            numel = math.prod(args[0])
            # On a disk without space the tensor is in memory.
            with suppress(OSError), tempfile.NamedTemporaryFile(prefix="ray_app-init-") as file:
                # Without this, a write into the mapped memory would end the process when the disk is full.
                os.posix_fallocate(file.fileno(), 0, numel * dtype.itemsize)
                return torch.from_file(file.name, shared=True, size=numel, dtype=dtype).view(args[0])
        return func(*args, **kwargs)


def build_without_values(build: Callable[[], nn.Module]) -> nn.Module | None:
    """Returns a model into which other values are loaded, with its large parameters on the device `meta`.

    That device has no memory and draws no random numbers, so the numbers after them are others than usual, too. The
    result is None if the loaded values would not replace all that depends on either, or if the model needs values.
    """
    # A model that needs values raises all kinds of errors.
    with suppress(Exception), warnings.catch_warnings(), _MetaInit() as init:
        # PyTorch warns of values that `build` itself loads.
        warnings.filterwarnings("ignore", ".* is a no-op", UserWarning)
        model = build()
        if init.is_replaceable(model):
            return model
    return None


class _MetaInit(TorchDispatchMode):
    """The context of `build_without_values`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # The memory with other values than usual.
        self._storages, self._is_read = set[StorageWeakRef](), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls an operator, on `meta` in place of a large tensor of `torch.empty`."""
        kwargs = kwargs or {}
        if _large_dtype(func, args, kwargs) is not None:
            kwargs = kwargs | {"device": torch.device("meta")}
        result = func(*args, **kwargs)
        storages = _storages_of(result)
        if (
            torch.Tag.nondeterministic_seeded in func.tags
            or any(value.is_meta for value in tree_leaves(result) if isinstance(value, Tensor))
            or not self._storages.isdisjoint(_storages_of((args, kwargs)))
        ):
            self._storages |= storages
            # A number of the host may decide anything.
            self._is_read |= not storages
        return result

    def is_replaceable(self, model: nn.Module) -> bool:
        """Returns whether the parameters and persistent buffers of a model are all that has other values than usual."""
        state = _storages_of(model.state_dict(keep_vars=True))
        return (
            not self._is_read
            and not any(buffer.is_meta for buffer in model.buffers())
            and all(storage in state or storage.expired() for storage in self._storages)
        )


def _storages_of(values: Any) -> set[StorageWeakRef]:
    """Returns the memory of the tensors in nested values."""
    return {StorageWeakRef(value.untyped_storage()) for value in tree_leaves(values) if isinstance(value, Tensor)}


def shard_model(
    model: nn.Module,
    units: Callable[[nn.Module], list[nn.Module]],
    train: TrainSection,
    device: torch.device,
    world: World,
) -> nn.Module:
    """Shards a model in place, moves it to the device and returns it.

    Args:
        model: A model on the CPU; its parameters on the device `meta` get memory without values.
        units: Returns the submodules that are FSDP units of their own; the rest of the model is one more unit.
        train: The section of the configuration; `precision` and `cpu_offload` are read.
        device: The device that computes.
        world: The workers; torch's default process group has to consist of them.
    """
    mesh = init_device_mesh(device.type, (world.size,))
    offload = CPUOffloadPolicy(pin_memory=not kind_of(device).is_host) if train.cpu_offload else OffloadPolicy()
    half = torch.bfloat16 if train.precision == "bf16" else None
    inner = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    outer = MixedPrecisionPolicy(
        param_dtype=half, reduce_dtype=torch.float32 if half else None, output_dtype=half and torch.float32
    )
    unit_set = {part for part in units(model) if part is not model and not _shares_parameters(part, model)}
    # `fully_shard` has to be called for inner modules before the modules around them.
    for part in reversed(list(model.modules())):
        if half and isinstance(part, BatchNorm) and part.affine:
            # The running statistics of batch-norm are fp32, so its parameters must be fp32, too. They need a unit with
            # a precision of its own.
            fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(), offload_policy=offload)
        elif part in unit_set:
            fully_shard(part, mesh=mesh, mp_policy=inner, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=outer, offload_policy=offload)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            # The weights are one over the global number of rows already, so gradients are added and not divided.
            part.set_gradient_divide_factor(1.0)
            # gloo has no reduction that averages or scales, which FSDP may use otherwise.
            part.set_force_sum_reduction_for_comms(True)
    for p in [p for p in model.parameters() if p.is_meta]:
        empty = torch.empty_like(p, device=HOST if train.cpu_offload else device)
        swap_tensors(p, nn.Parameter(empty, p.requires_grad))
    return model


def _shares_parameters(part: nn.Module, model: nn.Module) -> bool:
    """Returns whether a submodule shares a parameter with the rest of the model, such as a tied embedding.

    Such a submodule must not be a unit of its own: the parameter would be sharded in two units and become two
    parameters.
    """
    inside = set(part.modules())
    outside = {id(p) for module in model.modules() if module not in inside for p in module.parameters(recurse=False)}
    return any(id(p) in outside for p in part.parameters())


def shard_rows(num_rows: int, rank: int, size: int) -> range:
    """Returns the rows of a parameter that a rank has, of `num_rows` along its first dimension."""
    rows = -(-num_rows // size)
    return range(min(rank * rows, num_rows), min((rank + 1) * rows, num_rows))


class _LockedAllGather(DefaultAllGather):
    """FSDP's own all-gather, launched inside `launch_guard`."""

    def __init__(self, world: World) -> None:
        self._launch_guard = launch_guard(world)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Gathers the parameters of a unit, see `AllGather` of torch."""
        with self._launch_guard():
            return super().__call__(*args, **options)


class _LockedReduceScatter(DefaultReduceScatter):
    """FSDP's own reduce-scatter of gradients, launched inside `launch_guard`."""

    def __init__(self, world: World) -> None:
        self._launch_guard = launch_guard(world)

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Adds and scatters the gradients of a unit, see `ReduceScatter` of torch."""
        with self._launch_guard():
            return super().__call__(*args, **options)


class FsdpReducer(GradientReducer):
    """The gradient reducer for sharded parameters that adds by FSDP's own reduce-scatter.

    Args:
        model: A model that `shard_model` has sharded.
        world: The workers of this generation.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._launch_guard = launch_guard(world)
        self._parameters: list[DTensor] = [p for p in model.parameters() if p.requires_grad]  # type: ignore[misc]
        # Whether a pass of the present step has run.
        self._has_begun = False
        # The result of `_gradient_versions` after the last pass.
        self._last_versions: list[tuple[int, int]] = []
        # The units that the forward of this pass has called.
        self._called_units: set[nn.Module] = set()
        units: list[Any] = [part for part in model.modules() if isinstance(part, FSDPModule)]
        self._forward_hooks = [unit.register_forward_pre_hook(self._before_forward) for unit in units]
        self._fsdp_parameters = FsdpParameters(units)
        for unit in units:
            unit.set_custom_all_gather(_LockedAllGather(world))
            unit.set_custom_reduce_scatter(self._make_reduce_scatter())

    def _make_reduce_scatter(self) -> ReduceScatter:
        """Returns the callable that FSDP uses to add and scatter the gradients of a unit."""
        return _LockedReduceScatter(self._world)

    def backward(self, losses: Tensor, weights: Tensor, logical_worker: int) -> None:
        """See `GradientReducer.backward`.

        The call is a collective, as is the forward before it, so all ranks have to make the same number of passes.
        """
        del logical_worker
        self._pass(losses, weights)

    def idle(self, losses: Tensor) -> None:
        """Runs a backward that adds zeros, so that this rank takes part in a pass without a logical worker of its own.

        Args:
            losses: The losses of a forward on any rows, shape (rows,).
        """
        self._pass(losses, torch.zeros_like(losses))

    def _before_forward(self, part: nn.Module, _: Any) -> None:
        """Makes a unit send zeros for its parameters without a gradient, because another rank may have one for them.

        A unit that is called more than once in a pass must not do so, or it would send zeros for the same parameter
        more than once.
        """
        # Activation checkpointing runs the forward again during the backward. By then the setting of this pass is
        # decided and must not change.
        if is_before_backward(part):
            return
        part.set_reduce_scatter_unused_params(part not in self._called_units, recurse=False)  # type: ignore[operator]
        self._called_units.add(part)

    def _pass(self, losses: Tensor, weights: Tensor) -> None:
        """Runs the backward of one pass.

        Raises:
            ConfigError: User code changes `requires_grad` or the gradients, or a gradient came in several parts.
            PeerLostError: A peer left meanwhile.
        """
        if self._fsdp_parameters.has_changed_training():
            raise ConfigError(
                "Training changes requires_grad of a parameter, but with train.strategy fsdp the trained parameters are"
                " fixed when the model is built. Use ddp, or multiply ignored losses by 0."
            )
        if not self._has_begun:
            self._clear()
        elif self._gradient_versions() != self._last_versions:
            raise ConfigError(
                "training_loss changes the gradients of the parameters (backward, zero_grad), which with train.strategy"
                " fsdp hold the sums of earlier logical workers. Compute gradients with torch.autograd.grad, and use"
                " train.strategy ddp."
            )
        self._has_begun = True
        try:
            with collective():
                run_backward(losses, weights)
        finally:
            self._called_units.clear()
        self._last_versions = self._gradient_versions()
        # A gradient that is still in the unsharded parameter came after the reduction of its unit. torch 2.15 would add
        # it to the gradients of the next step.
        if (name := self._fsdp_parameters.name_of_late_gradient()) is not None:
            raise partial_gradient_error(name)

    def _gradient_versions(self) -> list[tuple[int, int]]:
        """Returns for each parameter the identity of its gradient tensor, and how often that has been written."""
        grads: list[Any] = [p.grad for p in self._parameters]
        return [(id(grad), shard_version(grad) if grad is not None else 0) for grad in grads]

    def skip(self, logical_worker: int) -> None:
        """Does nothing; for a logical worker without rows the step calls `idle`, which joins in the collectives."""

    def launch(self) -> None:
        """Does nothing, because the reduction is part of each backward."""

    def finish(self) -> None:
        """See `GradientReducer.finish`."""
        self._has_begun = False
        for p in self._parameters:
            # A parameter without a gradient was used by no logical worker.
            if p.grad is None:
                p.grad = torch.zeros_like(p)

    def gradients(self) -> list[Tensor]:
        """Returns this rank's shards of the gradients, see `GradientReducer.gradients`."""
        return [p.grad.to_local() for p in self._parameters if p.grad is not None]  # type: ignore[attr-defined]

    def norms(self) -> list[Tensor]:
        """Returns the norm of the gradients of all parameters together, see `GradientReducer.norms`."""
        norm = torch.stack(gradient_norms(self.gradients())).double().square().sum()
        with self._launch_guard():
            dist.all_reduce(norm)
        return [self._to_device(norm.sqrt_())]

    def _to_device(self, value: Tensor) -> Tensor:
        """Returns a value on the device that computes; with offloading the gradients are on the host."""
        return value.to(self._parameters[0].device_mesh.device_type, non_blocking=True)

    def close(self) -> None:
        """See `GradientReducer.close`."""
        for hook in self._forward_hooks:
            hook.remove()
        self._clear()

    def _clear(self) -> None:
        """Drops the gradients of all parameters."""
        for p in self._parameters:
            p.grad = None


class _LeafAllToAll(ReduceScatter):
    """An all-to-all that FSDP calls instead of its reduce-scatter; `DeterministicShardedReducer` does the additions.

    Args:
        world: The workers of this generation, strided.

    Attributes:
        first: The first logical worker of this pass.
        is_idle: Whether this rank runs no logical worker in this pass.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._launch_guard = launch_guard(world)
        # This rank's shard of one unit's gradients, added for each of `nodes`, shape (nodes, elements), and the number
        # of elements of each row that `take` has returned.
        self._sums, self._offset = torch.empty(0), 0
        self._memory = self._sums
        self.first, self.is_idle = 0, False

    @property
    def leaves(self) -> range:
        """The logical workers of this pass."""
        return range(self.first, min(self.first + self._world.size, self._world.logical_workers))

    @property
    def nodes(self) -> list[TreeNode]:
        """The nodes of the tree that consist of the logical workers of this pass."""
        return subtrees(self.leaves, self._world.logical_workers)

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for the input or output of the collective, see `Comm` of torch."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Sends every rank its shard of this rank's gradients of a unit, and adds the received shards in the tree.

        A rank without a logical worker in this pass sends nothing. `output_tensor` is not written; `take` returns the
        sums.
        """
        del op, async_op
        world = self._world
        shard = output_tensor.numel()
        width = len(self.leaves)
        if self.is_idle:
            input_tensor.zero_()
        sent = shard if world.rank < width else 0
        received = self._get_buffer(width * shard, input_tensor)
        sizes = [shard if rank < width else 0 for rank in range(world.size)]
        with self._launch_guard():
            dist.all_to_all_single(
                received, input_tensor[: sent * world.size], split_sizes(sizes), split_sizes([sent] * world.size), group
            )
        rows = received.view(width, shard)
        self._sums, self._offset = rows.new_empty(len(self.nodes), shard), 0
        for (low, high), total in zip(self.nodes, self._sums, strict=True):
            add_rows(rows[low - self.first : high - self.first], total)

    def _get_buffer(self, size: int, like: Tensor) -> Tensor:
        """Returns memory for the shards of a unit; all units share it, because writing to new pages is slower."""
        if self._memory.numel() < size or self._memory.dtype != like.dtype or self._memory.device != like.device:
            self._memory = like.new_empty(size)
        return self._memory[:size]

    def take(self, p: DTensor, gradient: Tensor) -> list[Tensor]:
        """Returns this rank's shards of the gradients of the unit's next parameter, one for each of `nodes`.

        Args:
            p: The parameter.
            gradient: The shard that FSDP has put into `p.grad`. Its values are valid only with one worker, where
                nothing is sent; otherwise only its shape is used.
        """
        if self._world.size == 1:
            return [gradient.zero_() if self.is_idle else gradient]
        begin = self._offset
        self._offset += -(-p.shape[0] // self._world.size) * p.shape[1:].numel()
        return [row[begin : begin + gradient.numel()].view(gradient.shape) for row in self._sums]


class DeterministicShardedReducer(FsdpReducer):
    """The gradient reducer for sharded parameters that adds in the tree.

    Args:
        model: A model that `shard_model` has sharded.
        world: The workers of this generation, strided.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._scatter = _LeafAllToAll(world)
        super().__init__(model, world)
        # The tree of the shards of all parameters, and the shards of this pass by the number of their parameter; None
        # outside of a pass.
        self._tree = TreeSum(tree_parents(world.logical_workers), add=add_lists)
        self._shards: dict[int, list[Tensor]] | None = None
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._hook(i)) for i, p in enumerate(self._parameters)]

    def _make_reduce_scatter(self) -> ReduceScatter:
        return self._scatter

    def _hook(self, number: int) -> Any:
        """Returns the hook of a parameter, which keeps the received shards of its gradient."""

        def on_gradient(p: DTensor) -> None:
            gradient: Any = p.grad
            p.grad = None
            if self._shards is None or number in self._shards:
                raise partial_gradient_error(self._names[number])
            self._shards[number] = self._scatter.take(p, gradient.to_local())

        return on_gradient

    def idle(self, losses: Tensor) -> None:
        """See `FsdpReducer.idle`; gradients that are not finite count as zeros, too."""
        self._scatter.is_idle = True
        try:
            super().idle(losses)
        finally:
            self._scatter.is_idle = False

    def _pass(self, losses: Tensor, weights: Tensor) -> None:
        if not self._has_begun:
            self._tree.clear()
            self._scatter.first = 0
        self._shards = shards = dict[int, list[Tensor]]()
        try:
            super()._pass(losses, weights)
        finally:
            self._shards = None
        self._push([shards.get(number) or self._zeros(p) for number, p in enumerate(self._parameters)])
        self._scatter.first += self._world.size

    @torch.no_grad()
    def _push(self, shards: list[list[Tensor]]) -> None:
        """Adds the shards of a pass, for each parameter one for each of its nodes, in the tree."""
        for node, values in zip(self._scatter.nodes, zip(*shards, strict=True), strict=True):
            for added in self._tree.push(node, [*values]):
                # They were allocated on the stream that receives shards, which must not use their memory again yet.
                record_on_current_stream(added)

    def _zeros(self, p: DTensor) -> list[Tensor]:
        """Returns the shards of a parameter that no logical worker of this pass has used."""
        local = p.to_local()
        # Received gradients are on the device; the gradients of a single worker are where the parameter is, on the CPU
        # with offloading.
        device = local.device if self._world.size == 1 else p.device_mesh.device_type
        return [torch.zeros_like(local, device=device) for _ in self._scatter.nodes]

    def finish(self) -> None:
        """See `GradientReducer.finish`."""
        self._has_begun = False
        [totals] = self._tree.clear()
        for p, total in zip(self._parameters, totals, strict=True):
            p.grad = wrap_shard(total.to(p.to_local().device), p)

    def norms(self) -> list[Tensor]:
        """Returns the L2 norm of every trained parameter's whole gradient, one tensor of shape (parameters,), float64.

        Each whole gradient is assembled on one rank, so that its norm is bit-identical to that of `ddp`. See
        `GradientReducer.norms`.
        """
        size = self._world.size
        rank = self._world.rank
        parameters = self._parameters
        shards = [p.grad.to_local().reshape(-1).view(torch.uint8) for p in parameters]  # type: ignore[union-attr]
        # Rank r computes the norms of the parameters r, r + W, and so on. The shards travel as bytes, because they may
        # differ in their dtypes.
        outgoing = torch.cat([part for to in range(size) for part in shards[to::size]])
        assigned = parameters[rank::size]
        sizes = [[_shard_bytes(p, sender, size) for p in assigned] for sender in range(size)]
        received = outgoing.new_empty(sum(map(sum, sizes)))
        with self._launch_guard():
            dist.all_to_all_single(
                received,
                outgoing,
                [sum(from_rank) for from_rank in sizes],
                [sum(map(len, shards[to::size])) for to in range(size)],
            )
        parts = iter(received.split([part for from_rank in sizes for part in from_rank]))
        by_rank = [[next(parts) for _ in assigned] for _ in range(size)]
        norms = torch.zeros(len(parameters), dtype=torch.float64, device=outgoing.device)
        del shards, outgoing
        if assigned:
            # One copy assembles all whole gradients, each of which begins aligned.
            lengths = [p.numel() * p.dtype.itemsize for p in assigned]
            zeros = received.new_zeros(ALIGNED_BYTES)
            gaps = [zeros[: -length % ALIGNED_BYTES] for length in lengths]
            memory = torch.cat([piece for pieces in zip(*by_rank, gaps, strict=True) for piece in pieces])
            starts = accumulate((length + len(gap) for length, gap in zip(lengths, gaps, strict=True)), initial=0)
            wholes = [
                memory[start : start + length].view(p.dtype).view(p.shape)
                for p, start, length in zip(assigned, starts, lengths, strict=False)
            ]
            norms[rank::size] = torch.stack(gradient_norms(wholes)).double()
        with self._launch_guard():
            dist.all_reduce(norms)
        return [self._to_device(norms)]

    def close(self) -> None:
        """See `GradientReducer.close`."""
        for hook in self._hooks:
            hook.remove()
        super().close()


def _shard_bytes(p: DTensor, rank: int, size: int) -> int:
    """Returns the bytes of a rank's shard of a parameter."""
    return len(shard_rows(p.shape[0], rank, size)) * p.shape[1:].numel() * p.dtype.itemsize
