"""`summary.json`: what came of a run, computed from its own record alone."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any, Literal

from ray_app.checkpoint.commit import Commit
from ray_app.checkpoint.store import CheckpointStore
from ray_app.record.evaluations import read_scores
from ray_app.record.files import names, read_json, without_nan
from ray_app.record.progress.history import count, goodput, means, recoveries, restarts, start, world_sizes
from ray_app.record.progress.journal import Event, newest_detail, read_events
from ray_app.record.progress.segments import StepRecord
from ray_app.record.progress.steps import read_steps
from ray_app.train.job import Job

Status = Literal["finished", "stopped_early", "interrupted", "failed"]


def summarize(job: Job, status: Status) -> dict[str, Any]:
    """Makes the content of `summary.json`, a public interface; see docs/architecture.md for its fields."""
    stop = job.early_stop()
    newest = newest_commit(job)
    last_step = stop.stop_step if stop else newest.step if newest else 0
    course = read_steps(job.paths, last_step)
    records = course.records
    events = read_events(job.paths)
    evaluations = [e for e in read_scores(job.paths) if e.step <= last_step]
    best = job.best_first()[:1]
    tracking = read_json(job.paths.tracking) or {}
    found = {
        "status": status,
        "run_name": job.paths.name,
        "mlflow_run_id": tracking.get("run_id"),
        "ray_job": newest_detail(events, "ray_job"),
        "ended_s": events[-1].time_s if events else None,
        "epochs": last_step // job.steps_per_epoch,
        "steps": last_step,
        "rows": sum(course.rows),
        "rows_by_logical_worker": course.rows,
        "bad_rows": {"skipped": course.skipped, "distinct": len(names(job.paths.bad_rows))},
        "logical_workers": job.plan.logical_workers,
        "world_sizes": world_sizes(records),
        "restarts": restarts(events),
        "redone_steps": len(course.repeated),
        "recovery_s": recoveries(events, course.in_time),
        "goodput": goodput(records, course.repeated),
        "params_digest": _digest_at(job, stop.best_step) if stop else newest.params_digest if newest else None,
        "metrics": evaluations[-1].metrics if evaluations else {},
        "training": means(records[-((last_step - 1) % job.steps_per_epoch + 1) :]) if records else {},
        "best": {"step": best[0].step, "metric": job.best_metric, "value": best[0].metrics[job.best_metric]} if best else None,
        "stopped_early": {"step": stop.stop_step, "best_step": stop.best_step} if stop else None,
        "evaluation": {
            "done": len(evaluations),
            "skipped": len({e.details["step"] for e in events if e.kind == "evaluation_skipped" and "by" not in e.details}),
            "most_behind": max((e.behind for e in evaluations), default=0),
            "lag_s": round(max((e.lag_s for e in evaluations), default=0.0), 3),
        },
        "checkpoints": {
            "committed": len({(e.fence, e.details["step"]) for e in events if e.kind == "checkpointed"}),
            "fallbacks": count(events, "fallback"),
            "failed_writes": count(events, "write_failed"),
        },
        "replays": {"shares": course.replayed, "wrong": count(events, "lied")},
        "start_s": start(events, records),
        "timing": _timing(records, events),
        "parameter_servers": next((event.details["servers"] for event in reversed(events) if event.kind == "partitioned"), None),
        "model": next((event.details for event in reversed(events) if event.kind == "registered"), None),
    }
    return without_nan(found)


def _digest_at(job: Job, step: int) -> str | None:
    return next((c.params_digest for c in CheckpointStore(job.paths).commits() if c.step == step), None)


def newest_commit(job: Job) -> Commit | None:
    """The newest checkpoint that is not marked bad."""
    commits = CheckpointStore(job.paths).commits()
    return commits[-1] if commits else None


def _timing(records: Sequence[StepRecord], events: list[Event]) -> dict[str, float | None]:
    events = [e for e in events if e.kind != "driver_lost"]  # that was when it was noticed
    started = [e.time_s for e in events if e.kind == "started"]
    stalls = [s for e in events if e.kind == "left" for s in e.details["stalls_ms"]]
    total_ms = sum(r.step_ms for r in records)
    return {
        "wall_s": round(events[-1].time_s - started[0], 3) if started else None,
        "startup_s": round(records[0].time_s - started[0], 3) if started and records else None,
        "step_ms": round(median(r.step_ms for r in records), 4) if records else None,
        "data_wait_fraction": round(sum(r.data_wait_ms for r in records) / total_ms, 4) if total_ms else None,
        "checkpoint_stall_ms": round(median(stalls), 3) if stalls else None,
    }
