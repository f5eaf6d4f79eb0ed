"""The gradient reduction of `ddp`: bucket size, backend and aborts."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.utils.checkpoint import checkpoint

from ray_app.config.sections import TrainSection
from ray_app.errors import ConfigError, PeerLostError
from ray_app.reduction.bucketed import BucketedReducer, split_into_buckets
from ray_app.reduction.peer_errors import collective
from ray_app.reduction.world import World
from ray_app.testing import WorkerPool
from ray_app.train.build import build_reducer
from ray_app.train.membership import GenerationInfo
from ray_app.train.process_group import ProcessGroup
from tests.support.local_world import LocalMembership, TinyImages, has_begun_to_open, make_job
from tests.support.waiting import wait_until

CPU = torch.device("cpu")
SMALL_MB = 0.001


def test_exact_reduction_is_bit_identical_for_all_bucket_sizes(
    worker_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    parameters = list(TinyImages().build_model().parameters())
    assert len(split_into_buckets(parameters, 8 << 20, 8 << 20)) == 1
    assert len(split_into_buckets(parameters, *[int(SMALL_MB * (1 << 20))] * 2)) > 1
    runs = [
        worker_pool.train_new_run(make_job(tmp_path / "run", data, task=TinyImages(), train__bucket_mb=mb), size)
        for mb, size in ((8.0, 1), (SMALL_MB, 3))
    ]
    assert runs[0].digests == runs[1].digests
    assert runs[0].steps == runs[1].steps, "the records differ, for example the gradient norm"


def reduce_shared_layer(rank: int, store: Path, size: int, reentrant: bool) -> list[torch.Tensor]:
    """Returns the gradients of a model with a layer that two checkpointed passes share."""
    torch.manual_seed(0)
    first, shared = nn.Linear(6, 6), nn.Linear(6, 6)
    model, inputs = nn.Sequential(first, shared), torch.randn(4, 8, 6)
    with LocalMembership(World(rank, size, 4), store).generation(0, False) as (world, _):
        reducer = build_reducer(TrainSection(bucket_mb=SMALL_MB / 10), model, world)
        for v in world.assigned:
            x = first(inputs[v])
            for _ in range(2):
                x = checkpoint(lambda x: shared(x).tanh(), x, use_reentrant=reentrant)
            reducer.backward(x.square().mean(1), torch.full((8,), 1 / 32), v)
        reducer.launch()
        reducer.finish()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if size > 1:
            dist.barrier()
        return gradients


@pytest.mark.rest
def test_gradients_that_arrive_in_parts_are_refused_on_any_number_of_workers(worker_pool: WorkerPool) -> None:
    for size in (1, 2):
        for outcome in worker_pool.call(size, reduce_shared_layer, size, True):
            assert isinstance(outcome.error, ConfigError), outcome.trace
            assert "The gradient of the parameter 1." in str(outcome.error)
            assert "use_reentrant=False" in str(outcome.error)


@pytest.mark.rest
def test_checkpointed_and_shared_layers_are_bit_identical_on_any_workers(worker_pool: WorkerPool) -> None:
    [alone] = worker_pool.run(1, reduce_shared_layer, 1, False)
    for gradients in worker_pool.run(2, reduce_shared_layer, 2, False):
        assert all(torch.equal(a, b) for a, b in zip(alone, gradients, strict=True))


def open_single_group(rank: int, store: Path, device: str, backend: str) -> str:
    """Opens a group of one rank and returns its backend."""
    del store
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroup()
    try:
        group.open(GenerationInfo(1, rank, 1, "127.0.0.1", server.port), torch.device(device), backend)
        return dist.get_backend()
    finally:
        group.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error without a GPU shows the requested backend")
def test_the_group_has_the_configured_backend(worker_pool: WorkerPool) -> None:
    [outcome] = worker_pool.call(1, open_single_group, "cuda:0", "auto")
    assert "device_id cuda:0" in str(outcome.error)
    for device, backend in (("cpu", "auto"), ("cpu", "gloo"), ("cuda", "gloo")):
        assert worker_pool.run(1, open_single_group, device, backend) == ["gloo"], (device, backend)


def form_after_a_failure(rank: int, store: Path, port: int) -> float:
    """Forms a group of two after rank 0 alone has failed to form one."""
    del store
    group = ProcessGroup()
    if rank == 0:
        with suppress(Exception):
            group.open(GenerationInfo(1, 0, 1, "127.0.0.1", port), torch.device("cuda", 0), "auto")
        assert dist.group.WORLD is None, "the fault did not happen"
        group.close()
    group.open(GenerationInfo(2, rank, 2, "127.0.0.1", port), CPU, "auto")
    try:
        value = torch.tensor([rank + 1.0])
        dist.all_reduce(value)
        return value.item()
    finally:
        group.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the failure is that there is no GPU")
def test_a_rank_that_failed_to_form_a_group_joins_the_next_one(worker_pool: WorkerPool) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert worker_pool.run(2, form_after_a_failure, server.port) == [3.0, 3.0]


def read_connections_after_an_abort(rank: int, store: Path, port: int) -> list[bytes]:
    """Aborts an incomplete group before and while it opens; returns the data of other connections of the process."""
    del store
    server = socket.create_server(("127.0.0.1", 0))

    def connect_pair() -> tuple[socket.socket, socket.socket]:
        client = socket.create_connection(server.getsockname())
        return client, server.accept()[0]

    pairs = [connect_pair()]
    group = ProcessGroup()
    group.abort()
    errors: list[BaseException] = []

    def open_group() -> None:
        try:
            group.open(GenerationInfo(1, rank, 2, "127.0.0.1", port), CPU, "auto")
        except RuntimeError as error:
            errors.append(error)

    opening = threading.Thread(target=open_group)
    opening.start()
    wait_until(lambda: has_begun_to_open(group), "it has not begun to open")
    pairs.append(connect_pair())
    wait_until(lambda: group.abort() or not opening.is_alive(), "the abort does not end the opening")
    assert isinstance(errors[0], dist.DistError), errors
    for client, _ in pairs:
        client.sendall(b"hello")
    return [accepted.recv(5) for _, accepted in pairs]


def test_an_abort_while_a_group_forms_keeps_other_connections_open(worker_pool: WorkerPool) -> None:
    """The other connections of a worker belong to Ray."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert worker_pool.run(1, read_connections_after_an_abort, server.port) == [[b"hello", b"hello"]]


