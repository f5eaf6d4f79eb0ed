"""The start of the workers through Ray Train, and the function that runs in each of them.

`fit` uses `ElasticTrainer`, which is Ray Train's `TorchTrainer` with a controller of this project, or `TorchTrainer`
itself with `failure.recovery: restart` and with versions of Ray that are not tested; both with `RendezvousTorchConfig`.
The latter needs no private name of Ray.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import ray
import ray.train
import torch
from ray.actor import ActorHandle
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, UserCallback
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer

from ray_app.cluster.controller.decisions import StoppedWaitingError
from ray_app.cluster.controller.failure_budget import FailureBudget
from ray_app.cluster.ray_private import TESTED_RAY, is_tested, use_stable_run_id
from ray_app.cluster.rendezvous.actor import RendezvousHandle
from ray_app.cluster.rendezvous.client import ANSWER_S, RendezvousClient
from ray_app.config.config import Config
from ray_app.config.strategies import list_strategies
from ray_app.data.ray_tasks import MemoryCacheHandle, fetch_ray
from ray_app.devices import HOST, assigned_device, kind_of
from ray_app.errors import ConfigError, PreemptedError, RayAppError, unwrap_app_error
from ray_app.process import keep_freed_memory, log_to_stderr
from ray_app.runlog.journal import put_event
from ray_app.runlog.output import copied_output
from ray_app.runlog.redaction import register_secrets
from ray_app.task.user_code import user_code
from ray_app.train.checkpointing.persistence import SnapshotSender
from ray_app.train.context import WorkerContext, load_in_process
from ray_app.train.job import Hooks, Job, WindowSource
from ray_app.train.loop import train
from ray_app.train.membership import Flags
from ray_app.train.process_group import prove_device, use_interface_of_host
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
        eval_cache: The decoded evaluation data if the workers evaluate, see `start_memory_cache`.
        hooks: For fault tests.
        parameters: Handles of the parameter servers, with `train.strategy: parameter_server`.
        recovers_in_place: Whether workers come and go one by one; otherwise all restart after every change.
    """

    job: Job
    rendezvous: ActorHandle
    memory_cache: MemoryCacheHandle | None = None
    snapshot_actors: tuple[ActorHandle, ...] = ()
    eval_cache: MemoryCacheHandle | None = None
    hooks: Hooks = Hooks()
    parameters: ParameterService | None = None
    recovers_in_place: bool = True


