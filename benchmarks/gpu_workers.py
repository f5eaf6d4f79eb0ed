"""Plain processes that train like workers, on one device or on a GPU each: the loop and the process group of the
application, without Ray.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.gpu_models import DRY, ON_GPU, Sizes, write_rows
from ray_app.data.reader import choose_fetch, fetch_in_process, load_all
from ray_app.data.windows import CachedWindows, StreamedWindows, Windows
from ray_app.models.inputs import open_rows
from ray_app.plan.order import Cursor
from ray_app.reduction.peer_errors import collective
from ray_app.reduction.world import World
from ray_app.task.base import Task
from ray_app.testing import RankResult, TrainedRun, WorkerPool, read_trained_run
from ray_app.train.context import WorkerContext
from ray_app.train.job import Hooks, Job
from ray_app.train.loop import train
from ray_app.train.membership import KEY_BYTES, GenerationInfo, SingleProcessMembership
from ray_app.train.process_group import ProcessGroup
from tests.support.local_world import make_job

PRELOADED = ("ray_app.train.loop", "ray_app.task.image", "torchmetrics", "torchvision", "benchmarks.gpu_models")
LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class Bench:
    """Device, data and processes for the lines.

    Args:
        device: `cuda`, or `cpu` for a dry run.
        folder: Folder for data and runs.
    """

    device: str
    folder: Path

    @property
    def sizes(self) -> Sizes:
        """Sizes of data, models and measurements."""
        return ON_GPU if self.device == "cuda" else DRY

    @property
    def first(self) -> torch.device:
        """The first GPU, or the CPU."""
        return device_of(self.device, 0)

    @functools.cached_property
    def gpus(self) -> int:
        """Number of GPUs; 0 in a dry run."""
        return torch.cuda.device_count() if self.device == "cuda" else 0

    @functools.cached_property
    def small(self) -> Path:
        """Folder of images of 32 x 32."""
        return write_rows(self.folder / "small", self.sizes.small_rows, 32)

    @functools.cached_property
    def few(self) -> Path:
        """Folder of a few hundred images of 32 x 32."""
        return write_rows(self.folder / "few", min(512, self.sizes.small_rows), 32)

    @functools.cached_property
    def large(self) -> Path:
        """Folder of images of the size of ImageNet's."""
        return write_rows(self.folder / "large", self.sizes.large_rows, self.sizes.large_pixels)

    @contextmanager
    def pool(self, size: int) -> Iterator[WorkerPool]:
        """Starts worker processes for a line and ends them after it."""
        folder = self.new("pool")
        folder.mkdir()
        pool = WorkerPool(size, folder, PRELOADED)
        try:
            yield pool
        finally:
            pool.close()

    def new(self, name: str) -> Path:
        """Returns the path of a new file or folder."""
        return self.folder / f"{name}-{time.time_ns()}"

    def job(self, task: Task, data: Path, *, logical_workers: int, batch: int, **fields: Any) -> Job:
        """Makes a run in a new folder, evaluated by its workers if so configured; `fields` as for `Config.replace`."""
        gpus = float(self.device == "cuda")
        settings = {
            "scaling__gpus_per_worker": gpus,
            "checkpoint__every_epochs": None,
            "data__cache": "memory",
        } | fields
        job = make_job(self.new("run"), data, logical_workers=logical_workers, batch=batch, task=task, **settings)
        if not job.workers_evaluate:
            return job
        return replace(
            job,
            eval_source=open_rows(job.task, str(job.config.data.eval_path), read_mb=job.config.data.read_task_mb),
        )

    def outcomes(
        self, pool: WorkerPool, job: Job, size: int, own_gpus: bool = False, hooks: Hooks = Hooks()
    ) -> list[RankResult]:
        """Trains on `size` processes, all on the first GPU with gloo, or on one each with NCCL; returns the result of
        each.
        """
        store = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
        return pool.call(size, work, job, size, store.port, self.device, own_gpus, hooks)

    def trained(
        self, pool: WorkerPool, job: Job, size: int, own_gpus: bool = False, hooks: Hooks = Hooks()
    ) -> TrainedRun:
        """Trains to the end; returns the stored run."""
        outcomes = self.outcomes(pool, job, size, own_gpus, hooks)
        failed = [outcome.trace for outcome in outcomes if outcome.error is not None]
        if failed:
            raise RuntimeError(failed[0])
        return read_trained_run(job)


class Group(SingleProcessMembership):
    """The membership of one of several plain processes: the application's process group, formed once.

    Args:
        world: Rank of the process and size of the group.
        port: Port of the store of the group.
        device: Device of the process.
        backend: See `train.backend`.
    """

    def __init__(self, world: World, port: int, device: torch.device, backend: str) -> None:
        super().__init__(world.logical_workers, lambda: False)
        self._world, self._port = world, port
        self._device, self._backend = device, backend

    @contextmanager
    def generation(self, step: int, was_broken: bool) -> Iterator[tuple[World, GenerationInfo]]:
        """See `Membership.generation`."""
        del step, was_broken
        formed = GenerationInfo(1, self._world.rank, self._world.size, LOCALHOST, self._port, key="ab" * KEY_BYTES)
        if self._world.size == 1:
            yield self._world, formed
            return
        group, broken = ProcessGroup(), True
        try:
            with collective():
                group.open(formed, self._device, self._backend)  # type: ignore[arg-type]
            has_device_collectives = group.has_device_collectives
            yield replace(self._world, groups=group.groups, has_device_collectives=has_device_collectives), formed
            broken = False
        finally:
            group.close(broken)


def work(rank: int, store: Path, job: Job, size: int, port: int, device: str, own_gpus: bool, hooks: Hooks) -> None:
    """Trains as one of `size` workers."""
    del store
    torch_device = device_of(device, rank if own_gpus else 0)
    membership = Group(
        World(rank, size, job.plan.logical_workers),
        port,
        torch_device,
        "auto" if own_gpus and device == "cuda" else "gloo",
    )
    train(WorkerContext(job, membership, open_windows, torch_device, hooks))


def device_of(device: str, number: int) -> torch.device:
    """Returns a GPU by its number, or the CPU."""
    return torch.device(device, number) if device == "cuda" else torch.device(device)


def open_windows(job: Job, cursor: Cursor, assigned: range) -> Windows:
    """Opens windows of rows from memory or, with `data.cache: none`, from the files by threads of this process."""
    if job.config.data.cache == "memory":
        return CachedWindows(load_all(fetch_in_process, job.source))
    data = job.config.data
    return StreamedWindows(
        job.plan, cursor, assigned, job.passes, choose_fetch(data.reader_threads, fetch_in_process), job.source
    )


def timed(look: Callable[[], Any]) -> float:
    """Returns the seconds that a call takes."""
    began_s = time.perf_counter()
    look()
    return time.perf_counter() - began_s
