"""Parameters, gradients and optimizer state sharded over the workers: torch's `fully_shard` on our weights and our process group.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023; Rajbhandari et al., "ZeRO", SC 2020, stage 3.
The parameters of a unit are gathered for its forward and again for its backward, after which its gradients are added and scattered: by
the network, in an order that depends on the number of workers (`FullySharded`), or in the tree (`fsdp_exact.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from ray_app.config.training import TrainSection
from ray_app.errors import ConfigError
from ray_app.exchange.exchange import Exchange, World, backward_of, collective, in_parts


def shard(
    model: nn.Module, units: Callable[[nn.Module], list[nn.Module]], train: TrainSection, device: torch.device, world: World
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
    outer = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None, output_dtype=half and torch.float32)
    wanted = {part for part in units(model) if part is not model and not _shares(part, model)}
    for part in reversed(list(model.modules())):  # the inner ones first
        if half and isinstance(part, _BatchNorm) and part.affine:
            fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(), offload_policy=offload)  # its statistics are fp32
        elif part in wanted:
            fully_shard(part, mesh=mesh, mp_policy=inner, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=outer, offload_policy=offload)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)  # the weights are one over the global number of rows already
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    return model


def _shares(part: nn.Module, model: nn.Module) -> bool:
    """Whether a part shares a parameter with what is outside of it (a tied embedding): sharded twice, it would be two."""
    inside = set(part.modules())
    outside = {id(p) for module in model.modules() if module not in inside for p in module._parameters.values()}
    return any(id(p) in outside for p in part.parameters())


def shard_like(value: Tensor, parameter: DTensor) -> DTensor:
    """This rank's shard of a whole tensor, in memory of its own, cut as a parameter of the same shape is."""
    mesh, local = parameter.device_mesh, parameter.to_local()
    size = -(-value.shape[0] // mesh.size())
    rank = mesh.get_local_rank()
    return as_sharded(value[rank * size : (rank + 1) * size].to(local.device, copy=True), parameter)


def as_sharded(part: Tensor, parameter: DTensor) -> DTensor:
    """A tensor of a parameter's shape that is sharded as it is, of this rank's shard."""
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(part, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


def whole(value: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded; then a collective of all ranks."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


class _Gather(DefaultAllGather):
    """FSDP's own all-gather, into which no abort comes, see `World.launching`.

    Args:
        world: The workers of now.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, *args: Any, **options: Any) -> Any:
        """See `AllGather`."""
        with self._world.launching():
            return super().__call__(*args, **options)


class _ReduceScatter(DefaultReduceScatter):
    """FSDP's own reduce-scatter of gradients, into which no abort comes, see `World.launching`.

    Args:
        world: The workers of now.
    """

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, *args: Any, **options: Any) -> Any:
        """See `ReduceScatter`."""
        with self._world.launching():
            return super().__call__(*args, **options)


class FullySharded(Exchange):
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
        self._listens = [part.register_forward_pre_hook(self._before) for part in model.modules() if isinstance(part, FSDPModule)]
        states = [part._get_fsdp_state() for part in model.modules() if isinstance(part, FSDPModule)]
        self._held = [p for state in states for group in state._fsdp_param_groups for p in group.fsdp_params]
        self._trains = [p.sharded_param.requires_grad for p in self._held]
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_custom_all_gather(_Gather(world))
                part.set_custom_reduce_scatter(self._scatters())

    def _scatters(self) -> ReduceScatter:
        """What gradients are added and scattered by."""
        return _ReduceScatter(self._world)

    def backward(self, losses: Tensor, weights: Tensor, logical_worker: int) -> None:
        """See `Exchange.backward`; a collective, as the forward before it was. All ranks must make equally many passes."""
        del logical_worker
        self._pass(losses, weights)

    def idle(self, losses: Tensor) -> None:
        """A backward that only takes part in those of the others."""
        self._pass(losses, torch.zeros_like(losses))

    def _before(self, part: nn.Module, _: Any) -> None:
        """Lets a unit send zeros for parameters without a gradient, which others may have; one that is called again would do so twice."""
        if part._get_fsdp_state()._training_state == TrainingState.PRE_BACKWARD:  # type: ignore[operator]
            return  # activation checkpointing computes it again, and what it sends is decided
        part.set_reduce_scatter_unused_params(part not in self._called, recurse=False)  # type: ignore[operator]
        self._called.add(part)

    def _pass(self, losses: Tensor, weights: Tensor) -> None:
        used = [(getattr(held, "_unsharded_param", None), trains) for held, trains in zip(self._held, self._trains, strict=True)]
        if any(p is not None and p.requires_grad != trains for p, trains in used):
            raise ConfigError(
                "Training changes requires_grad of a parameter, and with train.strategy fsdp what is trained is decided when the model is"
                " made. Use ddp, or multiply what is not to count yet by 0."
            )
        if not self._began:
            self._clear()
        elif self._seen() != self._kept:
            raise ConfigError(
                "training_loss changes the gradients of the parameters (backward, zero_grad), which with train.strategy fsdp hold the sums"
                " of the logical workers before. Take gradients by torch.autograd.grad, with train.strategy ddp."
            )
        self._began = True
        try:
            with collective():
                backward_of(losses, weights)
        finally:
            self._called.clear()
        self._kept = self._seen()
        for p in self._held:  # torch 2.15 adds what came after a unit's exchange to the next step
            left = getattr(p, "_unsharded_param", None)
            if left is not None and left.grad is not None:
                raise in_parts(str(p._param_fqn))

    def _seen(self) -> list[tuple[int, int]]:
        """Which tensors the parameters have as gradients, and how often these were written."""
        found: list[Any] = [p.grad for p in self._parameters]
        return [(id(grad), grad._local_tensor._version if grad is not None else 0) for grad in found]

    def skip(self, logical_worker: int) -> None:
        """See `Exchange.skip`; a sum needs no zeros."""

    def launch(self) -> None:
        """See `Exchange.launch`; the exchange was part of each backward."""

    def finish(self) -> None:
        """See `Exchange.finish`."""
        self._began = False
        for p in self._parameters:
            if p.grad is None:  # no logical worker used it
                p.grad = torch.zeros_like(p)

    def close(self) -> None:
        """See `Exchange.close`."""
        for listens in self._listens:
            listens.remove()
        self._clear()

    def _clear(self) -> None:
        for p in self._parameters:
            p.grad = None
