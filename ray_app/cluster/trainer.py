"""The start of the workers through Ray Train, and the function that runs in each of them.

`fit` uses `DataParallelTrainer`, or the class `ElasticTrainer` derived from it, and not Ray's `TorchTrainer`: all that
this adds is `TorchConfig`. Its process group lives as long as the workers, where one per generation is needed.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from dataclasses import dataclass
from typing import Any, Literal

import ray
import ray.train
import torch
from ray.actor import ActorHandle
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_app.cluster.controller.backend import ControllerContext, FailureBudget, NoProcessGroupConfig, use_stable_run_id
from ray_app.cluster.rendezvous.client import RendezvousClient
from ray_app.config.config import Config
from ray_app.data.local_readers import choose_fetch
from ray_app.data.memory_cache import MemoryCacheHandle
from ray_app.data.prefetch import StreamedWindows
from ray_app.data.ray_tasks import fetch_ray
from ray_app.data.reader import Fetch
from ray_app.data.windows import CachedWindows, Windows
from ray_app.errors import PreemptedError, unwrap_app_error
from ray_app.plan.order import Cursor
from ray_app.process import keep_freed_memory, log_to_stderr
from ray_app.runlog.output import copied_output
from ray_app.runlog.redaction import register_secrets
from ray_app.task.device import gpu_of
from ray_app.task.user_code import user_code
from ray_app.train.checkpointing.snapshots import SnapshotSender
from ray_app.train.job import Hooks, Job, OpenWindows
from ray_app.train.loop import train
from ray_app.train.membership import Flags
from ray_app.train.strategies.parameter_server.actors import ParameterService
from ray_app.train.strategies.parameter_server.worker import ParameterWorker

logger = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S = 1.0
"""Seconds for which a worker of a parameter server waits for a unit of work before it looks whether it has to leave."""


@dataclass(frozen=True)
class WorkerArgs:
    """The arguments of every worker.

    Args:
        job: What to train.
        rendezvous: Handle of the rendezvous actor.
        memory_cache: The decoded data, with `data.cache: memory`, see `start_memory_cache`.
        snapshot_actors: Handles of the actors that hold snapshots.
        evaluation: The decoded evaluation data if the workers evaluate, see `start_memory_cache`.
        hooks: For fault tests.
        parameters: Handles of the parameter servers, with `train.strategy: parameter_server`.
    """

    job: Job
    rendezvous: ActorHandle
    memory_cache: MemoryCacheHandle | None = None
    snapshot_actors: tuple[ActorHandle, ...] = ()
    evaluation: MemoryCacheHandle | None = None
    hooks: Hooks = Hooks()
    parameters: ParameterService | None = None


def fit(args: WorkerArgs, max_workers: int, reserved_cpus: float, abandoned: threading.Event) -> None:
    """Trains on the connected cluster; blocks until the run ends.

    Args:
        args: The arguments of every worker.
        max_workers: Most workers for which the cluster has capacity now.
        reserved_cpus: Logical CPUs that are not for training workers: the evaluator's and one for reading.
        abandoned: Set when the driver does not wait for the run any more. It is regarded only where workers come and go
            one by one.

    Raises:
        Exception: The error that ended the run, wrapped by Ray Train.
    """
    job = args.job
    in_place = _recovers_in_place(job.config)
    context = ControllerContext(job.run_root, job.fence, job.config, args.rendezvous, reserved_cpus, in_place)
    scaling = job.config.scaling
    resources = {"CPU": scaling.cpus_per_worker, "GPU": scaling.gpus_per_worker}
    run_config = RunConfig(
        name=job.paths.ray_storage(job.fence).name,
        storage_path=str(job.paths.ray_storage(job.fence).parent),
        failure_config=FailureConfig(max_failures=-1, max_preemption_failures=-1),
        callbacks=[FailureBudget(context)],
    )
    options: dict[str, Any] = {
        "use_gpu": scaling.gpus_per_worker > 0,
        "resources_per_worker": {name: amount for name, amount in resources.items() if amount},
        "label_selector": scaling.label_selector,
    }
    worker_config = {"args": ray.put(args)}
    if in_place:
        from ray_app.cluster.controller.controller import ElasticTrainer
        from ray_app.cluster.controller.scaling_policy import StoppedWaitingError

        sizes = ScalingConfig(
            num_workers=(scaling.min_workers, scaling.worker_limit + scaling.standby_workers), **options
        )
        prepare = ray.put(functools.partial(_prepare, worker_config))
        options = {"train_loop_config": worker_config, "scaling_config": sizes, "run_config": run_config}
        trainer = ElasticTrainer(context, prepare, abandoned, _run_worker, **options)
        use_stable_run_id(trainer, job.run_root)
        try:
            trainer.fit()
        except TrainingFailedError as error:
            if not isinstance(unwrap_app_error(error), StoppedWaitingError):
                raise
        return
    elastic = max_workers > scaling.min_workers
    if elastic:
        options["elastic_resize_monitor_interval_s"] = scaling.resize_interval_s
    sizes = ScalingConfig(num_workers=(scaling.min_workers, max_workers) if elastic else max_workers, **options)
    backend = NoProcessGroupConfig()
    stock = DataParallelTrainer(
        _run_worker,
        train_loop_config=worker_config,
        backend_config=backend,
        scaling_config=sizes,
        run_config=run_config,
    )
    use_stable_run_id(stock, job.run_root)
    stock.fit()


def _recovers_in_place(config: Config) -> bool:
    """Returns whether workers come and go one by one; otherwise all restart after every change."""
    if config.failure.recovery == "restart":
        return False
    try:
        import ray_app.cluster.controller.controller  # noqa: F401 - only the import is tried
    except ImportError as error:
        logger.warning(
            "Ray %s lacks what recovery in place needs (%s): all workers restart after a failure.",
            ray.__version__,
            error,
        )
        return False
    return True


def _prepare(worker_config: dict[str, Any]) -> None:
    """Prepares a pending worker: imports the user's code, which comes with the job, and opens the device."""
    try:
        args: WorkerArgs = ray.get(worker_config["args"])
        torch.zeros(1, device=_gpu() if args.job.config.scaling.gpus_per_worker else "cpu")
    # The error occurs again when the worker trains, where it is charged and reported.
    except Exception as error:
        logger.warning("Preparing to train failed: %r", error)


