"""Runs whose driver is gone: what became of them is said by whoever notices, in the record, in `summary.json` and in MLflow.

The lease decides who may: it is free only if the driver has ended, and only one gets it.
"""

from __future__ import annotations

import logging
import os
import platform
from dataclasses import dataclass
from typing import Literal

from ray_app.config.config import Config, default_tracking_uri, digest
from ray_app.errors import ConfigError
from ray_app.plan.balance import Classes
from ray_app.record.ends import put_summary
from ray_app.record.evaluations import evaluated_steps
from ray_app.record.files import location, read_json
from ray_app.record.lease import acquire, is_released, newest_fence
from ray_app.record.paths import RunPaths
from ray_app.record.progress.journal import put_event, read_events
from ray_app.record.redact import HIDDEN, redact
from ray_app.record.stored_config import read_config, read_manifest
from ray_app.runs.outcome.summary import Status, newest_commit, summarize
from ray_app.runs.preparing.plan import make_plan
from ray_app.runs.preparing.prepare import make_task
from ray_app.track.client import DataSet
from ray_app.track.runs import Status as MlflowStatus
from ray_app.track.runs import Tracker, check_available, run_tags
from ray_app.train.job import Job

logger = logging.getLogger(__name__)

_TRACKING_S = 20.0
_ENDED: dict[str, Status] = {
    "finished": "finished",
    "stopped_early": "stopped_early",
    "interrupted": "interrupted",
    "gave_up": "failed",
}
"""How a run ended, by the event that says it."""


def mlflow_status(status: Status) -> MlflowStatus:
    """What MLflow calls it."""
    known: dict[str, Literal["KILLED", "FAILED"]] = {"interrupted": "KILLED", "failed": "FAILED"}
    return known.get(status, "FINISHED")


def close_orphan(root: str) -> bool:
    """Says what became of a run if its driver is gone without having said it, or was killed while it did.

    Blocks for as long as the lease of a driver on another machine must be watched (half a minute), and for MLflow at most 20 s. A start
    at the same moment waits until this has ended. Once for each lost driver, and again for evaluations that came after that: what MLflow
    does not get now, `replay` sends.

    Args:
        root: The run's directory, as a path or an S3 URI.

    Returns:
        Whether it was closed now; False if it has ended in order, or someone else closed it.

    Raises:
        RunHeldError: Its driver lives, or someone else closes it at this moment.
        ConfigError: The run's task cannot be made here.
        OSError: The storage does not answer.
    """
    paths = RunPaths(location(root))
    before = newest_fence(paths)
    start = _newest_start(paths)
    if start is None or (start.status is not None and is_released(paths) and not _lacks_evaluations(paths)):
        return False
    with acquire(paths, closing=True, waits=False) as lease:
        if lease.fence != before + 1:
            return False
        job = stored_job(paths)
        status = settle(job, start)
        logger.warning("The driver of %s is gone; the run is closed as %s.", paths.name, status)
        if _is_tracked(job.config):
            late_tracker(job, job.config).close(mlflow_status(status), _TRACKING_S)
            put_summary(paths, summarize(job, status))
        return True


@dataclass(frozen=True)
class NewestStart:
    """The newest start of a run.

    Args:
        fence: Its number.
        status: How it ended; None: it did not say.
    """

    fence: int
    status: Status | None


def _newest_start(paths: RunPaths) -> NewestStart | None:
    """The newest start; None if the run was never started."""
    events = read_events(paths, "started", "driver_lost", *_ENDED)
    fence = max((event.fence for event in events if event.kind == "started"), default=None)
    if fence is None:
        return None
    ends = [event for event in events if event.kind != "started" and event.fence == fence]
    return NewestStart(fence, _ENDED.get(ends[-1].kind) or ends[-1].details["status"] if ends else None)


def newest_start(paths: RunPaths) -> NewestStart:
    """The newest start of a run.

    Raises:
        ConfigError: The directory holds no run, or one that was never started.
    """
    start = _newest_start(paths) if paths.config.exists() else None
    if start is None:
        raise ConfigError(
            f"{paths.root} holds no run that was started: there is no config.yaml, or no event of a start. Name the directory of a run,"
            " <run.storage_path>/<run.name>."
        )
    return start


def stored_job(paths: RunPaths) -> Job:
    """The run as its directory tells it; the data need not be in reach, so the task is not prepared and no worker could use it.

    Raises:
        ConfigError: It is no run of this version, or its task cannot be made here.
    """
    config = read_config(paths)
    task = make_task(config)
    stored = read_json(paths.classes)
    classes = Classes.of_totals(stored["rows"]) if stored is not None else None
    plan = make_plan(config, read_manifest(paths), classes)
    metric, mode = config.evaluate.metric or task.best_metric, config.evaluate.mode or task.best_mode
    return Job(config, digest(config, plan.manifest.digest), task, plan, "", {}, str(paths.root), 0, metric, mode)


def settle(job: Job, start: NewestStart) -> Status:
    """Makes sure of `summary.json` of a run that nobody writes any more; records `driver_lost` if its driver did not say how it ended.

    Returns:
        How the run ended; `finished` also if the last planned step is committed and nothing was said.
    """
    status = start.status
    if status is None:
        commit = newest_commit(job)
        step = commit.step if commit else 0
        status = "stopped_early" if job.early_stop() else "finished" if step >= job.total_steps else "interrupted"
        noticed_by = f"process {os.getpid()} on {platform.node()}"
        put_event(job.paths, "driver_lost", start.fence, status=status, step=step, noticed_by=noticed_by)
    if start.status is None or (read_json(job.paths.summary) or {}).get("status") != status or _lacks_evaluations(job.paths):
        put_summary(job.paths, summarize(job, status))
    return status


def _lacks_evaluations(paths: RunPaths) -> bool:
    """Whether there are evaluations that `summary.json` does not know, or no summary."""
    summary = read_json(paths.summary)
    return summary is None or sum(step <= summary["steps"] for step in evaluated_steps(paths)) > summary["evaluation"]["done"]


def late_tracker(job: Job, config: Config) -> Tracker:
    """A tracker for a run that has ended.

    Args:
        job: The run.
        config: Says where MLflow is; without a URI of its own it is where the last driver found it.
    """
    manifest = job.plan.manifest
    uri = (read_json(job.paths.tracking) or {}).get("uri")
    if config == job.config and uri and HIDDEN not in uri and uri != redact(default_tracking_uri(config)):
        config = config.replace(tracking__uri=uri)
    data = DataSet("training", config.data.path, manifest.digest, manifest.num_rows)
    return Tracker(job.paths, config, run_tags(config, manifest.digest), config.tracking.every_steps, [data], is_over=True)


def _is_tracked(config: Config) -> bool:
    try:
        check_available(config)
    except ConfigError as error:
        logger.warning("MLflow is not told: %s", error)
        return False
    return config.tracking.enabled
