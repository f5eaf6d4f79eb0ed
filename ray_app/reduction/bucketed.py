"""Gradient reduction in buckets that travel while backward still runs.

It serves the strategies with a whole model per worker, in two modes (`train.reduction`):

- `exact`: every rank adds the subtrees of the reduction tree for which it has all leaves. An all-to-all then sends each
  rank its shard of these sums, each rank finishes the tree for its shard, and the shards are gathered. If several hosts
  have several ranks each, this happens within the hosts first and then between them (`plan_stages`). If each rank has
  one aligned subtree, as many bytes cross the network as in a ring all-reduce.
- `overlapped`: one all-reduce per bucket. The gradients are those of the same rows with the same weights as with
  `exact`, but the backend decides the order of the additions.

The buckets and hooks follow Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB
2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ray_app.devices import HOST, HOST_GROUP, kind_of
from ray_app.reduction.overlap import InlineExecutor, StreamExecutor, ThreadExecutor
from ray_app.reduction.peer_errors import launch_guard
from ray_app.reduction.reducer import (
    ALIGNED_BYTES,
    GradientReducer,
    T,
    checksum,
    gradient_norms,
    partial_gradient_error,
)
from ray_app.reduction.transport import BufferPool, CollectiveTransport, DirectTransport
from ray_app.reduction.tree import TreeSum, add_rows, are_rows, tree_parents
from ray_app.reduction.world import Stage, World
from ray_app.torch_private import run_backward

_MEBI = 1 << 20
_HOST_BUCKET_MB, _DEVICE_BUCKET_MB = 8, 64
"""Default of `train.bucket_mb` where the host carries the buckets, and where a device does.

