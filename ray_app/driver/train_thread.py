"""The actors that the workers of a run share, and the thread in which Ray Train's trainer runs.

The module imports Ray Train and Ray Data, so it is imported while the cluster starts.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack, suppress

import ray
from ray.actor import ActorHandle

from ray_app.cluster.ray_private import prestart_workers
from ray_app.cluster.rendezvous.actor import RendezvousHandle, start_rendezvous
from ray_app.cluster.resources import has_evaluator, keeps_local_cluster
from ray_app.cluster.trainer import WorkerArgs, fit
from ray_app.data.ray_tasks import is_small, start_memory_cache, start_shared_actors
from ray_app.errors import unwrap_app_error
from ray_app.train.checkpointing.persistence import start_snapshot_actors
from ray_app.train.job import Hooks, Job
from ray_app.train.strategies.parameter_server.actors import start_parameter_service

_COMPILE_TIMEOUT_S = 600.0
"""Seconds that a step may take with `train.compile`."""
_WORKER_MODULES = ("ray_app.cluster.trainer", "ray_app.cluster.rendezvous.actor", "ray_app.evaluate.evaluator")
"""What processes of the next run import; no module of the user, which may change."""
_KERAS = "ray_app.task.keras.library"
_SHARED_ACTORS = 1
"""The rendezvous."""
_PRESTART_S, _PRESTART_POLL_S = 10.0, 0.5
"""Seconds before the end of training at which the processes of the next run start, and between two looks at it."""
_CLOSE_S = 2.0
_ABANDON_S = 15.0
"""Seconds for which the driver waits for the trainer of an abandoned run to end its workers."""


def start_actors(stack: ExitStack, job: Job, hooks: Hooks) -> WorkerArgs:
    """Starts the actors that the workers share, which end with the stack; returns the arguments of every worker.

    They are the rendezvous and, if configured, snapshot actors, memory caches and parameter servers.
    """
    config = job.config
    min_workers = config.scaling.min_workers if config.train.strategy_traits.needs_min_workers else 1
    failure = config.failure
    step_timeout_s = failure.step_timeout_s or (_COMPILE_TIMEOUT_S if config.train.compile else None)
    rendezvous = start_rendezvous(job.rendezvous, failure.heartbeat_timeout_s, step_timeout_s, min_workers)
    stack.callback(_end_rendezvous, rendezvous)
    snapshot_actors = start_snapshot_actors() if config.checkpoint.snapshot_every_steps else []
    for actor in snapshot_actors:
        stack.callback(_end_actor, actor)
    memory_cache = None
    if config.data.cache == "memory":
        memory_cache = start_memory_cache(job.source)
        stack.callback(memory_cache.end)
    eval_cache = None
    if job.workers_evaluate and job.eval_source is not None:
        eval_cache = start_memory_cache(job.eval_source)
        stack.callback(eval_cache.end)
    parameters = None
    if config.train.strategy_traits.has_servers:
        parameters = start_parameter_service(job, RendezvousHandle(rendezvous), snapshot_actors, hooks)
        for actor in parameters.actors:
            stack.callback(_end_actor, actor)
    cached = [job.source if memory_cache is not None else None, job.eval_source]
    if memory_cache is None or not all(is_small(source) for source in cached if source is not None):
        threading.Thread(target=start_shared_actors, name="anchor", daemon=True).start()
    return WorkerArgs(job, rendezvous, memory_cache, tuple(snapshot_actors), eval_cache, hooks, parameters)


def _end_rendezvous(rendezvous: ActorHandle) -> None:
    with suppress(ray.exceptions.RayError):
        ray.get(rendezvous.close.remote(), timeout=_CLOSE_S)
    _end_actor(rendezvous)


def _end_actor(actor: ActorHandle) -> None:
    ray.kill(actor, no_restart=True)


class TrainThread(threading.Thread):
    """Trains while its context lasts; `error` is what ended the run, None if nothing did.

    If the caller leaves the context before training has ended, the run is abandoned and its workers are ended.
    """

    def __init__(self, args: WorkerArgs, max_workers: int) -> None:
        super().__init__(name="fit", daemon=True)
        self._worker_args, self._max_workers = args, max_workers
        self._abandoned = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Calls `fit` and keeps its error for the main thread."""
        try:
            fit(self._worker_args, self._max_workers, self._abandoned)
        except BaseException as error:
            if not self._abandoned.is_set():
                self.error = unwrap_app_error(error)

    def __enter__(self) -> TrainThread:
        """Starts the thread, and in a session one that starts the processes of the next run."""
        self.start()
        if keeps_local_cluster() and not self._worker_args.job.config.scaling.worker_gpus:
            threading.Thread(target=self._prestart, name="next workers", daemon=True).start()
        return self

    def _prestart(self) -> None:
        """Starts processes for the next run when this one is about to end."""
        job = self._worker_args.job
        config, rendezvous = job.config, RendezvousHandle(self._worker_args.rendezvous)
        began: tuple[int, float] | None = None
        with suppress(Exception):
            while self.is_alive():
                step, now_s = rendezvous.status().step, time.monotonic()
                began = began or ((step, now_s) if step > 0 else None)
                if began is not None and step > began[0]:
                    step_s = (now_s - began[1]) / (step - began[0])
                    if (job.last_step - step) * step_s < _PRESTART_S:
                        break
                self.join(_PRESTART_POLL_S)
        workers = config.scaling.worker_limit + config.scaling.standby_workers
        evaluators = config.evaluate.workers if has_evaluator(config) else 0
        # The connection may be closed meanwhile.
        with suppress(Exception):
            keras = [f"{_KERAS}:import_keras"] if _KERAS in sys.modules and "keras" in sys.modules else []
            prestart_workers(workers + evaluators + _SHARED_ACTORS, [*_WORKER_MODULES, *keras])

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Waits until the workers have ended; if both threads have an error, that of this thread is raised."""
        self._abandoned.set()
        self.join(_ABANDON_S)
        if isinstance(error, Exception) and self.error is not None:
            raise self.error from error