class RestartCallback(UserCallback):
    """Charges the failures of workers where Ray's controller restarts all of them. It lives in its process.

    Args:
        budget: Ends the run by raising.
        rendezvous: The rendezvous.
    """

    def __init__(self, budget: FailureBudget, rendezvous: RendezvousHandle) -> None:
        self._budget, self._rendezvous = budget, rendezvous
        self._dead_actors = set[str]()

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Charges the errors of a worker group; otherwise Ray Train restarts it."""
        del run_context
        # While the other workers of a preempted one finish, every poll tells its death again.
        causes = [getattr(error, "health_check_failure", error) for error in worker_exceptions.values()]
        dead = {cause.actor_id for cause in causes if isinstance(cause, ray.exceptions.ActorDiedError)}
        if not dead or dead - self._dead_actors:
            self._dead_actors |= dead
            self._budget.charge_failure(worker_exceptions, self._rendezvous.status().step, left=0)


class _RestartBackend(Backend):
    """The backend of workers that all restart after every change."""

    share_cuda_visible_devices = True


class _InPlaceBackend(Backend):
    """The backend of workers that come and go one by one: each is a replica group of its own for Ray Train."""

    has_replica_groups = True
    share_cuda_visible_devices = False
    """Each worker sees only its own GPUs, also a worker that joins later.

    Since CUDA 10.1 NCCL also copies between GPUs that do not see each other.
    """


@dataclass
class RendezvousTorchConfig(TorchConfig):
    """Ray Train's `TorchConfig` for workers that form their process groups at the rendezvous.

    A process group of Ray Train lives as long as the workers, where one per generation is needed.

    Args:
        recovers_in_place: Whether workers come and go one by one.
    """

    recovers_in_place: bool = True

    @property
    def backend_cls(self) -> type[Backend]:
        """See `BackendConfig`."""
        return _InPlaceBackend if self.recovers_in_place else _RestartBackend

    @property
    def train_func_context(self) -> type[nullcontext]:
        """See `BackendConfig`: the workers choose their devices themselves."""
        return nullcontext


class ElasticTrainer(TorchTrainer):
    """Ray Train's `TorchTrainer` with an `ElasticController`.

    Args:
        train_loop_per_worker: The function that runs in each worker.
        budget: See `ElasticController`.
        worker_args: The arguments of every worker.
        prepare: Reference of a function without arguments that each pending worker calls; its errors are ignored.
        abandoned: Set when the driver does not wait for the run any more; then the controller ends its workers and
            itself.
        options: Keyword arguments of `TorchTrainer`.

    Raises:
        AttributeError: `TorchTrainer` does not have the method that this class overrides.
    """

    def __init__(
        self,
        train_loop_per_worker: Callable[[dict[str, Any]], None],
        *,
        budget: FailureBudget,
        worker_args: WorkerArgs,
        prepare: Any,
        abandoned: threading.Event,
        **options: Any,
    ) -> None:
        # Without this method Ray's own controller would run, with a configuration that is made for the other one.
        if not hasattr(TorchTrainer, "_initialize_and_run_controller"):
            raise AttributeError("TorchTrainer has no method _initialize_and_run_controller")
        super().__init__(train_loop_per_worker, **options)
        self._budget, self._worker_args = budget, worker_args
        self._prepare, self._abandoned = prepare, abandoned

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        """Overrides the only method of Ray's trainers in which another controller can be chosen."""
        from ray_app.cluster.controller.controller import run_controller
        from ray_app.cluster.resources import reserved_cpus

        config, rendezvous = self._worker_args.job.config, RendezvousHandle(self._worker_args.rendezvous)
        return run_controller(
            config, rendezvous, self._budget, reserved_cpus(config), self._prepare, self._abandoned, **arguments
        )


def fit(args: WorkerArgs, max_workers: int, abandoned: threading.Event) -> None:
    """Trains on the connected cluster; blocks until the run ends.

    Args:
        args: The arguments of every worker.
        max_workers: Most workers for which the cluster has capacity now.
        abandoned: Set when the driver does not wait for the run any more. It is regarded only where workers come and go
            one by one.

    Raises:
        Exception: The error that ended the run, wrapped by Ray Train.
    """
    budget = FailureBudget(args.job.run_root, args.job.fence, args.job.config.failure)
    try:
        if can_recover_in_place(args.job.config):
            try:
                _fit_in_place(args, budget, abandoned)
                return
            except Exception as error:
                if not _is_controller_error(error) or RendezvousHandle(args.rendezvous).status().record is not None:
                    raise
                logger.warning(
                    "Recovery in place failed before the first step with Ray %s: all workers restart after a failure.",
                    ray.__version__,
                    exc_info=error,
                )
        _fit_with_restarts(replace(args, recovers_in_place=False), budget, max_workers)
    except TrainingFailedError as error:
        if not isinstance(unwrap_app_error(error), StoppedWaitingError):
            raise


def can_recover_in_place(config: Config) -> bool:
    """Returns whether workers come and go one by one, and warns if that is not because of the configuration."""
    if config.failure.recovery == "restart":
        return False
    if not is_tested():
        oldest, newest = (".".join(map(str, version)) for version in TESTED_RAY)
        logger.warning(
            "Recovery in place has been tested with Ray %s to %s, but this is Ray %s: all workers restart after a"
            " failure, without standby workers and evictions of stragglers.",
            *(oldest, newest, ray.__version__),
        )
    return is_tested()


