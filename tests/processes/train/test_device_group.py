"""The process group of a device, simulated on a CPU, and how training handles its errors."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ray_app.errors import PeerLostError, TaskError
from ray_app.reduction.peer_errors import collective, launch_guard, translate_peer_errors
from ray_app.reduction.world import World
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
    FailAtCollective,
    KillAtCollective,
    OutOfMemoryAt,
    SpinningGroup,
)
from tests.support.local_world import CPU, LocalMembership, TinyImages, make_job, write_images
from tests.support.shifting_world import train_shifting
from tests.support.waiting import wait_until

STEP_COLLECTIVES = ("all_to_all_single", "broadcast", "all_gather_single", "allreduce")
"""The collectives of a step: gradients, buffers and sums on the device, then the table of statistics on the host."""


def all_reduce_in_user_code(rank: int, store: Path) -> str:
    """Returns the error of rank 0 in a collective of user code, as of a sharded optimizer, after rank 1 is killed."""
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
def test_a_peer_lost_in_a_collective_of_user_code_is_reported_as_lost(worker_pool: WorkerPool) -> None:
    first, second = worker_pool.call(2, all_reduce_in_user_code)
    assert isinstance(second.error, KilledError)
    assert first.value.startswith("a peer was lost meanwhile: RuntimeError: "), first.trace


def test_training_on_a_device_group_is_bit_identical_to_gloo(worker_pool: WorkerPool, tmp_path: Path) -> None:
    data = write_images(tmp_path / "data", [[20, 13]])
    for backend in ("gloo", BACKEND):
        (tmp_path / backend).mkdir()
    jobs = [make_job(tmp_path / name, data, task=TinyImages(), train__epochs=1) for name in ("gloo", BACKEND)]
    for job, backend in zip(jobs, ("gloo", BACKEND), strict=True):
        for outcome in worker_pool.train(
            job, 2, Hooks(at=OutOfMemoryAt(9, 0)), membership=partial(LocalMembership, backend=backend)
        ):
            assert outcome.error is None, outcome.trace
    commits = [path.read_text() for path in sorted(tmp_path.glob("*/checkpoints/*/COMMIT.json"))]
    assert len({text.split('"params_digest": "')[1][:64] for text in commits}) == 1
    assert len(commits) == 2


@pytest.mark.parametrize("backend", [BACKEND, BACKEND_2])
def test_a_device_out_of_memory_is_not_reported_as_a_lost_peer(
    worker_pool: WorkerPool, tmp_path: Path, backend: str
) -> None:
    """The reduction of the second step runs out of memory; the loop raises the original error at once."""
    data = write_images(tmp_path / "data", [[20, 13]])
    job = make_job(tmp_path / "run", data, logical_workers=2, batch=12, task=TinyImages())
    first, second = worker_pool.train(
        job, 2, Hooks(at=OutOfMemoryAt(0, 5)), membership=partial(LocalMembership, backend=backend)
    )
    assert isinstance(first.error, TaskError), first.trace
    assert first.error.message.startswith("OutOfMemoryError: ")
    assert OUT_OF_MEMORY in str(first.error)
    assert isinstance(second.error, PeerLostError), second.trace


def all_reduce_with_a_lost_peer(rank: int, store: Path) -> list[str]:
    """Returns the results of the collectives of rank 0 after rank 1 is killed."""
    results = []
    with LocalMembership(World(rank, 2, 2), store, backend=BACKEND).generation(0, False):
        values = torch.ones(1000)
        dist.all_reduce(values)
        assert values.eq(2).all()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        assert dist.all_reduce(values, async_op=True).wait()
        results.append("garbage" if values.eq(GARBAGE).all() else "values")
        try:
            with collective():
                dist.all_reduce(values)
        except PeerLostError as error:
            results.append("aborted" if "aborted" in str(error) else str(error))
        try:
            with collective():
                dist.all_reduce(torch.ones(3, dtype=torch.int64))
        except PeerLostError:
            results.append("lost on the host")
    return results


def test_a_broken_collective_leaves_finite_garbage_and_the_next_raises(worker_pool: WorkerPool) -> None:
    first, second = worker_pool.call(2, all_reduce_with_a_lost_peer)
    assert isinstance(second.error, KilledError)
    assert first.value == ["garbage", "aborted", "lost on the host"], first.trace


def open_group(rank: int, port: int) -> ProcessGroup:
    group = SpinningGroup()
    group.open(GenerationInfo(1, rank, 2, "127.0.0.1", port), CPU, BACKEND)
    # No rank may leave while another one still connects.
    dist.barrier()
    return group


@pytest.fixture
def store() -> TCPStore:
    """The store at which the ranks of a group meet."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def close_after_a_lost_peer(rank: int, store: Path, port: int, heartbeat: bool) -> tuple[str, bool]:
    """Returns the error of rank 0 after rank 1 is killed, and whether rank 0 has a group after closing its own."""
    del store
    group = open_group(rank, port)
    device: DeviceGroup = dist.group.WORLD
    values = torch.ones(1000)
    dist.all_reduce(values)
    group.check_device_errors()
    device.is_synchronizing.clear()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(values, async_op=True)
    error_text = ""
    if heartbeat:
        threading.Thread(target=lambda: device.is_synchronizing.wait() and group.abort()).start()
        assert work.wait()
        assert values.eq(GARBAGE).all()
        try:
            group.check_device_errors()
        except PeerLostError as error:
            error_text = str(error)
    group.close(broken=True)
    assert device.aborted.is_set()
    return error_text, dist.group.WORLD is not None


