"""Ray Train's worker group (Ray 2.60), so that it can lose and gain single workers.

Its workers share one placement group, which is made and given back as a whole, and are made when the group starts. Here
each brings its own and has prepared itself before, see `cluster.control.newcomers`. `WorkerGroup`, `ReplicaGroup`,
`Worker` and `PlacementGroupHandle` are private to Ray Train.
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
from ray_app.cluster.controller.pending_workers import NO_ROOM, PendingWorker, PendingWorkers, Slot

_ANSWER_S = 120.0
"""Seconds that a worker which has prepared itself has to answer."""


class _Slots(PlacementGroupHandle):
    """The placement groups of the workers of a group, one each."""

    def __init__(self) -> None:
        self._used: dict[str, PlacementGroup] = {}

    def use(self, actor_id: str, slot: PlacementGroup) -> None:
        self._used[actor_id] = slot

    def release(self, actor_id: str) -> None:
        remove_placement_group(self._used.pop(actor_id))

    @property
    def placement_group(self) -> Any:
        return None  # for `_create_workers`, which needs none

    def ready(self) -> Any:
        raise NotImplementedError

    def wait(self, timeout_seconds: float = 30) -> bool:
        del timeout_seconds
        return True  # the newcomers wait for theirs

    def shutdown(self) -> None:
        for actor_id in list(self._used):
            self.release(actor_id)


class ElasticGroup(WorkerGroup):
    """A worker group that loses and gains single workers."""

    _slots: _Slots
    _next_rank = 0
    _worker_group_state: Any
    _builder: Any = None

    @property
    def _newcomers(self) -> PendingWorkers:
        return next(c for c in self._callbacks if isinstance(c, PendingWorkers))

    @property
    def _budget(self) -> FailureBudget:
        return next(c for c in self._callbacks if isinstance(c, FailureBudget))

    def slot(self, shunned: Collection[str] = ()) -> Slot:
        """What each of its workers reserves, the same for all, also for those of later; not on the nodes of the
        `shunned` ids.
        """
        context = self._worker_group_context
        labels = dict((context.label_selector or [{}])[0])
        if shunned:
            labels[ray._raylet.RAY_NODE_ID_KEY] = f"!in({','.join(sorted(shunned))})"
        return Slot(context.resources_per_worker, context.placement_strategy, labels)

    def _start(self) -> None:
        """Starts it. If a worker is lost meanwhile that is a failure, and nobody of it is left behind: Ray would end
        the run.

        Raises:
            WorkerGroupStartupFailedError: It did not start.
        """
        try:
            super()._start()
        except Exception as error:
            if self.has_started():
                self.shutdown()
            lost = error.__cause__ if isinstance(error, WorkerGroupStartupFailedError) else error
            if not isinstance(lost, ray.exceptions.RayActorError):
                raise
            self._budget.not_started([str(lost)], charged=True)
            raise WorkerGroupStartupFailedError(str(lost)) from lost

    def _start_impl(self, builder: Any) -> None:
        self._builder = builder
        super()._start_impl(builder)

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> _Slots:
        del scaling_config
        self._slots = _Slots()
        self._newcomers.begin(worker_group_context.num_workers - len(self._newcomers), self.slot())
        return self._slots

    def _create_workers(self, num_workers: int, *unused: Any, **also_unused: Any) -> list:
        """Waits for newcomers instead.

        Raises:
            WorkerGroupStartupFailedError: There are not so many.
        """
        del unused, also_unused
        if (
            self._builder is not None
        ):  # the actor for `ray.train.report` and collectives, which nobody calls, would import for a second
            ray.kill(self._builder.sync_actor)
        reasons = self._newcomers.wait(num_workers)
        if self._newcomers.ready() < num_workers:
            if died := [reason for reason in reasons if reason != NO_ROOM]:
                self._budget.not_started(died, charged=self._newcomers.in_vain > 0)
            told = [f"{self._newcomers.ready()} of {num_workers} workers are ready", *dict.fromkeys(reasons)]
            raise WorkerGroupStartupFailedError("\n".join(told))
        return self._workers_of(self._newcomers.take(num_workers))

    def _workers_of(self, newcomers: list[PendingWorker]) -> list:
        for newcomer in newcomers:
            self._slots.use(id_of(newcomer.actor), newcomer.group)
        workers = [
            Worker(n.actor, n.metadata, self._worker_group_context.resources_per_worker, placement_group_bundle_index=0)
            for n in newcomers
        ]
        first, self._next_rank = self._next_rank, self._next_rank + len(workers)
        return self._assign_worker_ranks(workers, first, first + len(workers), replica_group_size=1)

    def _init_train_context_on_workers(
        self, workers: list, sync_actor: Any, train_context_args: dict[str, list]
    ) -> None:
        """As Ray's, but for the controller's handle, which only `ray.train.report` needs: ours is no actor.

        Raises:
            ActorUnavailableError: A worker does not answer; Ray and this group treat it like a worker that died.
        """
        common = {
            "train_run_context": self._train_run_context,
            "synchronization_actor": sync_actor,
            "storage_context": self._storage_context,
            "worker_callbacks": self._worker_callbacks_to_propagate,
            "controller_actor": None,
        }
        asked = []
        for place, worker in enumerate(workers):
            own = {name: values[place] for name, values in train_context_args.items()}
            asked.append(
                worker.actor.init_train_context.remote(distributed_context=worker.distributed_context, **common, **own)
            )
        _, silent = ray.wait(asked, num_returns=len(asked), timeout=_ANSWER_S)
        if silent:
            actor_id = workers[asked.index(silent[0])].actor._actor_id.binary()
            raise ray.exceptions.ActorUnavailableError(
                f"a worker that was ready has not answered for {_ANSWER_S:g} s", actor_id
            )
        ray.get(asked)
        self._decorate_worker_log_file_paths(workers)

    def drop(self, gone: set[int]) -> None:
        """Ends the workers at these places of the list and frees their slots."""
        workers = self.get_workers()
        self._end([workers[place] for place in gone])
        self._set([w for place, w in enumerate(workers) if place not in gone])

    def _end(self, workers: list) -> None:
        for worker in workers:
            ray.kill(worker.actor)
            self._slots.release(id_of(worker.actor))

    def join(self, most: int) -> int:
        """Has newcomers that are ready join; the others train on. Returns how many, at most `most`.

        Raises:
            RayError: One of them died just now; none joins.
        """
        newcomers = self._newcomers.take(most)
        if not newcomers:
            return 0
        started = self._workers_of(newcomers)
        try:
            self._init_train_context(started, self._worker_group_state.sync_actor)
            for worker in started:
                self._group_of(worker).start_training(self._worker_group_context)
        except ray.exceptions.RayError:
            self._end(started)
            raise
        self._set([*self.get_workers(), *started])
        return len(started)

    def _group_of(self, worker: Worker) -> ReplicaGroup:
        return ReplicaGroup([worker], self._worker_group_context.resources_per_worker, self._replica_group_callbacks)

    def _set(self, workers: list) -> None:
        self._worker_group_state = dataclasses.replace(self._worker_group_state, workers=workers)
        self._replica_groups = [self._group_of(worker) for worker in workers]
        self._worker_rank_to_replica_group_rank = {place: place for place in range(len(workers))}
        self._world_rank_to_ongoing_poll.clear()
        self._latest_poll_status = None


def id_of(actor: Any) -> str:
    """The id of a worker's actor, by which the rendezvous knows it."""
    return actor._actor_id.hex()
