"""What ranks send each other directly: beside backward, in whatever order, however late one of them is, and until one
of them is lost.
"""

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
from ray_app.reduction.base import World
from ray_app.reduction.bucketed import BucketedReducer
from ray_app.reduction.transport import receive, send
from ray_app.testing import WorkerPool
from ray_app.train import process_group
from ray_app.train.membership import GenerationInfo
from ray_app.train.process_group import ProcessGroup
from tests.support.local_world import LocalMembership
from tests.support.waiting import until

CPU = torch.device("cpu")
LAYERS, LOGICAL_WORKERS = 5, 4
EACH_MB = 1e-6
"""A bucket for every parameter."""


class Network(nn.Module):
    """Layers, and what is done when backward comes to the first one."""

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


def begin(reducer: BucketedReducer, model: Network, world: World) -> None:
    """A step until its last backward is done."""
    for v in world.assigned:
        reducer.backward(model(inputs()[v]).square().mean(1), torch.full((6,), 1 / 24), v)
    reducer.launch()


def alone() -> list[Tensor]:
    """The gradients on one worker."""
    model, world = Network(), World(0, 1, LOGICAL_WORKERS)
    reducer = BucketedReducer(model, world, "exact", EACH_MB, "none")
    begin(reducer, model, world)
    reducer.finish()
    return [p.grad for p in model.parameters() if p.grad is not None]


def gathered_beside(rank: int, store: Path, size: int, hosts: tuple[str, ...], waits: tuple[int, ...]) -> int:
    """How many parameters had their sums before backward came to the first layer, on ranks that wait for them there."""
    expected, model, found = alone(), Network(), list[int]()
    assert len(expected) == 2 * LAYERS
    with LocalMembership(World(rank, size, LOGICAL_WORKERS), store, hosts=hosts).generation(0, False) as (world, _):
        reducer = BucketedReducer(model, world, "exact", EACH_MB, "none")

        def there() -> int:
            views = {
                p: view for bucket in reducer._buckets for p, view in zip(bucket.parameters, bucket.views, strict=True)
            }
            return sum(torch.equal(views[p], value) for p, value in zip(model.parameters(), expected, strict=True))

        def before_first() -> None:
            if reducer._listening:
                until(lambda: there() >= 4, "no sum is there before the end of backward", 20)
                found.append(there())

        if rank in waits:
            model.before_first = before_first
        begin(reducer, model, world)
        reducer.finish()
        assert all(
            torch.equal(p.grad, value)
            for p, value in zip(model.parameters(), expected, strict=True)
            if p.grad is not None
        )
        assert all(p.grad is not None for p in model.parameters())
        reducer.close()
        dist.barrier()
        return found[0] if found else 0


@pytest.mark.parametrize(
    ("size", "hosts", "waits"),
    [(2, (), (0, 1)), (2, (), (1,)), (3, (), (0, 1, 2)), (4, ("a", "a", "b", "b"), (0, 1, 2, 3))],
    ids=["both wait", "one waits", "uneven", "two stages"],
)
def test_sums_are_there_while_backward_is_not_done(
    pool: WorkerPool, size: int, hosts: tuple[str, ...], waits: tuple[int, ...]
) -> None:
    """So the ranks come to the buckets in different orders, where not all of them wait."""
    found = pool.run(size, gathered_beside, size, hosts, waits)
    assert all((number >= 4) == (rank in waits) for rank, number in enumerate(found)), found


def late_in_forward(rank: int, store: Path, size: int) -> None:
    """A step, of which the last rank begins its part when all others are done with backward."""
    model, world = Network(), World(rank, size, LOGICAL_WORKERS)
    with LocalMembership(world, store).generation(0, False) as (world, _):
        reducer = BucketedReducer(model, world, "exact", EACH_MB, "none")
        done = store.parent / f"{store.name}-done"
        done.mkdir(exist_ok=True)
        if rank == size - 1:
            until(lambda: len(list(done.iterdir())) == size - 1, "the others wait for this rank in backward", 20)
        begin(reducer, model, world)
        (done / str(rank)).touch()
        reducer.finish()
        reducer.close()
        dist.barrier()


