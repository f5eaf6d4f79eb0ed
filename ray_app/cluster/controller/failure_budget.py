"""The budget for failures, and the stop for a failure that repeats itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

from ray_app.config.sections import FailureSection
from ray_app.errors import (
    BudgetSpentError,
    DeviceFaultError,
    PreemptedError,
    RayAppError,
    RepeatedFailureError,
    StorageError,
    TaskError,
)
from ray_app.runlog.history import disturbances
from ray_app.runlog.journal import Event, put_event, read_events
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import redact, register_run_secrets
from ray_app.storage.files import to_location

_DEATH = re.compile(r"Worker exit detail: (.*?)(?:Some common causes|$)", re.DOTALL)
_MAX_TASK_ERROR_CHARS, _MAX_ERROR_CHARS = 8000, 2000
_MAX_REPETITIONS = 3
"""The run fails when the same error occurs at the same step this number of times in a row.

If other workers go on, the limit is the number of workers plus one, if that is higher and `failure.max_failures` allows
it: each worker may be lost once, and the next loss ends the run.
"""
_MAX_STORAGE_REPETITIONS = 20
"""Times that the storage may fail at the same step. Each time workers have retried for about half a minute."""


class FailureBudget:
    """Counts failures, records them as events of the run, and raises when a budget is spent or a retry is pointless.

    Args:
        run_root: The run's directory.
        fence: Number of this start.
        limits: The budgets.
    """

    def __init__(self, run_root: str, fence: int, limits: FailureSection) -> None:
        self._run_root, self._fence = run_root, fence
        self._limits = limits
        self._failures = self._preemptions = 0
        self._last_failure: tuple[int, str] | None = None
        self._repetitions = self._max_repetitions = 0
        self._storage_failures = 0
        self._storage_failed_step = -1

    @property
    def paths(self) -> RunPaths:
        """The run directory."""
        return RunPaths(to_location(self._run_root))

    def charge_failure(self, errors: Mapping[Any, BaseException], step: int, left: int) -> None:
        """Charges a failure of workers.

        Args:
            errors: The error of each failed worker, by rank.
            step: Finished steps of the run.
            left: Number of workers that go on.

        Raises:
            RayAppError: The run has to end.
        """
        register_run_secrets(self.paths.config)
        reasons = {str(rank): _summary(e) for rank, e in errors.items()}
        if all(isinstance(e, PreemptedError) for e in errors.values()):
            return self.charge_preemption(len(errors), step, left)
        if all(isinstance(e, StorageError) for e in errors.values()):
            return self._record_storage_failure(reasons, step, left)
        for rank, e in errors.items():
            if isinstance(e, DeviceFaultError):
                self.record("device_fault", rank=rank, name=e.node, device=e.device, step=step, reason=str(e))
        self._failures += 1
        final = next((e for e in errors.values() if isinstance(e, RayAppError) and not e.retryable), None)
        put_event(
            self.paths,
            "failed",
            self._fence,
            number=self._failures,
            errors=reasons,
            step=step,
            left=left,
            final=final is not None,
        )
        if final is not None:
            raise final
        self._check_repetition(step, min(reasons.values()), len(errors) + left if left else 0)
        allowed = self._limits.max_failures
        if 0 <= allowed < self._failures:
            raise BudgetSpentError(
                f"The workers failed {self._failures} times; failure.max_failures allows {allowed}. Start the same run"
                f" again to continue it, or raise failure.max_failures. The last failure, by rank:\n{_listed(reasons)}"
            )
        return None

    def _record_storage_failure(self, reasons: dict[str, str], step: int, left: int) -> None:
        """Records a failure of the storage alone, which is not charged: the workers have retried for a while.

        Raises:
            RepeatedFailureError: The storage has failed too often at the same step.
        """
        put_event(self.paths, "storage_failed", self._fence, errors=reasons, step=step, left=left)
        self._storage_failures = self._storage_failures + 1 if step == self._storage_failed_step else 1
        self._storage_failed_step = step
        if self._storage_failures >= _MAX_STORAGE_REPETITIONS:
            raise RepeatedFailureError(
                f"The storage failed {self._storage_failures} times in a row after step {step}. Repair it, then start"
                f" the same run again to continue. The last failure, by rank:\n{_listed(reasons)}"
            )

    def charge_preemption(self, workers: int, step: int, left: int) -> None:
        """Records a preemption of some workers, of which a run tolerates any number."""
        self._preemptions += 1
        put_event(self.paths, "preempted", self._fence, number=self._preemptions, workers=workers, step=step, left=left)

    def record(self, kind: str, **details: Any) -> None:
        """Records an event that is not charged."""
        put_event(self.paths, kind, self._fence, **details)

    def record_failed_starts(self, reasons: list[str]) -> None:
        """Records that workers could not start, each for one of the reasons; this is not charged."""
        self.record("start_failed", workers=len(reasons), reason="\n".join(dict.fromkeys(reasons))[:2000])

    def _check_repetition(self, step: int, reason: str, workers: int) -> None:
        """Counts how often the same failure has occurred in a row.

        Args:
            step: Finished steps of the run.
            reason: The reason of the failure; its first line is compared.
            workers: Number of workers before the failure if some go on; otherwise 0.

        Raises:
            RepeatedFailureError: It has occurred too often.
        """
        failure = step, reason.splitlines()[0]
        if failure != self._last_failure:
            self._last_failure = failure
            self._repetitions, self._max_repetitions = 0, _MAX_REPETITIONS
        allowed = self._limits.max_failures
        max_repetitions = workers + 1 if allowed < 0 else min(workers + 1, allowed + 1)
        self._repetitions += 1
        self._max_repetitions = max(self._max_repetitions, max_repetitions)
        if self._repetitions == self._max_repetitions:
            raise RepeatedFailureError(
                f"The same failure occurred {self._repetitions} times in a row after step {step}. Remove the cause,"
                f" then start the same run again to continue from its newest checkpoint: {reason}"
            )


def failure_summary(paths: RunPaths, limits: FailureSection) -> str:
    """Returns a text that counts what went wrong so far in all starts, see `disturbances`."""
    return disturbances(failure_events(paths), limits)


def failure_events(paths: RunPaths) -> list[Event]:
    """Returns the events of all starts from which `disturbances` counts what went wrong."""
    return read_events(
        paths,
        "failed",
        "preempted",
        "storage_failed",
        "resized",
        "started",
        "finished",
        "stopped_early",
        "sdc_detected",
    )


def _summary(error: BaseException) -> str:
    """Returns how a process died if the error says so, otherwise the error's message."""
    # The message is redacted before it is cut, so that no part of a secret remains.
    text = redact(str(error))
    death = _DEATH.search(text)
    if death is not None:
        return f"the worker process died: {death[1].strip()}"
    if isinstance(error, TaskError):
        return text[:_MAX_TASK_ERROR_CHARS]
    return f"{type(error).__name__}: {text}"[:_MAX_ERROR_CHARS]


def _listed(reasons: dict[str, str]) -> str:
    """Returns the reasons by rank, one line for the ranks with the same first line."""
    by_reason = sorted(reasons.items(), key=itemgetter(1))
    groups = [list(group) for _, group in groupby(by_reason, lambda item: item[1].splitlines()[0])]
    return "\n".join(f"{', '.join(rank for rank, _ in group)}: {group[0][1]}" for group in groups)