A link between devices is so fast that the calls for a smaller bucket would take longer than its transfer. With 1 MiB on
gloo they take 10 % of a ResNet-18 step.
"""
_FIRST_BUCKET_MB = 8
"""Maximum size of the first bucket on a device; a bucket is sent when all its gradients are complete."""
_ALIGNED_SHARD_BYTES = 128
"""Shards have a multiple of this number of bytes: NCCL copies memory that is not aligned to 16 bytes byte by byte."""


def _memory_of_buckets(device: torch.device, world: World) -> torch.device:
    """Returns the device on which the gradients of parameters on `device` are added and sent.

    It is the host, unless the device carries its collectives itself. A single worker sends nothing. Yet if several
    workers would add on the host, it does so, too: a device may round sums in another way than the host.
    """
    if world.has_device_collectives:
        return device
    is_alone = world.size == 1 and kind_of(device).group_backend != HOST_GROUP
    return device if is_alone else HOST


class Bucket:
    """Parameters with gradients that travel together as one flat tensor.

    Zeros pad each parameter to a multiple of `ALIGNED_BYTES`, and each shard to one of `_ALIGNED_SHARD_BYTES`.

    Args:
        parameters: The parameters, of one dtype and on one device.
        world: The workers of this generation.
        number: The index of the bucket, the same on all ranks.

    Attributes:
        numel: Elements of all parameters with their padding.
        shard_numel: Elements of one rank's shard, so that `shard_numel` times the world size is the length of the flat
            tensor.
        result: The flat tensor for the sum over all logical workers.
        views: The part of `result` for each parameter, in the parameter's shape.
        tree: The sums over the logical workers of this rank.
        missing: The parameters without a complete gradient of the rank's last logical worker.
        sums: The flat tensors that this rank has between two stages of the reduction.
        get_buffer: `BufferPool.get` of this bucket's pool.
        copies_to_host: Whether gradients of parameters on a device are copied to the host and added there.
        is_direct: Whether shards travel by `DirectTransport`, so that ranks may start their buckets in different
            orders.
    """

    def __init__(self, parameters: list[nn.Parameter], world: World, number: int) -> None:
        self.parameters = parameters
        first = parameters[0]
        unit = ALIGNED_BYTES // first.element_size()
        gaps = [-p.numel() % unit for p in parameters]
        self._starts = [0, *accumulate(p.numel() + gap for p, gap in zip(parameters, gaps, strict=True))]
        self.numel = self._starts[-1]
        shard_unit = _ALIGNED_SHARD_BYTES // first.element_size()
        self.shard_numel = -(-self.numel // (world.size * shard_unit)) * shard_unit
        memory = _memory_of_buckets(first.device, world)
        self._device, self.copies_to_host = first.device, memory != first.device
        self._memory_options: dict[str, Any] = dict(dtype=first.dtype, device=memory, pin_memory=self.copies_to_host)
        self._logical_workers = world.logical_workers
        self.result = self._allocate(self.shard_numel * world.size)
        zeros = torch.zeros(unit, dtype=first.dtype, device=first.device)
        self._gaps = [zeros[:gap] if gap else None for gap in gaps]
        self.views = self._cut(self.result)
        self._result_shard = self.result[self.shard_numel * world.rank :][: self.shard_numel]
        self._parents = tree_parents(world.logical_workers)
        self.tree = TreeSum(self._parents)
        self._free_memory: list[Tensor] = []
        pool = BufferPool(memory)
        self.get_buffer = pool.get
        self.is_direct = not world.has_device_collectives and kind_of(memory).is_host
        self._transport = DirectTransport(pool, world.rank, number) if self.is_direct else CollectiveTransport(pool)
        self.missing: set[nn.Parameter] = set()
        self.sums: list[Tensor] = []
        self._arriving: Any = []
        # The newest leaf, while the device may still copy it to the host, and the event that follows the copy.
        self._copied: tuple[Any, int, Tensor] | None = None

    def _allocate(self, numel: int) -> Tensor:
        """Returns zeros in the memory of the bucket; a device copies into it, and from it, by itself."""
        return torch.zeros(numel, **self._memory_options)

    def _cut(self, flat: Tensor) -> list[Tensor]:
        """Returns the part of a flat tensor for each parameter, in the parameter's shape."""
        return [
            flat[start : start + p.numel()].view_as(p) for start, p in zip(self._starts, self.parameters, strict=False)
        ]

    def totals(self) -> list[Tensor]:
        """Returns the sum for each parameter on the parameters' device, when the bucket is reduced."""
        self.add_copied_leaf()
        return self._cut(self.result.to(self._device, non_blocking=True)) if self.copies_to_host else self.views

    def take_gradients(self, logical_worker: int) -> None:
        """Moves the parameters' gradients into the tree as the leaf of a logical worker.

        A missing gradient counts as zeros.
        """
        self.add_leaf(logical_worker, [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters])
        for p in self.parameters:
            p.grad = None

    def add_leaf(self, logical_worker: int, values: list[Tensor]) -> None:
        """Copies values, one per parameter, into the tree as the leaf of a logical worker."""
        if self._copied is not None:
            self.add_copied_leaf()
        # The sum of a tree is written into its leftmost tensor, so with one rank the total is in `result`.
        if not self.tree.nodes:
            flat = self.result
        else:
            flat = self._free_memory.pop() if self._free_memory else self._allocate(len(self.result))
        parts = [
            part
            for value, gap in zip(values, self._gaps, strict=True)
            for part in (value.reshape(-1), gap)
            if part is not None
        ]
        if self.copies_to_host:
            flat[: self.numel].copy_(torch.cat(parts), non_blocking=True)
            self._copied = kind_of(self._device).current_stream(self._device).record_event(), logical_worker, flat
        else:
            torch.cat(parts, out=flat[: self.numel])
            self._free_memory += self.tree.push((logical_worker, logical_worker + 1), flat)

    def add_copied_leaf(self) -> None:
        """Waits until the newest leaf is in the memory of the bucket, and adds it."""
        if self._copied is not None:
            (copied, logical_worker, flat), self._copied = self._copied, None
            copied.synchronize()
            self._free_memory += self.tree.push((logical_worker, logical_worker + 1), flat)

    def reset(self) -> None:
        """Drops the sums of the step and keeps their memory for the next one."""
        if self._copied is not None:
            self.add_copied_leaf()
        self._free_memory += [value for value in self.tree.clear() if value is not self.result]
        self.sums = []

    def scatter(self, stage: Stage, group: Any) -> None:
        """Starts to send every rank of a stage its shard of this rank's sums, and to receive this rank's shards.

        Args:
            stage: The stage.
            group: The process group of the stage, see `World.groups`.
        """
        self._arriving = self._transport.scatter(self.sums, stage, group)

    def add(self, stage: Stage, is_only: bool) -> None:
        """Waits for the shards of a stage and adds them in the tree.

        Args:
            stage: The stage.
            is_only: Whether there is no other stage. Then the sum is this rank's shard of the result and is written
                into `result`.
        """
        self._transport.wait()
        total = self._result_shard if is_only else None
        if not self.is_direct and are_rows(stage.all_nodes, self._logical_workers):
            self.sums = [add_rows(self._arriving, total)]
        else:
            tree = TreeSum(self._parents, total)
            for node, value in zip(stage.all_nodes, self._arriving, strict=True):
                tree.push(node, value)
            self.sums = [value for _, value in tree.nodes]
        self._arriving = []

    def gather(self, stage: Stage, group: Any, is_first: bool) -> None:
        """Starts to gather the shards of a stage; the stages are gathered from the last to the first.

        Args:
            stage: The stage.
            group: The process group of the stage, see `World.groups`.
            is_first: Whether this is the first stage. Together its shards are the whole sum, so they are gathered into
                `result`.
        """
        [part] = self.sums
        if is_first:
            whole = self.result
        else:
            whole = self.get_buffer(f"of {stage.ranks}", part.numel() * len(stage.ranks), part.dtype)
        self._transport.gather(part, whole, stage, group)
        self.sums = [whole]

    def wait(self) -> None:
        """Waits for the shards that `gather` receives."""
        self._transport.wait()


