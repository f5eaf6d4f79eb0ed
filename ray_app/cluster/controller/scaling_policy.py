"""Ray Train's scaling policy of a run, which counts the workers for which the cluster has capacity.

`ElasticPolicy` derives from `ElasticScalingPolicy` (Ray 2.55), which asks the autoscaling coordinator and an autoscaler
for resources. Draining nodes and free resources come from `ray._private.state`, because the public state API reads them
through a dashboard, which may not run. What is done with the capacity is decided in
`cluster/controller/decisions.py`.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterable, Sequence
from math import ceil
from typing import Any

import ray
from ray._private.state import available_resources_per_node, state
from ray.data._internal.cluster_autoscaler import base_autoscaling_coordinator
from ray.train.v2._internal.execution.scaling_policy import NoopDecision
from ray.train.v2._internal.execution.scaling_policy.elastic import ElasticScalingPolicy

from ray_app.cluster.ray_private import Node, nodes_with_labels
from ray_app.cluster.resources import count_on_labeled, evaluator_gpus, is_alone, workers_in
from ray_app.config.config import Config

logger = logging.getLogger(__name__)

_RESERVES_BY_NODE = hasattr(base_autoscaling_coordinator, "ReservedResources")
"""Whether the coordinator tells what it reserves on each node, as from Ray 2.60 on.

