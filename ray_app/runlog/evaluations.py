"""The evaluations of a run: one file per evaluator and step, written once. The run's own evaluator has no name.

Early stopping as a pure function of the evaluations of planned checkpoints in the order of their steps.

When an evaluation came, and how far training had run ahead by then, makes no difference: the same evaluations name the
same step.

Whether a run's evaluations say that training is over, and which are its best, from the record alone.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from ray_app.config.sections import EvaluateSection
from ray_app.runlog.journal import read_events
from ray_app.runlog.paths import RunPaths, add_version, from_known_fields
from ray_app.storage.files import Location, list_files, list_tree, put_json, read_all, restore_nan
from ray_app.storage.object_stores import S3Path

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """What an evaluator found about one checkpoint.

    Args:
        step: Finished steps of the checkpoint.
        epoch: Its epoch.
        params_digest: Digest of the parameters that were evaluated.
        metrics: Value by name.
        rows: Rows evaluated.
        duration_s: Seconds it took.
        time_s: When it was done, seconds since 1970 (UTC).
        data_digest: Digest of the evaluation data's manifest.
        behind: Checkpoints that were waiting when it was done.
        lag_s: Seconds from the commit of the checkpoint until then.
        tables: Metrics that are lists, one number per class, or matrices.
        classes: Names of the classes, in the order of the tables.
        examples: Some rows that were predicted wrong, the surest ones first.
    """

    step: int
    epoch: int
    params_digest: str
    metrics: dict[str, float]
    rows: int
    duration_s: float
    time_s: float
    data_digest: str = ""
    behind: int = 0
    lag_s: float = 0.0
    tables: dict[str, list[Any]] = field(default_factory=dict)
    classes: list[str] = field(default_factory=list)
    examples: list[dict[str, Any]] = field(default_factory=list)


def put_evaluation(paths: RunPaths, evaluation: Evaluation, name: str | None = None) -> bool:
    """Records an evaluation of the evaluator `name`; returns False if the step had one already, which then stays."""
    return put_json(paths.evaluation(evaluation.step, name), add_version(asdict(evaluation)), if_absent=True)


def read_evaluations(paths: RunPaths, name: str | None = None) -> list[Evaluation]:
    """The evaluations of one evaluator by step, with their tables and examples. What is damaged is left out, with a
    warning.

    Raises:
        OSError: The storage does not answer.
    """
    places = [place for file, place in list_tree(paths.evaluations_of(name)).items() if _is_evaluation(file)]
    read = zip(places, read_all(places), strict=True)
    return [made for place, data in read if (made := _parse_evaluation(place, data)) is not None]


def read_scores(paths: RunPaths, name: str | None = None) -> list[Evaluation]:
    """`read_evaluations` without tables and examples. Each file is read once in a process, for those who look again and
    again.

    Raises:
        OSError: The storage does not answer.
    """
    folder = paths.evaluations_of(name)
    places = [place for file, place in list_tree(folder).items() if _is_evaluation(file)]
    keys = [(str(place), _version(place)) for place in places]
    known = _scores.get(str(folder), {})
    found = {key: known[key] for key in keys if key in known}
    new = [(key, place) for key, place in zip(keys, places, strict=True) if key not in found]
    for (key, place), data in zip(new, read_all(place for _, place in new), strict=True):
        made = _parse_evaluation(place, data)
        found[key] = replace(made, tables={}, classes=[], examples=[]) if made is not None else None
    with _lock:
        _scores.pop(str(folder), None)
        _scores[str(folder)] = found
        while len(_scores) > _MOST_FOLDERS:
            del _scores[next(iter(_scores))]
    return [made for key in keys if (made := found[key]) is not None]


_MOST_FOLDERS = 16
_scores: dict[str, dict[tuple[str, str], Evaluation | None]] = {}
"""What was read of the folders that were looked at last, by file and version of it: a run's folder may be removed and
made again.
"""
_lock = threading.Lock()


def _version(place: Location) -> str:
    if isinstance(place, S3Path):
        return str(place.etag)
    stat = place.stat()
    return f"{stat.st_ino} {stat.st_size} {stat.st_mtime_ns}"


def _parse_evaluation(place: Location, data: bytes) -> Evaluation | None:
    try:
        made = from_known_fields(Evaluation, json.loads(data))
        return replace(made, metrics=restore_nan(made.metrics), tables=restore_nan(made.tables))
    except (ValueError, TypeError) as error:
        logger.warning("%s is left out, it is damaged or of another version: %s", place, error)
        return None


def evaluated_steps(paths: RunPaths, name: str | None = None) -> set[int]:
    """The steps that have an evaluation of one evaluator, without reading them."""
    found = filter(_is_evaluation, list_files(paths.evaluations_of(name)))
    return {int(file.removeprefix("step-").removesuffix(".json")) for file in found}


def evaluator_names(paths: RunPaths) -> list[str]:
    """The evaluators beside the run's own that have evaluated something, sorted."""
    return sorted(
        {place.partition("/")[0] for place in list_tree(paths.evaluators) if _is_evaluation(place.partition("/")[2])}
    )