@pytest.mark.parametrize(
    "heartbeat", [True, False], ids=["aborted while the device spins", "left with an error of its own"]
)
def test_a_group_with_spinning_kernels_is_aborted_before_it_is_destroyed(
    worker_pool: WorkerPool, store: TCPStore, heartbeat: bool
) -> None:
    first, second = worker_pool.call(2, close_after_a_lost_peer, store.port, heartbeat)
    assert isinstance(second.error, KilledError)
    assert first.error is None, first.trace
    assert first.value == (
        "the process group was aborted while the device ran its collectives" if heartbeat else "",
        False,
    )


def check_backend_error(rank: int, store: Path, port: int) -> None:
    """Checks a group after its backend has an error that no call has raised."""
    del store
    group = open_group(rank, port)
    try:
        group.check_device_errors()
        dist.group.WORLD.error = ErrorType.COMM_ERROR
        with pytest.raises(PeerLostError, match="failed on the device: COMM_ERROR"):
            group.check_device_errors()
    finally:
        group.close(broken=True)


def test_an_error_that_only_the_backend_reports_is_raised(worker_pool: WorkerPool, store: TCPStore) -> None:
    worker_pool.run(2, check_backend_error, store.port)


def abort_during_error_query(rank: int, store: Path, port: int) -> list[str]:
    """Returns the order of events when an abort is requested while the backend is asked for its error."""
    del store
    group = open_group(rank, port)
    events = list[str]()
    abort_started = threading.Event()
    device: DeviceGroup = dist.group.WORLD

    def abort() -> None:
        abort_started.set()
        events.append("abort")
        DeviceGroup.abort(device)

    def get_error() -> ErrorType:
        group.abort()
        # An abort that does not wait would start within this time.
        abort_started.wait(0.2)
        events.append("asked")
        return ErrorType.SUCCESS

    device.abort, device.get_error = abort, get_error
    try:
        for _ in range(2):
            with pytest.raises(PeerLostError, match="was aborted while the device ran its collectives"):
                group.check_device_errors()
            abort_started.wait()
    finally:
        group.close(broken=True)
    return events


