"""What a run starts to be recorded for others: the tracker, the writer of TensorBoard's files, metrics, and the sampler
of the nodes.

The run's own evaluator, as the driver sees it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import ray

from ray_app.checkpoint.store import Commit
from ray_app.cluster.ray_private import ray_job
from ray_app.config.config import Config
from ray_app.config.import_paths import load_class
from ray_app.driver.finalize import close_orphan, newest_commit
from ray_app.errors import ConfigError, DataError, EvaluationError
from ray_app.evaluate.job import EvaluationJob, pending
from ray_app.preflight.changes import fill_defaults
from ray_app.runlog.redaction import redact
from ray_app.track.mlflow_client import DataSet
from ray_app.track.tensorboard import Board
from ray_app.track.tracker import Tracker, run_tags
from ray_app.train.job import Job
from ray_app.watch.node_sampler import NodeSampler
from ray_app.watch.observers import Observer, Observers
from ray_app.watch.prometheus import RunMetrics
from ray_app.watch.terminal import SafeConsole


def make_tracker(job: Job, console: SafeConsole) -> Tracker | None:
    """The tracker of a run, to be started; None if it is not tracked. On a cluster with a dashboard it says which
    MLflow run it is.
    """
    config, manifest = job.config, job.plan.manifest
    if not config.tracking.enabled:
        return None
    datasets = [DataSet("training", config.data.path, manifest.digest, manifest.num_rows)]
    if job.evaluation is not None:
        held_out = job.evaluation.manifest
        datasets.append(DataSet("evaluation", str(config.data.eval_path), held_out.digest, held_out.num_rows))
    tags, here = run_tags(config, manifest.digest), ray_job()
    if here is None or here["page"] is None:
        return Tracker(job.paths, fill_defaults(config)[0], tags, config.tracking.every_steps, datasets)
    tags["ray_app.ray_job"] = here["page"]
    return Tracker(job.paths, fill_defaults(config)[0], tags, config.tracking.every_steps, datasets, say=console.print)


def make_board(job: Job) -> Board | None:
    """What writes TensorBoard's event files, to be started; None if they are not wanted."""
    return Board(job.paths, job.config) if job.config.tracking.tensorboard else None


def make_metrics(job: Job) -> RunMetrics:
    """What Ray's metrics agent is told, where there is one."""
    return RunMetrics(job.paths.name)


def make_observers(job: Job) -> Observers:
    """Who is told what happens, to be entered."""
    return Observers(job, load_observers(job.config))


def load_observers(config: Config) -> list[Observer]:
    """Makes the observers that a configuration names.

    Raises:
        ConfigError: One cannot be made.
    """
    made = []
    for spec in config.observers or []:
        try:
            made.append(load_class(spec)(**spec.init_args))
        except Exception as error:
            raise ConfigError(
                f"observers has {spec.class_path!r} with init_args {spec.init_args}, which cannot be made: {error}."
            ) from error
        if not isinstance(made[-1], Observer):
            raise ConfigError(
                f"observers has {spec.class_path!r}, which is no subclass of ray_app.Observer. Derive it from that."
            )
    return made


def make_sampler(job: Job) -> NodeSampler | None:
    """The sampler of a run, to be entered; None if it is not wanted, or there is no cluster whose nodes it could look
    at.
    """
    tracking = job.config.tracking
    if not (tracking.enabled or tracking.tensorboard) or tracking.system_metrics_s is None or not ray.is_initialized():
        return None
    commit = newest_commit(job)
    return NodeSampler(job.paths, job.fence, tracking.system_metrics_s, commit.step if commit else 0)


logger = logging.getLogger(__name__)

_LOOK_S = 0.25


class EvaluatorClient:
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
            from ray_app.evaluate.evaluator import start_evaluator  # with it Ray Data, see `import_in_background`

            self._actor = start_evaluator(job, before, close_orphan if outlives else None)

    def __enter__(self) -> EvaluatorClient:
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
                f"{message}\nAll checkpoints are there. Fix the cause, then start the run again, which evaluates them,"
                f" or use ray-app"
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
