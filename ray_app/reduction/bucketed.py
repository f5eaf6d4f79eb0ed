"""Gradients that travel together with `ddp`, and the memory that they travel through.

A copy of the model in every worker: gradients are added in buckets that travel while backward still runs.

`exact`: per bucket every rank adds the subtrees that it owns, ranks exchange shards (all-to-all), each finishes the
tree for its shard, all gather the shards; where several ranks are on each of several hosts, within the hosts first and
then between them (`plan.route`). The bytes are those of a ring all-reduce where each rank owns one aligned subtree.
`overlapped`: one all-reduce per bucket; the same rows and weights, but the order of additions is the network's. With
compression the bucket travels as bfloat16.

Bucketing with hooks follows Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB
2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ray_app.config.sections import TrainSection
from ray_app.reduction.base import GradientReducer, Stage, T, World, checksum, partial_gradient_error, run_backward
from ray_app.reduction.overlap import SideStream, SideThread
from ray_app.reduction.transport import BufferPool, CollectiveTransport, DirectTransport, Transport
from ray_app.reduction.tree import TreeSum, tree_parents

_ALIGNED_BYTES = 64
"""Every parameter of a bucket begins at a multiple: a GPU adds up a norm in another order where memory is not aligned,
so what lies before it, which `bucket_mb` decides, would be in the bits.
"""


class Bucket:
    """Parameters whose gradients travel together, as one flat tensor with zeros between them and up to a multiple of
    the world size.

    Args:
        parameters: Of one dtype, on one device.
        world: The workers of now.
        number: Which bucket it is.

    Attributes:
        get_buffer: Memory that travels, see `BufferPool`.
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
        self._parents = tree_parents(world.logical_workers)
        self.tree = TreeSum(self._parents)
        self._spare: list[Tensor] = []
        pool = BufferPool(first.device)
        self.get_buffer = pool.get
        self.is_direct = world.check_device_errors is None and first.device.type == "cpu"
        self._transport: Transport = (
            DirectTransport(pool, world.rank, number) if self.is_direct else CollectiveTransport(pool)
        )
        self.missing: set[nn.Parameter] = set()
        self.sums: list[Tensor] = []
        self._arriving: list[Tensor] = []

    def collect(self, logical_worker: int) -> None:
        """Moves the parameters' gradients into the tree as the leaf of a logical worker; a missing gradient counts as
        zeros.
        """
        self.put(logical_worker, [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters])
        for p in self.parameters:
            p.grad = None

    def put(self, logical_worker: int, values: list[Tensor]) -> None:
        """Copies values, one per parameter, into the tree as the leaf of a logical worker."""
        flat = (
            self.result if not self.tree.nodes else self._spare.pop() if self._spare else torch.zeros_like(self.result)
        )
        parts = [
            part
            for value, gap in zip(values, self._gaps, strict=True)
            for part in (value.reshape(-1), gap)
            if part is not None
        ]
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
        for node, value in zip((node for held in stage.nodes for node in held), self._arriving, strict=True):
            tree.push(node, value)
        self.sums, self._arriving = [value for _, value in tree.nodes], []

    def gather(self, stage: Stage, group: Any, is_first: bool) -> None:
        """Gathers the shards of a stage, on the way back; those of the first stage are the sum."""
        [part] = self.sums
        whole = (
            self.result
            if is_first
            else self.get_buffer(f"of {stage.ranks}", part.numel() * len(stage.ranks), part.dtype)
        )
        self._transport.gather(part, whole, stage, group)
        self.sums = [whole]

    def wait(self) -> None:
        """Waits for what was gathered."""
        self._transport.wait()


_MEBI = 1 << 20


