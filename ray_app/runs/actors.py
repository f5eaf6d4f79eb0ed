"""The actors that the workers of a run share, on the driver's node: they live as long as it trains."""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress
from typing import Any

import ray

from ray_app.cluster.rendezvous.actor import start_rendezvous
from ray_app.cluster.trainer import Start
from ray_app.config.config import Config
from ray_app.data.feed.memory_cache import end_memory_cache, is_small, start_memory_cache
from ray_app.data.read.ray_tasks import anchor_here
from ray_app.train.hooks import Hooks
from ray_app.train.job import Job
from ray_app.train.keep.snapshots import start_keepers
from ray_app.train.strategies.parameter_server.actors import start_parameters

_COMPILING_S = 600.0
_CLOSE_S = 2.0


def start_actors(stack: ExitStack, job: Job, hooks: Hooks) -> Start:
    """Starts the rendezvous and, where the configuration has them, keepers of snapshots, caches and parameter servers.

    Args:
        stack: Ends them.
        job: The run.
        hooks: For fault tests.
    """
    config = job.config
    least = config.scaling.min_workers if config.train.strategy == "fsdp" else 1  # fewer have not the memory; others go on meanwhile
    rendezvous = start_rendezvous(job.rendezvous, config.failure.heartbeat_timeout_s, _step_timeout_s(config), least)
    stack.callback(_end_rendezvous, rendezvous)
    keepers = start_keepers() if config.checkpoint.snapshot_every_steps else []
    for actor in keepers:
        stack.callback(_end_actor, actor)
    memory_cache = None
    if config.data.cache == "memory":
        memory_cache = start_memory_cache(job.source)
        stack.callback(end_memory_cache, memory_cache)
    evaluation = None
    if job.workers_evaluate and job.evaluation is not None:
        evaluation = start_memory_cache(job.evaluation)
        stack.callback(end_memory_cache, evaluation)
    parameters = None
    if config.train.strategy == "parameter_server":
        parameters = start_parameters(job, keepers, hooks)
        for actor in parameters.actors:
            stack.callback(_end_actor, actor)
    held = [source for source in (job.source if memory_cache is not None else None, job.evaluation) if source is not None]
    if memory_cache is None or not all(map(is_small, held)):
        threading.Thread(target=anchor_here, name="anchor", daemon=True).start()
    return Start(job, rendezvous, memory_cache, tuple(keepers), evaluation, hooks, parameters)


def _step_timeout_s(config: Config) -> float | None:
    """See `failure.step_timeout_s`."""
    return config.failure.step_timeout_s or (_COMPILING_S if config.train.compile else None)


def _end_rendezvous(rendezvous: Any) -> None:
    with suppress(ray.exceptions.RayError):
        ray.get(rendezvous.close.remote(), timeout=_CLOSE_S)
    _end_actor(rendezvous)


def _end_actor(actor: Any) -> None:
    ray.kill(actor, no_restart=True)
