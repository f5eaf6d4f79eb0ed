"""Ray Train's controller (Ray 2.60), changed so that workers come and go one by one.

Stock Ray Train reacts to every change in one way: it ends all workers and starts all again. Here a lost worker is
dropped, a worker on a node that goes away leaves, and new workers, which have prepared themselves before
(`cluster/controller/pending_workers.py`), join while the others train. This depends on internals of Ray:

- `WorkerGroup`: see `cluster/controller/worker_group.py`.
- `TrainController`: where it would restart the group it drops the failed workers; where it would resize the group it
  lets pending workers join.
- `ElasticScalingPolicy`: see `cluster/controller/scaling_policy.py`.
- `DataParallelTrainer._initialize_and_run_controller`: the only place where another controller can be put in. Ray runs
  its controller as an actor. This one runs in the driver's process, in the thread that calls `fit`, which saves a
  process and two seconds of every start; as an actor it ended with the driver, too. Its log goes to a file next to
  Ray's logs, as before.

Another Ray version may lack any of these. Then importing this module fails, and `cluster/trainer.py` falls back to
restarting all workers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.train.backend import BackendConfig
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import ENABLE_CONTROLLER_STRUCTURED_LOGGING_ENV_VAR
from ray.train.v2._internal.execution.controller.controller import TrainController, TrainControllerLoopIterationResult
from ray.train.v2._internal.execution.controller.state import AbortedState, RunningState
from ray.train.v2._internal.logging.logging import SessionFileHandler
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_app.cluster.controller.backend import ControllerContext, FailureBudget, NoProcessGroupBackend, reply
from ray_app.cluster.controller.pending_workers import NO_CAPACITY, PendingWorkers
from ray_app.cluster.controller.scaling_policy import ElasticPolicy, StragglerEvictor, slow_workers
from ray_app.cluster.controller.worker_group import ElasticGroup, actor_id_of
from ray_app.process import restore_setting, set_variables
from ray_app.runlog.journal import StepRecord

logger = logging.getLogger(__name__)

_GRACE_S = 2.0
"""Seconds without a heartbeat after which a worker is dropped.