Before, it tells amounts without the ids of their nodes, up to 20 s old; then a run counts what is free on the nodes,
and several runs that start at once may count the same capacity.
"""
CAPACITY_INTERVAL_S = 1.0
"""Seconds between two computations of the number of possible workers."""
_PROBE_TIMEOUT_S = 0.5
"""Seconds for which a connection to a suspect node is tried."""
_SUSPECT_S = 120.0
"""Seconds for which a node is suspect after a worker on it was lost."""
_COORDINATOR_TIMEOUT_S = 5.0
"""Seconds for which a call of the autoscaling coordinator may take; Ray uses the same limit in its own calls."""
_COORDINATOR_PAUSE_S = 30.0
"""Seconds without calls of the coordinator after a call timed out."""


class ElasticPolicy(ElasticScalingPolicy):
    """Counts the workers for which there is capacity, from three sources:

    - what Ray's autoscaling coordinator reserves for this run (`reserved_workers`); a run that is alone on its own
      cluster does without the coordinator, an actor that takes a CPU second to start,
    - the free resources of the nodes (`count_free`), where the coordinator cannot be used,
    - all resources, less what reading and the evaluator need (`limit_by_total_resources`), which is an upper limit.

    All times are those of the monotonic clock.

    Args:
        scaling_config: Ray's configuration; its minimum is `scaling.min_workers`, its maximum `scaling.max_workers`
            plus `scaling.standby_workers`.
        config: The configuration of the run.
        reading_cpus: Logical CPUs to leave to the evaluator and to reading.

    Attributes:
        draining_nodes: Ids of nodes that are about to go away.
        excluded_nodes: Ids of nodes on which no worker starts, because a straggler was evicted from them.
    """

    def __init__(self, scaling_config: Any, config: Config, reading_cpus: float) -> None:
        super().__init__(scaling_config)
        self._config, self._scaling = config, config.scaling
        self._reading_cpus = reading_cpus
        self.draining_nodes = frozenset[str]()
        self.excluded_nodes = set[str]()
        self._held_slots = 0
        # Ids of nodes on which a worker was lost, with the time until which they are probed.
        self._suspect_nodes: dict[str, float] = {}
        self._coordinator_paused_until_s = 0.0
        self._run_context: Any = None
        self._is_registered = False
        # The id of each node and whether it drains, at the newest answer of the coordinator.
        self._reserved_on_nodes: frozenset[tuple[str, bool]] = frozenset()
        self._possible = 0
        self._possible_computed_s = 0.0

    def after_controller_start(self, train_run_context: Any) -> None:
        """Registers this run with the coordinator, if it shares the cluster."""
        self._run_context = train_run_context
        self._maybe_send_resource_request()

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        """Decides nothing: `ElasticController` has acted when Ray calls this."""
        del worker_group_state, worker_group_status
        return NoopDecision()

    def possible_workers(self, current: int = 0) -> int:
        """Returns for how many workers, standby workers included, the nodes that stay have capacity.

        It also asks an autoscaler for resources if that is due, and updates `draining_nodes`. Within
        `CAPACITY_INTERVAL_S` of the last computation it returns that result.

        Args:
            current: Number of workers that train or are pending. The result includes them, although their resources
                are not free.
        """
        self._maybe_send_resource_request()
        if time.monotonic() - self._possible_computed_s < CAPACITY_INTERVAL_S:
            return self._possible
        self._possible_computed_s = time.monotonic()
        self.draining_nodes = frozenset[str](state.get_draining_nodes() or ())
        alive = [node for node in ray.nodes() if node["Alive"] and self._is_reachable(node)]
        staying = [node for node in alive if node["NodeID"] not in self.draining_nodes]
        reserved = self.reserved_workers(alive)
        count = current + self.count_free(staying) if reserved is None else reserved - self._held_slots
        if self.excluded_nodes and count < self._scaling.min_workers:
            # A run with a slow worker is better than a run that waits. The next call counts these nodes again.
            self.include_all_nodes()
        self._possible = max(0, min(count, self.limit_by_total_resources(staying) - self._held_slots))
        return self._possible

    def free_slots(self) -> int:
        """Returns how many workers, standby workers included, fit into the free resources of the nodes.

        It is 0 if these are fewer than `scaling.min_workers`. Unlike `possible_workers` it can be called before Ray's
        controller has connected the policy to the coordinator.
        """
        alive = [node for node in ray.nodes() if node["Alive"]]
        count = min(self.count_free(alive), self.limit_by_total_resources(alive))
        return count if count >= self._scaling.min_workers else 0

    def capacity_without(self, node: str, current: int) -> int:
        """Returns how many workers more than the `current` ones fit on other nodes than the one with this id."""
        staying = [n for n in ray.nodes() if n["Alive"] and n["NodeID"] not in self.draining_nodes]
        free = self.count_free([n for n in staying if n["NodeID"] != node])
        return max(0, min(free, self.limit_by_total_resources(staying) - self._held_slots - current))

    def reserved_workers(self, alive: list[Node]) -> int | None:
        """Returns how many workers fit into what the coordinator reserves for this run on nodes that stay.

        The coordinator divides the cluster among all runs and data pipelines of Ray. It is None if the coordinator does
        not answer or does not tell nodes, and if labels or excluded nodes count, which the coordinator disregards.
        """
        is_paused = time.monotonic() < self._coordinator_paused_until_s
        is_usable = _RESERVES_BY_NODE and self._is_registered and not is_paused
        if not is_usable or self._scaling.label_selector or self.excluded_nodes:
            return None
        on_nodes = frozenset((node["NodeID"], node["NodeID"] in self.draining_nodes) for node in alive)
        # The coordinator updates its reservations only from time to time, which is too late for a changed cluster.
        # `recompute` makes it look at the cluster before it answers, which takes longer.
        recompute = on_nodes != self._reserved_on_nodes
        ref = self._autoscaling_coordinator.get_reserved_resources.remote(self._requester_id, recompute=recompute)
        try:
            reserved = ray.get(ref, timeout=_COORDINATOR_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning(
                "The autoscaling coordinator does not answer; until it does, the capacity is computed from the free"
                " resources of the nodes: %s",
                error,
            )
            self._pause_coordinator()
            return None
        self._reserved_on_nodes = on_nodes
        return self.count_in(reserved[name] for name, drains in on_nodes if not drains and name in reserved)

    def count_free(self, nodes: list[Node]) -> int:
        """Returns how many more workers fit into the free resources of the allowed nodes among `nodes`."""
        free = available_resources_per_node()
        labeled = nodes_with_labels(nodes, self._scaling.label_selector)
        allowed = (node["NodeID"] for node in labeled if node["NodeID"] not in self.excluded_nodes)
        return self.count_in(free.get(name, {}) for name in allowed)

    def limit_by_total_resources(self, nodes: Sequence[Node]) -> int:
        """Returns the maximum number of workers on these nodes, so that reading and the evaluator have capacity, too.

        All CPUs and GPUs of the nodes count, free or not, less those that reading and the evaluator need.
        """
        cpus, gpus = (sum(node["Resources"].get(name, 0.0) for node in nodes) for name in ("CPU", "GPU"))
        free = {"CPU": cpus - self._reading_cpus, "GPU": max(0.0, gpus - evaluator_gpus(self._config))}
        return int(min(self.count_in([free]), count_on_labeled(self._config, nodes)))

    def count_in(self, resources: Iterable[dict[str, float]]) -> int:
        """Returns how many workers fit into the resources of each node, together; at most `_max_slots`.

        Ray's own count divides floats, and divides the sum of all GPUs of a node, although the fraction of a GPU that a
        worker has must be on one GPU.
        """
        return int(min(self._max_slots, sum(workers_in(part, self._scaling) for part in resources)))

    def _is_reachable(self, node: Node) -> bool:
        """Returns True for a node that is not suspect, and whether a suspect node accepts a connection.

        Ray counts a lost node as alive for seconds up to a minute, so workers would be planned on it.
        """
        if time.monotonic() > self._suspect_nodes.get(node["NodeID"], 0.0):
            return True
        address = node["NodeManagerAddress"], node["NodeManagerPort"]
        try:
            socket.create_connection(address, timeout=_PROBE_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    def suspect(self, nodes: Iterable[str]) -> None:
        """Makes nodes suspect: for `_SUSPECT_S` only those that accept a connection count as capacity.

        Args:
            nodes: Ids of the nodes.
        """
        self._suspect_nodes |= dict.fromkeys(nodes, time.monotonic() + _SUSPECT_S)
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

    def set_held_slots(self, count: int) -> None:
        """Sets the number of slots that stay reserved without a worker; no worker is counted for them."""
        if count != self._held_slots:
            self._held_slots, self._possible_computed_s = count, 0.0

    @property
    def _max_slots(self) -> int:
        return int(self.scaling_config.max_workers) + self._held_slots

    def include_all_nodes(self) -> None:
        """Lets workers start on all nodes again."""
        if self.excluded_nodes:
            self.excluded_nodes, self._possible_computed_s = set(), 0.0

    def _get_num_workers_for_resource_request(self) -> int:
        """Returns the number of worker-sized bundles that Ray requests from an autoscaler.

        There is one bundle for each worker and standby worker. More of them are added for the CPUs that reading and the
        evaluator need, since Ray's request has bundles of one size only. None are added if workers need GPUs or labels:
        each would make the autoscaler start a node with a GPU or with the labels, where a CPU of any node is enough.
        """
        needs_special_nodes = self._scaling.worker_gpus or self._scaling.label_selector
        if needs_special_nodes or not self._scaling.cpus_per_worker:
            return self._max_slots
        return self._max_slots + ceil(self._reading_cpus / self._scaling.cpus_per_worker)

    def _maybe_send_resource_request(self) -> None:
        """Sends Ray's request for resources if it is due, unless a call of the coordinator timed out recently."""
        if time.monotonic() < self._coordinator_paused_until_s or (not self._is_registered and is_alone()):
            return
        # Ray logs a timeout and does not raise, so only the duration shows it.
        started_s = time.monotonic()
        if self._is_registered:
            super()._maybe_send_resource_request()
        else:
            self._is_registered = True
            super().after_controller_start(self._run_context)
        if time.monotonic() - started_s >= _COORDINATOR_TIMEOUT_S:
            self._pause_coordinator()

    def _cancel_resource_request(self) -> None:
        if self._is_registered:
            super()._cancel_resource_request()

    def _pause_coordinator(self) -> None:
        """Calls the coordinator no more for a while; another call that times out would block the controller again."""
        self._coordinator_paused_until_s = time.monotonic() + _COORDINATOR_PAUSE_S
