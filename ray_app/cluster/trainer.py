"""How the workers are started: Ray Train over the loop.

It is `DataParallelTrainer`, or one of our own derived from it, and not its `TorchTrainer`: all that this adds is
`TorchConfig`, whose process group lives as long as the workers and would be in the way of ours.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_app.cluster.controller.backend import ControllerContext, FailureBudget, NoProcessGroupConfig, use_stable_run_id
from ray_app.cluster.rendezvous.client import RendezvousClient
from ray_app.config.config import Config
from ray_app.data.local_readers import choose_fetch
from ray_app.data.memory_cache import read_memory_cache
from ray_app.data.prefetch import StreamedWindows
from ray_app.data.ray_tasks import fetch_ray
from ray_app.data.reader import Fetch
from ray_app.data.windows import CachedWindows, Windows
from ray_app.errors import PreemptedError, unwrap_app_error
from ray_app.plan.order import Cursor
from ray_app.process import keep_freed_memory
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

_ASK_S = 1.0


@dataclass(frozen=True)
class WorkerArgs:
    """What is passed to every worker.

    Args:
        job: What to train.
        rendezvous: Handle of the rendezvous actor.
        memory_cache: The decoded data, with `data.cache: memory`, see `start_memory_cache`.
        keepers: Handles of the actors that hold snapshots.
        evaluation: The decoded evaluation data, if the workers evaluate, likewise.
        hooks: For fault tests.
        parameters: Where the parameters are, with `train.strategy: parameter_server`.
    """

    job: Job
    rendezvous: Any
    memory_cache: Any | None = None
    keepers: tuple[Any, ...] = ()
    evaluation: Any | None = None
    hooks: Hooks = Hooks()
    parameters: ParameterService | None = None


def fit(start: WorkerArgs, max_workers: int, reserved_cpus: float, given_up: threading.Event) -> None:
    """Trains on the connected cluster; blocks until the run ends.

    Args:
        start: What every worker gets.
        max_workers: Most workers that the cluster has room for now.
        reserved_cpus: Logical CPUs that are not for training workers: the evaluator's and one for reading.
        given_up: Set when nobody waits for the run any more; heeded where workers come and go one by one.

    Raises:
        Exception: What ended the run, in Ray Train's wrapping.
    """
    job = start.job
    in_place = _recovers_in_place(job.config)
    control = ControllerContext(job.run_root, job.fence, job.config, start.rendezvous, reserved_cpus, in_place)
    scaling = job.config.scaling
    resources = {"CPU": scaling.cpus_per_worker, "GPU": scaling.gpus_per_worker}
    run_config = RunConfig(
        name=job.paths.ray_storage(job.fence).name,
        storage_path=str(job.paths.ray_storage(job.fence).parent),
        failure_config=FailureConfig(max_failures=-1, max_preemption_failures=-1),
        callbacks=[FailureBudget(control)],
    )
    options: dict[str, Any] = {
        "use_gpu": scaling.gpus_per_worker > 0,
        "resources_per_worker": {name: amount for name, amount in resources.items() if amount},
        "label_selector": scaling.label_selector,
    }
    arguments = {"start": ray.put(start)}
    if in_place:
        from ray_app.cluster.controller.controller import ElasticTrainer
        from ray_app.cluster.controller.scaling_policy import StoppedWaitingError

        sizes = ScalingConfig(
            num_workers=(scaling.min_workers, scaling.worker_limit + scaling.standby_workers), **options
        )
        prepare = ray.put(functools.partial(_prepare, arguments))
        options = {"train_loop_config": arguments, "scaling_config": sizes, "run_config": run_config}
        trainer = ElasticTrainer(control, prepare, given_up, _work, **options)
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
        _work, train_loop_config=arguments, backend_config=backend, scaling_config=sizes, run_config=run_config
    )
    use_stable_run_id(stock, job.run_root)
    stock.fit()


def _recovers_in_place(config: Config) -> bool:
    """Whether workers come and go one by one; otherwise all start again after every change."""
    if config.failure.recovery == "restart":
        return False
    try:
        import ray_app.cluster.controller.controller  # noqa: F401 - whether it can be imported is the question
    except ImportError as error:
        logger.warning(
            "Ray %s lacks what recovery in place needs (%s): all workers restart after a failure.",
            ray.__version__,
            error,
        )
        return False
    return True


def _prepare(arguments: dict[str, Any]) -> None:
    """What a worker does before it joins: imports the user's code, which comes with the job, and opens its device."""
    try:
        start: WorkerArgs = ray.get(arguments["start"])
        torch.zeros(1, device=_gpu() if start.job.config.scaling.gpus_per_worker else "cpu")
    except Exception as error:  # it happens again where it is told: when it trains
        logger.warning("Preparing to train failed: %r", error)


@functools.cache
def _gpu() -> torch.device:
    """The GPU of this process, by what was visible when it was opened: that may be said to be more later, when CUDA
    does not look again.
    """
    return gpu_of(ray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def _work(arguments: dict[str, Any]) -> None:
    """Runs in every worker."""
    keep_freed_memory()
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    start: WorkerArgs = ray.get(arguments["start"])
    job = start.job
    register_secrets(job.config.to_dict())
    device = _gpu() if job.config.scaling.gpus_per_worker else torch.device("cpu")
    recovers = _recovers_in_place(job.config)
    backend = job.config.train.backend
    membership = RendezvousClient(
        start.rendezvous, job.plan.logical_workers, device, backend, job.paths, job.fence, recovers
    )
    over = False
    try:
        load = (lambda: read_memory_cache(start.evaluation).arrays) if start.evaluation is not None else None
        printed = copied_output(job.paths, job.fence, membership.process_name, lambda: membership.progress)
        with printed, user_code(lambda: "a worker"):  # whatever else is raised
            if start.parameters is not None:
                _ask_for_units(start, membership, device)
            else:
                train(
                    job,
                    membership,
                    _open_windows(start),
                    device,
                    start.hooks,
                    SnapshotSender(list(start.keepers)),
                    load,
                )
        over = not membership.is_leaving()
    finally:
        membership.close(over)


def _ask_for_units(start: WorkerArgs, membership: RendezvousClient, device: torch.device) -> None:
    """The work of a worker with parameter servers, until the run ends or this worker has to leave its node.

    Raises:
        PreemptedError: All workers have to leave their nodes. The servers keep the state.
        RayAppError: The run has to end.
    """
    parameters, job = start.parameters, start.job
    assert parameters is not None
    membership.need_no_group()
    name = ray.get_runtime_context().get_actor_id()
    worker = ParameterWorker(
        job, name, parameters.ask, parameters.servers, membership, _open_windows(start), device, start.hooks
    )
    try:
        while worker.once(_ASK_S):
            if membership.is_leaving():
                worker.finish()
                if membership.flags() & Flags.SAVE:
                    raise PreemptedError("All workers have to leave their nodes; the parameter servers keep the state.")
                return
    finally:
        worker.close()


def _open_windows(start: WorkerArgs) -> OpenWindows:
    @functools.cache
    def cached() -> CachedWindows:
        return CachedWindows(read_memory_cache(start.memory_cache))

    @functools.cache
    def fetch() -> Fetch:
        return start.job.through_cache(choose_fetch(start.job.config.data.reader_threads, fetch_ray))

    def open_windows(job: Job, cursor: Cursor, played: range) -> Windows:
        if start.memory_cache is not None:
            return cached()
        return StreamedWindows(
            job.plan, cursor, played, job.passes, fetch(), job.source, job.config.data.prefetch_windows
        )

    return open_windows