Ray usually notices a lost worker sooner, and its error says more about the cause.
"""
_RETRY_S, _MAX_DOUBLINGS = 5.0, 4
"""Seconds before workers are started again after a failed start, and how often the time doubles."""
_RAY_LOGGING_VARIABLE = ENABLE_CONTROLLER_STRUCTURED_LOGGING_ENV_VAR


class _Backend(NoProcessGroupBackend):
    has_replica_groups = True
    share_cuda_visible_devices = False
    """Each worker sees only its own GPUs, also a worker that joins later.

    Since CUDA 10.1 NCCL also copies between GPUs that do not see each other.
    """


class _BackendConfig(BackendConfig):
    @property
    def backend_cls(self) -> type[_Backend]:
        return _Backend


class _Controller(TrainController):
    """A controller that changes its workers one by one.

    Args:
        context: The run.
        abandoned: Set when the driver does not wait for the run any more.
        callbacks: Ray Train's callbacks.
        scaling_policy: The policy, which has the pending workers.
        arguments: The other arguments of `TrainController`.
    """

    worker_group_cls = ElasticGroup
    _unreplaced = 0
    """Workers that were lost and not replaced yet."""
    _recorded_ready = 0
    """Ready pending workers in the newest event `standbys`."""
    _is_run_over = False
    """Whether a worker has ended in order."""

    def __init__(
        self,
        context: ControllerContext,
        abandoned: threading.Event,
        callbacks: list[Any],
        scaling_policy: ElasticPolicy,
        **arguments: Any,
    ) -> None:
        self._context, self._abandoned = context, abandoned
        self._pending_workers = scaling_policy.pending_workers
        scaling = context.config.scaling
        self._evictor = StragglerEvictor(
            scaling.evict_straggler_after_s,
            context.config.logical_workers,
            scaling.min_workers,
            scaling.worker_limit,
        )
        # Ray's structured logging would take over the logging of this process and close all other log files.
        with set_variables(**{_RAY_LOGGING_VARIABLE: "0"}):
            super().__init__(callbacks=[*callbacks, self._pending_workers], scaling_policy=scaling_policy, **arguments)

    async def _run_control_loop_iteration(self) -> None:
        if not self._abandoned.is_set():
            await super()._run_control_loop_iteration()
            return
        # Calls of Ray would start a new Ray if this process were not connected any more.
        if ray.is_initialized():
            with suppress(ray.exceptions.RayError):
                self._pending_workers.limit_to(0)
                if self._worker_group is not None:
                    self._worker_group.abort()
        self._set_state(AbortedState())

    @property
    def _budget(self) -> FailureBudget:
        return next(c for c in self._callbacks if isinstance(c, FailureBudget))

    @property
    def _rendezvous(self) -> Any:
        return self._context.rendezvous

    @property
    def _resize_interval_s(self) -> float:
        return self._context.config.scaling.resize_interval_s

    def _make_and_handle_scaling_decision_for_non_running_worker_group(self, controller_state: Any) -> Any:
        """After a failure drops the workers that failed or have left, and goes on with the others if there are any."""
        group = self._worker_group
        status = group.get_latest_poll_status() if group is not None and group.has_started() else None
        failed = set(status.errors) if status is not None else set()
        drained, evicted = self._ended_workers(status) if failed else (set(), set())
        ended = failed | drained | evicted
        if group is None or not 0 < len(ended) < len(group):
            if group is not None:
                self._unreplaced = 0
                self._scaling_policy.suspect({w.metadata.node_id for w in group.get_workers()})
                self._shutdown_worker_group()
            return super()._make_and_handle_scaling_decision_for_non_running_worker_group(controller_state)
        if drained:
            step = reply(self._rendezvous.status.remote()).step
            self._budget.budget.charge_preemption(len(drained), step, len(group) - len(ended))
        self._drop(ended, "it failed, or it left while others failed")
        return self._running()

    def _ended_workers(self, status: Any) -> tuple[set[int], set[int]]:
        """Returns the indices of workers that ended because they had to: on draining nodes, and evicted stragglers.

        To Ray a worker that ends without an error looks like the end of the run.
        """
        workers, draining_nodes = self._worker_group.get_workers(), self._scaling_policy.draining_nodes
        ended = {index for index, s in status.worker_statuses.items() if not s.running and s.error is None}
        drained = {index for index in ended if workers[index].metadata.node_id in draining_nodes}
        evicted = {index for index in ended - drained if actor_id_of(workers[index].actor) in self._evictor.evicted}
        return drained, evicted

    def _execute_resize_decision(self, decision: Any) -> Any:
        group = self._worker_group
        if group is None or not group.has_started():
            return super()._execute_resize_decision(decision)
        policy, before = self._scaling_policy, len(group)
        try:
            joined = group.join(decision.num_workers - before)
        except ray.exceptions.RayError as error:
            self._record_failed_starts([str(error)])
            return self._running()
        if not joined:
            return self._running()
        if before + joined == policy.target_workers:
            policy.last_change_s = time.monotonic()
        self._send_expected()
        replaced = min(joined, self._unreplaced)
        self._unreplaced -= replaced
        step = reply(self._rendezvous.status.remote()).step
        kind = "resized" if joined > replaced else "replaced"
        self._budget.budget.record(kind, before=before, after=before + joined, step=step, reason=policy.reason)
        logger.info(
            "The run is resized from %d to %d workers at step %d: %s.", before, before + joined, step, policy.reason
        )
        return self._running()

    def _manage_pending_workers(self) -> None:
        """Polls the pending workers, and starts or cancels some until there are as many as the policy wants."""
        pending_workers, policy = self._pending_workers, self._scaling_policy
        self._record_failed_starts(pending_workers.poll(policy.draining_nodes))
        pending_workers.limit_to(policy.target_pending)
        if policy.has_standbys and (ready := pending_workers.count_ready()) != self._recorded_ready:
            self._recorded_ready = ready
            self._budget.budget.record("standbys", ready=ready)
        if time.monotonic() >= policy.no_starts_until_s:
            missing = policy.target_pending - len(pending_workers)
            pending_workers.start(missing, self._worker_group.slot(policy.excluded_nodes))

    def _record_failed_starts(self, reasons: list[str]) -> None:
        """Delays the next start after failed ones, and records those that did not fail for lack of capacity."""
        if reasons:
            doublings = min(self._pending_workers.failed_rounds, _MAX_DOUBLINGS)
            self._scaling_policy.no_starts_until_s = time.monotonic() + _RETRY_S * 2**doublings
        if failures := [reason for reason in reasons if reason != NO_CAPACITY]:
            self._budget.record_failed_starts(failures, is_charged=False)

    async def _poll_workers(self) -> Any:
        status = await super()._poll_workers()
        if not status.errors:
            self._update_workers(status)
        return status

    def _update_workers(self, status: Any) -> None:
        """Handles pending workers, and drops workers that are silent or have left, and evicts stragglers."""
        group, policy = self._worker_group, self._scaling_policy
        workers = group.get_workers()
        self._manage_pending_workers()
        leaving = {*policy.draining_nodes, *self._evictor.evicted}
        drained, evicted = self._ended_workers(status)
        self._is_run_over = self._is_run_over or any(
            not s.running and index not in drained | evicted for index, s in status.worker_statuses.items()
        )
        # The number is sent at every poll, because the rendezvous may have been restarted and lost it.
        self._send_expected()
        _, rendezvous_status = reply([self._rendezvous.drain.remote(leaving), self._rendezvous.status.remote()])
        step, lost_for_s = rendezvous_status.step, rendezvous_status.lost_for_s
        silent = {index for index, w in enumerate(workers) if lost_for_s.get(actor_id_of(w.actor), 0.0) > _GRACE_S}
        if drained and len(drained) < len(workers):
            self._budget.budget.charge_preemption(len(drained), step, len(workers) - len(drained))
            self._drop(drained, "its node goes away")
        elif evicted and len(evicted) < len(workers):
            self._drop(evicted, "it was a straggler")
        elif silent:
            limit_s = self._context.config.failure.heartbeat_timeout_s
            error = ConnectionError(f"no heartbeat for {limit_s:g} s")
            self._budget.budget.charge_failure(dict.fromkeys(silent, error), step, len(workers) - len(silent))
            self._drop(silent, str(error))
        elif self._evictor.is_enabled and rendezvous_status.record is not None:
            self._evict_straggler(rendezvous_status.record)

    def _evict_straggler(self, record: StepRecord) -> None:
        """Has a worker leave that stays slow, if that makes the others faster.

        Args:
            record: The newest record, with the stragglers by rank.
        """
        group, policy = self._worker_group, self._scaling_policy
        heartbeats = reply(self._rendezvous.workers.remote()) if record.slow else []
        slowdowns = slow_workers(record, heartbeats)
        nodes = {actor_id_of(worker.actor): worker.metadata.node_id for worker in group.get_workers()}
        eviction = self._evictor.decide(
            slowdowns,
            len(group),
            self._pending_workers.count_ready(),
            lambda worker: policy.capacity_without(nodes.get(worker, ""), len(group)),
        )
        if eviction is None:
            return
        policy.exclude_node(nodes.get(eviction.worker, ""))
        worker, step = next(h for h in heartbeats if h.worker == eviction.worker), record.step
        self._budget.budget.record(
            "evicted", rank=worker.rank, host=worker.host, pid=worker.pid, step=step, reason=eviction.reason
        )
        logger.info("Rank %d on %s is evicted at step %d: %s.", worker.rank, worker.host, step, eviction.reason)

    def _drop(self, indices: set[int], reason: str) -> None:
        group = self._worker_group
        dropped = [w for index, w in enumerate(group.get_workers()) if index in indices]
        self._scaling_policy.suspect({w.metadata.node_id for w in dropped})
        actor_ids = {actor_id_of(w.actor) for w in dropped}
        for actor_id in sorted(actor_ids):
            logger.info("Worker %s is dropped: %s.", actor_id, reason)
        reply(self._rendezvous.evict.remote(actor_ids))
        group.drop(indices)
        self._unreplaced += len(indices)
        self._send_expected()
        # Lost workers are replaced at once: without the minimal time between changes, and in the slots that are free
        # now.
        self._scaling_policy.last_change_s = time.monotonic() - self._resize_interval_s
        self._scaling_policy.no_starts_until_s = 0.0

    def _send_expected(self) -> None:
        workers, reason = len(self._worker_group), self._scaling_policy.waiting_reason
        reply(self._rendezvous.set_expected.remote(workers, reason, self._is_run_over))

    def _running(self) -> Any:
        return TrainControllerLoopIterationResult(self._get_run_attempt_id(), self._state, RunningState())


class ElasticTrainer(DataParallelTrainer):
    """Ray Train's trainer with the controller and the scaling policy of this package.

    Args:
        context: The run.
        prepare: Reference of a function without arguments that each worker calls before it joins; its errors are
            ignored.
        abandoned: Set when the driver does not wait for the run any more; then the controller ends its workers and
            itself.
        arguments: Positional arguments of `DataParallelTrainer`.
        options: Keyword arguments of `DataParallelTrainer`.
    """

    def __init__(
        self, context: ControllerContext, prepare: Any, abandoned: threading.Event, *arguments: Any, **options: Any
    ) -> None:
        super().__init__(*arguments, backend_config=_BackendConfig(), **options)
        self._context, self._abandoned = context, abandoned
        self._prepare = prepare

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        # Ray's placement group cleaner knows one placement group per run and waits for a dashboard, which may not run;
        # the placement groups here go with the job. Its callback for data sets starts a process, and no data set of Ray
        # Data is passed.
        unused = (PlacementGroupCleanerCallback, DatasetsCallback)
        arguments["callbacks"] = [c for c in arguments["callbacks"] if not isinstance(c, unused)]
        context, abandoned = self._context, self._abandoned
        policy = arguments["scaling_policy"] = ElasticPolicy(self.scaling_config, context)
        pending_workers = PendingWorkers(
            self._prepare, context.config.scaling.min_workers, lambda: abandoned.is_set() or policy.is_stopping()
        )
        policy.pending_workers = pending_workers
        # The workers start before the controller's first decision, for which it waits for answers of others.
        pending_workers.start(policy.free_slots(), policy.slot())
        try:
            with _logged(f"ray-train-controller-{self.train_run_context.run_id}.log"):
                controller = _Controller(context, abandoned, **arguments)
                asyncio.run(controller.run())
                return controller.get_result()
        finally:
            pending_workers.limit_to(0)


@contextmanager
def _logged(name: str) -> Iterator[None]:
    """Sends the log of Ray Train in this process to a file of the Ray session, and not to the terminal."""
    ray_train_logger, handler = logging.getLogger("ray.train.v2"), SessionFileHandler(name)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def configure(level: int, propagates: bool) -> None:
        ray_train_logger.setLevel(level)
        ray_train_logger.propagate = propagates

    def configuration() -> tuple[int, bool]:
        return ray_train_logger.level, ray_train_logger.propagate

    with restore_setting(ray_train_logger.name, configuration, lambda before: configure(*before)):
        configure(logging.INFO, False)
        ray_train_logger.addHandler(handler)
        try:
            yield
        finally:
            ray_train_logger.removeHandler(handler)
