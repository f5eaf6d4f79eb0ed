"""Gradients that travel together with `ddp`, and the memory that they travel through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ray_app.exchange.exchange import World
from ray_app.exchange.transport import CollectiveTransport, DirectTransport, Rooms, Transport
from ray_app.exchange.tree import TreeSum, parents
from ray_app.plan.route import Stage

_ALIGNED_BYTES = 64
"""Every parameter of a bucket begins at a multiple: a GPU adds up a norm in another order where memory is not aligned, so what lies before
it, which `bucket_mb` decides, would be in the bits."""


class Bucket:
    """Parameters whose gradients travel together, as one flat tensor with zeros between them and up to a multiple of the world size.

    Args:
        parameters: Of one dtype, on one device.
        world: The workers of now.
        number: Which bucket it is.

    Attributes:
        room: Memory that travels, see `Rooms`.
        is_direct: Whether ranks may come to the buckets in different orders.
    """

    def __init__(self, parameters: list[nn.Parameter], world: World, number: int) -> None:
        self.parameters = parameters
        first = parameters[0]
        unit = _ALIGNED_BYTES // first.element_size()
        gaps = [-p.numel() % unit for p in parameters]
        self.numel = sum(p.numel() + gap for p, gap in zip(parameters, gaps, strict=True))
        self.shard = -(-self.numel // world.size)
        self.result = torch.zeros(self.shard * world.size, dtype=first.dtype, device=first.device)
        zeros = self.result.new_zeros(unit)
        self._gaps = [zeros[:gap] if gap else None for gap in gaps]
        self.views, offset = [], 0
        for p, gap in zip(parameters, gaps, strict=True):
            self.views.append(self.result[offset : offset + p.numel()].view_as(p))
            offset += p.numel() + gap
        self._own = self.result[self.shard * world.rank :][: self.shard]
        self._parents = parents(world.logical_workers)
        self.tree = TreeSum(self._parents)
        self._spare: list[Tensor] = []
        rooms = Rooms(first.device)
        self.room = rooms.room
        self.is_direct = world.settle is None and first.device.type == "cpu"
        self._transport: Transport = DirectTransport(rooms, world.rank, number) if self.is_direct else CollectiveTransport(rooms)
        self.missing: set[nn.Parameter] = set()
        self.sums: list[Tensor] = []
        self._arriving: list[Tensor] = []

    def collect(self, logical_worker: int) -> None:
        """Moves the parameters' gradients into the tree as the leaf of a logical worker; a missing gradient counts as zeros."""
        self.put(logical_worker, [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters])
        for p in self.parameters:
            p.grad = None

    def put(self, logical_worker: int, values: list[Tensor]) -> None:
        """Copies values, one per parameter, into the tree as the leaf of a logical worker."""
        flat = self.result if not self.tree.nodes else self._spare.pop() if self._spare else torch.zeros_like(self.result)
        parts = [part for value, gap in zip(values, self._gaps, strict=True) for part in (value.reshape(-1), gap) if part is not None]
        torch.cat(parts, out=flat[: self.numel])
        self._spare += self.tree.push((logical_worker, logical_worker + 1), flat)

    def reset(self) -> None:
        """Forgets the step's sums, keeping their memory for the next."""
        self._spare += [value for value in self.tree.clear() if value is not self.result]
        self.sums = []

    def exchange(self, stage: Stage, group: Any) -> None:
        """Sends everybody in the stage its shard of the sums that this rank holds, and receives its own of theirs."""
        self._arriving = self._transport.scatter(self.sums, stage, group)

    def add(self, stage: Stage, is_only: bool) -> None:
        """Waits for the exchange of a stage, and adds what came in the tree."""
        self._transport.wait()
        tree = TreeSum(self._parents, self._own if is_only else None)
        for node, value in zip((node for held in stage.held for node in held), self._arriving, strict=True):
            tree.push(node, value)
        self.sums, self._arriving = [value for _, value in tree.nodes], []

    def gather(self, stage: Stage, group: Any, is_first: bool) -> None:
        """Gathers the shards of a stage, on the way back; those of the first stage are the sum."""
        [part] = self.sums
        whole = self.result if is_first else self.room(f"of {stage.ranks}", part.numel() * len(stage.ranks), part.dtype)
        self._transport.gather(part, whole, stage, group)
        self.sums = [whole]

    def wait(self) -> None:
        """Waits for what was gathered."""
        self._transport.wait()
