"""The end of a run: `summary.json`, the report, and closing runs without a driver.

`summarize` computes `summary.json` from the run directory alone. `close_orphan` records the end of a run if its driver
did not, in the run directory, in `summary.json` and in MLflow. Any process may call it. The lease admits one process at
a time, and only after the driver has ended.
"""

from __future__ import annotations

import logging
import os
import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import numpy as np

from ray_app.checkpoint.store import CheckpointStore, Commit
from ray_app.config.config import Config, default_tracking_uri, digest
from ray_app.errors import ConfigError
from ray_app.plan.order import Classes
from ray_app.preflight.changes import read_stored_code
from ray_app.preflight.inputs import make_plan, make_task
from ray_app.report.facts import Facts, read_facts
from ray_app.report.html import write_report
from ray_app.runlog.evaluations import evaluated_steps, read_scores
from ray_app.runlog.history import (
    column,
    count,
    goodput,
    means,
    read_steps,
    recoveries,
    restarts,
    start,
    world_sizes,
)
from ray_app.runlog.journal import Event, StepRecord, newest_detail, put_event, read_events
from ray_app.runlog.lease import acquire_lease, is_released, newest_fence
from ray_app.runlog.paths import RunPaths
from ray_app.runlog.redaction import HIDDEN, redact
from ray_app.runlog.stored_config import read_config, read_manifest
from ray_app.storage.files import list_files, put_json, read_json, replace_nan, to_location
from ray_app.task.base import Task
from ray_app.track.mlflow_client import DataSet, OpenRun
from ray_app.track.tracker import Status as MlflowStatus
from ray_app.track.tracker import Tracker, check_available, make_run_tags
from ray_app.train.job import Job

logger = logging.getLogger(__name__)

_TRACKING_TIMEOUT_S = 20.0
RunStatus = Literal["finished", "stopped_early", "interrupted", "failed"]


def summarize(job: Job, status: RunStatus) -> dict[str, Any]:
    """Makes the content of `summary.json`, a public interface; see docs/reference/api.md for its fields."""
    stop, newest = job.early_stop(), newest_commit(job)
    last_step = stop.stop_step if stop else newest.step if newest else 0
    course = read_steps(job.paths, last_step)
    records, events = course.records, read_events(job.paths)
    evaluations = [e for e in read_scores(job.paths) if e.step <= last_step]
    best = next(iter(job.best_first()), None)
    digests = (c.params_digest for c in CheckpointStore(job.paths).commits() if stop and c.step == stop.best_step)
    newest_events = {event.kind: event.details for event in events}
    skipped = {e.details["step"] for e in events if e.kind == "evaluation_skipped" and "by" not in e.details}
    summary = {
        "status": status,
        "run_name": job.paths.name,
        "mlflow_run_id": (read_json(job.paths.tracking) or {}).get("run_id"),
        "ray_job": newest_detail(events, "ray_job"),
        "ended_s": events[-1].time_s if events else None,
        "epochs": last_step // job.steps_per_epoch,
        "steps": last_step,
        "rows": sum(course.rows),
        "rows_by_logical_worker": course.rows,
        "bad_rows": {"skipped": course.skipped, "distinct": len(list_files(job.paths.bad_rows))},
        "logical_workers": job.plan.logical_workers,
        "world_sizes": world_sizes(records),
        "restarts": restarts(events),
        "redone_steps": len(course.repeated),
        "recovery_s": recoveries(events, course.in_time),
        "goodput": goodput(records, course.repeated),
        "params_digest": next(digests, None) if stop else newest.params_digest if newest else None,
        "metrics": evaluations[-1].metrics if evaluations else {},
        "constant": newest_events.get("started", {}).get("constant", {}),
        "training": means(records[-((last_step - 1) % job.steps_per_epoch + 1) :]) if records else {},
        "best": best and {"step": best.step, "metric": job.best_metric, "value": best.metrics[job.best_metric]},
        "stopped_early": {"step": stop.stop_step, "best_step": stop.best_step} if stop else None,
        "evaluation": {
            "done": len(evaluations),
            "skipped": len(skipped),
            "max_pending": max((e.behind for e in evaluations), default=0),
            "lag_s": round(max((e.lag_s for e in evaluations), default=0.0), 3),
        },
        "checkpoints": {
            "committed": len({(e.fence, e.details["step"]) for e in events if e.kind == "checkpointed"}),
            "fallbacks": count(events, "fallback"),
            "failed_writes": count(events, "write_failed"),
        },
        "sdc_checks": {"shares": course.recomputed, "corrupt_ranks": count(events, "sdc_detected")},
        "start_s": start(events, course.in_time),
        "timing": _timing(records, events),
        "parameter_servers": newest_events.get("partitioned", {}).get("servers"),
        "model": newest_events.get("registered"),
        "branch": newest_events.get("branched") if job.config.run.branch_from is not None else None,
    }
    return replace_nan(summary)


