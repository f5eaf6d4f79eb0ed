"""Workers that come and go one by one: Ray Train's controller (Ray 2.60), changed where it restarts everybody.

Stock Ray Train knows one reaction to every change: end all workers and start all again. Here a worker that is lost is dropped, one whose
node goes away leaves, and new ones are added while the others train on. What that needs of Ray's internals:

- `WorkerGroup`: see `cluster.group`.
- `TrainController`: where it would restart the group it drops the failed workers; where it would resize it adds some.
- `ElasticScalingPolicy`: how many workers are possible comes from it and its client of the autoscaling coordinator, how many are
  wanted from `cluster.scaling`.
- `DataParallelTrainer._initialize_and_run_controller`: the only place where a controller of one's own can be put in.
- `ray._private.state`: `state.get_draining_nodes` for notices of nodes that are about to go away, `available_resources_per_node`.

Another Ray version may lack any of it; then importing this module fails, and `cluster.trainer` falls back to restarting all workers.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from math import ceil
from typing import Any

import ray
from ray.train.backend import BackendConfig
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.controller.controller import TrainController, TrainControllerLoopIterationResult
from ray.train.v2._internal.execution.controller.state import RunningState
from ray.train.v2._internal.execution.scaling_policy import NoopDecision
from ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client import TrainAutoscalingCoordinatorClient
from ray.train.v2._internal.execution.scaling_policy.elastic import ElasticScalingPolicy
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_app.cluster.group import ElasticGroup, id_of
from ray_app.cluster.hooks import Control, FailureBudget, OwnGroupBackend
from ray_app.cluster.labels import Node, labelled
from ray_app.cluster.scaling import sizing
from ray_app.errors import RayAppError

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_GRACE_S = 2.0  # Ray itself says more about how a worker was lost, and usually sooner
_RETRY_S = 5.0
_PROBE_S, _SUSPECT_S = 0.5, 120.0


class StoppedWaitingError(RayAppError):
    """The driver asked to stop while there were no workers."""


class _Backend(OwnGroupBackend):
    has_replica_groups = True


class _BackendConfig(BackendConfig):
    @property
    def backend_cls(self) -> type[_Backend]:
        return _Backend


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
        self.suspects: dict[str, float] = {}
        self.changed_s = time.monotonic()
        self.full_until_s = 0.0
        self.reason = ""

    def after_controller_start(self, train_run_context: Any) -> None:
        """As Ray's, but under the same name at every start of the run: what a killed driver asked for would be kept for it for 180 s."""
        del train_run_context
        self._requester_id = f"train-{hashlib.sha256(self._control.run_root.encode()).hexdigest()}"
        self._coordinator_client = TrainAutoscalingCoordinatorClient(self._requester_id)
        self._send_resource_request()

    def _get_num_workers_for_resource_request(self) -> int:
        """How many bundles an autoscaler is asked to make room for: those of the workers, and as many as the CPUs of all else are worth.

        With GPUs or labels a bundle more would be another such node, where any CPU will do.
        """
        scaling = self._control.config.scaling
        rest = 0 if scaling.gpus_per_worker or scaling.label_selector or not scaling.cpus_per_worker else self._control.reading_cpus
        return self.scaling_config.max_workers + (ceil(rest / scaling.cpus_per_worker) if rest else 0)

    def possible(self, now: int = 0) -> int:
        """Workers that fit on nodes that stay, the `now` workers of now included."""
        if time.monotonic() - self._looked_s < _LOOK_S:
            return self._possible
        self._looked_s = time.monotonic()
        self.draining = ray._private.state.state.get_draining_nodes() or {}
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"] and self._is_there(node)}
        staying = {name: node for name, node in alive.items() if name not in self.draining}
        scaling = self._control.config.scaling
        if scaling.label_selector:
            count = now + self._free_on(labelled(staying.values(), scaling.label_selector))
        else:
            nodes = frozenset((name, name in self.draining) for name in alive)
            reserved = self._reserved(recompute=nodes != self._nodes)
            if reserved is None:
                return self._possible
            self._nodes = nodes
            count = self._count_possible_workers({name: part for name, part in reserved.items() if name in staying})
        if scaling.cpus_per_worker:
            cpus = sum(node["Resources"].get("CPU", 0.0) for node in staying.values())
            count = min(count, int((cpus - self._control.reading_cpus) // scaling.cpus_per_worker))
        self._possible = max(0, count)
        return self._possible

    def _reserved(self, recompute: bool) -> dict[str, dict[str, float]] | None:
        """What each node has for the workers of this run, as Ray shares it out among runs; it does not look at labels."""
        asked = self._autoscaling_coordinator.get_reserved_resources.remote(self._requester_id, recompute=recompute)
        try:
            return ray.get(asked, timeout=5)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning("The autoscaling coordinator does not answer: %s", error)
            return None

    def _free_on(self, nodes: list[Node]) -> int:
        """More workers that there is room for now on these nodes."""
        free = ray._private.state.available_resources_per_node()
        return self._count_possible_workers({node["NodeID"]: free.get(node["NodeID"], {}) for node in nodes})

    def _is_there(self, node: dict[str, Any]) -> bool:
        """Asks a node that a worker was lost on whether it lives: Ray itself counts a lost node as alive for seconds to a minute."""
        if time.monotonic() > self.suspects.get(node["NodeID"], 0.0):
            return True
        try:
            socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=_PROBE_S).close()
        except OSError:
            return False
        return True

    def make_decision_for_non_running_worker_group(self) -> Any:
        """Starts all workers as soon as enough are possible."""
        if ray.get(self._control.rendezvous.status.remote()).stopping:
            raise StoppedWaitingError("stopped while there were no workers")
        self._maybe_send_resource_request()
        possible, scaling = self.possible(), self.scaling_config
        if possible >= scaling.min_workers:
            self.wait(None)
            self.changed_s = time.monotonic()
            return self._get_resize_decision(min(possible, scaling.max_workers))
        self.wait(f"room for {possible} of at least {scaling.min_workers} workers; waiting for capacity")
        time.sleep(_LOOK_S / 4)
        return NoopDecision()

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        """Adds workers where it pays."""
        del worker_group_status
        self._maybe_send_resource_request()
        now, scaling = worker_group_state.num_workers, self.scaling_config
        possible = self.possible(now)
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

    def suspect(self, nodes: set[str]) -> None:
        """These nodes may be gone."""
        self.suspects |= dict.fromkeys(nodes, time.monotonic() + _SUSPECT_S)
        self._looked_s = 0.0

    def wait(self, reason: str | None, workers: int = 0) -> None:
        """Tells the workers and the console whether to wait for capacity."""
        if reason != self._waiting:
            self._waiting = reason
            ray.get(self._control.rendezvous.expect.remote(workers, reason))


class _Controller(TrainController):
    """A controller that changes its workers one by one."""

    worker_group_cls = ElasticGroup
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
                self._scaling_policy.suspect({w.metadata.node_id for w in group.get_workers()})
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
        silent = {i for i, w in enumerate(workers) if seen.silent.get(id_of(w.actor), 0.0) > _GRACE_S}
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
        lost = [w for i, w in enumerate(group.get_workers()) if i in places]
        self._scaling_policy.suspect({w.metadata.node_id for w in lost})
        gone = {id_of(w.actor) for w in lost}
        ray.get(self._rendezvous.dismiss.remote(gone))
        group.drop(places)
        self._owed += len(places)
        self._expect()
        self._scaling_policy.changed_s = time.monotonic() - self._dwell_s  # replacing them is urgent

    def _expect(self) -> None:
        ray.get(self._rendezvous.expect.remote(len(self._worker_group), self._scaling_policy._waiting))

    def _running(self) -> Any:
        return TrainControllerLoopIterationResult(self._get_run_attempt_id(), self._state, RunningState())


class ElasticTrainer(DataParallelTrainer):
    """Ray Train's trainer with a controller and a scaling policy of our own."""

    def __init__(self, control: Control, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, backend_config=_BackendConfig(), **options)
        self._control = control

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        # Ray's cleaner knows one placement group per run, and waits for a dashboard that may not be there; ours go with the job.
        # For data sets it starts a process each time, and we give it none.
        unused = (PlacementGroupCleanerCallback, DatasetsCallback)
        arguments["callbacks"] = [c for c in arguments["callbacks"] if not isinstance(c, unused)]
        arguments["scaling_policy"] = _Sizes(self.scaling_config, self._control)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        env = {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0", **get_env_vars_to_propagate()}
        options = {"num_cpus": 0, "scheduling_strategy": here, "runtime_env": {"env_vars": env}}
        controller = ray.remote(_Controller).options(**options).remote(**arguments)
        ray.get(controller.run.remote())
        return ray.get(controller.get_result.remote())
