"""Ray Train's worker group (Ray 2.60), changed so that it can lose and gain single workers.

Ray starts the workers of a group together and places them in one placement group, which is created and removed as a
whole. Here each worker has a placement group of its own, called its slot, and has been a pending worker before it joins
the group, see `cluster/controller/pending_workers.py`. `WorkerGroup`, `ReplicaGroup`, `Worker` and
`PlacementGroupHandle` are private to Ray Train.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import ray
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import PlacementGroupHandle
from ray.train.v2._internal.execution.worker_group.worker import Worker
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.util.placement_group import PlacementGroup, remove_placement_group

from ray_app.cluster.controller.backend import FailureBudget
from ray_app.cluster.controller.pending_workers import NO_CAPACITY, PendingWorker, PendingWorkers, Slot

_REPLY_TIMEOUT_S = 120.0
"""Seconds for which a worker that has been ready may take to initialize its context."""


class _Slots(PlacementGroupHandle):
    """The slots of the workers of a group, in the place of the one placement group that Ray's worker group has."""

    def __init__(self) -> None:
        self._by_actor_id: dict[str, PlacementGroup] = {}

    def add(self, actor_id: str, slot: PlacementGroup) -> None:
        """Adds the slot of a worker, which `release` or `shutdown` removes from the cluster."""
        self._by_actor_id[actor_id] = slot

    def release(self, actor_id: str) -> None:
        """Removes the slot of a worker from the cluster, which frees its resources."""
        remove_placement_group(self._by_actor_id.pop(actor_id))

    @property
    def placement_group(self) -> Any:
        # Ray passes the placement group only to `_create_workers`, which is overridden and does not use it.
        return None

    def ready(self) -> Any:
        raise NotImplementedError

    def wait(self, timeout_seconds: float = 30) -> bool:
        # `_create_workers` waits for pending workers, and so for their slots.
        del timeout_seconds
        return True

    def shutdown(self) -> None:
        for actor_id in list(self._by_actor_id):
            self.release(actor_id)


