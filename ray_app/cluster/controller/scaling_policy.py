"""How many workers a run should have now, and which stragglers are evicted.

`choose_size` is the decision on the number of workers, as a pure function. `ElasticPolicy` asks it: it is Ray Train's
elastic scaling policy (Ray 2.60) with other answers. How many workers are possible comes from Ray's client of the
autoscaling coordinator and from `ray._private.state`: `state.get_draining_nodes` has the notices of nodes that are
about to go away, and `available_resources_per_node` the free resources. `StragglerEvictor` decides whether a worker
that stays slow has to leave.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable, Mapping
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

logger = logging.getLogger(__name__)

_CHECK_S = 1.0
"""Seconds for which the number of possible workers is not computed again."""
_COALESCE_S = 2.0
"""Seconds that ready workers wait for other pending workers, so that they join together."""
_PROBE_TIMEOUT_S, _SUSPECT_S = 0.5, 120.0
_COORDINATOR_TIMEOUT_S = 5.0
"""Seconds that the autoscaling coordinator has for an answer; the limit is Ray's."""
_COORDINATOR_PAUSE_S = 30.0
"""Seconds for which the coordinator is not asked after it has not answered."""
_MIN_SPEEDUP = 1.1
"""A straggler is evicted without a replacement only if a step becomes shorter by this factor."""


