"""How many workers a run should have now: one pure function, and its reason.

How many workers there can and should be: Ray Train's elastic scaling policy (Ray 2.60) with other answers.

How many are possible comes from Ray's client of the autoscaling coordinator, and from `ray._private.state`:
`state.get_draining_nodes` for notices of nodes that are about to go away, `available_resources_per_node`. How many are
wanted comes from `cluster.control.scaling`.

Whether a worker that stays slow has to leave: a decision with its reason.
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

from ray_app.cluster.controller.backend import ControllerContext, answer
from ray_app.cluster.controller.pending_workers import PendingWorkers, Slot
from ray_app.cluster.ray_private import Node, evaluator_gpus, labelled, room_for, room_on_gpus
from ray_app.errors import RayAppError


@dataclass(frozen=True)
class Sizing:
    """A decision.

    Args:
        workers: How many workers there should be.
        reason: Why, for the record.
    """

    workers: int
    reason: str


def sizing(
    now: int,
    possible: int,
    logical_workers: int,
    min_workers: int,
    max_workers: int,
    since_change_s: float,
    dwell_s: float,
) -> Sizing:
    """How many workers a run should have.

    More workers pay only if the one that plays the most logical workers plays fewer of them. A group does not shrink by
    decision: workers whose nodes go away leave or are lost, and the others go on.

    Args: now: Workers that train. possible: Workers that the cluster has room for, those of now included; nodes that
        are about to go away do not count. logical_workers: L. min_workers: Fewest to train with. max_workers: Most.
        since_change_s: Seconds since the number of workers changed. dwell_s: Fewest seconds between two changes that
        are not urgent.
    """
    target = min(possible, max_workers)
    if target <= now:
        return Sizing(now, "no room for more" if now < max_workers else "as many as configured")
    if now < min_workers:
        return (
            Sizing(target, f"below scaling.min_workers = {min_workers}")
            if target >= min_workers
            else Sizing(now, "not room for enough")
        )
    before, after = ceil(logical_workers / now), ceil(logical_workers / target)
    if after == before:
        return Sizing(
            now, f"{target} workers would be as slow as {now}: one of them would still play {before} logical workers"
        )
    if since_change_s < dwell_s:
        return Sizing(now, f"the last change was {since_change_s:.0f} s ago, scaling.resize_interval_s is {dwell_s:g}")
    return Sizing(target, f"a worker would play {after} logical workers instead of {before}")


logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_COALESCE_S = 2.0  # those who are ready wait so long for others
_PROBE_S, _SUSPECT_S = 0.5, 120.0
_COORDINATOR_S, _SILENT_S = 5.0, 30.0
"""Seconds that the autoscaling coordinator has for an answer, as Ray gives it, and for which it is then left alone."""


class StoppedWaitingError(RayAppError):
    """The driver asked to stop while there were no workers."""


class ElasticPolicy(ElasticScalingPolicy):
    """How many workers there can and should be, spares included.

    Args:
        scaling_config: How many at least, and with the spares at most.
        control: The run.

    Attributes:
        newcomers: Those on their way; given by the controller.
        wanted: How many workers there should be.
        coming: How many should be on their way: what is missing, and spares.
        reason: Why so many are wanted.
        draining: Ids of nodes that go away.
        shunned: Ids of nodes on which nobody is begun, because a worker was slow there.
        changed_s: When the number of workers changed as it should.
        full_until_s: Until when nobody more is begun.
    """

    newcomers: PendingWorkers

    def __init__(self, scaling_config: Any, control: ControllerContext) -> None:
        super().__init__(scaling_config)
        self._control = control
        self._nodes: frozenset[tuple[str, bool]] = frozenset()
        self._possible = 0
        self._looked_s = 0.0
        self._waiting: str | None = None
        self.draining: dict[str, int] = {}
        self.shunned: set[str] = set()
        self.suspects: dict[str, float] = {}
        self.changed_s = time.monotonic()
        self.full_until_s = self._silent_until_s = 0.0
        self.reason = ""
        self.wanted = self.coming = 0

    @property
    def has_spares(self) -> bool:
        """Whether there are to be workers beside those that train."""
        return self._control.config.scaling.standby_workers > 0

    def _get_num_workers_for_resource_request(self) -> int:
        """How many bundles an autoscaler is asked to make room for: those of the workers, and as many as the CPUs of
        all else are worth.

        With GPUs or labels a bundle more would be another such node, where any CPU will do.
        """
        scaling = self._control.config.scaling
        rest = (
            0
            if scaling.gpus_per_worker or scaling.label_selector or not scaling.cpus_per_worker
            else self._control.reading_cpus
        )
        return self.scaling_config.max_workers + (ceil(rest / scaling.cpus_per_worker) if rest else 0)

    def possible(self, now: int = 0) -> int:
        """Workers that fit on nodes that stay, spares and the `now` of now included."""
        if time.monotonic() - self._looked_s < _LOOK_S:
            return self._possible
        self._looked_s = time.monotonic()
        self.draining = ray._private.state.state.get_draining_nodes() or {}
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"] and self._is_there(node)}
        staying = {name: node for name, node in alive.items() if name not in self.draining}
        if self._control.config.scaling.label_selector or self.shunned:
            count = now + self._free_on([node for name, node in staying.items() if name not in self.shunned])
        else:
            nodes = frozenset((name, name in self.draining) for name in alive)
            reserved = None if self._is_silent else self._reserved(recompute=nodes != self._nodes)
            if reserved is None:
                count = now + self._free_on(list(staying.values()))
            else:
                self._nodes = nodes
                count = self._count_possible_workers({name: part for name, part in reserved.items() if name in staying})
        if self.shunned and count < self._control.config.scaling.min_workers:
            self.shunned, self._looked_s = set(), 0.0  # better a slow worker than none
        count = min(count, self._beside_reading(staying.values()))
        self._possible = max(0, count)
        return self._possible

    def free(self) -> int:
        """Workers that there is room for now by what is free on the nodes, spares included; none if the run could not
        start with them.
        """
        scaling = self._control.config.scaling
        alive = [node for node in ray.nodes() if node["Alive"]]
        count = min(self._free_on(alive), self._beside_reading(alive), self.scaling_config.max_workers)
        return count if count >= scaling.min_workers else 0

    def slot(self) -> Slot:
        """What each worker reserves, see `ElasticGroup.slot`."""
        scaling = self.scaling_config
        return Slot(
            scaling._resources_per_worker_not_none,
            scaling.placement_strategy,
            (scaling._label_selector_per_worker(1) or [{}])[0],
        )

    def _beside_reading(self, nodes: Iterable[Node]) -> int:
        """Workers that these nodes have CPUs and GPUs for, without the CPUs and GPUs that the rest of the run needs."""
        scaling, nodes = self._control.config.scaling, list(nodes)
        cpus, gpus = (sum(node["Resources"].get(name, 0.0) for node in nodes) for name in ("CPU", "GPU"))
        counts = [self.scaling_config.max_workers]
        if scaling.cpus_per_worker:
            counts.append(int(room_for(cpus - self._control.reading_cpus, scaling.cpus_per_worker)))
        if scaling.gpus_per_worker:
            counts.append(
                int(room_on_gpus(max(0.0, gpus - evaluator_gpus(self._control.config)), scaling.gpus_per_worker))
            )
        return min(counts)

    def _count_possible_workers(self, reserved_resources: dict[str, dict[str, float]]) -> int:
        """Ray's, which divides floats, of all GPUs of a node at once: with as much more as lets parts of one GPU add up
        to it, and without the parts of GPUs in which no worker fits (`cluster.room`).
        """
        gpus = self._control.config.scaling.gpus_per_worker

        def usable(name: str, free: float) -> float:
            return 1e-6 + (room_on_gpus(free, gpus) * gpus if name == "GPU" and gpus else free)

        nodes = {
            node: {name: usable(name, free) for name, free in each.items()} for node, each in reserved_resources.items()
        }
        return int(super()._count_possible_workers(nodes))

    def room_beside(self, node: str, now: int) -> int:
        """How many more than the `now` of now fit, on other nodes than this one."""
        staying = [each for each in ray.nodes() if each["Alive"] and each["NodeID"] not in self.draining]
        free = self._free_on([each for each in staying if each["NodeID"] not in {node, *self.shunned}])
        return max(0, min(free, self._beside_reading(staying) - now))

    def _reserved(self, recompute: bool) -> dict[str, dict[str, float]] | None:
        """What each node has for the workers of this run, as Ray shares it out among runs; it does not look at
        labels.
        """
        asked = self._autoscaling_coordinator.get_reserved_resources.remote(self._requester_id, recompute=recompute)
        try:
            return ray.get(asked, timeout=_COORDINATOR_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            logger.warning(
                "The autoscaling coordinator does not answer; what is free on the nodes counts for now: %s", error
            )
            self._silent_until_s = time.monotonic() + _SILENT_S
            return None

    @property
    def _is_silent(self) -> bool:
        """Whether the autoscaling coordinator has just not answered: each question holds the controller up for
        seconds.
        """
        return time.monotonic() < self._silent_until_s

    def _maybe_send_resource_request(self) -> None:
        """Ray's, but for a coordinator that does not answer."""
        if self._is_silent:
            return
        began_s = time.monotonic()
        super()._maybe_send_resource_request()
        if time.monotonic() - began_s >= _COORDINATOR_S:
            self._silent_until_s = time.monotonic() + _SILENT_S

    def _free_on(self, nodes: list[Node]) -> int:
        """More workers that there is room for now on those of these nodes that workers may run on."""
        free, labels = ray._private.state.available_resources_per_node(), self._control.config.scaling.label_selector
        return self._count_possible_workers(
            {node["NodeID"]: free.get(node["NodeID"], {}) for node in labelled(nodes, labels)}
        )

    def _is_there(self, node: dict[str, Any]) -> bool:
        """Asks a node that a worker was lost on whether it lives: Ray itself counts a lost node as alive for seconds to
        a minute.
        """
        if time.monotonic() > self.suspects.get(node["NodeID"], 0.0):
            return True
        try:
            socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=_PROBE_S).close()
        except OSError:
            return False
        return True

    def is_stopping(self) -> bool:
        """Whether the driver asks the run to stop."""
        return bool(answer(self._control.rendezvous.status.remote()).stopping)

    def make_decision_for_non_running_worker_group(self) -> Any:
        """Starts all workers as soon as enough are possible."""
        if self.is_stopping():
            raise StoppedWaitingError("stopped while there were no workers")
        self._maybe_send_resource_request()
        possible, scaling = self.possible(len(self.newcomers)), self._control.config.scaling
        if possible >= scaling.min_workers:
            self.wait(None)
            self.shunned = set()
            ready, most = self.newcomers.ready(), min(possible, scaling.worker_limit)
            at_once = min(ready, most) if ready >= scaling.min_workers else most
            self.coming = (
                most - at_once + max(0, min(scaling.standby_workers, possible - most))
            )  # those on their way are kept
            self.changed_s = time.monotonic() - (scaling.resize_interval_s if at_once < most else 0.0)
            return self._get_resize_decision(at_once)
        self.wait(f"room for {possible} of at least {scaling.min_workers} workers; waiting for capacity")
        time.sleep(_LOOK_S / 4)
        return NoopDecision()

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        """Adds workers where it pays, once they are ready, all that are wanted at once if they do not take too long."""
        del worker_group_status
        self._maybe_send_resource_request()
        now, coming, scaling = worker_group_state.num_workers, len(self.newcomers), self._control.config.scaling
        possible = self.possible(now + coming)
        if time.monotonic() < self.full_until_s:
            possible = min(possible, now + coming)
        since = time.monotonic() - self.changed_s
        logical, least, most = self._control.config.logical_workers, scaling.min_workers, scaling.worker_limit
        wanted = sizing(now, possible, logical, least, most, since, scaling.resize_interval_s)
        short = now < least and wanted.workers == now
        self.wait(f"{now} of at least {least} workers; waiting for capacity" if short else None, now)
        self.wanted, self.reason = wanted.workers, wanted.reason
        self.coming = self.wanted - now + max(0, min(scaling.standby_workers, possible - self.wanted))
        ready = min(self.newcomers.ready(), self.wanted - now)
        if not ready or (now + ready < self.wanted and not self.newcomers.ready(since_s=_COALESCE_S)):
            return NoopDecision()
        return self._get_resize_decision(now + ready)

    def suspect(self, nodes: set[str]) -> None:
        """These nodes may be gone."""
        self.suspects |= dict.fromkeys(nodes, time.monotonic() + _SUSPECT_S)
        self._looked_s = 0.0

    def shun(self, node: str) -> None:
        """Nobody is begun on this node any more, if there are others."""
        if any(each["Alive"] and each["NodeID"] not in {node, *self.shunned, *self.draining} for each in ray.nodes()):
            self.shunned.add(node)
            self._looked_s = 0.0

    def wait(self, reason: str | None, workers: int = 0) -> None:
        """Tells the workers and the console whether to wait for capacity."""
        if reason != self._waiting:
            self._waiting = reason
            answer(self._control.rendezvous.set_expected.remote(workers, reason))


