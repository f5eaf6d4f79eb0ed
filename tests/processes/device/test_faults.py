"""Devices that fail for good, memory that a process group needs, and page-locked memory, on simulated devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_app.checkpoint.store import CheckpointStore
from ray_app.errors import DeviceFaultError, PeerLostError, TaskError
from ray_app.runlog.journal import read_events
from ray_app.task.environment import device_label
from ray_app.task.user_code import user_code
from ray_app.testing import KilledError, WorkerPool, read_trained_run
from ray_app.train.job import Hooks
from tests.device.strategies import strategy_job
from tests.device.training import check_races, device_run, train_on_devices
from tests.support.injector import KillBeforeCommit

ECC = "uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("failure", "error", "expected"),
    [
        (ECC, None, DeviceFaultError),
        # A collective of NCCL passes the error of the device on.
        (ECC, RuntimeError("NCCL AllReduce failed: unhandled cuda error"), DeviceFaultError),
        (ECC, KeyError("label"), TaskError),
        ("device-side assert triggered", None, TaskError),
        (None, RuntimeError("CUDA error: invalid configuration argument"), TaskError),
        (None, torch.OutOfMemoryError("CUDA out of memory."), TaskError),
    ],
)
def test_an_error_of_a_device_that_has_failed_does_not_blame_user_code(
    device_pool: WorkerPool, failure: str | None, error: Exception | None, expected: type[Exception]
) -> None:
    [outcome] = device_pool.call(1, fail_in_user_code, failure, error)
    assert type(outcome.error) is expected, outcome.trace
    if isinstance(outcome.error, DeviceFaultError):
        first, rest = str(outcome.error).split("\n")
        assert (first, outcome.error.device) == (f"CUDA error (simulated): {ECC}", "sim simulated, uuid-of-0")
        assert rest.startswith(f"The device sim simulated, uuid-of-0 of {outcome.error.node} no longer computes")


def fail_in_user_code(rank: int, store: Path, failure: str | None, error: Exception | None) -> None:
    from tests.device.sim import DEVICE, SIM

    values = torch.ones(3, device=DEVICE)
    if failure is not None:
        SIM.fail_device(0, failure)
    with user_code(lambda: "a forward"):
        if error is not None:
            raise error
        values.sum().item()


@dataclass(frozen=True)
class LosePeer:
    """A hook with which a rank seems to lose a peer in a step, because its own device has failed."""

    rank: int
    step: int

    def __call__(self, phase: str, rank: int, step: int) -> None:
        from tests.device.sim import SIM

        if (phase, rank, step) == ("reduction", self.rank, self.step):
            SIM.fail_device(torch.accelerator.current_device_index(), ECC)
            raise PeerLostError("a collective failed on the device: COMM_ERROR")


@pytest.mark.rest
def test_a_worker_whose_device_has_failed_does_not_join_the_next_generation(
    device_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    job = strategy_job(tmp_path / "run", data, 0.3)
    expected = device_run(device_pool, job, 1)
    *others, failed = train_on_devices(device_pool, job, [[0, 1, 2], [0, 1]], hooks=Hooks(at=LosePeer(2, 4)))
    assert isinstance(failed.error, torch.AcceleratorError), failed.trace
    assert ECC in str(failed.error)
    check_races(others)
    assert read_trained_run(job).digests == expected.digests


_LIMIT, _GROUP_BYTES = 64 << 20, 8 << 20


@dataclass(frozen=True)
class FillCache:
    """A hook that limits the memory of a device, and leaves all of it in the cache of torch after a step."""

    step: int

    def __call__(self, rank: int, step: int) -> None:
        from tests.device.sim import SIM

        if step == self.step:
            device = torch.accelerator.current_device_index()
            SIM.set_limit(_LIMIT)
            torch.empty(torch.accelerator.get_memory_info(device)[0] - 4096, dtype=torch.uint8, device=f"sim:{device}")


def test_the_cache_is_empty_when_a_process_group_takes_memory_of_the_device(
    device_pool: WorkerPool, data: Path, tmp_path: Path
) -> None:
    """The worker that trained alone needs no group; the buffers of the group of two are not the allocator's."""
    job = strategy_job(tmp_path / "run", data, 0.3)
    expected = device_run(device_pool, job, 1)
    device_pool.run(2, use_memory_in_groups, True)
    try:
        check_races(train_on_devices(device_pool, job, [[0], [0, 1]], (5,), Hooks(after_step=FillCache(4))))
    finally:
        device_pool.call(2, use_memory_in_groups, False)
    assert read_trained_run(job).digests == expected.digests
    [event, *_] = read_events(job.paths, "device_memory")
    assert (event.details["step"], event.details["device"]) == (1, "sim simulated, uuid-of-0")
    assert 0 < event.details["gb"] <= event.details["of_gb"] == 4.3


