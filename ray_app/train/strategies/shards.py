"""Optimizers that move a rank's shards as plain tensors, with the bits that they give on whole ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ray_app.train.state.groups import in_order

BY_VALUE = (
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
        self._sharded: dict[Tensor, DTensor] = {nn.Parameter(p.to_local().detach(), p.requires_grad): p for p in parameters}
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
        return [self._sharded.get(p, p) for p in in_order(optimizer)]

    def as_whole(self) -> TorchFunctionMode:
        """A context in which fused kernels treat each value as they would in the whole parameter."""
        return InPieces(self._pieces)


Piece = tuple[int, int, int, int]
"""Values [low, high) of a shard; where they stand in their block of the whole parameter, and its size, or 0 for whole blocks."""


def pieces(start: int, count: int, total: int) -> list[Piece]:
    """Cuts a shard, `count` values from `start` of `total`, where blocks of the whole parameter begin; the last of these is shorter."""
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
    return pieces(p.device_mesh.get_local_rank() * rows * p.shape[1:].numel(), count, p.numel())


class InPieces(TorchFunctionMode):
    """See `StateShards.as_whole`.

    On a CPU a fused kernel takes the values that are left behind its last vector one by one, with other roundings. A piece that is no
    whole blocks goes through it in the place that it has in its block, in memory of its own.
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
