"""The actors that the workers of a run share, on the driver's node: they live as long as it trains."""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress
from typing import Any

import ray

from ray_app.config import Config
from ray_app.data.cache import end_cache, is_small, start_cache
from ray_app.data.source import anchor_here
from ray_app.train.hooks import Hooks
from ray_app.train.job import Job
from ray_app.train.parameter_actors import start_parameters
from ray_app.train.rendezvous import start_rendezvous
from ray_app.train.snapshots import start_keepers
from ray_app.train.trainer import Start

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
    rendezvous = start_rendezvous(job.rendezvous, config.failure.heartbeat_timeout_s, _step_timeout_s(config))
    stack.callback(_end_rendezvous, rendezvous)
    keepers = start_keepers() if config.checkpoint.snapshot_every_steps else []
    for actor in keepers:
        stack.callback(_end_actor, actor)
    cache = None
    if config.data.cache == "memory":
        cache = start_cache(job.source)
        stack.callback(end_cache, cache)
    evaluation = None
    if job.workers_evaluate and job.evaluation is not None:
        evaluation = start_cache(job.evaluation)
        stack.callback(end_cache, evaluation)
    parameters = None
    if config.train.strategy == "parameter_server":
        parameters = start_parameters(job, keepers, hooks)
        for actor in parameters.actors:
            stack.callback(_end_actor, actor)
    held = [source for source in (job.source if cache is not None else None, job.evaluation) if source is not None]
    if cache is None or not all(map(is_small, held)):
        threading.Thread(target=anchor_here, name="anchor", daemon=True).start()
    return Start(job, rendezvous, cache, tuple(keepers), evaluation, hooks, parameters)


def _step_timeout_s(config: Config) -> float | None:
    """See `failure.step_timeout_s`."""
    return config.failure.step_timeout_s or (_COMPILING_S if config.train.compile else None)


def _end_rendezvous(rendezvous: Any) -> None:
    with suppress(ray.exceptions.RayError):
        ray.get(rendezvous.close.remote(), timeout=_CLOSE_S)
    _end_actor(rendezvous)


def _end_actor(actor: Any) -> None:
    ray.kill(actor, no_restart=True)
