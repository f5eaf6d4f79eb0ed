"""Ray Train's worker group (Ray 2.56), changed so that it can lose and gain single workers.

Ray starts the workers of a group together and places them in one placement group, which is created and removed as a
whole. Here each worker has a placement group of its own, called its slot, and has been a pending worker before it joins
the group, see `cluster/controller/pending_workers.py`. `WorkerGroup`, `ReplicaGroup`, `Worker` and
`PlacementGroupHandle` are private to Ray Train.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import ray
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import PlacementGroupHandle
from ray.train.v2._internal.execution.worker_group.worker import Worker
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.util.placement_group import PlacementGroup, remove_placement_group

from ray_app.cluster.controller.pending_workers import PendingWorker, PendingWorkers, Slot
from ray_app.cluster.ray_private import actor_id_of

_REPLY_TIMEOUT_S = 120.0
"""Seconds for which a worker that has been ready may take to initialize its context."""


class WorkersFailedToStartError(WorkerGroupStartupFailedError):
    """A worker group did not start; Ray's controller tries again.

    Args:
        message: For the log.
        reasons: The reason of each worker that could not start.
        is_charged: Whether this counts as a failure of the run.
    """

    def __init__(self, message: str, reasons: Sequence[str] = (), is_charged: bool = False) -> None:
        super().__init__(message)
        self.reasons, self.is_charged = reasons, is_charged


@dataclasses.dataclass(frozen=True)
class ElasticGroupFactory:
    """Creates the worker groups of a run; it takes the place of the class in `TrainController.worker_group_cls`.

    Args:
        pending_workers: See `ElasticGroup`.
        slot: See `ElasticGroup`.
    """

    pending_workers: PendingWorkers
    slot: Slot

    def create(self, **options: Any) -> ElasticGroup:
        """Creates and starts a worker group, see `WorkerGroup.create`."""
        group = ElasticGroup(self.pending_workers, self.slot, **options)
        group._start()
        return group


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
    """A worker group that drops single workers, and lets pending workers join while the others train.

    Args:
        pending_workers: The workers that have not joined yet.
        slot: What each of them reserves.
        arguments: Arguments of `WorkerGroup`.
    """

    _slots: _Slots
    _next_rank = 0
    """The world rank for Ray of the next worker; it has nothing to do with the rank in a generation."""
    _worker_group_state: Any
    _state_builder: Any = None

    def __init__(self, pending_workers: PendingWorkers, slot: Slot, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._pending_workers, self._slot = pending_workers, slot

    def _start(self) -> None:
        """Starts the group.

        Raises:
            WorkersFailedToStartError: The group did not start, because a worker was lost; none of its workers remains.
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
            raise WorkersFailedToStartError(str(cause), [str(cause)], is_charged=True) from cause

    def _start_impl(self, builder: Any) -> None:
        self._state_builder = builder
        super()._start_impl(builder)

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> _Slots:
        """Starts the missing pending workers, and returns the slots of this group, of which there are none yet."""
        del scaling_config
        self._slots = _Slots()
        self._pending_workers.start(worker_group_context.num_workers - len(self._pending_workers), self._slot)
        return self._slots

    def _create_workers(self, num_workers: int, *unused: Any, **also_unused: Any) -> list:
        """Waits for pending workers, instead of creating workers, and returns Ray's workers for them.

        Raises:
            WorkersFailedToStartError: Fewer than `num_workers` became ready.
        """
        del unused, also_unused
        if self._state_builder is not None:
            # Ray starts this actor for `ray.train.report` and `ray.train.collective`, which no worker calls here. Its
            # imports would use a CPU for a second while the workers start.
            ray.kill(self._state_builder.sync_actor)
        reasons = self._pending_workers.wait_until_ready(num_workers)
        if self._pending_workers.count_ready() < num_workers:
            summary = f"{self._pending_workers.count_ready()} of {num_workers} workers are ready"
            raise WorkersFailedToStartError(
                "\n".join([summary, *dict.fromkeys(reasons)]), reasons, self._pending_workers.failed_rounds > 0
            )
        return self._adopt_workers(self._pending_workers.take_ready(num_workers))

    def _adopt_workers(self, ready: list[PendingWorker]) -> list:
        """Takes over the slots of ready pending workers, and returns them as workers of Ray.

        Their world ranks for Ray are numbers that no other worker of the group has had.
        """
        for pending in ready:
            self._slots.add(actor_id_of(pending.actor), pending.placement_group)
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

    def drop(self, actor_ids: Collection[str]) -> None:
        """Kills the workers with these actor ids, and frees their slots."""
        workers = self.get_workers()
        self._kill_workers([worker for worker in workers if actor_id_of(worker.actor) in actor_ids])
        self._set_workers([worker for worker in workers if actor_id_of(worker.actor) not in actor_ids])

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
