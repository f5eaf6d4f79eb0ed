"""What went wrong so far, against what may: budgets for failures and preemptions, and a stop for what repeats
itself.
"""

from __future__ import annotations

import re
from itertools import groupby
from operator import itemgetter
from typing import Any

from ray_app.config.sections import FailureSection
from ray_app.errors import BudgetSpentError, PreemptedError, RayAppError, RepeatedFailureError, StorageError, TaskError
from ray_app.runlog.history import disturbances
from ray_app.runlog.journal import Event, put_event, read_events
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import guard_run, redact
from ray_app.storage.files import location

_DIED = re.compile(r"Worker exit detail: (.*?)(?:Some common causes|$)", re.DOTALL)
_MOST_CHARS = 8000
_SAME = 3
"""Times that the same error may follow one another at the same step before the run gives up; where others go on, as
often as all are lost one after the other, and once more, if the budget allows so many.
"""
_STORAGE_SAME = 20
"""Times that workers may find the storage failing at the same step, each after trying for about half a minute."""


class Budget:
    """Counts what fails, records it in the run's events, and raises when a budget is spent or trying again is
    pointless.

    Args:
        run_root: The run's directory.
        fence: Number of this start.
        limits: The budgets.
    """

    def __init__(self, run_root: str, fence: int, limits: FailureSection) -> None:
        self._run_root, self._fence, self._limits = run_root, fence, limits
        self._failures = self._preemptions = 0
        self._last: tuple[int, str] | None = None
        self._repeated = self._most_repeated = 0
        self._without = 0, -1

    @property
    def paths(self) -> RunPaths:
        """The run directory."""
        return RunPaths(location(self._run_root))

    def failed(self, errors: dict[Any, BaseException], step: int, left: int) -> None:
        """Charges a failure of workers.

        Args:
            errors: What each worker failed with.
            step: Finished steps of the run.
            left: Workers that go on.

        Raises:
            RayAppError: The run has to end.
        """
        guard_run(self.paths.config)
        reasons = {str(rank): _brief(e) for rank, e in errors.items()}
        if all(isinstance(e, PreemptedError) for e in errors.values()):
            return self.preempted(len(errors), step, left)
        if all(isinstance(e, StorageError) for e in errors.values()):
            return self._without_storage(reasons, step, left)
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
        self._note_repetition(step, next(iter(sorted(reasons.values()))), len(errors) + left if left else 0)
        allowed = self._limits.max_failures
        if 0 <= allowed < self._failures:
            raise BudgetSpentError(
                f"The workers failed {self._failures} times; failure.max_failures allows {allowed}. Start the same run"
                f" again to continue"
                f" it, or raise failure.max_failures. The last time, by rank:\n{_listed(reasons)}"
            )
        return None

    def _without_storage(self, reasons: dict[str, str], step: int, left: int) -> None:
        """Goes on, without a charge, where only the storage failed; whoever read it has tried for a while.

        Raises:
            RepeatedFailureError: It has failed too often at the same step.
        """
        put_event(self.paths, "storage_failed", self._fence, errors=reasons, step=step, left=left)
        self._without = self._without[0] + 1 if step == self._without[1] else 1, step
        if self._without[0] >= _STORAGE_SAME:
            raise RepeatedFailureError(
                f"The storage failed {self._without[0]} times in a row after step {step}. The same run continues from"
                f" its newest checkpoint"
                f" once it is there again. The last time, by rank:\n{_listed(reasons)}"
            )

    def preempted(self, workers: int, step: int, left: int) -> None:
        """Charges a preemption.

        Raises:
            BudgetSpentError: There were more than `failure.max_preemptions`.
        """
        self._preemptions += 1
        put_event(self.paths, "preempted", self._fence, number=self._preemptions, workers=workers, step=step, left=left)
        allowed = self._limits.max_preemptions
        if 0 <= allowed < self._preemptions:
            raise BudgetSpentError(
                f"Nodes were taken away {self._preemptions} times; failure.max_preemptions allows {allowed}. Start the"
                f" same run again to"
                " continue it, or raise failure.max_preemptions."
            )

    def note(self, kind: str, **details: Any) -> None:
        """Records something else."""
        put_event(self.paths, kind, self._fence, **details)

    def _note_repetition(self, step: int, reason: str, workers: int) -> None:
        found = step, reason.splitlines()[0]
        if found != self._last:
            self._last, self._repeated, self._most_repeated = found, 0, _SAME
        allowed = self._limits.max_failures
        most = workers + 1 if allowed < 0 else min(workers + 1, allowed + 1)
        self._repeated, self._most_repeated = self._repeated + 1, max(self._most_repeated, most)
        if self._repeated == self._most_repeated:
            raise RepeatedFailureError(
                f"The same failure {self._repeated} times in a row after step {step}, so starting again is pointless."
                f" The same run"
                f" continues from its newest checkpoint once the cause is gone: {reason}"
            )


def _brief(error: BaseException) -> str:
    """What to say of an error: for a process that died how it did, otherwise what the error says of itself."""
    text = redact(str(error))  # before it is cut, so that no part of a secret is left
    died = _DIED.search(text)
    if died is not None:
        return f"the worker process died: {died[1].strip()}"
    return text[:_MOST_CHARS] if isinstance(error, TaskError) else f"{type(error).__name__}: {text}"[:2000]


def _listed(reasons: dict[str, str]) -> str:
    """The reasons by rank; what several ranks failed with alike is told once."""
    alike = [
        list(group)
        for _, group in groupby(sorted(reasons.items(), key=itemgetter(1)), lambda item: item[1].splitlines()[0])
    ]
    return "\n".join(f"{', '.join(rank for rank, _ in group)}: {group[0][1]}" for group in alike)


def spent(paths: RunPaths, limits: FailureSection) -> str:
    """What went wrong so far in all starts, in words, see `disturbances`."""
    return disturbances(disturbing(paths), limits)


def disturbing(paths: RunPaths) -> list[Event]:
    """The events that tell what went wrong so far in all starts."""
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
