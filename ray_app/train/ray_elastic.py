"""Workers that come and go one by one: Ray Train's worker group and controller (Ray 2.60), changed where they restart everybody.

Stock Ray Train knows one reaction to every change: end all workers and start all again. Here a worker that is lost is dropped, one whose
node goes away leaves, and new ones are added while the others train on. What that needs of Ray's internals:

- `WorkerGroup` gets `drop` and `grow`, and a placement group per worker, so that the slot of a lost worker is free again.
- `TrainController`: where it would restart the group it drops the failed workers; where it would resize it adds some.
- `ElasticScalingPolicy`: how many workers are possible comes from it, how many are wanted from `train.scaling`.
- `DataParallelTrainer._initialize_and_run_controller`: the only place where a controller of one's own can be put in.
- `ray._private.state.state.get_draining_nodes`: notices of nodes that are about to go away.

Another Ray version may lack any of it; then importing this module fails, and `train.trainer` falls back to restarting all workers.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

import ray
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.controller.controller import TrainController, TrainControllerLoopIterationResult
from ray.train.v2._internal.execution.controller.state import RunningState
from ray.train.v2._internal.execution.scaling_policy import NoopDecision
from ray.train.v2._internal.execution.scaling_policy.elastic import ElasticScalingPolicy
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import PlacementGroupHandle
from ray.train.v2._internal.execution.worker_group.worker import Worker
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.train.v2._internal.util import bundle_to_remote_args
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ray_app.errors import RayAppError
from ray_app.train.ray_hooks import Control, FailureBudget, OwnGroupBackend
from ray_app.train.scaling import sizing

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_PLACE_S = 5.0
_GRACE_S = 2.0  # Ray itself says more about how a worker was lost, and usually sooner
_START_S = 120.0
_RETRY_S = 5.0


class StoppedWaitingError(RayAppError):
    """The driver asked to stop while there were no workers."""


class _Backend(OwnGroupBackend):
    has_replica_groups = True


class _BackendConfig(TorchConfig):
    @property
    def backend_cls(self) -> type[_Backend]:
        return _Backend


class _Slots(PlacementGroupHandle):
    """A placement group for every worker."""

    def __init__(self, resources: dict[str, float], strategy: str, label_selectors: list[Any] | None) -> None:
        self._resources, self._strategy, self._selectors = resources, strategy, label_selectors
        self.free: list[PlacementGroup] = []
        self._used: dict[str, PlacementGroup] = {}

    def reserve(self, count: int, timeout_s: float) -> int:
        """Reserves slots; those that are not there in time are given up. Returns how many there are."""
        made = []
        for i in range(count):
            selector = [self._selectors[i]] if self._selectors else None
            made.append(placement_group([self._resources], strategy=self._strategy, bundle_label_selector=selector))
        deadline = time.monotonic() + timeout_s
        for group in made:
            if group.wait(max(0.0, deadline - time.monotonic())):
                self.free.append(group)
            else:
                remove_placement_group(group)
        return len(self.free)

    def use(self, actor_id: str, slot: PlacementGroup) -> None:
        self._used[actor_id] = slot

    def release(self, actor_id: str) -> None:
        group = self._used.pop(actor_id, None)
        if group is not None:
            remove_placement_group(group)

    def give_up_free(self) -> None:
        while self.free:
            remove_placement_group(self.free.pop())

    @property
    def placement_group(self) -> PlacementGroup:
        return next(iter([*self._used.values(), *self.free]))

    def ready(self) -> Any:
        return self.placement_group.ready()

    def wait(self, timeout_seconds: float = 30) -> bool:
        del timeout_seconds
        return bool(self.free)

    def shutdown(self) -> None:
        self.give_up_free()
        for actor_id in list(self._used):
            self.release(actor_id)


class _ElasticGroup(WorkerGroup):
    """A worker group that loses and gains single workers."""

    _slots: _Slots
    _next_rank = 0
    _worker_group_state: Any

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> _Slots:
        del scaling_config
        context = worker_group_context
        self._slots = _Slots(context.resources_per_worker, context.placement_strategy, context.label_selector)
        if self._slots.reserve(context.num_workers, _PLACE_S) < context.num_workers:
            self._slots.give_up_free()
        return self._slots

    def _create_workers(self, num_workers: int, placement_group: Any, resources_per_worker: dict[str, float], **kwargs: Any) -> list:
        """As Ray's, but in a slot of its own each."""
        del placement_group
        made = ray.remote(
            runtime_env=self._get_worker_runtime_env(self._train_run_context.run_config.worker_runtime_env),
            **bundle_to_remote_args(resources_per_worker),
        )(self._worker_cls)
        actors = []
        for _ in range(num_workers):
            slot = self._slots.free.pop()
            strategy = PlacementGroupSchedulingStrategy(slot, placement_group_bundle_index=0)
            actors.append(made.options(scheduling_strategy=strategy).remote())
            self._slots.use(_id_of(actors[-1]), slot)
        try:
            found = ray.get([actor.get_metadata.remote() for actor in actors], timeout=_START_S)
        except (ray.exceptions.RayError, TimeoutError):
            for actor in actors:
                ray.kill(actor)
                self._slots.release(_id_of(actor))
            raise
        workers = [Worker(a, m, resources_per_worker, placement_group_bundle_index=0) for a, m in zip(actors, found, strict=True)]
        first, self._next_rank = self._next_rank, self._next_rank + num_workers
        return self._assign_worker_ranks(workers, first, first + num_workers, kwargs.get("replica_group_size"))

    def drop(self, gone: set[int]) -> None:
        """Ends the workers at these places of the list and frees their slots."""
        workers = self.get_workers()
        for place in gone:
            ray.kill(workers[place].actor)
            self._slots.release(_id_of(workers[place].actor))
        self._set([w for place, w in enumerate(workers) if place not in gone])

    def grow(self, count: int) -> int:
        """Starts more workers, as many as there is room for at once; the others train on. Returns how many."""
        count = self._slots.reserve(count, _PLACE_S)
        if not count:
            return 0
        context, state = self._worker_group_context, self._worker_group_state
        started = self._create_workers(count, None, context.resources_per_worker, replica_group_size=1)
        groups = [ReplicaGroup([worker], context.resources_per_worker, self._replica_group_callbacks) for worker in started]
        try:
            self._init_train_context(started, state.sync_actor)
            for group in groups:
                group.start_training(context)
        except ray.exceptions.RayError:
            for worker in started:
                ray.kill(worker.actor)
                self._slots.release(_id_of(worker.actor))
            raise
        self._set([*self.get_workers(), *started])
        return count

    def _set(self, workers: list) -> None:
        context = self._worker_group_context
        self._worker_group_state = dataclasses.replace(self._worker_group_state, workers=workers)
        self._replica_groups = [ReplicaGroup([w], context.resources_per_worker, self._replica_group_callbacks) for w in workers]
        self._worker_rank_to_replica_group_rank = {place: place for place in range(len(workers))}
        self._world_rank_to_ongoing_poll.clear()
        self._latest_poll_status = None