_FASTER = 1.1
"""Times by which a step must become shorter for a worker to be left out."""


@dataclass(frozen=True)
class Retirement:
    """A decision.

    Args:
        worker: Id of the worker that has to leave.
        times: How many times as long as the others it takes.
        reason: Why, for the record.
    """

    worker: str
    times: float
    reason: str


class StragglerEvictor:
    """Who has been slow since when, and who had to leave for it.

    Args:
        after_s: Seconds for which a worker must have been slow; None: nobody has to leave.
        logical_workers: L.
        min_workers: Fewest to train with.
        most: How many may have to leave.
        clock: Tells the seconds.

    Attributes:
        retired: Ids of those who had to leave.
    """

    def __init__(
        self,
        after_s: float | None,
        logical_workers: int,
        min_workers: int,
        most: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._after_s, self._logical, self._least, self._most, self._clock = (
            after_s,
            logical_workers,
            min_workers,
            most,
            clock,
        )
        self._since_s: dict[str, float] = {}
        self.retired: set[str] = set()

    @property
    def is_on(self) -> bool:
        """Whether anybody may still have to leave."""
        return self._after_s is not None and len(self.retired) < self._most

    def decide(
        self, slow: Mapping[str, float], workers: int, ready: int, room: Callable[[str], int]
    ) -> Retirement | None:
        """Who has to leave now, one at a time: if another can take its place, or if all are faster without it.

        Args:
            slow: How many times as long as the others the slow workers take, by their ids.
            workers: How many train.
            ready: How many others are ready to join.
            room: For how many more there is room on other nodes than a worker's own, by its id.
        """
        now_s = self._clock()
        self._since_s = {worker: self._since_s.get(worker, now_s) for worker in slow}
        late = [
            w
            for w, since_s in self._since_s.items()
            if w not in self.retired and now_s - since_s >= (self._after_s or 0.0)
        ]
        if not self.is_on or not late:
            return None
        worker = max(late, key=lambda w: slow[w])
        told = f"{slow[worker]:.1f} times as slow as the others for {now_s - self._since_s[worker]:.0f} s; "
        if not ready and workers - 1 < max(1, self._least):
            return None  # the others would wait until somebody has come, if the room is still there then
        if ready or room(worker):
            reason = "another takes its place"
        else:
            more = ceil(self._logical / (workers - 1)) / ceil(self._logical / workers)
            if slow[worker] < _FASTER * more:
                return None
            reason = f"without it a step takes {more / slow[worker]:.2f} of the time"
        self.retired.add(worker)
        return Retirement(worker, slow[worker], told + reason)
