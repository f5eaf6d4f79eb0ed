"""Point-to-point transport between ranks: during backward, in any order, with late ranks, and with a lost rank."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ray_app.errors import PeerLostError
from ray_app.reduction.bucketed import BucketedReducer
from ray_app.reduction.transport import receive, start_send
from ray_app.reduction.world import World
from ray_app.testing import WorkerPool
from ray_app.train import process_group
from ray_app.train.membership import GenerationInfo
from ray_app.train.process_group import ProcessGroup
from tests.support.local_world import LocalMembership
from tests.support.waiting import wait_until

CPU = torch.device("cpu")
LAYERS, LOGICAL_WORKERS = 5, 4
TINY_MB = 1e-6
"""A bucket size that gives each parameter its own bucket."""


class Network(nn.Module):
    """Layers with a callback that runs when backward reaches the first one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(LAYERS))
        self.before_first: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if not number:
                x.register_hook(lambda g: self.before_first())
        return x


def inputs() -> Tensor:
    return torch.randn(LOGICAL_WORKERS, 6, 40, generator=torch.Generator().manual_seed(1))


def run_step(reducer: BucketedReducer, model: Network, world: World) -> None:
    """Runs a step until the end of its last backward and launches the reduction."""
    for v in world.assigned:
        reducer.backward(model(inputs()[v]).square().mean(1), torch.full((6,), 1 / 24), v)
    reducer.launch()


def gradients_on_one_worker() -> list[Tensor]:
    """Returns the gradients on one worker."""
    model, world = Network(), World(0, 1, LOGICAL_WORKERS)
    reducer = BucketedReducer(model, world, "exact", TINY_MB)
    run_step(reducer, model, world)
    reducer.finish()
    return [p.grad for p in model.parameters() if p.grad is not None]


def count_sums_during_backward(
    rank: int, store: Path, size: int, hosts: tuple[str, ...], waits: tuple[int, ...]
) -> int:
    """Returns how many sums a rank has when backward reaches the first layer; 0 for ranks that do not wait there."""
    expected = gradients_on_one_worker()
    model = Network()
    counts = list[int]()
    assert len(expected) == 2 * LAYERS
    with LocalMembership(World(rank, size, LOGICAL_WORKERS), store, hosts=hosts).generation(0, False) as (world, _):
        reducer = BucketedReducer(model, world, "exact", TINY_MB)

        def count_sums() -> int:
            views = {
                p: view for bucket in reducer.buckets for p, view in zip(bucket.parameters, bucket.views, strict=True)
            }
            return sum(torch.equal(views[p], value) for p, value in zip(model.parameters(), expected, strict=True))

        def before_first() -> None:
            if any(not bucket.missing for bucket in reducer.buckets):
                wait_until(lambda: count_sums() >= 4, "no sum arrives before the end of backward", 20)
                counts.append(count_sums())

        if rank in waits:
            model.before_first = before_first
        run_step(reducer, model, world)
        reducer.finish()
        assert all(
            torch.equal(p.grad, value)
            for p, value in zip(model.parameters(), expected, strict=True)
            if p.grad is not None
        )
        assert all(p.grad is not None for p in model.parameters())
        reducer.close()
        dist.barrier()
        return counts[0] if counts else 0


@pytest.mark.parametrize(
    ("size", "hosts", "waits"),
    [(2, (), (0, 1)), (2, (), (1,)), (3, (), (0, 1, 2)), (4, ("a", "a", "b", "b"), (0, 1, 2, 3))],
    ids=["both wait", "one waits", "uneven", "two stages"],
)
def test_sums_arrive_before_the_end_of_backward(
    worker_pool: WorkerPool, size: int, hosts: tuple[str, ...], waits: tuple[int, ...]
) -> None:
    """If only some ranks wait, the ranks reach the buckets in different orders."""
    counts = worker_pool.run(size, count_sums_during_backward, size, hosts, waits)
    assert all((count >= 4) == (rank in waits) for rank, count in enumerate(counts)), counts


def run_step_with_a_late_rank(rank: int, store: Path, size: int) -> None:
    """Runs a step that the last rank starts only after all peers have finished backward."""
    model, world = Network(), World(rank, size, LOGICAL_WORKERS)
    with LocalMembership(world, store).generation(0, False) as (world, _):
        reducer = BucketedReducer(model, world, "exact", TINY_MB)
        done = store.parent / f"{store.name}-done"
        done.mkdir(exist_ok=True)
        if rank == size - 1:
            wait_until(lambda: len(list(done.iterdir())) == size - 1, "the others wait for this rank in backward", 20)
        run_step(reducer, model, world)
        (done / str(rank)).touch()
        reducer.finish()
        reducer.close()
        dist.barrier()