def test_an_abort_waits_while_the_backend_is_asked_for_its_error(worker_pool: WorkerPool, store: TCPStore) -> None:
    """The abort frees memory that the query reads; after it, the backend is not asked again."""
    assert worker_pool.run(2, abort_during_error_query, store.port) == [["asked", "abort"]] * 2


def abort_while_forming(rank: int, store: Path, port: int) -> tuple[str, bool]:
    """Aborts a group before torch knows it, its store being ready; returns the error and whether a group is left."""
    del store
    group, error_text = SpinningGroup(), ""
    DeviceGroup.on_created = group.abort
    try:
        group.open(GenerationInfo(1, rank, 2, "127.0.0.1", port), CPU, BACKEND)
    except PeerLostError as error:
        error_text = str(error)
    finally:
        DeviceGroup.on_created = None
        group.close(broken=True)
    return error_text, dist.group.WORLD is not None


def test_a_group_aborted_while_it_forms_runs_no_collective(worker_pool: WorkerPool, store: TCPStore) -> None:
    assert (
        worker_pool.run(2, abort_while_forming, store.port)
        == [("the process group was aborted while it formed", False)] * 2
    )


def abort_while_a_peer_is_missing(rank: int, store: Path, port: int) -> str:
    """Returns the error of rank 0, which is aborted while it connects; rank 1 is killed before it has connected."""
    del store
    group, error_text = SpinningGroup(), ""
    connects = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            DeviceGroup, "on_connecting", connects.set if rank == 0 else lambda: os.kill(os.getpid(), signal.SIGKILL)
        )
        patch.setattr(process_group, "_FORM_TIMEOUT", timedelta(seconds=5))
        threading.Thread(target=lambda: connects.wait() and group.abort()).start()
        try:
            with collective():
                group.open(GenerationInfo(1, rank, 2, "127.0.0.1", port), CPU, BACKEND_2)
        except PeerLostError as error:
            error_text = str(error)
        assert any(thread.name == "connect" for thread in threading.enumerate()), "the abort did not end the wait"
        group.close(broken=True)
        wait_until(
            lambda: all(thread.name != "connect" for thread in threading.enumerate()),
            "a thread waits for a lost peer for ever, as NCCL does in its blocking mode",
            30.0,
        )
    return error_text


@pytest.mark.rest
def test_an_abort_ends_the_wait_for_a_peer_that_is_lost_while_it_connects(
    worker_pool: WorkerPool, store: TCPStore
) -> None:
    first, second = worker_pool.call(2, abort_while_a_peer_is_missing, store.port)
    assert isinstance(second.error, KilledError)
    assert first.value == "the process group was aborted while it formed", first.trace


def abort_groups_that_wait_for_each_other(rank: int, store: Path, port: int) -> int:
    """Returns the number of aborted groups of a rank; each abort waits until that of another group has begun."""
    del store
    group = SpinningGroup()
    info = GenerationInfo(1, rank, 4, "127.0.0.1", port, ("a", "a", "b", "b"))
    with pytest.MonkeyPatch.context() as patch:
        # An abort that holds the lock meanwhile would wait for so long.
        patch.setattr(process_group, "_LAUNCH_S", 600.0)
        group.open(info, CPU, BACKEND_2)
        dist.barrier()
        groups: list[DeviceGroup] = group.all_groups()
        for device, other in zip(groups, [*groups[1:], groups[0]], strict=True):
            device.waits_for = other
        group.abort()
        wait_until(lambda: all(device.aborted.is_set() for device in groups), "aborts wait for each other", 20.0)
        group.close(broken=True)
    return len(groups)


def test_all_groups_abort_at_the_same_time(worker_pool: WorkerPool, store: TCPStore) -> None:
    assert worker_pool.run(4, abort_groups_that_wait_for_each_other, store.port) == [3] * 4