class ElasticGroup(WorkerGroup):
    """A worker group that drops single workers, and lets pending workers join while the others train."""

    _slots: _Slots
    _next_rank = 0
    """The world rank for Ray of the next worker; it has nothing to do with the rank in a generation."""
    _worker_group_state: Any
    _state_builder: Any = None

    @property
    def _pending_workers(self) -> PendingWorkers:
        return next(c for c in self._callbacks if isinstance(c, PendingWorkers))

    @property
    def _budget(self) -> FailureBudget:
        return next(c for c in self._callbacks if isinstance(c, FailureBudget))

    def slot(self, excluded_nodes: Collection[str] = ()) -> Slot:
        """Returns the resources that a worker of this group reserves, and on which nodes.

        Args:
            excluded_nodes: Ids of nodes on which the worker must not run.
        """
        context = self._worker_group_context
        labels = dict((context.label_selector or [{}])[0])
        if excluded_nodes:
            labels[ray._raylet.RAY_NODE_ID_KEY] = f"!in({','.join(sorted(excluded_nodes))})"
        return Slot(context.resources_per_worker, context.placement_strategy, labels)

    def _start(self) -> None:
        """Starts the group. The loss of a worker during the start is charged to the failure budget.

        Raises:
            WorkerGroupStartupFailedError: The group did not start; none of its workers remains.
        """
        try:
            super()._start()
        except Exception as error:
            # Ray has ended the workers already, unless they were lost after the state of the group was built.
            if self.has_started():
                self.shutdown()
            cause = error.__cause__ if isinstance(error, WorkerGroupStartupFailedError) else error
            if not isinstance(cause, ray.exceptions.RayActorError):
                raise
            # Ray's controller retries after this error, while it would end the run after a `RayActorError`.
            self._budget.record_failed_starts([str(cause)], is_charged=True)
            raise WorkerGroupStartupFailedError(str(cause)) from cause

    def _start_impl(self, builder: Any) -> None:
        self._state_builder = builder
        super()._start_impl(builder)

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> _Slots:
        """Starts the missing pending workers, and returns the slots of this group, of which there are none yet."""
        del scaling_config
        self._slots = _Slots()
        # The policy has cleared its excluded nodes before it decided to start a group.
        self._pending_workers.start(worker_group_context.num_workers - len(self._pending_workers), self.slot())
        return self._slots

    def _create_workers(self, num_workers: int, *unused: Any, **also_unused: Any) -> list:
        """Waits for pending workers, instead of creating workers, and returns Ray's workers for them.

        Raises:
            WorkerGroupStartupFailedError: Fewer than `num_workers` became ready.
        """
        del unused, also_unused
        if self._state_builder is not None:
            # Ray starts this actor for `ray.train.report` and `ray.train.collective`, which no worker calls here. Its
            # imports would use a CPU for a second while the workers start.
            ray.kill(self._state_builder.sync_actor)
        reasons = self._pending_workers.wait_until_ready(num_workers)
        if self._pending_workers.count_ready() < num_workers:
            if failures := [reason for reason in reasons if reason != NO_CAPACITY]:
                self._budget.record_failed_starts(failures, is_charged=self._pending_workers.failed_rounds > 0)
            summary = f"{self._pending_workers.count_ready()} of {num_workers} workers are ready"
            raise WorkerGroupStartupFailedError("\n".join([summary, *dict.fromkeys(reasons)]))
        return self._adopt_workers(self._pending_workers.take_ready(num_workers))

    def _adopt_workers(self, ready: list[PendingWorker]) -> list:
        """Takes over the slots of ready pending workers, and returns them as workers of Ray.

        Their world ranks for Ray are numbers that no other worker of the group has had.
        """
        for pending in ready:
            self._slots.add(actor_id_of(pending.actor), pending.group)
        resources = self._worker_group_context.resources_per_worker
        workers = [Worker(p.actor, p.metadata, resources, placement_group_bundle_index=0) for p in ready]
        first, self._next_rank = self._next_rank, self._next_rank + len(workers)
        return self._assign_worker_ranks(workers, first, first + len(workers), replica_group_size=1)

    def _init_train_context_on_workers(
        self, workers: list, sync_actor: Any, train_context_args: dict[str, list]
    ) -> None:
        """Initializes the context of the workers, as Ray does, but with a timeout and without the controller's handle.

        The controller of this project is not an actor, so it has no handle. Only `ray.train.report` would need it.

        Raises:
            ActorUnavailableError: A worker does not answer within `_REPLY_TIMEOUT_S`; it is treated like a worker that
                died.
        """
        common_args = {
            "train_run_context": self._train_run_context,
            "synchronization_actor": sync_actor,
            "storage_context": self._storage_context,
            "worker_callbacks": self._worker_callbacks_to_propagate,
            "controller_actor": None,
        }
        refs = []
        for index, worker in enumerate(workers):
            worker_args = {name: values[index] for name, values in train_context_args.items()}
            init = worker.actor.init_train_context
            refs.append(init.remote(distributed_context=worker.distributed_context, **common_args, **worker_args))
        _, silent = ray.wait(refs, num_returns=len(refs), timeout=_REPLY_TIMEOUT_S)
        if silent:
            actor_id = workers[refs.index(silent[0])].actor._actor_id.binary()
            raise ray.exceptions.ActorUnavailableError(
                f"a worker that was ready has not answered for {_REPLY_TIMEOUT_S:g} s", actor_id
            )
        ray.get(refs)
        self._decorate_worker_log_file_paths(workers)

    def drop(self, indices: set[int]) -> None:
        """Kills the workers at these indices of `get_workers()`, and frees their slots."""
        workers = self.get_workers()
        self._kill_workers([workers[index] for index in indices])
        self._set_workers([worker for index, worker in enumerate(workers) if index not in indices])

    def _kill_workers(self, workers: list) -> None:
        for worker in workers:
            ray.kill(worker.actor)
            self._slots.release(actor_id_of(worker.actor))

    def join(self, max_workers: int) -> int:
        """Lets at most `max_workers` ready pending workers join while the others train, and returns how many joined.

        Raises:
            RayError: One of these workers has died; all of them are killed, and none joins.
        """
        ready = self._pending_workers.take_ready(max_workers)
        if not ready:
            return 0
        joining = self._adopt_workers(ready)
        try:
            self._init_train_context(joining, self._worker_group_state.sync_actor)
            for worker in joining:
                self._make_replica_group(worker).start_training(self._worker_group_context)
        except ray.exceptions.RayError:
            self._kill_workers(joining)
            raise
        self._set_workers([*self.get_workers(), *joining])
        return len(joining)

    def _make_replica_group(self, worker: Worker) -> ReplicaGroup:
        return ReplicaGroup([worker], self._worker_group_context.resources_per_worker, self._replica_group_callbacks)

    def _set_workers(self, workers: list) -> None:
        """Replaces the list of workers, and all that Ray stores by their indices in it."""
        self._worker_group_state = dataclasses.replace(self._worker_group_state, workers=workers)
        self._replica_groups = [self._make_replica_group(worker) for worker in workers]
        self._worker_rank_to_replica_group_rank = {index: index for index in range(len(workers))}
        # Polls that are in progress would be taken for those of the workers that have these indices now.
        self._world_rank_to_ongoing_poll.clear()
        self._latest_poll_status = None


def actor_id_of(actor: Any) -> str:
    """Returns the id of a worker's actor, by which the rendezvous knows the worker."""
    return actor._actor_id.hex()