def test_no_rank_waits_in_backward_for_a_late_rank(worker_pool: WorkerPool) -> None:
    """Such a wait would count as computing, so straggler and hang detection would report every rank."""
    worker_pool.run(3, run_step_with_a_late_rank, 3)


def reduce_with_empty_parameters(rank: int, store: Path, size: int) -> list[Tensor]:
    """Returns the gradients of a model with empty parameters, which have their own buckets."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for number, dtype in enumerate((torch.float64, torch.float32)):
        model.register_parameter(f"empty_{number}", nn.Parameter(torch.empty(0, dtype=dtype)))
    world = World(rank, size, 3)
    with LocalMembership(world, store).generation(0, False) as (world, _):
        reducer = BucketedReducer(model, world, "exact", TINY_MB)
        for v in world.assigned:
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(v))
            reducer.backward(model(x).square().mean(1), torch.full((2,), 1 / 6), v)
        reducer.launch()
        reducer.finish()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        reducer.close()
        if size > 1:
            dist.barrier()
        return gradients


def test_empty_parameters_are_reduced_too(worker_pool: WorkerPool) -> None:
    """One of the two ranks has two of three nodes of the reduction tree."""
    [gradients_on_one_worker] = worker_pool.run(1, reduce_with_empty_parameters, 1)
    assert len(gradients_on_one_worker) == 6
    for gradients in worker_pool.run(2, reduce_with_empty_parameters, 2):
        assert all(torch.equal(a, b) for a, b in zip(gradients_on_one_worker, gradients, strict=True))


def test_buckets_are_freed_without_the_garbage_collector() -> None:
    reducer = BucketedReducer(Network(), World(0, 1, LOGICAL_WORKERS), "exact", TINY_MB)
    references = [weakref.ref(bucket) for bucket in reducer.buckets]
    reducer.close()
    gc.disable()
    try:
        del reducer
        assert [reference() for reference in references] == [None] * 2 * LAYERS
    finally:
        gc.enable()


def read_error_of_a_lost_rank(rank: int, store: Path, port: int) -> list[str]:
    """Returns the error of rank 0, which waits in a thread for rank 1; rank 1 aborts its group."""
    del store
    group, model = ProcessGroup(), Network()
    sync_store = TCPStore("127.0.0.1", port)
    group.open(GenerationInfo(1, rank, 2, "127.0.0.1", port), CPU, "auto")
    if rank == 1:
        sync_store.wait(["waits"])
        group.abort()
        group.close(broken=True)
        return []

    def thread_waits() -> bool:
        return any(thread.name.startswith("reduction") for thread in threading.enumerate())

    reducer = BucketedReducer(model, World(rank, 2, LOGICAL_WORKERS), "exact", TINY_MB)

    def before_first() -> None:
        if any(not bucket.missing for bucket in reducer.buckets):
            wait_until(thread_waits, "the reduction thread does not wait")
            sync_store.set("waits", "")

    model.before_first = before_first

    def step() -> None:
        run_step(reducer, model, World(rank, 2, LOGICAL_WORKERS))
        reducer.finish()

    with pytest.raises(PeerLostError) as caught:
        step()
    reducer.close()
    group.close(broken=True)
    wait_until(
        lambda: not any(thread.name.startswith("reduction") for thread in threading.enumerate()),
        "the reduction thread is still alive",
    )
    return [str(caught.value)]


def test_a_thread_that_waits_for_a_lost_rank_raises_and_ends(worker_pool: WorkerPool) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    [message], no_messages = worker_pool.run(2, read_error_of_a_lost_rank, server.port)
    assert "a collective failed" in message
    assert no_messages == []


def wait_for_a_late_rank(rank: int, store: Path, port: int) -> float:
    """Receives from a rank that is later than the timeout for forming a group."""
    del store
    group, value = ProcessGroup(), torch.tensor([rank + 1.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "_FORM_TIMEOUT", timedelta(seconds=2))
        group.open(GenerationInfo(1, rank, 2, "127.0.0.1", port), CPU, "auto")
    try:
        if rank == 1:
            began_s = time.monotonic()
            wait_until(lambda: time.monotonic() > began_s + 3)
            start_send(value, 0).wait()
        else:
            receive(value, 1)
        return value.item()
    finally:
        group.close()


@pytest.mark.rest
def test_a_receive_waits_longer_than_the_timeout_for_forming_a_group(worker_pool: WorkerPool) -> None:
    """PyTorch's own receive fails with "Timed out waiting 2000ms for recv operation to complete"."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert worker_pool.run(2, wait_for_a_late_rank, server.port) == [2.0, 2.0]
