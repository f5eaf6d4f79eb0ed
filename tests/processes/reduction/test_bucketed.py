"""How gradients travel with `ddp`: the size of the buckets, compression, and the backend."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ray_app.config.sections import TrainSection
from ray_app.errors import ConfigError, PeerLostError
from ray_app.reduction.base import World, collective
from ray_app.reduction.bucketed import BucketedReducer, _split_into_buckets, build_reducer
from ray_app.testing import WorkerPool
from ray_app.train.membership import GenerationInfo
from ray_app.train.process_group import ProcessGroup, _list_sockets
from tests.support.local_world import LocalMembership, TinyImages, make_job, write_images
from tests.support.waiting import until

CPU = torch.device("cpu")
SMALL_MB = 0.001


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("ddp") / "data", [[50, 1], [46]])


def test_the_bits_of_exact_do_not_depend_on_the_size_of_the_buckets(
    pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    parameters = list(TinyImages().build_model().parameters())
    assert (
        len(_split_into_buckets(parameters, 8 << 20))
        == 1
        < len(_split_into_buckets(parameters, int(SMALL_MB * (1 << 20))))
    )
    found = [
        pool.train_new_run(
            make_job(tmp_path / "run", data, logical_workers=4, batch=12, task=TinyImages(), train__bucket_mb=mb), size
        )
        for mb, size in ((8.0, 1), (SMALL_MB, 3))
    ]
    assert found[0].digests == found[1].digests
    assert found[0].steps == found[1].steps, "also the norm of the gradients"


@dataclass(frozen=True)
class Exchanged:
    """What a rank has after an exchange.

    Args:
        gradients: The sums.
        sent_bytes: What left through its sockets meanwhile.
    """

    gradients: list[torch.Tensor]
    sent_bytes: int


def exchange(rank: int, store: Path, size: int, train: TrainSection) -> Exchanged:
    """Adds gradients of four logical workers that all ranks can make."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 500), nn.Linear(500, 200))
    inputs = torch.randn(4, 8, 200)
    with LocalMembership(World(rank, size, 4), store).generation(0, False) as (world, _):
        strategy = build_reducer(train, model, world)
        before = sent_by_this_process()
        for v in world.assigned:
            strategy.backward(model(inputs[v]).square().mean(1), torch.full((8,), 1 / 32), v)
        strategy.launch()
        strategy.finish()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        dist.barrier()  # a peer may still fetch
        return Exchanged(gradients, sent_by_this_process() - before)


def exchange_shared(rank: int, store: Path, size: int, reentrant: bool) -> list[torch.Tensor]:
    """The gradients of a layer that two checkpointed passes share."""
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
def test_gradients_that_come_in_parts_are_refused_on_any_number_of_workers(pool: WorkerPool) -> None:
    for size in (1, 2):
        for outcome in pool.call(size, exchange_shared, size, True):
            assert isinstance(outcome.error, ConfigError), outcome.trace
            assert "The gradient of the parameter 1." in str(outcome.error)
            assert "use_reentrant=False" in str(outcome.error)


@pytest.mark.rest
def test_checkpointed_and_shared_layers_are_bit_identical_on_any_workers(pool: WorkerPool) -> None:
    [alone] = pool.run(1, exchange_shared, 1, False)
    for found in pool.run(2, exchange_shared, 2, False):
        assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))


def sent_by_this_process() -> int:
    """Bytes that were sent through the TCP connections that are open: `tcpi_bytes_acked` of Linux's `struct
    tcp_info`.
    """
    total = 0
    for number, _ in _list_sockets():
        with suppress(OSError), socket.socket(fileno=socket.dup(number)) as found:
            if found.type == socket.SOCK_STREAM and found.family in (socket.AF_INET, socket.AF_INET6):
                total += struct.unpack_from("Q", found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192), 120)[0]
    return total


def test_compression_halves_what_travels_and_changes_little(pool: WorkerPool) -> None:
    plain = TrainSection(reduction="overlapped", bucket_mb=0.3)
    packed = TrainSection(reduction="overlapped", bucket_mb=0.3, gradient_compression="bf16")
    fp32, bf16 = (pool.run(2, exchange, 2, train) for train in (plain, packed))
    for ranks in (fp32, bf16):
        assert all(torch.equal(a, b) for a, b in zip(ranks[0].gradients, ranks[1].gradients, strict=True)), (
            "all ranks have the same"
        )
    numel = sum(g.numel() for g in fp32[0].gradients)
    for a, b in zip(fp32, bf16, strict=True):
        assert a.sent_bytes >= 4 * numel, "what is counted is what travels"
        assert 0.49 < b.sent_bytes / a.sent_bytes < 0.55
        for exact, rounded in zip(a.gradients, b.gradients, strict=True):
            assert rounded.dtype == torch.float32
            difference = (rounded - exact).norm() / exact.norm()
            assert 1e-5 < difference < 2**-7, "rounded to eight bits, and not more"


def group_of(rank: int, store: Path, device: str, backend: str) -> str:
    """The backend of a group of one; on a machine without GPUs."""
    del store
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroup()
    try:
        group.open(GenerationInfo(1, rank, 1, "127.0.0.1", server.port), torch.device(device), backend)  # type: ignore[arg-type]
        return dist.get_backend()
    finally:
        group.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is asked for is told by what fails without a GPU")
