"""Whether a run's evaluations say that training is over."""

from __future__ import annotations

from ray_app.record.evaluations import Evaluation, ranked, read_evaluations
from ray_app.record.journal import read_events
from ray_app.record.verdict import Verdict, verdict
from ray_app.train.job import Job


def early_stop(job: Job) -> Verdict | None:
    """The verdict of `evaluate.patience`, from the run's record alone; None if training goes on."""
    section = job.config.evaluate
    if section.patience is None:
        return None
    evaluations = read_evaluations(job.paths)
    last = max((e.step for e in evaluations), default=0)
    never = read_events(job.paths, "evaluation_skipped", "write_failed")
    values: dict[int, float | None] = {e.details["step"]: None for e in never if "by" not in e.details}
    values |= {e.step: e.metrics.get(job.best_metric, float("nan")) for e in evaluations}
    return verdict(values, job.planned_evaluations(last), section.patience, section.min_delta, job.best_mode)


def best_first(job: Job) -> list[Evaluation]:
    """The evaluations that may name the run's result, from best to worst; only those on the data that was evaluated last."""
    evaluations = read_evaluations(job.paths)
    newest = max(evaluations, key=lambda e: e.time_s, default=None)
    evaluations = [e for e in evaluations if newest is not None and e.data_digest == newest.data_digest]
    if job.config.evaluate.patience is not None:
        last = max((e.step for e in evaluations), default=0)
        found = early_stop(job)
        planned = set(job.planned_evaluations(found.stop_step if found else last))
        evaluations = [e for e in evaluations if e.step in planned]
    return ranked(evaluations, job.best_metric, job.best_mode)
