"""Errors of one worker on simulated devices: the others form again, and a broken device joins no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks.gpu_start import send_to_itself
from ray_app.testing import WorkerPool
from ray_app.train.job import Hooks
from ray_app.train.process_group import prove_device
from tests.device.strategies import FSDP, strategy_job
from tests.support.device_group import DeviceGroup
from tests.support.rendezvous_thread import FailOnce, check_survivors, start_rendezvous, train_at_rendezvous


@pytest.mark.rest
@pytest.mark.parametrize("replica", [False, True])
def test_survivors_of_fsdp_form_again_at_once_after_an_error_of_one_worker(
    device_pool: WorkerPool, data: Path, tmp_path: Path, replica: bool
) -> None:
    job = strategy_job(tmp_path / "run", data, 0.0, **FSDP, train__peer_replica=replica)
    rendezvous, hook = start_rendezvous(3), FailOnce(job.run_root, "memory")
    try:
        outcomes = device_pool.call(3, train_at_rendezvous, job, rendezvous.remote, "auto", 0, Hooks(at=hook))
    finally:
        rendezvous.close()
    check_survivors(job, outcomes, hook)


def prove_twice(rank: int, store: Path) -> None:
    """Proves a device, the first time without memory for the buffers of a communicator."""
    from ray_app.devices import accelerator
    from tests.device import sim

    del store
    assert sim
    device, taken = accelerator().device(rank), list[str]()

    def take() -> None:
        taken.append("buffers")
        raise RuntimeError("NCCL: unhandled cuda error: out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceGroup, "take_buffers", take)
        with pytest.raises(RuntimeError, match="out of memory"):
            prove_device(device, "auto")
        prove_device(device, "gloo")
        assert taken == ["buffers"], "workers that share a device need no communicator"
    prove_device(device, "auto")
    assert dist.group.WORLD is None


def test_a_device_is_proved_with_memory_and_a_communicator_of_its_own(device_pool: WorkerPool) -> None:
    device_pool.run(1, prove_twice)


def send_buckets(rank: int, store: Path, port: int) -> tuple[int, list[str]]:
    """Sends buckets on a simulated device; returns the number of collectives, and the races."""
    from tests.device.sim import DEVICE, SIM

    SIM.start_counting()
    before = SIM.counts().get("collectives", 0)
    send_to_itself(rank, store, port, DEVICE)
    return SIM.counts()["collectives"] - before, SIM.races()


def test_the_line_of_buckets_on_a_gpu_sends_them_by_the_collectives_of_the_device(device_pool: WorkerPool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    [(collectives, races)] = device_pool.run(1, send_buckets, store.port)
    # Of each of six buckets, in three steps: an all-to-all and an all-gather, and an all-reduce; one forms the group.
    assert (collectives, races) == (3 * 6 * 3 + 1, [])
