"""How the workers are started: Ray Train's TorchTrainer over the loop."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device

from ray_app.data.feed import CachedWindows, StreamedWindows, Windows
from ray_app.data.source import fetch_ray
from ray_app.errors import own_error
from ray_app.plan.cursor import Cursor
from ray_app.train.job import Job
from ray_app.train.loop import Hooks, train
from ray_app.train.membership import RayMembership
from ray_app.train.ray_hooks import FailureBudget, OwnGroupConfig


@dataclass(frozen=True)
class Start:
    """What is passed to every worker.

    Args:
        job: What to train.
        rendezvous: Handle of the rendezvous actor.
        cache: Handle of the actor that holds the decoded data, with `data.cache: memory`.
        hooks: For fault tests.
    """

    job: Job
    rendezvous: Any
    cache: Any | None = None
    hooks: Hooks = Hooks()


def fit(start: Start, max_workers: int) -> None:
    """Trains on the connected cluster; blocks until the run ends.

    Args:
        start: What every worker gets.
        max_workers: Most workers, as the cluster has room for them.

    Raises:
        Exception: What ended the run, in Ray Train's wrapping.
    """
    job = start.job
    scaling, elastic = job.config.scaling, max_workers > job.config.scaling.min_workers
    resources = {"CPU": scaling.cpus_per_worker, "GPU": scaling.gpus_per_worker}
    TorchTrainer(
        _work,
        train_loop_config={"start": ray.put(start)},
        torch_config=OwnGroupConfig(),
        scaling_config=ScalingConfig(
            num_workers=(scaling.min_workers, max_workers) if elastic else max_workers,
            use_gpu=scaling.gpus_per_worker > 0,
            resources_per_worker={name: amount for name, amount in resources.items() if amount},
            **({"elastic_resize_monitor_interval_s": scaling.resize_check_s} if elastic else {}),
        ),
        run_config=RunConfig(
            name=job.paths.ray_storage(job.fence).name,
            storage_path=str(job.paths.root),
            failure_config=FailureConfig(max_failures=-1, max_preemption_failures=job.config.failure.max_preemptions),
            callbacks=[FailureBudget(job.run_root, job.fence, job.config.failure)],
        ),
    ).fit()


def _work(arguments: dict[str, Any]) -> None:
    """Runs in every worker."""
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    start: Start = ray.get(arguments["start"])
    job = start.job
    device = get_device() if job.config.scaling.gpus_per_worker else torch.device("cpu")
    assert isinstance(device, torch.device)
    membership = RayMembership(start.rendezvous, job.plan.logical_workers, device, job.config.failure.step_timeout_s)
    try:
        train(job, membership, _open_windows(start), device, start.hooks)
    finally:
        membership.close()


def _open_windows(start: Start) -> Any:
    def open_windows(job: Job, cursor: Cursor, played: range) -> Windows:
        if start.cache is not None:
            try:
                references = ray.get(start.cache.arrays.remote())
            except ray.exceptions.RayTaskError as error:
                raise own_error(error) from error
            return CachedWindows({name: ray.get(reference) for name, reference in references.items()})
        data, epochs = job.config.data, job.config.train.epochs
        return StreamedWindows(job.plan, cursor, played, epochs, fetch_ray, job.reader, job.fields, job.task_rows, data.prefetch_windows)

    return open_windows
