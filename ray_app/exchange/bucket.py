"""Gradients that travel together with `ddp`, and the memory that they travel through."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ray_app.exchange.exchange import World
from ray_app.exchange.tree import TreeSum, parents
from ray_app.plan.route import Stage

_ALIGNED_BYTES = 64
"""Every parameter of a bucket begins at a multiple: a GPU adds up a norm in another order where memory is not aligned, so what lies before
it, which `bucket_mb` decides, would be in the bits."""


class Bucket:
    """Parameters whose gradients travel together, as one flat tensor with zeros between them and up to a multiple of the world size."""

    def __init__(self, parameters: list[nn.Parameter], world: World) -> None:
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
        self.tree = TreeSum(parents(world.logical_workers))
        self._spare: list[Tensor] = []
        self._rooms: dict[str, Tensor] = {}
        self._keeps = world.settle is not None or first.device.type != "cpu"
        self.missing: set[nn.Parameter] = set()
        self.pending: Any = None
        self.sums: list[Tensor] = []

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
        self.pending = None
        self.sums = []

    def room(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory; on a device that of the step before, since more streams than one use it. With gloo that took 15 % more CPU time."""
        if name not in self._rooms or not self._keeps:
            self._rooms[name] = torch.empty(numel, dtype=dtype, device=self.result.device)
        return self._rooms[name]

    def exchange(self, stage: Stage, group: Any) -> None:
        """Sends everybody in the stage its shard of the sums that this rank holds, and receives its own of theirs."""
        parts, held = len(stage.ranks), len(self.sums)
        shard = self.sums[0].numel() // parts
        outgoing, name = self.sums[0], f"{stage.ranks}"
        if held > 1:  # rank by rank, then node by node
            outgoing = self.room(f"to {name}", held * parts * shard, outgoing.dtype)
            torch.stack([value.view(parts, shard) for value in self.sums], 1, out=outgoing.view(parts, held, shard))
        counts = [len(nodes) * shard for nodes in stage.held]
        received = self.room(f"from {name}", sum(counts), outgoing.dtype)
        self.pending = dist.all_to_all_single(received, outgoing, counts, [held * shard] * parts, group=group, async_op=True)

    def add(self, stage: Stage, logical_workers: int) -> None:
        """Waits for the exchange of a stage, and adds what came in the tree."""
        self.pending.wait()
        tree, nodes = TreeSum(parents(logical_workers)), [node for held in stage.held for node in held]
        for node, value in zip(nodes, self._rooms[f"from {stage.ranks}"].chunk(len(nodes)), strict=True):
            tree.push(node, value)
        self.sums = [value for _, value in tree.nodes]

    def gather(self, stage: Stage, group: Any, is_first: bool) -> None:
        """Gathers the shards of a stage, on the way back; those of the first stage are the sum."""
        [part] = self.sums
        whole = self.result if is_first else self.room(f"of {stage.ranks}", part.numel() * len(stage.ranks), part.dtype)
        self.pending = dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
        self.sums = [whole]
