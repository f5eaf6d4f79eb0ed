"""The scaling policy of a run: how many workers it should have now, and which stragglers are evicted.

- `choose_size` decides on the number of workers. It is a pure function.
- `ElasticPolicy` replaces the decisions of Ray Train's `ElasticScalingPolicy` (Ray 2.60): it computes for how many
  workers the cluster has capacity, and calls `choose_size`. The capacity is what Ray's autoscaling coordinator reserves
  for the run. Where the coordinator cannot be used, the free resources of the nodes count instead
  (`ray._private.state.available_resources_per_node`). `ray._private.state.state.get_draining_nodes` returns the nodes
  that have been announced to go away.
- `StragglerEvictor` decides whether a worker that stays slow has to leave.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import ray
from ray.train.v2._internal.execution.scaling_policy import NoopDecision
from ray.train.v2._internal.execution.scaling_policy.elastic import ElasticScalingPolicy

from ray_app.cluster.controller.backend import ControllerContext, reply
from ray_app.cluster.controller.pending_workers import PendingWorkers, Slot
from ray_app.cluster.ray_private import Node, count_fitting, count_fitting_on_gpus, evaluator_gpus, nodes_with_labels
from ray_app.errors import RayAppError
from ray_app.runlog.journal import StepRecord
from ray_app.train.membership import Heartbeat

logger = logging.getLogger(__name__)

_CAPACITY_INTERVAL_S = 1.0
"""Seconds between two computations of the number of possible workers."""
_COALESCE_S = 2.0
"""Seconds for which the first ready worker waits for the other pending workers, so that they join together."""
_PROBE_TIMEOUT_S = 0.5
"""Seconds for which a connection to a suspect node is tried."""
_SUSPECT_S = 120.0
"""Seconds for which a node is suspect after a worker on it was lost."""
_COORDINATOR_TIMEOUT_S = 5.0
"""Seconds for which a call of the autoscaling coordinator may take; Ray uses the same limit in its own calls."""
_COORDINATOR_PAUSE_S = 30.0
"""Seconds without calls of the coordinator after a call timed out."""
_MIN_SPEEDUP = 1.1
"""A straggler is evicted without a replacement only if a step becomes shorter by this factor."""


@dataclass(frozen=True)
class Sizing:
    """A decision on the number of workers.

    Args:
        workers: The number of workers that the run should have.
        reason: The reason, which goes to the event of the resize.
    """

    workers: int
    reason: str


def choose_size(
    current: int,
    possible: int,
    logical_workers: int,
    min_workers: int,
    max_workers: int,
    since_change_s: float,
    min_interval_s: float,
) -> Sizing:
    """Returns how many workers a run should have, which is never less than `current`.

    The worker with the most logical workers determines how long a step takes, so the run grows only if that worker then
    runs fewer of them. The policy never shrinks a run: workers on nodes that go away leave or are lost, and the others
    continue.

    Args:
        current: Number of workers that train.
        possible: Number of workers for which the cluster has capacity, including the current ones; nodes that are about
            to go away do not count.
        logical_workers: L.
        min_workers: Minimum number of workers to train with.
        max_workers: Maximum number of workers to train with.
        since_change_s: Seconds since the number of workers changed.
        min_interval_s: Minimum seconds between two changes; a run with fewer than `min_workers` does not wait for them.
    """
    target = min(possible, max_workers)
    if target <= current:
        return Sizing(current, "no capacity for more" if current < max_workers else "as many as configured")
    if current < min_workers:
        if target < min_workers:
            return Sizing(current, "not enough capacity")
        return Sizing(target, f"below scaling.min_workers = {min_workers}")
    before, after = ceil(logical_workers / current), ceil(logical_workers / target)
    if after == before:
        return Sizing(
            current,
            f"{target} workers would be as slow as {current}: one of them would still run {before} logical workers",
        )
    if since_change_s < min_interval_s:
        return Sizing(
            current,
            f"the last change was {since_change_s:.0f} s ago, scaling.resize_interval_s is {min_interval_s:g}",
        )
    return Sizing(target, f"a worker would run {after} logical workers instead of {before}")


class StoppedWaitingError(RayAppError):
    """The driver asked to stop while there were no workers."""


class ElasticPolicy(ElasticScalingPolicy):
    """Decides for Ray Train's controller how many workers the run has, and for `_Controller` how many are pending.

    All times are those of the monotonic clock.

    Args:
        scaling_config: Ray's configuration; its minimum is `scaling.min_workers`, its maximum `scaling.max_workers`
            plus `scaling.standby_workers`.
        context: The run.

    Attributes:
        context: The run.
        pending_workers: The workers that have not joined yet; set by `ElasticTrainer`.
        target_workers: The number of workers that should train.
        target_pending: The number of workers that should be pending: the missing workers and the standby workers.
        reason: The reason for `target_workers`.
        waiting_reason: Why the workers have to wait for capacity; None if they do not.
        draining_nodes: Ids of nodes that are about to go away, with Ray's deadlines.
        excluded_nodes: Ids of nodes on which no worker starts, because a straggler was evicted from them.
        suspect_nodes: Ids of nodes on which a worker was lost, with the time until which they are probed.
        last_change_s: When the number of workers last became `target_workers`. The controller sets it into the past if
            the next change need not wait for `scaling.resize_interval_s`.
        no_starts_until_s: The controller starts no worker before this time.
    """

    pending_workers: PendingWorkers

    def __init__(self, scaling_config: Any, context: ControllerContext) -> None:
        super().__init__(scaling_config)
        self.context = context
        self.waiting_reason: str | None = None
        self.draining_nodes: dict[str, int] = {}
        self.excluded_nodes: set[str] = set()
        self.suspect_nodes: dict[str, float] = {}
        self.last_change_s = time.monotonic()
        self.no_starts_until_s = 0.0
        self.reason = ""
        self.target_workers = self.target_pending = 0
        self._coordinator_paused_until_s = 0.0
        # The id of each node and whether it drains, at the newest answer of the coordinator.
        self._reserved_on_nodes: frozenset[tuple[str, bool]] = frozenset()
        self._possible = 0
        self._possible_computed_s = 0.0

    @property
    def has_standbys(self) -> bool:
        """Whether the run has standby workers."""
        return self.context.config.scaling.standby_workers > 0

    def _get_num_workers_for_resource_request(self) -> int:
        """Returns the number of worker-sized bundles that Ray requests from an autoscaler.

        There is one bundle for each worker and standby worker. More of them are added for the CPUs that reading and the
        evaluator need, since Ray's request has bundles of one size only. None are added if workers need GPUs or labels:
        each would make the autoscaler start a node with a GPU or with the labels, where a CPU of any node is enough.
        """
        scaling = self.context.config.scaling
        needs_special_nodes = scaling.gpus_per_worker or scaling.label_selector
        if needs_special_nodes or not scaling.cpus_per_worker:
            return self.scaling_config.max_workers
        return self.scaling_config.max_workers + ceil(self.context.reading_cpus / scaling.cpus_per_worker)

    def possible_workers(self, current: int = 0) -> int:
        """Returns for how many workers, standby workers included, the nodes that stay have capacity.

        It also updates `draining_nodes`. Within `_CAPACITY_INTERVAL_S` of the last computation it returns that result.

        Args:
            current: Number of workers that train or are pending. The result includes them, although their resources
                are not free.
        """
        if time.monotonic() - self._possible_computed_s < _CAPACITY_INTERVAL_S:
            return self._possible
        self._possible_computed_s = time.monotonic()
        self.draining_nodes = ray._private.state.state.get_draining_nodes() or {}
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"] and self._is_reachable(node)}
        staying = {name: node for name, node in alive.items() if name not in self.draining_nodes}
        if self.context.config.scaling.label_selector or self.excluded_nodes:
            # The coordinator reserves resources regardless of labels and excluded nodes.
            allowed = [node for name, node in staying.items() if name not in self.excluded_nodes]
            count = current + self._count_free_slots(allowed)
        else:
            nodes = frozenset((name, name in self.draining_nodes) for name in alive)
            # The coordinator updates its reservations only from time to time, which is too late for a changed cluster.
            has_changed = nodes != self._reserved_on_nodes
            reserved = None if self._is_coordinator_paused else self._reserved_resources(recompute=has_changed)
            if reserved is None:
                count = current + self._count_free_slots(list(staying.values()))
            else:
                self._reserved_on_nodes = nodes
                count = self._count_possible_workers({name: part for name, part in reserved.items() if name in staying})
        if self.excluded_nodes and count < self.context.config.scaling.min_workers:
            # A run with a slow worker is better than a run that waits. The next call counts these nodes again.
            self.excluded_nodes, self._possible_computed_s = set(), 0.0
        count = min(count, self._limit_by_total_resources(staying.values()))
        self._possible = max(0, count)
        return self._possible

    def free_slots(self) -> int:
        """Returns how many workers, standby workers included, fit into the free resources of the nodes.

        It is 0 if these are fewer than `scaling.min_workers`. Unlike `possible_workers` it can be called before Ray's
        controller has connected the policy to the coordinator.
        """
        scaling = self.context.config.scaling
        alive = [node for node in ray.nodes() if node["Alive"]]
        count = min(
            self._count_free_slots(alive), self._limit_by_total_resources(alive), self.scaling_config.max_workers
        )
        return count if count >= scaling.min_workers else 0

    def slot(self) -> Slot:
        """Returns the resources that each worker reserves: what `ElasticGroup.slot` returns once there is a group."""
        scaling = self.scaling_config
        return Slot(
            scaling._resources_per_worker_not_none,
            scaling.placement_strategy,
            (scaling._label_selector_per_worker(1) or [{}])[0],
        )

    def _limit_by_total_resources(self, nodes: Iterable[Node]) -> int:
        """Returns the maximum number of workers on these nodes, so that reading and the evaluator have capacity, too.

        All CPUs and GPUs of the nodes count, free or not, less those that reading and the evaluator need.
        """
        scaling, nodes = self.context.config.scaling, list(nodes)
        cpus = sum(node["Resources"].get("CPU", 0.0) for node in nodes)
        gpus = sum(node["Resources"].get("GPU", 0.0) for node in nodes)
        counts = [self.scaling_config.max_workers]
        if scaling.cpus_per_worker:
            counts.append(int(count_fitting(cpus - self.context.reading_cpus, scaling.cpus_per_worker)))
        if scaling.gpus_per_worker:
            free_gpus = max(0.0, gpus - evaluator_gpus(self.context.config))
            counts.append(int(count_fitting_on_gpus(free_gpus, scaling.gpus_per_worker)))
        return min(counts)

    def _count_possible_workers(self, reserved_resources: dict[str, dict[str, float]]) -> int:
        """Returns how many workers fit into the resources of nodes: Ray's count, of resources that are adjusted before.

        Ray divides floats and counts 4 workers of 0.2 GPUs in 1.0, so a little is added to each resource. Ray also
        divides the sum of all GPUs of a node, although the fraction of a worker has to be on one GPU. So fractions of
        GPUs into which no worker fits are left out (`count_fitting_on_gpus`).

        Args:
            reserved_resources: The resources by Ray's names, by the id of the node.
        """
        gpus_per_worker = self.context.config.scaling.gpus_per_worker

        def usable(name: str, free: float) -> float:
            if name == "GPU" and gpus_per_worker:
                free = count_fitting_on_gpus(free, gpus_per_worker) * gpus_per_worker
            return 1e-6 + free

        nodes = {
            node: {name: usable(name, free) for name, free in resources.items()}
            for node, resources in reserved_resources.items()
        }
        return int(super()._count_possible_workers(nodes))

    def capacity_without(self, node: str, current: int) -> int:
        """Returns how many workers more than the `current` ones fit on other nodes.

        Args:
            node: Id of the node that does not count.
            current: Number of workers that train.
        """
        staying = [n for n in ray.nodes() if n["Alive"] and n["NodeID"] not in self.draining_nodes]
        free = self._count_free_slots([n for n in staying if n["NodeID"] not in {node, *self.excluded_nodes}])
        return max(0, min(free, self._limit_by_total_resources(staying) - current))

    def _reserved_resources(self, recompute: bool) -> dict[str, dict[str, float]] | None:
        """Returns the resources that Ray's coordinator reserves for this run, by node; None if it does not answer.

        The coordinator divides the cluster among all runs and data pipelines of Ray. It disregards labels.

        Args:
            recompute: Whether the coordinator looks at the cluster before it answers, which takes longer.
        """
        ref = self._autoscaling_coordinator.get_reserved_resources.remote(self._requester_id, recompute=recompute)
        try:
            return ray.get(ref, timeout=_COORDINATOR_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning(
                "The autoscaling coordinator does not answer; for now the capacity is computed from the free resources"
                " of the nodes: %s",
                error,
            )
            self._coordinator_paused_until_s = time.monotonic() + _COORDINATOR_PAUSE_S
            return None

    @property
    def _is_coordinator_paused(self) -> bool:
        """Whether a call of the coordinator timed out recently; another such call would block the controller again."""
        return time.monotonic() < self._coordinator_paused_until_s

    def _maybe_send_resource_request(self) -> None:
        """Sends Ray's request for resources if it is due, unless a call of the coordinator timed out recently."""
        if self._is_coordinator_paused:
            return
        # Ray logs a timeout and does not raise, so only the duration shows it.
        started_s = time.monotonic()
        super()._maybe_send_resource_request()
        if time.monotonic() - started_s >= _COORDINATOR_TIMEOUT_S:
            self._coordinator_paused_until_s = time.monotonic() + _COORDINATOR_PAUSE_S

    def _count_free_slots(self, nodes: list[Node]) -> int:
        """Returns how many more workers fit into the free resources of the nodes with the labels of the workers."""
        free = ray._private.state.available_resources_per_node()
        allowed = nodes_with_labels(nodes, self.context.config.scaling.label_selector)
        return self._count_possible_workers({node["NodeID"]: free.get(node["NodeID"], {}) for node in allowed})

    def _is_reachable(self, node: dict[str, Any]) -> bool:
        """Returns True for a node that is not suspect, and whether a suspect node accepts a connection.

        Ray counts a lost node as alive for seconds up to a minute, so workers would be planned on it.
        """
        if time.monotonic() > self.suspect_nodes.get(node["NodeID"], 0.0):
            return True
        address = node["NodeManagerAddress"], node["NodeManagerPort"]
        try:
            socket.create_connection(address, timeout=_PROBE_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    def is_stopping(self) -> bool:
        """Returns whether the driver has asked the rendezvous to stop the run."""
        return bool(reply(self.context.rendezvous.status.remote()).stopping)

    def make_decision_for_non_running_worker_group(self) -> Any:
        """Decides to start a worker group as soon as the cluster has capacity for `scaling.min_workers` workers.

        Raises:
            StoppedWaitingError: The driver asks the run to stop.
        """
        if self.is_stopping():
            raise StoppedWaitingError("stopped while there were no workers")
        self._maybe_send_resource_request()
        scaling = self.context.config.scaling
        possible = self.possible_workers(len(self.pending_workers))
        if possible >= scaling.min_workers:
            self.set_waiting_reason(None)
            # All workers start again, and none of them is known to be slow.
            self.excluded_nodes = set()
            ready, max_workers = self.pending_workers.count_ready(), min(possible, scaling.worker_limit)
            start_now = min(ready, max_workers) if ready >= scaling.min_workers else max_workers
            # The group starts with the ready workers if they are enough; the other pending workers join later.
            standbys = max(0, min(scaling.standby_workers, possible - max_workers))
            self.target_pending = max_workers - start_now + standbys
            # A group that starts with fewer workers than possible may grow without waiting for the interval.
            self.last_change_s = time.monotonic() - (scaling.resize_interval_s if start_now < max_workers else 0.0)
            return self._get_resize_decision(start_now)
        self.set_waiting_reason(f"nodes for {possible} of at least {scaling.min_workers} workers; waiting for capacity")
        # Ray's control loop does not pause without a worker group, and would call this method all the time.
        time.sleep(_CAPACITY_INTERVAL_S / 4)
        return NoopDecision()

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        """Decides to let ready workers join if `choose_size` wants more workers.

        They join once all missing workers are ready, or once one of them has been ready for `_COALESCE_S`. The method
        sets the targets from which the controller starts or cancels pending workers.
        """
        del worker_group_status
        self._maybe_send_resource_request()
        scaling = self.context.config.scaling
        current, pending = worker_group_state.num_workers, len(self.pending_workers)
        possible = self.possible_workers(current + pending)
        if time.monotonic() < self.no_starts_until_s:
            # Only workers that have been started already can join for now.
            possible = min(possible, current + pending)
        sizing = choose_size(
            current,
            possible,
            self.context.config.logical_workers,
            scaling.min_workers,
            scaling.worker_limit,
            time.monotonic() - self.last_change_s,
            scaling.resize_interval_s,
        )
        is_short = current < scaling.min_workers and sizing.workers == current
        shortage = f"{current} of at least {scaling.min_workers} workers; waiting for capacity"
        self.set_waiting_reason(shortage if is_short else None, current)
        self.target_workers, self.reason = sizing.workers, sizing.reason
        standbys = max(0, min(scaling.standby_workers, possible - self.target_workers))
        self.target_pending = self.target_workers - current + standbys
        ready = min(self.pending_workers.count_ready(), self.target_workers - current)
        are_all_ready = current + ready >= self.target_workers
        if not ready or not (are_all_ready or self.pending_workers.count_ready(since_s=_COALESCE_S)):
            return NoopDecision()
        return self._get_resize_decision(current + ready)

    def suspect(self, nodes: set[str]) -> None:
        """Makes nodes suspect: for `_SUSPECT_S` only those that accept a connection count as capacity.

        Args:
            nodes: Ids of the nodes.
        """
        self.suspect_nodes |= dict.fromkeys(nodes, time.monotonic() + _SUSPECT_S)
        self._possible_computed_s = 0.0

    def exclude_node(self, node: str) -> None:
        """Lets no more workers start on a node, unless there would be no node left to start workers on.

        Args:
            node: Id of the node.
        """
        unusable = {node, *self.excluded_nodes, *self.draining_nodes}
        if any(n["Alive"] and n["NodeID"] not in unusable for n in ray.nodes()):
            self.excluded_nodes.add(node)
            self._possible_computed_s = 0.0

    def set_waiting_reason(self, reason: str | None, workers: int = 0) -> None:
        """Sends a changed `waiting_reason` to the rendezvous, which forms no generation while there is one.

        Args:
            reason: Why the workers have to wait for capacity; None if they do not.
            workers: Number of workers in the worker group.
        """
        if reason != self.waiting_reason:
            self.waiting_reason = reason
            reply(self.context.rendezvous.set_expected.remote(workers, reason))


def slow_workers(record: StepRecord, heartbeats: Sequence[Heartbeat]) -> dict[str, float]:
    """Returns the stragglers of a record by worker id, each with its time divided by that of the other workers.

    The ranks of a record are those of its generation. The record of an earlier generation names no worker.

    Args:
        record: The newest record.
        heartbeats: The newest heartbeats of the workers that step.
    """
    workers = {h.rank: h.worker for h in heartbeats if record.generation.endswith(f".{h.generation}")}
    return {workers[int(rank)]: slowdown for rank, slowdown in record.slow.items() if int(rank) in workers}


@dataclass(frozen=True)
class Eviction:
    """A decision to evict a straggler.

    Args:
        worker: Id of the worker that has to leave.
        slowdown: Its time divided by that of the other workers.
        reason: The reason, which goes to the event of the eviction.
    """

    worker: str
    slowdown: float
    reason: str


class StragglerEvictor:
    """Decides which stragglers have to leave, from the time for which each has been slow.

    Args:
        after_s: Seconds for which a worker must have been slow; None: no worker is evicted.
        logical_workers: L.
        min_workers: Minimum number of workers to train with.
        max_evictions: Maximum number of evictions in a start of the run, so that they end even if workers are slow
            wherever they run.
        clock: Returns the time in seconds.

    Attributes:
        evicted: Ids of the evicted workers.
    """

    def __init__(
        self,
        after_s: float | None,
        logical_workers: int,
        min_workers: int,
        max_evictions: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._after_s = after_s
        self._logical_workers = logical_workers
        self._min_workers = min_workers
        self._max_evictions = max_evictions
        self._clock = clock
        self._slow_since_s: dict[str, float] = {}
        self.evicted: set[str] = set()

    @property
    def is_enabled(self) -> bool:
        """Whether evictions are configured and fewer than `max_evictions` workers have been evicted."""
        return self._after_s is not None and len(self.evicted) < self._max_evictions

    def decide(
        self, slow: Mapping[str, float], workers: int, ready: int, replacement_capacity: Callable[[str], int]
    ) -> Eviction | None:
        """Returns the straggler that has to leave now, or None.

        A worker that has been slow for long enough leaves if another one can replace it, or if a step is faster without
        it. The slowest one leaves first. The method is called at every poll of the workers, since it records since when
        each of them has been slow.

        Args:
            slow: The slow workers by id, each with its time divided by that of the other workers.
            workers: Number of workers that train.
            ready: Number of pending workers that are ready to join.
            replacement_capacity: Returns for how many more workers there is capacity on other nodes than that of a
                worker, by the worker's id.
        """
        now_s = self._clock()
        self._slow_since_s = {worker: self._slow_since_s.get(worker, now_s) for worker in slow}
        candidates = [
            worker
            for worker, since_s in self._slow_since_s.items()
            if worker not in self.evicted and now_s - since_s >= (self._after_s or 0.0)
        ]
        if not self.is_enabled or not candidates:
            return None
        worker = max(candidates, key=lambda candidate: slow[candidate])
        if not ready and workers - 1 < max(1, self._min_workers):
            # The other workers would be too few to continue before a replacement is ready, and its capacity might be
            # gone by then.
            return None
        if ready or replacement_capacity(worker):
            effect = "another takes its place"
        else:
            # With one worker less the largest number of logical workers per worker may grow, and a step takes longer by
            # this factor.
            step_growth = ceil(self._logical_workers / (workers - 1)) / ceil(self._logical_workers / workers)
            if slow[worker] < _MIN_SPEEDUP * step_growth:
                return None
            effect = f"without it a step takes {step_growth / slow[worker]:.2f} of the time"
        self.evicted.add(worker)
        slow_s = now_s - self._slow_since_s[worker]
        reason = f"{slow[worker]:.1f} times as slow as the others for {slow_s:.0f} s; {effect}"
        return Eviction(worker, slow[worker], reason)
