"""What a device's process group does, shown on a CPU, and what training makes of it."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ray_app.errors import PeerLostError, TaskError
from ray_app.reduction import group_state
from ray_app.reduction.base import World, collective, translate_peer_errors
from ray_app.runlog.journal import read_events
from ray_app.task.user_code import user_code
from ray_app.testing import KilledError, WorkerPool, cache_windows, read_trained_run
from ray_app.train import process_group
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import GenerationInfo
from ray_app.train.process_group import ProcessGroup
from tests.support.device_group import (
    BACKEND,
    BACKEND_2,
    GARBAGE,
    OUT_OF_MEMORY,
    DeviceGroup,
    DeviceGroup2,
    DiesAt,
    FailsAt,
    FullAt,
    SpinningGroup,
)
from tests.support.local_world import CPU, LocalMembership, TinyImages, make_job, write_images
from tests.support.shifting_world import train_shifting
from tests.support.waiting import until

STEP = ("all_to_all_single", "broadcast", "all_gather_single", "allreduce")
"""The exchanges of a step: of gradients, of buffers, of sums; the last is the host's, the table."""
OOM = [
    torch.OutOfMemoryError(OUT_OF_MEMORY),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    dist.DistBackendError(
        "NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error. Cuda failure 2 'out of memory'"
    ),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0"),
    RuntimeError("Expected tensor on cuda:0 but found tensor on cuda:1"),
    RuntimeError("Unsupported tensor data type for NCCL"),
    RuntimeError("NCCL AllReduce failed: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
    RuntimeError("Failed to initialize NCCL communicator: invalid usage (run with NCCL_DEBUG=WARN for details)"),
    dist.DistBackendError("NCCL error, invalid usage (run with NCCL_DEBUG=WARN for details): Duplicate GPU detected"),
]
PEERS = [
    RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4711"
    ),
    RuntimeError("Application timeout caused pair closure"),
    RuntimeError("Gloo connectFullMesh failed with [...] no error"),
    dist.DistNetworkError("The client socket has timed out after 60000ms"),
    dist.DistBackendError("NCCL communicator was aborted on rank 1"),
    dist.DistBackendError("NCCL operation failed"),
    RuntimeError("NCCL communicator was aborted after a previous error"),
    RuntimeError("NCCL Async Error: remote process exited or there was a network error"),
    RuntimeError("failed to get async error: remote process exited or there was a network error"),
    RuntimeError("NCCL operation timed out"),
    RuntimeError("ProcessGroupNCCL not initialized"),
    RuntimeError("ProcessGroupNCCL has been finalized"),
    RuntimeError("NCCL GroupEnd failed: unhandled system error (run with NCCL_DEBUG=INFO for details)"),
    RuntimeError("NCCL User Rank failed: remote process exited or there was a network error"),
    RuntimeError(
        "Failed to initialize NCCL communicator: unhandled system error (run with NCCL_DEBUG=INFO for details)"
    ),
    RuntimeError("Failed to get NCCL unique ID: internal error - please report this issue to the NCCL developers"),
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


@dataclasses.dataclass
class State:
    """A group of which this is known."""

    is_aborted: bool = False
    failed: bool = False

    def has_failed(self) -> bool:
        return self.failed


@contextmanager
def watched(state: State) -> Iterator[None]:
    """Makes a group the one of this process for a context."""
    group_state.set_group(state)
    try:
        yield
    finally:
        group_state.clear_group(state)


def refused_collective(error: Exception) -> Exception:
    """What an error becomes that a collective raises."""
    with pytest.raises((PeerLostError, type(error))) as caught, collective():
        raise error
    return caught.value


def raised(error: Exception) -> Exception:
    """What an error becomes that a task's own code raises in a generation."""
    with pytest.raises((PeerLostError, TaskError)) as caught, translate_peer_errors(), user_code(lambda: "the update"):
        raise error
    return caught.value


STRANGE = RuntimeError("words of no version that is known")


def test_whatever_a_collective_raises_after_the_backend_failed_is_a_lost_peer() -> None:
    with watched(State()):
        assert refused_collective(STRANGE) is STRANGE
    with watched(State(failed=True)):
        assert isinstance(refused_collective(STRANGE), PeerLostError)
    assert refused_collective(STRANGE) is STRANGE, "no group is watched any more"


def test_a_group_that_was_given_up_is_given_no_more_to_exchange() -> None:
    begun = []
    with watched(State(is_aborted=True)), pytest.raises(PeerLostError, match="process group is aborted"), collective():
        begun.append("a launch on a communicator that another thread aborts")
    assert not begun


@pytest.mark.parametrize("error", [STRANGE, ValueError("not in range")], ids=["RuntimeError", "ValueError"])
def test_what_user_code_raises_is_a_lost_peer_in_a_broken_group_alone(error: Exception) -> None:
    with watched(State()):
        assert isinstance(raised(error), TaskError)
    with watched(State(failed=True)):
        assert isinstance(raised(error), PeerLostError)
    with watched(State(is_aborted=True)):
        assert isinstance(raised(error), PeerLostError)


@pytest.mark.parametrize("error", PEERS, ids=lambda error: str(error)[:20])
def test_user_code_that_says_what_a_peer_would_keeps_its_words(error: RuntimeError) -> None:
    assert isinstance(raised(error), TaskError)


def exchanged_by_user_code(rank: int, store: Path) -> str:
    """What rank 0 meets in a collective of user code, as an optimizer of sharded parameters has some, when rank 1 is
    killed.
    """
    with LocalMembership(World(rank, 2, 2), store).generation(0, False):
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            with translate_peer_errors(), user_code(lambda: "the update"):
                dist.all_reduce(torch.ones(3))
        except PeerLostError as error:
            return str(error)
    return ""


@pytest.mark.rest
def test_a_lost_peer_is_one_in_a_collective_of_user_code_too(pool: WorkerPool) -> None:
    first, second = pool.call(2, exchanged_by_user_code)
    assert isinstance(second.error, KilledError)
    assert first.value.startswith("a peer was lost meanwhile: RuntimeError: "), first.trace


def test_training_has_the_bits_of_gloo(pool: WorkerPool, tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", [[20, 13]])
    for backend in ("gloo", BACKEND):
        (tmp_path / backend).mkdir()
    jobs = [
        make_job(tmp_path / name, data, logical_workers=4, batch=12, task=TinyImages(), train__epochs=1)
        for name in ("gloo", BACKEND)
    ]
    for job, backend in zip(jobs, ("gloo", BACKEND), strict=True):
        for outcome in pool.train(job, 2, Hooks(at=FullAt(9, 0)), membership=partial(LocalMembership, backend=backend)):
            assert outcome.error is None, outcome.trace
    digests = [path.read_text() for path in sorted(tmp_path.glob("*/checkpoints/*/COMMIT.json"))]
    assert len({text.split('"params_digest": "')[1][:64] for text in digests}) == 1
    assert len(digests) == 2


def test_a_device_without_memory_is_no_lost_peer(pool: WorkerPool, tmp_path: Path) -> None:
    """In the exchange of the second step: the error comes out of the loop in its own words, and at once."""
    data = write_images(tmp_path / "data", [[20, 13]])
    job = make_job(tmp_path / "run", data, logical_workers=2, batch=12, task=TinyImages())
    first, second = pool.train(job, 2, Hooks(at=FullAt(0, 5)), membership=partial(LocalMembership, backend=BACKEND))
    assert isinstance(first.error, TaskError), first.trace
    assert first.error.message.startswith("OutOfMemoryError: ")
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
        dist.group.WORLD.abort()  # type: ignore[union-attr]
    return seen


def test_a_broken_exchange_leaves_finite_garbage_and_says_so_later(pool: WorkerPool) -> None:
    first, second = pool.call(2, exchanged)
    assert isinstance(second.error, KilledError)
    assert first.value == ["garbage", "aborted", "lost on the host"], first.trace


def opened(rank: int, port: int) -> ProcessGroup:
    group = SpinningGroup()
    group.open(GenerationInfo(1, rank, 2, "127.0.0.1", port), CPU, BACKEND)  # type: ignore[arg-type]
    dist.barrier()  # nobody leaves while another still connects
    return group


@pytest.fixture
def store() -> TCPStore:
    """Where to meet."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def survived(rank: int, store: Path, port: int, heartbeat: bool) -> tuple[str, bool]:
    """What rank 0 is told of an exchange in which rank 1 is killed, and whether it is still in a group when it has
    closed it.
    """
    del store
    group = opened(rank, port)
    device: DeviceGroup = dist.group.WORLD  # type: ignore[assignment]
    assert group.check_device_errors is not None
    values = torch.ones(1000)
    dist.all_reduce(values)
    group.check_device_errors()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert dist.all_reduce(values, async_op=True).wait()
    said = ""
    if heartbeat:
        threading.Thread(target=lambda: device.waited_for.wait() and group.abort()).start()
        try:
            group.check_device_errors()
        except PeerLostError as error:
            said = str(error)
    group.close(broken=True)
    assert device.aborted.is_set()
    return said, dist.is_initialized()


@pytest.mark.parametrize(
    "heartbeat", [True, False], ids=["aborted while the device spins", "left with an error of its own"]
)
def test_a_group_whose_kernels_spin_is_aborted_before_it_is_destroyed(
    pool: WorkerPool, store: TCPStore, heartbeat: bool
) -> None:
    first, second = pool.call(2, survived, store.port, heartbeat)
    assert isinstance(second.error, KilledError)
    assert first.error is None, first.trace
    assert first.value == (
        "the process group was aborted while the device ran its collectives" if heartbeat else "",
        False,
    )


def told(rank: int, store: Path, port: int) -> None:
    """The backend has an error that no call has raised."""
    del store
    group = opened(rank, port)
    try:
        assert group.check_device_errors is not None
        group.check_device_errors()
        dist.group.WORLD.error = ErrorType.COMM_ERROR  # type: ignore[union-attr]
        with pytest.raises(PeerLostError, match="failed on the device: COMM_ERROR"):
            group.check_device_errors()
    finally:
        group.close(broken=True)


def test_an_error_that_only_the_backend_knows_is_found(pool: WorkerPool, store: TCPStore) -> None:
    pool.run(2, told, store.port)


def asked_meanwhile(rank: int, store: Path, port: int) -> list[str]:
    """What happens when an abort is ordered while the backend is asked for its error, and what the next step is
    told.
    """
    del store
    group, happened, begun = opened(rank, port), list[str](), threading.Event()
    device: DeviceGroup = dist.group.WORLD  # type: ignore[assignment]

    def abort() -> None:
        begun.set()
        happened.append("abort")
        DeviceGroup.abort(device)

    def get_error() -> ErrorType:
        group.abort()
        begun.wait(0.2)  # an abort that did not wait would begin now
        happened.append("asked")
        return ErrorType.SUCCESS

    device.abort, device.get_error = abort, get_error  # type: ignore[method-assign]
    try:
        for _ in range(2):
            assert group.check_device_errors is not None
            with pytest.raises(PeerLostError, match="was aborted while the device ran its collectives"):
                group.check_device_errors()
            begun.wait()
    finally:
        group.close(broken=True)
    return happened


def test_an_abort_waits_while_the_backend_is_asked_for_its_error(pool: WorkerPool, store: TCPStore) -> None:
    """It frees what the question reads; afterwards the backend is not asked any more."""
    assert pool.run(2, asked_meanwhile, store.port) == [["asked", "abort"]] * 2


def given_up(rank: int, store: Path, port: int) -> tuple[str, bool]:
    """The order to abort comes when the store has done its part and torch does not know the group yet."""
    del store
    group, said = SpinningGroup(), ""
    DeviceGroup.when_made = group.abort
    try:
        group.open(GenerationInfo(1, rank, 2, "127.0.0.1", port), CPU, BACKEND)  # type: ignore[arg-type]
    except PeerLostError as error:
        said = str(error)
    finally:
        DeviceGroup.when_made = None
        group.close(broken=True)
    return said, dist.is_initialized()


def test_a_group_that_is_given_up_while_it_forms_exchanges_nothing(pool: WorkerPool, store: TCPStore) -> None:
    assert pool.run(2, given_up, store.port) == [("the process group was aborted while it formed", False)] * 2


def open_given_up(group: ProcessGroup, formed: GenerationInfo) -> None:
    with pytest.raises(PeerLostError), collective():
        group.open(formed, CPU, BACKEND_2)  # type: ignore[arg-type]


def stuck(rank: int, store: Path, port: int) -> list[bool]:
    """Whether a group is stuck that waits for a peer's connection, which no time-out bounds: before, in and after the
    wait.
    """
    del store
    group, listens, seen = SpinningGroup(), socket.create_server(("127.0.0.1", 0)), list[bool]()
    DeviceGroup2.connects_to, process_group._STUCK_S = listens, 0.0

    try:
        seen.append(group.is_stuck)
        opening = threading.Thread(target=open_given_up, args=(group, GenerationInfo(1, rank, 1, "127.0.0.1", port)))
        opening.start()
        until(lambda: group._is_forming, "it has not begun to form")
        seen.append(group.is_stuck)
        group.abort()
        until(lambda: group.is_stuck, "it is not known to be stuck")
        listens.shutdown(socket.SHUT_RDWR)  # what NCCL cannot do
        opening.join()
        seen.append(group.is_stuck)
    finally:
        DeviceGroup2.connects_to, process_group._STUCK_S = None, 60.0
        group.close(broken=True)
    return seen


def test_a_group_that_waits_for_a_lost_peer_while_it_forms_is_known_to_be_stuck(
    pool: WorkerPool, store: TCPStore
) -> None:
    """What `ncclCommInitRank` does; the error that ends it here is a lost peer."""
    assert pool.run(1, stuck, store.port) == [[False, False, False]]


def launched(rank: int, store: Path, port: int) -> list[str]:
    """What happens when an abort is ordered in the middle of a launch: first the end of the launch, then the abort,
    then no launch.
    """
    del store
    group, happened = opened(rank, port), list[str]()
    device: DeviceGroup = dist.group.WORLD  # type: ignore[assignment]
    world = World(rank, 2, 2, check_device_errors=group.check_device_errors)
    abort, device.abort = device.abort, lambda: (happened.append("abort"), abort())[1]  # type: ignore[method-assign]
    try:
        with world.launch_guard():
            group.abort()
            until(lambda: bool(group._abort_threads), "nobody has begun to abort")
            happened.append("launch")
        with pytest.raises(PeerLostError, match="process group is aborted"), world.launch_guard():
            happened.append("another launch")
    finally:
        group.close(broken=True)
    return happened


def test_an_abort_comes_between_launches_and_ends_them(pool: WorkerPool, store: TCPStore) -> None:
    assert pool.run(2, launched, store.port) == [["launch", "abort"]] * 2


def blocked(rank: int, store: Path, port: int) -> list[str]:
    """What a launch that waits for a lost peer is ended by."""
    del store
    group, happened = opened(rank, port), list[str]()
    device: DeviceGroup = dist.group.WORLD  # type: ignore[assignment]
    world, process_group._LAUNCH_S = World(rank, 2, 2, check_device_errors=group.check_device_errors), 0.1
    try:
        with world.launch_guard():
            group.abort()
            device.aborted.wait()
            happened.append("abort")
    finally:
        process_group._LAUNCH_S = 2.0
        group.close(broken=True)
    return happened


def test_an_abort_does_not_wait_for_ever_for_the_end_of_a_launch(pool: WorkerPool, store: TCPStore) -> None:
    assert pool.run(2, blocked, store.port) == [["abort"]] * 2


def test_a_group_that_was_given_up_before_it_forms_does_not_form(store: TCPStore) -> None:
    """NCCL would wait for the peer that was lost."""
    group = SpinningGroup()
    group.abort()
    try:
        with pytest.raises(PeerLostError, match="before it formed"):
            group.open(GenerationInfo(1, 0, 2, "127.0.0.1", store.port), CPU, BACKEND_2)  # type: ignore[arg-type]
    finally:
        group.close(broken=True)


@pytest.fixture(scope="module")
def undisturbed(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    data = write_images(folder / "data", [[20, 13]])
    job = make_job(folder / "run", data, logical_workers=3, batch=12, task=TinyImages(), train__epochs=2)
    return job, pool.train_new_run(job, 2, cache_windows).commit.params_digest


@pytest.mark.parametrize("backend", [BACKEND, BACKEND_2])
@pytest.mark.parametrize(("exchange", "name"), list(enumerate(STEP, 1)), ids=STEP)
def test_whatever_a_lost_worker_leaves_behind_is_in_no_step(
    pool: WorkerPool, undisturbed: tuple[Job, str], tmp_path: Path, exchange: int, name: str, backend: str
) -> None:
    """It is lost at every exchange of a step in turn. What the device has of it then is garbage, and not all others
    know.
    """
    job, expected = undisturbed
    job = dataclasses.replace(job, run_root=str(tmp_path / "run"))
    proof = tmp_path / "proof"
    outcomes = train_shifting(
        pool, job, [[0, 1, 2], [0, 1]], [], Hooks(at=DiesAt(proof, 2, 2, exchange)), backend=backend
    )
    assert isinstance(outcomes[2].error, KilledError)
    assert proof.read_text() == name
    assert [each.value for each in outcomes[:2]] == ["done", "done"], [each.trace for each in outcomes[:2]]
    assert read_trained_run(job).commit.params_digest == expected
    assert not read_events(job.paths, "params_diverged"), "nobody had garbage, not for a step either"


@pytest.mark.parametrize("backend", [BACKEND, BACKEND_2])
def test_a_worker_that_is_lost_during_backward_is_met_there_by_the_others(
    pool: WorkerPool, tmp_path: Path, backend: str
) -> None:
    """With a bucket for each parameter: the error is raised in a hook of backward, by the exchange after the one that
    broke.
    """
    data = write_images(tmp_path / "data", [[20, 13]])
    job = make_job(
        tmp_path / "run", data, logical_workers=3, batch=12, task=TinyImages(), train__epochs=2, train__bucket_mb=1e-5
    )
    expected = pool.train_new_run(job, 2, cache_windows).commit.params_digest
    proof = tmp_path / "proof"
    outcomes = train_shifting(pool, job, [[0, 1, 2], [0, 1]], [], Hooks(at=DiesAt(proof, 2, 2, 2)), backend=backend)
    assert proof.read_text() == "all_to_all_single", "the second bucket"
    assert [each.value for each in outcomes[:2]] == ["done", "done"], [each.trace for each in outcomes[:2]]
    assert read_trained_run(job).commit.params_digest == expected


@pytest.mark.parametrize("backend", [BACKEND, BACKEND_2])
@pytest.mark.parametrize(("exchange", "name"), list(enumerate(STEP[:3], 1)), ids=STEP[:3])
def test_what_is_broken_on_a_device_alone_is_in_no_step(
    pool: WorkerPool, undisturbed: tuple[Job, str], tmp_path: Path, exchange: int, name: str, backend: str
) -> None:
    """The hosts lack nobody, and the garbage is finite."""
    job, expected = undisturbed
    job = dataclasses.replace(job, run_root=str(tmp_path / "run"))
    proof = tmp_path / "proof"
    outcomes = train_shifting(
        pool, job, [[0, 1, 2], [0, 1, 2]], [], Hooks(at=FailsAt(proof, 1, 2, exchange)), backend=backend
    )
    assert proof.exists(), name
    assert [each.value for each in outcomes] == ["done"] * 3, [each.trace for each in outcomes]
    assert read_trained_run(job).commit.params_digest == expected
    assert not read_events(job.paths, "params_diverged"), "nobody had garbage, not for a step either"


@pytest.mark.rest
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("strategy", "exchange"),
    [("central_storage", 1), ("central_storage", 9), *(("local_sgd", exchange) for exchange in (1, 5, 7, 8))],
)
def test_with_other_strategies_neither(
    pool: WorkerPool, tmp_path: Path, strategy: str, exchange: int, rank: int
) -> None:
    """A worker is lost after two steps; the eighth exchange of `local_sgd` is the last of an average.

    `fsdp` gathers whole parameters by functional collectives, which call no group that is made in Python.
    """
    data = write_images(tmp_path / "data", [[20, 13]])
    more = {"train__local_steps": 2} if strategy == "local_sgd" else {"train__peer_replica": True}
    fields = {"train__strategy": strategy, "train__epochs": 2, **more}
    job = make_job(tmp_path / "run", data, logical_workers=3, batch=12, task=TinyImages(), **fields)
    expected = pool.train_new_run(job, 2, cache_windows).commit.params_digest
    proof = tmp_path / "proof"
    stay = [each for each in (0, 1, 2) if each != rank]
    outcomes = train_shifting(
        pool, job, [[0, 1, 2], stay], [], Hooks(at=DiesAt(proof, rank, 2, exchange)), backend=BACKEND
    )
    assert proof.exists()
    assert isinstance(outcomes[rank].error, KilledError)
    assert [outcomes[each].value for each in stay] == ["done", "done"], [each.trace for each in outcomes]
    assert read_trained_run(job).commit.params_digest == expected
    assert not read_events(job.paths, "params_diverged")
