"""The run's own evaluator, as the driver sees it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import ray

from ray_app.checkpoint.commit import Commit
from ray_app.errors import DataError, EvaluationError
from ray_app.evaluate.job import EvaluationJob, pending
from ray_app.record.redact import redact
from ray_app.runs.outcome.closing import close_orphan
from ray_app.watch.metrics import RunMetrics
from ray_app.watch.safe_console import SafeConsole

logger = logging.getLogger(__name__)

_LOOK_S = 0.25


class Following:
    """Starts the evaluator; leave it as a context manager to end it.

    Args:
        job: What it evaluates on; None: there is no evaluator, and nothing is waited for.
        outlives: Whether the cluster outlives the driver, so that the evaluator may, too.
        before: For fault tests: called before each evaluation.
    """

    def __init__(self, job: EvaluationJob | None, outlives: bool, before: Callable[[Commit], None] | None) -> None:
        self._job, self._metrics = job, RunMetrics(job.paths.name) if job is not None else None
        self._actor: Any = None
        if job is not None:
            from ray_app.evaluate.actor import start_evaluator  # with it Ray Data, see `import_ahead`

            self._actor = start_evaluator(job, before, close_orphan if outlives else None)

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *_: object) -> None:
        if self._actor is not None:
            ray.kill(self._actor, no_restart=True)

    def waiting(self) -> list[Commit]:
        """The checkpoints that wait for an evaluation.

        Raises:
            OSError: The storage does not answer.
        """
        if self._job is None or self._metrics is None:
            return []
        waiting = pending(self._job)
        self._metrics.set("evaluator_lag_seconds", max(0.0, time.time() - waiting[0].time_s) if waiting else 0.0)
        return waiting

    def finish(self, is_over: Callable[[], bool], console: SafeConsole) -> bool:
        """Waits until the evaluator has caught up, at most `evaluate.drain_timeout_s`.

        Args:
            is_over: Whether nobody waits for it any more.
            console: Where it is said if that does not work out.

        Returns:
            Whether it is done: nothing is left that the next start would have evaluated.

        Raises:
            EvaluationError: It gave up, and `evaluate.on_error` is `fail`.
        """
        if self._job is None:
            return True
        self._actor.hurry.options(max_task_retries=0).remote()
        deadline_s = time.monotonic() + self._job.section.drain_timeout_s
        steps: list[int] = []
        while not is_over():
            try:
                steps = [commit.step for commit in self.waiting()]
                if not steps:
                    return True
            except OSError as error:  # a passing outage
                logger.warning("The evaluations could not be read, will try again: %s", error)
            if time.monotonic() > deadline_s:
                console.print(f"The evaluator did not finish in time; the next start goes on with steps {steps}.")
                return False
            why = self._gave_up()
            if why is not None:
                self._tell(why, console)
                return True
            time.sleep(_LOOK_S)
        try:
            return not self.waiting()
        except OSError:
            return False

    def _tell(self, why: DataError | str, console: SafeConsole) -> None:
        assert self._job is not None
        message = f"The evaluator gave up: {why}"
        if self._job.section.on_error == "fail":
            kind = DataError if isinstance(why, DataError) else EvaluationError
            raise kind(
                f"{message}\nAll checkpoints are there. Fix the cause, then start the run again, which evaluates them, or use ray-app"
                f" evaluate --run {self._job.run_root}. With evaluate.on_error: warn the run would count as finished."
            )
        console.print(redact(message))

    def _gave_up(self) -> DataError | str | None:
        """Why, or None while it works or is being started again."""
        try:
            return ray.get(self._actor.error.remote(), timeout=_LOOK_S)
        except ray.exceptions.ActorDiedError as error:  # it will not be started again
            return str(error)
        except (ray.exceptions.RayError, TimeoutError):
            return None
