"""Pending workers: worker actors that start and prepare themselves while the others train.

Every worker is pending first: the workers that a run starts with, those that replace a lost worker or use new capacity,
and the standby workers of `scaling.standby_workers`, which are prepared and wait until a worker is lost or capacity
appears. So a training step never waits for the start of a process, its imports and its device. Each pending worker has
a placement group of its own: the slot of a lost worker is free again at once, and the slot of a new one can be on any
node.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_app.cluster.ray_private import NODE_ID_LABEL
from ray_app.process import without_gc

_PLACEMENT_TIMEOUT_S = 5.0
_PLACEMENT_PER_WORKER_S = 0.01
"""Seconds by which each worker that starts extends the timeout: Ray creates some hundred placement groups a second."""
_READY_TIMEOUT_S = 600.0
_MIN_PATIENCE_S = 10.0
"""Seconds for which a start that has enough workers waits at least for the others."""
_MAX_DEATHS = 3
NO_CAPACITY = "the cluster has no capacity"
"""The reason for which a pending worker that got no slot was canceled."""
DeviceKey = tuple[str, ...]
"""The id of a node, and Ray's ids of the GPUs of a worker on it."""


def device_key(metadata: Any) -> DeviceKey:
    """Returns the devices of a worker, from Ray's `ActorMetadata`; without GPUs the node alone."""
    return metadata.node_id, *map(str, metadata.gpu_ids)


@dataclass(frozen=True)
class Slot:
    """The resources that each worker reserves, and where.

    Args:
        resources: The resources by Ray's names, without zeros.
        labels: Labels of the node.
    """

    resources: dict[str, float]
    labels: dict[str, str]

    def without(self, nodes: Collection[str]) -> Slot:
        """Returns the same slot on other nodes than those with these ids."""
        excluded = {NODE_ID_LABEL: f"!in({','.join(sorted(nodes))})"} if nodes else {}
        return replace(self, labels=self.labels | excluded)


@dataclass(eq=False)
class PendingWorker:
    """A worker that has not joined the worker group yet.

    Args:
        actor: Handle of its actor.
        placement_group: The placement group that it runs in.
        preparation_ref: Reference of its preparation, which returns nothing.
        metadata_ref: Reference of its newest answer, which says where it runs (Ray's `ActorMetadata`).
        placement_deadline_s: When it is canceled if it has no slot by then, by the monotonic clock.
        ready_deadline_s: When it is canceled if it is not prepared by then.
        started_s: When it was started.
        is_placed: Whether it is known to have its slot.
        ready_s: When it was found to be ready; None before.
        metadata: Where it runs, once it is ready.
    """

    actor: Any
    placement_group: PlacementGroup
    preparation_ref: Any
    metadata_ref: Any
    placement_deadline_s: float
    ready_deadline_s: float
    started_s: float
    is_placed: bool = False
    ready_s: float | None = None
    metadata: Any = None

    def update(self) -> None:
        """Takes the worker's answer, and asks again.

        Raises:
            RayError: The worker died, or its preparation failed.
        """
        ray.get(self.preparation_ref)
        self.metadata, self.metadata_ref = ray.get(self.metadata_ref), self.actor.get_metadata.remote()
        self.ready_s = self.ready_s or time.monotonic()

    def cancel(self) -> None:
        """Ends the worker and gives its slot back."""
        ray.kill(self.actor)
        remove_placement_group(self.placement_group)