def abort_during_a_launch(rank: int, store: Path, port: int) -> list[str]:
    """Returns the order of events when an abort is requested in the middle of a launch."""
    del store
    group, events = open_group(rank, port), list[str]()
    device: DeviceGroup = dist.group.WORLD
    world = World(rank, 2, 2, has_device_collectives=True)
    abort, device.abort = device.abort, lambda: (events.append("abort"), abort())[1]
    try:
        with launch_guard(world)():
            group.abort()
            wait_until(lambda: any(thread.name == "abort" for thread in threading.enumerate()), "no abort begins")
            events.append("launch")
        with pytest.raises(PeerLostError, match="process group is aborted"), launch_guard(world)():
            events.append("another launch")
    finally:
        group.close(broken=True)
    return events


def test_an_abort_waits_for_a_running_launch_and_refuses_the_next(worker_pool: WorkerPool, store: TCPStore) -> None:
    assert worker_pool.run(2, abort_during_a_launch, store.port) == [["launch", "abort"]] * 2


def abort_during_a_blocked_launch(rank: int, store: Path, port: int) -> list[str]:
    """Returns the event that ends a launch which waits for a lost peer."""
    del store
    group, events = open_group(rank, port), list[str]()
    device: DeviceGroup = dist.group.WORLD
    world, process_group._LAUNCH_S = World(rank, 2, 2, has_device_collectives=True), 0.1
    try:
        with launch_guard(world)():
            group.abort()
            device.aborted.wait()
            events.append("abort")
    finally:
        process_group._LAUNCH_S = 2.0
        group.close(broken=True)
    return events


def test_an_abort_waits_only_a_limited_time_for_a_launch(worker_pool: WorkerPool, store: TCPStore) -> None:
    assert worker_pool.run(2, abort_during_a_blocked_launch, store.port) == [["abort"]] * 2


def test_a_group_aborted_before_it_forms_does_not_form(store: TCPStore) -> None:
    """NCCL would wait for the lost peer."""
    group = SpinningGroup()
    group.abort()
    try:
        with pytest.raises(PeerLostError, match="before it formed"):
            group.open(GenerationInfo(1, 0, 2, "127.0.0.1", store.port), CPU, BACKEND_2)
    finally:
        group.close(broken=True)


