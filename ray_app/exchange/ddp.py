"""A copy of the model in every worker: gradients are added in buckets that travel while backward still runs.

`exact`: per bucket every rank adds the subtrees that it owns, ranks exchange shards (all-to-all), each finishes the tree for its shard,
all gather the shards; where several ranks are on each of several hosts, within the hosts first and then between them (`plan.route`). The
bytes are those of a ring all-reduce where each rank owns one aligned subtree. `overlapped`: one all-reduce per bucket; the same rows and
weights, but the order of additions is the network's. With compression the bucket travels as bfloat16.

Bucketing with hooks follows Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ray_app.exchange.exchange import Exchange, World, collective, in_parts
from ray_app.exchange.tree import TreeSum, parents
from ray_app.plan.route import Stage

_MEBI = 1 << 20
_ALIGNED_BYTES = 64
"""Every parameter of a bucket begins at a multiple: a GPU adds up a norm in another order where memory is not aligned, so what lies before
it, which `bucket_mb` decides, would be in the bits."""


class _Bucket:
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
        self.missing: set[nn.Parameter] = set()
        self.pending: Any = None
        self.received = self.result
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

    def exchange(self, stage: Stage, group: Any) -> None:
        """Sends everybody in the stage its shard of the sums that this rank holds, and receives its own of theirs."""
        parts, held = len(stage.ranks), len(self.sums)
        shard = self.sums[0].numel() // parts
        outgoing = self.sums[0]
        if held > 1:  # rank by rank, then node by node
            outgoing = torch.stack(self.sums).view(held, parts, shard).transpose(0, 1).reshape(-1)
        counts = [len(nodes) * shard for nodes in stage.held]
        self.received = torch.empty(sum(counts), dtype=outgoing.dtype, device=outgoing.device)
        self.pending = dist.all_to_all_single(self.received, outgoing, counts, [held * shard] * parts, group=group, async_op=True)

    def add(self, stage: Stage, logical_workers: int) -> None:
        """Waits for the exchange of a stage, and adds what came in the tree."""
        self.pending.wait()
        tree, nodes = TreeSum(parents(logical_workers)), [node for held in stage.held for node in held]
        for node, value in zip(nodes, self.received.chunk(len(nodes)), strict=True):
            tree.push(node, value)
        self.sums = [value for _, value in tree.nodes]

    def gather(self, stage: Stage, group: Any, into: Tensor | None) -> None:
        """Gathers the shards of a stage, on the way back."""
        [part] = self.sums
        whole = into if into is not None else torch.empty(part.numel() * len(stage.ranks), dtype=part.dtype, device=part.device)
        self.pending = dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
        self.sums = [whole]


class DataParallel(Exchange):
    """See the module.

    Args:
        model: Its parameters get the gradients.
        world: The workers; torch's default process group must be theirs if there are two or more.
        reduction: `exact` or `overlapped`.
        bucket_mb: Mebibytes of a bucket. With many the first travels late; with 1 the calls themselves cost 10 % of a ResNet-18 step on
            gloo. The tree adds value by value, so the bits of `exact` do not depend on it.
        compression: `bf16` rounds what travels with `overlapped`.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        reduction: Literal["exact", "overlapped"],
        bucket_mb: float,
        compression: Literal["none", "bf16"],
    ) -> None:
        self._world, self._exact, self._compresses = world, reduction == "exact", compression == "bf16"
        self._alone = world.logical_workers == 1
        self._route = list(zip(world.route, world.groups, strict=True))
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._buckets = [] if self._alone else [_Bucket(ps, world) for ps in _bucketed(self._parameters, int(bucket_mb * _MEBI))]
        self._last = world.played[-1]
        self._listening, self._next = False, 0
        self._names = {p: name for name, p in model.named_parameters()}
        self._hooks = [p.register_post_accumulate_grad_hook(self._hook(bucket)) for bucket in self._buckets for p in bucket.parameters]

    def _hook(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def ready(p: Tensor) -> None:
            if not self._listening:
                return
            if p not in bucket.missing:
                raise in_parts(self._names[p])  # type: ignore[index]
            bucket.missing.remove(p)  # type: ignore[arg-type]
            if self._world.size > 1:
                self._launch_ready()

        return ready

    def backward(self, losses: Tensor, weights: Tensor, logical_worker: int) -> None:
        """See `Exchange.backward`; the exchange starts during the last one."""
        self._begin(logical_worker)
        self._listening = logical_worker == self._last
        try:
            losses.backward(weights)
        finally:
            self._listening = False
        self._end(logical_worker)

    def skip(self, logical_worker: int) -> None:
        """See `Exchange.skip`."""
        self._begin(logical_worker)
        self._end(logical_worker)

    def sum(self, values: dict[int, list[Tensor]]) -> list[Tensor]:
        """Adds other values than gradients, between two steps and just as them; a collective of all ranks.

        Args:
            values: For each logical worker of this rank, in their order, a tensor per trained parameter, of its shape.

        Returns:
            The sum over all logical workers, likewise.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        if self._alone:
            [only] = values.values()
            return [value.clone() for value in only]
        self._reset()
        found: dict[nn.Parameter, Tensor] = {}
        for bucket in self._buckets:
            for logical_worker, own in values.items():
                of = dict(zip(self._parameters, own, strict=True))
                bucket.put(logical_worker, [of[p] for p in bucket.parameters])
            found |= zip(bucket.parameters, bucket.views, strict=True)
        if self._world.size > 1:
            with collective():
                for bucket in self._buckets:
                    self._send(bucket)
                self._receive()
        return [found[p].clone() for p in self._parameters]

    def _begin(self, logical_worker: int) -> None:
        if logical_worker == self._world.played[0]:
            self._reset()

    def _end(self, logical_worker: int) -> None:
        """Collects what a logical worker has left; that of the last one is collected when it is sent."""
        if logical_worker != self._last:
            for bucket in self._buckets:
                bucket.collect(logical_worker)

    def _reset(self) -> None:
        """Readies everything for a step, also after one that failed half-way."""
        for p in self._parameters:
            p.grad = None
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = set(bucket.parameters)
            bucket.reset()

    def launch(self) -> None:
        """See `Exchange.launch`."""
        for bucket in self._buckets:
            bucket.missing = set()
        self._launch_ready()

    def _launch_ready(self) -> None:
        """Collects and sends the buckets whose gradients are all there, always in the same order on all ranks."""
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            bucket = self._buckets[self._next]
            self._next += 1
            bucket.collect(self._last)
            if self._world.size > 1:
                with collective():
                    self._send(bucket)

    def _send(self, bucket: _Bucket) -> None:
        partials = [value for _, value in bucket.tree.nodes]
        if not self._exact:
            for value in partials[1:]:
                partials[0].add_(value)
            bucket.received = partials[0].bfloat16() if self._compresses else partials[0]
            bucket.pending = dist.all_reduce(bucket.received, async_op=True)
            return
        bucket.sums = partials
        bucket.exchange(*self._route[0])

    def finish(self) -> None:
        """See `Exchange.finish`."""
        if self._alone:
            return
        if self._world.size > 1:
            with collective():
                self._receive()
        for bucket in self._buckets:
            for p, view in zip(bucket.parameters, bucket.views, strict=True):
                p.grad = view

    def _receive(self) -> None:
        if not self._exact:
            for bucket in self._buckets:
                bucket.pending.wait()
                if self._compresses:
                    bucket.result.copy_(bucket.received)
            return
        logical_workers, last = self._world.logical_workers, len(self._route) - 1
        for number, (stage, group) in enumerate(self._route):
            for bucket in self._buckets:
                bucket.add(stage, logical_workers)
                if number < last:
                    bucket.exchange(*self._route[number + 1])
                else:
                    bucket.gather(stage, group, bucket.result if not number else None)
        for number in reversed(range(last)):
            for bucket in self._buckets:
                bucket.pending.wait()
                bucket.gather(*self._route[number], bucket.result if not number else None)
        for bucket in self._buckets:
            bucket.pending.wait()

    def close(self) -> None:
        """See `Exchange.close`."""
        for hook in self._hooks:
            hook.remove()
        for p in self._parameters:
            p.grad = None


def _bucketed(parameters: list[nn.Parameter], most_bytes: int) -> list[list[nn.Parameter]]:
    """Parameters in about the order in which backward reaches them, in groups of one dtype and at most so many bytes, if they can."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for p in reversed(parameters):
        size = p.numel() * p.element_size()
        if not buckets or size > room or buckets[-1][0].dtype != p.dtype:
            buckets.append([])
            room = most_bytes
        buckets[-1].append(p)
        room -= size
    return buckets
