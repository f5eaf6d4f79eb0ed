"""Ray Train's parts (Ray 2.60) that every way of recovery needs: a backend that leaves process groups alone, and the
budgets.

- `ray.train.backend`: the public `TorchConfig` makes a backend that starts a process group for the life of the workers,
  and imports torch, for which a newcomer's environment is not set yet. Our process group is formed in generations, see
  `cluster.rendezvous.client`.
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

_ANSWER_S = 120.0


@dataclass(frozen=True)
class ControllerContext:
    """What the controller needs to know of the run.

    Args:
        run_root: The run's directory.
        fence: Number of this start.
        config: Its configuration.
        rendezvous: Handle of the rendezvous actor.
        reading_cpus: Logical CPUs to leave to the evaluator and to reading.
        in_place: Whether the others go on when a worker is lost.
    """

    run_root: str
    fence: int
    config: Config
    rendezvous: Any
    reading_cpus: float
    in_place: bool


def answer(asked: Any) -> Any:
    """What the rendezvous answers, or several of them.

    Raises:
        SilentActorError: It has not answered for two minutes.
    """
    try:
        return ray.get(asked, timeout=_ANSWER_S)
    except ray.exceptions.GetTimeoutError as error:
        raise SilentActorError(
            f"The controller has waited {_ANSWER_S:g} s for the rendezvous, which does not answer. Look at the load and"
            f" the open files of"
            " the driver's node, then start the same run again."
        ) from error


def take_over(trainer: DataParallelTrainer, run_root: str) -> None:
    """Has every start of a run ask for resources under one name: what a killed driver asked for would be kept for it
    for 180 s.
    """
    vars(trainer.train_run_context)["run_id"] = hashlib.sha256(run_root.encode()).hexdigest()


class OwnGroupBackend(Backend):
    """Leaves process groups to `cluster.rendezvous.client`."""

    share_cuda_visible_devices = True


class OwnGroupConfig(BackendConfig):
    """Workers without Ray's process group."""

    @property
    def backend_cls(self) -> type[OwnGroupBackend]:
        """See `BackendConfig`."""
        return OwnGroupBackend


class FailureBudget(ControllerCallback, WorkerGroupCallback):
    """Charges failures to the budget; raising from the hook is how a callback ends a run. Lives in the controller's
    process.

    Args:
        control: The run.
    """

    def __init__(self, control: ControllerContext) -> None:
        self._control = control
        self.budget = Budget(control.run_root, control.fence, control.config.failure)
        self._errors: dict[Any, BaseException] = {}
        self._workers = 0

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Records how many workers start."""
        self._errors, self._workers = {}, len(worker_group.get_workers())
        self.budget.note("workers", workers=self._workers)
        answer(self._control.rendezvous.set_expected.remote(self._workers))

    def not_started(self, reasons: list[str], charged: bool) -> None:
        """Records that workers could not start.

        Args:
            reasons: Why, one for each.
            charged: Whether it counts as a failure where the controller decides what to do about it.
        """
        self.budget.note("start_failed", workers=len(reasons), reason="\n".join(dict.fromkeys(reasons))[:2000])
        if charged:
            self._errors = {"start": RuntimeError(reasons[0])}
            self._workers = len(self._errors)  # nobody is left

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Remembers why workers failed."""
        self._errors = dict(worker_group_status.errors) or self._errors
        self._workers = len(worker_group_status.worker_statuses)
        if not self._control.in_place:  # again and again: the rendezvous may have been started anew
            self._control.rendezvous.set_expected.remote(self._workers)

    def before_controller_execute_failure_decision(self, failure_decision: Any) -> None:
        """Ends the run if it must end; otherwise Ray Train goes on."""
        del failure_decision
        errors, self._errors = self._errors, {}
        if errors:  # otherwise it is the controller's own trouble, such as workers that cannot be placed yet
            status = answer(self._control.rendezvous.status.remote())
            self.budget.failed(errors, status.step, self._workers - len(errors) if self._control.in_place else 0)