class BucketedReducer(GradientReducer):
    """The gradient reducer for a whole model on every worker, which sends gradients in buckets during backward.

    Args:
        model: The model; the `.grad` of its trained parameters receives the sums.
        world: The workers. If there are two or more, torch's default process group has to consist of them.
        reduction: How the gradients are added, see the docstring of the module.
        bucket_mb: Maximum size of a bucket in MiB; None for the default where the buckets are. Large buckets are sent
            late. The tree adds element by element, so the result of `exact` does not depend on this size.

    Attributes:
        buckets: The buckets in the order in which backward completes them; none for a single logical worker.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        reduction: Literal["exact", "overlapped"],
        bucket_mb: float | None = None,
    ) -> None:
        self._world = world
        self._launch_guard = launch_guard(world)
        self._exact = reduction == "exact"
        # The gradient of a single logical worker is the sum already, so it stays in `.grad` and there are no buckets.
        self._has_one_term = world.logical_workers == 1
        self._stages = list(zip(world.stages, world.groups, strict=True))
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        sizes_mb = (bucket_mb, bucket_mb) if bucket_mb else default_sizes_mb(next(model.parameters()).device, world)
        max_bytes = [int(size_mb * _MEBI) for size_mb in sizes_mb]
        buckets = [] if self._has_one_term else split_into_buckets(self._parameters, *max_bytes)
        self.buckets = [Bucket(parameters, world, number) for number, parameters in enumerate(buckets)]
        self._last_logical_worker = world.assigned[-1]
        # The hooks count gradients only during the backward of the rank's last logical worker.
        self._listening = False
        # The index of the next bucket to send. Buckets are sent in the same order on all ranks.
        self._next_bucket = 0
        device = next(model.parameters()).device
        self._executor = InlineExecutor()
        if world.has_device_collectives:
            self._executor = StreamExecutor(device)
        elif self._exact and all(bucket.is_direct for bucket in self.buckets):
            # Only `exact` has additions between its transfers, which a thread can do during backward. The thread may
            # send buckets in another order than the threads of other ranks, which direct transports allow.
            self._executor = ThreadExecutor(device)
        self._names = {p: name for name, p in model.named_parameters()}
        self._positions = {p: position for position, p in enumerate(self._parameters)}
        self._watched: set[int] = set()
        self._checksums: dict[int, list[Tensor]] = {}
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._hook(bucket))
            for bucket in self.buckets
            for p in bucket.parameters
        ]

    def _hook(self, bucket: Bucket) -> Callable[[Tensor], None]:
        """Returns the hook of a bucket's parameters, which sends the bucket when all its gradients are complete."""

        def on_gradient(p: Tensor) -> None:
            if not self._listening:
                return
            if p not in bucket.missing:
                raise partial_gradient_error(self._names[p])  # type: ignore[index]
            bucket.missing.remove(p)  # type: ignore[arg-type]
            if self._world.size > 1:
                self._launch_ready()

        return on_gradient

    def backward(self, losses: Tensor, weights: Tensor, logical_worker: int) -> None:
        """See `GradientReducer.backward`.

        The reduction starts during the backward of the rank's last logical worker.
        """
        self._begin(logical_worker)
        self._listening = logical_worker == self._last_logical_worker
        try:
            run_backward(losses, weights)
        finally:
            self._listening = False
        self._end(logical_worker)

    def collect_from(self, compute: Callable[[], T], logical_worker: int) -> T:
        """See `GradientReducer.collect_from`; the gradients of the rank's last logical worker are sent by `launch`."""
        self._begin(logical_worker)
        result = compute()
        self._end(logical_worker)
        return result

    def skip(self, logical_worker: int) -> None:
        """See `GradientReducer.skip`."""
        self.collect_from(lambda: None, logical_worker)

    def sum(self, values: dict[int, list[Tensor]]) -> list[Tensor]:
        """Returns the sum of other values than gradients over all logical workers; a collective.

        The values are added in the same way as gradients. The call has to come between two steps, because it uses the
        buckets.

        Args:
            values: For each logical worker of this rank, in their order, a tensor per trained parameter, of its shape.

        Returns:
            A tensor per trained parameter, of its shape.

        Raises:
            PeerLostError: A peer left meanwhile.
        """
        if self._has_one_term:
            [term] = values.values()
            return [value.clone() for value in term]
        self._reset()
        for bucket in self.buckets:
            for logical_worker, tensors in values.items():
                by_parameter = dict(zip(self._parameters, tensors, strict=True))
                bucket.add_leaf(logical_worker, [by_parameter[p] for p in bucket.parameters])
        if self._world.size > 1:
            with self._launch_guard():
                for bucket in self.buckets:
                    self._send(bucket)
                self._executor.drain()
        totals = {p: total for b in self.buckets for p, total in zip(b.parameters, b.totals(), strict=True)}
        return [totals[p].clone() for p in self._parameters]

    def _begin(self, logical_worker: int) -> None:
        """Clears the gradients before a logical worker, and the sums before the rank's first one."""
        if logical_worker == self._world.assigned[0]:
            self._reset()
        else:
            # The task may have left gradients of its own in `.grad`.
            for p in self._parameters:
                p.grad = None

    def _end(self, logical_worker: int) -> None:
        """Collects the gradients of a logical worker, except for the rank's last one, see `_launch_ready`."""
        if logical_worker != self._last_logical_worker:
            for bucket in self.buckets:
                if logical_worker in self._watched:
                    self._checksums[logical_worker] += self._checksums_of(bucket.parameters)
                bucket.take_gradients(logical_worker)

    def _checksums_of(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Returns the checksum of each parameter that has a gradient."""
        return [checksum(p.grad, self._positions[p]) for p in parameters if p.grad is not None]

    def watch_checksums(self, logical_workers: set[int]) -> None:
        """Sets the logical workers for which the next step computes checksums of their gradients."""
        self._watched, self._checksums = logical_workers, {v: [] for v in logical_workers}

    def checksums(self) -> dict[int, int]:
        """Returns the checksum of the gradients of each watched logical worker; waits for the device.

        It lacks logical workers without any gradient, for which the checksum is 0.
        """
        return {v: int(torch.stack(parts).sum()) for v, parts in self._checksums.items() if parts}

    @contextmanager
    def free_grads(self) -> Iterator[None]:
        """Sets every `.grad` to None inside the block, so that other gradients can be computed, and restores them."""
        grads = [p.grad for p in self._parameters]
        try:
            for p in self._parameters:
                p.grad = None
            yield
        finally:
            for p, grad in zip(self._parameters, grads, strict=True):
                p.grad = grad

    def gradient_checksum(self) -> int:
        """Returns the checksum of the gradients that are in `.grad` now; waits for the device."""
        parts = self._checksums_of(self._parameters)
        return int(torch.stack(parts).sum()) if parts else 0

    def _reset(self) -> None:
        """Prepares for a step.

        With one rank it may follow a step that failed half-way. With more ranks a reducer cannot be used again after
        such a step, because transfers may still be running.
        """
        for p in self._parameters:
            p.grad = None
        self._next_bucket = 0
        for bucket in self.buckets:
            bucket.missing = set(bucket.parameters)
            bucket.reset()

    def launch(self) -> None:
        """See `GradientReducer.launch`."""
        # A parameter without a gradient is unused, and `Bucket.take_gradients` adds zeros for it.
        for bucket in self.buckets:
            bucket.missing = set()
        self._launch_ready()

    def _launch_ready(self) -> None:
        """Collects and sends the buckets with complete gradients, up to the first bucket that lacks one."""
        while self._next_bucket < len(self.buckets) and not self.buckets[self._next_bucket].missing:
            bucket = self.buckets[self._next_bucket]
            self._next_bucket += 1
            if self._last_logical_worker in self._watched:
                self._checksums[self._last_logical_worker] += self._checksums_of(bucket.parameters)
            bucket.take_gradients(self._last_logical_worker)
            if self._world.size > 1:
                with self._launch_guard():
                    self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        """Starts reducing a bucket."""
        pipeline = self.reduce_exactly(bucket) if self._exact else self._reduce_overlapped(bucket)
        self._executor.start(pipeline, is_last=bucket is self.buckets[-1])

    def _reduce_overlapped(self, bucket: Bucket) -> Iterator[Bucket]:
        """Reduces a bucket by one all-reduce; yields after its start."""
        if bucket.copies_to_host:
            bucket.add_copied_leaf()
        # The first tensor is `bucket.result`, see `Bucket.add_leaf`.
        first, *more = [value for _, value in bucket.tree.nodes]
        for value in more:
            first.add_(value)
        work: Any = dist.all_reduce(first, async_op=True)
        yield bucket
        work.wait()

    def reduce_exactly(self, bucket: Bucket) -> Iterator[Bucket]:
        """Reduces a bucket in the tree; yields after the start of each transfer.

        It scatters and adds from the first stage to the last, and then gathers from the last stage to the first.
        """
        if bucket.copies_to_host:
            bucket.add_copied_leaf()
        bucket.sums = [value for _, value in bucket.tree.nodes]
        bucket.scatter(*self._stages[0])
        yield bucket
        last = len(self._stages) - 1
        for number, (stage, group) in enumerate(self._stages):
            bucket.add(stage, is_only=last == 0)
            if number < last:
                bucket.scatter(*self._stages[number + 1])
            else:
                bucket.gather(stage, group, is_first=number == 0)
            yield bucket
        for number in reversed(range(last)):
            bucket.wait()
            bucket.gather(*self._stages[number], is_first=number == 0)
            yield bucket
        bucket.wait()

    def finish(self) -> None:
        """See `GradientReducer.finish`."""
        if self._has_one_term:
            return
        if self._world.size > 1:
            with self._launch_guard():
                self._executor.drain()
        for bucket in self.buckets:
            totals = bucket.totals() if bucket.copies_to_host else bucket.views
            for p, total in zip(bucket.parameters, totals, strict=True):
                p.grad = total

    def gradients(self) -> list[Tensor]:
        """Returns the gradients of the parameters that have one, see `GradientReducer.gradients`."""
        return [p.grad for p in self._parameters if p.grad is not None]

    def norms(self) -> list[Tensor]:
        """Returns the norm of each of `gradients`, see `GradientReducer.norms`; needs no other rank."""
        return gradient_norms(self.gradients())

    def close(self) -> None:
        """See `GradientReducer.close`."""
        for hook in self._hooks:
            hook.remove()
        self._executor.close()
        for p in self._parameters:
            p.grad = None


def default_sizes_mb(device: torch.device, world: World) -> tuple[float, float]:
    """Returns the default sizes of the first bucket and of the others, for parameters on a device."""
    if kind_of(_memory_of_buckets(device, world)).is_host:
        return _HOST_BUCKET_MB, _HOST_BUCKET_MB
    return _FIRST_BUCKET_MB, _DEVICE_BUCKET_MB


def split_into_buckets(parameters: list[nn.Parameter], first_bytes: int, max_bytes: int) -> list[list[nn.Parameter]]:
    """Returns the parameters of each bucket, in about the order in which backward reaches them.

    A bucket has parameters of one dtype, and at most `max_bytes`, the first one at most `first_bytes`, unless it is a
    single larger parameter.
    """
    buckets: list[list[nn.Parameter]] = []
    remaining_bytes = 0
    for p in reversed(parameters):
        size = p.numel() * p.element_size()
        if not buckets or size > remaining_bytes or buckets[-1][0].dtype != p.dtype:
            remaining_bytes = max_bytes if buckets else first_bytes
            buckets.append([])
        buckets[-1].append(p)
        remaining_bytes -= size
    return buckets