def newest_commit(job: Job) -> Commit | None:
    """Returns the newest checkpoint that is not marked bad; None if there is none."""
    return next(reversed(CheckpointStore(job.paths).commits()), None)


def _timing(records: Sequence[StepRecord], events: list[Event]) -> dict[str, float | None]:
    # The time of `driver_lost` is when the loss was noticed, which may be days later.
    events = [e for e in events if e.kind != "driver_lost"]
    started = [e.time_s for e in events if e.kind == "started"]
    stalls = [s for e in events if e.kind == "worker_exit" for s in e.details["stalls_ms"]]
    step_ms, wait_ms = column(records, "step_ms"), column(records, "data_wait_ms")
    total_ms = float(step_ms.sum())
    return {
        "wall_s": round(events[-1].time_s - started[0], 3) if started else None,
        "startup_s": round(records[0].time_s - started[0], 3) if started and records else None,
        "step_ms": round(float(np.median(step_ms)), 4) if records else None,
        "data_wait_fraction": round(float(wait_ms.sum()) / total_ms, 4) if total_ms else None,
        "checkpoint_stall_ms": round(median(stalls), 3) if stalls else None,
    }


_STATUS_BY_EVENT: dict[str, RunStatus] = {
    "finished": "finished",
    "stopped_early": "stopped_early",
    "interrupted": "interrupted",
    "run_failed": "failed",
}
"""The status of a run by the kind of the event that records its end."""


def to_mlflow_status(status: RunStatus) -> MlflowStatus:
    """Returns MLflow's name of a run's status."""
    unfinished: dict[str, Literal["KILLED", "FAILED"]] = {"interrupted": "KILLED", "failed": "FAILED"}
    return unfinished.get(status, "FINISHED")


def close_orphan(root: str) -> bool:
    """Records the end of a run if its driver ended without doing so, or while it did; returns whether it did.

    It blocks for as long as the lease of a driver on another machine must be watched (half a minute), and for MLflow at
    most 20 s. A start at the same moment waits until it has returned. It has an effect once for each lost driver, and
    again after later evaluations. `send_to_mlflow` sends what MLflow does not take now.

    Raises:
        RunHeldError: The driver lives, or another process closes the run at this moment.
        ConfigError: The run's task cannot be made here.
        OSError: The storage does not answer.
    """
    paths = RunPaths(to_location(root))
    before = newest_fence(paths)
    start = _newest_start(paths)
    if start is None or (start.status is not None and is_released(paths) and not _lacks_evaluations(paths)):
        return False
    with acquire_lease(paths, closing=True, waits=False) as lease:
        if lease.fence != before + 1:
            return False
        job = stored_job(paths)
        status = finalize_run(job, start)
        logger.warning("The driver of %s has ended; the run is closed as %s.", paths.name, status)
        if _is_tracked(job.config):
            make_late_tracker(job, job.config).close(to_mlflow_status(status), _TRACKING_TIMEOUT_S)
            put_json(paths.summary, summarize(job, status))
        return True


@dataclass(frozen=True)
class NewestStart:
    """The number of the newest start of a run, and how it ended; None if that is not recorded."""

    fence: int
    status: RunStatus | None


def _newest_start(paths: RunPaths) -> NewestStart | None:
    """Returns the newest start; None if the run was never started."""
    events = read_events(paths, "started", "driver_lost", *_STATUS_BY_EVENT)
    fence = max((event.fence for event in events if event.kind == "started"), default=None)
    if fence is None:
        return None
    ends = [event for event in events if event.kind != "started" and event.fence == fence]
    return NewestStart(fence, _STATUS_BY_EVENT.get(ends[-1].kind) or ends[-1].details["status"] if ends else None)


