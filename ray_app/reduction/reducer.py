"""The interface of a gradient reducer, and the checksums and norms of gradients.

`GradientReducer` is what a step calls; `bucketed.py` and `sharded.py` implement it. `checksum` maps a gradient to one
integer, for the check for silent data corruption, and `state_checksum` a state, for ranks to compare theirs.
`gradient_norms` computes norms on the device, and `scale_and_clip` multiplies gradients by factors that the host
derives from them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import cache
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ray_app.errors import ConfigError
from ray_app.torch_private import foreach_mul_, foreach_norm

T = TypeVar("T")
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_INTEGER_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ALIGNED_BYTES = 64
"""Every gradient begins at a multiple of this number of bytes.

A GPU adds up the norm of a gradient in another order if its memory is not aligned. Without padding the alignment, and
with it the norm, would depend on the parameters before it in the same memory, and so on `bucket_mb`.
"""
_BLOCK = 1 << 20
"""Elements that `state_checksum` reads at a time, so that it needs little memory."""


def checksum(gradient: Tensor, position: int) -> Tensor:
    """Returns the checksum of a gradient as an int64 tensor of shape ().

    It is the sum of the elements, each read as an integer of the same bytes, times an odd number, modulo 2**64. A
    change of any one element changes the checksum. The order of the additions has no influence, since integers are
    added. The checksum of zeros is 0, so a missing gradient may be left out of a sum of checksums.

    Args:
        gradient: A gradient of any shape and dtype.
        position: The index of the parameter in the model. It decides the odd number, so that the sum of the checksums
            of two gradients changes if they are swapped.
    """
    return (2 * position + 1) * _as_integers(gradient).sum(dtype=torch.int64)


def _as_integers(tensor: Tensor) -> Tensor:
    """Returns the elements of a tensor, each read as an integer of the same bytes."""
    # No integer type has the 16 bytes of complex128, so its real and imaginary parts are read as 8 bytes each.
    if tensor.element_size() not in _INTEGER_DTYPES:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGER_DTYPES[tensor.element_size()])


def state_checksum(tensors: Iterable[Tensor]) -> int:
    """Returns a checksum of tensors, computed where they are; waits for the device once.

    The elements are multiplied by odd numbers that are nearly random before they are added, so that differences in
    several elements do not cancel each other, as those by rounding up and down may do in a plain sum.
    """
    blocks = [block for tensor in tensors for block in _as_integers(tensor.detach()).reshape(-1).split(_BLOCK)]
    sums = [
        (2 * number + 1) * (block * _factors(block.device)[: len(block)]).sum() for number, block in enumerate(blocks)
    ]
    return int(torch.stack([block_sum.to(sums[0].device) for block_sum in sums]).sum()) if sums else 0


@cache
def _factors(device: torch.device) -> Tensor:
    """Returns odd numbers for the elements of a block, by a multiplicative hash of their positions."""
    numbers = torch.arange(1, _BLOCK + 1, device=device) * -7046029254386353131
    return (numbers ^ (numbers >> 31)) * -4658895280553007687 | 1


def gradient_norms(gradients: list[Tensor]) -> list[Tensor]:
    """Returns the L2 norm of each tensor, each of shape (), without a device synchronization."""
    # `torch.nn.utils.get_total_norm` would return one norm, but it takes 30 us more.
    return [*foreach_norm(gradients)] if gradients else []


def total_norm(norms: Iterable[float], factor: float = 1.0) -> float:
    """Returns the L2 norm of all values of tensors that have these norms, times a factor.

    It is infinite if float32, the dtype of the gradients, cannot represent it.
    """
    norm = math.sqrt(math.fsum([n * n for n in norms])) * factor
    return math.inf if norm > _MAX_FLOAT32 else norm


def scale_and_clip(gradients: list[Tensor], factor: float, norm: float, max_norm: float | None) -> None:
    """Multiplies gradients by a factor and then clips them to a norm, in place.

    The arithmetic is that of `torch.nn.utils.clip_grads_with_norm_`. That function is not called, because it would copy
    the norm from the host to the device and wait for the copy.

    Args:
        gradients: The gradients, or this rank's shards of them.
        factor: The factor.
        norm: The norm of the whole gradient after the multiplication.
        max_norm: The norm to clip to; None for no clipping.
    """
    if factor != 1:
        foreach_mul_(gradients, factor)
    if max_norm is not None:
        clip_factor = np.float32(1) / (np.float32(norm) + np.float32(1e-6)) * np.float32(max_norm)
        if clip_factor < 1:
            foreach_mul_(gradients, float(clip_factor))


def partial_gradient_error(name: str) -> ConfigError:
    """Returns the error for a parameter that receives its gradient in several parts in one backward."""
    return ConfigError(
        f"The gradient of the parameter {name} came in several parts in one backward; a part that arrives after the"
        " others were sent would be lost, and the result would depend on the number of workers. The cause may be"
        " activation checkpointing of layers that share parameters: call torch.utils.checkpoint.checkpoint with"
        " use_reentrant=False, or checkpoint the layers together. With train.strategy fsdp, it may be a gradient that"
        " training_loss computes itself (torch.autograd.grad): use ddp."
    )


class GradientReducer(ABC):
    """Adds the gradients of all logical workers and leaves the sum in every parameter's `.grad`.

    In each step a rank calls `backward`, `collect_from` or `skip` for each logical worker that it runs, in their order,
    then `launch`, then `finish`. Each loss is weighted by one over the global number of rows, so the gradients are
    added, never averaged.

    A reducer of the user (`train.reducer`) is made anew for each generation of workers, as `cls(model, world)`, a
    `torch.nn.Module` and a `World`, when torch's default process group consists of the workers of the world. It

    - adds the gradients of the parameters that require gradients, and sees them in `.grad` after a backward;
    - leaves the same sum on every rank, with zeros for a missing gradient of a logical worker;
    - runs collectives within `ray_app.reduction.peer_errors.collective`, so that a lost peer is recognized;
    - begins anew with `world.assigned[0]`: another reducer repeats a step that has lost a peer.

    The result is bit-identical for any number of workers if the order of the additions depends on the numbers of the
    logical workers only.
    """

    @abstractmethod
    def backward(self, losses: Tensor, weights: Tensor, logical_worker: int) -> None:
        """Runs the backward of the weighted sum of one logical worker's losses and adds the gradients.

        Args:
            losses: The loss of every row, shape (rows,).
            weights: The weight of every row, shape (rows,).
            logical_worker: The logical worker to which the rows belong.
        """

    def collect_from(self, compute: Callable[[], T], logical_worker: int) -> T:
        """Calls `compute`, adds the gradients that it leaves in `.grad`, and returns its result.

        It takes the place of `backward` for a logical worker.

        Raises:
            NotImplementedError: This reducer takes gradients from a backward only.
        """
        raise NotImplementedError(f"{type(self).__name__} accepts gradients only during a backward pass")

    @abstractmethod
    def skip(self, logical_worker: int) -> None:
        """Adds zeros for a logical worker without rows."""

    @abstractmethod
    def launch(self) -> None:
        """Starts each part of the reduction that has not started yet.

        Between this call and `finish` the step may run other collectives.
        """

    @abstractmethod
    def finish(self) -> None:
        """Waits for the reduction; afterwards every parameter's `.grad` holds the sum.

        Raises:
            PeerLostError: A peer left during the reduction; the step can be repeated.
        """

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """Returns the tensors of the sum that this rank has: the whole gradient, or its shards of it."""

    @abstractmethod
    def norms(self) -> list[Tensor]:
        """Returns norms of tensors that together are the whole sum, without waiting for the device; a collective.

        Raises:
            PeerLostError: A peer left meanwhile.
        """

    @abstractmethod
    def close(self) -> None:
        """Removes the hooks and gradients of this reducer from the model."""