class _Sizes(ElasticScalingPolicy):
    """How many workers there can and should be."""

    def __init__(self, scaling_config: Any, control: Control) -> None:
        super().__init__(scaling_config)
        self._control = control
        self._nodes: frozenset[tuple[str, bool]] = frozenset()
        self._possible = 0
        self._looked_s = 0.0
        self._waiting: str | None = None
        self.draining: dict[str, int] = {}
        self.changed_s = time.monotonic()
        self.full_until_s = 0.0
        self.reason = ""

    def possible(self) -> int:
        """Workers that fit on nodes that stay, those of now included."""
        if time.monotonic() - self._looked_s < _LOOK_S:
            return self._possible
        self._looked_s = time.monotonic()
        self.draining = ray._private.state.state.get_draining_nodes() or {}
        alive = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        staying = {node: resources for node, resources in alive.items() if node not in self.draining}
        nodes = frozenset((node, node in self.draining) for node in alive)
        try:
            reserved = ray.get(
                self._autoscaling_coordinator.get_reserved_resources.remote(self._requester_id, recompute=nodes != self._nodes),
                timeout=5,
            )
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("The autoscaling coordinator does not answer: %s", error)
            return self._possible
        self._nodes = nodes
        count = self._count_possible_workers({node: part for node, part in reserved.items() if node in staying})
        each = self._control.config.scaling.cpus_per_worker
        if each:
            cpus = sum(resources.get("CPU", 0.0) for resources in staying.values())
            count = min(count, int((cpus - self._control.reading_cpus) // each))
        self._possible = max(0, count)
        return self._possible

    def make_decision_for_non_running_worker_group(self) -> Any:
        """Starts all workers as soon as enough are possible."""
        self._maybe_send_resource_request()
        possible, scaling = self.possible(), self.scaling_config
        if possible >= scaling.min_workers:
            self.wait(None)
            self.changed_s = time.monotonic()
            return self._get_resize_decision(min(possible, scaling.max_workers))
        self.wait(f"room for {possible} of at least {scaling.min_workers} workers; waiting for capacity")
        if ray.get(self._control.rendezvous.status.remote()).stopping:
            raise StoppedWaitingError("stopped while there were no workers")
        time.sleep(_LOOK_S / 4)
        return NoopDecision()

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        """Adds workers where it pays."""
        del worker_group_status
        self._maybe_send_resource_request()
        now, possible, scaling = worker_group_state.num_workers, self.possible(), self.scaling_config
        if time.monotonic() < self.full_until_s:
            possible = min(possible, now)
        since, dwell = time.monotonic() - self.changed_s, self._control.config.scaling.resize_check_s
        logical = self._control.config.logical_workers
        wanted = sizing(now, possible, logical, scaling.min_workers, scaling.max_workers, since, dwell)
        short = now < scaling.min_workers and wanted.workers == now
        self.wait(f"{now} of at least {scaling.min_workers} workers; waiting for capacity" if short else None, now)
        if wanted.workers == now:
            return NoopDecision()
        self.reason = wanted.reason
        return self._get_resize_decision(wanted.workers)

    def wait(self, reason: str | None, workers: int = 0) -> None:
        """Tells the workers and the console whether to wait for capacity."""
        if reason != self._waiting:
            self._waiting = reason
            ray.get(self._control.rendezvous.expect.remote(workers, reason))


class _Controller(TrainController):
    """A controller that changes its workers one by one."""

    worker_group_cls = _ElasticGroup
    _owed = 0
    """Workers that were lost and not replaced yet."""

    @property
    def _budget(self) -> FailureBudget:
        return next(c for c in self._callbacks if isinstance(c, FailureBudget))

    @property
    def _rendezvous(self) -> Any:
        return self._scaling_policy._control.rendezvous

    def _make_and_handle_scaling_decision_for_non_running_worker_group(self, controller_state: Any) -> Any:
        """After a failure: drops those who failed and goes on with the others, if there are any."""
        group = self._worker_group
        status = group.get_latest_poll_status() if group is not None and group.has_started() else None
        failed = set(status.errors) if status is not None else set()
        if group is None or not 0 < len(failed) < len(group):
            if group is not None:
                self._owed = 0
                self._shutdown_worker_group()
            return super()._make_and_handle_scaling_decision_for_non_running_worker_group(controller_state)
        self._drop(failed)
        return self._running()

    def _execute_resize_decision(self, decision: Any) -> Any:
        group = self._worker_group
        if group is None or not group.has_started():
            return super()._execute_resize_decision(decision)
        before = len(group)
        try:
            added = group.grow(decision.num_workers - before)
        except (ray.exceptions.RayError, TimeoutError) as error:
            added = 0
            self._budget.budget.note("start_failed", workers=decision.num_workers - before, reason=str(error)[:2000])
        if not added:
            self._scaling_policy.full_until_s = time.monotonic() + _RETRY_S
        else:
            self._scaling_policy.changed_s = time.monotonic()
            self._expect()
            replaced = min(added, self._owed)
            self._owed -= replaced
            step = ray.get(self._rendezvous.status.remote()).step
            kind = "resized" if added > replaced else "replaced"
            self._budget.budget.note(kind, before=before, after=before + added, step=step, reason=self._scaling_policy.reason)
        return self._running()

    @property
    def _dwell_s(self) -> float:
        return self._scaling_policy._control.config.scaling.resize_check_s

    async def _poll_workers(self) -> Any:
        status = await super()._poll_workers()
        if not status.errors:
            self._tend(status)
        return status

    def _tend(self, status: Any) -> None:
        """Looks after workers that are silent, or have left, or have to leave."""
        group, policy = self._worker_group, self._scaling_policy
        workers = group.get_workers()
        draining = set(policy.draining)
        self._expect()  # again and again: the rendezvous may have been started anew
        seen = ray.get([self._rendezvous.drain.remote(draining), self._rendezvous.status.remote()])[1]
        left = {i for i, s in status.worker_statuses.items() if not s.running and workers[i].metadata.node_id in draining}
        silent = {i for i, w in enumerate(workers) if seen.silent.get(_id_of(w.actor), 0.0) > _GRACE_S}
        if left and len(left) < len(workers):
            self._budget.budget.preempted(len(left), seen.step, len(workers) - len(left))
            self._drop(left)
        elif silent:
            limit = policy._control.config.failure.heartbeat_timeout_s
            error = ConnectionError(f"no sign of life for {limit:g} s")
            self._budget.budget.failed(dict.fromkeys(silent, error), seen.step, len(workers) - len(silent))
            self._drop(silent)

    def _drop(self, places: set[int]) -> None:
        group = self._worker_group
        gone = {_id_of(w.actor) for i, w in enumerate(group.get_workers()) if i in places}
        ray.get(self._rendezvous.dismiss.remote(gone))
        group.drop(places)
        self._owed += len(places)
        self._expect()
        self._scaling_policy.changed_s = time.monotonic() - self._dwell_s  # replacing them is urgent

    def _expect(self) -> None:
        ray.get(self._rendezvous.expect.remote(len(self._worker_group), self._scaling_policy._waiting))

    def _running(self) -> Any:
        return TrainControllerLoopIterationResult(self._get_run_attempt_id(), self._state, RunningState())


class ElasticTrainer(TorchTrainer):
    """A TorchTrainer with a controller and a scaling policy of our own."""

    def __init__(self, control: Control, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, torch_config=_BackendConfig(), **options)
        self._control = control

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        # Ray's cleaner knows one placement group per run, and waits for a dashboard that may not be there; ours go with the job.
        arguments["callbacks"] = [c for c in arguments["callbacks"] if not isinstance(c, PlacementGroupCleanerCallback)]
        arguments["scaling_policy"] = _Sizes(self.scaling_config, self._control)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        env = {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0", **get_env_vars_to_propagate()}
        options = {"num_cpus": 0, "scheduling_strategy": here, "runtime_env": {"env_vars": env}}
        controller = ray.remote(_Controller).options(**options).remote(**arguments)
        ray.get(controller.run.remote())
        return ray.get(controller.get_result.remote())


def _id_of(actor: Any) -> str:
    return actor._actor_id.hex()