@pytest.fixture(scope="module")
def undisturbed(worker_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    data = write_images(folder / "data", [[20, 13]])
    job = make_job(folder / "run", data, logical_workers=3, batch=12, task=TinyImages(), train__epochs=2)
    return job, worker_pool.train_new_run(job, 2, cache_windows).commit.params_digest


@pytest.mark.parametrize("backend", [BACKEND, BACKEND_2])
@pytest.mark.parametrize(("number", "name"), list(enumerate(STEP_COLLECTIVES, 1)), ids=STEP_COLLECTIVES)
def test_garbage_of_a_lost_worker_enters_no_step(
    worker_pool: WorkerPool, undisturbed: tuple[Job, str], tmp_path: Path, number: int, name: str, backend: str
) -> None:
    """The worker is lost at each collective of a step in turn; the devices then have garbage, unknown to some peers."""
    job, expected = undisturbed
    job = dataclasses.replace(job, run_root=str(tmp_path / "run"))
    proof = tmp_path / "proof"
    outcomes = train_shifting(
        worker_pool, job, [[0, 1, 2], [0, 1]], [], Hooks(at=KillAtCollective(proof, 2, 2, number)), backend=backend
    )
    assert isinstance(outcomes[2].error, KilledError)
    assert proof.read_text() == name
    assert [outcome.value for outcome in outcomes[:2]] == ["done", "done"], [outcome.trace for outcome in outcomes[:2]]
    assert read_trained_run(job).commit.params_digest == expected
    assert not read_events(job.paths, "params_diverged"), "a rank had garbage in its parameters after some step"


@pytest.mark.parametrize("backend", [BACKEND, BACKEND_2])
def test_peers_notice_a_lost_worker_during_backward(worker_pool: WorkerPool, tmp_path: Path, backend: str) -> None:
    """Each parameter has its own bucket: the collective after the broken one raises the error in a hook of backward."""
    data = write_images(tmp_path / "data", [[20, 13]])
    job = make_job(
        tmp_path / "run", data, logical_workers=3, batch=12, task=TinyImages(), train__epochs=2, train__bucket_mb=1e-5
    )
    expected = worker_pool.train_new_run(job, 2, cache_windows).commit.params_digest
    proof = tmp_path / "proof"
    outcomes = train_shifting(
        worker_pool, job, [[0, 1, 2], [0, 1]], [], Hooks(at=KillAtCollective(proof, 2, 2, 2)), backend=backend
    )
    assert proof.read_text() == "all_to_all_single", "the worker was not lost in the reduction of the second bucket"
    assert [outcome.value for outcome in outcomes[:2]] == ["done", "done"], [outcome.trace for outcome in outcomes[:2]]
    assert read_trained_run(job).commit.params_digest == expected


@pytest.mark.parametrize("backend", [BACKEND, BACKEND_2])
@pytest.mark.parametrize(("number", "name"), list(enumerate(STEP_COLLECTIVES[:3], 1)), ids=STEP_COLLECTIVES[:3])
def test_garbage_of_a_collective_that_fails_on_one_device_enters_no_step(
    worker_pool: WorkerPool, undisturbed: tuple[Job, str], tmp_path: Path, number: int, name: str, backend: str
) -> None:
    """The hosts lose no peer, and the garbage is finite."""
    job, expected = undisturbed
    job = dataclasses.replace(job, run_root=str(tmp_path / "run"))
    proof = tmp_path / "proof"
    outcomes = train_shifting(
        worker_pool, job, [[0, 1, 2], [0, 1, 2]], [], Hooks(at=FailAtCollective(proof, 1, 2, number)), backend=backend
    )
    assert proof.exists(), name
    assert [outcome.value for outcome in outcomes] == ["done"] * 3, [outcome.trace for outcome in outcomes]
    assert read_trained_run(job).commit.params_digest == expected
    assert not read_events(job.paths, "params_diverged"), "a rank had garbage in its parameters after some step"


@pytest.mark.rest
@pytest.mark.parametrize("backend", [BACKEND, BACKEND_2])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    ("strategy", "number"),
    [("central_storage", 1), ("central_storage", 9), *(("local_sgd", number) for number in (1, 5, 7, 8))],
)
def test_garbage_of_a_lost_worker_enters_no_step_of_other_strategies(
    worker_pool: WorkerPool, tmp_path: Path, strategy: str, number: int, rank: int, backend: str
) -> None:
    """A worker is lost after two steps; the eighth collective of `local_sgd` is the last one of an average.

    `fsdp` gathers whole parameters by functional collectives, which call no group that is made in Python.
    """
    data = write_images(tmp_path / "data", [[20, 13]])
    more = {"train__local_steps": 2} if strategy == "local_sgd" else {"train__peer_replica": True}
    fields = {"train__strategy": strategy, "train__epochs": 2, **more}
    job = make_job(tmp_path / "run", data, logical_workers=3, batch=12, task=TinyImages(), **fields)
    expected = worker_pool.train_new_run(job, 2, cache_windows).commit.params_digest
    proof = tmp_path / "proof"
    survivors = [survivor for survivor in (0, 1, 2) if survivor != rank]
    outcomes = train_shifting(
        worker_pool,
        job,
        [[0, 1, 2], survivors],
        [],
        Hooks(at=KillAtCollective(proof, rank, 2, number)),
        backend=backend,
    )
    assert proof.exists()
    assert isinstance(outcomes[rank].error, KilledError)
    assert [outcomes[survivor].value for survivor in survivors] == ["done", "done"], [
        outcome.trace for outcome in outcomes
    ]
    assert read_trained_run(job).commit.params_digest == expected
    assert not read_events(job.paths, "params_diverged")
