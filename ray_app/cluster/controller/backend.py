"""The parts around Ray Train (Ray 2.60) that every way of recovery needs.

These are a backend that creates no process group, the callback that charges failures to the budgets, and calls of the
rendezvous. They use:

- `ray.train.backend`: the public `TorchConfig` makes a backend that starts a process group for the life of the workers,
  and imports torch, for which a pending worker's environment is not set yet. Here a process group is formed in each
  generation, see `cluster/rendezvous/client.py`.
- `ray.train.v2._internal.execution.callback`: the classes of the callbacks that `RunConfig(callbacks=...)` accepts.
- `TrainRunContext.run_id`: the name under which a run asks for resources.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import ray
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from ray_app.cluster.controller.failure_budget import Budget
from ray_app.config.config import Config
from ray_app.errors import SilentActorError

_REPLY_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class ControllerContext:
    """The run, as the controller needs to know it.

    Args:
        run_root: The run's directory.
        fence: Number of this start.
        config: Its configuration.
        rendezvous: Handle of the rendezvous actor.
        reading_cpus: Logical CPUs to leave to the evaluator and to reading.
        in_place: Whether the other workers go on when one is lost.
    """

    run_root: str
    fence: int
    config: Config
    rendezvous: Any
    reading_cpus: float
    in_place: bool


def reply(refs: Any) -> Any:
    """Returns the rendezvous' reply to a call, or its replies to a list of calls.

    Raises:
        SilentActorError: It has not replied for two minutes.
    """
    try:
        return ray.get(refs, timeout=_REPLY_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError as error:
        raise SilentActorError(
            f"The controller has waited {_REPLY_TIMEOUT_S:g} s for the rendezvous, which does not answer. Look at the"
            " load and the open files of the driver's node, then start the same run again."
        ) from error


def use_stable_run_id(trainer: DataParallelTrainer, run_root: str) -> None:
    """Has every start of a run ask for resources under one name.

    Ray keeps what a killed driver asked for under its name for 180 s; the next start takes it over.
    """
    vars(trainer.train_run_context)["run_id"] = hashlib.sha256(run_root.encode()).hexdigest()


class NoProcessGroupBackend(Backend):
    """A backend that leaves process groups to `cluster/rendezvous/client.py`."""

    share_cuda_visible_devices = True


class NoProcessGroupConfig(BackendConfig):
    """Selects `NoProcessGroupBackend`."""

    @property
    def backend_cls(self) -> type[NoProcessGroupBackend]:
        """See `BackendConfig`."""
        return NoProcessGroupBackend


class FailureBudget(ControllerCallback, WorkerGroupCallback):
    """Charges the failures of workers to the budget. It lives in the controller's process.

    A callback ends a run by raising from a hook.

    Args:
        context: The run.
    """

    def __init__(self, context: ControllerContext) -> None:
        self._context = context
        self.budget = Budget(context.run_root, context.fence, context.config.failure)
        self._errors: dict[Any, BaseException] = {}
        self._workers = 0

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Records how many workers start."""
        self._errors, self._workers = {}, len(worker_group.get_workers())
        self.budget.record("workers", workers=self._workers)
        reply(self._context.rendezvous.set_expected.remote(self._workers))

    def record_failed_starts(self, reasons: list[str], is_charged: bool) -> None:
        """Records that workers could not start.

        Args:
            reasons: The reason of each worker.
            is_charged: Whether they count as a failure when the controller next handles one.
        """
        self.budget.record("start_failed", workers=len(reasons), reason="\n".join(dict.fromkeys(reasons))[:2000])
        if is_charged:
            # No worker goes on, so all workers are those that failed.
            self._errors = {"start": RuntimeError(reasons[0])}
            self._workers = len(self._errors)

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Remembers the errors of the workers."""
        self._errors = dict(worker_group_status.errors) or self._errors
        self._workers = len(worker_group_status.worker_statuses)
        if not self._context.in_place:
            # The number is sent at every poll, because the rendezvous may have been restarted and lost it.
            self._context.rendezvous.set_expected.remote(self._workers)

    def before_controller_execute_failure_decision(self, failure_decision: Any) -> None:
        """Ends the run if it must end; otherwise Ray Train goes on."""
        del failure_decision
        errors, self._errors = self._errors, {}
        # Without errors of workers the controller itself has failed, for example to place workers, and tries again.
        if errors:
            status = reply(self._context.rendezvous.status.remote())
            left = self._workers - len(errors) if self._context.in_place else 0
            self.budget.charge_failure(errors, status.step, left)
