"""Ray Train's worker group (Ray 2.60), so that it can lose and gain single workers.

Its workers share one placement group, which is made and given back as a whole. Here each has its own, so that the slot of a lost worker
is free again at once and a slot for a new one can be anywhere. `WorkerGroup`, `ReplicaGroup`, `Worker` and `PlacementGroupHandle` are
private to Ray Train; `_create_workers` is its method without the shared placement group.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import ray
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import PlacementGroupHandle
from ray.train.v2._internal.execution.worker_group.worker import Worker
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.train.v2._internal.util import bundle_to_remote_args
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_PLACE_S, _PLACE_EACH_S = 5.0, 0.01  # Ray makes some hundred a second
_START_S = 120.0


class _Slots(PlacementGroupHandle):
    """A placement group for every worker."""

    def __init__(self, resources: dict[str, float], strategy: str, label_selectors: list[Any] | None) -> None:
        self._resources, self._strategy = resources, strategy
        self._selector = label_selectors[:1] if label_selectors else None  # the same for all workers, also for those of later
        self.free: list[PlacementGroup] = []
        self._used: dict[str, PlacementGroup] = {}

    def reserve(self, count: int, timeout_s: float) -> int:
        """Reserves slots; those that are not there in time are given up. Returns how many there are."""
        options = {"strategy": self._strategy, "bundle_label_selector": self._selector}
        made = [placement_group([self._resources], **options) for _ in range(count)]
        deadline = time.monotonic() + timeout_s + count * _PLACE_EACH_S
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


class ElasticGroup(WorkerGroup):
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
        """As Ray's, but in a slot of its own each, and without a `runtime_env`: processes that are there already can be used."""
        del placement_group
        made = ray.remote(**bundle_to_remote_args(resources_per_worker))(self._worker_cls)
        env = get_env_vars_to_propagate()
        actors = []
        for _ in range(num_workers):
            slot = self._slots.free.pop()
            strategy = PlacementGroupSchedulingStrategy(slot, placement_group_bundle_index=0)
            actors.append(made.options(scheduling_strategy=strategy).remote())
            self._slots.use(id_of(actors[-1]), slot)
        try:
            ray.get([actor.execute.remote(_set_environment, env) for actor in actors], timeout=_START_S)
            found = ray.get([actor.get_metadata.remote() for actor in actors], timeout=_START_S)
        except (ray.exceptions.RayError, TimeoutError):
            for actor in actors:
                ray.kill(actor)
                self._slots.release(id_of(actor))
            raise
        workers = [Worker(a, m, resources_per_worker, placement_group_bundle_index=0) for a, m in zip(actors, found, strict=True)]
        first, self._next_rank = self._next_rank, self._next_rank + num_workers
        return self._assign_worker_ranks(workers, first, first + num_workers, kwargs.get("replica_group_size"))

    def drop(self, gone: set[int]) -> None:
        """Ends the workers at these places of the list and frees their slots."""
        workers = self.get_workers()
        for place in gone:
            ray.kill(workers[place].actor)
            self._slots.release(id_of(workers[place].actor))
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
                self._slots.release(id_of(worker.actor))
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


def _set_environment(env: dict[str, str]) -> None:
    os.environ |= env


def id_of(actor: Any) -> str:
    """The id of a worker's actor, by which the rendezvous knows it."""
    return actor._actor_id.hex()