@functools.cache
def _gpu() -> torch.device:
    """Returns the GPU of this process.

    It is cached, because Ray Train may make more GPUs visible later, which CUDA does not notice once it is initialized.
    """
    return gpu_of(ray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _choose_backend(config: Config) -> Literal["auto", "gloo"]:
    """Returns `train.backend`, or gloo for workers that share a GPU, which NCCL refuses."""
    return "gloo" if 0 < config.scaling.gpus_per_worker < 1 else config.train.backend


def _run_worker(worker_config: dict[str, Any]) -> None:
    """Trains in a worker until the run ends or the worker has to leave."""
    keep_freed_memory()
    log_to_stderr()
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    args: WorkerArgs = ray.get(worker_config["args"])
    job = args.job
    register_secrets(job.config.to_dict())
    device = _gpu() if job.config.scaling.gpus_per_worker else torch.device("cpu")
    recovers = _recovers_in_place(job.config)
    membership = RendezvousClient(
        args.rendezvous, job.plan.logical_workers, device, _choose_backend(job.config), job.paths, job.fence, recovers
    )
    is_run_over = False
    try:
        evaluation = args.evaluation
        load = (lambda: evaluation.read().arrays) if evaluation is not None else None
        output = copied_output(job.paths, job.fence, membership.process_name, lambda: membership.progress)
        # Errors outside of more specific guards are attributed to the worker.
        with output, user_code(lambda: "a worker"):
            if args.parameters is not None:
                is_run_over = _run_parameter_worker(args, membership, device)
            else:
                is_run_over = train(
                    job,
                    membership,
                    _window_opener(args),
                    device,
                    args.hooks,
                    SnapshotSender(list(args.snapshot_actors)),
                    load,
                )
    finally:
        membership.close(is_run_over)


def _run_parameter_worker(args: WorkerArgs, membership: RendezvousClient, device: torch.device) -> bool:
    """Runs units of work for parameter servers until the run ends or this worker has to leave its node.

    Returns:
        Whether the run is over.

    Raises:
        PreemptedError: All workers have to leave their nodes; the servers keep the state.
        RayAppError: The run has to end.
    """
    parameters, job = args.parameters, args.job
    assert parameters is not None
    membership.need_no_group()
    name = ray.get_runtime_context().get_actor_id()
    worker = ParameterWorker(
        job, name, parameters.ask, parameters.servers, membership, _window_opener(args), device, args.hooks
    )
    try:
        while worker.once(_REQUEST_TIMEOUT_S):
            if membership.is_leaving():
                worker.finish()
                if membership.flags() & Flags.SAVE:
                    raise PreemptedError("All workers have to leave their nodes; the parameter servers keep the state.")
                return False
        return True
    finally:
        worker.close()


def _window_opener(args: WorkerArgs) -> OpenWindows:
    """Returns the function that opens the windows of rows for the loop, which shares one cache and one fetch."""

    @functools.cache
    def cached() -> CachedWindows:
        assert args.memory_cache is not None
        return CachedWindows(args.memory_cache.read())

    @functools.cache
    def fetch() -> Fetch:
        return args.job.through_cache(choose_fetch(args.job.config.data.reader_threads, fetch_ray))

    def open_windows(job: Job, cursor: Cursor, assigned: range) -> Windows:
        if args.memory_cache is not None:
            return cached()
        return StreamedWindows(
            job.plan, cursor, assigned, job.passes, fetch(), job.source, job.config.data.prefetch_windows
        )

    return open_windows