@dataclass(frozen=True)
class Sizing:
    """A decision on the number of workers.

    Args:
        workers: How many workers there should be.
        reason: The reason, for the record.
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
    """Returns how many workers a run should have.

    More workers pay only if the worker that runs the most logical workers runs fewer of them then. A group does not
    shrink by decision: workers on nodes that go away leave or are lost, and the others go on.

    Args:
        current: Workers that train.
        possible: Workers for which the cluster has capacity, with the current ones; nodes that are about to go away do
            not count.
        logical_workers: L.
        min_workers: Fewest workers to train with.
        max_workers: Most workers to train with.
        since_change_s: Seconds since the number of workers changed.
        min_interval_s: Fewest seconds between two changes that are not urgent.
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
    """Ray Train's scaling policy with the sizes of this run, standby workers included.

    Args:
        scaling_config: The fewest workers, and the most workers together with the standby workers.
        context: The run.

    Attributes:
        context: The run.
        pending_workers: The workers that have not joined yet; set by the trainer.
        target_workers: How many workers there should be.
        target_pending: How many workers should be pending: those that are missing, and the standby workers.
        reason: The reason for `target_workers`.
        waiting_reason: Why the workers have to wait for capacity; None if they do not.
        draining_nodes: Ids of nodes that are about to go away, with Ray's deadlines.
        excluded_nodes: Ids of nodes on which no worker starts, because a worker was slow there.
        suspect_nodes: Ids of nodes on which a worker was lost, with the time until which they are probed.
        last_change_s: When the number of workers changed to what it should be.
        no_starts_until_s: No worker is started before this time, by the monotonic clock.
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
        # The nodes, and whether each is draining, at the last question to the coordinator.
        self._nodes: frozenset[tuple[str, bool]] = frozenset()
        self._possible = 0
        self._checked_s = 0.0

    @property
    def has_standbys(self) -> bool:
        """Whether the run has standby workers."""
        return self.context.config.scaling.standby_workers > 0

    def _get_num_workers_for_resource_request(self) -> int:
        """Returns how many bundles an autoscaler is asked to have capacity for.

        These are the bundles of the workers, and as many more as the CPUs of the rest of the run are worth. With GPUs
        or labels one more bundle would ask for another such node, where a CPU of any node is enough; then none is
        added.
        """
        scaling = self.context.config.scaling
        needs_special_nodes = scaling.gpus_per_worker or scaling.label_selector
        if needs_special_nodes or not scaling.cpus_per_worker:
            return self.scaling_config.max_workers
        return self.scaling_config.max_workers + ceil(self.context.reading_cpus / scaling.cpus_per_worker)

    def possible_workers(self, current: int = 0) -> int:
        """Returns how many workers fit on the nodes that stay, standby workers and the `current` ones included."""
        if time.monotonic() - self._checked_s < _CHECK_S:
            return self._possible
        self._checked_s = time.monotonic()
        self.draining_nodes = ray._private.state.state.get_draining_nodes() or {}
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"] and self._is_reachable(node)}
        staying = {name: node for name, node in alive.items() if name not in self.draining_nodes}
        if self.context.config.scaling.label_selector or self.excluded_nodes:
            # The coordinator's reservations take no account of labels and excluded nodes.
            allowed = [node for name, node in staying.items() if name not in self.excluded_nodes]
            count = current + self._free_workers_on(allowed)
        else:
            nodes = frozenset((name, name in self.draining_nodes) for name in alive)
            reserved = None if self._is_coordinator_paused else self._reserved_resources(recompute=nodes != self._nodes)
            if reserved is None:
                count = current + self._free_workers_on(list(staying.values()))
            else:
                self._nodes = nodes
                count = self._count_possible_workers({name: part for name, part in reserved.items() if name in staying})
        if self.excluded_nodes and count < self.context.config.scaling.min_workers:
            # A slow worker is better than none.
            self.excluded_nodes, self._checked_s = set(), 0.0
        count = min(count, self._workers_beside_reading(staying.values()))
        self._possible = max(0, count)
        return self._possible

    def free_slots(self) -> int:
        """Returns how many workers, standby workers included, fit into the free resources of the nodes.

        It is 0 if the run could not start with them.
        """
        scaling = self.context.config.scaling
        alive = [node for node in ray.nodes() if node["Alive"]]
        count = min(self._free_workers_on(alive), self._workers_beside_reading(alive), self.scaling_config.max_workers)
        return count if count >= scaling.min_workers else 0

    def slot(self) -> Slot:
        """Returns the resources that each worker reserves, see `ElasticGroup.slot`."""
        scaling = self.scaling_config
        return Slot(
            scaling._resources_per_worker_not_none,
            scaling.placement_strategy,
            (scaling._label_selector_per_worker(1) or [{}])[0],
        )

    def _workers_beside_reading(self, nodes: Iterable[Node]) -> int:
        """Returns how many workers all CPUs and GPUs of these nodes are enough for, without those of the rest of the
        run.
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
        """Returns Ray's count for resources that are adjusted first.

        Ray divides floats, and divides the sum of all GPUs of a node. So a little is added, for fractions of a GPU that
        add up to it, and the fractions of GPUs into which no worker fits are left out (`cluster/ray_private.py`).
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
        """Returns how many workers more than the `current` ones fit on other nodes than this one."""
        staying = [n for n in ray.nodes() if n["Alive"] and n["NodeID"] not in self.draining_nodes]
        free = self._free_workers_on([n for n in staying if n["NodeID"] not in {node, *self.excluded_nodes}])
        return max(0, min(free, self._workers_beside_reading(staying) - current))

    def _reserved_resources(self, recompute: bool) -> dict[str, dict[str, float]] | None:
        """Returns the resources of each node that Ray's coordinator assigns to this run.

        The coordinator shares the cluster among runs and takes no account of labels. The result is None if it does not
        answer.
        """
        ref = self._autoscaling_coordinator.get_reserved_resources.remote(self._requester_id, recompute=recompute)
        try:
            return ray.get(ref, timeout=_COORDINATOR_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning(
                "The autoscaling coordinator does not answer; what is free on the nodes counts for now: %s", error
            )
            self._coordinator_paused_until_s = time.monotonic() + _COORDINATOR_PAUSE_S
            return None

    @property
    def _is_coordinator_paused(self) -> bool:
        """Whether the autoscaling coordinator has not answered recently: each question blocks the controller for
        seconds.
        """
        return time.monotonic() < self._coordinator_paused_until_s

    def _maybe_send_resource_request(self) -> None:
        """Sends Ray's request, unless the coordinator has not answered recently."""
        if self._is_coordinator_paused:
            return
        started_s = time.monotonic()
        super()._maybe_send_resource_request()
        if time.monotonic() - started_s >= _COORDINATOR_TIMEOUT_S:
            self._coordinator_paused_until_s = time.monotonic() + _COORDINATOR_PAUSE_S

    def _free_workers_on(self, nodes: list[Node]) -> int:
        """Returns how many more workers fit into the free resources of those of these nodes that have the labels."""
        free = ray._private.state.available_resources_per_node()
        allowed = nodes_with_labels(nodes, self.context.config.scaling.label_selector)
        return self._count_possible_workers({node["NodeID"]: free.get(node["NodeID"], {}) for node in allowed})

    def _is_reachable(self, node: dict[str, Any]) -> bool:
        """Returns whether a node is reachable, by a connection if it is suspect: Ray itself counts a lost node as alive
        for seconds to a minute.
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
        """Returns whether the driver asks the run to stop."""
        return bool(reply(self.context.rendezvous.status.remote()).stopping)

    def make_decision_for_non_running_worker_group(self) -> Any:
        """Starts all workers as soon as enough are possible."""
        if self.is_stopping():
            raise StoppedWaitingError("stopped while there were no workers")
        self._maybe_send_resource_request()
        scaling = self.context.config.scaling
        possible = self.possible_workers(len(self.pending_workers))
        if possible >= scaling.min_workers:
            self.set_waiting_reason(None)
            self.excluded_nodes = set()
            ready, max_workers = self.pending_workers.count_ready(), min(possible, scaling.worker_limit)
            start_now = min(ready, max_workers) if ready >= scaling.min_workers else max_workers
            # The pending workers that are not ready are kept, and join later.
            standbys = max(0, min(scaling.standby_workers, possible - max_workers))
            self.target_pending = max_workers - start_now + standbys
            # A start with fewer workers than possible may grow at once.
            self.last_change_s = time.monotonic() - (scaling.resize_interval_s if start_now < max_workers else 0.0)
            return self._get_resize_decision(start_now)
        self.set_waiting_reason(f"nodes for {possible} of at least {scaling.min_workers} workers; waiting for capacity")
        time.sleep(_CHECK_S / 4)
        return NoopDecision()

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        """Adds workers where it pays, once they are ready: all together if they do not take too long."""
        del worker_group_status
        self._maybe_send_resource_request()
        scaling = self.context.config.scaling
        current, pending = worker_group_state.num_workers, len(self.pending_workers)
        possible = self.possible_workers(current + pending)
        if time.monotonic() < self.no_starts_until_s:
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
        """Has these nodes probed for a while before workers are planned on them."""
        self.suspect_nodes |= dict.fromkeys(nodes, time.monotonic() + _SUSPECT_S)
        self._checked_s = 0.0

    def exclude_node(self, node: str) -> None:
        """Excludes a node from starts of workers, if there are other nodes."""
        unusable = {node, *self.excluded_nodes, *self.draining_nodes}
        if any(n["Alive"] and n["NodeID"] not in unusable for n in ray.nodes()):
            self.excluded_nodes.add(node)
            self._checked_s = 0.0

    def set_waiting_reason(self, reason: str | None, workers: int = 0) -> None:
        """Tells the rendezvous whether the workers wait for capacity, and why.

        Args:
            reason: The reason; None if they do not wait.
            workers: How many workers there are now.
        """
        if reason != self.waiting_reason:
            self.waiting_reason = reason
            reply(self.context.rendezvous.set_expected.remote(workers, reason))


@dataclass(frozen=True)
class Eviction:
    """A decision to evict a straggler.

    Args:
        worker: Id of the worker that has to leave.
        times: How many times as long as the others it takes.
        reason: The reason, for the record.
    """

    worker: str
    times: float
    reason: str


class StragglerEvictor:
    """Decides which stragglers have to leave, from the time for which each has been slow.

    Args:
        after_s: Seconds for which a worker must have been slow; None: no worker is evicted.
        logical_workers: L.
        min_workers: Fewest workers to train with.
        max_evictions: How many workers may be evicted in all.
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
        """Whether a worker may still be evicted."""
        return self._after_s is not None and len(self.evicted) < self._max_evictions

    def decide(
        self, slow: Mapping[str, float], workers: int, ready: int, capacity_without: Callable[[str], int]
    ) -> Eviction | None:
        """Returns which worker has to leave now: one if another can replace it, or if all are faster without it.

        Args:
            slow: How many times as long as the others the slow workers take, by their ids.
            workers: How many workers train.
            ready: How many pending workers are ready to join.
            capacity_without: Returns for how many more workers there is capacity on other nodes than a worker's own, by
                the worker's id.
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
            # The others would have to wait for the replacement, and its capacity might be gone by then.
            return None
        if ready or capacity_without(worker):
            effect = "another takes its place"
        else:
            # With one worker less some worker may run more logical workers, which takes so many times as long.
            slowdown = ceil(self._logical_workers / (workers - 1)) / ceil(self._logical_workers / workers)
            if slow[worker] < _MIN_SPEEDUP * slowdown:
                return None
            effect = f"without it a step takes {slowdown / slow[worker]:.2f} of the time"
        self.evicted.add(worker)
        slow_s = now_s - self._slow_since_s[worker]
        reason = f"{slow[worker]:.1f} times as slow as the others for {slow_s:.0f} s; {effect}"
        return Eviction(worker, slow[worker], reason)
