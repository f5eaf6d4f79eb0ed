"""The actors that a run needs beside its workers, and the thread in which Ray Train's trainer runs.

The module imports Ray Train and Ray Data, so it is imported while the cluster starts.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress
from typing import Any

import ray

from ray_app.cluster.rendezvous.server import start_rendezvous
from ray_app.cluster.resources import (
    reserved_cpus,
)
from ray_app.cluster.trainer import WorkerArgs, fit
from ray_app.config.config import Config
from ray_app.data.memory_cache import end_memory_cache, is_small, start_memory_cache
from ray_app.data.ray_tasks import start_shared_actors
from ray_app.errors import unwrap_app_error
from ray_app.train.checkpointing.snapshots import start_snapshot_actors
from ray_app.train.job import Hooks, Job
from ray_app.train.strategies.parameter_server.actors import start_parameter_service

_COMPILING_S = 600.0


_CLOSE_S = 2.0


def start_actors(stack: ExitStack, job: Job, hooks: Hooks) -> WorkerArgs:
    """Starts the rendezvous and, where the configuration has them, keepers of snapshots, caches and parameter servers.

    Args:
        stack: Ends them.
        job: The run.
        hooks: For fault tests.
    """
    config = job.config
    least = (
        config.scaling.min_workers if config.train.strategy == "fsdp" else 1
    )  # fewer have not the memory; others go on meanwhile
    rendezvous = start_rendezvous(job.rendezvous, config.failure.heartbeat_timeout_s, _step_timeout_s(config), least)
    stack.callback(_end_rendezvous, rendezvous)
    keepers = start_snapshot_actors() if config.checkpoint.snapshot_every_steps else []
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
        parameters = start_parameter_service(job, keepers, hooks)
        for actor in parameters.actors:
            stack.callback(_end_actor, actor)
    held = [
        source for source in (job.source if memory_cache is not None else None, job.evaluation) if source is not None
    ]
    if memory_cache is None or not all(map(is_small, held)):
        threading.Thread(target=start_shared_actors, name="anchor", daemon=True).start()
    return WorkerArgs(job, rendezvous, memory_cache, tuple(keepers), evaluation, hooks, parameters)


def _step_timeout_s(config: Config) -> float | None:
    """See `failure.step_timeout_s`."""
    return config.failure.step_timeout_s or (_COMPILING_S if config.train.compile else None)


def _end_rendezvous(rendezvous: Any) -> None:
    with suppress(ray.exceptions.RayError):
        ray.get(rendezvous.close.remote(), timeout=_CLOSE_S)
    _end_actor(rendezvous)


def _end_actor(actor: Any) -> None:
    ray.kill(actor, no_restart=True)


_GIVE_UP_S = 15.0


class TrainThread(threading.Thread):
    """Trains while its context lasts; who leaves that earlier has given the run up, and its workers are ended.

    Args:
        start: See `fit`.
        max_workers: Likewise.

    Attributes:
        error: What ended the run, if anything did.
    """

    def __init__(self, start: WorkerArgs, max_workers: int) -> None:
        super().__init__(name="fit", daemon=True)
        self._passed, self._max_workers = start, max_workers
        self._given_up = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """See `fit`."""
        try:
            fit(self._passed, self._max_workers, reserved_cpus(self._passed.job.config), self._given_up)
        except BaseException as error:  # shown and raised by the main thread
            if not self._given_up.is_set():
                self.error = unwrap_app_error(error)

    def __enter__(self) -> TrainThread:
        """Begins."""
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Waits until the workers are gone, which they are if it has ended. What ended it explains what the other
        thread then met.
        """
        self._given_up.set()
        self.join(_GIVE_UP_S)
        if isinstance(error, Exception) and self.error is not None:
            raise self.error from error
