"""What a run starts to be recorded for others: the tracker, the writer of TensorBoard's files, metrics, and the sampler of the nodes."""

from __future__ import annotations

import ray

from ray_app.cluster.ray_job import ray_job
from ray_app.config.class_path import load_class
from ray_app.config.config import Config
from ray_app.errors import ConfigError
from ray_app.runs.outcome.summary import newest_commit
from ray_app.runs.preparing.code import completed
from ray_app.track.board import Board
from ray_app.track.client import DataSet
from ray_app.track.runs import Tracker, run_tags
from ray_app.train.job import Job
from ray_app.watch.metrics import RunMetrics
from ray_app.watch.observer import Observer, Observers
from ray_app.watch.safe_console import SafeConsole
from ray_app.watch.sampler import NodeSampler


def make_tracker(job: Job, console: SafeConsole) -> Tracker | None:
    """The tracker of a run, to be started; None if it is not tracked. On a cluster with a dashboard it says which MLflow run it is."""
    config, manifest = job.config, job.plan.manifest
    if not config.tracking.enabled:
        return None
    datasets = [DataSet("training", config.data.path, manifest.digest, manifest.num_rows)]
    if job.evaluation is not None:
        held_out = job.evaluation.manifest
        datasets.append(DataSet("evaluation", str(config.data.eval_path), held_out.digest, held_out.num_rows))
    tags, here = run_tags(config, manifest.digest), ray_job()
    if here is None or here["page"] is None:
        return Tracker(job.paths, completed(config)[0], tags, config.tracking.every_steps, datasets)
    tags["ray_app.ray_job"] = here["page"]
    return Tracker(job.paths, completed(config)[0], tags, config.tracking.every_steps, datasets, say=console.print)


def make_board(job: Job) -> Board | None:
    """What writes TensorBoard's event files, to be started; None if they are not wanted."""
    return Board(job.paths, job.config) if job.config.tracking.tensorboard else None


def make_metrics(job: Job) -> RunMetrics:
    """What Ray's metrics agent is told, where there is one."""
    return RunMetrics(job.paths.name)


def make_observers(job: Job) -> Observers:
    """Who is told what happens, to be entered."""
    return Observers(job, observers_of(job.config))


def observers_of(config: Config) -> list[Observer]:
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
            raise ConfigError(f"observers has {spec.class_path!r}, which is no subclass of ray_app.Observer. Derive it from that.")
    return made


def make_sampler(job: Job) -> NodeSampler | None:
    """The sampler of a run, to be entered; None if it is not wanted, or there is no cluster whose nodes it could look at."""
    tracking = job.config.tracking
    if not (tracking.enabled or tracking.tensorboard) or tracking.system_metrics_s is None or not ray.is_initialized():
        return None
    commit = newest_commit(job)
    return NodeSampler(job.paths, job.fence, tracking.system_metrics_s, commit.step if commit else 0)