def _is_evaluation(file: str) -> bool:
    return file.startswith("step-") and file.endswith(".json")


def rank_evaluations(evaluations: list[Evaluation], metric: str, mode: Literal["max", "min"] | str) -> list[Evaluation]:
    """Evaluations from best to worst by a metric; of equals the earlier step is better. NaN is left out."""
    usable = [e for e in evaluations if e.metrics.get(metric) is not None and e.metrics[metric] == e.metrics[metric]]
    return sorted(usable, key=lambda e: (-e.metrics[metric] if mode == "max" else e.metrics[metric], e.step))


@dataclass(frozen=True)
class Verdict:
    """Training is over.

    Args:
        stop_step: The planned checkpoint at which patience ran out; what came after it does not count.
        best_step: The best planned checkpoint up to there: the result of the run. Of equals the earlier one.
    """

    stop_step: int
    best_step: int


def check_patience(
    values: Mapping[int, float | None], planned: Iterable[int], patience: int, min_delta: float, mode: str
) -> Verdict | None:
    """Looks whether patience has run out.

    Args:
        values: The metric by step; None for a checkpoint that can never be evaluated, which does not count.
        planned: Steps of the planned checkpoints in order; looked at up to the first one that is not in `values`.
        patience: Planned checkpoints in a row without an improvement after which it has.
        min_delta: An improvement is more than this.
        mode: Whether more (`max`) or less (`min`) is better. NaN is never an improvement.
    """
    sign = -1.0 if mode == "min" else 1.0
    best_step, best, bar, waited = 0, -math.inf, -math.inf, 0
    for step in planned:
        if step not in values:
            return None
        value = values[step]
        if value is None:
            continue
        signed = -math.inf if math.isnan(value) else sign * value
        if not best_step or signed > best:
            best_step, best = step, signed
        is_better = signed > bar + min_delta
        bar, waited = (signed, 0) if is_better else (bar, waited + 1)
        if waited == patience:
            return Verdict(step, best_step)
    return None


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
    there = evaluated_steps(
        paths
    )  # looked at first: one that is there by now, and is not among those that were read, is damaged for good
    evaluations = read_scores(paths)
    last = max((*there, *(e.step for e in evaluations)), default=0)
    never = read_events(paths, "evaluation_skipped", "write_failed")
    values: dict[int, float | None] = dict.fromkeys(there)
    values |= {e.details["step"]: None for e in never if "by" not in e.details}
    values |= {e.step: e.metrics.get(metric, float("nan")) for e in evaluations}
    return check_patience(values, planned(last), section.patience, section.min_delta, mode)


def rank_candidates(
    paths: RunPaths, section: EvaluateSection, metric: str, mode: str, planned: Planned
) -> list[Evaluation]:
    """The evaluations that may name the run's result, from best to worst; only those on the data that was evaluated
    last.

    With patience, and a metric that is not a number in any of them, it is the first: the verdict names it, so it has to
    be kept.

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
    found_best = rank_evaluations(evaluations, metric, mode)
    if not found_best and section.patience is not None:  # the step that `verdict` names: of equals the earlier one
        return sorted((e for e in evaluations if metric in e.metrics), key=lambda e: e.step)[:1]
    return found_best
