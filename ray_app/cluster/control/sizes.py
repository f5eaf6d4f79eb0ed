"""How many workers there can and should be: Ray Train's elastic scaling policy (Ray 2.60) with other answers.

How many are possible comes from Ray's client of the autoscaling coordinator, and from `ray._private.state`: `state.get_draining_nodes` for
notices of nodes that are about to go away, `available_resources_per_node`. How many are wanted comes from `cluster.control.scaling`.
"""

from __future__ import annotations

import logging
import socket
import time
from math import ceil
from typing import Any

import ray
from ray.train.v2._internal.execution.scaling_policy import NoopDecision
from ray.train.v2._internal.execution.scaling_policy.elastic import ElasticScalingPolicy

from ray_app.cluster.control.hooks import Control
from ray_app.cluster.control.scaling import sizing
from ray_app.cluster.labels import Node, labelled
from ray_app.errors import RayAppError

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_PROBE_S, _SUSPECT_S = 0.5, 120.0


class StoppedWaitingError(RayAppError):
    """The driver asked to stop while there were no workers."""


class Sizes(ElasticScalingPolicy):
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