class BucketedReducer(GradientReducer):
    """See the module.

    Args: model: Its parameters get the gradients. world: The workers; torch's default process group must be theirs if
        there are two or more. reduction: `exact` or `overlapped`. bucket_mb: Mebibytes of a bucket. With many the first
        travels late; with 1 the calls themselves cost 10 % of a ResNet-18 step on
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
        self._route = list(zip(world.stages, world.groups, strict=True))
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        buckets = [] if self._alone else _split_into_buckets(self._parameters, int(bucket_mb * _MEBI))
        self._buckets = [Bucket(parameters, world, number) for number, parameters in enumerate(buckets)]
        self._last = world.assigned[-1]
        self._listening, self._next = False, 0
        self._ways, self._late = list[Iterator[Bucket]](), list[Iterator[Bucket]]()
        self._is_device, self._side = (
            world.check_device_errors is not None,
            SideStream(next(model.parameters()).device, "reduction", -1),
        )
        self._thread = SideThread() if self._exact and all(bucket.is_direct for bucket in self._buckets) else None
        self._names = {p: name for name, p in model.named_parameters()}
        self._places = {p: place for place, p in enumerate(self._parameters)}
        self._watched, self._bits = set[int](), dict[int, list[Tensor]]()
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._hook(bucket))
            for bucket in self._buckets
            for p in bucket.parameters
        ]

    def _hook(self, bucket: Bucket) -> Callable[[Tensor], None]:
        def ready(p: Tensor) -> None:
            if not self._listening:
                return
            if p not in bucket.missing:
                raise partial_gradient_error(self._names[p])  # type: ignore[index]
            bucket.missing.remove(p)  # type: ignore[arg-type]
            if self._world.size > 1:
                self._launch_ready()

        return ready

    def backward(self, losses: Tensor, weights: Tensor, logical_worker: int) -> None:
        """See `GradientReducer.backward`; the exchange starts during the last one."""
        self._begin(logical_worker)
        self._listening = logical_worker == self._last
        try:
            run_backward(losses, weights)
        finally:
            self._listening = False
        self._end(logical_worker)

    def collect_from(self, leave: Callable[[], T], logical_worker: int) -> T:
        """See `GradientReducer.collect_from`; nothing of the last one travels before `launch`."""
        self._begin(logical_worker)
        found = leave()
        self._end(logical_worker)
        return found

    def skip(self, logical_worker: int) -> None:
        """See `GradientReducer.skip`."""
        self.collect_from(lambda: None, logical_worker)

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
            with self._world.launch_guard():
                for bucket in self._buckets:
                    self._send(bucket)
                self._receive()
        return [found[p].clone() for p in self._parameters]

    def _begin(self, logical_worker: int) -> None:
        if logical_worker == self._world.assigned[0]:
            self._reset()
        else:  # gradients that the task has left, which of the first are gone likewise
            for p in self._parameters:
                p.grad = None

    def _end(self, logical_worker: int) -> None:
        """Collects what a logical worker has left; that of the last one is collected when it is sent."""
        if logical_worker != self._last:
            for bucket in self._buckets:
                if logical_worker in self._watched:
                    self._bits[logical_worker] += self._bits_of(bucket.parameters)
                bucket.collect(logical_worker)

    def _bits_of(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        return [checksum(p.grad, self._places[p]) for p in parameters if p.grad is not None]

    def watch_checksums(self, logical_workers: set[int]) -> None:
        """From now on the bits of these logical workers' gradients are taken, see `bits`; to be called before a
        step.
        """
        self._watched, self._bits = logical_workers, {v: [] for v in logical_workers}

    def checksums(self) -> dict[int, int]:
        """Those of the gradients of the watched logical workers, see `exchange.bits`; waits for the device."""
        return {v: int(torch.stack(parts).sum()) for v, parts in self._bits.items() if parts}

    @contextmanager
    def free_grads(self) -> Iterator[None]:
        """Inside the block `.grad` is free for other gradients."""
        kept = [p.grad for p in self._parameters]
        try:
            for p in self._parameters:
                p.grad = None
            yield
        finally:
            for p, grad in zip(self._parameters, kept, strict=True):
                p.grad = grad

    def gradient_checksum(self) -> int:
        """Those of what is in the parameters' `.grad` now; waits for the device."""
        parts = self._bits_of(self._parameters)
        return int(torch.stack(parts).sum()) if parts else 0

    def _reset(self) -> None:
        """Readies everything for a step, with one rank also after one that failed half-way; with more, that needs
        another exchange.
        """
        for p in self._parameters:
            p.grad = None
        self._next, self._ways, self._late = 0, [], []
        for bucket in self._buckets:
            bucket.missing = set(bucket.parameters)
            bucket.reset()

    def launch(self) -> None:
        """See `GradientReducer.launch`."""
        for bucket in self._buckets:
            bucket.missing = set()
        self._launch_ready()

    def _launch_ready(self) -> None:
        """Collects and sends the buckets whose gradients are all there, always in the same order on all ranks."""
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            bucket = self._buckets[self._next]
            self._next += 1
            if self._last in self._watched:
                self._bits[self._last] += self._bits_of(bucket.parameters)
            bucket.collect(self._last)
            if self._world.size > 1:
                with self._world.launch_guard():
                    self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        """Sends a bucket, and those before it on, where that keeps what computes from nothing: on a device's own
        stream, or by the thread.

        The last one, beside which nothing is computed, waits for `_receive`, so a model of one bucket needs no thread.
        """
        way = self._exactly(bucket) if self._exact else self._overlapped(bucket)
        if self._thread is not None and bucket is not self._buckets[-1]:
            self._thread.do(partial(self._advance_pipeline, way))
        elif self._is_device:
            self._advance_pipeline(way)
        else:
            next(way)
            (self._ways if self._thread is None else self._late).append(way)

    def _advance_pipeline(self, way: Iterator[Bucket]) -> None:
        """Lets a bucket set out, and those before it go on."""
        next(way)
        self._go_on()
        self._ways.append(way)

    def _go_on(self) -> None:
        """Sends each bucket that is on its way on by one stage, or back; the waits are those of a stream beside that
        which computes.
        """
        with self._side.entered():
            self._ways = [way for way in self._ways if next(way, None) is not None]

    def _overlapped(self, bucket: Bucket) -> Iterator[Bucket]:
        first, *more = [value for _, value in bucket.tree.nodes]
        for value in more:
            first.add_(value)
        packed = bucket.get_buffer("packed", first.numel(), torch.bfloat16).copy_(first) if self._compresses else first
        work: Any = dist.all_reduce(packed, async_op=True)
        yield bucket
        work.wait()
        if self._compresses:
            bucket.result.copy_(packed)

    def _exactly(self, bucket: Bucket) -> Iterator[Bucket]:
        bucket.sums = [value for _, value in bucket.tree.nodes]
        bucket.exchange(*self._route[0])
        yield bucket
        last = len(self._route) - 1
        for number, (stage, group) in enumerate(self._route):
            bucket.add(stage, not last)
            if number < last:
                bucket.exchange(*self._route[number + 1])
            else:
                bucket.gather(stage, group, not number)
            yield bucket
        for number in reversed(range(last)):
            bucket.wait()
            bucket.gather(*self._route[number], not number)
            yield bucket
        bucket.wait()

    def finish(self) -> None:
        """See `GradientReducer.finish`."""
        if self._alone:
            return
        if self._world.size > 1:
            with self._world.launch_guard():
                self._receive()
        for bucket in self._buckets:
            for p, view in zip(bucket.parameters, bucket.views, strict=True):
                p.grad = view

    def _receive(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._ways, self._late = self._ways + self._late, []
        while self._ways:
            self._go_on()
        self._side.join()

    def close(self) -> None:
        """See `GradientReducer.close`."""
        for hook in self._hooks:
            hook.remove()
        if self._thread is not None:
            self._thread.close()
        self._side.join()  # what it was given before a peer was lost may still use the memory that is free from now on
        for p in self._parameters:
            p.grad = None


def _split_into_buckets(parameters: list[nn.Parameter], most_bytes: int) -> list[list[nn.Parameter]]:
    """Parameters in about the order in which backward reaches them, in groups of one dtype and at most so many bytes,
    if they can.
    """
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


def build_bucketed_reducer(train: TrainSection, model: nn.Module, world: World) -> BucketedReducer:
    """The exchange of `ddp`, as configured."""
    return BucketedReducer(model, world, train.reduction, train.bucket_mb, train.gradient_compression)


def build_reducer(train: TrainSection, model: nn.Module, world: World) -> GradientReducer:
    """Makes the exchange of the configured strategy for a model and the workers of now; all but `fsdp` have that of
    `ddp`.
    """
    if train.strategy == "fsdp":
        # This imports PyTorch's FSDP, which takes two seconds that the other strategies do not need.
        from ray_app.reduction import sharded

        return (
            sharded.DeterministicShardedReducer(model, world)
            if train.reduction == "exact"
            else sharded.FsdpReducer(model, world)
        )
    return build_bucketed_reducer(train, model, world)
