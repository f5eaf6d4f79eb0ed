"""Parameters, gradients and optimizer state sharded over the workers: torch's `fully_shard` on our weights and our
process group.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023; Rajbhandari et al., "ZeRO",
SC 2020, stage 3. The parameters of a unit are gathered for its forward and again for its backward, after which its
gradients are added and scattered: by the network, in an order that depends on the number of workers (`FsdpReducer`), or
in the tree (`fsdp_exact.py`).

Gradients of sharded parameters, added in the tree: every rank adds the shards that it owns.

In each pass a unit's gradients go to their owners as they are (all-to-all, the bytes of the reduce-scatter that it
replaces), where those of a pass are the next W leaves of the tree, since ranks play every W-th logical worker. So
between two passes an owner holds the sums of at most log2(L) + 1 nodes of its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from ray_app.config.sections import TrainSection
from ray_app.errors import ConfigError
from ray_app.reduction.base import GradientReducer, World, collective, partial_gradient_error, run_backward
from ray_app.reduction.overlap import record_on_current_stream
from ray_app.reduction.tree import TreeSum, tree_parents


def shard_model(
    model: nn.Module,
    units: Callable[[nn.Module], list[nn.Module]],
    train: TrainSection,
    device: torch.device,
    world: World,
) -> nn.Module:
    """Shards a model in place and moves it to the device.

    Args:
        model: On the CPU.
        units: Names the parts whose parameters are gathered together; the rest of the model is one more.
        train: Precision and offload.
        device: Where to compute.
        world: Over whom; torch's default process group must be theirs.
    """
    mesh = init_device_mesh(device.type, (world.size,))
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if train.cpu_offload else OffloadPolicy()
    half = torch.bfloat16 if train.precision == "bf16" else None
    inner = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    outer = MixedPrecisionPolicy(
        param_dtype=half, reduce_dtype=torch.float32 if half else None, output_dtype=half and torch.float32
    )
    wanted = {part for part in units(model) if part is not model and not _shares_parameters(part, model)}
    for part in reversed(list(model.modules())):  # the inner ones first
        if half and isinstance(part, _BatchNorm) and part.affine:
            fully_shard(
                part, mesh=mesh, mp_policy=MixedPrecisionPolicy(), offload_policy=offload
            )  # its statistics are fp32
        elif part in wanted:
            fully_shard(part, mesh=mesh, mp_policy=inner, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=outer, offload_policy=offload)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)  # the weights are one over the global number of rows already
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    return model


def _shares_parameters(part: nn.Module, model: nn.Module) -> bool:
    """Whether a part shares a parameter with what is outside of it (a tied embedding): sharded twice, it would
    be two.
    """
    inside = set(part.modules())
    outside = {id(p) for module in model.modules() if module not in inside for p in module._parameters.values()}
    return any(id(p) in outside for p in part.parameters())


def shard_like(value: Tensor, parameter: DTensor) -> DTensor:
    """This rank's shard of a whole tensor, in memory of its own, cut as a parameter of the same shape is."""
    mesh, local = parameter.device_mesh, parameter.to_local()
    size = -(-value.shape[0] // mesh.size())
    rank = mesh.get_local_rank()
    return wrap_shard(value[rank * size : (rank + 1) * size].to(local.device, copy=True), parameter)


def wrap_shard(part: Tensor, parameter: DTensor) -> DTensor:
    """A tensor of a parameter's shape that is sharded as it is, of this rank's shard."""
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def gather_whole(value: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; then a collective of all ranks."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


class _LockedAllGather(DefaultAllGather):
    """FSDP's own all-gather, into which no abort comes, see `World.launching`.

    Args:
        world: The workers of now.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, *args: Any, **options: Any) -> Any:
        """See `AllGather`."""
        with self._world.launch_guard():
            return super().__call__(*args, **options)


class _LockedReduceScatter(DefaultReduceScatter):
    """FSDP's own reduce-scatter of gradients, into which no abort comes, see `World.launching`.

    Args:
        world: The workers of now.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, *args: Any, **options: Any) -> Any:
        """See `ReduceScatter`."""
        with self._world.launch_guard():
            return super().__call__(*args, **options)


class FsdpReducer(GradientReducer):
    """See the module.

    Args:
        model: From `shard`.
        world: The workers of now.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._parameters: list[DTensor] = [p for p in model.parameters() if p.requires_grad]  # type: ignore[misc]
        self._began = False
        self._kept: list[tuple[int, int]] = []
        self._called: set[nn.Module] = set()
        self._listens = [
            part.register_forward_pre_hook(self._before) for part in model.modules() if isinstance(part, FSDPModule)
        ]
        states = [part._get_fsdp_state() for part in model.modules() if isinstance(part, FSDPModule)]
        self._held = [p for state in states for group in state._fsdp_param_groups for p in group.fsdp_params]
        self._trains = [p.sharded_param.requires_grad for p in self._held]
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_custom_all_gather(_LockedAllGather(world))
                part.set_custom_reduce_scatter(self._scatters())

    def _scatters(self) -> ReduceScatter:
        """What gradients are added and scattered by."""
        return _LockedReduceScatter(self._world)

    def backward(self, losses: Tensor, weights: Tensor, logical_worker: int) -> None:
        """See `GradientReducer.backward`; a collective, as the forward before it was. All ranks must make equally many
        passes.
        """
        del logical_worker
        self._pass(losses, weights)

    def idle(self, losses: Tensor) -> None:
        """A backward that only takes part in those of the others."""
        self._pass(losses, torch.zeros_like(losses))

    def _before(self, part: nn.Module, _: Any) -> None:
        """Lets a unit send zeros for parameters without a gradient, which others may have; one that is called again
        would do so twice.
        """
        if part._get_fsdp_state()._training_state == TrainingState.PRE_BACKWARD:  # type: ignore[operator]
            return  # activation checkpointing computes it again, and what it sends is decided
        part.set_reduce_scatter_unused_params(part not in self._called, recurse=False)  # type: ignore[operator]
        self._called.add(part)

    def _pass(self, losses: Tensor, weights: Tensor) -> None:
        used = [
            (getattr(held, "_unsharded_param", None), trains)
            for held, trains in zip(self._held, self._trains, strict=True)
        ]
        if any(p is not None and p.requires_grad != trains for p, trains in used):
            raise ConfigError(
                "Training changes requires_grad of a parameter, and with train.strategy fsdp what is trained is decided"
                " when the model is"
                " made. Use ddp, or multiply what is not to count yet by 0."
            )
        if not self._began:
            self._clear()
        elif self._seen() != self._kept:
            raise ConfigError(
                "training_loss changes the gradients of the parameters (backward, zero_grad), which with train.strategy"
                " fsdp hold the sums"
                " of the logical workers before. Take gradients by torch.autograd.grad, with train.strategy ddp."
            )
        self._began = True
        try:
            with collective():
                run_backward(losses, weights)
        finally:
            self._called.clear()
        self._kept = self._seen()
        for p in self._held:  # torch 2.15 adds what came after a unit's exchange to the next step
            left = getattr(p, "_unsharded_param", None)
            if left is not None and left.grad is not None:
                raise partial_gradient_error(str(p._param_fqn))

    def _seen(self) -> list[tuple[int, int]]:
        """Which tensors the parameters have as gradients, and how often these were written."""
        found: list[Any] = [p.grad for p in self._parameters]
        return [(id(grad), grad._local_tensor._version if grad is not None else 0) for grad in found]

    def skip(self, logical_worker: int) -> None:
        """See `GradientReducer.skip`; a sum needs no zeros."""

    def launch(self) -> None:
        """See `GradientReducer.launch`; the exchange was part of each backward."""

    def finish(self) -> None:
        """See `GradientReducer.finish`."""
        self._began = False
        for p in self._parameters:
            if p.grad is None:  # no logical worker used it
                p.grad = torch.zeros_like(p)

    def close(self) -> None:
        """See `GradientReducer.close`."""
        for listens in self._listens:
            listens.remove()
        self._clear()

    def _clear(self) -> None:
        for p in self._parameters:
            p.grad = None


class _LeafAllToAll(ReduceScatter):
    """In the place of a reduce-scatter; the sum that it leaves is none, since `DeterministicShardedReducer` makes it.

    Args:
        world: The workers of now, strided.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._received, self._at = torch.empty(0), 0
        self._memory = self._received
        self.first, self.is_idle = 0, False

    @property
    def leaves(self) -> range:
        """The logical workers of this pass."""
        return range(self.first, min(self.first + self._world.size, self._world.logical_workers))

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """See `Comm`."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Sends every rank its shards of this rank's gradients of some parameters, unless no logical worker of this
        pass is here.
        """
        del op, async_op
        world, shard, width = self._world, output_tensor.numel(), len(self.leaves)
        if self.is_idle:
            input_tensor.zero_()
        sent = shard if world.rank < width else 0
        received = self._room(width * shard, input_tensor)
        sizes = [shard if rank < width else 0 for rank in range(world.size)]
        with world.launch_guard():
            dist.all_to_all_single(received, input_tensor[: sent * world.size], sizes, [sent] * world.size, group=group)
        self._received, self._at = received.view(width, shard), 0

    def _room(self, size: int, like: Tensor) -> Tensor:
        """Memory for what comes, which is needed until the next comes; what was touched before is quicker."""
        if self._memory.numel() < size or self._memory.dtype != like.dtype or self._memory.device != like.device:
            self._memory = like.new_empty(size)
        return self._memory[:size]

    def take(self, p: DTensor, gradient: Tensor) -> list[Tensor]:
        """This rank's shards of the gradients of the next parameter of those that `__call__` was for, in the order of
        `leaves`.
        """
        if self._world.size == 1:  # nothing is sent
            return [gradient.zero_() if self.is_idle else gradient]
        at = self._at
        self._at += -(-p.shape[0] // self._world.size) * p.shape[1:].numel()
        return [row[at : at + gradient.numel()].view(gradient.shape) for row in self._received]


class DeterministicShardedReducer(FsdpReducer):
    """See the module.

    Args:
        model: From `shard`.
        world: The workers of now, strided.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._scatter = _LeafAllToAll(world)
        super().__init__(model, world)
        self._sums = [TreeSum(tree_parents(world.logical_workers)) for _ in self._parameters]
        self._missing: set[int] = set()
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        self._hooks = [p.register_post_accumulate_grad_hook(self._hook(i)) for i, p in enumerate(self._parameters)]

    def _scatters(self) -> ReduceScatter:
        return self._scatter

    def _hook(self, number: int) -> Any:
        def arrived(p: DTensor) -> None:
            gradient: Any = p.grad
            p.grad = None
            if number not in self._missing:
                raise partial_gradient_error(self._names[number])
            self._missing.remove(number)
            self._push(number, self._scatter.take(p, gradient.to_local()))

        return arrived

    def idle(self, losses: Tensor) -> None:
        """See `FsdpReducer.idle`; what it gives counts as zeros, whatever it is."""
        self._scatter.is_idle = True
        try:
            super().idle(losses)
        finally:
            self._scatter.is_idle = False

    def _pass(self, losses: Tensor, weights: Tensor) -> None:
        if not self._began:
            for tree in self._sums:
                tree.clear()
            self._scatter.first = 0
        self._missing = set(range(len(self._parameters)))
        super()._pass(losses, weights)
        for number in self._missing:  # nobody used it
            p = self._parameters[number]
            here = p.to_local()  # where gradients are that nobody sends; those that are sent come to the device
            nothing = torch.zeros_like(here, device=here.device if self._world.size == 1 else p.device_mesh.device_type)
            self._push(number, [nothing.clone() for _ in self._scatter.leaves])
        self._scatter.first += self._world.size

    @torch.no_grad()
    def _push(self, number: int, shards: list[Tensor]) -> None:
        tree, leaves = self._sums[number], self._scatter.leaves
        for leaf, value in zip(leaves, shards, strict=True):
            # zeros of a pass in which nobody used the parameter come from another stream than gradients
            record_on_current_stream(tree.push((leaf, leaf + 1), value))
        # what is kept must not hold the memory of all that arrived with it
        tree.nodes = [(node, value.clone() if node[0] >= leaves.start else value) for node, value in tree.nodes]

    def finish(self) -> None:
        """See `GradientReducer.finish`."""
        self._began = False
        for p, tree in zip(self._parameters, self._sums, strict=True):
            [(_, total)] = tree.nodes
            p.grad = wrap_shard(total.to(p.to_local().device), p)
            tree.clear()

    def norms(self) -> Tensor:
        """The L2 norm of every trained parameter's gradient as `ddp` computes it, of the whole: each is put together on
        one rank.

        Does not wait for the device.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        size, rank, parameters = self._world.size, self._world.rank, self._parameters
        own = [p.grad.to_local().reshape(-1).view(torch.uint8) for p in parameters]  # type: ignore[union-attr]
        outgoing = torch.cat([part for to in range(size) for part in own[to::size]])
        mine = parameters[rank::size]
        sizes = [[_shard_bytes(p, at, size) for p in mine] for at in range(size)]
        received = outgoing.new_empty(sum(map(sum, sizes)))
        with self._world.launch_guard():
            dist.all_to_all_single(
                received, outgoing, [sum(of) for of in sizes], [sum(map(len, own[to::size])) for to in range(size)]
            )
        parts = iter(received.split([part for of in sizes for part in of]))
        by_rank = [[next(parts) for _ in mine] for _ in range(size)]
        found = torch.zeros(len(parameters), dtype=torch.float64, device=outgoing.device)
        del own, outgoing
        if mine:  # one whole after the other, since each needs memory
            wholes = (torch.cat(shards).view(p.dtype).view(p.shape) for p, *shards in zip(mine, *by_rank, strict=True))
            found[rank::size] = torch.stack(
                [norm for whole in wholes for norm in torch._foreach_norm([whole])]
            ).double()
        with self._world.launch_guard():
            dist.all_reduce(found)
        return found

    def close(self) -> None:
        """See `GradientReducer.close`."""
        for hook in self._hooks:
            hook.remove()
        super().close()


def _shard_bytes(p: DTensor, rank: int, size: int) -> int:
    """Bytes of a rank's shard of a parameter."""
    rows = -(-p.shape[0] // size)
    return max(0, min(rows, p.shape[0] - rank * rows)) * p.shape[1:].numel() * p.dtype.itemsize
