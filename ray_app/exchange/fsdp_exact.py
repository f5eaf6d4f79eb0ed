"""Gradients of sharded parameters, added in the tree: every rank adds the shards that it owns.

In each pass a unit's gradients go to their owners as they are (all-to-all, the bytes of the reduce-scatter that it replaces), where those
of a pass are the next W leaves of the tree, since ranks play every W-th logical worker. So between two passes an owner holds the sums of
at most log2(L) + 1 nodes of its shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor

from ray_app.exchange.exchange import World, in_parts
from ray_app.exchange.fsdp import FullySharded, as_sharded
from ray_app.exchange.side_stream import keep_until_done
from ray_app.exchange.tree import TreeSum, parents


class _Scatter(ReduceScatter):
    """In the place of a reduce-scatter; the sum that it leaves is none, since `ExactlySharded` makes it.

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

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:
        """Sends every rank its shards of this rank's gradients of some parameters, unless no logical worker of this pass is here."""
        del op, async_op
        world, shard, width = self._world, output_tensor.numel(), len(self.leaves)
        if self.is_idle:
            input_tensor.zero_()
        sent = shard if world.rank < width else 0
        received = self._room(width * shard, input_tensor)
        sizes = [shard if rank < width else 0 for rank in range(world.size)]
        with world.launching():
            dist.all_to_all_single(received, input_tensor[: sent * world.size], sizes, [sent] * world.size, group=group)
        self._received, self._at = received.view(width, shard), 0

    def _room(self, size: int, like: Tensor) -> Tensor:
        """Memory for what comes, which is needed until the next comes; what was touched before is quicker."""
        if self._memory.numel() < size or self._memory.dtype != like.dtype or self._memory.device != like.device:
            self._memory = like.new_empty(size)
        return self._memory[:size]

    def take(self, p: DTensor, gradient: Tensor) -> list[Tensor]:
        """This rank's shards of the gradients of the next parameter of those that `__call__` was for, in the order of `leaves`."""
        if self._world.size == 1:  # nothing is sent
            return [gradient.zero_() if self.is_idle else gradient]
        at = self._at
        self._at += -(-p.shape[0] // self._world.size) * p.shape[1:].numel()
        return [row[at : at + gradient.numel()].view(gradient.shape) for row in self._received]


class ExactlySharded(FullySharded):
    """See the module.

    Args:
        model: From `shard`.
        world: The workers of now, strided.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self._scatter = _Scatter(world)
        super().__init__(model, world)
        self._sums = [TreeSum(parents(world.logical_workers)) for _ in self._parameters]
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
                raise in_parts(self._names[number])
            self._missing.remove(number)
            self._push(number, self._scatter.take(p, gradient.to_local()))

        return arrived

    def idle(self, losses: Tensor) -> None:
        """See `FullySharded.idle`; what it gives counts as zeros, whatever it is."""
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
            keep_until_done(tree.push((leaf, leaf + 1), value))
        # what is kept must not hold the memory of all that arrived with it
        tree.nodes = [(node, value.clone() if node[0] >= leaves.start else value) for node, value in tree.nodes]

    def finish(self) -> None:
        """See `Exchange.finish`."""
        self._began = False
        for p, tree in zip(self._parameters, self._sums, strict=True):
            [(_, total)] = tree.nodes
            p.grad = as_sharded(total.to(p.to_local().device), p)
            tree.clear()

    def norms(self) -> Tensor:
        """The L2 norm of every trained parameter's gradient as `ddp` computes it, of the whole: each is put together on one rank.

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
        with self._world.launching():
            dist.all_to_all_single(received, outgoing, [sum(of) for of in sizes], [sum(map(len, own[to::size])) for to in range(size)])
        parts = iter(received.split([part for of in sizes for part in of]))
        by_rank = [[next(parts) for _ in mine] for _ in range(size)]
        found = torch.zeros(len(parameters), dtype=torch.float64, device=outgoing.device)
        del own, outgoing
        if mine:  # one whole after the other, since each needs memory
            wholes = (torch.cat(shards).view(p.dtype).view(p.shape) for p, *shards in zip(mine, *by_rank, strict=True))
            found[rank::size] = torch.stack([norm for whole in wholes for norm in torch._foreach_norm([whole])]).double()
        with self._world.launching():
            dist.all_reduce(found)
        return found

    def close(self) -> None:
        """See `Exchange.close`."""
        for hook in self._hooks:
            hook.remove()
        super().close()


def _shard_bytes(p: DTensor, rank: int, size: int) -> int:
    """Bytes of a rank's shard of a parameter."""
    rows = -(-p.shape[0] // size)
    return max(0, min(rows, p.shape[0] - rank * rows)) * p.shape[1:].numel() * p.dtype.itemsize
