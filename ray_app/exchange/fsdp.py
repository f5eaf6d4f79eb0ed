"""Parameters, gradients and optimizer state sharded over the workers: torch's `fully_shard` on our weights and our process group.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023; Rajbhandari et al., "ZeRO", SC 2020, stage 3.
The parameters of a unit are gathered for its forward and again for its backward, after which its gradients are added and scattered: by
the network, in an order that depends on the number of workers (`FullySharded`), or in the tree (`fsdp_exact.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from ray_app.config.training import TrainSection
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
    wanted = set(units(model)) - {model}
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


class FullySharded(Exchange):
    """See the module.

    Args:
        model: From `shard`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters: list[DTensor] = [p for p in model.parameters() if p.requires_grad]  # type: ignore[misc]
        self._began = False
        states = [part._get_fsdp_state() for part in model.modules() if isinstance(part, FSDPModule)]
        self._held = [p for state in states for group in state._fsdp_param_groups for p in group.fsdp_params]

    def backward(self, losses: Tensor, weights: Tensor, logical_worker: int) -> None:
        """See `Exchange.backward`; a collective, as the forward before it was. All ranks must make equally many passes."""
        del logical_worker
        self._pass(losses, weights)

    def idle(self, losses: Tensor) -> None:
        """A backward that only takes part in those of the others."""
        self._pass(losses, torch.zeros_like(losses))

    def _pass(self, losses: Tensor, weights: Tensor) -> None:
        if not self._began:
            self._clear()
        self._began = True
        with collective():
            backward_of(losses, weights)
        for p in self._held:  # torch 2.15 adds what came after a unit's exchange to the next step
            left = getattr(p, "_unsharded_param", None)
            if left is not None and left.grad is not None:
                raise in_parts(str(p._param_fqn))

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
        self._clear()

    def _clear(self) -> None:
        for p in self._parameters:
            p.grad = None