def test_the_backend_is_the_one_that_is_asked_for(pool: WorkerPool) -> None:
    for backend in ("auto", "nccl"):
        [outcome] = pool.call(1, group_of, "cuda:0", backend)
        assert "device_id cuda:0" in str(outcome.error)
    for device, backend in (("cpu", "auto"), ("cpu", "gloo"), ("cuda", "gloo")):
        assert pool.run(1, group_of, device, backend) == ["gloo"], (device, backend)


def formed_after_a_failure(rank: int, store: Path, port: int) -> float:
    """Forms a group of two, which rank 0 alone has failed to form before."""
    del store
    group = ProcessGroup()
    if rank == 0:
        with suppress(Exception):
            group.open(GenerationInfo(1, 0, 1, "127.0.0.1", port), torch.device("cuda", 0), "nccl")
        assert not dist.is_initialized(), "the fault did not happen"
        group.close()
    group.open(GenerationInfo(2, rank, 2, "127.0.0.1", port), CPU, "auto")
    try:
        value = torch.tensor([rank + 1.0])
        dist.all_reduce(value)
        return value.item()
    finally:
        group.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the failure is that there is no GPU")
def test_a_rank_that_failed_to_form_a_group_meets_the_others_in_the_next(pool: WorkerPool) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert pool.run(2, formed_after_a_failure, server.port) == [3.0, 3.0]


def bystanders_of_an_abort(rank: int, store: Path, port: int) -> list[bytes]:
    """What goes through other connections of a process whose group, which never gets complete, is aborted before and
    while it opens.
    """
    del store
    server = socket.create_server(("127.0.0.1", 0))

    def connection() -> tuple[socket.socket, socket.socket]:
        mine = socket.create_connection(server.getsockname())
        return mine, server.accept()[0]

    pairs = [connection()]
    group = ProcessGroup()
    group.abort()
    failed: list[BaseException] = []

    def opens() -> None:
        try:
            group.open(GenerationInfo(1, rank, 2, "127.0.0.1", port), CPU, "auto")
        except RuntimeError as error:
            failed.append(error)

    opening = threading.Thread(target=opens)
    opening.start()
    until(lambda: any(group._is_store(number) for number, _ in _list_sockets()), "it has not begun to open")
    pairs.append(connection())
    until(lambda: group.abort() or not opening.is_alive(), "the abort does not break it")
    assert isinstance(failed[0], dist.DistError), failed
    for mine, _ in pairs:
        mine.sendall(b"hello")
    return [theirs.recv(5) for _, theirs in pairs]


def test_an_abort_while_a_group_forms_breaks_nothing_else(pool: WorkerPool) -> None:
    """Other connections of a worker are Ray's."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert pool.run(1, bystanders_of_an_abort, server.port) == [[b"hello", b"hello"]]


def bystander_of_a_group(
    rank: int, store: Path, port: int, size: int, aborts: tuple[int, ...]
) -> tuple[bytes, list[str]]:
    """What goes through a connection that was made while a group opened, when that was aborted, and what its members
    but rank 0 are told.

    They wait in an exchange for rank 0. The last rank opens when the others have made their connections.
    """
    del store
    meeting, group, server = dist.TCPStore("127.0.0.1", port), ProcessGroup(), socket.create_server(("127.0.0.1", 0))
    opening = threading.Thread(target=group.open, args=(GenerationInfo(1, rank, size, "127.0.0.1", port), CPU, "auto"))
    meeting.wait([f"made-{before}" for before in range(rank)])
    opening.start()
    until(
        lambda: any(group._is_store(number) for number, _ in _list_sockets()) or not opening.is_alive(),
        "it has not begun to open",
    )
    assert group._sockets is None or rank == size - 1, "it opened without the others"
    mine = socket.create_connection(server.getsockname())
    meeting.set(f"made-{rank}", "")
    opening.join()
    said: list[str] = []

    def exchanges() -> None:
        try:
            with collective():
                dist.all_reduce(torch.ones(4))
        except PeerLostError:
            said.append("lost")

    waiting = threading.Thread(target=exchanges)
    if rank != 0:
        waiting.start()
        meeting.set(f"waits-{rank}", "")
    meeting.wait([f"waits-{other}" for other in range(1, size)])
    if rank in aborts:
        group.abort()
    if rank != 0:
        waiting.join()
        meeting.set(f"freed-{rank}", "")
    meeting.wait([f"freed-{other}" for other in range(1, size)])
    group.close()
    with suppress(BrokenPipeError):
        mine.sendall(b"hello")
    return server.accept()[0].recv(5), said


@pytest.mark.parametrize(("size", "aborts"), [(2, (0,)), (3, (0, 1, 2))], ids=["by who is missing", "by all"])
def test_an_abort_frees_those_who_wait_and_breaks_nothing_else(
    pool: WorkerPool, size: int, aborts: tuple[int, ...]
) -> None:
    """Not the connections either that came while the group formed."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    expected = [(b"hello", [] if rank == 0 else ["lost"]) for rank in range(size)]
    assert pool.run(size, bystander_of_a_group, server.port, size, aborts) == expected


@pytest.mark.parametrize("mb", [8.0, SMALL_MB, SMALL_MB / 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_gradient_is_aligned_whatever_lies_before_it(mb: float, dtype: torch.dtype) -> None:
    """What a GPU adds up of memory that is not aligned, as a norm, it adds in another order; no CPU does, so the places
    are looked at.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5), nn.Linear(5, 1)).to(dtype)
    reducer = BucketedReducer(model, World(0, 1, 3), "exact", mb, "none")
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
        torch.testing.assert_close(gradient, value, rtol=0.05, atol=0.02)  # other gradients are far away
