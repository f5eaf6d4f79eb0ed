"""Trainings on simulated devices: workers as plain processes, each with a device, and with the package's process group.

Only the workers import `tests.device.sim`; the process of the tests has no simulated device.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ray_app.devices import accelerator
from ray_app.reduction.peer_errors import collective
from ray_app.reduction.world import World
from ray_app.testing import RankResult, TrainedRun, WorkerPool, cache_windows, read_trained_run
from ray_app.train.context import WorkerContext
from ray_app.train.job import Hooks, Job, OpenWindows
from ray_app.train.loop import train
from ray_app.train.membership import KEY_BYTES, GenerationInfo
from ray_app.train.process_group import ProcessGroup
from tests.support.device_group import watch_peers
from tests.support.local_world import LocalMembership
from tests.support.shifting_world import ShiftingMembership


class OwnGroupMembership(LocalMembership):
    """A membership with the package's own `ProcessGroup` in each generation.

    Attributes:
        device: The device of this worker.
        port: The port of 127.0.0.1 at which the stores of the process groups listen.
        hosts: The host name of each rank.
        group_backend: Value of `train.backend`, `gloo` where workers share a device.
    """

    device: torch.device
    port: int
    hosts: tuple[str, ...] = ()
    group_backend: Literal["auto", "gloo"] = "auto"

    @contextmanager
    def generation(self, step: int, was_broken: bool) -> Iterator[tuple[World, GenerationInfo]]:
        del step, was_broken
        world, number = self._world, self._number
        hosts = self.hosts[: world.size]
        info = GenerationInfo(number, world.rank, world.size, "127.0.0.1", self.port, hosts, "ab" * KEY_BYTES)
        if world.size == 1:
            yield world, info
            return
        group, is_broken = ProcessGroup(), True
        with watch_peers(self._store, world.rank, world.size) as watch:
            try:
                with collective():
                    group.open(info, self.device, self.group_backend)
                watch(group.abort)
                is_direct = group.has_device_collectives
                yield (
                    dataclasses.replace(world, hosts=info.hosts, groups=group.groups, has_device_collectives=is_direct),
                    info,
                )
                is_broken = False
            finally:
                group.close(is_broken)

    @property
    def _number(self) -> int:
        return 1


class DeviceMembership(ShiftingMembership, OwnGroupMembership):
    """The membership of a worker in generations that are planned beforehand, with the package's own `ProcessGroup`."""

    @property
    def _number(self) -> int:
        return self._at + 1


def train_on_devices(
    pool: WorkerPool,
    job: Job,
    groups: list[list[int]],
    reforms: tuple[int, ...] = (),
    hooks: Hooks = Hooks(),
    windows: OpenWindows = cache_windows,
    hosts: tuple[str, ...] = (),
) -> list[RankResult]:
    """Trains in several generations on a device each, see `train_shifting`; returns the result of each worker.

    Args:
        pool: The processes of the workers.
        job: What to train.
        groups: The workers of each generation, in the order of their ranks.
        reforms: The number of steps after which a generation forms the next.
        hooks: Faults.
        windows: How rows reach the step.
        hosts: The host name of each rank, to reduce as on several hosts.
    """
    size = 1 + max(max(group, default=0) for group in groups)
    # The workers of a training meet at a store of their own, since they number their generations from 1.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return pool.call(size, _train, job, groups, reforms, hooks, windows, store.port, hosts)


def device_run(pool: WorkerPool, job: Job, workers: int, windows: OpenWindows = cache_windows) -> TrainedRun:
    """Trains a new run on `workers` devices of their own; no access to memory may be out of order."""
    job = dataclasses.replace(job, run_root=f"{job.run_root}-sim-{workers}")
    check_races(train_on_devices(pool, job, [[*range(workers)]], windows=windows))
    return read_trained_run(job)


def check_races(results: list[RankResult]) -> None:
    """Asserts that all workers have trained to the end, without an access to memory that nothing orders."""
    assert all(result.error is None for result in results), "\n".join(result.trace for result in results)
    races = [race for result in results for race in result.value]
    assert not races, races


def _train(
    worker: int,
    store: Path,
    job: Job,
    groups: list[list[int]],
    reforms: tuple[int, ...],
    hooks: Hooks,
    windows: OpenWindows,
    port: int,
    hosts: tuple[str, ...],
) -> list[str]:
    """Trains one worker; returns the races of its device that were seen."""
    from tests.device.sim import SIM

    device = accelerator().device(worker)
    membership = DeviceMembership(worker, groups, [*reforms], store, job.plan.logical_workers, "")
    membership.device = device
    membership.port, membership.hosts = port, hosts
    membership.group_backend = job.config.train.backend
    try:
        train(WorkerContext(job, membership, windows, device, hooks))
    except BaseException:
        traceback.print_exc()
        raise
    return SIM.races()
