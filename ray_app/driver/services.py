"""The services that a run starts beside training: tracker, observers, the evaluator with its client, ..."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import ray

from ray_app.checkpoint.store import Commit
from ray_app.cluster.ray_private import ray_job
from ray_app.config.config import Config
from ray_app.config.import_paths import load_class
from ray_app.driver.finalize import close_orphan
from ray_app.errors import ConfigError, DataError, EvaluationError
from ray_app.evaluate.job import EvaluationJob, pending_commits
from ray_app.preflight.changes import fill_defaults
from ray_app.track.mlflow_client import DataSet, OpenRun
from ray_app.track.tracker import Tracker, make_run_tags
from ray_app.train.job import Job
from ray_app.watch.metrics import RunMetrics
from ray_app.watch.observers import Observer
from ray_app.watch.terminal import SafeConsole

if TYPE_CHECKING:
    from ray_app.evaluate.evaluator import EvaluatorHandle

logger = logging.getLogger(__name__)

_POLL_S = 0.25
"""Seconds between two looks at the evaluator, and for which it has to answer."""
_DRAIN_TIMEOUT_S = 600.0
"""Seconds that the end of a run waits for the evaluator to finish pending checkpoints."""


def make_tracker(job: Job, console: SafeConsole, open_run: OpenRun) -> Tracker | None:
    """Returns the tracker of a run, which the caller starts; None if the run is not tracked.

    On a cluster with a dashboard it prints which MLflow run it is.
    """
    config, manifest = job.config, job.plan.manifest
    if not config.tracking.enabled:
        return None
    datasets = [DataSet("training", ", ".join(config.data.sources), manifest.digest, manifest.num_rows)]
    if job.eval_source is not None:
        evaluated = job.eval_source.manifest
        datasets.append(DataSet("evaluation", str(config.data.evaluation_path), evaluated.digest, evaluated.num_rows))
    tags, submission = make_run_tags(job.paths, config, manifest.digest), ray_job()
    has_page = submission is not None and submission["page"] is not None
    if submission is not None and has_page:
        tags["ray_app.ray_job"] = submission["page"]
    say = console.print if has_page else None
    config = fill_defaults(config)[0]
    return Tracker(job.paths, config, tags, config.tracking.every_steps, datasets, say=say, open_run=open_run)


def load_observers(config: Config) -> list[Observer]:
    """Makes the observers that a configuration names; raises `ConfigError` if one cannot be made."""
    observers = list[Observer]()
    for spec in config.observers or []:
        try:
            observer = load_class(spec)(**spec.init_args)
        except Exception as error:
            raise ConfigError(
                f"observers has {spec.class_path!r} with init_args {spec.init_args}, which cannot be created: {error}."
            ) from error
        if not isinstance(observer, Observer):
            raise ConfigError(
                f"observers has {spec.class_path!r}, which is not a subclass of ray_app.Observer. Derive it from that."
            )
        observers.append(observer)
    return observers


class EvaluatorClient:
    """Starts the evaluator, which ends with this context.

    Args:
        job: What it evaluates; None if there is no evaluator, and then nothing waits for one.
        is_cluster_shared: Whether the cluster outlives the driver, so that the evaluator may, too.
        before_evaluation: Called before each evaluation, for fault tests.
    """

    def __init__(
        self, job: EvaluationJob | None, is_cluster_shared: bool, before_evaluation: Callable[[Commit], None] | None
    ) -> None:
        self._job, self._metrics = job, RunMetrics(job.paths.name) if job is not None else None
        self._evaluator: EvaluatorHandle | None = None
        if job is not None:
            # The module imports Ray Data, which the driver imports while the cluster starts.
            from ray_app.evaluate.evaluator import start_evaluator

            self._evaluator = start_evaluator(job, before_evaluation, close_orphan if is_cluster_shared else None)

    def __enter__(self) -> EvaluatorClient:
        return self

    def __exit__(self, *_: object) -> None:
        if self._evaluator is not None:
            self._evaluator.end()

    def list_pending(self) -> list[Commit]:
        """Returns the checkpoints that wait for an evaluation; raises `OSError` if the storage does not answer."""
        if self._job is None or self._metrics is None:
            return []
        pending = pending_commits(self._job)
        self._metrics.set("evaluator_lag_seconds", max(0.0, time.time() - pending[0].time_s) if pending else 0.0)
        return pending

    def finish(self, is_over: Callable[[], bool], console: SafeConsole) -> bool:
        """Waits until the evaluator has caught up, at most `_DRAIN_TIMEOUT_S`, or until `is_over` says to stop.

        Returns:
            Whether the evaluations are complete: the next start would have none to catch up.

        Raises:
            DataError: The evaluator failed because of the data.
            EvaluationError: The evaluator failed for another reason.
        """
        if self._job is None or self._evaluator is None:
            return True
        deadline_s = time.monotonic() + _DRAIN_TIMEOUT_S
        steps: list[int] = []
        while not is_over():
            try:
                steps = [commit.step for commit in self.list_pending()]
                if not steps:
                    return True
            # The storage may fail for a while.
            except OSError as error:
                logger.warning("The evaluations could not be read, trying again: %s", error)
            if time.monotonic() > deadline_s:
                console.print(f"The evaluator did not finish in time; the next start evaluates steps {steps}.")
                return False
            try:
                failure = self._evaluator.failure(_POLL_S)
            # It restarts, or waits for capacity.
            except (ray.exceptions.RayError, TimeoutError):
                failure = None
            if failure is not None:
                error_class = DataError if isinstance(failure, DataError) else EvaluationError
                raise error_class(
                    f"The evaluator gave up: {failure}\nAll checkpoints are stored. Fix the cause, then start the run"
                    f" again to evaluate them, or use ray-app evaluate --run {self._job.run_root}."
                )
            time.sleep(_POLL_S)
        try:
            return not self.list_pending()
        except OSError:
            return False