def test_nobody_waits_in_backward_for_a_rank_that_is_late(pool: WorkerPool) -> None:
    """It would count as computing: whoever looks for the rank that holds up all, or hangs, would find every one."""
    pool.run(3, late_in_forward, 3)


def empty_among_them(rank: int, store: Path, size: int) -> list[Tensor]:
    """Gradients of a model that has parameters of no size, in buckets of their own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for number, dtype in enumerate((torch.float64, torch.float32)):
        model.register_parameter(f"empty_{number}", nn.Parameter(torch.empty(0, dtype=dtype)))
    world = World(rank, size, 3)
    with LocalMembership(world, store).generation(0, False) as (world, _):
        reducer = BucketedReducer(model, world, "exact", EACH_MB, "none")
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


def test_parameters_of_no_size_travel_too(pool: WorkerPool) -> None:
    """Also from a rank that holds two nodes of the tree, as one of two does of three."""
    [alone] = pool.run(1, empty_among_them, 1)
    assert len(alone) == 6
    for found in pool.run(2, empty_among_them, 2):
        assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))


def test_what_a_bucket_held_is_free_without_the_garbage_collector() -> None:
    reducer = BucketedReducer(Network(), World(0, 1, LOGICAL_WORKERS), "exact", EACH_MB, "none")
    held = [weakref.ref(bucket) for bucket in reducer._buckets]
    reducer.close()
    gc.disable()
    try:
        del reducer
        assert [ref() for ref in held] == [None] * 2 * LAYERS
    finally:
        gc.enable()


def lost_beside(rank: int, store: Path, port: int) -> list[str]:
    """What rank 0 is told, whose thread waits for a rank that is given up; and the threads that are left of it."""
    del store
    group, model = ProcessGroup(), Network()
    meeting = TCPStore("127.0.0.1", port)
    group.open(GenerationInfo(1, rank, 2, "127.0.0.1", port), CPU, "auto")
    if rank == 1:
        meeting.wait(["waits"])
        group.abort()
        group.close(broken=True)
        return []

    def thread_waits() -> bool:
        return (
            any(thread.name.startswith("reduction") for thread in threading.enumerate()) and reducer._thread is not None
        )

    reducer = BucketedReducer(model, World(rank, 2, LOGICAL_WORKERS), "exact", EACH_MB, "none")

    def before_first() -> None:
        if reducer._listening:
            until(thread_waits, "no thread waits")
            meeting.set("waits", "")

    model.before_first = before_first

    def step() -> None:
        begin(reducer, model, World(rank, 2, LOGICAL_WORKERS))
        reducer.finish()

    with pytest.raises(PeerLostError) as told:
        step()
    reducer.close()
    group.close(broken=True)
    until(
        lambda: not any(thread.name.startswith("reduction") for thread in threading.enumerate()), "the thread is left"
    )
    return [str(told.value)]


def test_who_waits_for_a_lost_rank_in_a_thread_is_told_and_leaves_no_thread(pool: WorkerPool) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    [said], none = pool.run(2, lost_beside, server.port)
    assert "a collective failed" in said
    assert none == []


def late(rank: int, store: Path, port: int) -> float:
    """Waits for a rank that is later than a group may take to form."""
    del store
    group, value = ProcessGroup(), torch.tensor([rank + 1.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_group, "_FORM_TIMEOUT", timedelta(seconds=2))
        group.open(GenerationInfo(1, rank, 2, "127.0.0.1", port), CPU, "auto")
    try:
        if rank == 1:
            began_s = time.monotonic()
            until(lambda: time.monotonic() > began_s + 3)
            send(value, 0)
        else:
            receive(value, 1)
        return value.item()
    finally:
        group.close()


def test_a_rank_that_is_later_than_a_group_may_form_is_waited_for(pool: WorkerPool) -> None:
    """PyTorch's own receive gives up: "Timed out waiting 2000ms for recv operation to complete"."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert pool.run(2, late, server.port) == [2.0, 2.0]