def read_connection_beside_a_group(
    rank: int, store: Path, port: int, size: int, aborts: tuple[int, ...]
) -> tuple[bytes, list[str]]:
    """Returns the data of a connection that opens while a group opens, and the errors of a collective of this rank.

    All ranks but rank 0 wait for rank 0 in a collective. The last rank opens the group after its peers have connected.
    """
    del store
    sync_store = TCPStore("127.0.0.1", port)
    group = ProcessGroup()
    server = socket.create_server(("127.0.0.1", 0))
    opening = threading.Thread(target=group.open, args=(GenerationInfo(1, rank, size, "127.0.0.1", port), CPU, "auto"))
    sync_store.wait([f"made-{before}" for before in range(rank)])
    opening.start()
    wait_until(lambda: has_begun_to_open(group) or not opening.is_alive(), "it has not begun to open")
    assert opening.is_alive() or rank == size - 1, "the group opened without its peers"
    client = socket.create_connection(server.getsockname())
    sync_store.set(f"made-{rank}", "")
    opening.join()
    results: list[str] = []

    def run_collective() -> None:
        try:
            with collective():
                dist.all_reduce(torch.ones(4))
        except PeerLostError:
            results.append("lost")

    collective_thread = threading.Thread(target=run_collective)
    if rank != 0:
        collective_thread.start()
        sync_store.set(f"waits-{rank}", "")
    sync_store.wait([f"waits-{other}" for other in range(1, size)])
    if rank in aborts:
        group.abort()
    if rank != 0:
        collective_thread.join()
        sync_store.set(f"freed-{rank}", "")
    sync_store.wait([f"freed-{other}" for other in range(1, size)])
    group.close()
    with suppress(BrokenPipeError):
        client.sendall(b"hello")
    return server.accept()[0].recv(5), results


@pytest.mark.parametrize(("size", "aborts"), [(2, (0,)), (3, (0, 1, 2))], ids=["by the missing rank", "by all ranks"])
def test_an_abort_frees_waiting_ranks_and_keeps_other_connections_open(
    worker_pool: WorkerPool, size: int, aborts: tuple[int, ...]
) -> None:
    """Connections that open while the group forms stay open as well."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    expected = [(b"hello", [] if rank == 0 else ["lost"]) for rank in range(size)]
    assert worker_pool.run(size, read_connection_beside_a_group, server.port, size, aborts) == expected


@pytest.mark.parametrize("mb", [8.0, SMALL_MB, SMALL_MB / 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_each_gradient_in_a_bucket_is_aligned(mb: float, dtype: torch.dtype) -> None:
    """A GPU adds unaligned memory in another order, as in a norm; a CPU does not, so the test checks addresses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5), nn.Linear(5, 1)).to(dtype)
    reducer = BucketedReducer(model, World(0, 1, 3), "exact", mb)
    x = torch.arange(6, dtype=dtype).view(2, 3)
    for v in range(3):
        reducer.backward(model(x + v).squeeze(1), torch.full((2,), 0.5, dtype=dtype), v)
    reducer.launch()
    reducer.finish()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == 6
    assert [g.data_ptr() % 64 for g in gradients] == [0] * 6
    expected = torch.autograd.grad(torch.stack([model(x + v).mean() for v in range(3)]).sum(), list(model.parameters()))
    for gradient, value in zip(gradients, expected, strict=True):
        # The gradients of other parameters differ by more than this tolerance.
        torch.testing.assert_close(gradient, value, rtol=0.05, atol=0.02)