def newest_start(paths: RunPaths) -> NewestStart:
    """Returns the newest start of a run; raises `ConfigError` if the directory has no run, or one never started."""
    start = _newest_start(paths) if paths.config.exists() else None
    if start is None:
        raise ConfigError(
            f"{paths.root} is not the directory of a started run: config.yaml or the event of a start is missing. Name"
            " the directory of a run, <run.storage_path>/<run.name>."
        )
    return start


def stored_job(paths: RunPaths, config: Config | None = None) -> Job:
    """Returns the job of a run from its directory alone, which cannot be trained, as its task is not prepared.

    Args:
        config: Its configuration, if it was read already, and compared with a trusted one.

    Raises:
        ConfigError: It is not a run of this version, or its task cannot be made here.
    """
    config = config or read_config(paths)
    task = make_stored_task(paths, config)
    stored = read_json(paths.classes)
    classes = Classes.of_totals(stored["rows"]) if stored is not None else None
    plan = make_plan(config, read_manifest(paths), classes)
    metric, mode = config.evaluate.metric or task.best_metric, config.evaluate.mode or task.best_mode
    digests = digest(config, plan.manifest.digest)
    return Job(config, digests, task, plan, "", {}, str(paths.root), 0, metric, mode, is_intervened=True)


def make_stored_task(paths: RunPaths, config: Config) -> Task:
    """Makes the configured task of a run; if its code cannot be imported here, the error says where it was."""
    try:
        return make_task(config)
    except ConfigError as error:
        code = read_stored_code(paths) if isinstance(error.__cause__, ImportError) else None
        if code is None or not code.folders:
            raise
        path = os.pathsep.join(code.folders)
        raise ConfigError(
            f"{error} The code of the run was in {path} when it started: go there, or set PYTHONPATH={path}."
        ) from error


def finalize_run(job: Job, start: NewestStart) -> RunStatus:
    """Writes `summary.json` of a run without a driver if it is missing or outdated, and `driver_lost` if its end is.

    It returns how the run ended: `finished` also if only the commit of the last planned step is recorded.
    """
    status = start.status
    if status is None:
        commit = newest_commit(job)
        step = commit.step if commit else 0
        status = "stopped_early" if job.early_stop() else "finished" if step >= job.total_steps else "interrupted"
        noticed_by = f"process {os.getpid()} on {platform.node()}"
        put_event(job.paths, "driver_lost", start.fence, status=status, step=step, noticed_by=noticed_by)
    stored_status = (read_json(job.paths.summary) or {}).get("status")
    if start.status is None or stored_status != status or _lacks_evaluations(job.paths):
        put_json(job.paths.summary, summarize(job, status))
    return status


def _lacks_evaluations(paths: RunPaths) -> bool:
    """Returns whether `summary.json` does not exist, or was written before the newest evaluations."""
    summary = read_json(paths.summary)
    if summary is None:
        return True
    return sum(step <= summary["steps"] for step in evaluated_steps(paths)) > summary["evaluation"]["done"]


def make_late_tracker(job: Job, config: Config, open_run: OpenRun = OpenRun()) -> Tracker:
    """Returns a tracker for a run that has ended, with the address of MLflow in a configuration.

    If it is that of the run, the address that the last driver used goes first. `open_run` is the MLflow run in which a
    new one is recorded.
    """
    manifest = job.plan.manifest
    uri = (read_json(job.paths.tracking) or {}).get("uri")
    if config == job.config and uri and HIDDEN not in uri and uri != redact(default_tracking_uri(config)):
        config = config.replace(tracking__uri=uri)
    data = DataSet("training", ", ".join(config.data.sources), manifest.digest, manifest.num_rows)
    tags, every_steps = make_run_tags(job.paths, config, manifest.digest), config.tracking.every_steps
    return Tracker(job.paths, config, tags, every_steps, [data], is_over=True, open_run=open_run)


def _is_tracked(config: Config) -> bool:
    """Returns whether the run is tracked and MLflow can be used here; warns if it cannot."""
    try:
        check_available(config)
    except ConfigError as error:
        logger.warning("The run is not recorded in MLflow: %s", error)
        return False
    return config.tracking.enabled


def report_end(paths: RunPaths) -> Facts | None:
    """Writes the report of a run that has ended; returns its facts, or after a warning None."""
    facts = None
    try:
        facts = read_facts(paths)
        write_report(paths, facts)
    except Exception as error:
        command = shlex.join(["ray-app", "report", "--run", str(paths.root)])
        logger.warning("The report could not be written: %s: %s; %s tries again.", type(error).__name__, error, command)
    return facts
