"""Every strategy trains on simulated devices (`tests/device`): bit-identical on any number of them, and in order."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ray_app.driver.single import train_in_process
from ray_app.models.inputs import open_rows
from ray_app.runlog.evaluations import read_evaluations
from ray_app.testing import WorkerPool, cache_windows, read_trained_run, stream_windows
from ray_app.train.job import Hooks, Job
from ray_app.train.membership import SingleProcessMembership
from tests.device.strategies import BF16, BIT_IDENTICAL, FSDP, OFFLOAD, OVERLAPPED, SMALL_BUCKETS, Fields, strategy_job
from tests.device.training import device_run
from tests.support.bit_identity import assert_bit_identical
from tests.support.server_world import ServerWorld

OTHERS: dict[str, Fields] = {
    "ddp": OVERLAPPED | SMALL_BUCKETS,
    "fsdp": OVERLAPPED | FSDP,
    "fsdp, offload": OVERLAPPED | OFFLOAD,
    "fsdp, bf16": OVERLAPPED | FSDP | BF16,
}
"""Settings with which the order of additions depends on the number of devices."""


@pytest.mark.rest
@pytest.mark.parametrize("name", BIT_IDENTICAL)
def test_a_strategy_is_bit_identical_on_any_number_of_devices(
    device_pool: WorkerPool, data: Path, tmp_path: Path, name: str
) -> None:
    job = strategy_job(tmp_path / "run", data, 0.3, **BIT_IDENTICAL[name])
    one, three = (device_run(device_pool, job, workers) for workers in (1, 3))
    assert_bit_identical(three, one)


@pytest.mark.rest
@pytest.mark.parametrize("name", OTHERS)
def test_a_strategy_that_adds_in_any_order_trains_in_order(
    device_pool: WorkerPool, data: Path, tmp_path: Path, name: str
) -> None:
    job = strategy_job(tmp_path / "run", data, 0.3, **OTHERS[name])
    assert device_run(device_pool, job, 2).commit.step == job.total_steps


@pytest.mark.rest
@pytest.mark.parametrize("name", ["ddp", "fsdp", "local_sgd", "central_storage"])
def test_a_strategy_has_the_digest_of_the_cpu(
    device_pool: WorkerPool, worker_pool: WorkerPool, data: Path, tmp_path: Path, name: str
) -> None:
    job = strategy_job(tmp_path / "run", data, 0.0, **BIT_IDENTICAL[name])
    expected = worker_pool.train_new_run(job, 1, cache_windows)
    assert device_run(device_pool, job, 2, stream_windows).digests == expected.digests


@pytest.mark.parametrize("staleness", [0, pytest.param(2, marks=pytest.mark.rest)])
def test_workers_of_parameter_servers_compute_on_devices(
    device_pool: WorkerPool, data: Path, tmp_path: Path, staleness: int
) -> None:
    job = strategy_job(tmp_path / "run", data, 0.3)
    servers: Fields = {"train__strategy": "parameter_server", "train__servers": 2, "train__staleness": staleness}
    with_servers = strategy_job(tmp_path / "servers", data, 0.3, **servers)
    assert device_pool.run(1, serve, with_servers) == [[]]
    run = read_trained_run(with_servers)
    assert run.commit.step == job.total_steps
    if staleness == 0:
        # The optimizer of the servers runs on the CPU; the simulated devices compute with the CPU's kernels.
        assert run.commit.params_digest == device_run(device_pool, job, 1).commit.params_digest


def serve(rank: int, store: Path, job: Job) -> list[str]:
    """Trains with servers on the host and three workers on a device; returns the races of the device."""
    from tests.device.sim import DEVICE, SIM

    ServerWorld(job, 3, device=DEVICE).run()
    return SIM.races()


def test_the_strategy_single_computes_on_the_first_device(device_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    fields = {"scaling__gpus_per_worker": 1}
    job = strategy_job(tmp_path / "run", data, 0.3, train__strategy="single", **fields)
    assert device_pool.run(1, train_alone, job) == [[]]
    run = read_trained_run(job)
    assert run.commit.environment["device"] == "sim simulated"
    assert run.digests == device_run(device_pool, strategy_job(tmp_path / "ddp", data, 0.3), 2).digests


def train_alone(rank: int, store: Path, job: Job) -> list[str]:
    """Trains in this process; returns the races of its device."""
    from tests.device.sim import SIM

    train_in_process(job, SingleProcessMembership(4, lambda: False), Hooks())
    return SIM.races()


@pytest.mark.rest
def test_workers_evaluate_on_their_devices(device_pool: WorkerPool, data: Path, tmp_path: Path) -> None:
    job = strategy_job(
        tmp_path / "run",
        data,
        0.3,
        evaluate__where="workers",
        evaluate__batch_size=5,
        data__eval_path=str(data.with_name("eval")),
    )
    job = dataclasses.replace(job, eval_source=open_rows(job.task, str(job.config.data.eval_path)))
    metrics = []
    for workers in (1, 3):
        device_run(device_pool, job, workers)
        paths = dataclasses.replace(job, run_root=f"{job.run_root}-sim-{workers}").paths
        metrics.append([(evaluation.step, evaluation.metrics) for evaluation in read_evaluations(paths)])
    assert metrics[0] == metrics[1]
    assert [step for step, _ in metrics[0]] == [6, 12, 18]
