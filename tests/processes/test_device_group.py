"""What a device's process group does, shown on a CPU, and what training makes of it."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ray_app.errors import PeerLostError, TaskError
from ray_app.exchange.exchange import World, collective
from ray_app.train.hooks import Hooks
from ray_app.train.job import Job
from tests.support.device_group import BACKEND, GARBAGE, OUT_OF_MEMORY, DiesAt, FullAt
from tests.support.local_world import KilledError, LocalMembership, Pool, TinyImages, cached, make_job, result_of, write_images
from tests.support.shifting_world import train_shifting

OOM = [
    torch.OutOfMemoryError(OUT_OF_MEMORY),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error. Cuda failure 2 'out of memory'"),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0"),
]
PEERS = [
    RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4711"),
    RuntimeError("Application timeout caused pair closure"),
    RuntimeError("Gloo connectFullMesh failed with [...] no error"),
    dist.DistNetworkError("The client socket has timed out after 60000ms"),
    dist.DistBackendError("NCCL communicator was aborted on rank 1"),
]


@pytest.mark.parametrize("error", OOM, ids=lambda error: str(error)[:20])
def test_what_is_no_matter_of_lost_peers_keeps_its_words(error: RuntimeError) -> None:
    with pytest.raises(RuntimeError) as caught, collective():
        raise error
    assert caught.value is error


@pytest.mark.parametrize("error", PEERS, ids=lambda error: str(error)[:20])
def test_what_a_peer_is_to_blame_for_is_a_lost_peer(error: RuntimeError) -> None:
    with pytest.raises(PeerLostError, match="a collective failed"), collective():
        raise error


def test_training_has_the_bits_of_gloo(pool: Pool, tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", [[20, 13]])
    for backend in ("gloo", BACKEND):
        (tmp_path / backend).mkdir()
    jobs = [make_job(tmp_path / name, data, logical_workers=4, batch=12, task=TinyImages(), train__epochs=1) for name in ("gloo", BACKEND)]
    for job, backend in zip(jobs, ("gloo", BACKEND), strict=True):
        for outcome in pool.train(job, 2, Hooks(at=FullAt(9, 0)), backend=backend):
            assert outcome.error is None, outcome.trace
    digests = [path.read_text() for path in sorted(tmp_path.glob("*/checkpoints/*/COMMIT.json"))]
    assert len({text.split('"params_digest": "')[1][:64] for text in digests}) == 1
    assert len(digests) == 2


def test_a_device_without_memory_is_no_lost_peer(pool: Pool, tmp_path: Path) -> None:
    """In the exchange of the second step: the error comes out of the loop in its own words, and at once."""
    data = write_images(tmp_path / "data", [[20, 13]])
    job = make_job(tmp_path / "run", data, logical_workers=2, batch=12, task=TinyImages())
    first, second = pool.train(job, 2, Hooks(at=FullAt(0, 3)), backend=BACKEND)
    assert isinstance(first.error, TaskError), first.trace
    assert first.error.said.startswith("OutOfMemoryError: ")
    assert OUT_OF_MEMORY in str(first.error)
    assert isinstance(second.error, PeerLostError), second.trace


def exchanged(rank: int, store: Path) -> list[str]:
    """What rank 0 sees of an exchange in which rank 1 is killed."""
    seen = []
    with LocalMembership(World(rank, 2, 2), store, backend=BACKEND).generation(0, False):
        values = torch.ones(1000)
        dist.all_reduce(values)
        assert values.eq(2).all()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        assert dist.all_reduce(values, async_op=True).wait()
        seen.append("garbage" if values.eq(GARBAGE).all() else "values")
        try:
            with collective():
                dist.all_reduce(values)
        except PeerLostError as error:
            seen.append("aborted" if "was aborted" in str(error) else str(error))
        try:
            with collective():
                dist.all_reduce(torch.ones(3, dtype=torch.int64))
        except PeerLostError:
            seen.append("lost on the host")
    return seen


def test_a_broken_exchange_leaves_finite_garbage_and_says_so_later(pool: Pool) -> None:
    first, second = pool.outcomes(2, exchanged)
    assert isinstance(second.error, KilledError)
    assert first.value == ["garbage", "aborted", "lost on the host"], first.trace


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    data = write_images(folder / "data", [[20, 13]])
    job = make_job(folder / "run", data, logical_workers=3, batch=12, task=TinyImages(), train__epochs=2)
    return job, pool.trained(job, 2, cached).commit.params_digest


@pytest.mark.parametrize("exchange", [1, 2])
def test_whatever_a_lost_worker_leaves_behind_is_in_no_step(
    pool: Pool, undisturbed: tuple[Job, str], tmp_path: Path, exchange: int
) -> None:
    """It is lost at every exchange of a step in turn, also after its line of the table went out: then only the device has garbage."""
    job, expected = undisturbed
    job = dataclasses.replace(job, run_root=str(tmp_path / "run"))
    proof = tmp_path / "proof"
    outcomes = train_shifting(pool, job, [[0, 1, 2], [0, 1]], [], Hooks(at=DiesAt(proof, 2, 2, exchange)), backend=BACKEND)
    assert isinstance(outcomes[2].error, KilledError)
    assert proof.exists()
    assert [each.value for each in outcomes[:2]] == ["done", "done"], [each.trace for each in outcomes[:2]]
    assert result_of(job).commit.params_digest == expected
