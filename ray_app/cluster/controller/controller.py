"""Workers that come and go one by one: Ray Train's controller (Ray 2.60), changed where it restarts everybody.

Stock Ray Train knows one reaction to every change: end all workers and start all again. Here a worker that is lost is
dropped, one whose node goes away leaves, and new ones, which have prepared themselves beside
(`cluster.control.newcomers`), join while the others train on. What that needs of Ray's internals:

- `WorkerGroup`: see `cluster.control.group`.
- `TrainController`: where it would restart the group it drops the failed workers; where it would resize it lets
  newcomers join.
- `ElasticScalingPolicy`: see `cluster.control.sizes`.
- `DataParallelTrainer._initialize_and_run_controller`: the only place where a controller of one's own can be put in.
  Ray runs its own as an actor; ours runs here, in the driver's process, in the thread that calls `fit`: a process less
  to wait for, two seconds of every start. It ended with the driver as an actor, too. What it says goes to a file beside
  Ray's logs, as before.

Another Ray version may lack any of it; then importing this module fails, and `cluster.trainer` falls back to restarting
all workers.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.train.backend import BackendConfig
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import ENABLE_CONTROLLER_STRUCTURED_LOGGING_ENV_VAR
from ray.train.v2._internal.execution.controller.controller import TrainController, TrainControllerLoopIterationResult
from ray.train.v2._internal.execution.controller.state import AbortedState, RunningState
from ray.train.v2._internal.logging.logging import SessionFileHandler
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_app.cluster.controller.backend import ControllerContext, FailureBudget, OwnGroupBackend, answer
from ray_app.cluster.controller.pending_workers import NO_ROOM, PendingWorkers
from ray_app.cluster.controller.scaling_policy import ElasticPolicy, StragglerEvictor
from ray_app.cluster.controller.worker_group import ElasticGroup, id_of
from ray_app.process import put_back, variables

logger = logging.getLogger(__name__)

_GRACE_S = 2.0  # Ray itself says more about how a worker was lost, and usually sooner
_RETRY_S, _MOST_DOUBLED = 5.0, 4
_OWN_LOGS = ENABLE_CONTROLLER_STRUCTURED_LOGGING_ENV_VAR


class _Backend(OwnGroupBackend):
    has_replica_groups = True
    share_cuda_visible_devices = False
    """Each sees its own GPUs, also those that come later; since CUDA 10.1 NCCL copies between GPUs that do not see each
    other, too.
    """


class _BackendConfig(BackendConfig):
    @property
    def backend_cls(self) -> type[_Backend]:
        return _Backend


class _Controller(TrainController):
    """A controller that changes its workers one by one."""

    worker_group_cls = ElasticGroup
    _owed = 0
    """Workers that were lost and not replaced yet."""
    _ready = 0
    """Newcomers that were ready when it was last told."""
    _over = False
    """Whether a worker has ended as it should."""

    def __init__(
        self, given_up: threading.Event, callbacks: list[Any], scaling_policy: ElasticPolicy, **arguments: Any
    ) -> None:
        self._given_up = given_up
        config = scaling_policy._control.config
        scaling = config.scaling
        self._newcomers = scaling_policy.newcomers
        self._retiring = StragglerEvictor(
            scaling.evict_straggler_after_s, config.logical_workers, scaling.min_workers, scaling.worker_limit
        )
        with variables(
            **{_OWN_LOGS: "0"}
        ):  # Ray's own way takes over the logging of this process, and closes all other log files
            super().__init__(callbacks=[*callbacks, self._newcomers], scaling_policy=scaling_policy, **arguments)

    async def _run_control_loop_iteration(self) -> None:
        if not self._given_up.is_set():
            await super()._run_control_loop_iteration()
            return
        if ray.is_initialized():  # otherwise Ray would start anew to be asked
            with suppress(ray.exceptions.RayError):
                self._newcomers.keep(0)
                if self._worker_group is not None:
                    self._worker_group.abort()
        self._set_state(AbortedState())

    @property
    def _budget(self) -> FailureBudget:
        return next(c for c in self._callbacks if isinstance(c, FailureBudget))

    @property
    def _rendezvous(self) -> Any:
        return self._scaling_policy._control.rendezvous

    def _make_and_handle_scaling_decision_for_non_running_worker_group(self, controller_state: Any) -> Any:
        """After a failure: drops those who failed, or have left by now, and goes on with the others, if there
        are any.
        """
        group = self._worker_group
        status = group.get_latest_poll_status() if group is not None and group.has_started() else None
        failed = set(status.errors) if status is not None else set()
        left, retired = self._left(status) if failed else (set(), set())
        gone = failed | left | retired
        if group is None or not 0 < len(gone) < len(group):
            if group is not None:
                self._owed = 0
                self._scaling_policy.suspect({w.metadata.node_id for w in group.get_workers()})
                self._shutdown_worker_group()
            return super()._make_and_handle_scaling_decision_for_non_running_worker_group(controller_state)
        if left:
            self._budget.budget.preempted(
                len(left), answer(self._rendezvous.status.remote()).step, len(group) - len(gone)
            )
        self._drop(gone)
        return self._running()

    def _left(self, status: Any) -> tuple[set[int], set[int]]:
        """Places of those who left as they had to: their node goes away, or they were too slow. Alone they would look
        like the end.
        """
        workers, draining = self._worker_group.get_workers(), self._scaling_policy.draining
        ended = {place for place, one in status.worker_statuses.items() if not one.running and one.error is None}
        left = {place for place in ended if workers[place].metadata.node_id in draining}
        return left, {place for place in ended - left if id_of(workers[place].actor) in self._retiring.retired}

    def _execute_resize_decision(self, decision: Any) -> Any:
        group = self._worker_group
        if group is None or not group.has_started():
            return super()._execute_resize_decision(decision)
        policy, before = self._scaling_policy, len(group)
        try:
            joined = group.join(decision.num_workers - before)
        except ray.exceptions.RayError as error:
            self._note_lost([str(error)])
            return self._running()
        if not joined:
            return self._running()
        if before + joined == policy.wanted:
            policy.changed_s = time.monotonic()
        self._expect()
        replaced = min(joined, self._owed)
        self._owed -= replaced
        step = answer(self._rendezvous.status.remote()).step
        kind = "resized" if joined > replaced else "replaced"
        self._budget.budget.note(kind, before=before, after=before + joined, step=step, reason=policy.reason)
        return self._running()

    def _welcome(self) -> None:
        """Looks after newcomers: as many as the policy wants are to be on their way."""
        newcomers, policy = self._newcomers, self._scaling_policy
        self._note_lost(newcomers.look(policy.draining))
        newcomers.keep(policy.coming)
        if policy.has_spares and (ready := newcomers.ready()) != self._ready:
            self._ready = ready
            self._budget.budget.note("standbys", ready=ready)
        if time.monotonic() >= policy.full_until_s:
            newcomers.begin(policy.coming - len(newcomers), self._worker_group.slot(policy.shunned))

    def _note_lost(self, reasons: list[str]) -> None:
        if reasons:
            self._scaling_policy.full_until_s = time.monotonic() + _RETRY_S * 2 ** min(
                self._newcomers.in_vain, _MOST_DOUBLED
            )
        if told := [reason for reason in reasons if reason != NO_ROOM]:
            self._budget.not_started(told, charged=False)

    @property
    def _dwell_s(self) -> float:
        return self._scaling_policy._control.config.scaling.resize_interval_s

    async def _poll_workers(self) -> Any:
        status = await super()._poll_workers()
        if not status.errors:
            self._tend(status)
        return status

    def _tend(self, status: Any) -> None:
        """Looks after workers that are silent, or have left, or have to leave."""
        group, policy = self._worker_group, self._scaling_policy
        workers = group.get_workers()
        self._welcome()
        leaving = {*policy.draining, *self._retiring.retired}
        left, retired = self._left(status)
        self._over = self._over or any(
            not s.running and i not in left | retired for i, s in status.worker_statuses.items()
        )
        self._expect()  # again and again: the rendezvous may have been started anew
        seen = answer([self._rendezvous.drain.remote(leaving), self._rendezvous.status.remote()])[1]
        silent = {i for i, w in enumerate(workers) if seen.silent.get(id_of(w.actor), 0.0) > _GRACE_S}
        if left and len(left) < len(workers):
            self._budget.budget.preempted(len(left), seen.step, len(workers) - len(left))
            self._drop(left)
        elif retired and len(retired) < len(workers):
            self._drop(retired)
        elif silent:
            limit = policy._control.config.failure.heartbeat_timeout_s
            error = ConnectionError(f"no heartbeat for {limit:g} s")
            self._budget.budget.failed(dict.fromkeys(silent, error), seen.step, len(workers) - len(silent))
            self._drop(silent)
        elif self._retiring.is_on and seen.record is not None:
            self._retire(seen.record.slow, seen.step)

    def _retire(self, slow: Mapping[str, float], step: int) -> None:
        """Has a worker leave that stays slow, if that helps.

        Args:
            slow: How many times as long as the others the slow workers take, by rank.
            step: Finished steps.
        """
        group, policy = self._worker_group, self._scaling_policy
        by_rank = answer(self._rendezvous.workers.remote()) if slow else []
        times = {by_rank[int(rank)].worker: slow[rank] for rank in slow if int(rank) < len(by_rank)}
        nodes = {id_of(worker.actor): worker.metadata.node_id for worker in group.get_workers()}
        ready = self._newcomers.ready()
        decision = self._retiring.decide(
            times, len(group), ready, lambda worker: policy.room_beside(nodes.get(worker, ""), len(group))
        )
        if decision is not None:
            policy.shun(nodes.get(decision.worker, ""))
            worker = next(beat for beat in by_rank if beat.worker == decision.worker)
            self._budget.budget.note(
                "retired", rank=worker.rank, host=worker.host, pid=worker.pid, step=step, reason=decision.reason
            )

    def _drop(self, places: set[int]) -> None:
        group = self._worker_group
        lost = [w for i, w in enumerate(group.get_workers()) if i in places]
        self._scaling_policy.suspect({w.metadata.node_id for w in lost})
        gone = {id_of(w.actor) for w in lost}
        answer(self._rendezvous.evict.remote(gone))
        group.drop(places)
        self._owed += len(places)
        self._expect()
        self._scaling_policy.changed_s = time.monotonic() - self._dwell_s  # replacing them is urgent
        self._scaling_policy.full_until_s = 0.0  # their slots are free

    def _expect(self) -> None:
        answer(self._rendezvous.set_expected.remote(len(self._worker_group), self._scaling_policy._waiting, self._over))

    def _running(self) -> Any:
        return TrainControllerLoopIterationResult(self._get_run_attempt_id(), self._state, RunningState())


class ElasticTrainer(DataParallelTrainer):
    """Ray Train's trainer with a controller and a scaling policy of our own.

    Args: control: The run. prepare: Reference of a function without arguments that each worker calls before it joins;
        what it raises is not looked at. given_up: Set when nobody waits for the run any more; then the controller ends
        its workers and itself. arguments: Of `DataParallelTrainer`. options: Likewise.
    """

    def __init__(
        self, control: ControllerContext, prepare: Any, given_up: threading.Event, *arguments: Any, **options: Any
    ) -> None:
        super().__init__(*arguments, backend_config=_BackendConfig(), **options)
        self._control, self._prepare, self._given_up = control, prepare, given_up

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        # Ray's cleaner knows one placement group per run, and waits for a dashboard that may not be there; ours go with
        # the job. For data sets it starts a process each time, and we give it none.
        unused = (PlacementGroupCleanerCallback, DatasetsCallback)
        arguments["callbacks"] = [c for c in arguments["callbacks"] if not isinstance(c, unused)]
        control, given_up = self._control, self._given_up
        policy = arguments["scaling_policy"] = ElasticPolicy(self.scaling_config, control)
        stops = lambda: given_up.is_set() or policy.is_stopping()  # noqa: E731
        policy.newcomers = PendingWorkers(self._prepare, control.config.scaling.min_workers, stops)
        policy.newcomers.begin(
            policy.free(), policy.slot()
        )  # while the controller waits for others whom it asks before it decides
        try:
            with _logged(f"ray-train-controller-{self.train_run_context.run_id}.log"):
                controller = _Controller(given_up, **arguments)
                asyncio.run(controller.run())
                return controller.get_result()
        finally:
            policy.newcomers.keep(0)


@contextmanager
def _logged(name: str) -> Iterator[None]:
    """What the controller says meanwhile goes to a file of the Ray session, and not to the terminal."""
    said, handler = logging.getLogger("ray.train.v2"), SessionFileHandler(name)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def put(level: int, propagates: bool) -> None:
        said.setLevel(level)
        said.propagate = propagates

    with put_back(said.name, lambda: (said.level, said.propagate), lambda before: put(*before)):
        put(logging.INFO, False)
        said.addHandler(handler)
        try:
            yield
        finally:
            said.removeHandler(handler)