def use_memory_in_groups(rank: int, store: Path, begins: bool) -> None:
    """Lets process groups of simulated devices take memory of the device, as NCCL does, or ends that."""
    from tests.device.sim import SIM, SimulatedGroup

    if not begins:
        SIM.set_limit(4 << 30)
        for name in ("__init__", "shutdown"):
            setattr(SimulatedGroup, name, _originals[name])
        return
    _originals.update({name: getattr(SimulatedGroup, name) for name in ("__init__", "shutdown")})

    def open_group(group: Any, *arguments: Any) -> None:
        SIM.take_memory(rank, _GROUP_BYTES)
        _originals["__init__"](group, *arguments)

    def close_group(group: Any) -> None:
        SIM.take_memory(rank, -_GROUP_BYTES)
        _originals["shutdown"](group)

    SimulatedGroup.__init__ = open_group
    SimulatedGroup.shutdown = close_group


_originals: dict[str, Any] = {}


@dataclass(frozen=True)
class NoteLockedMemory:
    """A hook that writes the bytes of page-locked memory of a rank's process at its end."""

    folder: Path

    def __call__(self, phase: str, rank: int, step: int) -> None:
        from tests.device.sim import SIM

        if phase == "done":
            (self.folder / str(rank)).write_text(str(SIM.registered_bytes()))


@pytest.mark.rest
@pytest.mark.parametrize(
    ("hosts", "locking"), [((), [0, 1]), (("a", "a", "b", "b"), [0, 2])], ids=["one host", "two hosts"]
)
def test_only_ranks_that_may_write_a_checkpoint_lock_memory(
    device_pool: WorkerPool, data: Path, tmp_path: Path, hosts: tuple[str, ...], locking: list[int]
) -> None:
    """A process keeps a block that it has locked, so each training has new processes."""
    job = strategy_job(tmp_path / "run", data, 0.0, checkpoint__snapshot_every_steps=None)
    with WorkerPool(4, tmp_path) as pool:
        check_races(
            train_on_devices(pool, job, [[0, 1, 2, 3]], hooks=Hooks(at=NoteLockedMemory(tmp_path)), hosts=hosts)
        )
    locked = [int((tmp_path / str(rank)).read_text()) for rank in range(4)]
    assert [rank for rank in range(4) if locked[rank]] == locking


@pytest.mark.rest
def test_a_new_rank_0_commits_the_copy_of_a_rank_on_another_host(tmp_path: Path, data: Path) -> None:
    kill = KillBeforeCommit(tmp_path, 4, ())
    fields = {"checkpoint__every_epochs": None, "checkpoint__every_steps": 4, "checkpoint__keep_last": 9}
    job = strategy_job(tmp_path / "run", data, 0.0, checkpoint__snapshot_every_steps=None, **fields)
    hooks = Hooks(kill.after_step, kill.before_commit)
    with WorkerPool(4, tmp_path) as pool:
        results = train_on_devices(pool, job, [[0, 1, 2, 3], [1, 2, 3]], hooks=hooks, hosts=("a", "a", "b", "b"))
    assert kill.proof.exists()
    assert [type(result.error) for result in results] == [KilledError, *[type(None)] * 3]
    assert 4 in [commit.step for commit in CheckpointStore(job.paths).commits()]


def test_the_uuid_of_a_device_is_no_part_of_the_environment(device_pool: WorkerPool) -> None:
    [(label, environment)] = device_pool.run(1, describe_device)
    assert label == "sim simulated, uuid-of-1"
    assert "uuid-of-1" not in str(environment)


def describe_device(rank: int, store: Path) -> tuple[str, dict[str, str]]:
    from ray_app.task.environment import describe

    return device_label(torch.device("sim", 1)), describe(torch.device("sim", 1))