def _is_controller_error(error: Exception) -> bool:
    """Returns whether an error that ended the run comes from the code of the controller.

    The budget ends a run with an error of the application after failures of workers, a lost cluster ends it with one of
    Ray, and storage with an `OSError`.
    """
    cause = getattr(error, "controller_failure", error)
    inner = unwrap_app_error(error)
    return not isinstance(inner, RayAppError) and not isinstance(cause, ray.exceptions.RayError | OSError)


def _fit_in_place(args: WorkerArgs, budget: FailureBudget, abandoned: threading.Event) -> None:
    """Trains with workers that come and go one by one."""
    scaling = args.job.config.scaling
    num_workers = scaling.min_workers, scaling.worker_limit + scaling.standby_workers
    options = _trainer_options(args, num_workers)
    prepare = ray.put(functools.partial(_prepare, options["train_loop_config"]))
    trainer = ElasticTrainer(
        _run_worker, budget=budget, worker_args=args, prepare=prepare, abandoned=abandoned, **options
    )
    use_stable_run_id(trainer, args.job.run_root)
    trainer.fit()


def _fit_with_restarts(args: WorkerArgs, budget: FailureBudget, max_workers: int) -> None:
    """Trains with workers that all restart after every change."""
    scaling = args.job.config.scaling
    is_elastic = max_workers > scaling.min_workers
    num_workers = (scaling.min_workers, max_workers) if is_elastic else max_workers
    elastic = {"elastic_resize_monitor_interval_s": scaling.resize_interval_s} if is_elastic else {}
    callbacks = [RestartCallback(budget, RendezvousHandle(args.rendezvous))]
    trainer = TorchTrainer(_run_worker, **_trainer_options(args, num_workers, callbacks, **elastic))
    use_stable_run_id(trainer, args.job.run_root)
    trainer.fit()


def _trainer_options(
    args: WorkerArgs,
    num_workers: int | tuple[int, int],
    callbacks: Sequence[UserCallback] = (),
    **elastic: float,
) -> dict[str, Any]:
    """Returns the keyword arguments of `TorchTrainer` for a number of workers, or the least and the largest number."""
    job, scaling = args.job, args.job.config.scaling
    # The budget counts failures. Preemptions have a limit of their own from Ray 2.58 on.
    limits = {"max_failures", "max_preemption_failures"} & {field.name for field in fields(FailureConfig)}
    return {
        "train_loop_config": {"args": ray.put(args)},
        "torch_config": RendezvousTorchConfig(recovers_in_place=args.recovers_in_place),
        "scaling_config": ScalingConfig(
            num_workers=num_workers,
            use_gpu=scaling.worker_gpus > 0,
            resources_per_worker=scaling.worker_resources,
            label_selector=scaling.label_selector,
            **elastic,
        ),
        "run_config": RunConfig(
            name=job.paths.ray_storage(job.fence).name,
            storage_path=str(job.paths.ray_storage(job.fence).parent),
            failure_config=FailureConfig(**dict.fromkeys(limits, -1)),
            callbacks=list(callbacks),
        ),
    }


def _prepare(worker_config: dict[str, Any]) -> None:
    """Imports the user's code, which comes with the job, and opens the device; a pending worker calls it."""
    try:
        args: WorkerArgs = ray.get(worker_config["args"])
        _open_device(args.job.config)
    # The error occurs again when the worker trains, where it is charged and reported.
    except Exception as error:
        logger.warning("Preparing to train failed: %r", error)


def _open_device(config: Config) -> torch.device:
    """Returns the device of this worker, on which it has computed and communicated alone, see `prove_device`."""
    # NCCL reads the name of its interface once in a process.
    use_interface_of_host(ray.util.get_node_ip_address())
    device = _assigned_gpu() if config.scaling.worker_gpus else HOST
    prove_device(device, choose_backend(config, device))
    return device


