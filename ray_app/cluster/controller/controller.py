"""Ray Train's controller (Ray 2.56), changed so that single workers are replaced without restarting the others.

Ray Train recovers in place only with replica groups, which it can replace but not add. Here a failed worker is dropped,
a worker on a node that goes away leaves, and new workers, which have prepared themselves before
(`cluster/controller/pending_workers.py`), join while the others train. `cluster/controller/decisions.py` decides, and
`ElasticController` acts. It overrides these parts of Ray's `TrainController`:

- `_poll_workers`, which is called twice a second while workers train: it acts on the decisions about these workers.
- `_make_and_handle_scaling_decision_for_non_running_worker_group`, which is called after a failure and without a worker
  group: where Ray would end all workers, this controller drops the failed ones and goes on.
- `_start_worker_group` and `_run_control_loop_iteration`.

Another version of Ray may lack any of these. `cluster/trainer.py` uses this module only with tested versions, and falls
back to restarting all workers if it fails before the first step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import ENABLE_CONTROLLER_STRUCTURED_LOGGING_ENV_VAR
from ray.train.v2._internal.execution.controller.controller import TrainController, TrainControllerLoopIterationResult
from ray.train.v2._internal.execution.controller.state import AbortedState, RunningState, SchedulingState
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision
from ray.train.v2._internal.logging.logging import SessionFileHandler

from ray_app.cluster.controller.decisions import (
    ControllerState,
    Decision,
    Drop,
    Evict,
    Finish,
    Resize,
    Restart,
    SlowWorker,
    Start,
    StoppedWaitingError,
    StopWaiting,
    Wait,
    WorkerState,
    decide,
    slow_workers,
)
from ray_app.cluster.controller.failure_budget import FailureBudget
from ray_app.cluster.controller.pending_workers import NO_CAPACITY, DeviceKey, PendingWorkers, Slot, device_key
from ray_app.cluster.controller.scaling_policy import CAPACITY_INTERVAL_S, ElasticPolicy
from ray_app.cluster.controller.worker_group import ElasticGroupFactory, WorkersFailedToStartError
from ray_app.cluster.ray_private import actor_id_of
from ray_app.cluster.rendezvous.actor import RendezvousHandle
from ray_app.config.config import Config
from ray_app.errors import DeviceFaultError
from ray_app.process import restore_setting, set_variables
from ray_app.train.membership import Heartbeat, RendezvousStatus

logger = logging.getLogger(__name__)

_COALESCE_S = 2.0
"""Seconds for which the first ready worker waits for the other pending workers, so that they join together.

