"""Whether a run's evaluations say that training is over, and which are its best, from the record alone."""

from __future__ import annotations

from collections.abc import Callable

from ray_app.config.sections import EvaluateSection
from ray_app.record.evaluations import Evaluation, evaluated_steps, ranked, read_scores
from ray_app.record.paths import RunPaths
from ray_app.record.progress.journal import read_events
from ray_app.record.verdict import Verdict, verdict

Planned = Callable[[int], list[int]]
"""The steps up to a given one at which the cadence plans a checkpoint that is evaluated."""


def early_stop(paths: RunPaths, section: EvaluateSection, metric: str, mode: str, planned: Planned) -> Verdict | None:
    """The verdict of `evaluate.patience`; None if training goes on.

    Args:
        paths: The run.
        section: Its patience, and what counts as an improvement.
        metric: What decides which evaluation is best.
        mode: `max` or `min`.
        planned: Which steps are evaluated.
    """
    if section.patience is None:
        return None
    there = evaluated_steps(paths)  # looked at first: one that is there by now, and is not among those that were read, is damaged for good
    evaluations = read_scores(paths)
    last = max((*there, *(e.step for e in evaluations)), default=0)
    never = read_events(paths, "evaluation_skipped", "write_failed")
    values: dict[int, float | None] = dict.fromkeys(there)
    values |= {e.details["step"]: None for e in never if "by" not in e.details}
    values |= {e.step: e.metrics.get(metric, float("nan")) for e in evaluations}
    return verdict(values, planned(last), section.patience, section.min_delta, mode)


def best_first(paths: RunPaths, section: EvaluateSection, metric: str, mode: str, planned: Planned) -> list[Evaluation]:
    """The evaluations that may name the run's result, from best to worst; only those on the data that was evaluated last.

    With patience, and a metric that is not a number in any of them, it is the first: the verdict names it, so it has to be kept.

    Args:
        paths: The run.
        section: See `early_stop`.
        metric: See `early_stop`.
        mode: See `early_stop`.
        planned: See `early_stop`.
    """
    evaluations = read_scores(paths)
    newest = max(evaluations, key=lambda e: e.time_s, default=None)
    evaluations = [e for e in evaluations if newest is not None and e.data_digest == newest.data_digest]
    if section.patience is not None:
        last = max((e.step for e in evaluations), default=0)
        found = early_stop(paths, section, metric, mode, planned)
        counts = set(planned(found.stop_step if found else last))
        evaluations = [e for e in evaluations if e.step in counts]
    found_best = ranked(evaluations, metric, mode)
    if not found_best and section.patience is not None:  # the step that `verdict` names: of equals the earlier one
        return sorted((e for e in evaluations if metric in e.metrics), key=lambda e: e.step)[:1]
    return found_best