@functools.cache
def _assigned_gpu() -> torch.device:
    """Returns the accelerator of this process.

    It is cached, because Ray Train may make more GPUs visible later, which CUDA does not notice once it is initialized.
    """
    return assigned_device(ray.get_runtime_context().get_accelerator_ids()["GPU"])


def choose_backend(config: Config, device: torch.device) -> Literal["auto", "gloo"]:
    """Returns `train.backend`, or gloo for a worker without a group, or with a share or a slice of a GPU.

    NCCL refuses shares and slices.

    Raises:
        ConfigError: The strategy cannot use gloo on a slice; the rules of the configuration refuse shares.
    """
    if 0 < config.scaling.worker_gpus < 1 or config.train.strategy_traits.has_servers:
        return "gloo"
    if not kind_of(device).is_slice(device):
        return config.train.backend
    if config.scaling.max_workers != 1 and not config.train.strategy_traits.can_share_gpus:
        raise ConfigError(
            f"The GPU of a worker is a slice (MIG), but train.strategy {config.train.strategy} needs NCCL, which"
            f" slices lack. Use {list_strategies(lambda t: t.can_share_gpus)}, scaling.max_workers 1, or whole GPUs."
        )
    return "gloo"


def _run_worker(worker_config: dict[str, Any]) -> None:
    """Trains in a worker until the run ends or the worker has to leave."""
    keep_freed_memory()
    log_to_stderr()
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    args: WorkerArgs = ray.get(worker_config["args"])
    job = args.job
    register_secrets(job.config.to_dict())
    with user_code(lambda: "a worker alone on its device, before it joins the others"):
        device = _open_device(job.config)
    # Where all workers restart, Ray Train starts them together, and none joins them later.
    fixed_workers = None if args.recovers_in_place else ray.train.get_context().get_world_size()
    membership = RendezvousClient(
        RendezvousHandle(args.rendezvous, ANSWER_S),
        job.plan.logical_workers,
        device,
        choose_backend(job.config, device),
        job.paths,
        job.fence,
        fixed_workers,
    )
    is_run_over = False
    try:
        if fixed_workers is not None and ray.train.get_context().get_world_rank() == 0:
            put_event(job.paths, "workers", job.fence, workers=fixed_workers)
        eval_cache, cache = args.eval_cache, args.memory_cache
        context = WorkerContext(
            job,
            membership,
            open_windows=WindowSource(fetch_ray, cache.read if cache is not None else None),
            device=device,
            hooks=args.hooks,
            sender=SnapshotSender(list(args.snapshot_actors)),
            load_evaluation=(lambda source: eval_cache.read()) if eval_cache is not None else load_in_process,
        )
        output = copied_output(job.paths, job.fence, membership.process_name, lambda: membership.progress)
        # Errors outside of more specific guards are attributed to the worker.
        with output, user_code(lambda: "a worker"):
            if args.parameters is not None:
                is_run_over = _run_parameter_worker(args.parameters, context, membership)
            else:
                is_run_over = train(context)
    finally:
        membership.close(is_run_over)


def _run_parameter_worker(parameters: ParameterService, context: WorkerContext, membership: RendezvousClient) -> bool:
    """Runs units of work for parameter servers until the run ends or this worker has to leave its node.

    Returns:
        Whether the run is over.

    Raises:
        PreemptedError: All workers have to leave their nodes; the servers keep the state.
        RayAppError: The run has to end.
    """
    membership.step_without_group()
    name = ray.get_runtime_context().get_actor_id()
    worker = ParameterWorker(context, name, parameters.ask, parameters.servers)
    try:
        while worker.once(_REQUEST_TIMEOUT_S):
            if membership.is_draining():
                worker.finish()
                if membership.flags() & Flags.SAVE:
                    raise PreemptedError("All workers have to leave their nodes; the parameter servers keep the state.")
                return False
        return True
    finally:
        worker.close()