The rendezvous has a wait of its own (`_COALESCE_S` there), which workers that join together do not prolong.
"""
_RETRY_S, _MAX_DOUBLINGS = 5.0, 4
"""Seconds before workers are started again after a failed start, and how often the time doubles."""
_MAX_DEVICE_FAULTS = 2
"""Faults of a device after which no more workers start on it."""


class ElasticController(TrainController):
    """A controller that changes its workers one by one.

    Args:
        config: The configuration of the run.
        rendezvous: The rendezvous.
        budget: Charged for failures and preemptions; it ends the run by raising.
        pending_workers: The workers that have not joined yet.
        slot: What each worker reserves.
        abandoned: Set when the driver does not wait for the run any more.
        scaling_policy: Counts the workers for which there is capacity.
        arguments: The other arguments of `TrainController`.
    """

    def __init__(
        self,
        config: Config,
        rendezvous: RendezvousHandle,
        budget: FailureBudget,
        pending_workers: PendingWorkers,
        slot: Slot,
        abandoned: threading.Event,
        scaling_policy: ElasticPolicy,
        **arguments: Any,
    ) -> None:
        self._config, self._rendezvous = config, rendezvous
        self._budget, self._pending_workers = budget, pending_workers
        self._slot, self._abandoned = slot, abandoned
        self._policy = scaling_policy
        self.worker_group_cls = ElasticGroupFactory(pending_workers, slot)
        # Whether each worker ran in the newest poll, and its error, by actor id.
        self._polls: dict[str, tuple[bool, BaseException | None]] = {}
        # Since when each straggler is slow, and the stragglers that were evicted, by actor id.
        self._slow_since_s: dict[str, float] = {}
        self._evicted = frozenset[str]()
        self._device_faults = Counter[DeviceKey]()
        # Workers that were lost and not replaced yet, and the ready workers in the newest event `standbys`.
        self._unreplaced = self._recorded_ready = 0
        self._is_run_over = False
        self._wait_reason: str | None = None
        # When the number of workers last became as large as it should be. A time in the past lets it grow at once.
        self._last_change_s = time.monotonic()
        self._no_starts_until_s = 0.0
        # Ray's structured logging would take over the logging of this process and close all other log files.
        with set_variables(**{ENABLE_CONTROLLER_STRUCTURED_LOGGING_ENV_VAR: "0"}):
            super().__init__(scaling_policy=scaling_policy, **arguments)

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

    async def _poll_workers(self) -> Any:
        status = await super()._poll_workers()
        ids = [actor_id_of(worker.actor) for worker in self._worker_group.get_workers()]
        # `status.errors` has the errors of user code themselves; in `worker_statuses` Ray Train has wrapped them.
        self._polls = {
            worker: (status.worker_statuses[index].running, status.errors.get(index))
            for index, worker in enumerate(ids)
        }
        # Ray handles errors next: it calls the method below.
        if not status.errors:
            self._poll_pending_workers()
            # The number of workers is decided for those that stay.
            decision = self._decide_and_act()
            while isinstance(decision, Drop):
                decision = self._decide_and_act()
        return status

    def _make_and_handle_scaling_decision_for_non_running_worker_group(self, controller_state: Any) -> Any:
        decision = self._decide_and_act()
        if isinstance(decision, Restart):
            decision = self._decide_and_act()
        next_state: Any = RunningState()
        if isinstance(decision, Wait):
            next_state = controller_state
            # Ray's control loop does not pause without a worker group.
            time.sleep(CAPACITY_INTERVAL_S / 4)
        elif isinstance(decision, Start):
            next_state = SchedulingState(ResizeDecision(decision.workers, self._slot.resources))
        return TrainControllerLoopIterationResult(self._get_run_attempt_id(), controller_state, next_state)

    def _start_worker_group(self, *arguments: Any, **options: Any) -> None:
        try:
            super()._start_worker_group(*arguments, **options)
        except WorkersFailedToStartError as error:
            if failures := [reason for reason in error.reasons if reason != NO_CAPACITY]:
                self._budget.record_failed_starts(failures)
                if error.is_charged:
                    # No worker goes on, so all workers are those that failed.
                    errors = {"start": RuntimeError(failures[0])}
                    self._budget.charge_failure(errors, self._rendezvous.status().step, left=0)
            raise
        self._budget.record("workers", workers=len(self._worker_group))
        self._send_expected()

    def _decide_and_act(self) -> Decision:
        """Makes one iteration: builds the state, decides, acts, and sends the number of workers to the rendezvous."""
        status = self._rendezvous.status()
        state = self._state_now(status)
        decision = decide(state)
        self._act(decision, state, status)
        self._is_run_over = self._is_run_over or state.is_run_over
        # This is sent in every iteration, because the rendezvous may have been restarted and lost it.
        self._send_expected()
        self._rendezvous.drain({*state.draining_nodes, *self._evicted})
        return decision

    def _state_now(self, status: RendezvousStatus) -> ControllerState:
        workers = []
        for worker in self._worker_group.get_workers() if self._worker_group is not None else ():
            actor_id, node = actor_id_of(worker.actor), worker.metadata.node_id
            # A worker that has just joined has not been polled yet.
            is_running, error = self._polls.get(actor_id, (True, None))
            workers.append(WorkerState(actor_id, node, is_running, error, status.lost_for_s.get(actor_id, 0.0)))
        has_failed = any(worker.error is not None for worker in workers)
        pending, now_s = self._pending_workers, time.monotonic()
        return ControllerState(
            self._config,
            self._worker_group is not None,
            tuple(workers),
            possible=0 if has_failed else self._possible_workers(len(workers)),
            pending=len(pending),
            ready=pending.count_ready(),
            has_waited=pending.count_ready(since_s=_COALESCE_S) > 0,
            since_change_s=now_s - self._last_change_s,
            can_start=now_s >= self._no_starts_until_s,
            is_stopping=status.stopping,
            draining_nodes=self._policy.draining_nodes,
            evicted=self._evicted,
            slow=self._slow_workers(status, len(workers)),
        )

    def _possible_workers(self, workers: int) -> int:
        """Returns for how many workers there is capacity, on devices that are not excluded if these are enough."""
        pending, policy = self._pending_workers, self._policy
        policy.set_held_slots(pending.num_held)
        possible = policy.possible_workers(workers + len(pending))
        if pending.num_held and possible < self._config.scaling.min_workers:
            # A run on a device that has failed is better than a run that waits.
            pending.include_all_devices()
            policy.set_held_slots(0)
            possible = policy.possible_workers(workers + len(pending))
        return possible

    def _slow_workers(self, status: RendezvousStatus, workers: int) -> tuple[SlowWorker, ...]:
        """Returns the stragglers that have been slow for long enough, and notes since when each worker is slow."""
        after_s, record = self._config.scaling.evict_straggler_after_s, status.record
        if after_s is None or record is None:
            return ()
        heartbeats = self._rendezvous.workers() if record.slow else []
        slowdowns, now_s = slow_workers(record, heartbeats), time.monotonic()
        self._slow_since_s = {worker: self._slow_since_s.get(worker, now_s) for worker in slowdowns}
        return tuple(
            SlowWorker(h, slowdowns[h.worker], slow_s, self._policy.capacity_without(h.node, workers) > 0)
            for h in heartbeats
            if h.worker in slowdowns
            and h.worker not in self._evicted
            and (slow_s := now_s - self._slow_since_s[h.worker]) >= after_s
        )

    def _poll_pending_workers(self) -> None:
        self._note_failed_starts(self._pending_workers.poll(self._policy.draining_nodes))
        ready = self._pending_workers.count_ready()
        if self._config.scaling.standby_workers and ready != self._recorded_ready:
            self._recorded_ready = ready
            self._budget.record("standbys", ready=ready)

    def _note_failed_starts(self, reasons: list[str]) -> None:
        """Delays the next start after failed ones, and records those that did not fail for lack of capacity."""
        if reasons:
            doublings = min(self._pending_workers.failed_rounds, _MAX_DOUBLINGS)
            self._no_starts_until_s = time.monotonic() + _RETRY_S * 2**doublings
        if failures := [reason for reason in reasons if reason != NO_CAPACITY]:
            self._budget.record_failed_starts(failures)

    def _send_expected(self) -> None:
        workers = 0 if self._worker_group is None else len(self._worker_group)
        self._rendezvous.set_expected(workers, self._wait_reason, self._is_run_over)

    # Acting on decisions.

    def _act(self, decision: Decision, state: ControllerState, status: RendezvousStatus) -> None:
        match decision:
            case Finish():
                pass
            case StopWaiting():
                raise StoppedWaitingError("stopped while there were no workers")
            case Start():
                # All workers start again, and none of them is known to be slow.
                self._policy.include_all_nodes()
                self._wait_reason = None
                interval_s = self._config.scaling.resize_interval_s if decision.may_grow else 0.0
                self._last_change_s = time.monotonic() - interval_s
            case Wait():
                self._wait_reason = decision.reason
            case Restart():
                self._note_device_faults(decision.errors)
                self._budget.charge_failure(decision.errors, status.step, len(state.workers) - len(decision.errors))
                self._policy.suspect(worker.node for worker in state.workers)
                self._unreplaced = 0
                self._shutdown_worker_group()
            case Drop():
                self._drop(decision, state, status.step)
            case Evict():
                self._evict(decision.slow.heartbeat, decision.reason, status.record.step if status.record else 0)
            case Resize():
                self._wait_reason = decision.wait_reason
                self._join(decision, status.step)
                pending_workers = self._pending_workers
                pending_workers.limit_to(decision.pending)
                if time.monotonic() >= self._no_starts_until_s:
                    slot = self._slot.without(self._policy.excluded_nodes)
                    pending_workers.start(decision.pending - len(pending_workers), slot)

    def _note_device_faults(self, errors: Mapping[int, BaseException]) -> None:
        """Excludes a device that has failed `_MAX_DEVICE_FAULTS` times.

        Args:
            errors: The error of each worker that failed, by its position in the worker group.
        """
        workers = self._worker_group.get_workers()
        faults = ((workers[index].metadata, e) for index, e in errors.items() if isinstance(e, DeviceFaultError))
        for metadata, error in faults:
            key = device_key(metadata)
            self._device_faults[key] += 1
            if (times := self._device_faults[key]) >= _MAX_DEVICE_FAULTS:
                self._pending_workers.exclude(key)
                self._budget.record("device_excluded", name=error.node, device=error.device, times=times)

    def _drop(self, decision: Drop, state: ControllerState, step: int) -> None:
        self._note_device_faults(decision.errors)
        if decision.errors:
            self._budget.charge_failure(decision.errors, step, len(state.workers) - len(decision.errors))
        if decision.preempted:
            self._budget.charge_preemption(decision.preempted, step, len(state.workers) - len(decision.workers))
        self._policy.suspect(worker.node for worker in state.workers if worker.worker in decision.workers)
        for actor_id in sorted(decision.workers):
            logger.info("Worker %s is dropped: %s.", actor_id, decision.reason)
        self._rendezvous.remove(decision.workers)
        self._worker_group.drop(decision.workers)
        self._unreplaced += len(decision.workers)
        # Lost workers are replaced at once: without the minimal time between changes, and in the slots that are free
        # now.
        self._last_change_s = time.monotonic() - self._config.scaling.resize_interval_s
        self._no_starts_until_s = 0.0

    def _evict(self, worker: Heartbeat, reason: str, step: int) -> None:
        self._evicted |= {worker.worker}
        self._policy.exclude_node(worker.node)
        identity = {"rank": worker.rank, "host": worker.host, "pid": worker.pid, "device": worker.device}
        self._budget.record("evicted", **identity, step=step, reason=reason)
        logger.info("Rank %d on %s is evicted at step %d: %s.", worker.rank, worker.host, step, reason)

    def _join(self, decision: Resize, step: int) -> None:
        before = len(self._worker_group)
        try:
            joined = self._worker_group.join(decision.joining)
        except ray.exceptions.RayError as error:
            self._note_failed_starts([str(error)])
            return
        if not joined:
            return
        after = before + joined
        if after == decision.workers:
            self._last_change_s = time.monotonic()
        # The workers wait for this number, and the event is written to the storage.
        self._send_expected()
        kind = "replaced" if joined <= self._unreplaced else "resized"
        self._unreplaced -= min(joined, self._unreplaced)
        self._budget.record(kind, before=before, after=after, step=step, reason=decision.reason)
        logger.info("The run is resized from %d to %d workers at step %d: %s.", before, after, step, decision.reason)


def run_controller(
    config: Config,
    rendezvous: RendezvousHandle,
    budget: FailureBudget,
    reading_cpus: float,
    prepare: Any,
    abandoned: threading.Event,
    callbacks: list[Any],
    **arguments: Any,
) -> Any:
    """Runs an `ElasticController` until the run ends, and returns Ray Train's `Result`.

    Ray runs its controller as an actor. This one runs in the driver's process, in the thread that calls `fit`, which
    saves a process and two seconds of every start; as an actor it ended with the driver, too. Its log goes to a file
    next to Ray's logs, as before.

    Args:
        config: See `ElasticController`.
        rendezvous: See `ElasticController`.
        budget: See `ElasticController`.
        reading_cpus: See `ElasticPolicy`.
        prepare: See `PendingWorkers`.
        abandoned: See `ElasticController`.
        callbacks: Ray Train's callbacks.
        arguments: The other arguments that Ray's trainer gives its controller.
    """
    # Ray's placement group cleaner knows one placement group per run and waits for a dashboard, which may not run; the
    # placement groups here go with the job. Its callback for data sets starts a process, and no data set of Ray Data is
    # passed.
    unused = (PlacementGroupCleanerCallback, DatasetsCallback)
    callbacks = [callback for callback in callbacks if not isinstance(callback, unused)]
    run_context, scaling = arguments["train_run_context"], config.scaling
    policy = ElasticPolicy(run_context.scaling_config, config, reading_cpus)
    slot = Slot(scaling.worker_resources, dict(scaling.label_selector or {}))
    pending_workers = PendingWorkers(
        prepare, scaling.min_workers, lambda: abandoned.is_set() or rendezvous.status().stopping
    )
    # The workers start before the controller's first decision, for which it waits for answers of others.
    pending_workers.start(policy.free_slots(), slot)
    try:
        with _logged(f"ray-train-controller-{run_context.run_id}.log"):
            arguments |= {"scaling_policy": policy, "callbacks": callbacks}
            controller = ElasticController(config, rendezvous, budget, pending_workers, slot, abandoned, **arguments)
            asyncio.run(controller.run())
            return controller.get_result()
    finally:
        pending_workers.limit_to(0)
        pending_workers.include_all_devices()


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
