"""The one place that knows Ray Train's private parts (Ray 2.60): a backend that leaves process groups alone, and the failure budgets.

- `ray.train.torch.config._TorchBackend`: the public `TorchConfig` always makes this backend, which starts a process group for the life
  of the workers. Ours is formed in generations, so its hooks are replaced.
- `ray.train.v2._internal.execution.callback`: the classes of the callbacks that `RunConfig(callbacks=...)` accepts.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend
from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback

from ray_app.config import FailureSection
from ray_app.errors import BudgetSpentError, RayAppError
from ray_app.record.journal import put_event
from ray_app.record.paths import RunPaths
from ray_app.train.membership import ATTEMPT


def _set_attempt(attempt: str) -> None:
    os.environ[ATTEMPT] = attempt


class _OwnGroupBackend(_TorchBackend):
    """Tells the workers of an attempt that they belong together; groups are formed by `train.membership`."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        del backend_config
        worker_group.execute(_set_attempt, uuid.uuid4().hex)

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        del worker_group, backend_config

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        del worker_group, backend_config


class OwnGroupConfig(TorchConfig):
    """Torch workers without Ray's process group."""

    @property
    def backend_cls(self) -> type[_OwnGroupBackend]:
        """See `TorchConfig`."""
        return _OwnGroupBackend


class FailureBudget(ControllerCallback, WorkerGroupCallback):
    """Counts what fails, records it in the run's events, and ends the run when a budget is spent or trying again is pointless.

    Ray's own limits are set to unlimited; raising from the hook is how a callback ends a run. Lives in the controller's process.

    Args:
        run_root: The run's directory.
        fence: Number of this start.
        limits: The budgets.
    """

    def __init__(self, run_root: str, fence: int, limits: FailureSection) -> None:
        self._run_root, self._fence, self._limits = run_root, fence, limits
        self._errors: dict[int, BaseException] = {}
        self._failures = 0
        self._workers = 0

    @property
    def _paths(self) -> RunPaths:
        return RunPaths(Path(self._run_root))

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Records how many workers start."""
        workers = len(worker_group.get_workers())
        put_event(self._paths, "workers", self._fence, workers=workers, before=self._workers)
        self._workers = workers
        self._errors = {}

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Remembers why workers failed."""
        self._errors = dict(worker_group_status.errors) or self._errors

    def before_controller_execute_failure_decision(self, failure_decision: Any) -> None:
        """Ends the run if it must end; otherwise Ray Train starts the workers again."""
        del failure_decision
        errors, self._errors = self._errors, {}
        if not errors:
            return  # the controller's own trouble, such as workers that cannot be placed yet; Ray tries again
        self._failures += 1
        final = next((e for e in errors.values() if isinstance(e, RayAppError) and not e.retryable), None)
        reasons = {str(rank): f"{type(e).__name__}: {e}"[:2000] for rank, e in errors.items()}
        put_event(self._paths, "failed", self._fence, number=self._failures, errors=reasons, final=final is not None)
        if final is not None:
            raise final
        allowed = self._limits.max_failures
        if 0 <= allowed < self._failures:
            raise BudgetSpentError(
                f"The workers failed {self._failures} times; failure.max_failures allows {allowed}. The last time: {reasons}. Start the"
                " same run again to continue it, or raise failure.max_failures."
            )