class PendingWorkers:
    """All pending workers of a run. They live in the controller's process, longer than its worker groups.

    When several in a row have died while they prepared themselves, the next ones skip the preparation: what kills them
    then does so when they train, where it is charged as a failure. Some die all the same (`failed_rounds`). At the
    start of a run that is charged as a failure, too; while others train, the starts become rarer and rarer.

    Args:
        prepare: Reference of a function without arguments that each worker calls first.
        min_workers: With so many workers a run may start.
        is_stopping: Returns whether the run is to stop.
    """

    def __init__(self, prepare: Any, min_workers: int, is_stopping: Callable[[], bool]) -> None:
        self._prepare = prepare
        self._min_workers = min_workers
        self._is_stopping = is_stopping
        self._pending: list[PendingWorker] = []
        self._excluded = set[DeviceKey]()
        # The slots on excluded devices, each with the id of its node.
        self._held_slots: list[tuple[PlacementGroup, str]] = []
        self._deaths = self._failed_polls = 0

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def failed_rounds(self) -> int:
        """The number of polls with deaths since a worker last became ready, without the first `_MAX_DEATHS`.

        The first ones do not count, because those workers may have died of the preparation. Later workers skip it.
        """
        return max(0, self._failed_polls - _MAX_DEATHS)

    def start(self, count: int, slot: Slot) -> None:
        """Starts `count` more workers, which prepare themselves as soon as there is capacity for them."""
        if count <= 0:
            return
        # Without a `runtime_env` Ray can use worker processes that exist already.
        others = dict(slot.resources)
        actor_class = ray.remote(num_cpus=others.pop("CPU", 0), num_gpus=others.pop("GPU", 0), resources=others)(
            RayTrainWorker
        )
        env, now = get_env_vars_to_propagate(), time.monotonic()
        placement_deadline_s = now + _PLACEMENT_TIMEOUT_S + count * _PLACEMENT_PER_WORKER_S
        for _ in range(count):
            group = placement_group([slot.resources], bundle_label_selector=[slot.labels] if slot.labels else None)
            actor = actor_class.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
            ).remote()
            prepare = self._prepare if self._deaths < _MAX_DEATHS else None
            refs = actor.execute.remote(_prepare, env, [prepare]), actor.get_metadata.remote()
            deadlines = placement_deadline_s, now + _READY_TIMEOUT_S
            self._pending.append(PendingWorker(actor, group, *refs, *deadlines, now))

    def poll(self, draining_nodes: Collection[str] = ()) -> list[str]:
        """Updates which workers are ready, and cancels those that cannot become ready.

        These are the workers for which there is no capacity, that failed, that take too long, or that run on a node
        that is about to go away.

        Args:
            draining_nodes: Ids of nodes that are about to go away.

        Returns:
            The reason for each canceled worker, without those on draining nodes.
        """
        # Ray has moved the slots of lost nodes to others.
        for slot, node in self._held_slots[:]:
            if placement_group_table(slot)["bundles_to_node_id"].get(0) not in (node, None):
                remove_placement_group(slot)
                self._held_slots.remove((slot, node))
        reasons = list[str]()
        deaths = 0
        any_became_ready = False
        for pending in self._answered(0):
            was_ready = pending.ready_s is not None
            try:
                pending.update()
                if self._excluded and device_key(pending.metadata) in self._excluded:
                    # The slot stays reserved, so that no other worker gets the device.
                    ray.kill(pending.actor)
                    self._pending.remove(pending)
                    self._held_slots.append((pending.placement_group, pending.metadata.node_id))
                    continue
                any_became_ready |= not was_ready
            except ray.exceptions.RayError as error:
                deaths += not was_ready
                reasons.append(str(error))
                self._cancel(pending)
        now = time.monotonic()
        for pending in [p for p in self._pending if p.ready_s is None and now > p.placement_deadline_s]:
            pending.is_placed = (
                pending.is_placed or placement_group_table(pending.placement_group)["state"] == "CREATED"
            )
            if not pending.is_placed:
                reasons.append(NO_CAPACITY)
                self._cancel(pending)
            elif now > pending.ready_deadline_s:
                reasons.append(f"the worker was not ready after {_READY_TIMEOUT_S:g} s")
                deaths += 1
                self._cancel(pending)
        if any_became_ready:
            self._deaths = self._failed_polls = 0
        else:
            self._deaths += deaths
            self._failed_polls += deaths > 0
        for pending in [p for p in self._pending if p.ready_s is not None and p.metadata.node_id in draining_nodes]:
            self._cancel(pending)
        return reasons

    def wait_until_ready(self, count: int) -> list[str]:
        """Waits until `count` workers are ready, or all that have not been canceled.

        Slow workers are not waited for if a run may start without them, see `_is_enough`.

        Returns:
            The reasons for which others were canceled, see `poll`.
        """
        reasons = self.poll()
        while self.count_ready() < min(count, len(self)) and not self._is_enough() and not self._is_stopping():
            self._answered(_PLACEMENT_TIMEOUT_S / 10)
            reasons += self.poll()
        return reasons

    def _is_enough(self) -> bool:
        """Returns whether a run may start with the ready workers, without the others.

        It may once `min_workers` are ready and the last of these has waited for as long as it took to become ready, but
        at least `_MIN_PATIENCE_S`.
        """
        ready = sorted((p.ready_s, p.started_s) for p in self._pending if p.ready_s is not None)
        if len(ready) < self._min_workers:
            return False
        ready_s, started_s = ready[self._min_workers - 1]
        return time.monotonic() - ready_s >= max(_MIN_PATIENCE_S, ready_s - started_s)

    def _answered(self, timeout_s: float) -> list[PendingWorker]:
        """Returns the workers that have answered, after waiting for all for at most `timeout_s`."""
        by_ref = {pending.metadata_ref: pending for pending in self._pending}
        if not by_ref:
            return []
        answered_refs, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=timeout_s)
        return [by_ref[ref] for ref in answered_refs]

    def count_ready(self, since_s: float = 0.0) -> int:
        """Returns the number of workers that have been ready for at least so many seconds."""
        return sum(p.ready_s is not None and time.monotonic() - p.ready_s >= since_s for p in self._pending)

    def take_ready(self, count: int) -> list[PendingWorker]:
        """Removes and returns at most `count` ready workers, the longest-waiting first."""
        ready = [p for p in self._pending if p.ready_s is not None]
        taken = sorted(ready, key=lambda p: p.ready_s or 0.0)[:count]
        self._pending = [p for p in self._pending if p not in taken]
        return taken

    @property
    def num_held(self) -> int:
        """The number of slots that are reserved because their devices are excluded."""
        return len(self._held_slots)

    def exclude(self, device: DeviceKey) -> None:
        """Lets no more workers start on a device; the slot of the next one that Ray places there stays reserved."""
        self._excluded.add(device)

    def include_all_devices(self) -> None:
        """Lets workers start on all devices again."""
        while self._held_slots:
            remove_placement_group(self._held_slots.pop()[0])
        self._excluded.clear()

    def limit_to(self, max_pending: int) -> None:
        """Cancels the workers that were started last, so that at most `max_pending` remain."""
        for pending in self._pending[max_pending:]:
            self._cancel(pending)

    def _cancel(self, pending: PendingWorker) -> None:
        pending.cancel()
        self._pending.remove(pending)


def _prepare(env: dict[str, str], prepare: list[Any]) -> None:
    """Sets the environment of a worker's process and calls its preparation.

    Args:
        env: Variables that Ray Train passes to its workers.
        prepare: A list with the reference of the function, which Ray does not resolve inside of a list; or with None.
    """
    os.environ |= env
    if prepare[0] is not None:
        with without_gc():
            # The function is fetched only now: its imports look at the environment.
            function: Callable[[], None] = ray.get(prepare[0])
            function()
